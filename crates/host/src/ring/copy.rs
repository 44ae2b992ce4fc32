//! Copies into a slot that nobody reads again here: past the processor's cache.
//!
//! An ordinary store first reads the line that it overwrites. A slot is written once, whole, and
//! read by another process, so that read is wasted, and so is the place in the cache. `fence`
//! orders these stores before later ones.

use std::ptr;

/// Shorter copies are ordinary ones.
const MIN_BYTES: usize = 1024;

/// Copies `len` bytes. [`fence`] must come before another thread is told of them.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
pub(super) unsafe fn past_cache(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: by the caller.
    if len < MIN_BYTES || !unsafe { stream(from, to, len) } {
        // SAFETY: by the caller.
        unsafe { ptr::copy_nonoverlapping(from, to, len) }
    }
}

/// Copies past the cache, if the processor can.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
#[cfg(all(target_arch = "x86_64", not(portable)))]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) -> bool {
    if !std::arch::is_x86_feature_detected!("avx") {
        return false;
    }
    let head = to.align_offset(LINE_BYTES).min(len);
    let body = (len - head) / LINE_BYTES * LINE_BYTES;
    // SAFETY: the three parts are one after the other and add up to `len`; the second begins at
    // a whole line, and the processor has AVX.
    unsafe {
        ptr::copy_nonoverlapping(from, to, head);
        stream_lines(from.add(head), to.add(head), body);
        let rest = head + body;
        ptr::copy_nonoverlapping(from.add(rest), to.add(rest), len - rest);
    }
    true
}

/// # Safety
/// Nothing is touched.
#[cfg(not(all(target_arch = "x86_64", not(portable))))]
unsafe fn stream(_from: *const u8, _to: *mut u8, _len: usize) -> bool {
    false
}

/// Orders all copies before it before the stores after it.
#[cfg(all(target_arch = "x86_64", not(portable)))]
pub(super) fn fence() {
    // SAFETY: every processor of this architecture has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Orders all copies before it before the stores after it: ordinary ones, which the release store
/// that tells of them orders.
#[cfg(not(all(target_arch = "x86_64", not(portable))))]
pub(super) fn fence() {}

#[cfg(all(target_arch = "x86_64", not(portable)))]
const LINE_BYTES: usize = 64;

/// Copies whole lines.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`]; `to` and `len` are multiples of [`LINE_BYTES`].
#[cfg(all(target_arch = "x86_64", not(portable)))]
#[target_feature(enable = "avx")]
unsafe fn stream_lines(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    for at in (0..len).step_by(LINE_BYTES) {
        // SAFETY: in bounds by the caller; `to` is aligned to the line, so both halves are aligned
        // to 32 bytes.
        unsafe {
            let (from, to) = (from.add(at).cast::<__m256i>(), to.add(at).cast::<__m256i>());
            let (first, second) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_stream_si256(to, first);
            _mm256_stream_si256(to.add(1), second);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_at_every_place_is_copied_and_nothing_else() {
        let from: Vec<u8> = (0..4096u32).map(|at| (at * 31 % 251) as u8 + 1).collect();
        for len in [0, 1, 63, MIN_BYTES - 1, MIN_BYTES, MIN_BYTES + 1, 2048, 3000] {
            for place in [0, 1, 31, 32, 63, 64, 65, 127] {
                for skipped in [0, 1, 8] {
                    let mut to = vec![0; 4096];
                    // SAFETY: both ranges lie in their vectors, which are two.
                    unsafe {
                        past_cache(from.as_ptr().add(skipped), to.as_mut_ptr().add(place), len);
                    }
                    fence();
                    assert_eq!(to[place..place + len], from[skipped..skipped + len]);
                    assert!(to[..place].iter().chain(&to[place + len..]).all(|byte| *byte == 0));
                }
            }
        }
    }
}
