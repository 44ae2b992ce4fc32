//! The server: does what its clients ask for, within bounds.
//!
//! One thread listens and sleeps while nobody comes. Each client has a thread, which moves the
//! packets of its test. A client that goes away, says nothing for half a minute or exceeds the time
//! of its test ends only its own.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use adapter::congestion::Choice;
use adapter::drive::{self, Owner};
use adapter::owned::Adapter;
use adapter::owned::DeviceChoice;
use nic::clock;
use nic::driver::Turn;
use roce::{Duration, Time};
use service::log;
use service::seed::fresh_seed;

use super::client::{Failure, driver, take_trouble, yield_if_idle};
use super::ends::{Ends, check_address};
use super::messages::{Control, End, Message, Snapshot, VERSION, Verdict, lost};
use super::responder::Responder;
use super::test::{LOOK_AT_MEMORY, Test};
use crate::devices;
use service::Error;

/// Most clients at once.
pub const MAX_CLIENTS: usize = 16;

/// How often the control connection is looked at while packets move.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What a test may take beyond its measured part.
const GRACE: Duration = Duration::from_millis(60_000);

/// How long a client may take to say its first word.
const HELLO_LIMIT: std::time::Duration = std::time::Duration::from_secs(5);

/// Pause after an error of the listener, such as a lack of descriptors.
const ACCEPT_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

/// Serves until the process ends.
pub fn serve(listener: &TcpListener, device: Option<&DeviceChoice>) -> ! {
    let connections = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                log::line(format_args!("cannot accept a client: {error}"));
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let before = connections.fetch_add(1, Ordering::Relaxed);
        let leave = Leave(Arc::clone(&connections));
        // Beyond the clients that are served, as many are told why they are not.
        if before >= 2 * MAX_CLIENTS {
            log::line(format_args!("{peer}: closed, {before} connections are open"));
            continue;
        }
        let (device, is_full) = (device.cloned(), before >= MAX_CLIENTS);
        let thread = std::thread::Builder::new().name("dquant-perf".to_owned());
        let spawned = thread.spawn(move || {
            let _leave = leave;
            match converse(stream, peer, device, is_full) {
                Ok(1) => log::line(format_args!("{peer} has left after 1 test")),
                Ok(tests) => log::line(format_args!("{peer} has left after {tests} tests")),
                Err(error) => log::line(format_args!("{peer}: {}", error.to_line())),
            }
        });
        if let Err(error) = spawned {
            log::line(format_args!("{peer}: no thread: {error}"));
        }
    }
}

/// A connection, counted until it ends.
struct Leave(Arc<AtomicUsize>);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Greets a client and does its tests; returns how many.
fn converse(
    stream: TcpStream,
    peer: SocketAddr,
    device: Option<DeviceChoice>,
    is_full: bool,
) -> Result<u64, Error> {
    let gone = |error: io::Error| lost(peer, &error);
    let mut control = Control::new(stream).map_err(gone)?;
    match control.receive_within(HELLO_LIMIT).map_err(gone)? {
        Message::Hello { .. } if is_full => {
            let why = format!("{MAX_CLIENTS} clients are being served");
            refuse(&mut control, &why, "try again later").map_err(gone)?;
            return Err(Error::invalid(why));
        }
        // A client of another version reads this much and says so.
        Message::Hello { .. } => {
            control.send(&Message::Welcome { version: VERSION }).map_err(gone)?;
        }
        other => return Err(Error::invalid(format_args!("said {other:?} first"))),
    }
    let mut session = Session { control, peer, device };
    let mut tests = 0;
    loop {
        let test = match session.control.receive() {
            Ok(Message::Begin(test)) => test,
            Ok(other) => return Err(Error::invalid(format_args!("said {other:?} out of turn"))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(tests),
            Err(error) => return Err(gone(error)),
        };
        log::line(format_args!("{peer}: {test}"));
        session.run(test)?;
        tests += 1;
    }
}

fn refuse(control: &mut Control, why: &str, hint: &str) -> io::Result<()> {
    control.send(&Message::Refused { why: why.to_owned(), hint: hint.to_owned() })
}

/// A client.
struct Session {
    control: Control,
    peer: SocketAddr,
    device: Option<DeviceChoice>,
}

impl Session {
    /// Does one test, or says why not.
    fn run(&mut self, test: Test) -> Result<(), Error> {
        let done = match test.complaint() {
            Some((why, hint)) => Err(Error::invalid(why).hint(hint)),
            None => fresh_seed().and_then(|seed| self.prepare(test, seed)),
        };
        if let Err(error) = &done {
            let (why, hint) = error.parts();
            // If the connection is lost, nobody is left to be told.
            let _ = refuse(
                &mut self.control,
                &why,
                hint.as_deref().unwrap_or("see the server's output"),
            );
        }
        done
    }

    /// Does a test on the device that it wants, or on the next best.
    fn prepare(&mut self, test: Test, seed: u64) -> Result<(), Error> {
        let memory = test.memory();
        if let Some(choice) = &self.device {
            if test.by_roce_v1 {
                let why = format!("no RoCEv1: the server uses the device {}", choice.name);
                return Err(Error::invalid(why).hint("start the server without --device"));
            }
            let no_xdp = test.by_xdp.then(|| format!("it uses the device {}", choice.name));
            return self.run_on(devices::loaded(choice, memory)?, test, seed, true, no_xdp);
        }
        // The client reaches this address: packets come to it, too.
        let local = self.control.local().map_err(|error| lost(self.peer, &error))?;
        let ip = local.ip().to_canonical();
        if test.by_roce_v1 {
            let adapter = devices::roce_v1(ip, self.peer.ip().to_canonical(), memory, seed)?;
            return self.run_on(adapter, test, seed, false, None);
        }
        let mut no_xdp = None;
        if test.by_xdp {
            match devices::xdp(ip, memory, seed) {
                Ok(adapter) => return self.run_on(adapter, test, seed, false, None),
                Err(why) => no_xdp = Some(why),
            }
        }
        let adapter = devices::software(ip, memory, seed, test.refused())?;
        self.run_on(adapter, test, seed, false, no_xdp)
    }

    fn run_on<F: Adapter>(
        &mut self,
        mut adapter: F,
        test: Test,
        seed: u64,
        is_loaded: bool,
        no_xdp: Option<String>,
    ) -> Result<(), Error> {
        let peer = self.peer;
        let gone = |error: io::Error| lost(peer, &error);
        let mut ends = Ends::open(&mut adapter, test, seed)?;
        no_xdp.iter().for_each(|why| log::line(format_args!("{peer}: no AF_XDP: {why}")));
        let ours = End { no_xdp, ..ends.describe(&adapter, devices::mtu(&adapter, peer)) };
        self.control.send(&Message::Ready(ours.clone())).map_err(gone)?;
        let theirs = match self.control.receive().map_err(gone)? {
            Message::Connect(end) => end,
            other => return Err(Error::invalid(format_args!("said {other:?} out of turn"))),
        };
        check_address(&theirs, peer)?;
        if let Some(why) = ends.connect(&mut adapter, &ours, &theirs, Choice::default())? {
            log::line(format_args!("{peer}: no same-host path: {why}"));
        }
        if test.has_receives() {
            ends.post_receives(adapter.device())?;
        }
        self.control.send(&Message::Connected).map_err(gone)?;
        let driver = driver(&adapter, &self.control)?;
        let now = clock::now();
        let length = Duration::from_micros(u64::from(test.millis) * 1100);
        let mut work = Work {
            adapter: &mut adapter,
            control: &mut self.control,
            responder: Responder::new(ends),
            test,
            is_loaded,
            looked: now,
            ends_at: now + length + GRACE,
            idle_since: None,
            end: None,
        };
        drive::run(&driver, &mut work);
        // What arrives without a receive is no message to this side.
        let received = match test.has_receives() {
            true => format!(" {} messages received,", work.responder.received),
            false => String::new(),
        };
        match work.end {
            Some(Ok(Verdict { verified_bytes, wrong_buffers, .. })) => {
                log::line(format_args!(
                    "{peer}: done,{received} {verified_bytes} bytes verified, {wrong_buffers} buffers wrong"
                ));
                Ok(())
            }
            Some(Err(failure)) => Err(failure.into_error(peer)),
            None => Err(Error::invalid("the test took too long")),
        }
    }
}

struct Work<'a, F> {
    adapter: &'a mut F,
    control: &'a mut Control,
    responder: Responder,
    test: Test,
    is_loaded: bool,
    looked: Time,
    ends_at: Time,
    idle_since: Option<Time>,
    end: Option<Result<Verdict, Failure>>,
}

impl<F: Adapter> Work<'_, F> {
    /// Answers the client. Returns the verdict once it has been sent.
    fn attend(&mut self, now: Time) -> Result<Option<Verdict>, Failure> {
        match self.control.poll().map_err(Failure::Control)? {
            None => Ok(None),
            Some(Message::Mark) => {
                let snapshot = Snapshot {
                    at_ns: now.as_nanos(),
                    cpu_ns: devices::cpu_ns(self.is_loaded),
                    received: self.responder.received,
                    lost: self.responder.lost,
                    retransmitted: devices::retransmitted(self.adapter),
                };
                self.control.send(&Message::Marked(snapshot)).map_err(Failure::Control)?;
                Ok(None)
            }
            Some(Message::Finish(sent)) => {
                let verdict = self.responder.verify(self.adapter.memory(), &sent);
                self.control.send(&Message::Finished(verdict)).map_err(Failure::Control)?;
                Ok(Some(verdict))
            }
            Some(other) => Err(Failure::Device(format!("said {other:?} out of turn"))),
        }
    }
}

impl<F: Adapter> Owner for Work<'_, F> {
    type Adapter = F;

    fn adapter(&mut self) -> &mut F {
        self.adapter
    }

    fn turn(&mut self, now: Time) -> Turn {
        let responder = &mut self.responder;
        let progress = self.adapter.turn(now, |device, pool| responder.step(now, device, pool));
        let failed = self.responder.failure.take().map(Failure::Device);
        if let Some(failure) = failed.or_else(|| take_trouble(self.adapter)) {
            self.end = Some(Err(failure));
            return Turn::Stop;
        }
        if now >= self.ends_at {
            return Turn::Stop;
        }
        if now.since(self.looked) >= LOOK_EVERY {
            self.looked = now;
            match self.attend(now) {
                Ok(None) => {}
                Ok(Some(verdict)) => {
                    self.end = Some(Ok(verdict));
                    return Turn::Stop;
                }
                Err(failure) => {
                    self.end = Some(Err(failure));
                    return Turn::Stop;
                }
            }
        }
        if self.test.spin {
            yield_if_idle(&progress, now, &mut self.idle_since);
            return Turn::Busy;
        }
        match progress.is_idle() {
            true => {
                let look = self.test.is_silent(self.is_loaded).then(|| now + LOOK_AT_MEMORY);
                let due = self.adapter.next_wakeup().into_iter().chain([self.ends_at]);
                Turn::Idle(due.chain(look).min())
            }
            false => Turn::Busy,
        }
    }
}
