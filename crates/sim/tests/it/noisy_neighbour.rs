//! A slow link shared by streams with delay-based control, and with a TCP flow. `--nocapture`
//! prints the shares.

use controls::{CongestionControl, DelayParams};
use roce::Duration;
use sim::noisy_neighbour::{self, NeighbourConfig, Neighbours};

const DELAY: CongestionControl = CongestionControl::Delay(DelayParams::DEFAULT);

fn run(config: &NeighbourConfig, congestion: CongestionControl) -> Neighbours {
    let got = noisy_neighbour::measure(config, |connect| {
        connect.congestion = congestion.into();
        if congestion == DELAY {
            // Room for a fair share of the longest queue here.
            connect.window_packets = 2_048;
        }
    });
    let got = got.unwrap();
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
        // It follows losses until the second step, after 2 s, shows that the queue is its own.
        let config = NeighbourConfig { warm_up: Duration::from_millis(2_500), ..config };
        let got = run(&config, DELAY);
        assert!(got.wire_bps >= mbit * 990_000, "{config:?}: {got:?}");
        assert!(got.dropped * 500 <= got.packets, "{config:?}: {got:?}");
        // The queue is that of the target, not that of the buffer.
        assert!(got.mean_bytes < mbit * 125 * 3, "{config:?}: {got:?}");
    }
}

#[test]
fn two_streams_share_a_link_and_keep_its_queue_short() {
    for buffer_ms in [5, 50] {
        let config = NeighbourConfig::new(2, 200, buffer_ms);
        let config = NeighbourConfig { warm_up: Duration::from_millis(4_500), ..config };
        let got = run(&config, DELAY);
        assert!(got.per_mille(0).abs_diff(500) <= 75, "{config:?}: {got:?}");
        assert!(got.wire_bps >= 200 * 980_000, "{config:?}: {got:?}");
        assert!(got.dropped * 100 <= got.packets, "{config:?}: {got:?}");
        assert!(got.mean_bytes < 200 * 125 * 3, "{config:?}: {got:?}");
    }
}

/// Whatever they take each other for, none starves.
#[test]
fn eight_streams_keep_at_least_a_third_of_their_share() {
    // With the last seed, one comes to follow the delay with two packets while others fill the
    // queue.
    for (buffer_ms, begin, seed) in [(5, 2, 1), (50, 2, 1), (5, 8, 1), (50, 8, 1), (5, 2, 7)] {
        let config = NeighbourConfig {
            seed,
            warm_up: Duration::from_millis(begin * 1_000),
            span: Duration::from_millis(6_000),
            ..NeighbourConfig::new(8, 200, buffer_ms)
        };
        let got = run(&config, DELAY);
        for stream in 0..8 {
            assert!(got.per_mille(stream) >= 1_000 / 8 / 3, "{config:?}: {got:?}");
        }
        assert!(got.wire_bps >= 200 * 980_000, "{config:?}: {got:?}");
        assert!(got.dropped * 40 <= got.packets, "{config:?}: {got:?}");
    }
}

/// Neither does TCP starve the stream, nor the stream TCP, whoever came first. In a long buffer,
/// shares of CUBIC become equal slowly: there are 10 s from cut to cut.
#[test]
fn a_stream_competes_with_tcp_and_leaves_it_its_share() {
    for (buffer_ms, is_tcp_first, span_s, least) in
        [(5, false, 5, 350), (5, true, 5, 350), (50, false, 40, 150), (50, true, 40, 150)]
    {
        let config = NeighbourConfig {
            with_tcp: true,
            is_tcp_first,
            stagger: Duration::from_millis(100),
            warm_up: Duration::from_millis(2_000),
            span: Duration::from_millis(span_s * 1_000),
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
