//! The agent's side of the folder: what it sets, and what it reads of the senders' counters.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use roce::shaping::{CODE_POINTS, Exchanges, RateLimit, TransmissionGate, Word};

use super::files::{make_buckets, opened, rates_of_agent};
use super::layout::{Bucket, FILE_BYTES, Rates};
use super::mapping::Mapped;
use crate::clock;
use crate::local_files::{self, LockError, make_shared_folder};

/// Rate limits and gates of a machine. What is set stays in force when this is dropped.
#[derive(Debug)]
pub struct RateTable {
    path: PathBuf,
    rates: Mapped<Rates>,
    /// Not mapped: who may write it may truncate it, and that would end the agent.
    buckets: Mutex<File>,
    /// One agent keeps a folder.
    _lock: File,
}

impl RateTable {
    /// Opens the folder's files, and makes what is missing: readable by everyone, `buckets`
    /// writable by the owner and the folder's group, and `lock` for the owner alone. Files of
    /// another form are replaced.
    ///
    /// # Errors
    /// When the folder cannot be written; [`io::ErrorKind::WouldBlock`] if another process keeps
    /// it.
    pub fn open(folder: &Path) -> io::Result<RateTable> {
        make_shared_folder(folder)?;
        let lock = local_files::lock(&folder.join("lock")).map_err(|error| match error {
            held @ LockError::Held(_) => io::Error::new(io::ErrorKind::WouldBlock, held),
            LockError::Failed(error) => error,
        })?;
        let group = fs::metadata(folder)?.gid();
        // Senders look for `rates`: whoever finds it finds the buckets, too.
        let buckets = opened(&folder.join("buckets")).or_else(|_| make_buckets(folder, group))?;
        let rates = rates_of_agent(folder, group)?;
        let (path, buckets) = (folder.to_path_buf(), Mutex::new(buckets));
        let table = RateTable { path, rates, buckets, _lock: lock };
        table.follow_clock();
        Ok(table)
    }

    /// Sets all rate limits by DSCP; DSCPs that are not named have none. Values above 63 are
    /// ignored.
    pub fn set(&self, limits: impl IntoIterator<Item = (u8, RateLimit)>) {
        for (dscp, limit) in by_dscp(limits).into_iter().enumerate() {
            self.rates.get().set_limit(dscp, limit.unwrap_or_default());
        }
    }

    /// Sets all gates by DSCP; DSCPs that are not named have none. Those that stay as they are stay
    /// in force meanwhile. Values above 63, and periods of 0, are ignored.
    pub fn set_gates(&self, gates: impl IntoIterator<Item = (u8, TransmissionGate)>) {
        let wanted = by_dscp(gates.into_iter().filter(|(_, gate)| gate.period_ns > 0));
        for (dscp, gate) in wanted.into_iter().enumerate() {
            self.rates.get().set_gate(dscp, gate);
        }
    }

    /// Reads both clocks, and has gates follow Unix time from now on. To be called once a second or
    /// so: it may be set.
    pub fn follow_clock(&self) {
        self.set_unix_offset(clock::unix_offset_ns());
        self.rates.get().set_followed(clock::now());
    }

    pub(super) fn set_unix_offset(&self, ns: u64) {
        self.rates.get().set_unix_offset(ns);
    }

    #[cfg(test)]
    pub(super) fn rates(&self) -> &Rates {
        self.rates.get()
    }

    /// The rate limit of a DSCP in bits per second; 0 if it has none.
    pub fn bps(&self, dscp: u8) -> u64 {
        code_point(dscp).map_or(0, |dscp| self.rates.get().limit(dscp).bps)
    }

    /// The gate of a DSCP.
    pub fn gate(&self, dscp: u8) -> Option<TransmissionGate> {
        self.rates.get().gate(code_point(dscp)?)
    }

    /// How exchanges of a DSCP with a gate have begun, as far as processes with the right to write
    /// the buckets took part; none where the file was truncated.
    pub fn exchanges(&self, dscp: u8) -> Exchanges {
        self.bucket(dscp).map_or_else(Exchanges::default, |bucket| bucket.exchanges.counted())
    }

    /// Bytes that processes with the right to write the buckets have sent with a DSCP since the
    /// file was made, Ethernet headers included; 0 where the file was truncated.
    pub fn sent_bytes(&self, dscp: u8) -> u64 {
        self.bucket(dscp).map_or(0, |bucket| bucket.bytes.get())
    }

    /// Replaces buckets that were truncated, which processes notice within
    /// [`LOOK_EVERY`](super::LOOK_EVERY). Returns whether they were.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn repair(&self) -> io::Result<bool> {
        let mut buckets = self.locked_buckets();
        if buckets.metadata()?.len() == FILE_BYTES {
            return Ok(false);
        }
        *buckets = make_buckets(&self.path, fs::metadata(&self.path)?.gid())?;
        Ok(true)
    }

    fn locked_buckets(&self) -> MutexGuard<'_, File> {
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bucket(&self, dscp: u8) -> Option<Bucket> {
        let at = code_point(dscp)? * size_of::<Bucket>();
        let mut bytes = [0; size_of::<Bucket>()];
        self.locked_buckets().read_exact_at(&mut bytes, at as u64).ok()?;
        let (words, _) = bytes.as_chunks::<8>();
        Some(Bucket::of(words.iter().map(|word| u64::from_ne_bytes(*word))))
    }
}

/// A DSCP as an index; `None` above 63.
fn code_point(dscp: u8) -> Option<usize> {
    Some(usize::from(dscp)).filter(|dscp| *dscp < CODE_POINTS)
}

/// What is named for each DSCP.
fn by_dscp<T: Copy>(named: impl IntoIterator<Item = (u8, T)>) -> [Option<T>; CODE_POINTS] {
    let mut all = [None; CODE_POINTS];
    for (dscp, one) in named {
        if let Some(place) = all.get_mut(usize::from(dscp)) {
            *place = Some(one);
        }
    }
    all
}
