//! Two endpoints that exchange headers: neither payload nor checksums nor system calls.

use std::net::SocketAddr;

use roce::device::Device;
use roce::endpoint::{Endpoint, EndpointConfig};
use roce::verbs::{MemoryRegion, PdId, Qpn, SendWr};
use roce::world::{Origin, Path};
use roce::{Duration, Time};

use crate::load::Pair;
use crate::phases::{Phase, Tally};

/// Most packets that cross before the other side has its turn, as with a wire.
const BURST_PACKETS: u32 = 128;

/// Time between two exchanges.
const STEP: Duration = Duration::from_micros(2);

/// See the module's text.
pub(crate) struct Headers {
    endpoints: [Endpoint; 2],
    now: Time,
}

impl Headers {
    pub(crate) fn new() -> Headers {
        let endpoint = |seed| Endpoint::new(EndpointConfig { seed, ..EndpointConfig::default() });
        Headers { endpoints: [1, 2].map(endpoint), now: Time::from_nanos(1_000_000_000) }
    }

    fn address(side: usize) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1 + side as u8], 4791))
    }

    /// Takes packets of one side to the other.
    fn carry(&mut self, from: usize, make: Phase, handle: Phase, tally: &mut Tally) {
        self.now += STEP;
        let now = self.now;
        let origin = Origin::new(Headers::address(from), Headers::address(1 - from).ip());
        let [a, b] = &mut self.endpoints;
        let (source, sink) = if from == 0 { (a, b) } else { (b, a) };
        for _ in 0..BURST_PACKETS {
            let Some(transmit) = tally.run(make, || source.poll_transmit(now)) else {
                return;
            };
            tally.add(make, 1, "packet");
            let len = transmit.payload_len();
            tally.run(handle, || sink.handle_packet(now, &origin, &transmit.headers, len));
            tally.add(handle, 1, "packet");
        }
    }
}

impl Pair for Headers {
    type Device = Endpoint;

    const COUNTS_PACKETS: bool = true;

    fn device(&mut self, side: usize) -> &mut Endpoint {
        &mut self.endpoints[side]
    }

    fn path(&self, side: usize) -> Path {
        Path::new(Headers::address(side))
    }

    fn memory(&self, _side: usize) -> u64 {
        1 << 32
    }

    fn now(&self) -> Time {
        self.now
    }

    fn requester(&mut self, tally: &mut Tally) {
        self.carry(0, Phase::Send, Phase::Receive, tally);
    }

    fn responder(&mut self, tally: &mut Tally) {
        self.carry(1, Phase::Answer, Phase::Complete, tally);
    }

    fn idle(&mut self, _tally: &mut Tally) {}

    fn connected(&mut self, _side: usize, _qpn: Qpn, _pd: PdId, _region: &MemoryRegion) {}

    fn post(&mut self, qpn: Qpn, wrs: &[SendWr]) {
        let now = self.now();
        Device::post_send(self.device(0), now, qpn, wrs).unwrap();
    }

    fn calls(&mut self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
