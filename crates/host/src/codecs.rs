//! The compressors of `xio`: LZ4 in safe Rust, Zstandard by its C library.
//!
//! Both run in one pass between two buffers, so what malformed input can cost is bounded by the
//! buffer that it is decompressed into: nothing is allocated by a size that the input claims. Their
//! working memory belongs to the thread: for blocks of 1 MiB at most about 5 MiB where it
//! compresses, and 0.2 MiB where it decompresses.

use std::cell::RefCell;
use std::time::Instant;

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into};
use xio::kernel::{Codec, Codecs, Compressed, Compression};
use zstd_safe::{CCtx, DCtx};

/// The compressors.
pub(crate) const CODECS: Codecs = Codecs { compress, decompress };

thread_local! {
    static LZ4: RefCell<Option<CompressTable>> = const { RefCell::new(None) };
    static ZSTD: RefCell<Option<CCtx<'static>>> = const { RefCell::new(None) };
    static UNZSTD: RefCell<Option<DCtx<'static>>> = const { RefCell::new(None) };
}

fn compress(how: &Compression, source: &[u8], target: &mut [u8]) -> Compressed {
    let begun = Instant::now();
    let bytes = match how.codec {
        Codec::Lz4 => LZ4.with_borrow_mut(|table| {
            let table = table.get_or_insert_with(CompressTable::large);
            compress_into_with_table(source, target, table).ok()
        }),
        Codec::Zstd => ZSTD.with_borrow_mut(|context| {
            let context = ready(context, CCtx::try_create)?;
            context.compress(target, source, how.level).ok()
        }),
    };
    Compressed { bytes, nanos: begun.elapsed().as_nanos() as u64 }
}

fn decompress(codec: Codec, source: &[u8], target: &mut [u8]) -> Option<usize> {
    match codec {
        Codec::Lz4 => decompress_into(source, target).ok(),
        Codec::Zstd => UNZSTD.with_borrow_mut(|context| {
            let context = ready(context, DCtx::try_create)?;
            context.decompress(target, source).ok()
        }),
    }
}

/// The context of this thread, created when it is first used; `None` without memory for one.
fn ready<C>(context: &mut Option<C>, create: impl Fn() -> Option<C>) -> Option<&mut C> {
    if context.is_none() {
        *context = create();
    }
    context.as_mut()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOTH: [Compression; 3] = [
        Compression { codec: Codec::Lz4, level: 0, always: false },
        Compression { codec: Codec::Zstd, level: 1, always: false },
        Compression { codec: Codec::Zstd, level: -5, always: false },
    ];

    /// Bytes with repetitions, as tokens have them.
    fn tokens(seed: u64, count: usize) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u16
        };
        (0..count).flat_map(|_| (next() % 97 * (next() % 7)).to_le_bytes()).collect()
    }

    fn packed(how: &Compression, source: &[u8]) -> Vec<u8> {
        let mut target = vec![0; source.len() * 9 / 8 + 64];
        let bytes = compress(how, source, &mut target).bytes.expect("there is room");
        target.truncate(bytes);
        target
    }

    proptest! {
        #[test]
        fn blocks_come_back(seed in any::<u64>(), count in 0usize..70_000) {
            let source = tokens(seed, count);
            for how in &BOTH {
                let small = packed(how, &source);
                prop_assert!(how.level != 1 || count < 2_000 || small.len() < source.len());
                let mut back = vec![0xee; source.len()];
                prop_assert_eq!(decompress(how.codec, &small, &mut back), Some(source.len()));
                prop_assert!(back == source);
            }
        }

        /// Damaged, cut and invented input: an error or any bytes, never beyond the buffer, never a
        /// panic.
        #[test]
        fn malformed_input_stays_in_its_buffer(
            seed in any::<u64>(),
            count in 0usize..5_000,
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(),
            invented in prop::collection::vec(any::<u8>(), 0..300),
            room in 0usize..12_000,
        ) {
            for how in &BOTH {
                let mut small = packed(how, &tokens(seed, count));
                for (at, bits) in &flips {
                    let at = at.index(small.len());
                    small[at] ^= bits;
                }
                let left = cut.index(small.len() + 1);
                for input in [&small[..], &small[..left], &invented[..]] {
                    let mut buffer = vec![0xee; room + 64];
                    let bytes = decompress(how.codec, input, &mut buffer[..room]);
                    prop_assert!(bytes.is_none_or(|bytes| bytes <= room));
                    prop_assert!(buffer[room..].iter().all(|byte| *byte == 0xee));
                }
            }
        }
    }
}
