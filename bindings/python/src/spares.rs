//! Memory of copies that nobody has any more, for the next ones of its stream.
//!
//! A loop drops a batch's copy before it takes the next one, and memory that the system hands out
//! anew for each batch is several times as slow as the copy itself: a loader of 2 MiB batches gets
//! a quarter of the stream.

use std::sync::Mutex;

/// Copies whose memory is kept. A batch of pairs has two.
const SPARES: usize = 4;

/// Most bytes of one of them.
const SPARE_BYTES: usize = 16 << 20;

/// The memory. A process that was forked while another thread had the lock finds it locked for
/// ever, so nobody waits for it.
#[derive(Debug, Default)]
pub(crate) struct Spares(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    words: Vec<Box<[u64]>>,
    /// Nothing is kept any more.
    is_closed: bool,
}

impl Spares {
    /// Memory of so many words, whatever they hold.
    pub(crate) fn take(&self, count: usize) -> Box<[u64]> {
        let spare = self.0.try_lock().ok().and_then(|mut kept| {
            let at = kept.words.iter().position(|spare| spare.len() == count)?;
            Some(kept.words.swap_remove(at))
        });
        spare.unwrap_or_else(|| vec![0; count].into_boxed_slice())
    }

    /// Keeps memory where there is room for it.
    pub(crate) fn give(&self, words: Box<[u64]>) {
        let Ok(mut kept) = self.0.try_lock() else { return };
        let has_room = kept.words.len() < SPARES && size_of_val(&*words) <= SPARE_BYTES;
        if has_room && !kept.is_closed {
            kept.words.push(words);
        }
    }

    /// Frees all of it: the stream has ended.
    pub(crate) fn close(&self) {
        if let Ok(mut kept) = self.0.try_lock() {
            *kept = Kept { is_closed: true, ..Kept::default() };
        }
    }
}
