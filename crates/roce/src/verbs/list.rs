//! Lists of at most [`MAX_SGE`] elements, of which the first [`INLINE`] need no memory of their
//! own.
//!
//! Work requests and packets are moved by value, and nearly all have a few elements: room for all
//! of them in place would make every queue entry and every move four times as large.

use core::ops::{Deref, DerefMut};

use smallvec::SmallVec;

use super::MAX_SGE;

/// Elements without an allocation.
const INLINE: usize = 8;

/// A list of at most [`MAX_SGE`] elements.
#[derive(Debug, PartialEq, Eq)]
pub struct ShortList<T>(SmallVec<[T; INLINE]>);

impl<T> ShortList<T> {
    /// An empty list.
    pub fn new() -> ShortList<T> {
        ShortList(SmallVec::new())
    }

    /// Adds an element at the end, or returns it if the list is full.
    ///
    /// # Errors
    /// The element, when the list is full.
    pub fn try_push(&mut self, element: T) -> Result<(), T> {
        if self.0.len() == MAX_SGE {
            return Err(element);
        }
        self.0.push(element);
        Ok(())
    }

    /// Adds an element at the end.
    ///
    /// # Panics
    /// When the list is full.
    #[track_caller]
    pub fn push(&mut self, element: T) {
        assert!(self.try_push(element).is_ok(), "at most {MAX_SGE} elements");
    }

    /// Removes all elements.
    pub fn clear(&mut self) {
        match self.0.spilled() {
            true => self.0.clear(),
            // Every packet does this, and truncating takes twice as many instructions.
            false => self.0 = SmallVec::new(),
        }
    }
}

impl<T: Copy> Clone for ShortList<T> {
    fn clone(&self) -> ShortList<T> {
        ShortList(SmallVec::from_slice(&self.0))
    }
}

impl<T> Default for ShortList<T> {
    fn default() -> ShortList<T> {
        ShortList::new()
    }
}

impl<T> Deref for ShortList<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for ShortList<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T> Extend<T> for ShortList<T> {
    #[track_caller]
    fn extend<I: IntoIterator<Item = T>>(&mut self, elements: I) {
        for element in elements {
            self.push(element);
        }
    }
}

impl<T> FromIterator<T> for ShortList<T> {
    #[track_caller]
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> ShortList<T> {
        let mut list = ShortList::new();
        list.extend(elements);
        list
    }
}

impl<T> IntoIterator for ShortList<T> {
    type Item = T;
    type IntoIter = smallvec::IntoIter<[T; INLINE]>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a, T> IntoIterator for &'a ShortList<T> {
    type Item = &'a T;
    type IntoIter = core::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_takes_its_bound_and_no_more() {
        let mut list: ShortList<usize> = (0..MAX_SGE).collect();
        assert_eq!(list.try_push(99), Err(99));
        assert!(list.iter().copied().eq(0..MAX_SGE));
        assert_eq!(list.clone(), list);
        list.clear();
        assert_eq!(list.try_push(99), Ok(()));
        assert_eq!(list.into_iter().collect::<alloc::vec::Vec<_>>(), [99]);
    }
}
