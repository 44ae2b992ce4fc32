//! The per-byte kernels of `xio`, compiled for the processor that runs them.
//!
//! `xio` is pure and independent of the processor: its loops are plain Rust. Here the same bodies
//! are also compiled with wider vectors, and the best that the processor supports are chosen once.
//! CRC-32C comes from a crate that uses the processor's own instruction.

use xio::dataset::Dtype;
use xio::kernel::{Codecs, Kernels, Quant};
#[cfg(all(target_arch = "x86_64", not(portable)))]
use xio::kernel::{NarrowError, QuantizeError, body, pack, quantize};

/// The fastest kernels of this processor, and their name for people.
pub fn best() -> (Kernels, &'static str) {
    let (loops, name) = best_loops();
    (Kernels { crc32c: crc32c::crc32c_append, codecs: codecs(), ..loops }, name)
}

#[cfg(feature = "codecs")]
const fn codecs() -> Codecs {
    crate::codecs::CODECS
}

#[cfg(not(feature = "codecs"))]
const fn codecs() -> Codecs {
    Codecs::NONE
}

#[cfg(all(target_arch = "x86_64", not(portable)))]
fn best_loops() -> (Kernels, &'static str) {
    let has_512 = std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512vl");
    if has_512 {
        (avx512::LOOPS, "AVX-512")
    } else if std::arch::is_x86_feature_detected!("avx2") {
        (avx2::LOOPS, "AVX2")
    } else {
        (Kernels::PORTABLE, "baseline x86-64")
    }
}

#[cfg(not(all(target_arch = "x86_64", not(portable))))]
fn best_loops() -> (Kernels, &'static str) {
    (Kernels::PORTABLE, "portable")
}

/// Defines a module with the loops compiled for a processor. Its functions are private, and only
/// `best_loops` hands them out, after it has found the features.
#[cfg(all(target_arch = "x86_64", not(portable)))]
macro_rules! compiled_for {
    ($module:ident, $features:literal) => {
        mod $module {
            use super::*;

            pub(super) const LOOPS: Kernels = Kernels {
                narrow,
                replace,
                pack: pack_tokens,
                unpack,
                quantize: quantize_rows,
                dequantize,
                widen,
                ..Kernels::PORTABLE
            };

            fn quantize_rows(
                buf: &mut [u8],
                from: Dtype,
                to: Quant,
                row: usize,
            ) -> Result<usize, QuantizeError> {
                #[target_feature(enable = $features)]
                fn compiled(
                    buf: &mut [u8],
                    from: Dtype,
                    to: Quant,
                    row: usize,
                ) -> Result<usize, QuantizeError> {
                    quantize::quantize_in_place(buf, from, to, row)
                }
                // SAFETY: the processor has these features, see the macro.
                unsafe { compiled(buf, from, to, row) }
            }

            fn dequantize(
                source: &[u8],
                from: Quant,
                row: usize,
                to: Dtype,
                target: &mut [u8],
            ) -> Result<usize, QuantizeError> {
                #[target_feature(enable = $features)]
                fn compiled(
                    source: &[u8],
                    from: Quant,
                    row: usize,
                    to: Dtype,
                    target: &mut [u8],
                ) -> Result<usize, QuantizeError> {
                    quantize::dequantize_into(source, from, row, to, target)
                }
                // SAFETY: the processor has these features, see the macro.
                unsafe { compiled(source, from, row, to, target) }
            }

            fn narrow(buf: &mut [u8], from: Dtype, to: Dtype) -> Result<usize, NarrowError> {
                #[target_feature(enable = $features)]
                fn compiled(buf: &mut [u8], from: Dtype, to: Dtype) -> Result<usize, NarrowError> {
                    body::narrow_in_place(buf, from, to)
                }
                // SAFETY: the processor has these features, see the macro.
                unsafe { compiled(buf, from, to) }
            }

            fn replace(
                buf: &mut [u8],
                from: Dtype,
                to: Dtype,
                instead: u32,
            ) -> Result<(usize, u32), NarrowError> {
                #[target_feature(enable = $features)]
                fn compiled(
                    buf: &mut [u8],
                    from: Dtype,
                    to: Dtype,
                    instead: u32,
                ) -> Result<(usize, u32), NarrowError> {
                    body::replace_in_place(buf, from, to, instead)
                }
                // SAFETY: the processor has these features, see the macro.
                unsafe { compiled(buf, from, to, instead) }
            }

            fn pack_tokens(buf: &mut [u8], dtype: Dtype, bits: u32) -> Result<usize, NarrowError> {
                #[target_feature(enable = $features)]
                fn compiled(buf: &mut [u8], dtype: Dtype, bits: u32) -> Result<usize, NarrowError> {
                    pack::pack_in_place(buf, dtype, bits)
                }
                // SAFETY: the processor has these features, see the macro.
                unsafe { compiled(buf, dtype, bits) }
            }

            fn unpack(buf: &mut [u8], tokens: usize, bits: u32, to: Dtype) -> Option<usize> {
                #[target_feature(enable = $features)]
                fn compiled(buf: &mut [u8], tokens: usize, bits: u32, to: Dtype) -> Option<usize> {
                    pack::unpack_in_place(buf, tokens, bits, to)
                }
                // SAFETY: the processor has these features, see the macro.
                unsafe { compiled(buf, tokens, bits, to) }
            }

            fn widen(source: &[u8], from: Dtype, to: Dtype, target: &mut [u8]) {
                #[target_feature(enable = $features)]
                fn compiled(source: &[u8], from: Dtype, to: Dtype, target: &mut [u8]) {
                    body::widen_into(source, from, to, target);
                }
                // SAFETY: the processor has these features, see the macro.
                unsafe { compiled(source, from, to, target) }
            }
        }
    };
}

#[cfg(all(target_arch = "x86_64", not(portable)))]
compiled_for!(avx2, "avx2");

// BW and VL, which are looked for, imply F.
#[cfg(all(target_arch = "x86_64", not(portable)))]
compiled_for!(avx512, "avx512f,avx512bw,avx512vl");

#[cfg(test)]
mod tests {
    use super::*;
    use xio::kernel::{
        narrow_in_place, pack_in_place, replace_in_place, unpack_in_place, widen_into,
    };

    #[test]
    fn every_quantization_agrees_with_the_portable_one() {
        let (best, name) = best();
        // Every exponent, and every end of a mantissa.
        let bits =
            (0..60_000_u32).map(|i| i.wrapping_mul(0x9e37_79b9)).filter(|b| b >> 23 & 255 != 255);
        let values: Vec<u8> = bits.flat_map(u32::to_le_bytes).collect();
        for quant in Quant::ALL {
            for (from, row) in
                [(Dtype::F32, 1), (Dtype::F32, 100), (Dtype::Bf16, 64), (Dtype::F32, 999)]
            {
                let whole = values.len() / (4 * row) * 4 * row;
                let (mut a, mut b) = (values[..whole].to_vec(), values[..whole].to_vec());
                let ours = (best.quantize)(&mut a, from, quant, row);
                assert_eq!(ours, (Kernels::PORTABLE.quantize)(&mut b, from, quant, row), "{name}");
                let Ok(length) = ours else { continue };
                assert!(a[..length] == b[..length], "{name}, {quant}, {from}, {row}");
                for to in Dtype::FLOATS {
                    let (mut wide, mut want) = (vec![0; whole * 2], vec![0; whole * 2]);
                    let ours = (best.dequantize)(&a[..length], quant, row, to, &mut wide);
                    let portable = Kernels::PORTABLE.dequantize;
                    assert_eq!(ours, portable(&a[..length], quant, row, to, &mut want), "{name}");
                    assert!(ours.is_err() || wide == want, "{name}, {quant} to {to}");
                }
            }
        }
    }

    #[test]
    fn every_kernel_agrees_with_the_portable_one() {
        let tokens: Vec<u8> = (0..5000u32).flat_map(|t| (t * 13 % 65_536).to_le_bytes()).collect();
        let (best, name) = best();
        for len in [0, 4, 60, 256, 1024, 4096, 20_000] {
            let (mut a, mut b) = (tokens[..len].to_vec(), tokens[..len].to_vec());
            let ours = (best.narrow)(&mut a, Dtype::U32, Dtype::U16);
            assert_eq!(ours, narrow_in_place(&mut b, Dtype::U32, Dtype::U16), "{name}, {len}");
            assert_eq!(a[..len / 2], b[..len / 2], "{name}, {len}");
            let (mut a, mut b) = (tokens[..len].to_vec(), tokens[..len].to_vec());
            let ours = (best.replace)(&mut a, Dtype::U32, Dtype::U16, 9);
            assert_eq!(ours, replace_in_place(&mut b, Dtype::U32, Dtype::U16, 9), "{name}, {len}");
            assert_eq!(a, b, "{name}, {len}");
            for bits in [9, 16, 17, 31] {
                let (mut a, mut b) = (tokens[..len].to_vec(), tokens[..len].to_vec());
                let ours = (best.pack)(&mut a, Dtype::U32, bits);
                assert_eq!(ours, pack_in_place(&mut b, Dtype::U32, bits), "{name}, {len}, {bits}");
                if ours.is_ok() {
                    (best.unpack)(&mut a, len / 4, bits, Dtype::U32).expect("there is room");
                    unpack_in_place(&mut b, len / 4, bits, Dtype::U32).expect("there is room");
                    assert_eq!(
                        (&a[..], &b[..]),
                        (&tokens[..len], &tokens[..len]),
                        "{name}, {bits}"
                    );
                }
            }
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
