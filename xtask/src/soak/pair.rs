//! Two verbs programs on the drop-in library: `xtask/soak/verbs.c`, once for each side.
//!
//! Each side is followed on a thread of its own, which reads its progress and does to it what was
//! drawn. The thread of the pair starts them and asks them to end after their life, or at the end
//! of the round. A killed side is started again with the next pair.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::draw::{Act, CLASSES, Draw, Pair, Path};
use super::ground::Ground;
use super::locks::lock;
use super::place::pause;
use super::process::{End, KILLED, Process};
use super::pulse::Pulse;
use super::stream::stop;

/// How often the thread of a pair looks.
const LOOK: Duration = Duration::from_millis(10);

/// After this the pulse has failed the soak long ago.
const END: Duration = Duration::from_secs(120);

/// Exit status of a side whose other side is gone.
const GONE: End = End::Code(5);

/// Runs one pair after the other until the round ends.
pub(super) fn run(ground: &Ground, path: Path, name: &str, is_last: &AtomicBool, mut draw: Draw) {
    let Ok(program) = &ground.programs.verbs else { return };
    while !is_last.load(Ordering::SeqCst) && !ground.is_over() {
        let pair = Pair::new(&mut draw);
        let program = program.to_string_lossy();
        if let Err(why) = (Running { ground, path, pair: &pair, name }).run(&program, is_last) {
            return ground.fail(format!("{name} ({}): {why}", described(&pair)));
        }
        let rest = draw.millis(0, 300);
        pause(ground, rest);
    }
}

fn described(pair: &Pair) -> String {
    let memory = if pair.is_shared { ", shared memory regions" } else { "" };
    let class = CLASSES[pair.class].0;
    format!("{}, {class}, {} queue pairs, requests {}{memory}", pair.mode, pair.lanes, pair.kinds)
}

/// A pair that runs.
#[derive(Clone, Copy)]
struct Running<'a> {
    ground: &'a Ground,
    path: Path,
    pair: &'a Pair,
    name: &'a str,
}

/// One of its sides.
struct Side {
    number: usize,
    process: Arc<Process>,
    stdin: Mutex<Option<ChildStdin>>,
    pulse: Arc<Pulse>,
    /// Its lanes are done; it waits for the end of its standard input.
    is_done: AtomicBool,
    has_ended: AtomicBool,
    was_killed: AtomicBool,
}

impl Running<'_> {
    fn run(&self, program: &str, is_last: &AtomicBool) -> Result<(), String> {
        let socket = self.ground.fresh("pair");
        let socket = socket.to_string_lossy();
        let processes = ["listen", "connect"].map(|side| self.start(program, side, &socket));
        let [first, second] = processes;
        let processes = [first?, second?];
        let pids = processes.each_ref().map(|process| process.pid);
        let mut number = 0;
        let sides = processes.map(|process| {
            let side = self.side(number, process, &pids);
            number += 1;
            side
        });
        lock(&self.ground.tally).verbs(self.pair).begun += 1;
        let results = thread::scope(|scope| {
            let sides = &sides;
            let follow = |side: usize| scope.spawn(move || self.follow(&sides[side], sides));
            let threads = [follow(0), follow(1)];
            self.let_go(sides, is_last);
            threads.map(|thread| thread.join().unwrap_or_else(|_| Err("panicked".to_owned())))
        });
        sides.iter().for_each(|side| side.pulse.end());
        let [first, second] = results;
        first.and(second)?;
        let was_killed = sides.iter().any(|side| side.was_killed.load(Ordering::SeqCst));
        lock(&self.ground.tally).verbs(self.pair).ended(was_killed);
        Ok(())
    }

    fn start(&self, program: &str, side: &str, socket: &str) -> Result<Arc<Process>, String> {
        let (_, most_bytes) = CLASSES[self.pair.class];
        let [seed, most, lanes] =
            [self.pair.seed, most_bytes, self.pair.lanes].map(|number| number.to_string());
        let never = u64::MAX.to_string();
        let mut command = self.ground.dquant(&["run", "--devices", "lo", "--", program]);
        command.args([side, socket, &seed, self.pair.mode, &most, &lanes, &never]);
        command.arg(self.pair.kinds).env("DQUANT_PATH", self.path.setting());
        command.env("DQUANT_MEMORY", if self.pair.is_shared { "shared" } else { "private" });
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        self.ground.spawn(&format!("{}, side {side}", self.name), command)
    }

    fn side(&self, number: usize, process: Arc<Process>, pids: &[u32; 2]) -> Side {
        let name = format!("{} ({})", process.name, described(self.pair));
        let lanes = self.pair.lanes as usize;
        let pulse = Pulse::new(name, kind(self.pair), lanes, pids.to_vec(), None);
        Side {
            number,
            stdin: Mutex::new(process.stdin()),
            process,
            pulse: self.ground.watch(pulse),
            is_done: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            was_killed: AtomicBool::new(false),
        }
    }

    /// Asks both sides to end when it is time, and lets them go when both are done or one has
    /// ended.
    fn let_go(&self, sides: &[Side; 2], is_last: &AtomicBool) {
        let begun = Instant::now();
        let mut was_asked = false;
        let are = |what: fn(&Side) -> &AtomicBool| {
            sides.iter().map(move |side| what(side).load(Ordering::SeqCst))
        };
        loop {
            let is_over = self.ground.is_over();
            if is_over || are(|side| &side.has_ended).any(|has| has) {
                break;
            }
            if are(|side| &side.is_done).all(|is| is) {
                break;
            }
            let is_time = begun.elapsed() > self.pair.life || is_last.load(Ordering::SeqCst);
            if is_time && !was_asked {
                was_asked = true;
                for side in sides {
                    let mut stdin = lock(&side.stdin);
                    // Fails when it has ended.
                    let _ = stdin.as_mut().map(|stdin| stdin.write_all(b"end\n"));
                }
            }
            thread::sleep(LOOK);
        }
        sides.iter().for_each(|side| *lock(&side.stdin) = None);
    }

    /// Reads what a side reports until it ends.
    fn follow(&self, side: &Side, sides: &[Side; 2]) -> Result<(), String> {
        let followed = self.read(side, sides);
        let end = side.process.wait(END);
        side.has_ended.store(true, Ordering::SeqCst);
        followed?;
        let end = end.ok_or("does not end")?;
        let [killed, other_killed] =
            [side, &sides[1 - side.number]].map(|side| side.was_killed.load(Ordering::SeqCst));
        let is_done = side.is_done.load(Ordering::SeqCst);
        match end {
            KILLED if killed => Ok(()),
            End::Code(0) if is_done => Ok(()),
            GONE if other_killed => Ok(()),
            _ if self.ground.is_over() => Ok(()),
            _ => Err(format!("{}: {end}: {}", side.process.name, side.process.last_lines(4))),
        }
    }

    fn read(&self, side: &Side, sides: &[Side; 2]) -> Result<(), String> {
        let out = side.process.stdout().ok_or("no standard output")?;
        let mut act = self.pair.act.filter(|(to, ..)| *to == side.number);
        let mut counted = 0;
        for line in BufReader::new(out).lines() {
            let line = line.map_err(|error| format!("its output cannot be read: {error}"))?;
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["p", ref lanes @ ..] => {
                    progress(&side.pulse, lanes);
                    let total = side.pulse.total();
                    lock(&self.ground.tally).verbs(self.pair).count(total - counted, 0);
                    counted = total;
                    if let Some((_, _, what)) = act.take_if(|(_, after, _)| total >= *after) {
                        self.act(side, sides, what);
                    }
                }
                ["done", messages, bytes] => {
                    let [messages, bytes] = [messages, bytes].map(|text| text.parse().unwrap_or(0));
                    lock(&self.ground.tally)
                        .verbs(self.pair)
                        .count(u64::saturating_sub(messages, counted), bytes);
                    counted = messages;
                    self.done(side)?;
                }
                _ => return Err(format!("{} wrote {line:?}", side.process.name)),
            }
        }
        Ok(())
    }

    fn act(&self, side: &Side, sides: &[Side; 2], what: Act) {
        match what {
            Act::Stop(time) => {
                lock(&self.ground.tally).verbs(self.pair).stopped += 1;
                stop(self.ground, &side.process, &[&sides[0].pulse, &sides[1].pulse], time);
            }
            Act::Kill | Act::HangUp => {
                side.was_killed.store(true, Ordering::SeqCst);
                side.pulse.end();
                side.process.kill();
            }
        }
    }

    /// Its lanes have ended: what its library counted can be asked for.
    fn done(&self, side: &Side) -> Result<(), String> {
        side.pulse.end();
        let pid = side.process.pid.to_string();
        let answer = self.ground.ask(&["explain", &pid, "--json"])?;
        for line in answer.lines() {
            let device = serde_json::from_str(line).map_err(|error| error.to_string())?;
            lock(&self.ground.tally).rescued_in(&side.process.name, &device);
        }
        side.is_done.store(true, Ordering::SeqCst);
        Ok(())
    }
}

/// The name of such a program in the table of pauses.
fn kind(pair: &Pair) -> &'static str {
    match pair.mode {
        "poll" => "verbs programs that poll",
        "event" => "verbs programs that sleep",
        _ => "verbs programs that do both",
    }
}

fn progress(pulse: &Pulse, lanes: &[&str]) {
    for (lane, text) in lanes.iter().enumerate() {
        match text.parse() {
            Ok(count) => pulse.set(lane, count),
            Err(_) => pulse.end_lane(lane),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_report_numbers_or_their_end() {
        let pulse = Pulse::new("a".to_owned(), "b", 3, Vec::new(), None);
        progress(&pulse, &["3", "-", "4", "9"]);
        assert_eq!(pulse.total(), 7);
    }
}
