//! The rounds of a soak, and what is printed when one fails.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use super::data::{self, Expected};
use super::draw::{Disturbance, Path, Round};
use super::ground::Ground;
use super::growth::{Growth, check_leftovers};
use super::locks::lock;
use super::pair;
use super::place::Place;
use super::prepare::Programs;
use super::report;
use super::stream::Slot;
use super::watch;
use crate::shell::Failure;

/// How often the main thread looks at daemons and slots.
const LOOK: Duration = Duration::from_millis(50);

/// Runs rounds for some time.
///
/// # Errors
/// When something failed, or the soak was ended from outside.
pub(super) fn run(
    folder: &FilePath,
    programs: Programs,
    seed: u64,
    length: Duration,
    is_alone: bool,
) -> Result<(), Failure> {
    let ground = Arc::new(Ground::new(folder, programs));
    let outer = Arc::clone(&ground);
    // Ends with this process.
    thread::spawn(move || wait_for_the_outer_process(&outer));
    let ran = thread::scope(|scope| {
        let done = Done::new(&ground);
        let is_done = Arc::clone(&done.is_done);
        let watched = &*ground;
        scope.spawn(move || watch::run(watched, &is_done));
        in_a_folder(&ground, seed, length, is_alone)
    });
    let _ = fs::remove_dir_all(folder);
    let growth = ran?;
    let no_verbs = ground.programs.verbs.as_ref().err().map(String::as_str);
    println!("\n{}", lock(&ground.tally).text(&growth, no_verbs));
    match &ground.failures()[..] {
        [first, ..] => {
            let seed = ground.seed();
            let replay = format!("replay: cargo xtask soak --seed {seed} --for 20s");
            Err(Failure::check(format!("{first}\n{replay}")))
        }
        [] if ground.was_interrupted() => Err(Failure::usage("interrupted")),
        [] => {
            println!("nothing found");
            Ok(())
        }
    }
}

/// Ends all processes and the watch, also when this thread panics.
struct Done<'a> {
    ground: &'a Ground,
    is_done: Arc<AtomicBool>,
}

impl<'a> Done<'a> {
    fn new(ground: &'a Ground) -> Done<'a> {
        Done { ground, is_done: Arc::default() }
    }
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.ground.fail("the soak panicked");
        }
        self.ground.kill_all();
        self.is_done.store(true, Ordering::SeqCst);
    }
}

/// The outer process holds the other end of our standard input.
fn wait_for_the_outer_process(ground: &Ground) {
    let mut nothing = [0; 64];
    while matches!(std::io::stdin().read(&mut nothing), Ok(1..)) {}
    ground.interrupt();
}

fn in_a_folder(
    ground: &Ground,
    seed: u64,
    length: Duration,
    is_alone: bool,
) -> Result<Growth, Failure> {
    let made = fs::create_dir_all(ground.folder.join("run"));
    made.map_err(|error| Failure::usage(error.to_string()))?;
    let expected = data::make(ground)?;
    println!("soak from seed {seed} for {:.0} s", length.as_secs_f64());
    if !is_alone {
        println!("no namespaces of its own (root?): files left elsewhere: skipped");
    }
    if let Err(why) = &ground.programs.verbs {
        println!("verbs programs: skipped: {why}");
    }
    let lasting = BTreeMap::new();
    let mut soak =
        Soak { ground, expected, lasting, growth: Growth::default(), begun: Instant::now() };
    for seed in seed.. {
        if soak.begun.elapsed() >= length || ground.is_over() {
            break;
        }
        soak.round(&Round::new(seed));
    }
    if !ground.is_over()
        && let Err(why) = soak.finish(is_alone)
    {
        ground.fail(why);
    }
    Ok(soak.growth)
}

/// The soak.
struct Soak<'a> {
    ground: &'a Ground,
    expected: Vec<Expected>,
    /// Daemons that live on.
    lasting: BTreeMap<Path, Arc<Place>>,
    growth: Growth,
    begun: Instant,
}

impl Soak<'_> {
    fn round(&mut self, round: &Round) {
        println!("{:7.1} s  {round}", self.begun.elapsed().as_secs_f64());
        self.ground.begin_round(round.seed);
        let place = match self.place(round) {
            Ok(place) => place,
            Err(why) => {
                self.ground.fail(why);
                return report::print(self.ground, None);
            }
        };
        self.play(round, &place);
        if !self.ground.is_over()
            && let Err(why) = self.settle(round, &place)
        {
            self.ground.fail(why);
            report::print(self.ground, Some(&place));
        }
        lock(&self.ground.tally).rounds += 1;
    }

    fn place(&mut self, round: &Round) -> Result<Arc<Place>, String> {
        match self.lasting.get(&round.path) {
            Some(place) if !round.is_mortal => Ok(Arc::clone(place)),
            _ if round.is_mortal => Place::start(self.ground, round.path),
            _ => {
                let place = Place::start(self.ground, round.path)?;
                self.lasting.insert(round.path, Arc::clone(&place));
                Ok(place)
            }
        }
    }

    /// Runs streams and programs until the round is over and all of them have ended. A failure is
    /// reported while everything is still there to be asked.
    fn play(&self, round: &Round, place: &Arc<Place>) {
        let is_last = AtomicBool::new(false);
        thread::scope(|scope| {
            let _done = OnPanic { ground: self.ground, is_last: &is_last };
            let mut draw = round.draw.clone();
            let mut slots = Vec::new();
            for number in 1..=round.streams {
                let mut slot = Slot {
                    ground: self.ground,
                    place,
                    expected: &self.expected,
                    is_last: &is_last,
                    draw: draw.fork(),
                    name: format!("stream {number} ({})", round.path.name()),
                };
                slots.push(scope.spawn(move || slot.run()));
            }
            for number in 1..=round.pairs {
                let (ground, is_last, draw) = (self.ground, &is_last, draw.fork());
                let name = format!("verbs programs {number} ({})", round.path.name());
                slots
                    .push(scope.spawn(move || pair::run(ground, round.path, &name, is_last, draw)));
            }
            if let Err(why) = self.attend(round, place, &mut draw, &is_last, &slots) {
                self.ground.fail(why);
            }
            is_last.store(true, Ordering::SeqCst);
            if self.ground.is_over() {
                report::print(self.ground, Some(place));
                self.ground.kill_all();
            }
        });
    }

    /// Disturbs the daemons, ends the round in time and waits for all slots.
    fn attend(
        &self,
        round: &Round,
        place: &Place,
        draw: &mut super::draw::Draw,
        is_last: &AtomicBool,
        slots: &[ScopedJoinHandle<'_, ()>],
    ) -> Result<(), String> {
        let begun = Instant::now();
        let enough = lock(&self.ground.tally).streams.over() + round.streams;
        let mut next = Disturbance::new(draw);
        let mut due = next.pause;
        while !self.ground.is_over() && !slots.iter().all(ScopedJoinHandle::is_finished) {
            place.check()?;
            let passed = begun.elapsed();
            // On a busy machine little happens in that time.
            let has_enough = lock(&self.ground.tally).streams.over() >= enough;
            if passed > round.length && (has_enough || passed > 4 * round.length) {
                is_last.store(true, Ordering::SeqCst);
            } else if round.is_mortal && passed > due {
                place.disturb(self.ground, &next)?;
                next = Disturbance::new(draw);
                due = begun.elapsed() + next.pause;
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// What must hold between rounds.
    fn settle(&mut self, round: &Round, place: &Place) -> Result<(), String> {
        place.settle(self.ground)?;
        lock(&self.ground.tally).check_rescued()?;
        match round.is_mortal {
            true => place.terminate(),
            false => place.daemons().into_iter().try_for_each(|daemon| {
                let process = daemon.process();
                self.growth.look(&daemon.name, process.map(|process| process.pid))
            }),
        }
    }

    /// What must hold at the end.
    fn finish(&self, is_alone: bool) -> Result<(), String> {
        self.lasting.values().try_for_each(|place| place.terminate())?;
        self.growth.check_quarters()?;
        check_leftovers(&self.ground.folder.join("run"), is_alone)
    }
}

/// Ends the slots when the main thread panics among them: a scope waits for its threads.
struct OnPanic<'a> {
    ground: &'a Ground,
    is_last: &'a AtomicBool,
}

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        self.is_last.store(true, Ordering::SeqCst);
        if thread::panicking() {
            self.ground.fail("the soak panicked");
            self.ground.kill_all();
        }
    }
}
