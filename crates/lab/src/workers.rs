//! Work on several threads, whose results come one after the other to the thread that asked.
//!
//! Which work there is, and what becomes of its results, is a matter of the callers.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

/// No machine benefits from more threads than this.
const MAX_THREADS: usize = 1024;

/// Does the work of each number, on so many threads or else on all cores, and hands each result
/// over as soon as it is there.
///
/// # Errors
/// With the first error of `take`: then no more is begun.
pub(crate) fn each<T: Send, E>(
    numbers: Range<u64>,
    threads: Option<NonZeroUsize>,
    work: impl Fn(u64) -> T + Sync,
    mut take: impl FnMut(u64, T) -> Result<(), E>,
) -> Result<(), E> {
    let cores = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let count = usize::try_from(numbers.end.saturating_sub(numbers.start)).unwrap_or(usize::MAX);
    let threads = threads.map_or_else(cores, NonZeroUsize::get).min(count).min(MAX_THREADS);
    let next = AtomicU64::new(numbers.start);
    let (sender, receiver) = mpsc::sync_channel(threads);
    thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next, work, end) = (sender.clone(), &next, &work, numbers.end);
            scope.spawn(move || {
                let numbers = std::iter::from_fn(|| {
                    let following = |number: u64| (number < end).then(|| number + 1);
                    next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, following).ok()
                });
                let mut results = numbers.map(|number| (number, work(number)));
                // The receiver ends early only after an error.
                results.all(|result| sender.send(result).is_ok())
            });
        }
        drop(sender);
        // By value, so that an error drops it and the threads notice.
        receiver.into_iter().try_for_each(|(number, result)| take(number, result))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_worked_on_once() {
        for (numbers, threads) in [(3..3, None), (3..4, None), (5..500, NonZeroUsize::new(7))] {
            let mut seen = Vec::new();
            let taken = each(
                numbers.clone(),
                threads,
                |number| 2 * number,
                |number, result| {
                    assert_eq!(result, 2 * number);
                    seen.push(number);
                    Ok::<(), ()>(())
                },
            );
            seen.sort_unstable();
            assert_eq!((taken, seen), (Ok(()), numbers.collect()));
        }
    }

    #[test]
    fn an_error_ends_the_work() {
        let taken = each(
            0..u64::MAX,
            None,
            |number| number,
            |number, _| match number {
                0..100 => Ok(()),
                _ => Err("enough"),
            },
        );
        assert_eq!(taken, Err("enough"));
    }
}
