//! Certificates and keys of servers and their callers, from PEM files; and what kind of failure TLS
//! reports.
//!
//! A server with a certificate speaks TLS only. With an authority it also asks every caller for a
//! certificate of that authority. What a failure means for the user of a daemon, and what is to be
//! done, its commands say.

use std::fs;
use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

use crate::error::Error;

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

/// Kinds of failures of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The server's certificate is of another authority.
    UnknownIssuer,
    /// It is for another name or address.
    WrongName,
    /// It is no longer valid.
    Expired,
    /// It is not yet valid.
    NotYetValid,
    /// The server does not speak TLS.
    NoTls,
    /// The server asks for a certificate.
    WantsCertificate,
    /// The server refuses the caller's certificate.
    CertificateRefused,
    /// Anything else about the server's certificate.
    InvalidCertificate,
}

impl Failure {
    /// The kind of a failure, by the words of rustls for it, which come as text through the
    /// libraries between; `None` for failures that are not of TLS.
    pub fn of(cause: &str) -> Option<Failure> {
        // From the special to the general.
        let known = [
            ("UnknownIssuer", Failure::UnknownIssuer),
            ("not valid for name", Failure::WrongName),
            ("certificate expired", Failure::Expired),
            ("certificate not valid yet", Failure::NotYetValid),
            ("corrupt message", Failure::NoTls),
            ("alert: CertificateRequired", Failure::WantsCertificate),
            ("fatal alert", Failure::CertificateRefused),
            ("invalid peer certificate", Failure::InvalidCertificate),
        ];
        known.iter().find(|(words, _)| cause.contains(words)).map(|(_, failure)| *failure)
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
                .hint("give --tls-ca, the authority that signed the server's certificate")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_known_by_the_words_of_rustls() {
        let known = [
            ("invalid peer certificate: UnknownIssuer", Failure::UnknownIssuer),
            ("invalid peer certificate: certificate expired: at", Failure::Expired),
            ("invalid peer certificate: BadEncoding", Failure::InvalidCertificate),
            ("received corrupt message of type InvalidContentType", Failure::NoTls),
            ("received fatal alert: CertificateRequired", Failure::WantsCertificate),
            ("received fatal alert: DecryptError", Failure::CertificateRefused),
        ];
        for (cause, failure) in known {
            assert_eq!(Failure::of(cause), Some(failure), "{cause}");
        }
        assert_eq!(Failure::of("connection refused"), None);
    }

    #[test]
    fn a_certificate_comes_with_its_key_and_an_authority_with_a_certificate() {
        let path = || Some(PathBuf::from("/nonexistent.pem"));
        let alone = Files { certificate: path(), ..Files::default() };
        let text = alone.server().expect_err("no key").to_line();
        assert!(text.contains("without its key") && text.contains("--tls-key"), "{text}");
        let missing = Files { authority: path(), ..Files::default() };
        let text = missing.client().expect_err("no file").to_line();
        assert!(text.contains("/nonexistent.pem") && text.contains("PEM files"), "{text}");
        assert!(matches!(Files::default().server(), Ok(None)));
        assert!(matches!(Files::default().client(), Ok(None)));
    }
}
