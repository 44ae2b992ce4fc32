//! Loss on a real wire, for diagnosis: what does this job do on a network that drops one in a
//! hundred?
//!
//! The wrapper is on the receiving side, so packets have really crossed the network. It drops and
//! counts packets that the wire has already verified. Which ones depends only on the seed and the
//! order of arrival.

use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};
use roce::Time;
use roce::verbs::{Qpn, Transport};
use roce::world::{Memory, Path, RxFrame, TxFrame, Wire};

/// A million: probabilities are given in parts of it.
pub const PPM: u32 = 1_000_000;

/// A wire that loses received packets with a fixed probability.
#[derive(Debug)]
pub struct LossyWire<W> {
    inner: W,
    /// A packet is dropped when its draw is below this.
    threshold: u64,
    chance: Pcg64,
    dropped: u64,
}

impl<W> LossyWire<W> {
    /// Drops `loss_ppm` packets in a million (10,000 is 1 %; a million or more drops all).
    pub fn new(inner: W, loss_ppm: u32, seed: u64) -> LossyWire<W> {
        let threshold = (1u64 << 32) * u64::from(loss_ppm.min(PPM)) / u64::from(PPM);
        LossyWire { inner, threshold, chance: Pcg64::seed_from_u64(seed), dropped: 0 }
    }

    /// Packets dropped so far.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The wrapped wire.
    pub fn inner(&self) -> &W {
        &self.inner
    }

    /// The wrapped wire, for changes.
    pub fn inner_mut(&mut self) -> &mut W {
        &mut self.inner
    }
}

impl<W: Wire> Wire for LossyWire<W> {
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        self.inner.send(now, frames, memory);
    }

    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let LossyWire { inner, threshold, chance, dropped } = self;
        let before = *dropped;
        let arrived = inner.receive(now, &mut |frame| {
            if u64::from(chance.next_u32()) < *threshold {
                *dropped += 1;
            } else {
                sink(frame);
            }
        });
        arrived - (*dropped - before) as usize
    }

    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        dest: Qpn,
        service: Transport,
        packets: usize,
    ) -> usize {
        self.inner.admits(now, path, dest, service, packets)
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.inner.next_wakeup()
    }

    fn is_stalled(&mut self, path: &Path, dest: Qpn) -> bool {
        self.inner.is_stalled(path, dest)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn};
    use roce::world::Origin;

    use super::*;

    /// Receives `0..BURST` numbered packets in every call.
    struct Source;

    const BURST: usize = 1000;

    impl Wire for Source {
        fn send(&mut self, _now: Time, _frames: &[TxFrame<'_>], _memory: &dyn Memory) {}

        fn admits(
            &mut self,
            _now: Time,
            _path: &Path,
            _dest: Qpn,
            _service: Transport,
            _packets: usize,
        ) -> usize {
            3
        }

        fn next_wakeup(&self) -> Option<Time> {
            Some(Time::from_nanos(7))
        }

        fn receive(&mut self, _now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
            (0..BURST as u32).for_each(|psn| sink(&numbered(psn)));
            BURST
        }

        fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
            true
        }
    }

    #[test]
    fn back_pressure_passes_through() {
        let mut wire = LossyWire::new(Source, 10_000, 1);
        let (path, dest) = (Path::new(SocketAddr::from(([127, 0, 0, 1], 4791))), Qpn::new(2));
        assert_eq!(wire.admits(Time::ZERO, &path, dest, Transport::Rc, 32), 3);
        assert_eq!(wire.next_wakeup(), Some(Time::from_nanos(7)));
        assert!(wire.is_stalled(&path, dest));
    }

    fn numbered(psn: u32) -> RxFrame<'static> {
        let bth = Bth {
            opcode: Opcode::RcWriteMiddle,
            solicited: false,
            mig_req: false,
            pad: 0,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp: Qpn::new(2),
            ack_req: false,
            psn: Psn::new(psn),
        };
        let headers = Headers::new(bth, Ext::None).expect("legal");
        let source = SocketAddr::from(([127, 0, 0, 1], 4791));
        RxFrame { origin: Origin::new(source, source.ip()), headers, payload: &[], telemetry: None }
    }

    fn survivors(loss_ppm: u32, seed: u64, rounds: usize) -> (Vec<u32>, u64) {
        let mut wire = LossyWire::new(Source, loss_ppm, seed);
        let mut seen = Vec::new();
        for _ in 0..rounds {
            let before = seen.len();
            let got =
                wire.receive(Time::ZERO, &mut |frame| seen.push(frame.headers.bth().psn.get()));
            assert_eq!(got, seen.len() - before);
        }
        (seen, wire.dropped())
    }

    #[test]
    fn nothing_and_everything_are_exact() {
        assert_eq!(survivors(0, 1, 3).1, 0);
        assert_eq!(survivors(PPM, 1, 3), (vec![], 3 * BURST as u64));
        assert_eq!(survivors(u32::MAX, 1, 1).0, []);
    }

    #[test]
    fn one_percent_is_about_one_percent() {
        let (seen, dropped) = survivors(10_000, 7, 100);
        assert_eq!(seen.len() as u64 + dropped, 100_000);
        assert!((850..1150).contains(&dropped), "{dropped}");
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(survivors(500_000, 3, 2), survivors(500_000, 3, 2));
        assert_ne!(survivors(500_000, 3, 2), survivors(500_000, 4, 2));
    }
}
