//! Whether compressing the blocks of a session makes its stream faster.
//!
//! A target sends and compresses on one thread, so a block costs the time to compress it and the
//! time to send what is left. Compression pays if it takes less time than sending the bytes that it
//! saves:
//!
//! ```text
//! time to compress  <  bytes saved * time on the link / bytes on the link
//! ```
//!
//! Time on the link passes while bytes of the session are unacknowledged, less the time of the
//! compressor in between. A reader that asks for nothing stops the clock. On a device that sends by
//! itself the two overlap, and the rule is careful: it may send a block as it is that could have
//! been compressed in time.
//!
//! Sums over a window of blocks decide for the next one, and are halved then, so that old blocks
//! count less. Where compression does not pay, one block in [`PROBE_EVERY`] is compressed all the
//! same, to notice a slower link or other data.

use roce::Time;

use crate::stage::Encoding;

/// Compressed blocks of a window.
const WINDOW: u32 = 16;

/// Blocks of which one is compressed where compression does not pay.
const PROBE_EVERY: u32 = 64;

#[derive(Debug, Default)]
pub(super) struct Gauge {
    /// Blocks of the window that went through the compressor.
    blocks: u32,
    /// Their time in it, and the bytes that it saved.
    codec_ns: u64,
    saved_bytes: u64,
    /// Acknowledged bytes, and the time in which they were sent.
    link_bytes: u64,
    link_ns: u64,
    /// Blocks that are sent and not acknowledged.
    in_flight: u32,
    /// Start of the time on the link that is not counted yet, and the compressor's share of it.
    since: Time,
    codec_share_ns: u64,
    /// Whether blocks are sent as they are, and how many were since the last probe.
    skips: bool,
    skipped: u32,
}

impl Gauge {
    /// Whether the next block is to be compressed.
    pub(super) fn pays(&mut self) -> bool {
        if !self.skips {
            return true;
        }
        self.skipped = (self.skipped + 1) % PROBE_EVERY;
        self.skipped == 0
    }

    /// A block went through the compressor, from `now` on.
    pub(super) fn compressed(&mut self, now: Time, encoding: &Encoding) {
        self.advance(now);
        self.codec_share_ns += encoding.nanos;
        self.blocks += 1;
        self.codec_ns += encoding.nanos;
        self.saved_bytes += encoding.bytes_in.saturating_sub(encoding.bytes_out) as u64;
        let window = if self.skips { 1 } else { WINDOW };
        if self.blocks >= window && self.link_bytes > 0 {
            self.decide();
        }
    }

    /// A block was handed to the device.
    pub(super) fn sent(&mut self, now: Time) {
        self.advance(now);
        self.in_flight += 1;
    }

    /// A block of so many bytes was acknowledged.
    pub(super) fn delivered(&mut self, now: Time, bytes: u32) {
        self.advance(now);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.link_bytes += u64::from(bytes);
    }

    /// Counts the time since the last event.
    fn advance(&mut self, now: Time) {
        let passed_ns = now.since(self.since).as_nanos();
        let codec_ns = self.codec_share_ns.min(passed_ns);
        if self.in_flight > 0 {
            self.link_ns += passed_ns - codec_ns;
        }
        self.codec_share_ns -= codec_ns;
        self.since = now;
    }

    fn decide(&mut self) {
        let sending_ns = u128::from(self.saved_bytes) * u128::from(self.link_ns)
            / u128::from(self.link_bytes.max(1));
        self.skips = u128::from(self.codec_ns) > sending_ns;
        self.blocks = 0;
        for sum in
            [&mut self.codec_ns, &mut self.saved_bytes, &mut self.link_bytes, &mut self.link_ns]
        {
            *sum = sum.div_ceil(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends blocks over a link that takes `link_ns` for a block as it is, with a compressor that
    /// takes `codec_ns` and halves them. Returns how many of them were compressed.
    fn compressed(
        gauge: &mut Gauge,
        now: &mut u64,
        blocks: u32,
        link_ns: u64,
        codec_ns: u64,
    ) -> u32 {
        let mut compressed = 0;
        for _ in 0..blocks {
            let pays = gauge.pays();
            if pays {
                let encoding = Encoding { bytes_in: 1 << 20, bytes_out: 1 << 19, nanos: codec_ns };
                gauge.compressed(Time::from_nanos(*now), &encoding);
                *now += codec_ns;
                compressed += 1;
            }
            gauge.sent(Time::from_nanos(*now));
            *now += if pays { link_ns / 2 } else { link_ns };
            gauge.delivered(Time::from_nanos(*now), if pays { 1 << 19 } else { 1 << 20 });
        }
        compressed
    }

    #[test]
    fn compression_goes_on_where_it_saves_time() {
        let (mut gauge, mut now) = (Gauge::default(), 5);
        assert_eq!(compressed(&mut gauge, &mut now, 1000, 1_000_000, 400_000), 1000);
        // Half of a block takes 0.5 ms.
        assert!(compressed(&mut gauge, &mut now, 1000, 1_000_000, 600_000) < 60);
    }

    #[test]
    fn it_stops_on_a_fast_link_and_begins_again_on_a_slow_one() {
        let (mut gauge, mut now) = (Gauge::default(), 5);
        let fast = compressed(&mut gauge, &mut now, 1024, 100_000, 400_000);
        assert!(fast <= WINDOW + 1 + 1024 / PROBE_EVERY, "{fast} blocks of 1024");
        let slow = compressed(&mut gauge, &mut now, 2048, 10_000_000, 400_000);
        assert!(slow > 1500, "{slow} blocks of 2048");
        let fast = compressed(&mut gauge, &mut now, 2048, 100_000, 400_000);
        assert!(fast < 500, "{fast} blocks of 2048");
    }

    /// The compressor's time while earlier blocks are under way is not the link's.
    #[test]
    fn a_full_pipe_is_measured_without_the_compressor() {
        let (mut gauge, mut now) = (Gauge::default(), 5);
        gauge.sent(Time::from_nanos(now));
        let mut skipped = 0;
        for _ in 0..1000 {
            if gauge.pays() {
                let encoding = Encoding { bytes_in: 1 << 20, bytes_out: 1 << 19, nanos: 800_000 };
                gauge.compressed(Time::from_nanos(now), &encoding);
                now += 800_000;
            } else {
                skipped += 1;
            }
            gauge.sent(Time::from_nanos(now));
            now += 200_000;
            gauge.delivered(Time::from_nanos(now), 1 << 19);
        }
        assert!(skipped > 900, "a link of 0.2 ms for what is left outruns 0.8 ms: {skipped}");
    }
}
