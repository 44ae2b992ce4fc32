//! Hashes that an index records of its shards, by the names of MosaicML Streaming.

use std::fs::File;
use std::hash::Hasher as _;
use std::io::Read;
use std::path::Path;

use serde_json::Value;
use twox_hash::{XxHash3_64, XxHash3_128, XxHash32, XxHash64};

use super::BLOCK_BYTES;
use crate::error::Error;

/// A hash that is being computed.
enum Hasher {
    Xxh32(XxHash32),
    Xxh64(XxHash64),
    Xxh3(Box<XxHash3_64>),
    Xxh128(Box<XxHash3_128>),
    #[cfg(feature = "hashes")]
    Digest(Box<dyn sha2::digest::DynDigest>),
}

impl Hasher {
    /// `None` for an algorithm that is not known, or not built in.
    fn new(algorithm: &str) -> Option<Hasher> {
        Some(match algorithm {
            "xxh32" => Hasher::Xxh32(XxHash32::with_seed(0)),
            "xxh64" => Hasher::Xxh64(XxHash64::with_seed(0)),
            "xxh3_64" => Hasher::Xxh3(Box::new(XxHash3_64::new())),
            "xxh128" | "xxh3_128" => Hasher::Xxh128(Box::new(XxHash3_128::new())),
            #[cfg(feature = "hashes")]
            "md5" => Hasher::Digest(Box::new(md5::Md5::default())),
            #[cfg(feature = "hashes")]
            "sha1" => Hasher::Digest(Box::new(sha1::Sha1::default())),
            #[cfg(feature = "hashes")]
            "sha224" => Hasher::Digest(Box::new(sha2::Sha224::default())),
            #[cfg(feature = "hashes")]
            "sha256" => Hasher::Digest(Box::new(sha2::Sha256::default())),
            #[cfg(feature = "hashes")]
            "sha384" => Hasher::Digest(Box::new(sha2::Sha384::default())),
            #[cfg(feature = "hashes")]
            "sha512" => Hasher::Digest(Box::new(sha2::Sha512::default())),
            _ => return None,
        })
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Xxh32(hash) => hash.write(bytes),
            Hasher::Xxh64(hash) => hash.write(bytes),
            Hasher::Xxh3(hash) => hash.write(bytes),
            Hasher::Xxh128(hash) => hash.write(bytes),
            #[cfg(feature = "hashes")]
            Hasher::Digest(hash) => hash.update(bytes),
        }
    }

    fn hex(self) -> String {
        match self {
            Hasher::Xxh32(hash) => format!("{:08x}", hash.finish_32()),
            Hasher::Xxh64(hash) => format!("{:016x}", hash.finish()),
            Hasher::Xxh3(hash) => format!("{:016x}", hash.finish()),
            Hasher::Xxh128(hash) => format!("{:032x}", hash.finish_128()),
            #[cfg(feature = "hashes")]
            Hasher::Digest(mut hash) => {
                let mut bytes = vec![0; hash.output_size()];
                // The buffer has the size that is asked for.
                let _ = hash.finalize_into_reset(&mut bytes);
                bytes.iter().map(|byte| format!("{byte:02x}")).collect()
            }
        }
    }
}

/// The hashes recorded of one file: algorithm and hexadecimal digits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hashes(Vec<(String, String)>);

impl Hashes {
    /// From the field `hashes` of a file in an index; `None` if that is none.
    pub(super) fn parse(found: &Value) -> Option<Hashes> {
        let Some(listed) = found.as_object() else {
            return found.is_null().then(Hashes::default);
        };
        let pair = |(name, hex): (&String, &Value)| Some((name.clone(), hex.as_str()?.to_owned()));
        listed.iter().map(pair).collect::<Option<Vec<_>>>().map(Hashes)
    }

    /// The algorithms that are not checked.
    pub(super) fn unknown(&self) -> impl Iterator<Item = &str> {
        let names = self.0.iter().map(|(algorithm, _)| algorithm.as_str());
        names.filter(|algorithm| Hasher::new(algorithm).is_none())
    }

    /// Reads a file and compares its hashes.
    ///
    /// # Errors
    /// When one differs, or the file cannot be read.
    pub(super) fn check(&self, path: &Path) -> Result<(), Error> {
        let start = |(algorithm, hex)| Some((algorithm, hex, Hasher::new(algorithm)?));
        let pairs = self.0.iter().map(|(algorithm, hex)| (algorithm.as_str(), hex.as_str()));
        let mut hashers: Vec<(&str, &str, Hasher)> = pairs.filter_map(start).collect();
        if hashers.is_empty() {
            return Ok(());
        }
        let mut file = File::open(path).map_err(Error::read(path))?;
        let mut buffer = vec![0; BLOCK_BYTES as usize];
        loop {
            match file.read(&mut buffer).map_err(Error::read(path))? {
                0 => break,
                read => hashers.iter_mut().for_each(|(.., hash)| hash.update(&buffer[..read])),
            }
        }
        for (algorithm, recorded, hash) in hashers {
            let found = hash.hex();
            if !found.eq_ignore_ascii_case(recorded) {
                let why = format!("its {algorithm} is {found}, its index records {recorded}");
                return Err(Error::Differs { path: path.to_owned(), why });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Of the xxHash family the published values of no bytes; the others are from hashlib of
    /// Python.
    const KNOWN: [(&str, &str, &str); 10] = [
        ("xxh32", "", "02cc5d05"),
        ("xxh64", "", "ef46db3751d8e999"),
        ("xxh3_64", "", "2d06800538d394c2"),
        ("xxh128", "", "99aa06d3014798d86001c324468d497f"),
        ("md5", "The quick brown fox", "a2004f37730b9445670a738fa0fc9ee5"),
        ("sha1", "The quick brown fox", "c519c1a06cdbeb2bc499e22137fb48683858b345"),
        (
            "sha224",
            "The quick brown fox",
            "146129bd31db775c819f4c28929cc5ac7130d4bac470e97134857c1a",
        ),
        (
            "sha256",
            "The quick brown fox",
            "5cac4f980fedc3d3f1f99b4be3472c9b30d56523e632d151237ec9309048bda9",
        ),
        (
            "sha384",
            "",
            "38b060a751ac96384cd9327eb1b1e36a21fdb71114be07434c0cc7bf63f6e1da274edebfe76f65fbd51ad2f14898b95b",
        ),
        (
            "sha512",
            "",
            "cf83e1357eefb8bdf1542850d66d8007d620e4050b5715dc83f4a921d36ce9ce47d0d13c5d85f2b0ff8318d2877eec2f63b931bd47417a81a538327af927da3e",
        ),
    ];

    #[test]
    fn hashes_are_those_of_other_programs() {
        for (algorithm, text, want) in KNOWN {
            let Some(mut hash) = Hasher::new(algorithm) else {
                assert!(!cfg!(feature = "hashes") && !algorithm.starts_with("xxh"), "{algorithm}");
                continue;
            };
            let (first, second) = text.as_bytes().split_at(text.len() / 2);
            hash.update(first);
            hash.update(second);
            assert_eq!(hash.hex(), want, "{algorithm}");
        }
        assert!(Hasher::new("blake3").is_none());
    }
}
