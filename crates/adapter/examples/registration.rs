//! Sends from a buffer that is freed and allocated again at the same address, over and over,
//! through the registration cache, and checks that what arrives is never what the old buffer held.
//!
//! ```console
//! $ cargo run -p adapter --example registration -- /usr/lib/x86_64-linux-gnu/libibverbs.so.1 rxe0
//! ```
//!
//! The last line says what the same WRITE does with a key that was kept without a cache: a device
//! that pins pages then sends from pages that the program does not have any more.

use std::path::Path as FilePath;
use std::sync::Arc;

use adapter::owned::{Adapter, Loaded};
use adapter::registrations::watch::Watch;
use adapter::registrations::{Limits, Reach, Registrar, Use, Way};
use arrayvec::ArrayVec;
use nic::clock;
use nic::loaded::{Library, LoadedDevice};
use nic::pool::Pool;
use roce::device::{self, Device};
use roce::endpoint::{Connect, QpConfig};
use roce::verbs::{Access, Completion, CqId, PdId, Qpn, SendOp, SendWr, SgList, Sge, WcStatus};
use roce::wire::Psn;
use roce::world::{Path, Staging};

const BYTES: u64 = 1 << 20;
const ROUNDS: u32 = 100;

type Failed = Box<dyn std::error::Error>;

/// Two queue pairs of one device, connected to each other, and the memory that the first writes.
struct Rig {
    adapter: Loaded,
    pd: PdId,
    cq: CqId,
    qpn: Qpn,
    target: u64,
    rkey: u32,
}

impl Rig {
    /// Writes the buffer into the target, and returns the byte that all of the target then holds.
    fn write(&mut self, addr: u64, lkey: u32) -> Result<u8, Failed> {
        let sges = SgList::from_iter([Sge { addr, len: BYTES as u32, lkey }]);
        let op = SendOp::Write { remote_addr: self.target, rkey: self.rkey };
        let wr = SendWr { op, sges, signaled: true, ..SendWr::default() };
        self.adapter
            .device()
            .post_send(clock::now(), self.qpn, &[wr])
            .map_err(|error| format!("{error:?}"))?;
        let mut done = ArrayVec::<Completion, 1>::new();
        while done.is_empty() {
            self.adapter.turn(clock::now(), |_, _| false);
            self.adapter.device().poll_cq(self.cq, &mut done)?;
        }
        let status = done[0].status;
        if status != WcStatus::Success {
            return Err(format!("the WRITE ended with {status:?}").into());
        }
        let bytes = self.adapter.memory().bytes(self.target, BYTES as usize);
        let first = bytes[0];
        match bytes.iter().all(|byte| *byte == first) {
            true => Ok(first),
            false => Err("the target holds bytes of two buffers".into()),
        }
    }
}

fn rig(library: &str, name: &str) -> Result<(Rig, Registrar), Failed> {
    let library = Library::load(FilePath::new(library))?;
    let opened = LoadedDevice::open(&library, name)?;
    let mut adapter = Loaded::new(opened, Pool::new(4 * BYTES)?);
    let range = adapter.memory_mut().alloc(BYTES, 4096)?;
    let local = adapter.local();
    let opened = adapter.device();
    let pd = opened.alloc_pd()?;
    let cq = opened.create_cq(16)?;
    let region = opened.register(pd, range.addr, range.len, Access::ALL)?;
    let mut qps = Vec::new();
    for _ in 0..2 {
        let qpn = opened.create_qp(QpConfig::rc(pd, cq, 4, 4))?;
        device::initialize(opened, clock::now(), qpn)?;
        qps.push(qpn);
    }
    for (own, peer) in [(qps[0], qps[1]), (qps[1], qps[0])] {
        let connect = Connect::new(Path::new(local), peer, Psn::new(0));
        let connect = Connect { local_psn: Psn::new(0), ..connect };
        device::connect(opened, clock::now(), own, &connect)?;
    }
    let reach = Reach::Process(Watch::open().map(Arc::new));
    // A registrar without blocks takes nothing out of a pool.
    let mut blocks = Pool::new(4096)?;
    let registrar =
        Registrar::open(opened, &mut blocks, pd, reach, Limits { blocks: 0, ..Limits::default() })?;
    let rig = Rig { adapter, pd, cq, qpn: qps[0], target: range.addr, rkey: region.rkey };
    Ok((rig, registrar))
}

/// Fresh pages at an address, or anywhere, filled with a byte.
fn fresh(addr: Option<u64>, byte: u8) -> Result<u64, Failed> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let place = if addr.is_some() { libc::MAP_FIXED_NOREPLACE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | place;
    let at = std::ptr::with_exposed_provenance_mut(addr.unwrap_or(0) as usize);
    // SAFETY: addresses that nothing uses, or of the kernel's choice.
    let at = unsafe { libc::mmap(at, BYTES as usize, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the pages just mapped.
    unsafe { at.write_bytes(byte, BYTES as usize) };
    Ok(at.expose_provenance() as u64)
}

fn unmap(addr: u64) {
    // SAFETY: pages of `fresh`, which nothing uses any more.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(addr as usize), BYTES as usize) };
}

fn main() -> Result<(), Failed> {
    let mut args = std::env::args().skip(1);
    let (Some(library), Some(name)) = (args.next(), args.next()) else {
        return Err("usage: registration LIBRARY DEVICE".into());
    };
    let (mut rig, mut registrar) = rig(&library, &name)?;
    let mut none = Pool::new(4096)?;
    let mut addr = fresh(None, 0)?;
    let (mut cached, mut others) = (0, 0);
    for round in 0..ROUNDS {
        let byte = round as u8;
        for _ in 0..2 {
            // SAFETY: the buffer stays mapped, and nobody writes it, until it is released.
            let lease = unsafe {
                registrar.acquire(rig.adapter.device(), &mut none, (addr, BYTES), Use::Source)?
            };
            match lease.way() {
                Way::Cached => cached += 1,
                Way::Pool | Way::Bounced | Way::Once => others += 1,
            }
            let found = rig.write(lease.addr, lease.lkey)?;
            // SAFETY: the WRITE has completed.
            unsafe { registrar.release(rig.adapter.device(), &mut none, lease, 0) };
            if found != byte {
                return Err(format!("round {round}: {found} arrived").into());
            }
        }
        unmap(addr);
        addr = fresh(Some(addr), byte.wrapping_add(1))?;
    }
    println!(
        "{ROUNDS} buffers at one address, each sent twice: {cached} from the cache, {others} not"
    );
    println!("{:?}", registrar.counters());
    if let Some(why) = registrar.why_no_cache() {
        println!("no cache: {why}");
    }
    match keep_a_key(&mut rig, addr) {
        Ok(true) => println!("with a key that was kept: the old bytes, this device pins pages"),
        Ok(false) => println!("with a key that was kept: the new bytes, this device pins no pages"),
        Err(error) => println!("with a key that was kept: {error}"),
    }
    Ok(())
}

/// What a program gets that keeps a key and does not notice what becomes of its memory: whether the
/// old bytes arrive.
fn keep_a_key(rig: &mut Rig, addr: u64) -> Result<bool, Failed> {
    let (old, new) = (201, 202);
    unmap(addr);
    fresh(Some(addr), old)?;
    let region = rig.adapter.device().register(rig.pd, addr, BYTES, Access::LOCAL_READ)?;
    unmap(addr);
    fresh(Some(addr), new)?;
    Ok(rig.write(addr, region.lkey)? == old)
}
