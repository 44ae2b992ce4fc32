//! Calls into libraries that panic on damaged files: the panic becomes an error.
//!
//! A file from outside must not end the program with a stack trace. The message of such a panic is
//! not printed; every other panic is reported as before.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `f`, whose state is not used again after a panic.
///
/// # Errors
/// The message of the panic.
pub(super) fn guarded<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                report(panic);
            }
        }));
    });
    GUARDED.set(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    GUARDED.set(false);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        text.unwrap_or_else(|| String::from("the library failed"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        assert_eq!(guarded(|| 7), Ok(7));
        let of = |panic: fn()| guarded(panic);
        assert_eq!(of(|| panic!("plain")), Err(String::from("plain")));
        assert_eq!(of(|| panic!("{}", 7)), Err(String::from("7")));
    }
}
