//! Which congestion control a connection gets: as configured, and by where its peer is.

use core::net::IpAddr;
use core::str::FromStr;

use controls::{CongestionControl, DcqcnParams, DctcpParams, DelayParams};
use nic::interfaces;
use roce::Duration;
use roce::endpoint::{Mtu, Reliability};

/// The rate of a link when the setting does not give it.
const DEFAULT_GBPS: u64 = 100;
const GBIT: u64 = 1_000_000_000;

/// The round-trip time of a path without queues, between endpoints in software.
const BASE_RTT: Duration = Duration::from_micros(100);

/// The configured congestion control.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// From measured delay towards our own endpoints on other machines, DCQCN towards others.
    /// Packets to this machine do not cross a link that anybody shares: their receive buffers slow
    /// the sender.
    #[default]
    Auto,
    /// This one for all.
    Always(CongestionControl),
}

impl Choice {
    /// What all values of a setting are, for messages.
    pub const SYNTAX: &'static str = "auto, off, delay, swift, or one of advertised, dcqcn-mlnx, dcqcn-paper, dcqcn-uet, dctcp, timely, timely-patched \
         with :GBPS of the link";

    /// The control of a connection to `remote`, which is an endpoint of ours or another.
    pub fn toward(self, remote: IpAddr, is_ours: bool) -> CongestionControl {
        match self {
            Choice::Always(control) => control,
            Choice::Auto if interfaces::is_here(remote) => CongestionControl::Off,
            Choice::Auto if is_ours => CongestionControl::Delay(DelayParams::DEFAULT),
            Choice::Auto => CongestionControl::Dcqcn(DcqcnParams::mlnx(DEFAULT_GBPS * GBIT)),
        }
    }
}

/// A window that follows the network may fill long queues, so it has room for this many bytes, in
/// at most that many packets: receivers accept no packet that is further ahead.
const ROOM_BYTES: u32 = 2 << 20;
const ROOM_PACKETS: u32 = 2048;

/// The window of a connection, in packets, where `usual` suffices without control. With go-back-N,
/// every loss costs all of it, so it stays.
pub fn window_packets(
    usual: u32,
    control: CongestionControl,
    reliability: Reliability,
    mtu: Mtu,
) -> u32 {
    match (control, reliability) {
        (CongestionControl::Delay(_), Reliability::Selective) => {
            usual.max((ROOM_BYTES / mtu.bytes()).min(ROOM_PACKETS))
        }
        _ => usual,
    }
}

impl core::fmt::Display for Choice {
    /// The name with which it is set; DCQCN without its variant.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Choice::Auto => f.write_str("auto"),
            Choice::Always(CongestionControl::Off) => f.write_str("off"),
            Choice::Always(CongestionControl::Delay(_)) => f.write_str("delay"),
            Choice::Always(CongestionControl::Dcqcn(_)) => f.write_str("DCQCN"),
            Choice::Always(CongestionControl::Dctcp(_)) => f.write_str("DCTCP"),
            Choice::Always(CongestionControl::Timely(params)) => f.write_str(params.name),
            Choice::Always(CongestionControl::Hpcc(_)) => f.write_str("HPCC"),
            Choice::Always(CongestionControl::Swift(_)) => f.write_str("swift"),
            Choice::Always(CongestionControl::Advertised(_)) => f.write_str("advertised"),
            Choice::Always(CongestionControl::Fixed(bps)) => write!(f, "{bps} bit/s"),
        }
    }
}

/// A text that is no [`Choice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoChoice;

impl core::fmt::Display for NoChoice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "expected {}", Choice::SYNTAX)
    }
}

impl core::error::Error for NoChoice {}

impl FromStr for Choice {
    type Err = NoChoice;

    fn from_str(text: &str) -> Result<Choice, NoChoice> {
        if text == "auto" {
            return Ok(Choice::Auto);
        }
        let (name, gbps) = match text.split_once(':') {
            // These do not depend on the link's rate.
            Some(("off" | "delay" | "swift", _)) => return Err(NoChoice),
            Some((name, rate)) => (name, rate.parse().ok()),
            None => (text, Some(DEFAULT_GBPS)),
        };
        let rate = gbps.filter(|gbps| (1..=1600).contains(gbps)).map(|gbps| gbps * GBIT);
        let control = rate.and_then(|bps| CongestionControl::named(name, bps, BASE_RTT));
        match control.ok_or(NoChoice)? {
            // No switch stamps the packets of these wires.
            CongestionControl::Hpcc(_) => Err(NoChoice),
            // Round-trip times between processes are too different for a window of one.
            CongestionControl::Dctcp(params) => {
                let params = DctcpParams { window_rtt: None, ..params };
                Ok(Choice::Always(CongestionControl::Dctcp(params)))
            }
            control => Ok(Choice::Always(control)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_depends_on_the_peer_and_where_it_is() {
        let far = IpAddr::from([198, 51, 100, 7]);
        let delay = CongestionControl::Delay(DelayParams::DEFAULT);
        assert_eq!(Choice::Auto.toward(far, true), delay);
        assert_eq!(Choice::default().toward(far, true), delay);
        let dcqcn = CongestionControl::Dcqcn(DcqcnParams::mlnx(100 * GBIT));
        assert_eq!(Choice::Auto.toward(far, false), dcqcn);
        for is_ours in [true, false] {
            let here = IpAddr::from([127, 0, 0, 1]);
            assert_eq!(Choice::Auto.toward(here, is_ours), CongestionControl::Off);
        }
        let always: Choice = "delay".parse().expect("a choice");
        assert_eq!(always.toward(IpAddr::from([127, 0, 0, 1]), false), delay);
    }

    #[test]
    fn texts_are_choices_or_refused() {
        let mlnx = |gbps: u64| {
            Ok(Choice::Always(CongestionControl::Dcqcn(DcqcnParams::mlnx(gbps * 1_000_000_000))))
        };
        assert_eq!("auto".parse(), Ok(Choice::Auto));
        assert_eq!("off".parse(), Ok(Choice::Always(CongestionControl::Off)));
        for name in ["auto", "off", "delay"] {
            assert_eq!(name.parse::<Choice>().map(|choice| choice.to_string()), Ok(name.into()));
        }
        assert_eq!(mlnx(25).map(|choice| choice.to_string()), Ok("DCQCN".into()));
        assert_eq!("dcqcn-mlnx:25".parse(), mlnx(25));
        assert_eq!("dcqcn-mlnx".parse(), mlnx(100));
        for name in ["swift", "timely", "timely-patched", "advertised"] {
            assert_eq!(name.parse::<Choice>().map(|choice| choice.to_string()), Ok(name.into()));
        }
        assert_eq!(
            "dctcp:25".parse::<Choice>().map(|choice| choice.to_string()),
            Ok("DCTCP".into())
        );
        let bad = [
            "",
            "Auto",
            "on",
            "dcqcn",
            "dcqcn-mlnx:",
            "dcqcn-mlnx:0",
            "dcqcn-mlnx:1601",
            "hpcc",
            "hpcc-pint",
            "swift:25",
        ];
        for bad in bad {
            assert_eq!(bad.parse::<Choice>(), Err(NoChoice), "{bad}");
        }
    }
}
