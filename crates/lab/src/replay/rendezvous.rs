//! How the ranks of a replayed job find each other, begin together, and learn of each other's end.
//!
//! All connect to rank 0, in any order, and try until it is there or their time is up. When all
//! have come and want the same, rank 0 tells each the queue pairs of all; each connects its own,
//! says so, and all are told to go. The connections stay: a rank that ends early, or is killed, is
//! noticed by rank 0, which tells the others who and why. At the end rank 0 waits until all are
//! done, so that nobody takes away queue pairs that others still need.
//!
//! Whoever reaches rank 0 can say that he is a rank, so he must come from that rank's address;
//! nobody can make the others send to a third. Connections that say nothing keep nobody out: rank 0
//! listens to all of them at the same time, and ends the oldest where there are too many.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use service::Error;
use service::control::Control;

/// Version of the messages.
const VERSION: u32 = 1;

/// Port of rank 0 unless another is given.
pub const JOB_PORT: u16 = 4793;

/// How long a new connection may take to say who it is.
const INTRODUCTION_LIMIT: Duration = Duration::from_secs(2);

/// Connections that have not said who they are, and are listened to at the same time.
const MAX_STRANGERS: usize = 256;

/// How often rank 0 is tried, and looked for connections.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// How long one attempt to connect may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// How long others may take to connect their queue pairs once all are there.
const PREPARE_LIMIT: Duration = Duration::from_secs(30);

/// What has to be the same at all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// The pattern as it is written.
    pub pattern: String,
    /// Bytes of the edges with the highest rate.
    pub bytes: u64,
    /// Parts of each phase.
    pub steps: u32,
    /// Iterations, those that are not measured among them.
    pub iterations: u32,
}

/// The queue pairs of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankInfo {
    /// UDP port of its device.
    pub port: u16,
    /// Largest path MTU that it can have towards rank 0, in payload bytes.
    pub mtu: u32,
    /// Peer, number of the queue pair towards it, and its first packet sequence number.
    pub qps: Vec<(u32, u32, u32)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Message {
    Join { version: u32, rank: u32, terms: Terms, info: RankInfo },
    Refused { why: String, hint: String },
    Seats(Vec<RankInfo>),
    Connected,
    Go,
    Done,
    Bye,
    Failed { why: String, hint: String },
}

/// The connections of a rank to the others.
#[derive(Debug)]
pub struct Rendezvous {
    /// At rank 0: by rank, none at 0; elsewhere the one to rank 0.
    controls: Vec<Option<Control<Message>>>,
    peers: Vec<SocketAddr>,
    is_host: bool,
    /// At rank 0: who is done.
    done: Vec<bool>,
    is_over: bool,
}

/// Why a rendezvous ends early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// What happened, to whom.
    pub why: String,
    /// The next thing to try.
    pub hint: String,
}

impl Broken {
    fn new(why: impl ToString, hint: &str) -> Broken {
        Broken { why: why.to_string(), hint: hint.to_owned() }
    }

    /// As the error of the command.
    pub fn into_error(self) -> Error {
        Error::unreachable(self.why).hint(self.hint)
    }
}

const LOST_HINT: &str = "its output says why; all ranks end when one does";

impl Rendezvous {
    /// Rank 0: waits for all others.
    ///
    /// # Errors
    /// When not all have come in time; who came is told who did not.
    pub fn host(
        listener: &TcpListener,
        peers: &[SocketAddr],
        terms: &Terms,
        info: RankInfo,
        limit: Duration,
    ) -> Result<(Rendezvous, Vec<RankInfo>), Error> {
        let until = Instant::now() + limit;
        let no_listener = |error: io::Error| Error::because("cannot wait for ranks", &error);
        listener.set_nonblocking(true).map_err(no_listener)?;
        let mut infos: Vec<Option<RankInfo>> = vec![None; peers.len()];
        infos[0] = Some(info);
        let mut rendezvous = Rendezvous {
            controls: peers.iter().map(|_| None).collect(),
            peers: peers.to_vec(),
            is_host: true,
            done: vec![false; peers.len()],
            is_over: false,
        };
        let mut strangers = Strangers::default();
        while infos.iter().any(Option::is_none) {
            strangers.accept(listener);
            let introduced = strangers.introduced();
            if introduced.is_empty() {
                std::thread::sleep(TRY_EVERY);
            }
            for (control, from, message) in introduced {
                rendezvous.admit(control, from, message, terms, &mut infos);
            }
            // A rank that has connected is heard, so that it learns why this one ends.
            let now = Instant::now();
            let may_hear = now < until + INTRODUCTION_LIMIT && strangers.has_one_of(peers);
            if now >= until && !may_hear {
                let missing = infos.iter().enumerate().filter(|(_, info)| info.is_none());
                let missing: Vec<String> =
                    missing.map(|(rank, _)| name(rank, &peers[rank])).collect();
                let why = format!("{} did not come within {limit:?}", missing.join(", "));
                let hint =
                    "start every rank with the same pattern and --peers; --wait gives more time";
                return Err(rendezvous.fail(Broken::new(why, hint)).into_error());
            }
        }
        let infos: Vec<RankInfo> = infos.into_iter().flatten().collect();
        rendezvous.tell_all(&Message::Seats(infos.clone())).map_err(Broken::into_error)?;
        Ok((rendezvous, infos))
    }

    /// One connection that said who it is; what is wrong with it is said to it.
    fn admit(
        &mut self,
        mut control: Control<Message>,
        from: SocketAddr,
        message: Message,
        terms: &Terms,
        infos: &mut [Option<RankInfo>],
    ) {
        let Message::Join { version, rank, terms: theirs, info } = message else { return };
        let expected = self.peers.get(rank as usize).filter(|_| rank > 0);
        let is_from = |peer: &SocketAddr| peer.ip().to_canonical() == from.ip().to_canonical();
        let refusal = match (expected, infos.get(rank as usize)) {
            _ if version != VERSION => {
                Some(("rank 0 has another version of dquant".to_owned(), "use the same everywhere"))
            }
            (Some(peer), _) if !is_from(peer) => Some((
                format!(
                    "rank {rank} is at {} in the peers of rank 0, not at {}",
                    peer.ip(),
                    from.ip()
                ),
                "give all ranks the same --peers, with the addresses that packets leave from",
            )),
            (Some(_), Some(Some(_))) => {
                Some((format!("rank {rank} is there already"), "give each its own --rank"))
            }
            (Some(_), _) if theirs != *terms => Some((
                format!("rank 0 replays {terms:?}, this rank {theirs:?}"),
                "give all ranks the same options",
            )),
            (Some(_), _) => None,
            (None, _) => {
                Some((format!("there is no rank {rank}"), "--rank is a place in --peers, from 0"))
            }
        };
        match refusal {
            Some((why, hint)) => {
                let _ = control.send(&Message::Refused { why, hint: hint.to_owned() });
            }
            None => {
                infos[rank as usize] = Some(info);
                self.controls[rank as usize] = Some(control);
            }
        }
    }

    /// Another rank: joins rank 0.
    ///
    /// # Errors
    /// When rank 0 does not answer in time, refuses, or gives up.
    pub fn join(
        peers: &[SocketAddr],
        rank: u32,
        terms: Terms,
        info: RankInfo,
        limit: Duration,
    ) -> Result<(Rendezvous, Vec<RankInfo>), Error> {
        let until = Instant::now() + limit;
        let stream = reach(peers[rank as usize], peers[0], until).map_err(|error| {
            let why = format!("rank 0 ({}) did not answer within {limit:?}: {error}", peers[0]);
            Error::unreachable(why).hint("start it, or give more time with --wait")
        })?;
        let gone = |error: io::Error| lost(0, &peers[0], &error).into_error();
        let mut control = Control::new(stream).map_err(gone)?;
        control.send(&Message::Join { version: VERSION, rank, terms, info }).map_err(gone)?;
        // Rank 0 gives up by itself, and may have begun to wait later.
        match control.receive_within(limit + PREPARE_LIMIT).map_err(gone)? {
            Message::Seats(infos) if infos.len() == peers.len() => {
                let peers = peers.to_vec();
                let (controls, done) = (vec![Some(control)], Vec::new());
                Ok((Rendezvous { controls, peers, is_host: false, done, is_over: false }, infos))
            }
            Message::Refused { why, hint } => Err(Error::invalid(why).hint(hint)),
            Message::Failed { why, hint } => Err(Broken { why, hint }.into_error()),
            other => Err(out_of_turn(0, &peers[0], &other).into_error()),
        }
    }

    /// Waits until all have connected their queue pairs.
    ///
    /// # Errors
    /// When one of them ends meanwhile.
    pub fn begin(&mut self) -> Result<(), Error> {
        if !self.is_host {
            let Some(control) = &mut self.controls[0] else { return Ok(()) };
            let sent = control.send(&Message::Connected);
            let heard = sent.and_then(|()| control.receive_within(2 * PREPARE_LIMIT));
            return match heard {
                Ok(Message::Go) => Ok(()),
                Ok(Message::Failed { why, hint }) => Err(Broken { why, hint }.into_error()),
                Ok(other) => Err(out_of_turn(0, &self.peers[0], &other).into_error()),
                Err(error) => Err(lost(0, &self.peers[0], &error).into_error()),
            };
        }
        for rank in 1..self.controls.len() {
            let Some(control) = &mut self.controls[rank] else { continue };
            let broken = match control.receive_within(PREPARE_LIMIT) {
                Ok(Message::Connected) => continue,
                Ok(Message::Failed { why, hint }) => Broken { why, hint },
                Ok(other) => out_of_turn(rank, &self.peers[rank], &other),
                Err(error) => lost(rank, &self.peers[rank], &error),
            };
            return Err(self.fail(broken).into_error());
        }
        self.tell_all(&Message::Go).map_err(Broken::into_error)
    }

    /// Looks for news of the others, without waiting.
    ///
    /// # Errors
    /// When one of them has ended early; the others are told.
    pub fn look(&mut self) -> Result<(), Broken> {
        if self.is_over {
            return Ok(());
        }
        let mut broken = None;
        for (at, place) in self.controls.iter_mut().enumerate() {
            let Some(control) = place else { continue };
            match control.poll() {
                Ok(None) => {}
                Ok(Some(Message::Done)) if self.is_host => self.done[at] = true,
                Ok(Some(Message::Bye)) if !self.is_host => self.is_over = true,
                Ok(Some(Message::Failed { why, hint })) => broken = Some(Broken { why, hint }),
                Ok(Some(other)) => broken = Some(out_of_turn(at, &self.peers[at], &other)),
                Err(error) => broken = Some(lost(at, &self.peers[at], &error)),
            }
        }
        match broken {
            Some(broken) => Err(self.fail(broken)),
            None if self.is_host && self.done.iter().all(|done| *done) => {
                self.is_over = true;
                self.tell_all(&Message::Bye)
            }
            None => Ok(()),
        }
    }

    /// This rank has finished its iterations.
    ///
    /// # Errors
    /// When rank 0 is gone.
    pub fn finish(&mut self) -> Result<(), Broken> {
        if self.is_host {
            self.done[0] = true;
            return Ok(());
        }
        let Some(control) = &mut self.controls[0] else { return Ok(()) };
        control.send(&Message::Done).map_err(|error| lost(0, &self.peers[0], &error))
    }

    /// Whether all ranks have finished.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Tells the others why this rank ends, and returns it. Whoever is gone already is not told.
    pub fn fail(&mut self, broken: Broken) -> Broken {
        let Broken { why, hint } = broken.clone();
        let message = Message::Failed { why, hint };
        for control in self.controls.iter_mut().flatten() {
            let _ = control.send(&message);
        }
        self.is_over = true;
        broken
    }

    /// Descriptors that are readable when there is news.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.controls.iter().flatten().map(Control::fd)
    }

    fn tell_all(&mut self, message: &Message) -> Result<(), Broken> {
        for rank in 1..self.controls.len() {
            let Some(control) = &mut self.controls[rank] else { continue };
            if let Err(error) = control.send(message) {
                let broken = lost(rank, &self.peers[rank], &error);
                return Err(self.fail(broken));
            }
        }
        Ok(())
    }
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
                Ok(None) | Err(_) => {}
            }
        }
        introduced
    }
}

fn name(rank: usize, peer: &SocketAddr) -> String {
    format!("rank {rank} ({})", peer.ip())
}

fn lost(rank: usize, peer: &SocketAddr, error: &io::Error) -> Broken {
    let name = name(rank, peer);
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            Broken::new(format_args!("{name} has ended"), LOST_HINT)
        }
        ErrorKind::InvalidData => {
            Broken::new(format_args!("{name}: {error}"), "is it the same version of dquant?")
        }
        _ => Broken::new(format_args!("{name}: {error}"), LOST_HINT),
    }
}

fn out_of_turn(rank: usize, peer: &SocketAddr, message: &Message) -> Broken {
    let why = format!("{} said {message:?} out of turn", name(rank, peer));
    Broken::new(why, "use the same version of dquant everywhere")
}

/// Connects from this rank's address, which rank 0 checks, until it succeeds or the time is up.
fn reach(own: SocketAddr, host: SocketAddr, until: Instant) -> io::Result<TcpStream> {
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
