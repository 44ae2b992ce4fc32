//! A disk in virtual time: the second implementation of [`Disk`].
//!
//! The seed decides the order in which reads complete. From `submit` until the completion their
//! destination is lent to the disk, and the arena panics on any other access to it.

use std::collections::VecDeque;
use std::rc::Rc;

use roce::{Duration, Time};
use xio::disk::{Change, DIRECT_ALIGN, Disk, DiskDone, DiskFault, DiskRead, FileId};

use super::net::{Arena, earliest};
use sim::chance::Chance;

/// `EBADF`, `EIO`.
const EBADF: i32 = 9;
pub(crate) const EIO: i32 = 5;

/// A file, and its faults.
#[derive(Clone, Debug, Default)]
pub(crate) struct SimFile {
    pub(crate) bytes: Rc<[u8]>,
    /// From this instant on the file has this length.
    pub(crate) cut: Option<(Time, u64)>,
    /// Reads that touch this byte fail.
    pub(crate) bad_byte: Option<u64>,
    /// From this instant on the file has these bytes.
    pub(crate) overwritten: Option<(Time, Rc<[u8]>)>,
}

impl SimFile {
    fn is_overwritten(&self, now: Time) -> bool {
        self.overwritten.as_ref().is_some_and(|(at, _)| *at <= now)
    }
}

#[derive(Debug)]
struct Taken {
    read: DiskRead,
    due: Time,
    lent: bool,
}

/// The disk.
#[derive(Debug)]
pub(crate) struct SimDisk {
    pub(crate) files: Vec<SimFile>,
    /// The file of each number; closed numbers are never reused.
    open: Vec<Option<usize>>,
    depth: usize,
    latency_ns: (u64, u64),
    now: Time,
    taken: Vec<Taken>,
    landed: VecDeque<DiskDone>,
    /// In the order in which they were accepted.
    pub(crate) log: Vec<DiskRead>,
    pub(crate) refused: u64,
    draw: Chance,
}

impl SimDisk {
    pub(crate) fn new(
        files: Vec<SimFile>,
        depth: usize,
        latency_ns: (u64, u64),
        seed: u64,
    ) -> SimDisk {
        SimDisk {
            files,
            open: Vec::new(),
            depth,
            latency_ns,
            now: Time::ZERO,
            taken: Vec::new(),
            landed: VecDeque::new(),
            log: Vec::new(),
            refused: 0,
            draw: Chance::new(seed),
        }
    }

    pub(crate) fn open(&mut self, file: usize) -> FileId {
        self.open.push(Some(file));
        FileId(self.open.len() as u32 - 1)
    }

    pub(crate) fn close(&mut self, file: FileId) {
        self.open[file.0 as usize] = None;
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.taken.is_empty() && self.landed.is_empty()
    }

    pub(crate) fn next_event(&self) -> Option<Time> {
        earliest(self.taken.iter().map(|taken| Some(taken.due)))
    }

    /// Lends memory to the reads taken since the last call.
    pub(crate) fn lend_new(&mut self, arena: &mut Arena) {
        for taken in self.taken.iter_mut().filter(|taken| !taken.lent) {
            taken.lent = true;
            arena.guard.lend(taken.read.addr, taken.read.len.into());
        }
    }

    /// Completes the reads that are due at `now`.
    pub(crate) fn land(&mut self, now: Time, arena: &mut Arena) {
        self.now = now;
        self.taken.sort_by_key(|taken| taken.due);
        let due = self.taken.partition_point(|taken| taken.due <= now);
        for taken in self.taken.drain(..due).collect::<Vec<_>>() {
            arena.guard.give_back(taken.read.addr);
            let result = self.carry_out(&taken.read, arena);
            let tag = taken.read.tag;
            self.landed.push_back(DiskDone { tag, result });
        }
    }

    fn carry_out(&self, read: &DiskRead, arena: &mut Arena) -> Result<u32, DiskFault> {
        let file = self.open[read.file.0 as usize].ok_or(DiskFault::Io(EBADF))?;
        let SimFile { cut, bad_byte, .. } = &self.files[file];
        let bytes = match &self.files[file].overwritten {
            Some((at, bytes)) if *at <= self.now => bytes,
            _ => &self.files[file].bytes,
        };
        let range = read.offset..read.offset + u64::from(read.len);
        if bad_byte.is_some_and(|byte| range.contains(&byte)) {
            return Err(DiskFault::Io(EIO));
        }
        let len = match cut {
            Some((at, len)) if *at <= self.now => *len,
            _ => bytes.len() as u64,
        };
        let (start, end) = (range.start.min(len) as usize, range.end.min(len) as usize);
        let found = &bytes[start..end];
        arena.poke(read.addr, found);
        Ok(found.len() as u32)
    }
}

impl Disk for SimDisk {
    fn submit(&mut self, read: DiskRead) -> Result<(), DiskRead> {
        if self.taken.len() + self.landed.len() >= self.depth {
            self.refused += 1;
            return Err(read);
        }
        for value in [read.offset, u64::from(read.len), read.addr] {
            assert!(value.is_multiple_of(DIRECT_ALIGN), "misaligned: {read:?}");
        }
        let (low, high) = self.latency_ns;
        let due = self.now + Duration::from_nanos(self.draw.between(low, high - 1));
        let lent = false;
        self.log.push(read);
        self.taken.push(Taken { read, due, lent });
        Ok(())
    }

    fn poll(&mut self) -> Option<DiskDone> {
        self.landed.pop_front()
    }

    fn change(&self, file: FileId) -> Option<Change> {
        let file = &self.files[self.open[file.0 as usize]?];
        file.is_overwritten(self.now).then_some(Change::Written { len: file.bytes.len() as u64 })
    }
}
