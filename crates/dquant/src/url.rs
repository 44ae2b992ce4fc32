//! `dq://HOST[:PORT]/NAME`: which dataset, or which folder of datasets, at which target.

use std::str::FromStr;

use crate::exit::CliError;

/// A parsed address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// `host` or `host:port` of the target's control plane.
    pub host: String,
    /// Path below the target's roots; may be empty when a blend names the datasets.
    pub name: String,
}

impl FromStr for Url {
    type Err = CliError;

    fn from_str(text: &str) -> Result<Url, CliError> {
        let hint = "write it as dq://HOST[:PORT]/NAME, for example dq://127.0.0.1/corpora/web";
        let bad = |why: &str| CliError::usage(format!("{text:?}: {why}")).hint(hint);
        let rest = text.strip_prefix("dq://").ok_or_else(|| bad("it does not begin with dq://"))?;
        let (host, name) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() {
            return Err(bad("it names no host"));
        }
        if name.contains('\0') {
            return Err(bad("the name contains a zero byte"));
        }
        Ok(Url { host: host.to_owned(), name: name.trim_end_matches('/').to_owned() })
    }
}

impl Url {
    /// The dataset `member` below this address.
    pub fn join(&self, member: &str) -> String {
        if self.name.is_empty() { member.to_owned() } else { format!("{}/{member}", self.name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_address() {
        let url: Url = "dq://[::1]:4790/a/b/".parse().expect("good");
        assert_eq!((url.host.as_str(), url.name.as_str()), ("[::1]:4790", "a/b"));
        assert_eq!(url.join("c"), "a/b/c");
        let bare: Url = "dq://host".parse().expect("good");
        assert_eq!(bare.join("c"), "c");
        for bad in ["http://h/x", "dq:///x", "", "dq://h/\0"] {
            assert!(bad.parse::<Url>().is_err(), "{bad:?}");
        }
    }
}
