//! The bootstrap of a rank ([`comm::bootstrap`]) over its control connections.
//!
//! Rank 0 listens; the others try to reach it until it is there or their time is up. Connections
//! that say nothing keep nobody out: rank 0 listens to all of them at the same time, and ends the
//! oldest where there are too many.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use comm::bootstrap::{self, Bootstrap, Config, Event, Failure, Loss, Reason};
use nic::clock;
use service::Error;
use service::control::Control;

use super::wire::{self, Message, RankInfo, Terms, VERSION};

/// Port of rank 0 unless another is given.
pub const JOB_PORT: u16 = 4793;

/// How long a new connection may take to say who it is.
const INTRODUCTION_LIMIT: Duration = Duration::from_secs(2);

/// Connections that have not said who they are, and are listened to at the same time.
const MAX_STRANGERS: usize = 256;

/// How often rank 0 is tried, and looked for connections.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// Messages of one rank that are taken before the others and the time have their turn. In a whole
/// job a rank says no more than five.
const MESSAGES_AT_ONCE: u32 = 16;

/// How long one attempt to connect may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// The connections of a rank to the others.
#[derive(Debug)]
pub(super) struct Rendezvous {
    machine: Bootstrap<Terms, RankInfo>,
    /// At rank 0 by rank, none at 0; elsewhere the one to rank 0.
    controls: Vec<Option<Control<Message>>>,
    peers: Vec<SocketAddr>,
    terms: Terms,
    wait: Duration,
    is_over: bool,
}

impl Rendezvous {
    /// A rank that waits so long for the others. Rank 0 is the one with a listener.
    ///
    /// # Errors
    /// When rank 0 cannot listen, or does not answer in time.
    pub(super) fn new(
        (rank, listener): (u32, Option<&TcpListener>),
        peers: &[SocketAddr],
        terms: &Terms,
        info: RankInfo,
        wait: Duration,
    ) -> Result<Rendezvous, Error> {
        let mut controls: Vec<Option<Control<Message>>> = peers.iter().map(|_| None).collect();
        match listener {
            Some(listener) => listener
                .set_nonblocking(true)
                .map_err(|error| Error::because("cannot wait for ranks", &error))?,
            None => controls[0] = Some(reach(peers, rank, wait)?),
        }
        let (ips, terms) = (peers.iter().map(SocketAddr::ip).collect(), terms.clone());
        let config = Config {
            rank,
            peers: ips,
            version: VERSION,
            terms: terms.clone(),
            wait: roce_duration(wait),
        };
        let machine = Bootstrap::new(config, info, clock::now());
        Ok(Rendezvous { machine, controls, peers: peers.to_vec(), terms, wait, is_over: false })
    }

    /// Waits until all ranks are there, and returns what each said of itself.
    ///
    /// # Errors
    /// When not all come in time; who came is told who did not.
    pub(super) fn gather(
        &mut self,
        listener: Option<&TcpListener>,
    ) -> Result<Vec<RankInfo>, Error> {
        let mut strangers = Strangers::default();
        loop {
            if let Some(listener) = listener {
                strangers.accept(listener);
            }
            for (control, from, message) in strangers.introduced() {
                self.admit(control, from, message);
            }
            // A rank that has connected is heard, so that it learns why this one ends.
            let limit = self.machine.poll_timeout();
            let late = limit.is_some_and(|limit| {
                clock::now() >= limit + roce_duration(INTRODUCTION_LIMIT)
                    || !strangers.has_one_of(&self.peers)
            });
            match self.advance(late) {
                Some(Event::Ranks(infos)) => return Ok(infos),
                Some(Event::Failed(failure)) => return Err(wire::error(&failure, self.wait)),
                _ => self.pause(listener, &strangers),
            }
        }
    }

    /// This rank has connected its queue pairs: waits until all have.
    ///
    /// # Errors
    /// When one of them ends meanwhile.
    pub(super) fn begin(&mut self) -> Result<(), Error> {
        self.machine.handle_connected(clock::now());
        loop {
            match self.advance(true) {
                Some(Event::Go) => return Ok(()),
                Some(Event::Failed(failure)) => return Err(wire::error(&failure, self.wait)),
                _ => self.pause(None, &Strangers::default()),
            }
        }
    }

    /// Looks for news of the others, without waiting.
    ///
    /// # Errors
    /// When one of them has ended early; the others are told.
    pub(super) fn look(&mut self) -> Result<(), Failure> {
        match self.advance(true) {
            Some(Event::Failed(failure)) => Err(failure),
            _ => Ok(()),
        }
    }

    /// This rank has finished its iterations.
    ///
    /// # Errors
    /// When rank 0 is gone.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        self.machine.handle_finished();
        self.look()
    }

    /// Whether all ranks have finished, or this one has failed.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Tells the others why this rank ends, and returns it. Whoever is gone already is not told.
    pub(super) fn fail(&mut self, why: String, hint: String) -> Failure {
        let reason = Reason { why, hint };
        self.machine.handle_failure(reason.clone());
        // Another reason may have come first.
        self.look().err().unwrap_or(Failure::Told(reason))
    }

    /// Descriptors that are readable when there is news.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.controls.iter().flatten().map(Control::fd)
    }

    /// One connection that said who it is; what is wrong with it is said to it.
    fn admit(&mut self, mut control: Control<Message>, from: SocketAddr, message: Message) {
        let bootstrap::Message::Join(join) = message.heard() else { return };
        match self.machine.handle_join(from.ip(), join) {
            Ok(rank) => self.controls[rank as usize] = Some(control),
            Err(why) => {
                let _ = control.send(&wire::refusal(&why, &self.terms, from.ip()));
            }
        }
    }

    /// Passes on what has come, and the time; sends what is to be sent; returns what follows.
    fn advance(&mut self, minds_time: bool) -> Option<Event<RankInfo>> {
        for (rank, place) in (0..).zip(&mut self.controls) {
            let Some(control) = place else { continue };
            let mut ended = None;
            // A rank that never stops talking must keep neither the others nor the time away.
            for _ in 0..MESSAGES_AT_ONCE {
                match control.poll() {
                    Ok(Some(message)) => self.machine.handle_message(rank, message.heard()),
                    Ok(None) => break,
                    Err(error) => {
                        ended = Some(error);
                        break;
                    }
                }
            }
            if let Some(error) = ended {
                *place = None;
                self.machine.handle_lost(rank, loss(&error));
            }
        }
        if minds_time {
            self.machine.handle_timeout(clock::now());
        }
        while let Some((rank, said)) = self.machine.poll_transmit() {
            let place = &mut self.controls[rank as usize];
            let Some(control) = place else { continue };
            if let Err(error) = control.send(&Message::of(said, rank, self.wait)) {
                *place = None;
                self.machine.handle_lost(rank, loss(&error));
            }
        }
        let event = self.machine.poll_event();
        self.is_over |= matches!(event, Some(Event::Over | Event::Failed(_)));
        event
    }

    /// Sleeps until somebody may have said something, for a short while.
    fn pause(&self, listener: Option<&TcpListener>, strangers: &Strangers) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let known = self.fds().chain(listener.map(AsFd::as_fd)).chain(strangers.fds());
        let mut fds: Vec<PollFd<'_>> =
            known.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let limit = Timespec::try_from(TRY_EVERY).ok();
        if poll(&mut fds, limit.as_ref()).is_err() {
            std::thread::sleep(TRY_EVERY);
        }
    }
}

fn roce_duration(time: Duration) -> roce::Duration {
    roce::Duration::from_nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Connections that have not said who they are; the oldest comes first.
#[derive(Debug, Default)]
struct Strangers(VecDeque<(Control<Message>, SocketAddr, Instant)>);

impl Strangers {
    /// Takes the connections that wait.
    fn accept(&mut self, listener: &TcpListener) {
        for _ in 0..MAX_STRANGERS {
            // None waits, or the system lacks something: the caller comes again.
            let Ok((stream, from)) = listener.accept() else { return };
            let Ok(control) = Control::new(stream) else { continue };
            if self.0.len() >= MAX_STRANGERS {
                self.0.pop_front();
            }
            self.0.push_back((control, from, Instant::now()));
        }
    }

    /// Whether one of them comes from the address of a rank.
    fn has_one_of(&self, peers: &[SocketAddr]) -> bool {
        let is_peer = |from: &SocketAddr| {
            peers.iter().any(|peer| peer.ip().to_canonical() == from.ip().to_canonical())
        };
        self.0.iter().any(|(_, from, _)| is_peer(from))
    }

    fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|(control, ..)| control.fd())
    }

    /// Those that have said something. Those that are gone, talk nonsense or are silent for too
    /// long are ended.
    fn introduced(&mut self) -> Vec<(Control<Message>, SocketAddr, Message)> {
        let mut introduced = Vec::new();
        for _ in 0..self.0.len() {
            let Some((mut control, from, since)) = self.0.pop_front() else { break };
            match control.poll() {
                Ok(Some(message)) => introduced.push((control, from, message)),
                Ok(None) if since.elapsed() < INTRODUCTION_LIMIT => {
                    self.0.push_back((control, from, since));
                }
                // It may be another version, whose ranks introduce themselves in other words.
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    let _ = control.send(&wire::unreadable(&error));
                }
                Ok(None) | Err(_) => {}
            }
        }
        introduced
    }
}

fn loss(error: &io::Error) -> Loss {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            Loss::Ended
        }
        ErrorKind::InvalidData => Loss::Garbled(error.to_string()),
        _ => Loss::Broken(error.to_string()),
    }
}

/// The connection of a rank to rank 0.
fn reach(peers: &[SocketAddr], rank: u32, limit: Duration) -> Result<Control<Message>, Error> {
    let until = Instant::now() + limit;
    let stream = try_until(peers[rank as usize], peers[0], until).map_err(|error| {
        let why = format!("rank 0 ({}) did not answer within {limit:?}: {error}", peers[0]);
        Error::unreachable(why).hint("start it, or give more time with --wait")
    })?;
    let peer = bootstrap::Peer { rank: 0, ip: peers[0].ip() };
    Control::new(stream).map_err(|error| wire::error(&Failure::Lost(peer, loss(&error)), limit))
}

/// Connects from this rank's address, which rank 0 checks, until it succeeds or the time is up.
fn try_until(own: SocketAddr, host: SocketAddr, until: Instant) -> io::Result<TcpStream> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return connect_from(own, host, TRY_EVERY);
        }
        match connect_from(own, host, CONNECT_LIMIT.min(left.max(TRY_EVERY))) {
            Ok(stream) => return Ok(stream),
            // This machine lacks the address: waiting does not help.
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => return Err(error),
            Err(_) => std::thread::sleep(TRY_EVERY.min(left)),
        }
    }
}

fn connect_from(own: SocketAddr, host: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{
        AddressFamily, SocketFlags, SocketType, bind, connect, socket_with, sockopt,
    };
    let family = if own.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddr::new(own.ip(), 0))?;
    match connect(&socket, &host) {
        Ok(()) => {}
        Err(rustix::io::Errno::INPROGRESS) => {
            let limit = Timespec::try_from(limit).map_err(|_| ErrorKind::InvalidInput)?;
            if poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&limit))? == 0 {
                return Err(ErrorKind::TimedOut.into());
            }
            sockopt::socket_error(&socket)??;
        }
        Err(errno) => return Err(errno.into()),
    }
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
