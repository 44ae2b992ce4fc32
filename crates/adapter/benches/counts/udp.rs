//! Two software devices on UDP sockets of loopback, whose turns this thread takes one after the
//! other.
//!
//! A turn copies and checks payload and calls the kernel. Instructions of the kernel are not in the
//! profile; its calls are counted instead.

use std::net::{Ipv4Addr, SocketAddr};

use adapter::owned::{Adapter, Software};
use roce::device::Device;
use roce::endpoint::Endpoint;
use roce::verbs::{MemoryRegion, PdId, Qpn, SendWr};
use roce::world::Path;
use roce::{Duration, Time};

use crate::load::{Pair, REGION_BYTES};
use crate::phases::{Phase, Tally};

/// Time between two turns: no timer of the protocol expires.
const STEP: Duration = Duration::from_micros(2);

/// See the module's text.
pub(crate) struct Sockets {
    adapters: [Software; 2],
    regions: [u64; 2],
    now: Time,
}

impl Sockets {
    pub(crate) fn new() -> Sockets {
        let bind = |side: u8| {
            // An address of its own: ports and addresses are the same in every run.
            let local = SocketAddr::from((Ipv4Addr::new(127, 77, 0, 1 + side), 4791));
            Software::bind(local, REGION_BYTES, 0, u64::from(side) + 1).unwrap()
        };
        let mut adapters = [bind(0), bind(1)];
        let regions = [0, 1].map(|side: usize| {
            let range = adapters[side].memory_mut().alloc(REGION_BYTES, 4096).unwrap();
            range.addr
        });
        Sockets { adapters, regions, now: Time::from_nanos(1_000_000_000) }
    }

    fn turn(&mut self, side: usize, phase: Phase, tally: &mut Tally) {
        self.now += STEP;
        let (adapter, now) = (&mut self.adapters[side], self.now);
        tally.run(phase, || adapter.turn(now, |_, _| false));
    }
}

impl Pair for Sockets {
    type Device = Endpoint;

    const COUNTS_PACKETS: bool = false;

    fn device(&mut self, side: usize) -> &mut Endpoint {
        self.adapters[side].device().endpoint_mut()
    }

    fn path(&self, side: usize) -> Path {
        Path::new(self.adapters[side].local())
    }

    fn memory(&self, side: usize) -> u64 {
        self.regions[side]
    }

    fn now(&self) -> Time {
        self.now
    }

    fn requester(&mut self, tally: &mut Tally) {
        self.turn(0, Phase::Requester, tally);
    }

    fn responder(&mut self, tally: &mut Tally) {
        self.turn(1, Phase::Responder, tally);
    }

    fn idle(&mut self, _tally: &mut Tally) {}

    fn connected(&mut self, _side: usize, _qpn: Qpn, _pd: PdId, _region: &MemoryRegion) {}

    fn post(&mut self, qpn: Qpn, wrs: &[SendWr]) {
        let now = self.now();
        Device::post_send(self.device(0), now, qpn, wrs).unwrap();
    }

    fn calls(&mut self) -> Vec<(&'static str, u64)> {
        let mut calls = vec![("sendmmsg", 0), ("recvmmsg", 0)];
        for adapter in &self.adapters {
            adapter.counters(&mut |name, value| match name {
                "udp.tx.syscalls" => calls[0].1 += value,
                "udp.rx.syscalls" => calls[1].1 += value,
                _ => {}
            });
        }
        calls
    }
}
