//! Addresses of daemons as people write them: `HOST[:PORT]`.

use std::net::Ipv6Addr;

use crate::error::Error;

/// `host[:port]` with the port filled in where there is none. An IPv6 address without brackets has
/// none: its last group is no port, even if it is a number.
pub fn with_port(host: &str, default_port: u16) -> String {
    if host.parse::<Ipv6Addr>().is_ok() {
        return format!("[{host}]:{default_port}");
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_filled_in_where_there_is_none() {
        for (host, whole) in [
            ("::1", "[::1]:7"),
            ("fd00::2", "[fd00::2]:7"),
            ("fd00::a", "[fd00::a]:7"),
            ("2001:db8::12:5", "[2001:db8::12:5]:7"),
            ("::ffff:10.0.0.5", "[::ffff:10.0.0.5]:7"),
            ("[::1]", "[::1]:7"),
            ("[::1]:5", "[::1]:5"),
            ("10.0.0.5", "10.0.0.5:7"),
            ("10.0.0.5:4790", "10.0.0.5:4790"),
            ("host", "host:7"),
            ("host:9", "host:9"),
        ] {
            assert_eq!(with_port(host, 7), whole);
            assert!(check_port(host).is_ok(), "{host}");
        }
        for host in ["host:70000", "[::1]:70000", "10.0.0.5:123456"] {
            assert!(check_port(host).is_err(), "{host}");
        }
    }
}
