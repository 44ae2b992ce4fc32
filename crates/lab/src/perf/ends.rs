//! One side of a test on its device: queue pairs, memory, and the bytes that it expects.
//!
//! Each queue pair is a link of a [mesh](comm::mesh) with as many buffers to send from as to
//! receive into. A buffer to send from holds a pattern of its own; the last bytes of message `n`,
//! the stamp, hold `n`. So a lost, repeated or misplaced message is noticed, and a program that
//! polls memory sees the end of a message.

use std::net::SocketAddr;

use adapter::congestion::Choice;
use adapter::connect::{QpAddress, RNR_RETRY_FOREVER, Terms, connect, path_mtu};
use adapter::owned::Adapter;
use comm::mesh::{Link, Mesh, MeshError, Place, ROUTE_HEADER, Ring, Wanted};
use nic::clock;
use nic::local_peers::OWN_PORT;
use nic::pool::Pool;
use roce::device::{self, Device};
use roce::endpoint::Reliability;
use roce::verbs::{Datagram, SgList, VerbsError};
use roce::world::{Path, Staging};
use service::Error;

use super::messages::{End, Verdict};
use super::test::{Operation, Service, Test};

/// Queue key of datagrams.
const QKEY: u32 = 0x0064_7170;

/// The rank of the other side: a test has two.
const OTHER: u32 = 1;

/// Local ACK timeout code: 67 ms.
const ACK_TIMEOUT: u8 = 14;

/// Unacknowledged packets per queue pair.
const WINDOW_PACKETS: u32 = 512;

/// One side of a test. It ends with its adapter.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) test: Test,
    pub(super) mesh: Mesh,
    /// First byte of the other side's memory, and its key.
    pub(super) remote: (u64, u32),
    /// Path MTU of the connections in bytes; 0 before they are connected.
    pub(super) mtu: u32,
    /// Destinations of datagrams, by queue pair.
    pub(super) datagrams: Vec<Datagram>,
}

impl Ends {
    /// Creates everything on the device and fills the buffers to send from.
    ///
    /// # Errors
    /// When memory or the device refuse.
    pub(super) fn open<F: Adapter>(adapter: &mut F, test: Test, seed: u64) -> Result<Ends, Error> {
        let range = adapter.memory_mut().alloc(test.memory(), 4096).map_err(Error::from_cause)?;
        let wanted: Vec<Wanted> = (0..test.qps).map(|qp| wanted(&test, qp)).collect();
        let memory = (range.addr, range.len);
        let mesh = Mesh::open(adapter.device(), clock::now(), memory, &wanted, seed)
            .map_err(|error| Error::because("the device refuses the test", &error))?;
        let ends = Ends { test, mesh, remote: (0, 0), mtu: 0, datagrams: Vec::new() };
        ends.fill(adapter.memory_mut());
        Ok(ends)
    }

    /// This side, as the other needs to know it.
    pub(super) fn describe<F: Adapter>(&self, adapter: &F, mtu: u32) -> End {
        let links = self.mesh.links().iter();
        End {
            address: adapter.local(),
            memory: self.mesh.region.addr,
            rkey: self.mesh.region.rkey,
            mtu,
            selective: adapter.reliability() == Reliability::Selective && !self.test.go_back_n,
            no_xdp: None,
            qps: links.map(|link| (link.qpn.get(), link.psn.get())).collect(),
        }
    }

    /// Connects all queue pairs to those of the other side, which may be a process of this machine.
    /// Returns why there is no same-host path to it, where there might be one.
    ///
    /// # Errors
    /// When the other side's numbers are impossible, or the device refuses.
    pub(super) fn connect<F: Adapter>(
        &mut self,
        adapter: &mut F,
        ours: &End,
        peer: &End,
        congestion: Choice,
    ) -> Result<Option<String>, Error> {
        if peer.qps.len() != self.mesh.links().len() {
            return Err(Error::invalid("the other side has another number of queue pairs"));
        }
        let limit = ours.mtu.min(self.test.mtu);
        let mtu = path_mtu(limit, peer.mtu).ok_or_else(|| {
            Error::invalid(format_args!("no path MTU fits {} bytes", limit.min(peer.mtu)))
        })?;
        self.remote = (peer.memory, peer.rkey);
        self.mtu = mtu.bytes();
        let refused = |error: VerbsError| Error::because("cannot connect", &error);
        if self.test.service == Service::Ud {
            self.start_datagrams(adapter.device(), peer).map_err(refused)?;
            return Ok(None);
        }
        // Packets reach a peer that is no process of this machine.
        let found = adapter.discovery().and_then(|own| own.discover(peer.address, OWN_PORT));
        let terms = Terms {
            congestion,
            is_ours: true,
            timeout: ACK_TIMEOUT,
            rnr_retry: RNR_RETRY_FOREVER,
            window_packets: WINDOW_PACKETS,
            rate_limit_bps: self.test.rate_limit_bps,
            dscp: 0,
        };
        for (ours, theirs) in ours.queue_pairs().zip(peer.queue_pairs()) {
            connect(adapter, clock::now(), &terms, (&ours, &theirs), mtu, found.clone())
                .map_err(refused)?;
        }
        let expected = self.test.may_be_direct() && peer.address.ip() == ours.address.ip();
        Ok(found.err().filter(|_| expected))
    }

    /// Makes all queue pairs ready for datagrams, and handles for those of the other side.
    fn start_datagrams<D: Device>(&mut self, device: &mut D, peer: &End) -> Result<(), VerbsError> {
        for (at, QpAddress { address, qpn, .. }) in peer.queue_pairs().enumerate() {
            let Link { qpn: own, psn, .. } = self.mesh.links()[at];
            device::start_datagrams(device, clock::now(), own, QKEY, psn)?;
            if self.test.rate_limit_bps > 0 {
                device::limit_rate(device, clock::now(), own, self.test.rate_limit_bps)?;
            }
            let ah = device.create_ah(self.mesh.pd, &Path::new(address))?;
            self.datagrams.push(Datagram { ah, dest_qp: qpn, qkey: QKEY });
        }
        Ok(())
    }

    /// Posts a receive for each buffer of each queue pair.
    ///
    /// # Errors
    /// When the device refuses.
    pub(super) fn post_receives<D: Device>(&self, device: &mut D) -> Result<(), Error> {
        for link in 0..self.mesh.links().len() {
            let posted = self.mesh.post_receives(device, clock::now(), link);
            let refused = |error| format!("cannot post receives: {}", in_words(&error));
            posted.map_err(|error| Error::invalid(refused(error)))?;
        }
        Ok(())
    }

    /// First byte of a buffer in the memory at `base`, which is laid out alike on both sides. The
    /// bytes in front of it are the place of a route header.
    pub(super) fn buffer(&self, base: u64, qp: usize, slot: u32, is_in: bool) -> u64 {
        let wanted = &self.mesh.links()[qp].wanted;
        let ring = if is_in { &wanted.inbox } else { &wanted.outbox };
        ring.place(base, slot)
    }

    /// The buffer of message `number`.
    pub(super) fn slot(&self, number: u64) -> u32 {
        self.mesh.links()[0].wanted.outbox.slot(number)
    }

    /// A buffer of this side.
    pub(super) fn sges(&self, qp: usize, slot: u32, is_in: bool) -> SgList {
        let place = Place { link: qp, slot };
        self.mesh.piece(self.mesh.buffer(place, is_in), self.test.bytes)
    }

    fn fill(&self, pool: &mut Pool) {
        if self.test.operation == Operation::Atomic {
            return;
        }
        let len = self.test.bytes as usize;
        for qp in 0..self.mesh.links().len() {
            for slot in 0..self.test.slots() {
                let bytes =
                    pool.bytes_mut(self.buffer(self.mesh.region.addr, qp, slot, false), len);
                fill_pattern(bytes, qp, slot);
            }
        }
    }

    /// Writes the number of a message into its buffer.
    pub(super) fn stamp(&self, pool: &mut Pool, qp: usize, number: u64) {
        let place = self.stamp_place(qp, self.slot(number), false);
        let width = self.stamp_width();
        pool.bytes_mut(place, width).copy_from_slice(&stamp(number)[..width]);
    }

    /// Whether a buffer that was received into has the stamp of a message.
    pub(super) fn has_stamp(&self, pool: &Pool, qp: usize, slot: u32, number: u64) -> bool {
        let width = self.stamp_width();
        pool.bytes(self.stamp_place(qp, slot, true), width) == &stamp(number)[..width]
    }

    /// The number in a buffer that was received into; none if a message is too short to hold it.
    pub(super) fn stamped(&self, pool: &Pool, qp: usize, slot: u32) -> Option<u64> {
        let bytes = pool.bytes(self.stamp_place(qp, slot, true), self.stamp_width());
        u64::from_le_bytes(bytes.try_into().ok()?).checked_sub(1)
    }

    fn stamp_width(&self) -> usize {
        if self.test.bytes >= 8 { 8 } else { 1 }
    }

    fn stamp_place(&self, qp: usize, slot: u32, is_in: bool) -> u64 {
        let end = self.buffer(self.mesh.region.addr, qp, slot, is_in) + u64::from(self.test.bytes);
        end - self.stamp_width() as u64
    }

    /// Compares a buffer that was received into with message `number`, or with the pattern alone.
    pub(super) fn verify(
        &self,
        pool: &Pool,
        qp: usize,
        slot: u32,
        number: Option<u64>,
        verdict: &mut Verdict,
    ) {
        let source = number.map_or(slot, |number| self.slot(number));
        let mut expected = vec![0; self.test.bytes as usize];
        fill_pattern(&mut expected, qp, source);
        if let Some(number) = number {
            let (at, width) = (expected.len() - self.stamp_width(), self.stamp_width());
            expected[at..].copy_from_slice(&stamp(number)[..width]);
        }
        let found = pool.bytes(self.buffer(self.mesh.region.addr, qp, slot, true), expected.len());
        verdict.verified_bytes += expected.len() as u64;
        verdict.wrong_buffers += u64::from(found != expected);
    }

    /// The last of `sent` messages that used a buffer.
    pub(super) fn last_in(&self, sent: u64, slot: u32) -> Option<u64> {
        let slots = u64::from(self.test.slots());
        let last = sent.checked_sub(1)?;
        let back = (last % slots + slots - u64::from(slot)) % slots;
        last.checked_sub(back)
    }
}

/// A queue pair of a test, and where its buffers are: both sides have the same layout, since each
/// writes and reads in the other's. In front of a buffer is the place of a route header.
fn wanted(test: &Test, qp: u32) -> Wanted {
    let (slots, stride) = (test.slots(), test.stride());
    let ring = |is_in: u32| Ring {
        offset: u64::from(qp * 2 + is_in) * u64::from(slots) * stride + u64::from(ROUTE_HEADER),
        stride,
        slots,
        bytes: test.bytes,
    };
    let work = slots.max(2);
    Wanted {
        peer: OTHER,
        transport: test.service.transport(),
        sends: work,
        receives: work,
        outbox: ring(0),
        inbox: ring(1),
    }
}

/// Why the connection of a test has failed.
pub(super) fn in_words(error: &MeshError) -> String {
    match error {
        MeshError::Silent { .. } => {
            "the other side does not acknowledge (retries exceeded); if small messages pass, the path drops large packets: --mtu 1024".into()
        }
        MeshError::Failed { status, .. } => format!("a work request ended with {status:?}"),
        MeshError::NotPosted { source, .. } | MeshError::NoReceive { source, .. } => {
            source.to_string()
        }
        MeshError::NoCompletions(_) | MeshError::Unasked => error.to_string(),
    }
}

/// The stamp of a message. That of the first is not zero, as memory is before it.
fn stamp(number: u64) -> [u8; 8] {
    number.wrapping_add(1).to_le_bytes()
}

/// Bytes that no other buffer has.
fn fill_pattern(bytes: &mut [u8], qp: usize, slot: u32) {
    let mut state = ((qp as u64) << 32 | u64::from(slot)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for chunk in bytes.chunks_mut(8) {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        chunk.copy_from_slice(&(state ^ state >> 29).to_le_bytes()[..chunk.len()]);
    }
}

/// Queue pairs are at the address that the control connection comes from, so nobody can make a side
/// send to a third.
///
/// # Errors
/// When they are said to be elsewhere.
pub(super) fn check_address(end: &End, peer: SocketAddr) -> Result<(), Error> {
    let (named, real) = (end.address.ip().to_canonical(), peer.ip().to_canonical());
    if named == real {
        return Ok(());
    }
    Err(Error::invalid(format_args!("the queue pairs of {real} would be at {named}"))
        .hint("connect over the network of the devices: both sides use one address for both"))
}

#[cfg(test)]
mod tests {
    use super::super::test::tests::sample;
    use super::*;
    use crate::devices;

    /// Puts message `number` where the other side would have put it.
    fn deliver(ends: &Ends, pool: &mut Pool, qp: usize, number: u64) {
        ends.stamp(pool, qp, number);
        let (slot, len) = (ends.slot(number), ends.test.bytes as usize);
        let from = pool.bytes(ends.buffer(ends.mesh.region.addr, qp, slot, false), len).to_vec();
        pool.bytes_mut(ends.buffer(ends.mesh.region.addr, qp, slot, true), len)
            .copy_from_slice(&from);
    }

    fn wrong_buffers(ends: &Ends, pool: &Pool, qp: usize, number: u64) -> u64 {
        let mut verdict = Verdict::default();
        ends.verify(pool, qp, ends.slot(number), Some(number), &mut verdict);
        assert_eq!(verdict.verified_bytes, u64::from(ends.test.bytes));
        verdict.wrong_buffers
    }

    #[test]
    fn a_wrong_byte_an_old_message_and_another_buffers_are_noticed() {
        for bytes in [1, 7, 8, 9, 4096] {
            let test = Test { bytes, ..sample() };
            let local = "127.6.1.1".parse().expect("literal");
            let mut adapter = devices::software(local, test.memory(), 1, None).expect("loopback");
            let ends = Ends::open(&mut adapter, test, 1).expect("a small test");
            let pool = adapter.memory_mut();
            let number = 2 + u64::from(test.slots());
            deliver(&ends, pool, 1, number);
            assert!(ends.has_stamp(pool, 1, ends.slot(number), number), "{bytes}");
            assert_eq!(wrong_buffers(&ends, pool, 1, number), 0, "{bytes}");
            let older = number - u64::from(test.slots());
            assert_eq!(wrong_buffers(&ends, pool, 1, older), 1, "{bytes}: the one before it");
            assert_eq!(wrong_buffers(&ends, pool, 0, number), 1, "{bytes}: nothing came there");
            let first = ends.buffer(ends.mesh.region.addr, 1, ends.slot(number), true);
            pool.bytes_mut(first, 1)[0] ^= 1;
            assert_eq!(wrong_buffers(&ends, pool, 1, number), 1, "{bytes}: a flipped bit");
        }
    }

    #[test]
    fn the_last_message_of_a_buffer_is_known() {
        let mut adapter =
            devices::software("127.6.1.2".parse().expect("literal"), sample().memory(), 1, None);
        let adapter = adapter.as_mut().expect("loopback");
        let ends = Ends::open(adapter, sample(), 1).expect("a small test");
        let slots = u64::from(sample().slots());
        for sent in 0..3 * slots {
            for slot in 0..sample().slots() {
                let slowly = (0..sent).rev().find(|number| ends.slot(*number) == slot);
                assert_eq!(ends.last_in(sent, slot), slowly, "{sent} {slot}");
            }
        }
    }
}
