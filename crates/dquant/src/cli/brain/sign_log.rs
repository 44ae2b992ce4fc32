//! `dquant brain sign-log`: signs the log of a cluster's brains.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use cluster::keys::Keys;
use cluster::store::etcd::EtcdStore;
use cluster::store::file::FileStore;
use cluster::store::{Before, SetupError, SignedLog};
use serde::Serialize;
use service::error::Error;

use super::super::daemons::{TokenArgs, read_token};
use super::super::{Console, Report};
use super::{EtcdArgs, StoreArgs};
use crate::exit::{CliError, Exit};

/// Sign the log of brains with the cluster's token
///
/// Brains believe only what is signed. This is for a log of a version that signed nothing, and for a
/// new token: with --old-token-file the log has to be signed with the old one. Stop all brains first.
/// What is there is signed as it is: sign a log without signatures only if nobody else could write it.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant brain sign-log --state brain.redb --token-file token
  dquant brain sign-log --etcd 10.0.0.1,10.0.0.2 --etcd-ca ca.pem --etcd-cert brain.pem --etcd-key brain.key \\
      --token-file new-token --old-token-file token    DQUANT_ETCD_USER has etcd's NAME:PASSWORD"
)]
pub(super) struct SignLog {
    #[command(flatten)]
    store: StoreArgs,

    #[command(flatten)]
    etcd: EtcdArgs,

    #[command(flatten)]
    token: TokenArgs,

    /// File with the token that the log was signed with
    #[arg(long, value_name = "PATH")]
    old_token_file: Option<PathBuf>,
}

impl SignLog {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let keys = Keys::of_token(&self.token.required()?);
        let old = self.old_token_file.as_deref().map(read_token).transpose()?;
        let old = old.map(|old| Keys::of_token(&old));
        let (store, signed) = match &self.store.state {
            Some(path) => {
                let signed = FileStore::sign_log(path, &keys, old.as_ref());
                (format!("file {}", path.display()), signed)
            }
            None => {
                let config = self.etcd.config(&self.store.etcd)?;
                let runtime = service::runtime::current_thread()?;
                let signed = runtime.block_on(EtcdStore::sign_log(&config, &keys, old.as_ref()));
                (format!("etcd {}", self.store.etcd.join(",")), signed)
            }
        };
        let SignedLog { before, snapshot_bytes, log_bytes } = signed.map_err(refusal)?;
        let before = match before {
            Before::Unsigned => "unsigned",
            Before::OldToken => "old token",
            Before::ThisToken => "this token",
        };
        console.report(&Signed { store, before, snapshot_bytes, log_bytes })?;
        Ok(Exit::Good)
    }
}

fn refusal(error: SetupError) -> Error {
    let hint = match error {
        SetupError::Unsigned { .. } => Some(
            "--old-token-file takes the token that the log was signed with; without it, begin a new log",
        ),
        SetupError::Busy { .. } => Some("agents keep their plans while no brain runs"),
        _ => None,
    };
    let error = Error::from_cause(error);
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// Reports what was signed.
#[derive(Debug, Serialize)]
struct Signed {
    store: String,
    /// How it was signed before.
    before: &'static str,
    snapshot_bytes: u64,
    log_bytes: u64,
}

impl Report for Signed {
    const SCHEMA: &'static str = "dquant.signed_log/1";
}

impl fmt::Display for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Signed { store, before, snapshot_bytes, log_bytes } = self;
        let before = match *before {
            "unsigned" => "it had no signatures",
            "old token" => "it was signed with the old token",
            _ => "it was signed with this token already",
        };
        write!(
            f,
            "the log in {store} is signed: a snapshot of {snapshot_bytes} bytes and {log_bytes} bytes behind it; {before}"
        )
    }
}
