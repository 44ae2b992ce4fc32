//! Addresses of daemons as people write them: `HOST[:PORT]`.

use crate::error::Error;

/// `host[:port]` with the port filled in where there is none.
pub fn with_port(host: &str, default_port: u16) -> String {
    let bare_v6 = host.starts_with('[') && host.ends_with(']');
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_port && !bare_v6 { host.to_owned() } else { format!("{host}:{default_port}") }
}

/// Refuses `host:port` with a number that is no port.
pub fn check_port(host: &str) -> Result<(), Error> {
    let number = |port: &&str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = host.rsplit_once(':').map(|(_, port)| port).filter(number);
    // The last group of an IPv6 address without brackets has at most four digits.
    match port.filter(|port| port.len() > 4 && port.parse::<u16>().is_err()) {
        Some(port) => Err(Error::invalid(format!("{host}: {port} is no port"))
            .hint("HOST[:PORT] takes ports up to 65535")),
        None => Ok(()),
    }
}
