//! The counters of an AF_XDP socket. They only grow and are never reset.

/// Why a received frame was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpRefused {
    /// Lengths or checksum of Ethernet, IP or UDP are wrong.
    Malformed,
    /// For another address or port, with a VLAN tag, or from no unicast address.
    Foreign,
    /// The transport headers do not parse.
    Headers,
    /// Its ICRC is wrong.
    Icrc,
}

/// What an [`XdpWire`](super::XdpWire) counts beside the counters of its UDP wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpCounters {
    /// Packets sent as frames.
    pub tx_packets: u64,
    /// Packets sent through the UDP socket because they do not fit a frame.
    pub tx_long: u64,
    /// The same because no Ethernet address of the next hop is confirmed, or it is on another
    /// interface.
    pub tx_unresolved: u64,
    /// The same because all send frames were in use.
    pub tx_full: u64,
    /// Turns that tried again to send frames which the kernel had refused to take.
    pub tx_retries: u64,
    /// Frames received, good or bad.
    pub rx_packets: u64,
    /// Frames whose packets were delivered.
    pub rx_accepted: u64,
    /// Dropped: [`XdpRefused::Malformed`].
    pub rx_malformed: u64,
    /// Dropped: [`XdpRefused::Foreign`].
    pub rx_foreign: u64,
    /// Dropped: [`XdpRefused::Headers`].
    pub rx_headers: u64,
    /// Dropped: [`XdpRefused::Icrc`].
    pub rx_bad_icrc: u64,
}

impl XdpCounters {
    /// Every counter with its name, in a fixed order.
    pub fn named(&self) -> [(&'static str, u64); 11] {
        let XdpCounters { tx_packets, tx_long, tx_unresolved, tx_full, tx_retries, .. } = *self;
        let XdpCounters { rx_packets, rx_accepted, rx_malformed, .. } = *self;
        let XdpCounters { rx_foreign, rx_headers, rx_bad_icrc, .. } = *self;
        [
            ("xdp.tx.packets", tx_packets),
            ("xdp.tx.long", tx_long),
            ("xdp.tx.unresolved", tx_unresolved),
            ("xdp.tx.full", tx_full),
            ("xdp.tx.retries", tx_retries),
            ("xdp.rx.packets", rx_packets),
            ("xdp.rx.accepted", rx_accepted),
            ("xdp.rx.malformed", rx_malformed),
            ("xdp.rx.foreign", rx_foreign),
            ("xdp.rx.headers", rx_headers),
            ("xdp.rx.bad_icrc", rx_bad_icrc),
        ]
    }

    pub(super) fn refuse(&mut self, reason: XdpRefused) {
        *match reason {
            XdpRefused::Malformed => &mut self.rx_malformed,
            XdpRefused::Foreign => &mut self.rx_foreign,
            XdpRefused::Headers => &mut self.rx_headers,
            XdpRefused::Icrc => &mut self.rx_bad_icrc,
        } += 1;
    }
}
