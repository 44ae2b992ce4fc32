//! The table of connections of a port, gRPC or HTTP: who may connect, and who gives way.
//!
//! Anyone who reaches a port can open a connection and send nothing. So every connection has a
//! place in a table of fixed size, with a bound for those of one address, and can lose it. When
//! there is no place for a new connection, the oldest *stranger* gives way: a connection that never
//! proved to know the secret. A flood of silent connections thus displaces only itself. If there
//! are no strangers, the connection gives way that has been without a call for longest; a
//! connection in use never does, and without one that can give way the new one is refused.
//!
//! A stranger is read slowly ([`Allowance`]), and is to be closed after a few refused calls
//! ([`Activity::is_refused_too_often`]): a flood of calls without the secret costs a connection for
//! every few of them. What a call is, how it is counted and how long a silent connection may wait
//! is the business of the ports, [`crate::admission`] and `http`; so are the names of the counters.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep, sleep};

use crate::error::with_limit_hint;
use crate::log;

/// Calls without the secret after which a connection that never made one with it is closed.
pub(crate) const MAX_REFUSED: u64 = 16;

/// Bytes that such a connection may send in each [`STRANGER_PERIOD`]. The first call of a program
/// that has the secret fits, and so do the headers of a request over HTTP.
pub(crate) const STRANGER_BYTES: usize = 16 << 10;
pub(crate) const STRANGER_PERIOD: Duration = Duration::from_millis(100);

/// Pause of an accept loop after the kernel refused.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What counts as one address: an IPv6 host owns the whole 64-bit prefix.
fn origin(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

/// Connections at once: `most`, or that share of this process's descriptors where it is less.
pub(crate) fn within_descriptors(most: usize, share: u64) -> usize {
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    descriptors.map_or(most, |all| most.min((all / share).max(4) as usize))
}

/// How many connections a table has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) connections: usize,
    pub(crate) per_address: usize,
}

/// The connections of one port.
#[derive(Debug)]
pub(crate) struct Places {
    bounds: Bounds,
    /// The oldest first.
    taken: Mutex<Vec<Taken>>,
    next: AtomicU64,
}

/// A connection in the table.
#[derive(Debug)]
struct Taken {
    number: u64,
    origin: IpAddr,
    activity: Arc<Activity>,
    /// Dropped with the place, which ends the connection.
    _open: oneshot::Sender<Infallible>,
}

/// The calls of one connection.
#[derive(Debug)]
pub(crate) struct Activity {
    open: AtomicUsize,
    begun: AtomicU64,
    /// Calls without the secret.
    refused: AtomicU64,
    /// When a call last began or ended.
    since: Mutex<Instant>,
}

/// Why a connection gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPlace {
    /// All are in use.
    Full,
    /// All that one address may have are in use.
    Address,
}

impl fmt::Display for NoPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoPlace::Full => "all connections are in use",
            NoPlace::Address => "all connections of this address are in use",
        })
    }
}

/// A connection's place; dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    number: u64,
    /// What counts as the client's address.
    pub(crate) origin: IpAddr,
    pub(crate) activity: Arc<Activity>,
}

/// A connection that has been let in.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) place: Place,
    /// Ends when the connection has to give way.
    pub(crate) evicted: oneshot::Receiver<Infallible>,
    /// Whether another one gave way to it.
    pub(crate) displaced: bool,
}

impl Places {
    pub(crate) fn new(bounds: Bounds) -> Arc<Places> {
        let (taken, next) = Default::default();
        Arc::new(Places { bounds, taken, next })
    }

    /// Gives a connection from `ip` a place, if there is one or another can give way.
    pub(crate) fn admit(self: &Arc<Places>, ip: IpAddr) -> Result<Admitted, NoPlace> {
        let origin = origin(ip);
        let mut taken = self.taken();
        let same = taken.iter().filter(|one| one.origin == origin).count();
        let displaced = if same >= self.bounds.per_address {
            evict(&mut taken, |one| one.origin == origin).ok_or(NoPlace::Address)?;
            true
        } else if taken.len() >= self.bounds.connections {
            evict(&mut taken, |_| true).ok_or(NoPlace::Full)?;
            true
        } else {
            false
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let activity = Arc::new(Activity::new());
        let (open, evicted) = oneshot::channel();
        taken.push(Taken { number, origin, activity: Arc::clone(&activity), _open: open });
        let place = Place { places: Arc::clone(self), number, origin, activity };
        Ok(Admitted { place, evicted, displaced })
    }

    /// Connections open now.
    pub(crate) fn len(&self) -> usize {
        self.taken().len()
    }

    #[cfg(test)]
    pub(crate) fn numbers(&self) -> Vec<u64> {
        self.taken().iter().map(|one| one.number).collect()
    }

    fn taken(&self) -> MutexGuard<'_, Vec<Taken>> {
        // The table is never left half changed.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the oldest stranger among `whose`; without one, the connection that has been without a call
/// for longest.
fn evict(taken: &mut Vec<Taken>, whose: impl Fn(&Taken) -> bool) -> Option<()> {
    let oldest = taken.iter().position(|one| whose(one) && one.activity.is_strange());
    let longest_idle = || {
        let idle = |one: &Taken| whose(one) && !one.activity.is_in_use();
        let idle = taken.iter().enumerate().filter(|(_, one)| idle(one));
        idle.min_by_key(|(_, one)| *one.activity.since()).map(|(index, _)| index)
    };
    let index = oldest.or_else(longest_idle)?;
    taken.remove(index);
    Some(())
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().retain(|one| one.number != self.number);
    }
}

impl Activity {
    fn new() -> Activity {
        let (open, begun, refused) = Default::default();
        Activity { open, begun, refused, since: Mutex::new(Instant::now()) }
    }

    /// A call with the secret begins.
    pub(crate) fn begin(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Relaxed);
        *self.since() = Instant::now();
    }

    /// A call with the secret ends.
    pub(crate) fn end(&self) {
        *self.since() = Instant::now();
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// A call was refused because it does not know the secret.
    pub(crate) fn note_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether no call has had the secret so far.
    pub(crate) fn is_strange(&self) -> bool {
        self.begun() == 0
    }

    /// Whether calls are under way.
    pub(crate) fn is_in_use(&self) -> bool {
        self.open.load(Ordering::Relaxed) > 0
    }

    /// Calls with the secret so far.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Whether a stranger has been refused so often that the connection is to be closed.
    pub(crate) fn is_refused_too_often(&self) -> bool {
        self.is_strange() && self.refused.load(Ordering::Relaxed) >= MAX_REFUSED
    }

    fn since(&self) -> MutexGuard<'_, Instant> {
        // A time cannot be left half changed.
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much of a connection is read: of a stranger, a little at a time.
#[derive(Debug, Default)]
pub(crate) struct Allowance {
    /// Bytes read since the last pause, while no call had the secret.
    bytes: usize,
    /// Nothing is read before it ends.
    pause: Option<Pin<Box<Sleep>>>,
}

impl Allowance {
    /// Reads what may be read now. Returns the number of bytes; the task is woken when there may be
    /// more.
    pub(crate) fn poll_read(
        &mut self,
        activity: &Activity,
        stream: Pin<&mut impl AsyncRead>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<usize>> {
        let allowed = ready!(self.poll(activity, cx)).min(into.remaining());
        let mut piece = ReadBuf::new(into.initialize_unfilled_to(allowed));
        ready!(stream.poll_read(cx, &mut piece))?;
        let read = piece.filled().len();
        into.advance(read);
        if activity.is_strange() {
            self.bytes += read;
        }
        Poll::Ready(Ok(read))
    }

    fn poll(&mut self, activity: &Activity, cx: &mut Context<'_>) -> Poll<usize> {
        if !activity.is_strange() {
            return Poll::Ready(usize::MAX);
        }
        if self.bytes >= STRANGER_BYTES {
            self.bytes = 0;
            self.pause = Some(Box::pin(sleep(STRANGER_PERIOD)));
        }
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        Poll::Ready(STRANGER_BYTES - self.bytes)
    }

    #[cfg(test)]
    pub(crate) fn is_untouched(&self) -> bool {
        self.pause.is_none() && self.bytes == 0
    }
}

/// A listener whose failures pause it, and are told once.
#[derive(Debug)]
pub(crate) struct Acceptor {
    listener: TcpListener,
    /// Who accepts, for the log: `""`, or a name with a blank behind it.
    who: &'static str,
    failures: u64,
}

impl Acceptor {
    pub(crate) fn new(listener: TcpListener, who: &'static str) -> Acceptor {
        Acceptor { listener, who, failures: 0 }
    }

    /// The next connection. Each failure is counted with `count`.
    pub(crate) async fn next(&mut self, count: impl Fn()) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((tcp, peer)) => {
                    if let failed @ 1.. = std::mem::take(&mut self.failures) {
                        log::line(format_args!(
                            "accepting connections again after {failed} failures"
                        ));
                    }
                    // Replies are small and awaited: without this each may wait for a delayed ACK
                    // of 40 ms. A socket that refuses is only slower.
                    let _ = tcp.set_nodelay(true);
                    return (tcp, peer);
                }
                Err(error) => {
                    // Most likely out of descriptors: the connection waits in the kernel, and
                    // retrying at once would be a busy loop.
                    count();
                    self.failures += 1;
                    if self.failures == 1 {
                        let (who, why) = (self.who, with_limit_hint(&error, "; "));
                        log::line(format_args!("{who}cannot accept connections: {why}"));
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn places(connections: usize, per_address: usize) -> Arc<Places> {
        Places::new(Bounds { connections, per_address })
    }

    #[test]
    fn a_flood_of_connections_displaces_only_itself() {
        let places = places(8, 2);
        let user = places.admit(ip(1)).expect("there is room");
        user.place.activity.begin();
        let mut flood: Vec<_> =
            (0..100).map(|_| places.admit(ip(2)).expect("the oldest gives way")).collect();
        assert_eq!(flood.iter_mut().filter_map(|one| one.evicted.try_recv().err()).count(), 100);
        assert_eq!(places.len(), 3, "two of the flood, and the user");
        assert_eq!(flood.iter().filter(|one| one.displaced).count(), 98);
        drop(flood);
        drop(user);
        assert_eq!(places.len(), 0);
    }

    #[test]
    fn connections_in_use_stay_and_others_are_refused() {
        let places = places(4, 1);
        let users: Vec<_> = (0..4).filter_map(|last| places.admit(ip(last)).ok()).collect();
        users.iter().for_each(|user| user.place.activity.begin());
        assert_eq!(places.admit(ip(9)).expect_err("full"), NoPlace::Full);
        assert_eq!(places.admit(ip(0)).expect_err("full"), NoPlace::Address);
        users[2].place.activity.end();
        assert!(places.admit(ip(9)).is_ok_and(|new| new.displaced));
    }

    #[test]
    fn an_address_is_what_one_host_has() {
        let same = |a: &str, b: &str| {
            let parse = |text: &str| origin(text.parse().expect("an address"));
            parse(a) == parse(b)
        };
        assert!(same("2001:db8::1", "2001:db8::ffff:1:2:3"));
        assert!(!same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("::ffff:192.0.2.1", "192.0.2.1"));
        assert!(!same("192.0.2.1", "192.0.2.2"));
    }
}
