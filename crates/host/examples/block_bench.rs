//! What the stages over blocks cost on this processor, beside a copy of the same block.
//!
//! ```text
//! cargo run --release -p host --features codecs,wasm --example block_bench -- FILE.u32
//! ```
//!
//! Takes a flat file of `u32` tokens in blocks of 1 MiB, of which each is hot in the cache, and
//! prints for each operation the CPU seconds for 10^9 tokens, the bytes of a token after it, and
//! the rate in bytes of `u32`. The time is the least of several passes.

use std::hint::black_box;
use std::time::Instant;

use xio::dataset::Dtype;
use xio::kernel::{Codec, Compression, Quant, TokenMap};

const BLOCK: usize = 1 << 20;
const PASSES: usize = 15;

/// A module that maps no token.
const NOTHING: &str = r#"(module (memory (export "memory") 20)
  (func (export "dquant_buffer") (param i32) (result i32) (i32.const 65536))
  (func (export "dquant_map_u32") (param i32 i32 i64) (result i32) (i32.const 0)))"#;

/// A module that adds 1 to every 7th token of the file, as a plain loop.
const SEVENTH: &str = r#"(module (memory (export "memory") 20)
  (func (export "dquant_buffer") (param i32) (result i32) (i32.const 65536))
  (func (export "dquant_map_u32") (param $at i32) (param $count i32) (param $first i64) (result i32)
    (loop $next
      (if (i64.eqz (i64.rem_u (local.get $first) (i64.const 7)))
        (then (i32.store (local.get $at) (i32.add (i32.load (local.get $at)) (i32.const 1)))))
      (local.set $first (i64.add (local.get $first) (i64.const 1)))
      (local.set $at (i32.add (local.get $at) (i32.const 4)))
      (local.set $count (i32.sub (local.get $count) (i32.const 1)))
      (br_if $next (local.get $count)))
    (i32.const 0)))"#;

/// The blocks with the last operation's result in front, and the bytes of each.
struct Blocks {
    original: Vec<Vec<u8>>,
    lengths: Vec<usize>,
}

impl Blocks {
    /// Times an operation on every block; it returns the bytes of its result. The blocks are
    /// restored before each pass, untimed, and stay as the last pass leaves them.
    fn time(&mut self, name: &str, mut run: impl FnMut(&mut [u8], usize) -> usize) {
        let (mut least, mut after) = (f64::MAX, self.original.clone());
        let mut lengths = self.lengths.clone();
        for _ in 0..PASSES {
            let mut seconds = 0.0;
            for ((block, before), length) in
                after.iter_mut().zip(&self.original).zip(lengths.iter_mut().zip(&self.lengths))
            {
                block.copy_from_slice(before);
                let begun = Instant::now();
                *length.0 = run(black_box(block), *length.1);
                seconds += begun.elapsed().as_secs_f64();
            }
            least = least.min(seconds);
        }
        let tokens = (after.len() * BLOCK / 4) as f64;
        let bytes = lengths.iter().sum::<usize>() as f64 / tokens;
        let (per_gtok, rate) = (least * 1e9 / tokens, tokens * 4.0 / least / 1e9);
        println!("{name:24} {per_gtok:8.3} s {bytes:8.3} B {rate:8.1} GB/s");
        (self.original, self.lengths) = (after, lengths);
    }

    /// The blocks again as they are before an operation.
    fn copy(&self) -> Blocks {
        Blocks { original: self.original.clone(), lengths: self.lengths.clone() }
    }
}

/// User actions, in a fresh instance for each block.
fn modules(stored: &Blocks) {
    for (name, text) in [("wasm, nothing", NOTHING), ("wasm, every 7th", SEVENTH)] {
        let module = wat::parse_str(text).expect("the text is a module");
        let hash = <sha2::Sha256 as sha2::Digest>::digest(&module).into();
        let action = host::wasm::UserAction::load(&module, &hash).expect("it may run");
        stored.copy().time(name, |block, length| {
            // A number at which the result is not checked: one of 32 costs twice as much.
            action.map(block, Dtype::U32, 5).expect("it maps");
            length
        });
    }
}

/// Quantizes values around zero in samples of 2,048, and undoes it.
fn quantize(stored: &Blocks, scratch: &mut [u8]) {
    const ROW: usize = 2048;
    let (kernels, _) = host::kernels::best();
    let mut values = stored.copy();
    for raw in values.original.iter_mut().flat_map(|block| block.as_chunks_mut().0) {
        let id = u32::from_le_bytes(*raw) % 50_257;
        *raw = ((id as f32 - 25_000.0) / 10_000.0).to_le_bytes();
    }
    for quant in Quant::ALL {
        let mut quantized = values.copy();
        quantized.time(&format!("quantize({quant})"), |block, _| {
            (kernels.quantize)(block, Dtype::F32, quant, ROW).expect("whole rows of finite values")
        });
        for to in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            quantized.copy().time(&format!("{quant}, undone to {to}"), |block, length| {
                scratch[..length].copy_from_slice(&block[..length]);
                (kernels.dequantize)(&scratch[..length], quant, ROW, to, block)
                    .expect("there is room")
            });
        }
    }
}

fn main() {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("name a flat file of u32 tokens");
        std::process::exit(2);
    };
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let (kernels, name) = host::kernels::best();
    let original: Vec<Vec<u8>> = bytes.chunks_exact(BLOCK).map(<[u8]>::to_vec).collect();
    if original.is_empty() {
        eprintln!("{path} has {} bytes: a block is 1 MiB", bytes.len());
        std::process::exit(2);
    }
    println!("{} blocks of 1 MiB, {name}", original.len());
    let lengths = vec![BLOCK; original.len()];
    let stored = Blocks { original, lengths };
    let tokens = BLOCK / 4;
    let mut scratch = vec![0; xio::stage::SCRATCH_BYTES];

    stored.copy().time("memcpy", |block, length| {
        scratch[..length].copy_from_slice(block);
        black_box(&mut scratch);
        length
    });
    stored.copy().time("CRC-32C", |block, length| {
        black_box((kernels.crc32c)(0, block));
        length
    });
    stored.copy().time("narrow(u16)", |block, _| {
        (kernels.narrow)(block, Dtype::U32, Dtype::U16).expect("ids below 65536")
    });
    stored.copy().time("narrow, saturate", |block, _| {
        (kernels.replace)(block, Dtype::U32, Dtype::U16, 0).expect("ids below 65536").0
    });
    stored.copy().time("bits of the largest", |block, length| {
        black_box(xio::kernel::pack::bits_needed(block, Dtype::U32));
        length
    });
    for bits in [16, 17, 20] {
        let mut packed = stored.copy();
        packed.time(&format!("bitpack({bits})"), |block, _| {
            (kernels.pack)(block, Dtype::U32, bits).expect("the ids fit")
        });
        packed.time(&format!("bitpack({bits}), undone"), |block, _| {
            (kernels.unpack)(block, tokens, bits, Dtype::U32).expect("there is room")
        });
    }
    let table: Vec<u32> = (0..65_536).rev().collect();
    stored.copy().time("remap", |block, length| {
        xio::kernel::remap_in_place(block, Dtype::U32, &table).expect("ids below 65536");
        length
    });
    modules(&stored);
    let mut narrowed = stored.copy();
    narrowed.time("narrow(u16)", |block, _| {
        (kernels.narrow)(block, Dtype::U32, Dtype::U16).expect("ids below 65536")
    });
    quantize(&stored, &mut scratch);
    for (codec, level) in [(Codec::Lz4, 0), (Codec::Zstd, -1), (Codec::Zstd, 1), (Codec::Zstd, 3)] {
        let how = Compression { codec, level, always: true };
        let mut compressed = narrowed.copy();
        compressed.time(&format!("u16 {how}"), |block, length| {
            let made = (kernels.codecs.compress)(&how, &block[..length], &mut scratch);
            let made = made.bytes.filter(|made| *made < length).expect("it becomes smaller");
            block[..made].copy_from_slice(&scratch[..made]);
            made
        });
        compressed.time(&format!("u16 {codec}, undone"), |block, length| {
            scratch[..length].copy_from_slice(&block[..length]);
            (kernels.codecs.decompress)(codec, &scratch[..length], &mut block[..2 * tokens])
                .expect("it was compressed")
        });
    }
}
