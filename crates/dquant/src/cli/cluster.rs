//! What the commands of a cluster share: where its brains are, certificates, and the runtime of
//! short calls.

use std::path::PathBuf;

use clap::Args;
use cluster::client::{Brains, Client};
use service::error::Error;
use service::tls;

use super::daemons::TokenArgs;
use crate::exit::CliError;

/// Certificates and keys.
#[derive(Debug, Args)]
pub(super) struct TlsArgs {
    /// Authority that signed the other side's certificate, as PEM
    ///
    /// Agents and commands speak TLS if it is given; a brain asks all callers for certificates of it.
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,

    /// Certificate of this side, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// Key of that certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl TlsArgs {
    pub(super) fn files(&self) -> tls::Files {
        tls::Files {
            authority: self.tls_ca.clone(),
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
        }
    }
}

/// Where brains are, and what they want to see.
#[derive(Debug, Args)]
pub(super) struct BrainsArgs {
    /// All brains of the cluster
    ///
    /// The one that leads is found among them. The port is 4795 when none is given.
    #[arg(
        long = "brain",
        value_name = "HOST[:PORT],...",
        env = "DQUANT_BRAIN",
        value_delimiter = ',',
        default_value = "127.0.0.1"
    )]
    brains: Vec<String>,

    #[command(flatten)]
    token: TokenArgs,

    #[command(flatten)]
    tls: TlsArgs,
}

impl BrainsArgs {
    pub(super) fn brains(&self) -> Result<Brains, CliError> {
        Ok(Brains::new(&self.brains, &self.token.required()?, &self.tls.files())?)
    }

    /// The cluster's token, if one was given.
    pub(super) fn token(&self) -> Result<Option<String>, CliError> {
        self.token.given()
    }

    /// Makes calls to the leader.
    pub(super) fn call<R>(
        &self,
        calls: impl AsyncFnOnce(&mut Client) -> Result<R, Error>,
    ) -> Result<R, CliError> {
        let mut client = Client::new(self.brains()?)?;
        let runtime = service::runtime::current_thread()?;
        Ok(runtime.block_on(calls(&mut client))?)
    }
}
