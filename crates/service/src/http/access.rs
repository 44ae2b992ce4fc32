//! Who may ask: bearer tokens, and what browsers do on behalf of other sites.

use hyper::Request;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};

use super::counters::Count;
use crate::auth::same;

/// Checks requests for the token of the server, if it has one.
#[derive(Debug)]
pub(crate) struct Access {
    token: Option<String>,
}

impl Access {
    pub(crate) fn new(token: Option<String>) -> Access {
        Access { token }
    }

    /// Whether the server has a token.
    pub(crate) fn needs_token(&self) -> bool {
        self.token.is_some()
    }

    /// Whether the request has the token: as bearer token, or as password of the basic scheme. The
    /// latter is for programs that can be given a URL but no header: `http://any:TOKEN@HOST/…`.
    pub(crate) fn has_token<B>(&self, request: &Request<B>) -> bool {
        let Some(expected) = &self.token else { return true };
        let given = request.headers().get(AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
        let token = match given.split_at_checked(6) {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case(b"basic ") => password(rest),
            _ => given
                .split_at_checked(7)
                .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "))
                .map(|(_, token)| token.to_vec()),
        };
        token.is_some_and(|token| same(&token, expected.as_bytes()))
    }

    /// Why the request may come from a page of another site.
    ///
    /// Without a token, whoever reaches the server may ask, and a browser reaches it for any page
    /// that it shows. So the name in the address has to be one that no foreign site can have
    /// pointed here.
    pub(crate) fn is_foreign<B>(&self, request: &Request<B>) -> Option<Count> {
        if self.token.is_none() && !host(request).is_some_and(is_plain) {
            return Some(Count::RefusedHost);
        }
        let site = request.headers().get("sec-fetch-site").map(|site| site.as_bytes());
        let is_own = matches!(site, None | Some(b"same-origin" | b"none"));
        (!is_own && request.uri().path() != "/").then_some(Count::RefusedType)
    }
}

/// Whether the body is JSON: browsers send that to other sites only after they have asked.
pub fn is_json<B>(request: &Request<B>) -> bool {
    let given = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = given.map(|given| given.split(';').next().unwrap_or_default().trim());
    kind.is_some_and(|kind| kind.eq_ignore_ascii_case("application/json"))
}

fn host<B>(request: &Request<B>) -> Option<&str> {
    request.headers().get(HOST)?.to_str().ok()
}

/// Whether a host is an IP address or `localhost`, with or without port.
fn is_plain(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

/// The password in `base64(user:password)`.
fn password(encoded: &[u8]) -> Option<Vec<u8>> {
    let decoded = base64(encoded)?;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    Some(decoded[colon + 1..].to_vec())
}

/// Decodes base64 of RFC 4648, section 4.
fn base64(encoded: &[u8]) -> Option<Vec<u8>> {
    let digits = encoded.strip_suffix(b"==").or(encoded.strip_suffix(b"=")).unwrap_or(encoded);
    let mut decoded = Vec::with_capacity(digits.len() * 3 / 4);
    let (mut bits, mut held) = (0_u32, 0);
    for digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            decoded.push((bits >> held) as u8);
        }
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(headers: &[(&str, &str)]) -> Request<()> {
        let builder = Request::builder().uri("/api/view");
        let add = |builder: hyper::http::request::Builder, (name, value): &(&str, &str)| {
            builder.header(*name, *value)
        };
        headers.iter().fold(builder, add).body(()).expect("valid headers")
    }

    fn gets_in(value: &str) -> bool {
        Access::new(Some("secret".into())).has_token(&request(&[("authorization", value)]))
    }

    #[test]
    fn only_the_exact_token_gets_in() {
        assert!(gets_in("Bearer secret") && gets_in("bearer secret"));
        for wrong in
            ["", "Bearer", "Bearer ", "Bearer secre", "Bearer secrett", "secret", "Bearer Secret"]
        {
            assert!(!gets_in(wrong), "{wrong:?}");
        }
        assert!(!Access::new(Some("secret".into())).has_token(&request(&[])));
        assert!(Access::new(None).has_token(&request(&[])));
    }

    #[test]
    fn a_password_is_a_token() {
        for good in ["Basic OnNlY3JldA==", "basic YW55OnNlY3JldA=="] {
            assert!(gets_in(good), "{good}");
        }
        for wrong in
            ["Basic ", "Basic c2VjcmV0", "Basic OnNlY3JldHQ=", "Basic %%%", "Basic OnNlY3JldA===="]
        {
            assert!(!gets_in(wrong), "{wrong}");
        }
    }

    #[test]
    fn base64_of_the_standard() {
        let vectors: [(&[u8], &[u8]); 7] = [
            (b"", b""),
            (b"Zg==", b"f"),
            (b"Zm8=", b"fo"),
            (b"Zm9v", b"foo"),
            (b"Zm9vYg==", b"foob"),
            (b"Zm9vYmE=", b"fooba"),
            (b"Zm9vYmFy", b"foobar"),
        ];
        for (encoded, plain) in vectors {
            assert_eq!(base64(encoded).as_deref(), Some(plain));
        }
    }

    #[test]
    fn without_a_token_the_address_is_no_name_that_others_could_own() {
        let open = Access::new(None);
        let refused = |host: &str| open.is_foreign(&request(&[("host", host)]));
        for own in ["localhost:4796", "127.0.0.1:4796", "10.0.0.1", "[::1]:4796", "[fd00::1]"] {
            assert_eq!(refused(own), None, "{own}");
        }
        for foreign in ["evil.example:4796", "localhost.evil.example", "", "[evil.example]:1"] {
            assert_eq!(refused(foreign), Some(Count::RefusedHost), "{foreign}");
        }
        let closed = Access::new(Some("secret".into()));
        assert_eq!(closed.is_foreign(&request(&[("host", "brain.example")])), None);
    }

    #[test]
    fn pages_of_other_sites_get_nothing() {
        let closed = Access::new(Some("secret".into()));
        let from = |site| closed.is_foreign(&request(&[("sec-fetch-site", site)]));
        assert_eq!((from("same-origin"), from("none")), (None, None));
        assert_eq!(from("cross-site"), Some(Count::RefusedType));
        assert_eq!(from("same-site"), Some(Count::RefusedType));
    }

    #[test]
    fn json_is_json() {
        let kind = |kind| is_json(&request(&[("content-type", kind)]));
        assert!(kind("application/json") && kind("Application/JSON; charset=utf-8"));
        assert!(!kind("text/plain") && !kind("") && !is_json(&request(&[])));
    }
}
