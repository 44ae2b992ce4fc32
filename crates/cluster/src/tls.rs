//! Certificates and keys of brains, agents and clients, from PEM files.
//!
//! A brain with a certificate speaks TLS only. With an authority it also asks every caller for a certificate of that
//! authority, beside the token. Without a certificate nothing is encrypted: that is for loopback and test networks.

use std::fs;
use std::path::{Path, PathBuf};

use service::error::Error;
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

/// Largest PEM file that is read.
const MAX_PEM_BYTES: u64 = 1 << 20;

/// Where certificates and keys are.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// The authority that signed the other side's certificate.
    pub authority: Option<PathBuf>,
    /// This side's certificate, with those between it and the authority.
    pub certificate: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
}

/// What to check when a brain that may speak TLS closes connections of a caller that does not.
pub const SPEAKS_TLS: &str = "if the brain speaks TLS, give --tls-ca, and --tls-cert and --tls-key if it asks for certificates";

/// What to check after a failure of TLS, by the words of rustls for it; `None` for other failures.
pub fn hint(cause: &str) -> Option<&'static str> {
    let known = [
        (
            "UnknownIssuer",
            "check that --tls-ca is the authority that signed the brain's certificate, the --tls-cert of `dquant brain`",
        ),
        (
            "not valid for name",
            "name the brain as its certificate does, or make one with this name or address in subjectAltName \
             (docs/cluster.md, TLS)",
        ),
        (
            "certificate expired",
            "make a new certificate for the brain, and check the clocks of both machines",
        ),
        ("certificate not valid yet", "check the clocks of both machines"),
        (
            "corrupt message",
            "the brain does not speak TLS: leave out --tls-ca, or start it with --tls-cert and --tls-key",
        ),
        (
            "alert: CertificateRequired",
            "the brain asks for a certificate: give --tls-cert and --tls-key, signed by the brain's --tls-ca",
        ),
        (
            "fatal alert",
            "the brain refuses the certificate in --tls-cert: was it signed by the brain's --tls-ca, and is it valid?",
        ),
        (
            "invalid peer certificate",
            "check the brain's certificate, the --tls-cert of `dquant brain`, against --tls-ca",
        ),
    ];
    known.iter().find(|(words, _)| cause.contains(words)).map(|(_, hint)| *hint)
}

/// What a failure below a call means. The alert with which a server of TLS refuses plain HTTP/2 looks like a frame of a
/// megabyte.
pub(crate) fn said_plainly(cause: String) -> String {
    match cause.ends_with("frame with invalid size") {
        true => "it does not answer in plain HTTP/2, as a brain with TLS does not".to_owned(),
        false => cause,
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let failed = |error: std::io::Error| {
        Error::because(path.display(), &error)
            .hint("--tls-ca, --tls-cert and --tls-key take PEM files that this user may read")
    };
    if fs::metadata(path).map_err(failed)?.len() > MAX_PEM_BYTES {
        return Err(Error::invalid(format!("{}: too large for a PEM file", path.display())));
    }
    fs::read(path).map_err(failed)
}

impl Files {
    fn identity(&self) -> Result<Option<Identity>, Error> {
        match (&self.certificate, &self.key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => {
                Ok(Some(Identity::from_pem(read(certificate)?, read(key)?)))
            }
            _ => {
                Err(Error::invalid("a certificate without its key, or a key without a certificate")
                    .hint("give both --tls-cert and --tls-key"))
            }
        }
    }

    fn authority(&self) -> Result<Option<Certificate>, Error> {
        let read = self.authority.as_deref().map(read).transpose()?;
        Ok(read.map(Certificate::from_pem))
    }

    /// What a server speaks; `None` without a certificate.
    ///
    /// # Errors
    /// When a file cannot be read, or an authority is named without a certificate.
    pub fn server(&self) -> Result<Option<ServerTlsConfig>, Error> {
        let (identity, authority) = (self.identity()?, self.authority()?);
        match (identity, authority) {
            (Some(identity), None) => Ok(Some(ServerTlsConfig::new().identity(identity))),
            (Some(identity), Some(authority)) => {
                Ok(Some(ServerTlsConfig::new().identity(identity).client_ca_root(authority)))
            }
            (None, None) => Ok(None),
            (None, Some(_)) => Err(Error::invalid("an authority without a certificate")
                .hint("a server needs --tls-cert and --tls-key; --tls-ca is for its callers")),
        }
    }

    /// What a client speaks; `None` without an authority.
    ///
    /// # Errors
    /// When a file cannot be read, or a certificate is named without an authority.
    pub fn client(&self) -> Result<Option<ClientTlsConfig>, Error> {
        let (identity, authority) = (self.identity()?, self.authority()?);
        match (identity, authority) {
            (None, None) => Ok(None),
            (identity, Some(authority)) => {
                let config = ClientTlsConfig::new().ca_certificate(authority);
                Ok(Some(match identity {
                    Some(identity) => config.identity(identity),
                    None => config,
                }))
            }
            (Some(_), None) => Err(Error::invalid("a certificate without an authority")
                .hint("give --tls-ca, the authority that signed the brains' certificates")),
        }
    }
}
