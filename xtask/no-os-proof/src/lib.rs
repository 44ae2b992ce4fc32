//! A program without an operating system that links the pure crates.
//!
//! It brings its own panic handler and its own allocator. The standard library brings both as well,
//! so the moment any crate in the graph of `roce`, `controls`, `sim`, `topology`, `subnet`,
//! `parfait`, `xio` or `comm` links `std`, the compiler refuses this package with a duplicate
//! `panic_impl`. So `cargo xtask check` proves "no clock, no socket, no file, no thread, no
//! operating-system randomness" on every change. A second check reads the symbols that the archive
//! imports: a crate that uses the C library without `std` is named there.
//!
//! Nothing in here runs. The package is its own workspace, so that features enabled by other
//! members (`std` of `thiserror`, for one) do not affect the proof.
#![no_std]

// Named so that they are linked although nothing of them is called.
extern crate comm;
extern crate controls;
extern crate parfait;
extern crate roce;
extern crate sim;
extern crate subnet;
extern crate topology;
extern crate xio;

use core::alloc::{GlobalAlloc, Layout};
use core::panic::PanicInfo;

/// Allocates nothing: the proof needs an allocator to exist, not to work.
struct NoMemory;

// SAFETY: `alloc` always reports failure by a null pointer, which the trait allows, so no block is
// ever handed out and `dealloc` can never be called with one.
unsafe impl GlobalAlloc for NoMemory {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: NoMemory = NoMemory;

#[panic_handler]
fn halt(_: &PanicInfo<'_>) -> ! {
    loop {}
}
