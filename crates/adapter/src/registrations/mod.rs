//! Memory for work requests, registered one way or another: callers hand over a buffer and get
//! keys.
//!
//! | way | when | costs |
//! |---|---|---|
//! | pool | the buffer lies in a region that is registered anyway | nothing |
//! | cached | local use, and the buffer's pages can be [watched](watch) | a registration at the first use |
//! | bounced | the cache refuses, and a block is free that holds the buffer | a copy |
//! | once | nothing else does, or a peer gets the key | a registration at each use |
//!
//! [`Registrar::acquire`] takes the first way that is possible and counts it, with the reason
//! against the cache. Bounce blocks have one size and their number is fixed. Keys that peers get
//! are never cached: the peer could use such a key after the program has freed the memory.
//!
//! A device that reaches only its pool ([`Software`](crate::owned::Software)) has the ways pool and
//! bounced.
//!
//! Queue pairs and work requests do not belong here, nor does the decision which buffers to use.

mod cache;
#[cfg(test)]
mod tests;
pub mod watch;

use std::ptr;
use std::sync::Arc;

use roce::device::Device;
use roce::verbs::{Access, MemoryRegion, PdId, VerbsError};
use roce::world::Staging;
use thiserror::Error;

use cache::Cache;
use nic::pool::{Pool, PoolError, PoolRange};
use watch::{Unwatched, Watch, WatchError};

/// Alignment of bounce blocks in bytes.
const BLOCK_ALIGN: u64 = 4096;

/// Bounds of a [`Registrar`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most regions in the cache.
    pub entries: usize,
    /// Most bytes in the cache.
    pub bytes: u64,
    /// Bounce blocks.
    pub blocks: usize,
    /// Bytes of each.
    pub block_bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { entries: 256, bytes: 1 << 30, blocks: 16, block_bytes: 64 << 10 }
    }
}

/// Which memory the device reaches.
#[derive(Debug)]
pub enum Reach {
    /// All of this process: the cache is used if its memory can be watched.
    Process(Result<Arc<Watch>, WatchError>),
    /// Only the pool.
    Pool,
}

/// What the device does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It reads the buffer: the source of sends and WRITEs.
    Source,
    /// It writes the buffer: receives, and results of READs and atomics.
    Sink,
    /// A peer accesses it, with these rights.
    Remote(Access),
}

impl Use {
    fn access(self) -> Access {
        match self {
            Use::Source => Access::LOCAL_READ,
            Use::Sink => Access::LOCAL,
            Use::Remote(access) => access,
        }
    }
}

/// Why a buffer was not registered in the cache.
#[derive(Debug, Error)]
pub enum Uncached {
    /// A peer gets the key.
    #[error("keys of peers are not cached")]
    Remote,
    /// The device reaches only its pool.
    #[error("the device reaches only its pool")]
    Unreachable,
    /// The kernel does not let this process watch its memory.
    #[error("memory cannot be watched")]
    NoWatch,
    /// It is longer than the cache.
    #[error("the buffer is longer than the cache")]
    Large,
    /// All entries are in use.
    #[error("all regions of the cache are in use")]
    Full,
    /// Mappings of the process are changing at this moment.
    #[error("mappings are changing at this moment")]
    Uncertain,
    /// Its pages cannot be watched.
    #[error("not watched: {0}")]
    Watch(Unwatched),
    /// The device refused the region.
    #[error(transparent)]
    Device(VerbsError),
}

/// Why a buffer cannot be used at all.
#[derive(Debug, Error)]
pub enum RegistrationError {
    /// Its length is zero, or its end is beyond the address space.
    #[error("a buffer of {len} bytes at {addr:#x} is not possible")]
    BadBuffer {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// It needs a bounce block, and is longer than one.
    #[error("a buffer of {len} bytes does not fit a bounce block of {block_bytes}; {uncached}")]
    TooLong {
        /// Length in bytes.
        len: u64,
        /// Bytes of a block.
        block_bytes: u64,
        /// Why it needs one.
        uncached: Uncached,
    },
    /// It needs a bounce block, and all are in use.
    #[error("all {blocks} bounce blocks are in use; {uncached}")]
    NoBlock {
        /// How many there are.
        blocks: usize,
        /// Why it needs one.
        uncached: Uncached,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] VerbsError),
    /// The pool has no room for the bounce blocks.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// How often each way was taken. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Buffers in a region that is registered anyway.
    pub pool: u64,
    /// Buffers found in the cache.
    pub hits: u64,
    /// Buffers not found in it.
    pub misses: u64,
    /// Cached regions whose memory was unmapped, discarded or moved.
    pub invalidated: u64,
    /// Cached regions deregistered to make room.
    pub evicted: u64,
    /// Buffers copied through a bounce block.
    pub bounced: u64,
    /// Bytes copied into bounce blocks.
    pub bytes_in: u64,
    /// Bytes copied out of bounce blocks.
    pub bytes_out: u64,
    /// Buffers registered for one use.
    pub once: u64,
    /// Buffers refused because no way was possible.
    pub refused: u64,
    /// Not cached: [`Uncached::Remote`].
    pub uncached_remote: u64,
    /// Not cached: [`Uncached::Unreachable`].
    pub uncached_unreachable: u64,
    /// Not cached: [`Uncached::NoWatch`].
    pub uncached_no_watch: u64,
    /// Not cached: [`Uncached::Large`].
    pub uncached_large: u64,
    /// Not cached: [`Uncached::Full`].
    pub uncached_full: u64,
    /// Not cached: [`Uncached::Uncertain`].
    pub uncached_uncertain: u64,
    /// Not cached: [`Uncached::Watch`].
    pub uncached_unwatched: u64,
    /// Not cached: [`Uncached::Device`].
    pub uncached_device: u64,
    /// Regions that the device refused to deregister.
    pub not_deregistered: u64,
}

impl Counters {
    fn note(&mut self, reason: &Uncached) {
        *match reason {
            Uncached::Remote => &mut self.uncached_remote,
            Uncached::Unreachable => &mut self.uncached_unreachable,
            Uncached::NoWatch => &mut self.uncached_no_watch,
            Uncached::Large => &mut self.uncached_large,
            Uncached::Full => &mut self.uncached_full,
            Uncached::Uncertain => &mut self.uncached_uncertain,
            Uncached::Watch(_) => &mut self.uncached_unwatched,
            Uncached::Device(_) => &mut self.uncached_device,
        } += 1;
    }
}

/// Which way a buffer took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// In a region that is registered anyway.
    Pool,
    /// In the cache.
    Cached,
    /// In a bounce block.
    Bounced,
    /// Registered for this use.
    Once,
}

#[derive(Debug)]
enum Held {
    Pool,
    Cached(usize),
    Bounced { block: u64, buffer: u64, copies_out: bool, own_region: bool },
    Once,
}

/// A buffer that work requests can name. Give it back to [`Registrar::release`] when they have
/// completed.
#[derive(Debug)]
#[must_use = "a buffer stays in use until it is released"]
pub struct Lease {
    /// First byte, as work requests and peers address it.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Key of work requests.
    pub lkey: u32,
    /// Key of peers, if the buffer is for a peer; 0 otherwise.
    pub rkey: u32,
    held: Held,
}

impl Lease {
    /// The way that was taken.
    pub fn way(&self) -> Way {
        match self.held {
            Held::Pool => Way::Pool,
            Held::Cached(_) => Way::Cached,
            Held::Bounced { .. } => Way::Bounced,
            Held::Once => Way::Once,
        }
    }
}

/// Registers the buffers of one protection domain.
#[derive(Debug)]
pub struct Registrar {
    pd: PdId,
    limits: Limits,
    /// Regions that callers have registered.
    standing: Vec<(MemoryRegion, Access)>,
    blocks: Option<(PoolRange, MemoryRegion)>,
    free_blocks: Vec<u64>,
    /// Keys that the device refused to deregister, and the block that a peer still reaches by one.
    kept_keys: Vec<(u32, Option<u64>)>,
    cache: Option<Cache>,
    why_no_cache: Option<WatchError>,
    is_process_reached: bool,
    counters: Counters,
}

impl Registrar {
    /// A registrar with its bounce blocks, which come out of the pool.
    ///
    /// # Errors
    /// When the pool has no room for the blocks, or the device refuses to register them.
    pub fn open<D: Device>(
        device: &mut D,
        pool: &mut Pool,
        pd: PdId,
        reach: Reach,
        limits: Limits,
    ) -> Result<Registrar, RegistrationError> {
        let (blocks, free_blocks) = open_blocks(device, pool, pd, &limits)?;
        let is_process_reached = matches!(reach, Reach::Process(_));
        let (cache, why_no_cache) = match reach {
            Reach::Process(Ok(watch)) => (Some(Cache::new(watch, &limits)), None),
            Reach::Process(Err(error)) => (None, Some(error)),
            Reach::Pool => (None, None),
        };
        let (standing, counters) = (Vec::new(), Counters::default());
        Ok(Registrar {
            pd,
            limits,
            standing,
            blocks,
            free_blocks,
            kept_keys: Vec::new(),
            cache,
            why_no_cache,
            is_process_reached,
            counters,
        })
    }

    /// Buffers in this region use its keys from now on. It stays registered as long as the
    /// registrar exists.
    pub fn add_region(&mut self, region: MemoryRegion, access: Access) {
        self.standing.push((region, access));
    }

    /// Makes a buffer usable.
    ///
    /// # Safety
    /// The buffer is memory of this process. Until the lease is released it stays mapped, nobody
    /// writes a [`Use::Source`], and nobody but the device accesses the others.
    ///
    /// # Errors
    /// When no way is possible, with the reason against the cache.
    pub unsafe fn acquire<D: Device>(
        &mut self,
        device: &mut D,
        pool: &mut Pool,
        (addr, len): (u64, u64),
        purpose: Use,
    ) -> Result<Lease, RegistrationError> {
        if len == 0 || addr.checked_add(len).is_none() {
            self.counters.refused += 1;
            return Err(RegistrationError::BadBuffer { addr, len });
        }
        let wanted = purpose.access();
        if let Some(region) = self.standing_region(addr, len, wanted) {
            self.counters.pool += 1;
            return Ok(lease(addr, len, region, purpose, Held::Pool));
        }
        let uncached = match self.acquire_cached(device, addr, len, purpose) {
            Ok(lease) => return Ok(lease),
            Err(reason) => reason,
        };
        self.counters.note(&uncached);
        self.end_kept_keys(device);
        let fits = len <= self.limits.block_bytes && !self.free_blocks.is_empty();
        let made = if fits {
            // SAFETY: the caller's contract.
            unsafe { self.bounce(device, pool, (addr, len), purpose) }
        } else if self.is_process_reached {
            self.register_once(device, addr, len, purpose)
        } else if len > self.limits.block_bytes {
            let block_bytes = self.limits.block_bytes;
            Err(RegistrationError::TooLong { len, block_bytes, uncached })
        } else {
            Err(RegistrationError::NoBlock { blocks: self.limits.blocks, uncached })
        };
        self.counters.refused += u64::from(made.is_err());
        made
    }

    /// Ends a use. Of a bounced [`Use::Sink`], the first `written` bytes are copied into the
    /// buffer.
    ///
    /// # Safety
    /// All work requests with the lease have completed, and the contract of
    /// [`acquire`](Registrar::acquire) holds until this returns. Nobody accesses the buffer
    /// meanwhile.
    pub unsafe fn release<D: Device>(
        &mut self,
        device: &mut D,
        pool: &mut Pool,
        lease: Lease,
        written: u64,
    ) {
        match lease.held {
            Held::Pool => {}
            Held::Cached(place) => {
                if let Some(cache) = &mut self.cache {
                    cache.release(device, place, &mut self.counters);
                }
            }
            Held::Once => self.deregister(device, lease.lkey, None),
            Held::Bounced { block, buffer, copies_out, own_region } => {
                if copies_out {
                    let len = written.min(lease.len);
                    let from = pool.bytes(block, len as usize);
                    let to = ptr::with_exposed_provenance_mut::<u8>(buffer as usize);
                    // SAFETY: the caller keeps the buffer mapped, at least `lease.len` bytes of it,
                    // and to itself. It does not overlap the block, which is the registrar's own.
                    unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
                    self.counters.bytes_out += len;
                }
                if own_region {
                    self.deregister(device, lease.lkey, Some(block));
                } else {
                    self.free_blocks.push(block);
                }
            }
        }
    }

    /// Deregisters what became stale. [`acquire`](Registrar::acquire) does it, too; call it when
    /// nothing is acquired for long, so that a device does not keep pages of memory that was freed.
    pub fn sweep<D: Device>(&mut self, device: &mut D) {
        self.end_kept_keys(device);
        if let Some(cache) = &mut self.cache {
            cache.sweep(device, &mut self.counters);
        }
    }

    /// Deregisters everything and frees the bounce blocks. Leases that were not released become
    /// invalid.
    ///
    /// # Errors
    /// When the blocks cannot be deregistered: then they stay in use.
    pub fn close<D: Device>(
        mut self,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<Counters, RegistrationError> {
        if let Some(cache) = &mut self.cache {
            cache.clear(device, &mut self.counters);
        }
        self.end_kept_keys(device);
        if let Some((lkey, _)) = self.kept_keys.first() {
            device.deregister(*lkey)?;
        }
        if let Some((range, region)) = self.blocks.take() {
            device.deregister(region.lkey)?;
            pool.free(range)?;
        }
        Ok(self.counters)
    }

    /// What was counted so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Why there is no cache although the device reaches all memory.
    pub fn why_no_cache(&self) -> Option<&WatchError> {
        self.why_no_cache.as_ref()
    }

    /// Regions and bytes in the cache.
    pub fn cached(&self) -> (usize, u64) {
        self.cache.as_ref().map_or((0, 0), |cache| (cache.regions(), cache.bytes()))
    }

    fn standing_region(&self, addr: u64, len: u64, wanted: Access) -> Option<MemoryRegion> {
        let inside = |region: &MemoryRegion| {
            let offset = addr.wrapping_sub(region.addr);
            offset < region.len && len <= region.len - offset
        };
        let found =
            self.standing.iter().find(|(region, has)| inside(region) && allows(*has, wanted));
        found.map(|(region, _)| *region)
    }

    fn acquire_cached<D: Device>(
        &mut self,
        device: &mut D,
        addr: u64,
        len: u64,
        purpose: Use,
    ) -> Result<Lease, Uncached> {
        if !self.is_process_reached {
            return Err(Uncached::Unreachable);
        }
        let is_written = match purpose {
            Use::Source => false,
            Use::Sink => true,
            Use::Remote(_) => return Err(Uncached::Remote),
        };
        let cache = self.cache.as_mut().ok_or(Uncached::NoWatch)?;
        let (place, region) =
            cache.acquire(device, self.pd, (addr, len), is_written, &mut self.counters)?;
        Ok(lease(addr, len, region, purpose, Held::Cached(place)))
    }

    /// # Safety
    /// As for [`acquire`](Registrar::acquire); the length is at most that of a block, and a block
    /// is free.
    unsafe fn bounce<D: Device>(
        &mut self,
        device: &mut D,
        pool: &mut Pool,
        (addr, len): (u64, u64),
        purpose: Use,
    ) -> Result<Lease, RegistrationError> {
        let none = || RegistrationError::BadBuffer { addr, len };
        let (_, mut region) = self.blocks.ok_or_else(none)?;
        let block = *self.free_blocks.last().ok_or_else(none)?;
        // A peer's key opens only this block's bytes, and only during this use.
        let own_region = matches!(purpose, Use::Remote(_));
        if own_region {
            region = device.register(self.pd, block, len, purpose.access())?;
        }
        self.free_blocks.pop();
        if purpose != Use::Sink {
            let from = ptr::with_exposed_provenance::<u8>(addr as usize);
            let to = pool.bytes_mut(block, len as usize);
            // SAFETY: the caller's buffer has `len` bytes, which nobody writes. The block is the
            // registrar's own.
            unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
            self.counters.bytes_in += len;
        }
        self.counters.bounced += 1;
        let copies_out = purpose.access().local_write;
        let held = Held::Bounced { block, buffer: addr, copies_out, own_region };
        Ok(lease(block, len, region, purpose, held))
    }

    fn register_once<D: Device>(
        &mut self,
        device: &mut D,
        addr: u64,
        len: u64,
        purpose: Use,
    ) -> Result<Lease, RegistrationError> {
        let region = device.register(self.pd, addr, len, purpose.access())?;
        self.counters.once += 1;
        Ok(lease(addr, len, region, purpose, Held::Once))
    }

    /// Ends a key. Its block is free when the device has done so: until then the peer reaches it.
    fn deregister<D: Device>(&mut self, device: &mut D, lkey: u32, block: Option<u64>) {
        match device.deregister(lkey) {
            Ok(()) => self.free_blocks.extend(block),
            Err(_) => {
                self.counters.not_deregistered += 1;
                self.kept_keys.push((lkey, block));
            }
        }
    }

    /// Asks the device again to end keys that it refused to: a window may have been bound to the
    /// region.
    fn end_kept_keys<D: Device>(&mut self, device: &mut D) {
        self.kept_keys.retain(|&(lkey, block)| {
            let stays = device.deregister(lkey).is_err();
            if !stays {
                self.free_blocks.extend(block);
            }
            stays
        });
    }
}

fn lease(addr: u64, len: u64, region: MemoryRegion, purpose: Use, held: Held) -> Lease {
    let rkey = if matches!(purpose, Use::Remote(_)) { region.rkey } else { 0 };
    Lease { addr, len, lkey: region.lkey, rkey, held }
}

/// Whether a region with these rights serves the wanted ones.
fn allows(has: Access, wanted: Access) -> bool {
    (has.local_write || !wanted.local_write)
        && (has.remote_write || !wanted.remote_write)
        && (has.remote_read || !wanted.remote_read)
        && (has.remote_atomic || !wanted.remote_atomic)
        && (has.bind_window || !wanted.bind_window)
}

type Blocks = (Option<(PoolRange, MemoryRegion)>, Vec<u64>);

fn open_blocks<D: Device>(
    device: &mut D,
    pool: &mut Pool,
    pd: PdId,
    limits: &Limits,
) -> Result<Blocks, RegistrationError> {
    let Limits { blocks, block_bytes, .. } = *limits;
    if blocks == 0 || block_bytes == 0 {
        return Ok((None, Vec::new()));
    }
    let too_long = PoolError::BadRange { len: u64::MAX, align: BLOCK_ALIGN };
    let bytes = (blocks as u64).checked_mul(block_bytes).ok_or(too_long)?;
    let range = pool.alloc(bytes, BLOCK_ALIGN)?;
    match device.register(pd, range.addr, range.len, Access::LOCAL) {
        Ok(region) => {
            let addresses = (0..blocks as u64).rev().map(|i| range.addr + i * block_bytes);
            Ok((Some((range, region)), addresses.collect()))
        }
        Err(error) => {
            pool.free(range)?;
            Err(error.into())
        }
    }
}
