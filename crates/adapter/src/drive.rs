//! The thread that owns an adapter: its turns and its sleeps.
//!
//! [`Owner`] is what such a thread does in a turn. Everything that a sleep needs of the adapter is
//! forwarded here, once for all that own one: targets, DPUs, the sides of a measurement, the ranks
//! of a job. The loop itself is [`nic::driver`]; what the work is belongs above.

use std::io;

use nic::driver::{Application, Driver, RESCUED, Turn};
use roce::{Duration, Time};

use crate::owned::{Adapter, Trouble};

/// What a thread does with its adapter, turn by turn. Beside the adapter it may wait for more, such
/// as credits in shared memory: only that is asked for here.
pub trait Owner {
    /// The adapter.
    type Adapter: Adapter;

    /// How long to spin without work before a sleep ([`Application::SPIN`]).
    const SPIN: Duration = Duration::from_micros(5);

    /// The adapter that the thread owns.
    fn adapter(&mut self) -> &mut Self::Adapter;

    /// One turn: takes one of the adapter ([`Adapter::turn`]), and looks at everything else.
    fn turn(&mut self, now: Time) -> Turn;

    /// Called before a sleep, and before the adapter prepares for it. `false`: something beside the
    /// adapter may have come meanwhile.
    fn prepare_sleep(&mut self) -> bool {
        true
    }

    /// Called when a prepared sleep is over or did not begin.
    fn woken(&mut self) {}

    /// Whether there is work beside the adapter that should have been announced.
    fn has_work(&mut self) -> bool {
        false
    }

    /// A wake-up was lost ([`Application::note_rescue`]). Programs that do not count them report it
    /// on standard error.
    fn note_rescue(&mut self) {
        eprintln!("warning: {RESCUED}");
    }
}

/// A driver that wakes for what reaches the adapter. More descriptors can be added
/// ([`Driver::watched`]).
///
/// # Errors
/// When the process has no descriptors left, or the kernel refuses to watch one.
pub fn driver<A: Adapter>(adapter: &A) -> io::Result<Driver> {
    let driver = Driver::new()?;
    adapter.watch(driver.watched())?;
    Ok(driver)
}

/// Takes turns until the work stops.
pub fn run<W: Owner>(driver: &Driver, work: &mut W) {
    driver.run(&mut Driven(work));
}

/// Passes the troubles of the adapter to `note`, and returns why it can no longer be used, if that
/// is so.
pub fn take_trouble<A: Adapter>(adapter: &mut A, note: impl FnMut(String)) -> Option<String> {
    first_end(std::iter::from_fn(|| adapter.poll_trouble()), note)
}

/// Passes what can be borne to `note`, up to what cannot.
fn first_end(
    mut troubles: impl Iterator<Item = Trouble>,
    mut note: impl FnMut(String),
) -> Option<String> {
    troubles.find_map(|trouble| match trouble {
        Trouble::Degraded(what) => {
            note(what);
            None
        }
        Trouble::Gone(why) => Some(why),
    })
}

/// The application that the loop drives: the work and its adapter together.
struct Driven<'a, W>(&'a mut W);

impl<W: Owner> Application for Driven<'_, W> {
    const SPIN: Duration = W::SPIN;

    fn turn(&mut self, now: Time) -> Turn {
        self.0.turn(now)
    }

    fn prepare_sleep(&mut self) -> bool {
        // Both, even if one has work: `woken` undoes both.
        let is_idle = self.0.prepare_sleep();
        self.0.adapter().prepare_sleep() && is_idle
    }

    fn woken(&mut self) {
        self.0.adapter().woken();
        self.0.woken();
    }

    fn has_work(&mut self) -> bool {
        self.0.adapter().has_work() || self.0.has_work()
    }

    fn note_rescue(&mut self) {
        self.0.note_rescue();
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::owned::Software;

    /// Has something in shared memory the first time it wants to sleep.
    struct Busy {
        adapter: Software,
        turns: u32,
        asked: u32,
        woken: u32,
    }

    impl Owner for Busy {
        type Adapter = Software;

        const SPIN: Duration = Duration::ZERO;

        fn adapter(&mut self) -> &mut Software {
            &mut self.adapter
        }

        fn turn(&mut self, now: Time) -> Turn {
            self.turns += 1;
            self.adapter.turn(now, |_, _| false);
            if self.woken == 2 { Turn::Stop } else { Turn::Idle(Some(now)) }
        }

        fn prepare_sleep(&mut self) -> bool {
            self.asked += 1;
            self.asked > 1
        }

        fn woken(&mut self) {
            self.woken += 1;
        }
    }

    #[test]
    fn what_is_awaited_beside_the_adapter_keeps_its_thread_awake() {
        let at = SocketAddr::from(([127, 7, 5, 1], 0));
        let adapter = Software::bind(at, 1 << 16, 0, 7).expect("loopback");
        let driver = driver(&adapter).expect("descriptors");
        let mut busy = Busy { adapter, turns: 0, asked: 0, woken: 0 };
        run(&driver, &mut busy);
        assert_eq!((busy.turns, busy.asked, busy.woken), (3, 2, 2));
    }

    #[test]
    fn a_device_in_order_has_no_trouble() {
        let at = SocketAddr::from(([127, 7, 5, 2], 0));
        let mut adapter = Software::bind(at, 1 << 16, 0, 7).expect("loopback");
        assert_eq!(take_trouble(&mut adapter, |what| panic!("{what}")), None);
    }

    #[test]
    fn only_a_device_that_is_gone_ends_its_use() {
        let degraded = ["slow", "slower"].map(|what| Trouble::Degraded(what.to_owned()));
        let gone = Trouble::Gone("unplugged".to_owned());
        for (last, end) in [(None, None), (Some(gone), Some("unplugged".to_owned()))] {
            let mut notes = Vec::new();
            let troubles = degraded.iter().cloned().chain(last);
            assert_eq!(first_end(troubles, |what| notes.push(what)), end);
            assert_eq!(notes, ["slow", "slower"]);
        }
    }
}
