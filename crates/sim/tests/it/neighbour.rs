//! A slow link shared by streams with delay-based control, and with a TCP flow. `--nocapture` prints the
//! shares.

use roce::Duration;
use roce::congestion::{CongestionControl, DelayParams};
use sim::neighbour::{self, NeighbourConfig, Neighbours};

const DELAY: CongestionControl = CongestionControl::Delay(DelayParams::DEFAULT);

fn run(config: &NeighbourConfig, congestion: CongestionControl) -> Neighbours {
    let got = neighbour::measure(config, |connect| connect.congestion = congestion).unwrap();
    let shares: Vec<u64> = (0..got.shares_bps.len()).map(|at| got.per_mille(at)).collect();
    let NeighbourConfig { streams, with_tcp, link, .. } = config;
    let used = got.wire_bps as f64 * 100.0 / link.rate_bps as f64;
    println!(
        "{streams} streams, TCP {with_tcp}, {} Mbit/s, buffer {} kB: {shares:?} per mille, {used:.1} % used, \
         {} of {} dropped, mean queue {} kB",
        link.rate_bps / 1_000_000,
        link.queue_bytes / 1_000,
        got.dropped,
        got.packets,
        got.mean_bytes / 1_000
    );
    got
}

#[test]
fn a_stream_alone_fills_the_link_and_drops_almost_nothing() {
    for (mbit, buffer_ms) in [(200, 5), (200, 50)] {
        let config = NeighbourConfig::new(1, mbit, buffer_ms);
        let got = run(&config, DELAY);
        assert!(got.wire_bps >= mbit * 990_000, "{config:?}: {got:?}");
        assert!(got.dropped * 500 <= got.packets, "{config:?}: {got:?}");
        // The queue is that of the target, not that of the buffer.
        assert!(got.mean_bytes < mbit * 125 * 3, "{config:?}: {got:?}");
    }
}

#[test]
fn streams_share_a_link_however_many_came_before() {
    for (streams, mbit, buffer_ms) in [(2, 200, 5), (8, 200, 50)] {
        let config = NeighbourConfig::new(streams, mbit, buffer_ms);
        // The first drains, by which they learn the delay of the path, are after 1 and 2 s.
        let config = NeighbourConfig { warm_up: Duration::from_millis(2_500), ..config };
        let got = run(&config, DELAY);
        let fair = 1_000 / u64::from(streams);
        for stream in 0..streams as usize {
            let share = got.per_mille(stream);
            assert!(share.abs_diff(fair) * 100 <= fair * 15, "{config:?}: {got:?}");
        }
        assert!(got.wire_bps >= mbit * 980_000, "{config:?}: {got:?}");
        assert!(got.dropped * 100 <= got.packets, "{config:?}: {got:?}");
    }
}

/// Both keep their share: neither does TCP starve the stream, nor the stream TCP.
#[test]
fn a_stream_competes_with_tcp_and_leaves_it_its_share() {
    for (buffer_ms, least) in [(5, 350), (50, 250)] {
        let config = NeighbourConfig {
            with_tcp: true,
            warm_up: Duration::from_millis(2_000),
            span: Duration::from_millis(5_000),
            ..NeighbourConfig::new(1, 200, buffer_ms)
        };
        let got = run(&config, DELAY);
        assert!(got.per_mille(0) >= least && got.per_mille(1) >= 350, "{config:?}: {got:?}");
        assert!(got.dropped * 50 <= got.packets, "{config:?}: {got:?}");
    }
}

/// What the control is there for.
#[test]
fn without_control_tcp_gets_next_to_nothing() {
    let config = NeighbourConfig { with_tcp: true, ..NeighbourConfig::new(1, 200, 5) };
    let got = run(&config, CongestionControl::Off);
    assert!(got.per_mille(1) < 100, "{got:?}");
}
