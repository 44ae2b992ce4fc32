//! Where datasets are: `dq://HOST[:PORT]/NAME` at a target, or the path of files of this machine.

use std::str::FromStr;

use xio::plan::Plan;

use crate::error::Error;

/// Port of a target's control plane where the URL names none.
const CONTROL_PORT: u16 = 4790;

#[cfg(feature = "in-process")]
const _: () = assert!(CONTROL_PORT == engine::control::CONTROL_PORT);

/// Where the datasets of a stream are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// At a storage target.
    Target(Url),
    /// On this machine: a file, with or without its ending, a pattern such as `corpora/*.bin`, or
    /// the folder of the datasets that a blend names.
    Files(String),
}

impl FromStr for Location {
    type Err = Error;

    /// Whatever has no scheme is a path.
    fn from_str(text: &str) -> Result<Location, Error> {
        if text.is_empty() || text.contains("://") {
            return text.parse().map(Location::Target);
        }
        Ok(Location::Files(text.to_owned()))
    }
}

/// A parsed address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Url {
    /// `host` or `host:port` of the target's control plane.
    host: String,
    /// Path below the target's roots; may be empty when a blend names the datasets.
    name: String,
}

impl FromStr for Url {
    type Err = Error;

    fn from_str(text: &str) -> Result<Url, Error> {
        let bad = |why| Error::Url { url: text.to_owned(), why };
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
    /// `host:port` of the target's control plane.
    pub(crate) fn target(&self) -> String {
        let host = &self.host;
        let bare_v6 = host.starts_with('[') && host.ends_with(']');
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if has_port && !bare_v6 { host.clone() } else { format!("{host}:{CONTROL_PORT}") }
    }

    /// The plan with its seed filled in, and the names of the datasets it draws from.
    pub(crate) fn datasets(&self, action: &str, seed: u64) -> Result<(String, Vec<String>), Error> {
        let plan = parse_plan(action, seed)?;
        let names = match plan.blend() {
            [] if self.name.is_empty() => return Err(Error::NoDataset),
            [] => vec![self.name.clone()],
            parts => parts.iter().map(|part| self.join(&part.name)).collect(),
        };
        Ok((plan.to_string(), names))
    }

    /// The dataset `member` below this address.
    fn join(&self, member: &str) -> String {
        if self.name.is_empty() { member.to_owned() } else { format!("{}/{member}", self.name) }
    }
}

/// Parses a plan, in which the word `seed` means `seed`.
pub(crate) fn parse_plan(action: &str, seed: u64) -> Result<Plan, Error> {
    Plan::parse(action, Some(seed)).map_err(|error| {
        let (mut marked, hint) = (error.render(action), error.hint());
        // What is rendered ends with the hint.
        let tail = hint.as_ref().map_or(0, |hint| "\nhint: ".len() + hint.len());
        marked.truncate(marked.len().saturating_sub(tail));
        Error::Plan { marked, hint }
    })
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
