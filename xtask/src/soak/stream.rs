//! A trainer: `dquant cat`, whose batches are compared as they arrive.
//!
//! A slot is a thread that runs one stream after the other until its round ends. Then a stream has
//! to deliver one more batch before it is let go, so that one that hangs is found. A stream that
//! fails because its DPU was killed is opened anew at the batch that it needs.

use std::io::{ErrorKind, Read};
use std::net::Ipv4Addr;
use std::process::{ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::data::Expected;
use super::draw::{Act, Draw, Stream};
use super::ground::Ground;
use super::locks::lock;
use super::place::{Place, pause};
use super::process::{End, KILLED, Process};
use super::pulse::{Daemons, Pulse};
use crate::shell::RESCUED;

/// How long `dquant cat` retries a DPU or a target that is not there.
const WAIT: &str = "20s";

/// After this the pulse has failed the soak long ago.
const END: Duration = Duration::from_secs(120);

/// What a pipe holds (`pipe(7)`).
const PIPE_BYTES: usize = 64 << 10;

/// What a slot needs.
#[derive(Debug)]
pub(super) struct Slot<'a> {
    pub(super) ground: &'a Ground,
    pub(super) place: &'a Arc<Place>,
    pub(super) expected: &'a [Expected],
    pub(super) is_last: &'a AtomicBool,
    pub(super) draw: Draw,
    pub(super) name: String,
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Good,
    Killed,
    HungUp,
    /// By an error that a killed daemon explains, after so many batches.
    Failed(u64),
}

impl Slot<'_> {
    /// Runs streams until the round ends.
    pub(super) fn run(&mut self) {
        let batches: Vec<u64> = self.expected.iter().map(|plan| plan.batches).collect();
        while !self.is_last.load(Ordering::SeqCst) && !self.ground.is_over() {
            let mut stream = Stream::new(&mut self.draw, &batches);
            loop {
                let ended = match self.stream(&stream) {
                    Ok(ended) => ended,
                    // Other failures are consequences.
                    Err(why) => return self.ground.fail(format!("{}: {why}", self.name)),
                };
                lock(&self.ground.tally).streams.ended(ended == Ended::Killed);
                match ended {
                    Ended::Failed(delivered) if !self.ground.is_over() => {
                        lock(&self.ground.tally).streams.resumed += 1;
                        stream.first += delivered;
                        stream.count -= delivered;
                        stream.act = None;
                    }
                    _ => break,
                }
                if stream.count == 0 {
                    break;
                }
            }
            let rest = self.draw.millis(0, 200);
            pause(self.ground, rest);
        }
    }

    fn stream(&self, stream: &Stream) -> Result<Ended, String> {
        let expected = &self.expected[stream.plan];
        let kills = [self.place.target.kills(), self.place.dpu.kills()];
        let process = self.ground.spawn(&self.name, self.command(stream, expected))?;
        lock(&self.ground.tally).streams.begun += 1;
        let place = Arc::clone(self.place) as Arc<dyn Daemons>;
        let name = format!("{} ({})", self.name, expected.plan);
        let pulse = Pulse::new(name, "streams", 1, vec![process.pid], Some(place));
        let pulse = self.ground.watch(pulse);
        let read = self.read(stream, expected, &process, &pulse);
        let end = read.and_then(|did| {
            let end = process.wait(END).ok_or("does not end")?;
            self.judge(stream, did, end, &process, kills)
        });
        pulse.end();
        end
    }

    fn command(&self, stream: &Stream, expected: &Expected) -> std::process::Command {
        let url = format!("dq://{}/{}", self.place.target.control, expected.dataset);
        let [first, count] = [stream.first, stream.count].map(|number| number.to_string());
        let mut command = self.ground.dquant(&["cat", &url, "--plan", expected.plan]);
        command.args(["--dtype", expected.dtype, "--wait", WAIT]);
        command.args(["--first-batch", &first, "--batches", &count]);
        if stream.is_alone {
            let own: Ipv4Addr = self.ground.fresh_address();
            command.args(["--offload", "false", "--roce", &format!("{own}:4791")]);
        } else {
            command.arg("--dpu").arg(&self.place.socket).args(["--slots", "4"]);
        }
        command.env("DQUANT_PATH", self.place.path.setting());
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    /// Reads and compares until the stream ends or is ended. Returns the batches, and how it was
    /// ended.
    fn read(
        &self,
        stream: &Stream,
        expected: &Expected,
        process: &Process,
        pulse: &Pulse,
    ) -> Result<(u64, Option<Act>), String> {
        let mut out = process.stdout().ok_or("no standard output")?;
        let mut batch = vec![0; expected.batch_bytes];
        let mut done = 0;
        while fill(&mut out, &mut batch)? {
            if done == stream.count {
                return Err("delivers more batches than were asked for".to_owned());
            }
            expected.compare(stream.first + done, &batch)?;
            done += 1;
            pulse.beat();
            lock(&self.ground.tally).streams.count(1, batch.len() as u64);
            let is_last = self.is_last.load(Ordering::SeqCst);
            let act = stream.act.filter(|(after, _)| *after == done).map(|(_, act)| act);
            match act.or(is_last.then_some(Act::HangUp)) {
                None => {}
                Some(Act::Stop(time)) => {
                    lock(&self.ground.tally).streams.stopped += 1;
                    stop(self.ground, process, &[pulse], time);
                }
                Some(Act::Kill) => {
                    process.kill();
                    return Ok((done, Some(Act::Kill)));
                }
                // The pipe is closed by the return.
                Some(Act::HangUp) => return Ok((done, Some(Act::HangUp))),
            }
            thread::sleep(stream.step);
        }
        Ok((done, None))
    }

    /// Batches that a pipe may hold.
    fn in_pipe(&self, stream: &Stream) -> u64 {
        (PIPE_BYTES / self.expected[stream.plan].batch_bytes) as u64
    }

    /// Whether the end is one that had to be expected.
    fn judge(
        &self,
        stream: &Stream,
        (done, act): (u64, Option<Act>),
        end: End,
        process: &Process,
        kills: [u64; 2],
    ) -> Result<Ended, String> {
        let said = process.last_lines(4);
        if let Some(what) =
            ["panicked", RESCUED].into_iter().find(|what| process.said().contains(what))
        {
            return Err(format!("{what}: {said}"));
        }
        let now = [self.place.target.kills(), self.place.dpu.kills()];
        let [target_killed, dpu_killed] = [now[0] != kills[0], now[1] != kills[1]];
        // A target that comes back is found again, except by a stream that is being opened.
        let is_explained = (dpu_killed && !stream.is_alone) || (target_killed && done == 0);
        match (act, end) {
            (Some(Act::Kill), KILLED) => Ok(Ended::Killed),
            // It had written everything and ended before it was killed.
            (Some(Act::Kill), End::Code(0)) if stream.count - done <= self.in_pipe(stream) => {
                Ok(Ended::Good)
            }
            (Some(Act::HangUp), End::Code(0)) => Ok(Ended::HungUp),
            (None, End::Code(0)) if done == stream.count => Ok(Ended::Good),
            (_, End::Code(1 | 3)) if is_explained => Ok(Ended::Failed(done)),
            _ => Err(format!(
                "{end} after {done} of {} batches from {} of {}: {said}",
                stream.count, stream.first, self.expected[stream.plan].plan
            )),
        }
    }
}

/// Stops a process for a while; it and whoever needs it are excused.
pub(super) fn stop(ground: &Ground, process: &Process, pulses: &[&Pulse], time: Duration) {
    pulses.iter().for_each(|pulse| pulse.excuse());
    let stopped = process.signal("STOP");
    pause(ground, time);
    if let Err(why) = stopped.and(process.signal("CONT")) {
        ground.fail(why);
    }
    pulses.iter().for_each(|pulse| pulse.unexcuse());
}

/// Reads a batch; `false` at the end. What is less than a batch was cut off by the end of the
/// process.
fn fill(out: &mut ChildStdout, batch: &mut [u8]) -> Result<bool, String> {
    match out.read_exact(batch) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(format!("its output cannot be read: {error}")),
    }
}
