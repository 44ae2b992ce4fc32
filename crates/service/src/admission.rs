//! Admission to a control port: how many connections and calls, from where, for how long.
//!
//! The connections are those of `places`: a table of fixed size, in which strangers give way.
//! Besides, a connection loses its place by timeout, of the HTTP/2 handshake or without a call. A
//! caller with the token is refused only when calls are under way on every place.
//!
//! Calls are bounded as well: in total, per address, and among those that do work, so that a status
//! call finds room when everything else is taken.
//!
//! Out of descriptors, the accept loop pauses: the connections wait in the kernel meanwhile.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::{Request, Status};

use crate::event::Event;
use crate::log;
use crate::places::{
    self, Acceptor, Activity, Admitted, Allowance, Bounds, MAX_REFUSED, NoPlace, Place, Places,
};

/// Connections at once, or half of the process's descriptors where that is less.
const MAX_CONNECTIONS: usize = 512;

/// Calls at once, sessions included; at most half of them for one address.
const MAX_CALLS: usize = 256;

/// Those of them that only a status call may use.
const STATUS_CALLS: usize = 16;

/// How long a connection may take to begin HTTP/2.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection without a call stays open.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// What a client sends first on every HTTP/2 connection, in bytes.
const PREFACE_BYTES: usize = 24;

static ACCEPTED: Event = Event::new("control.connections.accepted");
static ACCEPT_ERRORS: Event = Event::new("control.accept_errors");
static REFUSED_FULL: Event = Event::new("control.connections.refused.full");
static REFUSED_ADDRESS: Event = Event::new("control.connections.refused.address");
static CLOSED_HANDSHAKE: Event = Event::new("control.connections.closed.handshake");
static CLOSED_IDLE: Event = Event::new("control.connections.closed.idle");
static CLOSED_REFUSED: Event = Event::new("control.connections.closed.refused");
static CLOSED_EVICTED: Event = Event::new("control.connections.closed.evicted");
static REFUSED_CALLS: Event = Event::new("control.refused_calls");
static CLOSED_CALLS: Event = Event::new("control.closed_calls");

/// Counters of all control ports of this process.
pub static EVENTS: [&Event; 10] = [
    &ACCEPTED,
    &ACCEPT_ERRORS,
    &REFUSED_FULL,
    &REFUSED_ADDRESS,
    &CLOSED_HANDSHAKE,
    &CLOSED_IDLE,
    &CLOSED_REFUSED,
    &CLOSED_EVICTED,
    &REFUSED_CALLS,
    &CLOSED_CALLS,
];

/// Limits of a control port.
#[derive(Clone, Copy, Debug)]
struct Limits {
    connections: usize,
    per_address: usize,
    calls: usize,
    status_calls: usize,
    handshake: Duration,
    idle: Duration,
}

impl Limits {
    fn of_this_process() -> Limits {
        let connections = places::within_descriptors(MAX_CONNECTIONS, 2);
        Limits {
            connections,
            per_address: connections / 2,
            calls: MAX_CALLS,
            status_calls: STATUS_CALLS,
            handshake: HANDSHAKE_TIMEOUT,
            idle: IDLE_TIMEOUT,
        }
    }
}

/// The connections of one control port.
#[derive(Debug)]
pub struct Admission {
    limits: Limits,
    places: Arc<Places>,
    calls: Mutex<Calls>,
}

/// Calls under way.
#[derive(Debug, Default)]
struct Calls {
    all: usize,
    /// Those that do work; status calls do not.
    working: usize,
    /// By address; at most as many as there are calls.
    from: BTreeMap<IpAddr, usize>,
}

impl Admission {
    /// Admission with the limits of this process.
    pub fn new() -> Arc<Admission> {
        Admission::with(Limits::of_this_process())
    }

    /// As [`Admission::new`], with room for so many connections more, of which each has a call that
    /// lasts: agents, all of which may come from one address.
    pub fn with_room(lasting: usize) -> Arc<Admission> {
        let own = Limits::of_this_process();
        let connections = own.connections + lasting;
        let per_address = own.per_address + lasting;
        Admission::with(Limits { connections, per_address, calls: own.calls + 2 * lasting, ..own })
    }

    fn with(limits: Limits) -> Arc<Admission> {
        let Limits { connections, per_address, .. } = limits;
        let places = Places::new(Bounds { connections, per_address });
        Arc::new(Admission { limits, places, calls: Mutex::default() })
    }

    /// Connections admitted through `listener`, until the receiver is dropped.
    pub fn accept(
        self: Arc<Admission>,
        listener: TcpListener,
    ) -> ReceiverStream<io::Result<ControlStream>> {
        let (send, receive) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut acceptor = Acceptor::new(listener, "");
            loop {
                let (tcp, peer) = tokio::select! {
                    () = send.closed() => return,
                    accepted = acceptor.next(|| ACCEPT_ERRORS.count()) => accepted,
                };
                let Some(stream) = self.admit(tcp, peer) else { continue };
                if send.send(Ok(stream)).await.is_err() {
                    return;
                }
                // An evicted connection closes its socket before the next one is accepted.
                tokio::task::yield_now().await;
            }
        });
        ReceiverStream::new(receive)
    }

    /// Admits the connection if there is a place, or one can be freed.
    fn admit(self: &Arc<Admission>, tcp: TcpStream, peer: SocketAddr) -> Option<ControlStream> {
        let Admitted { place, evicted, displaced } = match self.places.admit(peer.ip()) {
            Ok(admitted) => admitted,
            Err(no_place) => {
                match no_place {
                    NoPlace::Full => REFUSED_FULL.count(),
                    NoPlace::Address => REFUSED_ADDRESS.count(),
                }
                log::refusal(format_args!("connection from {peer} refused: {no_place}"));
                return None;
            }
        };
        CLOSED_EVICTED.add(displaced.into());
        ACCEPTED.count();
        let deadline = Box::pin(sleep_until(Instant::now() + self.limits.handshake));
        let local = tcp.local_addr().ok();
        let caller = Caller {
            peer,
            origin: place.origin,
            local,
            standing: Arc::default(),
            activity: Arc::clone(&place.activity),
            admission: Arc::clone(self),
        };
        Some(ControlStream {
            tcp,
            caller,
            _place: place,
            evicted,
            deadline,
            preface_left: PREFACE_BYTES,
            calls_seen: 0,
            allowance: Allowance::default(),
            over: false,
        })
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        self.places.len()
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        // Numbers that change together are never left half changed.
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The caller: attached to every request of a connection.
#[derive(Clone, Debug)]
pub struct Caller {
    peer: SocketAddr,
    /// What counts as the address that it calls from.
    origin: IpAddr,
    local: Option<SocketAddr>,
    standing: Arc<Mutex<Standing>>,
    activity: Arc<Activity>,
    admission: Arc<Admission>,
}

/// What the caller of a connection has proven, for daemons that ask once per connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Nothing.
    #[default]
    Stranger,
    /// The caller's nonce and the one that it was given.
    Asked([[u8; 32]; 2]),
    /// That it knows the secret.
    Proven,
}

/// A call under way; it ends when this is dropped.
#[derive(Debug)]
pub struct Call {
    caller: Caller,
    /// Whether its request has arrived.
    heard: AtomicBool,
    working: AtomicBool,
}

impl Call {
    /// The call of `request`, whose message has arrived, if its connection was admitted here.
    pub fn of<T>(request: &Request<T>) -> Option<Arc<Call>> {
        let call = request.extensions().get::<Arc<Call>>().cloned();
        call.inspect(|call| call.heard.store(true, Ordering::Relaxed))
    }

    /// What counts as the address that it comes from.
    pub fn origin(&self) -> IpAddr {
        self.caller.origin
    }

    /// The call of `request`, which may still wait for its message and will do work, if there is
    /// room for that.
    pub fn work<T>(request: &Request<T>) -> Result<Option<Arc<Call>>, Status> {
        let Some(call) = request.extensions().get::<Arc<Call>>().cloned() else {
            return Ok(None);
        };
        let Limits { calls, status_calls, .. } = call.caller.admission.limits;
        let limit = calls - status_calls;
        let mut under_way = call.caller.admission.calls();
        if under_way.working >= limit {
            drop(under_way);
            return Err(call.caller.refuse(format!("{limit} calls are already in progress")));
        }
        under_way.working += 1;
        drop(under_way);
        call.working.store(true, Ordering::Relaxed);
        Ok(Some(call))
    }

    /// Begins the call of an authenticated request and attaches it to the request.
    pub(crate) fn begin(request: &mut Request<()>) -> Result<(), Status> {
        let Some(caller) = request.extensions().get::<Caller>().cloned() else {
            return Ok(());
        };
        let (limit, origin) = (caller.admission.limits.calls, caller.origin);
        let mut calls = caller.admission.calls();
        let (all, same) = (calls.all, calls.from.get(&origin).copied().unwrap_or(0));
        if all >= limit || same >= limit / 2 {
            drop(calls);
            return Err(caller.refuse(match all >= limit {
                true => format!("{limit} calls are already in progress"),
                false => format!("{same} calls from this address are already in progress"),
            }));
        }
        calls.all += 1;
        calls.from.insert(origin, same + 1);
        drop(calls);
        caller.activity.begin();
        let (heard, working) = Default::default();
        request.extensions_mut().insert(Arc::new(Call { caller, heard, working }));
        Ok(())
    }
}

impl Caller {
    /// What this connection has proven so far.
    pub fn standing(&self) -> MutexGuard<'_, Standing> {
        // It is replaced as a whole.
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it calls from.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The address at which the connection arrived.
    pub fn local(&self) -> Option<SocketAddr> {
        self.local
    }

    /// Refuses a call for lack of room.
    fn refuse(&self, why: String) -> Status {
        REFUSED_CALLS.count();
        log::refusal(format_args!("call from {} refused: {why}", self.peer.ip()));
        Status::resource_exhausted(format!("{why}\ntry again later"))
    }
}

/// Notes that a caller was refused because it does not know the token.
pub(crate) fn note_refused(caller: Option<&Caller>) {
    if let Some(caller) = caller {
        caller.activity.note_refused();
    }
}

/// Origin of a request, for messages.
pub fn origin_of<T>(request: &Request<T>) -> String {
    name_of(request.extensions().get())
}

pub(crate) fn name_of(caller: Option<&Caller>) -> String {
    caller.map_or_else(|| "somewhere".into(), |caller| caller.peer.to_string())
}

impl Drop for Call {
    fn drop(&mut self) {
        let Caller { peer, origin, activity, admission, .. } = &self.caller;
        activity.end();
        let mut calls = admission.calls();
        calls.all -= 1;
        calls.working -= usize::from(self.working.load(Ordering::Relaxed));
        match calls.from.get_mut(origin) {
            Some(same) if *same > 1 => *same -= 1,
            _ => drop(calls.from.remove(origin)),
        }
        drop(calls);
        if !self.heard.load(Ordering::Relaxed) {
            CLOSED_CALLS.count();
            log::refusal(format_args!("call from {peer} closed: it sent no request"));
        }
    }
}

/// A connection of the control plane, with its place in the table and its deadline.
#[derive(Debug)]
pub struct ControlStream {
    tcp: TcpStream,
    caller: Caller,
    _place: Place,
    evicted: oneshot::Receiver<Infallible>,
    /// For the handshake; later for the next check whether the connection is in use.
    deadline: Pin<Box<Sleep>>,
    preface_left: usize,
    calls_seen: u64,
    allowance: Allowance,
    over: bool,
}

impl ControlStream {
    /// Fails when the connection has been evicted; otherwise the task is woken when that happens.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if !self.over {
            self.over = Pin::new(&mut self.evicted).poll(cx).is_ready()
                || self.is_refused()
                || self.is_late(cx);
        }
        match self.over {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(()),
        }
    }

    fn is_refused(&self) -> bool {
        if !self.caller.activity.is_refused_too_often() {
            return false;
        }
        CLOSED_REFUSED.count();
        let peer = self.caller.peer;
        log::refusal(format_args!(
            "connection from {peer} closed: {MAX_REFUSED} calls without the token"
        ));
        true
    }

    fn is_late(&mut self, cx: &mut Context<'_>) -> bool {
        while self.deadline.as_mut().poll(cx).is_ready() {
            if self.preface_left > 0 {
                CLOSED_HANDSHAKE.count();
                let (peer, after) = (self.caller.peer, self.caller.admission.limits.handshake);
                log::refusal(format_args!("connection from {peer} closed: no HTTP/2 in {after:?}"));
                return true;
            }
            let begun = self.caller.activity.begun();
            if !self.caller.activity.is_in_use() && begun == self.calls_seen {
                CLOSED_IDLE.count();
                return true;
            }
            self.calls_seen = begun;
            self.look_again();
        }
        false
    }

    fn look_again(&mut self) {
        self.deadline.as_mut().reset(Instant::now() + self.caller.admission.limits.idle);
    }
}

impl Connected for ControlStream {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for ControlStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        let this = &mut *self;
        let (activity, tcp) = (&this.caller.activity, Pin::new(&mut this.tcp));
        let read = ready!(this.allowance.poll_read(activity, tcp, cx, into))?;
        if self.preface_left > 0 {
            self.preface_left = self.preface_left.saturating_sub(read);
            if self.preface_left == 0 {
                self.look_again();
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ControlStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::sleep;

    use super::*;
    use crate::places::{STRANGER_BYTES, STRANGER_PERIOD};

    const SMALL: Limits = Limits {
        connections: 4,
        per_address: 2,
        calls: 4,
        status_calls: 1,
        handshake: Duration::from_millis(50),
        idle: Duration::from_millis(50),
    };
    const PATIENT: Limits =
        Limits { handshake: Duration::from_secs(600), idle: Duration::from_secs(600), ..SMALL };

    fn run<F: Future>(test: F) -> F::Output {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(test)
    }

    /// An admitted connection, and the client's end of it.
    async fn connect(admission: &Arc<Admission>, from: u8) -> (Option<ControlStream>, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (tcp, _) = Acceptor::new(listener, "").next(|| ()).await;
        let peer = SocketAddr::from(([192, 0, 2, from], 1000));
        (admission.admit(tcp, peer), client)
    }

    fn call(stream: &ControlStream) -> Result<Request<()>, Status> {
        let mut request = Request::new(());
        request.extensions_mut().insert(stream.connect_info());
        Call::begin(&mut request).map(|()| request)
    }

    async fn is_cut(stream: &mut ControlStream) -> bool {
        stream.read(&mut [0; 64]).await.is_err()
    }

    #[test]
    fn a_connection_that_says_nothing_or_half_a_preface_is_cut() {
        run(async {
            let admission = Admission::with(SMALL);
            for said in [&b""[..], b"PRI * HTTP/2.0\r\n"] {
                let (stream, mut client) = connect(&admission, 1).await;
                let mut stream = stream.unwrap();
                client.write_all(said).await.unwrap();
                while stream.read(&mut [0; 64]).await.is_ok() {}
                assert_eq!(admission.connections(), 1);
                drop(stream);
                assert_eq!(admission.connections(), 0);
            }
        });
    }

    #[test]
    fn only_a_connection_without_a_call_is_idle() {
        run(async {
            let admission = Admission::with(SMALL);
            let (stream, mut client) = connect(&admission, 1).await;
            let mut stream = stream.unwrap();
            let busy = call(&stream).unwrap();
            client.write_all(&[b'x'; PREFACE_BYTES]).await.unwrap();
            assert_eq!(stream.read(&mut [0; 64]).await.unwrap(), PREFACE_BYTES);
            let four_looks = sleep(SMALL.idle * 4);
            tokio::select! {
                _ = is_cut(&mut stream) => panic!("cut off with a call under way"),
                () = four_looks => {}
            }
            drop(busy);
            assert!(is_cut(&mut stream).await);
        });
    }

    #[test]
    fn the_oldest_silent_connection_gives_way_and_callers_stay() {
        run(async {
            let admission = Admission::with(PATIENT);
            let (first, _c1) = connect(&admission, 1).await;
            let (second, _c2) = connect(&admission, 1).await;
            let (mut first, second) = (first.unwrap(), second.unwrap());
            // The address has two places: the third connection gets that of the silent one.
            let in_use = call(&second).unwrap();
            let (third, _c3) = connect(&admission, 1).await;
            let third = third.unwrap();
            assert!(is_cut(&mut first).await);
            let also = call(&third).unwrap();
            assert!(connect(&admission, 1).await.0.is_none(), "both have calls under way");
            drop((in_use, also));

            // Other addresses have their own places, and the port as a whole has four.
            let (mut other, _c4) = connect(&admission, 2).await;
            let (_next, _c5) = connect(&admission, 3).await;
            let (last, _c6) = connect(&admission, 4).await;
            assert!(last.is_some() && is_cut(other.as_mut().unwrap()).await);
            assert_eq!(admission.connections(), 4);
        });
    }

    #[test]
    fn calls_are_counted_while_they_last() {
        run(async {
            let admission = Admission::with(PATIENT);
            let (stream, _client) = connect(&admission, 1).await;
            let stream = stream.unwrap();
            let calls = [call(&stream).unwrap(), call(&stream).unwrap()];
            let refused = call(&stream).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
            assert!(refused.message().contains("2 calls from this address"), "{refused}");
            // Another address has room. One of the four calls is kept for a status.
            let (other, _client) = connect(&admission, 2).await;
            let other = other.unwrap();
            let more = [call(&other).unwrap(), call(&other).unwrap()];
            let (next, _client) = connect(&admission, 3).await;
            let next = next.unwrap();
            assert!(call(&next).unwrap_err().message().contains("4 calls are"));
            let working: Vec<_> = calls.iter().chain(&more).map(Call::work).collect();
            let refused = working.iter().filter(|working| working.is_err()).count();
            assert_eq!(refused, 1, "{working:?}");
            drop((calls, more, working));
            assert!(call(&stream).is_ok());
            let calls = admission.calls();
            assert!(calls.all == 0 && calls.working == 0 && calls.from.is_empty(), "{calls:?}");
        });
    }

    #[test]
    fn idle_callers_do_not_hold_every_place() {
        run(async {
            let admission = Admission::with(PATIENT);
            let (mut streams, mut clients) = (Vec::new(), Vec::new());
            for from in [1, 1, 2, 2] {
                let (stream, client) = connect(&admission, from).await;
                let stream = stream.unwrap();
                drop(call(&stream).unwrap());
                streams.push(stream);
                clients.push(client);
                sleep(Duration::from_millis(2)).await;
            }
            // The first is in use and the second called again, so the third has been idle for
            // longest.
            let _busy = call(&streams[0]).unwrap();
            drop(call(&streams[1]).unwrap());
            let (next, _client) = connect(&admission, 3).await;
            assert!(next.is_some() && is_cut(&mut streams[2]).await);
            assert_eq!(admission.places.numbers(), [0, 1, 3, 4]);
        });
    }

    #[test]
    fn answers_do_not_wait_for_acknowledgements() {
        run(async {
            let (stream, _client) = connect(&Admission::with(PATIENT), 1).await;
            assert!(stream.unwrap().tcp.nodelay().unwrap());
        });
    }

    #[test]
    fn a_connection_without_the_token_is_read_slowly_and_closed_after_a_few_refused_calls() {
        run(async {
            let admission = Admission::with(PATIENT);
            let (stream, mut client) = connect(&admission, 1).await;
            let mut stream = stream.unwrap();
            client.write_all(&vec![b'x'; 2 * STRANGER_BYTES]).await.unwrap();
            let mut read = 0;
            let began = Instant::now();
            while read < 2 * STRANGER_BYTES {
                read += stream.read(&mut [0; 4096]).await.unwrap();
            }
            assert!(began.elapsed() >= STRANGER_PERIOD, "the second half came later");

            let mut request = Request::new(());
            request.extensions_mut().insert(stream.connect_info());
            let before = CLOSED_REFUSED.get();
            (1..MAX_REFUSED).for_each(|_| note_refused(request.extensions().get()));
            client.write_all(b"x").await.unwrap();
            assert_eq!(stream.read(&mut [0; 64]).await.unwrap(), 1);
            note_refused(request.extensions().get());
            assert!(is_cut(&mut stream).await && CLOSED_REFUSED.get() == before + 1);
        });
    }

    #[test]
    fn a_connection_with_the_token_is_neither_slowed_nor_closed() {
        run(async {
            let admission = Admission::with(PATIENT);
            let (stream, mut client) = connect(&admission, 1).await;
            let mut stream = stream.unwrap();
            drop(call(&stream).unwrap());
            let mut request = Request::new(());
            request.extensions_mut().insert(stream.connect_info());
            (0..2 * MAX_REFUSED).for_each(|_| note_refused(request.extensions().get()));
            client.write_all(&vec![b'x'; 2 * STRANGER_BYTES]).await.unwrap();
            let mut read = 0;
            while read < 2 * STRANGER_BYTES {
                read += stream.read(&mut [0; 4096]).await.unwrap();
            }
            assert!(stream.allowance.is_untouched());
        });
    }
}
