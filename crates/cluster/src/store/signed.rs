//! Signatures of what stores hold, so that nobody who writes there without the token is believed.
//!
//! A value is its signature and its bytes. The records of a log are a chain: the signature of each
//! covers that of the one before, and that of the first covers the snapshot's. So a record can be
//! removed from the end, or snapshot and log be replaced together by older ones; nothing else goes
//! unnoticed.

use parfait::brain::{Image, StorageError};

use super::{Failure, Holder};
use crate::keys::{Key, Keys, Signature};

/// Signs what one store holds.
#[derive(Clone, Debug)]
pub(super) struct Signer {
    leader: Key,
    log: Key,
    /// Which of several stores of a cluster it is.
    place: String,
}

impl Signer {
    pub(super) fn new(keys: &Keys, place: &str) -> Signer {
        let Keys { leader, log, .. } = keys.clone();
        Signer { leader, log, place: place.to_owned() }
    }

    /// What is signed: a snapshot, or the record at that byte of the log behind what `before`
    /// signs.
    fn parts<'p>(&'p self, place: &'p Place, bytes: &'p [u8]) -> [&'p [u8]; 5] {
        let store = self.place.as_bytes();
        match place {
            Place::Snapshot => [store, b"snapshot", &[], &[], bytes],
            Place::Record { before, at } => [store, b"record", before, at, bytes],
        }
    }

    fn value(&self, place: &Place, bytes: &[u8]) -> (Signature, Vec<u8>) {
        let signature = self.log.sign(&self.parts(place, bytes));
        (signature, [&signature[..], bytes].concat())
    }

    /// The value of a snapshot.
    pub(super) fn snapshot_value(&self, bytes: &[u8]) -> (Signature, Vec<u8>) {
        self.value(&Place::Snapshot, bytes)
    }

    /// The value of the record at that byte of the log, behind what `before` signs.
    pub(super) fn record_value(
        &self,
        before: &Signature,
        at: u64,
        bytes: &[u8],
    ) -> (Signature, Vec<u8>) {
        self.value(&Place::record(before, at), bytes)
    }

    /// A holder of the lease as text, with `words` of its own before the signature.
    pub(super) fn holder_text(&self, words: &str) -> String {
        let signature = self.leader.sign(&[self.place.as_bytes(), words.as_bytes()]);
        let hex: String = signature.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{words} {hex}")
    }

    /// The words before the signature, if that is right.
    pub(super) fn holder_words<'t>(&self, text: &'t str) -> Option<&'t str> {
        let (words, hex) = text.rsplit_once(' ')?;
        let signature: Option<Vec<u8>> = hex
            .as_bytes()
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
            .collect();
        let parts = [self.place.as_bytes(), words.as_bytes()];
        self.leader.has_signed(&parts, &signature?).then_some(words)
    }
}

/// Where a value is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Snapshot,
    Record { before: Signature, at: [u8; 8] },
}

impl Place {
    fn record(before: &Signature, at: u64) -> Place {
        Place::Record { before: *before, at: at.to_le_bytes() }
    }
}

/// The signature with which a value begins.
pub(super) fn signature_of(value: &[u8]) -> Option<Signature> {
    value.first_chunk().copied()
}

/// Reads a snapshot and the records behind it, in their order.
#[derive(Debug)]
pub(super) struct Chain<'a> {
    /// Whose signatures all values so far have; `None` where values are read that have none.
    signers: Option<Vec<&'a Signer>>,
    last: Signature,
}

impl<'a> Chain<'a> {
    /// Values of one of these signers.
    pub(super) fn signed(signers: impl IntoIterator<Item = &'a Signer>) -> Chain<'a> {
        Chain { signers: Some(signers.into_iter().collect()), last: Signature::default() }
    }

    /// As `signed`, from behind a value in the middle of a log.
    pub(super) fn behind(
        last: Signature,
        signers: impl IntoIterator<Item = &'a Signer>,
    ) -> Chain<'a> {
        Chain { last, ..Chain::signed(signers) }
    }

    /// Values as formats before this one have them.
    pub(super) fn unsigned() -> Chain<'a> {
        Chain { signers: None, last: Signature::default() }
    }

    /// The signature of the last value, or of no snapshot.
    pub(super) fn last(&self) -> Signature {
        self.last
    }

    /// Whether that one signed everything so far.
    pub(super) fn is_of(&self, signer: &Signer) -> bool {
        let signers = self.signers.iter().flatten();
        signers.into_iter().any(|own| std::ptr::eq(*own, signer))
    }

    fn value<'v>(&mut self, place: &Place, value: &'v [u8]) -> Result<&'v [u8], Failure> {
        let Some(signers) = &mut self.signers else { return Ok(value) };
        let unsigned = || {
            Failure::unsigned(&match place {
                Place::Snapshot => "the snapshot".to_owned(),
                Place::Record { at, .. } => {
                    format!("the record at byte {} of the log", u64::from_le_bytes(*at))
                }
            })
        };
        let (signature, bytes) = value.split_first_chunk().ok_or_else(unsigned)?;
        signers.retain(|signer| signer.log.has_signed(&signer.parts(place, bytes), signature));
        if signers.is_empty() {
            return Err(unsigned());
        }
        self.last = *signature;
        Ok(bytes)
    }

    /// The bytes of a snapshot.
    pub(super) fn snapshot<'v>(&mut self, value: &'v [u8]) -> Result<&'v [u8], Failure> {
        self.value(&Place::Snapshot, value)
    }

    /// The bytes of the record at that byte of the log.
    pub(super) fn record<'v>(&mut self, at: u64, value: &'v [u8]) -> Result<&'v [u8], Failure> {
        self.value(&Place::record(&self.last, at), value)
    }
}

impl Failure {
    /// What is there was not signed by a brain of this cluster.
    pub(super) fn unsigned(what: &str) -> Failure {
        let reason = format!("{what} is not signed with the token of this cluster");
        Failure { error: StorageError::Unsigned, reason }
    }
}

/// How a log was signed before [`sign_log`](super::file::FileStore::sign_log).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Not at all.
    Unsigned,
    /// With the old token.
    OldToken,
    /// With this token.
    ThisToken,
}

/// What was signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignedLog {
    /// How it was signed before.
    pub before: Before,
    /// Bytes of the snapshot.
    pub snapshot_bytes: u64,
    /// Bytes of the log behind it.
    pub log_bytes: u64,
}

impl SignedLog {
    /// Of an image that was read by a chain, with the signer of now.
    pub(super) fn of(image: &Image, chain: &Chain<'_>, own: &Signer) -> SignedLog {
        let before = match &chain.signers {
            None => Before::Unsigned,
            Some(_) if chain.is_of(own) => Before::ThisToken,
            Some(_) => Before::OldToken,
        };
        let (snapshot_bytes, log_bytes) = (image.snapshot.len() as u64, image.log.len() as u64);
        SignedLog { before, snapshot_bytes, log_bytes }
    }
}

/// A holder of the lease by its words, NUMBER ADDRESS, and its term.
pub(super) fn holder(words: &str, term: u64) -> Option<Holder> {
    let (number, address) = words.split_once(' ')?;
    let lease = parfait::brain::Lease { holder: number.parse().ok()?, term };
    Some(Holder { lease, address: address.to_owned() })
}
