//! A thread that frees what takes long to free: rings of up to 1 GiB, tables of a thousand
//! datasets, files to close.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// Things that may wait for the thread; further ones wait in the engine.
const QUEUE: usize = 64;

/// Where an engine leaves things to free.
#[derive(Debug)]
pub(crate) struct Disposer {
    queue: SyncSender<Box<dyn Any + Send>>,
    /// The oldest comes first.
    waiting: VecDeque<Box<dyn Any + Send>>,
}

impl Disposer {
    /// Starts the thread; it ends with the disposer.
    pub(crate) fn start() -> std::io::Result<Disposer> {
        let (queue, things) = sync_channel(QUEUE);
        let thread = std::thread::Builder::new().name("dquant-free".into());
        thread.spawn(move || things.into_iter().for_each(drop))?;
        Ok(Disposer { queue, waiting: VecDeque::new() })
    }

    /// Queues `thing` to be freed.
    pub(crate) fn dispose(&mut self, thing: impl Any + Send) {
        self.waiting.push_back(Box::new(thing));
        self.hand_over();
    }

    /// Passes waiting things to the thread, as far as there is room.
    pub(crate) fn hand_over(&mut self) {
        while let Some(thing) = self.waiting.pop_front() {
            // Without the thread, the thing is freed here.
            if let Err(TrySendError::Full(thing)) = self.queue.try_send(thing) {
                self.waiting.push_front(thing);
                return;
            }
        }
    }

    /// Things that wait in the engine. The engine opens nothing while there are any, so what it
    /// holds stays bounded.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
    use std::time::Duration;

    use super::*;

    /// Takes as long to free as the test likes.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            // The test ends the wait by dropping its end.
            let _ = self.0.recv();
        }
    }

    #[test]
    fn nobody_waits_for_what_takes_long_to_free() {
        let mut disposer = Disposer::start().expect("a thread");
        let (let_go, until) = channel();
        let (held, freed) = channel::<()>();
        disposer.dispose(Slow(until));
        disposer.dispose(held);
        (0..2 * QUEUE).for_each(|_| disposer.dispose(()));
        assert!(disposer.waiting() > 0, "the queue is bounded");
        let still = freed.recv_timeout(Duration::from_millis(20));
        assert_eq!(still, Err(RecvTimeoutError::Timeout), "it was freed out of turn");
        drop(let_go);
        assert!(freed.recv().is_err(), "freed, by the thread");
        while disposer.waiting() > 0 {
            disposer.hand_over();
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_oldest_is_freed_first() {
        struct Told(usize, Sender<usize>);
        impl Drop for Told {
            fn drop(&mut self) {
                let _ = self.1.send(self.0);
            }
        }
        let mut disposer = Disposer::start().expect("a thread");
        let (let_go, until) = channel();
        let (tell, told) = channel();
        disposer.dispose(Slow(until));
        (0..2 * QUEUE).for_each(|number| disposer.dispose(Told(number, tell.clone())));
        drop(let_go);
        while disposer.waiting() > 0 {
            disposer.hand_over();
            std::thread::yield_now();
        }
        drop((disposer, tell));
        assert!(told.iter().eq(0..2 * QUEUE));
    }
}
