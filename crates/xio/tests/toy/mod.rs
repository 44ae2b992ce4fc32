//! A codec for tests: it leaves out bytes that are zero. Under one name it is slow, under the other
//! it takes no time.

use xio::kernel::{Codec, Codecs, Compressed, Compression, Kernels};

/// The portable kernels with that codec.
pub(crate) const KERNELS: Kernels =
    Kernels { codecs: Codecs { compress, decompress }, ..Kernels::PORTABLE };

/// A bit for each byte that is not zero, then those bytes.
fn compress(how: &Compression, source: &[u8], target: &mut [u8]) -> Compressed {
    let bit = |bits: &[u8]| (0..).zip(bits).map(|(at, byte)| u8::from(*byte != 0) << at).sum();
    let bits: Vec<u8> = source.chunks(8).map(bit).collect();
    let kept = source.iter().copied().filter(|byte| *byte != 0);
    let made: Vec<u8> = bits.into_iter().chain(kept).collect();
    let bytes = target.get_mut(..made.len()).map(|target| {
        target.copy_from_slice(&made);
        made.len()
    });
    let nanos = if how.codec == Codec::Lz4 { 1_000_000 } else { 0 };
    Compressed { bytes, nanos }
}

fn decompress(_: Codec, source: &[u8], target: &mut [u8]) -> Option<usize> {
    let (bits, mut kept) = source.split_at_checked(target.len().div_ceil(8))?;
    for (at, byte) in target.iter_mut().enumerate() {
        *byte = 0;
        if bits[at / 8] >> (at % 8) & 1 == 1 {
            (*byte, kept) = kept.split_first().map(|(byte, rest)| (*byte, rest))?;
        }
    }
    kept.is_empty().then_some(target.len())
}
