//! Locks that every part of a soak takes. What they guard belongs elsewhere.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder panicked still holds what it held; the panic ends the soak by itself.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
