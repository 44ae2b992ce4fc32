//! What brains share: the store of the lease, and the log's disk.

use parfait::brain::{Effect, Image, Lease, StorageError};
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

/// Compare-and-swap with revisions, and a lease that expires by the store's own clock.
#[derive(Debug, Default)]
pub(crate) struct LeaseStore {
    revision: u64,
    held: Option<(Lease, u64)>,
    /// How far its clock is ahead.
    pub(crate) ahead_ns: u64,
}

impl LeaseStore {
    pub(crate) fn claim(&mut self, holder: u64, lease_ns: u64, now_ns: u64) -> Lease {
        let now_ns = now_ns + self.ahead_ns;
        // Every transaction of the store has a revision, whoever makes it.
        self.revision += 1;
        let lease = match self.held {
            Some((lease, until)) if until > now_ns && lease.holder != holder => return lease,
            Some((lease, until)) if until > now_ns => lease,
            _ => Lease { holder, term: self.revision },
        };
        self.held = Some((lease, now_ns + lease_ns));
        lease
    }
}

/// A write that is not durable yet.
#[derive(Debug)]
struct Pending {
    at: usize,
    bytes: Vec<u8>,
}

/// The disk with the log and its snapshot.
#[derive(Debug, Default)]
pub(crate) struct Volume {
    /// Durable.
    pub(crate) image: Image,
    /// The term and number of the last opening; only its effects are carried out.
    pub(crate) opening: (u64, u64),
    is_connected: bool,
    failed: Option<StorageError>,
    pending: Vec<Pending>,
    pub(crate) is_full: bool,
    /// How often the durable bytes changed.
    pub(crate) changes: u64,
    pub(crate) torn_writes: u64,
}

/// What the volume answers.
#[derive(Clone, Debug)]
pub(crate) enum Done {
    Opened(u64, Result<Image, StorageError>),
    Stored(u64, Result<(), StorageError>),
}

impl Volume {
    /// Carries out an effect of the opening that has the term.
    pub(crate) fn execute(
        &mut self,
        term: u64,
        effect: Effect,
        random: &mut Pcg32,
    ) -> Option<Done> {
        match effect {
            Effect::Open { ticket, term } if (term, ticket) < self.opening => {
                Some(Done::Opened(ticket, Err(StorageError::Fenced)))
            }
            Effect::Open { ticket, term } => {
                self.flush();
                (self.opening, self.is_connected, self.failed) = ((term, ticket), true, None);
                Some(Done::Opened(ticket, Ok(self.image.clone())))
            }
            Effect::Append { opening, at, bytes } => {
                if self.refusal(term, opening).is_some() {
                    return None;
                }
                self.pending.push(Pending { at: at as usize, bytes });
                if self.is_full {
                    self.failed = Some(StorageError::Full);
                    self.tear(random);
                }
                None
            }
            Effect::Sync { opening, ticket } => {
                let refusal = self.refusal(term, opening);
                if refusal.is_none() {
                    self.flush();
                }
                Some(Done::Stored(ticket, refusal.map_or(Ok(()), Err)))
            }
            Effect::Snapshot { opening, ticket, bytes } => {
                let full = self.is_full.then_some(StorageError::Full);
                if let Some(refusal) = self.refusal(term, opening).or(full) {
                    self.failed = self.failed.or(full);
                    return Some(Done::Stored(ticket, Err(refusal)));
                }
                self.flush();
                self.image.snapshot = bytes;
                self.changes += 1;
                // The power may fail between the snapshot and the cut of the log.
                if random.next_u32().is_multiple_of(16) {
                    self.crash(random);
                    return None;
                }
                self.image.log.clear();
                Some(Done::Stored(ticket, Ok(())))
            }
            Effect::Claim { .. } | Effect::Send { .. } | Effect::Answer { .. } => None,
        }
    }

    fn refusal(&self, term: u64, opening: u64) -> Option<StorageError> {
        match (term, opening) == self.opening {
            false => Some(StorageError::Fenced),
            true if !self.is_connected => Some(StorageError::Unavailable),
            true => self.failed,
        }
    }

    fn flush(&mut self) {
        for Pending { at, bytes } in self.pending.drain(..) {
            self.image.log.truncate(at);
            self.image.log.extend(bytes);
            self.changes += 1;
        }
    }

    /// Of what is not durable, a part is there, some of it wrong, and behind it what was there
    /// before.
    fn tear(&mut self, random: &mut Pcg32) {
        for Pending { at, mut bytes } in core::mem::take(&mut self.pending) {
            bytes.truncate(random.next_u32() as usize % (bytes.len() + 1));
            if let Some(last) = bytes.last_mut().filter(|_| random.next_u32().is_multiple_of(3)) {
                *last ^= 0x40;
            }
            let log = &mut self.image.log;
            let behind = log.split_off(at.min(log.len()));
            let rest = behind.get(bytes.len()..).unwrap_or(&[]).to_vec();
            log.extend(bytes);
            log.extend(rest);
            self.changes += 1;
            self.torn_writes += 1;
        }
    }

    pub(crate) fn crash(&mut self, random: &mut Pcg32) {
        self.tear(random);
        self.is_connected = false;
    }
}
