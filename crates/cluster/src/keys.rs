//! Keys that are derived from the token of a cluster, and what is signed with them.
//!
//! The token itself is never sent and never used as a key. HKDF (RFC 5869) makes one key of it for
//! each purpose, so that what was signed for one is worth nothing for another. A signature here is
//! an HMAC-SHA-256: whoever knows the token can make and check one, and nobody else.
//!
//! | key | what is signed with it, and by whom |
//! |---|---|
//! | `caller`, `brain` | nonces of both sides at the beginning of a connection, by who calls and by the brain ([`crate::handshake`]) |
//! | `plan` | the plan of one agent for one connection of it, by brains |
//! | `state` | the file of an agent, by itself |
//! | `leader`, `log` | who leads, and the records of the log, by brains ([`crate::store`]) |

use std::fmt;

use hkdf::Hkdf;
use hmac::{Hmac, Mac};
use service::error::Error;
use service::seed::fresh_seed;
use sha2::Sha256;

/// Bytes of a signature.
pub const SIGNATURE_BYTES: usize = 32;

/// A signature.
pub type Signature = [u8; SIGNATURE_BYTES];

/// What a side draws for a connection.
pub type Nonce = [u8; 32];

/// Separates these keys from those of other programs that are given the same secret.
const SALT: &[u8] = b"dquant cluster 1";

/// A key for one purpose; it is never printed.
#[derive(Clone)]
pub struct Key(Hmac<Sha256>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    fn derive(token: &Hkdf<Sha256>, purpose: &str) -> Key {
        let mut key = [0; 32];
        token.expand(purpose.as_bytes(), &mut key).expect("HKDF gives up to 255 times 32 bytes");
        Key(Hmac::new_from_slice(&key).expect("HMAC takes keys of any length"))
    }

    /// Each part goes in with its length, so parts cannot be shifted into each other.
    fn over(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    /// Signs parts, in this order.
    pub fn sign(&self, parts: &[&[u8]]) -> Signature {
        self.over(parts).finalize().into_bytes().into()
    }

    /// Whether these parts were signed so. Takes the same time for every wrong signature of that
    /// length.
    pub fn has_signed(&self, parts: &[&[u8]], signature: &[u8]) -> bool {
        self.over(parts).verify_slice(signature).is_ok()
    }
}

/// All keys of a cluster.
#[derive(Clone, Debug)]
pub struct Keys {
    /// Of those who call brains.
    pub caller: Key,
    /// Of brains that are called.
    pub brain: Key,
    /// For plans.
    pub plan: Key,
    /// For files of agents.
    pub state: Key,
    /// For records of who leads.
    pub leader: Key,
    /// For the log of admissions.
    pub log: Key,
}

impl Keys {
    /// The keys that follow from a token.
    pub fn of_token(token: &str) -> Keys {
        let token = Hkdf::new(Some(SALT), token.as_bytes());
        let key = |purpose| Key::derive(&token, purpose);
        Keys {
            caller: key("caller"),
            brain: key("brain"),
            plan: key("plan"),
            state: key("state"),
            leader: key("leader"),
            log: key("log"),
        }
    }
}

/// 32 bytes that nobody can guess or has seen before.
///
/// # Errors
/// When the system has no random numbers.
pub fn nonce() -> Result<Nonce, Error> {
    let mut nonce = Nonce::default();
    for word in nonce.as_chunks_mut::<8>().0 {
        *word = fresh_seed()?.to_ne_bytes();
    }
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_holds_for_its_token_purpose_and_parts_alone() {
        let (keys, other) =
            (Keys::of_token("a-token-of-ours"), Keys::of_token("a-token-of-theirs"));
        let signature = keys.plan.sign(&[b"host0", b"plan"]);
        assert!(keys.plan.has_signed(&[b"host0", b"plan"], &signature));
        assert!(
            Keys::of_token("a-token-of-ours").plan.has_signed(&[b"host0", b"plan"], &signature)
        );
        let Keys { caller, brain, plan: _, state, leader, log } = &keys;
        for key in [caller, brain, state, leader, log, &other.plan] {
            assert!(!key.has_signed(&[b"host0", b"plan"], &signature));
        }
        for parts in
            [&[&b"host"[..], b"0plan"][..], &[b"host0", b"plan", b""], &[b"host0plan"], &[]]
        {
            assert!(!keys.plan.has_signed(parts, &signature), "{parts:?}");
        }
        for cut in 0..SIGNATURE_BYTES {
            assert!(!keys.plan.has_signed(&[b"host0", b"plan"], &signature[..cut]), "{cut}");
        }
        for bit in 0..SIGNATURE_BYTES * 8 {
            let mut wrong = signature;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!keys.plan.has_signed(&[b"host0", b"plan"], &wrong), "{bit}");
        }
    }

    #[test]
    fn keys_are_not_printed_and_nonces_differ() {
        let shown = format!("{:?}", Keys::of_token("a-token-of-ours"));
        assert!(shown.starts_with("Keys { caller: Key(..), brain: Key(..)"), "{shown}");
        assert_ne!(nonce().expect("random numbers"), nonce().expect("random numbers"));
    }
}
