//! Receive-buffer occupancy of other processes on this machine, so that nothing is sent into a full
//! buffer.
//!
//! UDP over loopback has no back-pressure: a packet that does not fit the receive buffer is
//! dropped, and the sender does not notice. A hardware adapter that loops packets back stalls
//! instead, and programs on unreliable connections depend on it. Any process may query the
//! socket-buffer occupancy of the UDP sockets in its network namespace (`sock_diag(7)`), so it is
//! queried whenever another quarter of a buffer may have been filled. Nothing is sent to a process
//! that has [`MOST_UNREAD`] bytes to read, or whose buffer is half full (the kernel accounts for
//! reads in portions of a quarter). When it has read nothing for [`PATIENCE`], it counts as
//! stopped, and packets for it are lost as on a link until it reads again. They are lost at a
//! bounded rate ([`LOST_PER_LOOK`]): without one, a sender on an unreliable connection would spend
//! its thread on building packets that reach nobody. Each process is tracked separately: a stopped
//! one slows only those that send to it.
//!
//! A process that reads just as much as arrives looks equally full each time. What tells it from a
//! stopped one are the bytes that it has read and the kernel has not accounted for yet, which only
//! reading changes, and a probe: a datagram that stays in the buffer of a stopped process.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use roce::verbs::Transport;
use roce::{Duration, Time};

use crate::netlink::{self, Message, Request, attribute, u32_at};

/// Longest that a full buffer holds packets back while its process reads nothing.
const PATIENCE: Duration = Duration::from_millis(100);

/// Time between two queries of a full buffer.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Time between two queries of the buffer of a process that has stopped reading.
const LOOK_AT_STOPPED: Duration = Duration::from_millis(1);

/// Packets that may be lost between two such queries: 64 MB/s with 4 KiB packets.
const LOST_PER_LOOK: usize = 16;

/// Bytes that a process may leave unread, in the kernel's accounting, before packets for it wait.
/// Filling the buffer of a stopped process takes time from all other peers, so it is not filled; a
/// process that reads needs no more than the traffic of its longest pause.
const MOST_UNREAD: u64 = 4 << 20;

/// Most that packets take of a receive buffer: an `sk_buff` with headers for each, and their bytes
/// in a block of the next power of two.
const fn taken(packets: u64, bytes: u64) -> u64 {
    2 * bytes + packets * 1280
}

/// What the longest packet takes of a receive buffer.
const LARGEST_BYTES: u64 = taken(1, 4096 + 64);

/// Processes tracked at a time. One more replaces the one tracked longest until that is sent to
/// again. A machine has 254 processes for each address.
const MAX_PEERS: usize = 512;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Backlog {
    kernel: Result<SockDiag, String>,
    peers: Vec<Peer>,
    /// Place in `peers` of the last one looked up.
    last: usize,
    /// Number of the current burst.
    burst: u64,
    /// Time of the last call of [`Backlog::admits`].
    now: Time,
    /// The last burst of this turn left out packets for a process that reads: the next one may
    /// follow.
    is_crowded: bool,
    /// Occupancy of buffers at the last query of [`Backlog::is_stalled`].
    suspects: Vec<(SocketAddr, SocketAddr, Level)>,
    /// Times that sending to a process stopped.
    pub(super) backpressure_waits: u64,
}

/// State of sending to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// Packets are sent while there is room.
    Open,
    /// Packets wait: the buffer has been full since `since`.
    Held { since: Time, look_at: Time },
    /// Packets are lost: the process has stopped reading. `allowance` more may be before `look_at`.
    Lost { look_at: Time, allowance: usize },
    /// No process has this port: queue pairs of a daemon, which has the shared port of its address
    /// alone.
    Absent { look_at: Time },
}

/// The port of another process.
#[derive(Debug)]
struct Peer {
    local: SocketAddr,
    remote: SocketAddr,
    /// The occupancy last reported by the kernel, in its own accounting.
    level: Level,
    /// Upper bound of its growth since.
    sent: u64,
    /// Burst number, and packets admitted since that burst.
    admitted: (u64, u64),
    flow: Flow,
}

impl Peer {
    /// A peer whose first query is due.
    fn new(local: SocketAddr, remote: SocketAddr) -> Peer {
        Peer { local, remote, level: Level::default(), sent: 0, admitted: (0, 0), flow: Flow::Open }
    }

    /// Bytes that may still be sent to it.
    fn room(&self) -> u64 {
        self.level.room().saturating_sub(self.sent)
    }

    /// When the next query of its buffer is due; `None` while the last one is recent enough.
    fn look_at(&self) -> Option<Time> {
        match self.flow {
            Flow::Held { look_at, .. } | Flow::Lost { look_at, .. } | Flow::Absent { look_at } => {
                Some(look_at)
            }
            Flow::Open => {
                let quarter = (self.level.limit / 4).min(MOST_UNREAD / 2);
                let is_stale = self.sent > quarter || self.room() < LARGEST_BYTES;
                is_stale.then_some(Time::ZERO)
            }
        }
    }

    /// Updates the state after a query: `level` is `None` where there is no such socket.
    fn follow(&mut self, now: Time, level: Option<Level>) {
        let Some(level) = level else {
            self.flow = Flow::Absent { look_at: now + LOOK_AT_STOPPED };
            return;
        };
        let has_read = level.has_read_since(self.level);
        (self.level, self.sent) = (level, 0);
        let since = match self.flow {
            _ if self.room() >= LARGEST_BYTES => {
                self.flow = Flow::Open;
                return;
            }
            Flow::Open | Flow::Absent { .. } => now,
            Flow::Held { .. } | Flow::Lost { .. } if has_read => now,
            Flow::Held { since, .. } if now.since(since) < PATIENCE => since,
            Flow::Held { .. } | Flow::Lost { .. } => {
                let look_at = now + LOOK_AT_STOPPED;
                self.flow = Flow::Lost { look_at, allowance: LOST_PER_LOOK };
                return;
            }
        };
        self.flow = Flow::Held { since, look_at: now + LOOK_AGAIN };
    }

    /// Admits packets into the room left by those admitted in the same burst.
    fn grant(&mut self, burst: u64, packets: usize) -> usize {
        if self.admitted.0 != burst {
            self.admitted = (burst, 0);
        }
        let room = (self.room() / LARGEST_BYTES).saturating_sub(self.admitted.1);
        let granted = packets.min(usize::try_from(room).unwrap_or(usize::MAX));
        self.admitted.1 += granted as u64;
        granted
    }
}

/// How full a receive buffer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Level {
    /// Bytes that count against the limit.
    used: u64,
    /// Bytes that were not read. The rest of `used` was read since the kernel last accounted for
    /// it.
    unread: u64,
    limit: u64,
}

impl Level {
    /// Bytes that may be sent.
    fn room(self) -> u64 {
        let most = MOST_UNREAD.saturating_sub(self.unread);
        (self.limit / 2).saturating_sub(self.used).min(most)
    }

    /// Whether the process has read since an `earlier` look, as far as both show.
    fn has_read_since(self, earlier: Level) -> bool {
        let unaccounted = |level: Level| level.used.saturating_sub(level.unread);
        self.unread < earlier.unread || unaccounted(self) != unaccounted(earlier)
    }
}

impl Backlog {
    pub(super) fn new() -> Backlog {
        let (peers, suspects) = (Vec::new(), Vec::new());
        let (kernel, now) = (SockDiag::open(), Time::ZERO);
        Backlog {
            kernel,
            peers,
            last: 0,
            burst: 0,
            now,
            is_crowded: false,
            suspects,
            backpressure_waits: 0,
        }
    }

    /// What the kernel is asked by.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.kernel.as_ref().ok().map(|kernel| kernel.socket.as_fd())
    }

    /// Why traffic to local processes is not paced, if so.
    pub(super) fn why_not(&self) -> Option<&str> {
        self.kernel.as_ref().err().map(String::as_str)
    }

    /// How many of `packets`, whatever their length, may be sent now to the process at `remote`.
    pub(super) fn admits(
        &mut self,
        now: Time,
        local: SocketAddr,
        remote: SocketAddr,
        service: Transport,
        packets: usize,
    ) -> usize {
        let Ok(kernel) = &mut self.kernel else {
            return packets;
        };
        let at = find(&mut self.peers, self.last, local, remote);
        (self.last, self.now) = (at, now);
        let peer = &mut self.peers[at];
        if peer.look_at().is_some_and(|at| at <= now) {
            let Ok(level) = kernel.ask(local, remote) else {
                return packets;
            };
            let was_open = peer.flow == Flow::Open;
            peer.follow(now, level);
            self.backpressure_waits +=
                u64::from(was_open && matches!(peer.flow, Flow::Held { .. }));
        }
        match &mut peer.flow {
            Flow::Open => {
                let granted = peer.grant(self.burst, packets);
                self.is_crowded |= granted == 0;
                granted
            }
            Flow::Held { .. } => 0,
            Flow::Absent { .. } => packets,
            // One queue pair may send to many: it does not wait for those who have stopped.
            Flow::Lost { .. } if service == Transport::Ud => packets,
            Flow::Lost { allowance, .. } => {
                let lost = packets.min(*allowance);
                *allowance -= lost;
                lost
            }
        }
    }

    /// Whether packets for the process at `remote` are lost: it has stopped reading.
    pub(super) fn loses(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        matches!(self.flow(local, remote), Some(Flow::Lost { .. }))
    }

    /// Whether no process has the port `remote`, as far as is known.
    pub(super) fn is_absent(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        matches!(self.flow(local, remote), Some(Flow::Absent { .. }))
    }

    fn flow(&self, local: SocketAddr, remote: SocketAddr) -> Option<Flow> {
        let is_it = |peer: &&Peer| peer.remote == remote && peer.local == local;
        let last = self.peers.get(self.last).filter(is_it);
        last.or_else(|| self.peers.iter().find(is_it)).map(|peer| peer.flow)
    }

    /// Accounts for packets sent straight to another process.
    pub(super) fn sent(&mut self, local: SocketAddr, remote: SocketAddr, packets: u64, bytes: u64) {
        if self.kernel.is_err() {
            return;
        }
        let at = find(&mut self.peers, self.last, local, remote);
        let peer = &mut self.peers[at];
        peer.sent += taken(packets, bytes);
    }

    /// Starts a turn.
    pub(super) fn next_turn(&mut self) {
        self.is_crowded = false;
        self.next_burst();
    }

    /// Ends a burst: admitted packets that were not sent are discarded.
    pub(super) fn next_burst(&mut self) {
        self.burst += 1;
    }

    /// When a process that packets wait for is next to be queried. Where the query is overdue,
    /// nobody has sent to it any more.
    pub(super) fn next_look(&self) -> Option<Time> {
        if self.is_crowded {
            return Some(self.now);
        }
        let held = |peer: &Peer| match peer.flow {
            Flow::Held { look_at, .. } | Flow::Lost { look_at, allowance: 0 } => Some(look_at),
            Flow::Open | Flow::Lost { .. } | Flow::Absent { .. } => None,
        };
        self.peers.iter().filter_map(held).filter(|&look_at| look_at > self.now).min()
    }

    /// Whether the process at `remote` exists and does not read: its buffer holds bytes, and it has
    /// read none since the last query. `probe` sends it a datagram, which makes the next query
    /// differ if it reads. The first query of a process cannot tell, and neither can one that finds
    /// more than before: a process that is busy with other peers is seen to read at every other
    /// query, so an unresponsive queue pair of it is not masked for long.
    pub(super) fn is_stalled(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        probe: impl FnOnce(),
    ) -> bool {
        let Ok(kernel) = &mut self.kernel else {
            return false;
        };
        let mut ask = || kernel.ask(local, remote).ok().flatten().filter(|level| level.unread > 0);
        let is_it =
            |&(from, to, _): &(SocketAddr, SocketAddr, Level)| (from, to) == (local, remote);
        let known = self.suspects.iter().position(is_it);
        let before = known.map(|at| self.suspects.remove(at).2);
        let Some(mut level) = ask() else {
            return false;
        };
        let mut has_read = before.is_some_and(|before| level.has_read_since(before));
        // Probes leave most of the buffer to packets.
        if level.used < level.limit / 8 {
            probe();
            let Some(probed) = ask() else {
                return false;
            };
            has_read |= probed.has_read_since(level);
            level = probed;
        }
        if self.suspects.len() == MAX_PEERS {
            self.suspects.remove(0);
        }
        self.suspects.push((local, remote, level));
        !has_read
    }
}

/// The place of the process at `remote` in `peers`; a new one is added.
fn find(peers: &mut Vec<Peer>, guess: usize, local: SocketAddr, remote: SocketAddr) -> usize {
    let is_it = |peer: &Peer| peer.remote == remote && peer.local == local;
    if peers.get(guess).is_some_and(is_it) {
        return guess;
    }
    peers.iter().position(is_it).unwrap_or_else(|| {
        if peers.len() == MAX_PEERS {
            peers.remove(0);
        }
        peers.push(Peer::new(local, remote));
        peers.len() - 1
    })
}

/// Socket diagnostics of the kernel, by netlink.
#[derive(Debug)]
struct SockDiag {
    socket: netlink::Socket,
    /// The question, of which each query changes the addresses.
    question: Request,
}

/// Numbers of `linux/sock_diag.h` and `linux/inet_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_SKMEMINFO: u16 = 7;
const NO_COOKIE: [u8; 8] = [0xff; 8];
/// `inet_diag_req_v2`.
const REQUEST_BYTES: usize = 56;
/// Place of `idiag_rqueue`, the bytes that were not read.
const UNREAD_AT: usize = 56;
/// `inet_diag_msg`, after which attributes follow.
const ANSWER_BYTES: usize = 72;

impl SockDiag {
    /// Opens a netlink socket and checks that it reports on a socket of ours.
    fn open() -> Result<SockDiag, String> {
        let socket = netlink::Socket::diagnostics().map_err(|failure| refusal(&failure.into()))?;
        let question = Request::new(SOCK_DIAG_BY_FAMILY, 0, &[0; REQUEST_BYTES]);
        let mut diag = SockDiag { socket, question };
        let probe = std::net::UdpSocket::bind((std::net::Ipv4Addr::LOCALHOST, 0));
        let answers = probe.and_then(|probe| {
            let at = probe.local_addr()?;
            diag.ask(at, at)
        });
        match answers {
            Ok(Some(_)) => Ok(diag),
            Ok(None) => Err(String::from("the kernel has no udp_diag")),
            Err(error) => Err(refusal(&error)),
        }
    }

    /// Occupancy of the buffer of the socket at `remote`; `None` when there is no such socket.
    ///
    /// # Errors
    /// When the kernel does not reply.
    fn ask(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<Level>> {
        put_question(self.question.body_mut(), local, remote);
        let mut buffer = [0_u8; 512];
        match self.socket.ask(&mut self.question, &mut buffer) {
            Ok(answer) => Ok(level(&answer)),
            // "No such socket", most likely.
            Err(failure) if failure.errno().is_some() => Ok(None),
            Err(failure) => Err(failure.into()),
        }
    }
}

fn refusal(error: &io::Error) -> String {
    format!("no sock_diag: {error}")
}

/// Asks for the memory of the socket that receives datagrams from `local` to `remote`.
fn put_question(bytes: &mut [u8], local: SocketAddr, remote: SocketAddr) {
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    let family = if remote.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    put(0, &[family as u8, libc::IPPROTO_UDP as u8, 1 << (INET_DIAG_SKMEMINFO - 1), 0]);
    put(4, &u32::MAX.to_ne_bytes());
    // Source and destination are those of the datagram.
    put(8, &local.port().to_be_bytes());
    put(10, &remote.port().to_be_bytes());
    put(12, &octets(local.ip()));
    put(28, &octets(remote.ip()));
    let scope = if let SocketAddr::V6(v6) = remote { v6.scope_id() } else { 0 };
    put(44, &scope.to_ne_bytes());
    put(48, &NO_COOKIE);
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V6(v6) => v6.octets(),
        IpAddr::V4(v4) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&v4.octets());
            bytes
        }
    }
}

/// Finds the memory attribute in a reply.
fn level(answer: &Message<'_>) -> Option<Level> {
    let attributes = answer.body.get(ANSWER_BYTES..);
    let attributes = attributes.filter(|_| answer.kind == SOCK_DIAG_BY_FAMILY)?;
    let memory = attribute(attributes, INET_DIAG_SKMEMINFO)?;
    let word = |bytes, at| u32_at(bytes, at).map(u64::from);
    // SK_MEMINFO_RMEM_ALLOC and SK_MEMINFO_RCVBUF.
    let (used, limit) = (word(memory, 0)?, word(memory, 4)?);
    Some(Level { used, unread: word(answer.body, UNREAD_AT)?, limit })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    /// The kernel's diagnostics, or `None` with the reason noted.
    fn kernel(test: &str) -> Option<SockDiag> {
        SockDiag::open().map_err(|why| crate::skip::note(test, &why)).ok()
    }

    #[test]
    fn the_level_is_that_of_the_socket_which_a_datagram_reaches() {
        let Some(mut kernel) = kernel("the_level_is_that_of_the_socket_which_a_datagram_reaches")
        else {
            return;
        };
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(to) = UdpSocket::bind(address) else {
                continue;
            };
            let from = UdpSocket::bind(address).expect("loopback");
            let (local, remote) =
                (from.local_addr().expect("bound"), to.local_addr().expect("bound"));
            let empty = kernel.ask(local, remote).expect("a reply").expect("there is one");
            assert_eq!((empty.used, empty.unread), (0, 0));
            assert!(empty.limit > 0);
            from.send_to(&[0; 1000], remote).expect("loopback");
            let filled = kernel.ask(local, remote).expect("a reply").expect("there is one");
            assert!((1000..=taken(1, 1000)).contains(&filled.used), "{filled:?}");
            assert_eq!(filled.unread, filled.used);
            from.send_to(&[0; 1000], remote).expect("loopback");
            to.recv(&mut [0; 1000]).expect("it was sent");
            let left = kernel.ask(local, remote).expect("a reply").expect("there is one");
            assert_eq!(left.unread, filled.unread);
            assert!(left.has_read_since(filled), "{left:?}");
            drop(to);
            assert_eq!(kernel.ask(local, remote).expect("a reply"), None);
        }
    }

    #[test]
    fn a_process_is_stalled_while_its_buffer_does_not_empty() {
        if kernel("a_process_is_stalled_while_its_buffer_does_not_empty").is_none() {
            return;
        }
        // No other test has this address, so none takes the port once it is free.
        let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.9.4.1:0").expect("loopback"));
        let [local, remote] = [&from, &to].map(|socket| socket.local_addr().expect("bound"));
        to.set_nonblocking(true).expect("a socket");
        let mut backlog = Backlog::new();
        let mut is_stalled = || {
            let probe = || drop(from.send_to(&[0], remote));
            backlog.is_stalled(local, remote, probe)
        };
        let send = || drop(from.send_to(&[0; 1000], remote));
        let read_all = || while to.recv(&mut [0; 1000]).is_ok() {};
        assert!(!is_stalled(), "there is nothing to read");
        for packets in [1, 2, 0] {
            (0..packets).for_each(|_| send());
            assert!(is_stalled());
        }
        // At each look, just as much is unread.
        for _ in 0..4 {
            read_all();
            send();
            assert!(!is_stalled(), "it has read since the last look");
        }
        assert!(is_stalled());
        drop(to);
        assert!(!is_stalled(), "it is gone");
    }

    #[test]
    fn a_deep_queue_that_looks_the_same_each_time_is_not_stalled_while_it_is_read() {
        if kernel("a_deep_queue_that_looks_the_same_each_time").is_none() {
            return;
        }
        let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("loopback"));
        let [local, remote] = [&from, &to].map(|socket| socket.local_addr().expect("bound"));
        let mut backlog = Backlog::new();
        let mut is_stalled = || backlog.is_stalled(local, remote, || panic!("no room for probes"));
        let send = || drop(from.send_to(&[0; 1000], remote));
        let limit = SockDiag::open().expect("it was there").ask(local, remote).expect("a reply");
        let packets = limit.expect("there is one").limit / 8 / 1000;
        (0..packets).for_each(|_| send());
        assert!(is_stalled());
        for _ in 0..4 {
            to.recv(&mut [0; 1000]).expect("it was sent");
            send();
            assert!(!is_stalled());
            assert!(is_stalled());
        }
    }

    /// Fills the buffer of `remote` as far as packets for it are admitted, and returns how many
    /// those were.
    fn fill(backlog: &mut Backlog, now: Time, from: &UdpSocket, remote: SocketAddr) -> usize {
        let (mut filled, local) = (0, from.local_addr().expect("bound"));
        while backlog.admits(now, local, remote, Transport::Uc, 8) > 0 {
            from.send_to(&[0; 1000], remote).expect("loopback");
            backlog.sent(local, remote, 1, 1000);
            backlog.next_burst();
            filled += 1;
        }
        filled
    }

    #[test]
    fn packets_wait_for_a_process_that_reads_whenever_nobody_looks() {
        if kernel("packets_wait_for_a_process_that_reads_whenever_nobody_looks").is_none() {
            return;
        }
        let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("loopback"));
        let [local, remote] = [&from, &to].map(|socket| socket.local_addr().expect("bound"));
        let mut backlog = Backlog::new();
        let mut now = Time::ZERO;
        fill(&mut backlog, now, &from, remote);
        for _ in 0..4 {
            now += PATIENCE;
            to.recv(&mut [0; 1000]).expect("it was sent");
            // Another sender takes the place.
            from.send_to(&[0; 1000], remote).expect("loopback");
            assert_eq!(backlog.admits(now, local, remote, Transport::Uc, 8), 0);
            assert!(!backlog.loses(local, remote), "it reads");
        }
        now += PATIENCE;
        backlog.admits(now, local, remote, Transport::Uc, 8);
        assert!(backlog.loses(local, remote), "it has stopped");
        to.recv(&mut [0; 1000]).expect("it was sent");
        from.send_to(&[0; 1000], remote).expect("loopback");
        now += LOOK_AT_STOPPED;
        backlog.admits(now, local, remote, Transport::Uc, 8);
        assert!(!backlog.loses(local, remote), "it reads again");
    }

    #[test]
    fn a_large_buffer_is_not_filled() {
        if kernel("a_large_buffer_is_not_filled").is_none() {
            return;
        }
        let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("loopback"));
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&to, 64 << 20);
        let [local, remote] = [&from, &to].map(|socket| socket.local_addr().expect("bound"));
        let mut backlog = Backlog::new();
        fill(&mut backlog, Time::ZERO, &from, remote);
        let level = SockDiag::open().expect("it was there").ask(local, remote).expect("a reply");
        let Level { unread, limit, .. } = level.expect("there is one");
        if limit < 64 << 20 {
            return crate::skip::note("a_large_buffer_is_not_filled", "net.core.rmem_max is small");
        }
        assert!((1 << 20..limit / 16).contains(&unread), "{unread} of {limit}");
    }

    #[test]
    fn packets_for_a_stopped_process_are_lost_at_a_bounded_rate() {
        if kernel("packets_for_a_stopped_process_are_lost_at_a_bounded_rate").is_none() {
            return;
        }
        let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("loopback"));
        let [local, remote] = [&from, &to].map(|socket| socket.local_addr().expect("bound"));
        let mut backlog = Backlog::new();
        let mut now = Time::ZERO;
        let filled = fill(&mut backlog, now, &from, remote);
        assert_eq!(backlog.next_look(), Some(now + LOOK_AGAIN));
        now += PATIENCE;
        for _ in 0..3 {
            let lost: Vec<usize> = (0..4)
                .map(|_| backlog.admits(now, local, remote, Transport::Uc, LOST_PER_LOOK - 1))
                .collect();
            assert_eq!(lost, [LOST_PER_LOOK - 1, 1, 0, 0]);
            assert!(backlog.loses(local, remote));
            assert_eq!(backlog.admits(now, local, remote, Transport::Ud, 99), 99);
            now += LOOK_AT_STOPPED;
            assert_eq!(backlog.next_look(), Some(now));
        }
        // Nobody sends to it meanwhile: a query that is overdue wakes nobody.
        let other = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let elsewhere = other.local_addr().expect("bound");
        assert_eq!(backlog.admits(now, local, elsewhere, Transport::Uc, 1), 1);
        assert_eq!(backlog.next_look(), None);
        for _ in 0..filled {
            to.recv(&mut [0; 1000]).expect("it was sent");
        }
        assert!(backlog.admits(now, local, remote, Transport::Uc, 1) > 0);
        assert!(!backlog.loses(local, remote), "it reads again");
    }

    #[test]
    fn answers_cut_short_or_of_another_kind_say_nothing() {
        let mut answer = vec![0; ANSWER_BYTES];
        for (field, bytes) in [(1_u16, 4_u16), (INET_DIAG_SKMEMINFO, 40)] {
            answer.extend_from_slice(&bytes.to_ne_bytes());
            answer.extend_from_slice(&field.to_ne_bytes());
            answer.resize(answer.len() + usize::from(bytes) - 4, 3);
        }
        let word = u64::from(u32::from_ne_bytes([3; 4]));
        answer[UNREAD_AT..UNREAD_AT + 4].fill(2);
        let unread = u64::from(u32::from_ne_bytes([2; 4]));
        let read = |kind, body: &[u8]| level(&Message::new(kind, body));
        let whole = Some(Level { used: word, unread, limit: word });
        assert_eq!(read(SOCK_DIAG_BY_FAMILY, &answer), whole);
        for len in 0..ANSWER_BYTES + 4 + 4 + 8 {
            assert_eq!(read(SOCK_DIAG_BY_FAMILY, &answer[..len]), None, "{len}");
        }
        assert_eq!(read(SOCK_DIAG_BY_FAMILY ^ 1, &answer), None);
        // An attribute that claims no length at all ends the search.
        answer[ANSWER_BYTES] = 0;
        assert_eq!(read(SOCK_DIAG_BY_FAMILY, &answer), None);
    }
}
