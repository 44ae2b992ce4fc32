//! The AF_XDP socket: its memory (UMEM) and the four rings shared with the kernel.
//!
//! The memory is cut into frames of [`CHUNK`] bytes, some to receive into and some to send from.
//! Each frame belongs to one side at any time: a receive frame to the kernel from the fill ring to
//! the receive ring, a send frame from the send ring to the completion ring. Nothing is allocated
//! after the socket was opened.
//!
//! What is in the frames does not belong here.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use roce::Duration;

use super::XdpError;
use crate::clock;

/// Bytes of a frame of the memory: one page, the longest that the kernel allows.
const CHUNK: u32 = 4096;

/// Bytes that the kernel keeps free in front of a received packet (`XDP_PACKET_HEADROOM`).
const HEADROOM: u32 = 256;

/// Longest Ethernet frame that can be received.
pub(super) const MAX_FRAME: u32 = CHUNK - HEADROOM;

/// Frames to receive into, and to send from. Powers of two, as the lengths of the rings must be.
const RECEIVE_FRAMES: u32 = 2048;
const SEND_FRAMES: u32 = 1024;

const UMEM_BYTES: usize = ((RECEIVE_FRAMES + SEND_FRAMES) * CHUNK) as usize;

/// System calls that try to make room in the send ring; each takes 32 packets off it.
const KICKS: usize = 64;

/// How long to wait for the queue: the kernel releases that of a closed socket a little later.
const BIND_WAIT: Duration = Duration::from_millis(500);

/// A shared mapping.
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

impl Mapping {
    /// Maps `bytes` of a descriptor, or new memory.
    fn new(bytes: usize, of: Option<(&OwnedFd, i64)>) -> io::Result<Mapping> {
        let (fd, offset) = of.map_or((-1, 0), |(fd, offset)| (fd.as_raw_fd(), offset));
        let kind = if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS } else { libc::MAP_SHARED };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = kind | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, offset) };
        let base = if base == libc::MAP_FAILED { None } else { NonNull::new(base.cast()) };
        base.map(|base| Mapping { base, bytes }).ok_or_else(io::Error::last_os_error)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with these bounds, and its owner hands out no reference that
        // outlives it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// One ring. `T` is its entry, of any bit pattern.
struct Ring<T> {
    map: Mapping,
    offsets: libc::xdp_ring_offset,
    len: u32,
    /// Our own index: the next entry to write or to read.
    next: u32,
    entry: std::marker::PhantomData<T>,
}

impl<T: Copy> Ring<T> {
    fn open(
        fd: &OwnedFd,
        offsets: libc::xdp_ring_offset,
        place: i64,
        len: u32,
    ) -> io::Result<Ring<T>> {
        let bytes = offsets.desc as usize + len as usize * size_of::<T>();
        let map = Mapping::new(bytes, Some((fd, place)))?;
        Ok(Ring { map, offsets, len, next: 0, entry: std::marker::PhantomData })
    }

    fn index(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: the kernel's offsets lie within the mapping, in front of the entries, and are
        // aligned; both sides access the index atomically.
        unsafe { self.map.base.add(offset as usize).cast::<AtomicU32>().as_ref() }
    }

    fn entry(&self, index: u32) -> *mut T {
        let at = (index & (self.len - 1)) as usize;
        // SAFETY: the entries follow `desc`, and `at` is below the length of the ring.
        unsafe { self.map.base.add(self.offsets.desc as usize).cast::<T>().add(at).as_ptr() }
    }

    /// Entries that the kernel has not taken yet, of a ring that we write.
    fn pending(&self) -> u32 {
        self.next.wrapping_sub(self.index(self.offsets.consumer).load(Ordering::Acquire))
    }

    /// Adds an entry if there is room. The kernel sees it after [`publish`](Ring::publish).
    fn push(&mut self, entry: T) -> bool {
        if self.pending() >= self.len {
            return false;
        }
        // SAFETY: an entry between consumer and producer index plus length is ours to write.
        unsafe { self.entry(self.next).write(entry) };
        self.next = self.next.wrapping_add(1);
        true
    }

    fn publish(&self) {
        self.index(self.offsets.producer).store(self.next, Ordering::Release);
    }

    /// The next entry of a ring that the kernel writes. It keeps its place until
    /// [`release`](Ring::release).
    fn pop(&mut self) -> Option<T> {
        let produced = self.index(self.offsets.producer).load(Ordering::Acquire);
        if produced == self.next {
            return None;
        }
        // SAFETY: entries before the producer index are written and not touched by the kernel until
        // released.
        let entry = unsafe { self.entry(self.next).read() };
        self.next = self.next.wrapping_add(1);
        Some(entry)
    }

    fn release(&self) {
        self.index(self.offsets.consumer).store(self.next, Ordering::Release);
    }
}

/// A socket bound to one queue of an interface.
pub(super) struct Socket {
    // Closed first: afterwards the kernel writes neither rings nor memory.
    pub(super) fd: OwnedFd,
    fill: Ring<u64>,
    completion: Ring<u64>,
    receive: Ring<libc::xdp_desc>,
    send: Ring<libc::xdp_desc>,
    umem: Mapping,
    /// Addresses of send frames that are ours.
    free: Vec<u64>,
    /// Whether the last flush has left frames in the send ring.
    has_refused: bool,
}

// SAFETY: the mappings belong to this value alone and move with it; only a unique holder writes
// them.
unsafe impl Send for Socket {}

impl Socket {
    /// Opens a socket for one queue. Copy mode: frames are copied between the driver's memory and
    /// ours.
    pub(super) fn open(ifindex: u32, queue: u32) -> Result<Socket, XdpError> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers are passed.
        let raw = unsafe { libc::socket(libc::AF_XDP, kind, 0) };
        if raw < 0 {
            return Err(XdpError::of("opening an AF_XDP socket")(io::Error::last_os_error()));
        }
        // SAFETY: the descriptor is new and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let umem = Mapping::new(UMEM_BYTES, None).map_err(XdpError::of("memory for frames"))?;
        Socket::assemble(fd, umem, ifindex, queue).map_err(XdpError::of("setting up AF_XDP"))
    }

    fn assemble(fd: OwnedFd, umem: Mapping, ifindex: u32, queue: u32) -> io::Result<Socket> {
        // SAFETY: all zeroes is a valid registration.
        let mut registration: libc::xdp_umem_reg = unsafe { std::mem::zeroed() };
        registration.addr = umem.base.as_ptr().expose_provenance() as u64;
        registration.len = UMEM_BYTES as u64;
        registration.chunk_size = CHUNK;
        set(&fd, libc::XDP_UMEM_REG, &registration)?;
        set(&fd, libc::XDP_UMEM_FILL_RING, &RECEIVE_FRAMES)?;
        set(&fd, libc::XDP_UMEM_COMPLETION_RING, &SEND_FRAMES)?;
        set(&fd, libc::XDP_RX_RING, &RECEIVE_FRAMES)?;
        set(&fd, libc::XDP_TX_RING, &SEND_FRAMES)?;
        let offsets = ring_offsets(&fd)?;
        let mut fill =
            Ring::open(&fd, offsets.fr, libc::XDP_UMEM_PGOFF_FILL_RING as i64, RECEIVE_FRAMES)?;
        let place = libc::XDP_UMEM_PGOFF_COMPLETION_RING as i64;
        let completion = Ring::open(&fd, offsets.cr, place, SEND_FRAMES)?;
        let receive = Ring::open(&fd, offsets.rx, libc::XDP_PGOFF_RX_RING, RECEIVE_FRAMES)?;
        let send = Ring::open(&fd, offsets.tx, libc::XDP_PGOFF_TX_RING, SEND_FRAMES)?;
        (0..RECEIVE_FRAMES).all(|frame| fill.push(u64::from(frame * CHUNK)));
        fill.publish();
        bind(&fd, ifindex, queue)?;
        let last = RECEIVE_FRAMES + SEND_FRAMES;
        let free = (RECEIVE_FRAMES..last).map(|frame| u64::from(frame * CHUNK)).collect();
        Ok(Socket { fd, fill, completion, receive, send, umem, free, has_refused: false })
    }

    /// Queues a frame. `false` when all send frames are in use even after the kernel was called.
    pub(super) fn queue(&mut self, frame: &[u8]) -> bool {
        if frame.len() > CHUNK as usize {
            return false;
        }
        if self.free.is_empty() {
            self.flush();
        }
        let Some(addr) = self.free.pop() else {
            return false;
        };
        // SAFETY: `addr` is a send frame that is ours, of CHUNK bytes within the memory, and
        // `frame` is not in it.
        unsafe {
            let into = self.umem.base.add(addr as usize).as_ptr();
            into.copy_from_nonoverlapping(frame.as_ptr(), frame.len());
        }
        // The ring has a place for each send frame.
        self.send.push(libc::xdp_desc { addr, len: frame.len() as u32, options: 0 })
    }

    /// Whether the kernel has refused frames, which are still in the send ring.
    pub(super) fn has_refused(&self) -> bool {
        self.has_refused
    }

    /// Makes the kernel send what is queued, and collects completed frames.
    pub(super) fn flush(&mut self) {
        self.send.publish();
        for _ in 0..KICKS {
            if self.send.pending() == 0 {
                break;
            }
            // In copy mode the packets leave within this call. SAFETY: nothing is passed but
            // lengths of zero.
            let rc = unsafe {
                let (none, flags) = (std::ptr::null(), libc::MSG_DONTWAIT);
                libc::sendto(self.fd.as_raw_fd(), none, 0, flags, std::ptr::null(), 0)
            };
            let errno = io::Error::last_os_error().raw_os_error();
            // EAGAIN: more than one call takes. Otherwise the device is full or gone: a later flush
            // tries again.
            if rc < 0 && errno != Some(libc::EAGAIN) {
                break;
            }
        }
        self.has_refused = self.send.pending() > 0;
        while let Some(addr) = self.completion.pop() {
            if self.free.len() < SEND_FRAMES as usize {
                self.free.push(addr & !u64::from(CHUNK - 1));
            }
        }
        self.completion.release();
    }

    /// Passes up to `most` received frames to `take`, and returns how many there were.
    pub(super) fn receive(&mut self, most: usize, mut take: impl FnMut(&[u8])) -> usize {
        let mut taken = 0;
        while taken < most {
            let Some(libc::xdp_desc { addr, len, .. }) = self.receive.pop() else {
                break;
            };
            let end = addr.saturating_add(u64::from(len));
            if end <= UMEM_BYTES as u64 {
                // SAFETY: in bounds by the check; the kernel does not touch the frame before it is
                // in the fill ring.
                let frame = unsafe {
                    std::slice::from_raw_parts(
                        self.umem.base.add(addr as usize).as_ptr(),
                        len as usize,
                    )
                };
                take(frame);
            }
            self.fill.push(addr & !u64::from(CHUNK - 1));
            taken += 1;
        }
        if taken > 0 {
            self.receive.release();
            self.fill.publish();
        }
        taken
    }

    /// Packets lost because no frame was free, or the receive ring was full; `None` when the kernel
    /// does not report it.
    pub(super) fn overrun(&self) -> Option<u64> {
        // SAFETY: all zeroes is a valid value.
        let mut statistics: libc::xdp_statistics = unsafe { std::mem::zeroed() };
        get(&self.fd, libc::XDP_STATISTICS, &mut statistics).ok()?;
        Some(statistics.rx_dropped + statistics.rx_ring_full)
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("fd", &self.fd).finish_non_exhaustive()
    }
}

fn set<T: Copy>(fd: &OwnedFd, option: i32, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is readable for its length.
    let rc = unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_XDP, option, (&raw const *value).cast(), len)
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn get<T: Copy>(fd: &OwnedFd, option: i32, value: &mut T) -> io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is writable for its length, and made of integers.
    let rc = unsafe {
        let into = (&raw mut *value).cast();
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_XDP, option, into, &raw mut len)
    };
    match rc {
        0 if len as usize == size_of::<T>() => Ok(()),
        // An older kernel with shorter structures.
        0 => Err(io::ErrorKind::Unsupported.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn ring_offsets(fd: &OwnedFd) -> io::Result<libc::xdp_mmap_offsets> {
    // SAFETY: all zeroes is a valid value.
    let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
    get(fd, libc::XDP_MMAP_OFFSETS, &mut offsets)?;
    Ok(offsets)
}

fn bind(fd: &OwnedFd, ifindex: u32, queue: u32) -> io::Result<()> {
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: libc::XDP_COPY | libc::XDP_USE_NEED_WAKEUP,
        sxdp_ifindex: ifindex,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: 0,
    };
    let len = size_of::<libc::sockaddr_xdp>() as libc::socklen_t;
    let deadline = clock::now() + BIND_WAIT;
    loop {
        // SAFETY: the address is readable for its length.
        let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
        if rc == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EBUSY) || clock::now() >= deadline {
            return Err(error);
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
