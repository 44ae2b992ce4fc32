//! The per-byte kernels of `xio`, compiled for the processor that runs them.
//!
//! `xio` is pure and independent of the processor: its loops are plain Rust. Here the same bodies are
//! also compiled with wider vectors, and the best that the processor supports are chosen once. CRC-32C
//! comes from a crate that uses the processor's own instruction.

use xio::dataset::Dtype;
use xio::kernel::{Kernels, Narrow, NarrowError, Widen, body, narrow_in_place, widen_into};

/// The fastest kernels of this processor, and their name for people.
pub fn best() -> (Kernels, &'static str) {
    let (narrow, widen, name) = best_loops();
    (Kernels { narrow, widen, crc32c: crc32c::crc32c_append }, name)
}

#[cfg(target_arch = "x86_64")]
fn best_loops() -> (Narrow, Widen, &'static str) {
    let has_512 = std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512vl");
    if has_512 {
        (narrow_avx512, widen_avx512, "AVX-512")
    } else if std::arch::is_x86_feature_detected!("avx2") {
        (narrow_avx2, widen_avx2, "AVX2")
    } else {
        (narrow_in_place, widen_into, "baseline x86-64")
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn best_loops() -> (Narrow, Widen, &'static str) {
    (narrow_in_place, widen_into, "portable")
}

#[cfg(target_arch = "x86_64")]
fn narrow_avx2(buf: &mut [u8], from: Dtype, to: Dtype) -> Result<usize, NarrowError> {
    #[target_feature(enable = "avx2")]
    fn compiled(buf: &mut [u8], from: Dtype, to: Dtype) -> Result<usize, NarrowError> {
        body::narrow_in_place(buf, from, to)
    }
    // SAFETY: only `best_loops` hands this function out, after it found AVX2.
    unsafe { compiled(buf, from, to) }
}

#[cfg(target_arch = "x86_64")]
fn narrow_avx512(buf: &mut [u8], from: Dtype, to: Dtype) -> Result<usize, NarrowError> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn compiled(buf: &mut [u8], from: Dtype, to: Dtype) -> Result<usize, NarrowError> {
        body::narrow_in_place(buf, from, to)
    }
    // SAFETY: only `best_loops` hands this function out, after it found AVX-512BW and VL, which imply F.
    unsafe { compiled(buf, from, to) }
}

#[cfg(target_arch = "x86_64")]
fn widen_avx2(source: &[u8], from: Dtype, to: Dtype, target: &mut [u8]) {
    #[target_feature(enable = "avx2")]
    fn compiled(source: &[u8], from: Dtype, to: Dtype, target: &mut [u8]) {
        body::widen_into(source, from, to, target);
    }
    // SAFETY: only `best_loops` hands this function out, after it found AVX2.
    unsafe { compiled(source, from, to, target) }
}

#[cfg(target_arch = "x86_64")]
fn widen_avx512(source: &[u8], from: Dtype, to: Dtype, target: &mut [u8]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn compiled(source: &[u8], from: Dtype, to: Dtype, target: &mut [u8]) {
        body::widen_into(source, from, to, target);
    }
    // SAFETY: only `best_loops` hands this function out, after it found AVX-512BW and VL, which imply F.
    unsafe { compiled(source, from, to, target) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_agrees_with_the_portable_one() {
        let tokens: Vec<u8> = (0..5000u32).flat_map(|t| (t * 13 % 65_536).to_le_bytes()).collect();
        let (best, name) = best();
        for len in [0, 4, 60, 256, 1024, 4096, 20_000] {
            let (mut a, mut b) = (tokens[..len].to_vec(), tokens[..len].to_vec());
            let ours = (best.narrow)(&mut a, Dtype::U32, Dtype::U16);
            assert_eq!(ours, narrow_in_place(&mut b, Dtype::U32, Dtype::U16), "{name}, {len}");
            assert_eq!(a[..len / 2], b[..len / 2], "{name}, {len}");
            assert_eq!((best.crc32c)(7, &a), xio::kernel::crc32c(7, &a));
            for (from, to) in
                [(Dtype::U16, Dtype::I32), (Dtype::U16, Dtype::I64), (Dtype::U32, Dtype::I64)]
            {
                let (mut wide, mut want) = ([0; 9000], [0; 9000]);
                (best.widen)(&b, from, to, &mut wide);
                widen_into(&b, from, to, &mut want);
                assert_eq!(wide, want, "{name}, {len}, {from} to {to}");
            }
        }
    }
}
