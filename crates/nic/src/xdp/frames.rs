//! Whole frames without a protocol, through the same program and socket: what AF_XDP itself costs.

use std::net::{IpAddr, SocketAddr};

use roce::wire::ROCE_PORT;

use super::program::{self, Attached, Sockets};
use super::rings::{MAX_FRAME, Socket};
use super::{Mode, XdpError, interface_of};

/// The frames of one address and RoCE's port, on the first queue of its interface.
#[derive(Debug)]
pub struct RawFrames {
    // Detached first, as in the wire.
    _attached: Attached,
    _sockets: Sockets,
    socket: Socket,
}

impl RawFrames {
    /// Opens the socket and attaches the program to the interface that has the address.
    ///
    /// # Errors
    /// As [`XdpWire::open`](super::XdpWire::open).
    pub fn open(ip: IpAddr) -> Result<RawFrames, XdpError> {
        let interface = interface_of(ip)?;
        let sockets = Sockets::new(1)?;
        let (local, modes) = (SocketAddr::new(ip, ROCE_PORT), [Mode::Native, Mode::Generic]);
        let attached = program::attach(interface.index, local, MAX_FRAME, &sockets, &modes)?;
        let socket = Socket::open(interface.index, 0)?;
        sockets.insert(0, &socket.fd)?;
        Ok(RawFrames { _attached: attached, _sockets: sockets, socket })
    }

    /// Sends a frame. `false` if the kernel does not take it.
    pub fn send(&mut self, frame: &[u8]) -> bool {
        let is_queued = self.socket.queue(frame);
        self.socket.flush();
        is_queued && !self.socket.has_refused()
    }

    /// Passes the frames that have arrived to `take`, and returns how many there were.
    pub fn receive(&mut self, take: impl FnMut(&[u8])) -> usize {
        self.socket.receive(usize::MAX, take)
    }
}
