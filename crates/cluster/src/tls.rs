//! What failures of TLS mean to callers of a brain, and what helps. Certificates and keys are read
//! in `service::tls`.

use service::tls::Failure;

/// What to check when a brain that may speak TLS closes connections of a caller that does not.
pub(crate) const SPEAKS_TLS: &str = "if the brain speaks TLS, give --tls-ca, and --tls-cert and --tls-key if it asks for certificates";

/// What to check after a failure of TLS.
pub(crate) fn hint(failure: Failure) -> &'static str {
    match failure {
        Failure::UnknownIssuer => {
            "check that --tls-ca is the authority that signed the brain's certificate, the --tls-cert of `dquant brain`"
        }
        Failure::WrongName => {
            "name the brain as its certificate does, or make one with this name or address in subjectAltName \
             (docs/cluster.md, TLS)"
        }
        Failure::Expired => {
            "make a new certificate for the brain, and check the clocks of both machines"
        }
        Failure::NotYetValid => "check the clocks of both machines",
        Failure::NoTls => {
            "the brain does not speak TLS: leave out --tls-ca, or start it with --tls-cert and --tls-key"
        }
        Failure::WantsCertificate => {
            "the brain asks for a certificate: give --tls-cert and --tls-key, signed by the brain's --tls-ca"
        }
        Failure::CertificateRefused => {
            "the brain refuses the certificate in --tls-cert: was it signed by the brain's --tls-ca, and is it valid?"
        }
        Failure::InvalidCertificate => {
            "check the brain's certificate, the --tls-cert of `dquant brain`, against --tls-ca"
        }
    }
}

/// What a failure below a call means. The alert with which a server of TLS refuses plain HTTP/2
/// looks like a frame of a megabyte.
pub(crate) fn said_plainly(cause: String) -> String {
    match cause.ends_with("frame with invalid size") {
        true => "it does not answer in plain HTTP/2, as a brain with TLS does not".to_owned(),
        false => cause,
    }
}
