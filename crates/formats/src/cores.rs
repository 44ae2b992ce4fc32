//! Work on all cores: threads that take the next part until none is left. What a part is does not
//! belong here.

use std::io;
use std::thread;

/// Runs `work` on as many threads as there are cores, this one among them, but on no more than
/// `parts`. The first error counts; all threads have ended then.
pub(crate) fn on_all(
    parts: usize,
    work: impl Fn() -> io::Result<()> + Copy + Send,
) -> io::Result<()> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(parts.max(1));
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let ended = others.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a reader stopped")))
        });
        ended.fold(own, Result::and)
    })
}
