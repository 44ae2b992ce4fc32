//! A view from a brain's web server: one GET of HTTP/1.1 over TCP.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use cluster::view::View;
use cluster::web::WEB_PORT;

use crate::exit::CliError;

/// The largest view that is read: that of a cluster of 16,000 hosts has some 20 MiB.
pub(super) const MAX_BYTES: u64 = 256 << 20;

/// Bytes of the headers of a response.
const MAX_HEAD_BYTES: u64 = 64 << 10;

/// How long the server may be silent.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    /// Host and port, as the header `Host` has them.
    authority: String,
    /// The same with the port, for the resolver.
    address: String,
}

impl Url {
    /// Reads `http://HOST[:PORT]`, or `HOST[:PORT]`.
    ///
    /// # Errors
    /// When it is none of these.
    pub(super) fn parse(text: &str) -> Result<Url, CliError> {
        let refused = |why: &str, hint: &str| {
            Err(CliError::usage(format_args!("'{}': {why}", text.escape_debug())).hint(hint))
        };
        if text.starts_with("https://") {
            let hint = "connect through a tunnel: `ssh -L 4796:127.0.0.1:4796 BRAIN`";
            return refused("this command does not speak TLS", hint);
        }
        let bare = text.strip_prefix("http://").unwrap_or(text);
        let authority = bare.strip_suffix('/').unwrap_or(bare);
        let is_valid = |letter: char| letter.is_ascii_alphanumeric() || "-._:[]%".contains(letter);
        if authority.is_empty() || !authority.chars().all(is_valid) {
            return refused("this is no address of a server", "write it like http://10.0.0.5:4796");
        }
        let has_port = authority.rsplit_once(':').is_some_and(|(host, port)| {
            port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']'))
        });
        let address = if has_port { authority.into() } else { format!("{authority}:{WEB_PORT}") };
        Ok(Url { authority: authority.into(), address })
    }
}

/// The newest view of the brain at `url`.
///
/// # Errors
/// When the server does not answer, or refuses.
pub(super) fn view(url: &Url, token: Option<&str>) -> Result<View, CliError> {
    if token.is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
        return Err(CliError::usage("the token has characters that no token has"));
    }
    let (status, body) = get(url, token).map_err(|error| {
        let message = format_args!("the web server at {}: {error}", url.address);
        let hint = "is it the address of the page, and does a brain run there?";
        CliError::peer_unreachable(message).caused_by(&error).hint(hint)
    })?;
    match status {
        200 => parse(&body, &url.address),
        401 => Err(CliError::usage(format_args!("the brain at {} refuses the token", url.address))
            .hint(
                "give --token-file the file that the brain was started with, or set DQUANT_TOKEN",
            )),
        429 => Err(CliError::usage(format_args!(
            "the brain at {} gets too many requests from here",
            url.address
        ))
        .hint("use a longer --interval")),
        status => Err(CliError::usage(format_args!(
            "the server at {} answers with status {status}",
            url.address
        ))
        .hint("is it the address of the page?")),
    }
}

/// Reads a view.
///
/// # Errors
/// When it is none.
pub(super) fn parse(json: &[u8], origin: &str) -> Result<View, CliError> {
    let view: View = serde_json::from_slice(json).map_err(|error| {
        CliError::usage(format_args!("{origin}: this is no view of a cluster: {error}"))
            .hint("is it of this version, and whole?")
    })?;
    Ok(view.cleaned())
}

fn get(url: &Url, token: Option<&str>) -> std::io::Result<(u16, Vec<u8>)> {
    let mut stream = connect(&url.address)?;
    let token = token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
    let host = &url.authority;
    let request =
        format!("GET /api/view HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{token}\r\n");
    stream.write_all(request.as_bytes())?;
    response(BufReader::new(stream))
}

fn connect(address: &str) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(stream) => {
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Status and body of a response whose length is given.
fn response(stream: impl BufRead) -> std::io::Result<(u16, Vec<u8>)> {
    let invalid =
        |why: &str| std::io::Error::new(ErrorKind::InvalidData, format!("this is not HTTP: {why}"));
    let mut stream = stream.take(MAX_HEAD_BYTES);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let status = line.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
    let status: u16 = status.ok_or_else(|| invalid("the first line has no status"))?;
    let mut length = None;
    loop {
        line.clear();
        if stream.read_line(&mut line)? == 0 {
            return Err(invalid("the headers do not end"));
        }
        let Some((name, value)) = line.split_once(':') else { break };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok();
        }
    }
    let length: u64 = length.ok_or_else(|| invalid("the body has no length"))?;
    if length > MAX_BYTES {
        return Err(invalid("the body is too long"));
    }
    let mut body = Vec::new();
    stream.into_inner().take(length).read_to_end(&mut body)?;
    if (body.len() as u64) < length {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((status, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_port_in_the_end() {
        let address = |text: &str| Url::parse(text).map(|url| url.address).ok();
        for (text, expected) in [
            ("http://10.0.0.5:80/", "10.0.0.5:80"),
            ("http://brain", "brain:4796"),
            ("10.0.0.5", "10.0.0.5:4796"),
            ("http://[fd00::1]", "[fd00::1]:4796"),
            ("http://[fd00::1]:81", "[fd00::1]:81"),
        ] {
            assert_eq!(address(text).as_deref(), Some(expected));
        }
        for text in [
            "",
            "http://",
            "https://brain",
            "http://a b",
            "http://a/b",
            "http://a\r\nX: y",
            "ftp://a/",
        ] {
            assert_eq!(address(text), None, "{text:?}");
        }
    }

    #[test]
    fn responses_are_read_and_others_refused() {
        let read = |text: &str| response(text.as_bytes());
        let good =
            read("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nA: b\r\n\r\n{}more").expect("HTTP");
        assert_eq!(good, (200, b"{}".to_vec()));
        for bad in [
            "",
            "SSH-2.0-x\r\n",
            "HTTP/1.1 abc\r\n\r\n",
            "HTTP/1.1 200 OK\r\n",
            "HTTP/1.1 200 OK\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
        ] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        let endless = format!("HTTP/1.1 200 OK\r\nA: {}", "b".repeat(1 << 20));
        assert!(read(&endless).is_err());
    }
}
