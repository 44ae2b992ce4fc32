//! Ten senders and one more collide: each gets its share, and the link stays full.

use roce::congestion::{CongestionControl, DcqcnParams};
use sim::incast::{self, IncastConfig};

#[test]
fn dcqcn_shares_a_link_fairly_at_both_rates() {
    for gbit in [25, 100] {
        let config = IncastConfig::new(10, gbit);
        let params = DcqcnParams::named("dcqcn-mlnx", gbit * 1_000_000_000).unwrap();
        let congestion = CongestionControl::Dcqcn(params);
        let got = incast::measure(&config, |connect| connect.congestion = congestion).unwrap();
        // Each within 15 % of an equal share, and the link as full as in the published comparison.
        assert!(got.unfairness_per_mille() <= 150, "{gbit} Gbit/s: {got:?}");
        assert!(got.wire_bps >= gbit * 970_000_000, "{gbit} Gbit/s: {got:?}");
        assert_eq!(got.dropped, 0, "{gbit} Gbit/s");
        assert!(got.marked > 0 && got.notifications > 0, "{gbit} Gbit/s: {got:?}");
    }
}
