//! One number that several senders share.

use core::cell::Cell;

/// A number that several senders change through a shared reference. Senders of other processes may
/// change it between any two calls, and to anything.
pub trait Word {
    /// The value now.
    fn get(&self) -> u64;

    /// Replaces `old` by `new`; returns false, and does nothing, if the value is another one by
    /// now.
    fn replace(&self, old: u64, new: u64) -> bool;

    /// Replaces the value by what `next` makes of it.
    fn update(&self, next: impl Fn(u64) -> u64) {
        let mut old = self.get();
        while !self.replace(old, next(old)) {
            old = self.get();
        }
    }

    /// Adds `more`, and wraps around.
    fn add(&self, more: u64) {
        self.update(|old| old.wrapping_add(more));
    }

    /// Raises the value to `least`, if it is less.
    fn raise(&self, least: u64) {
        self.update(|old| old.max(least));
    }
}

impl Word for Cell<u64> {
    fn get(&self) -> u64 {
        Cell::get(self)
    }

    fn replace(&self, old: u64, new: u64) -> bool {
        let is_old = Cell::get(self) == old;
        if is_old {
            self.set(new);
        }
        is_old
    }
}
