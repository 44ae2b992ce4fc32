//! The one loop that runs stages over a block, on either side of the wire.
//!
//! What arrives from a target is not trusted (C7): each length is checked against the tokens that
//! were asked for before bytes are looked at, a decoder writes into a buffer of exactly that many
//! tokens, and what comes out is compared with the checksum of the tokens at the target.

use thiserror::Error;

use super::{BlockOp, Packing, Stage, Type};
use crate::dataset::Dtype;
use crate::kernel::pack::{bits_needed, fit, packed_bytes};
use crate::kernel::{
    Codec, Compressed, Compression, Kernels, MapFault, NarrowError, QuantizeError, TokenMap,
    remap_in_place,
};

/// Room for a block of 1 MiB that a compressor makes larger: LZ4 asks for a tenth more.
pub const SCRATCH_BYTES: usize = (1 << 20) + (1 << 17) + 64;

/// A block as it is handed to its stages, at the front of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes of it.
    pub bytes: usize,
    /// Tokens in it.
    pub tokens: usize,
    /// Its checksum; 0 before there is one.
    pub crc32c: u32,
    /// Bits of a packed token; 0 if the tokens are not packed.
    pub bits: u8,
    /// What its bytes are compressed with.
    pub codec: Option<Codec>,
    /// Its tokens that did not fit and were replaced.
    pub replaced: u32,
}

impl Received {
    /// A block of a file.
    pub const fn stored(bytes: usize, dtype: Dtype) -> Received {
        let tokens = bytes / dtype.bytes() as usize;
        Received { bytes, tokens, crc32c: 0, bits: 0, codec: None, replaced: 0 }
    }

    /// Bytes of the block without compression.
    fn packed_bytes(&self, dtype: Dtype) -> usize {
        match self.bits {
            0 => self.tokens * dtype.bytes() as usize,
            bits => packed_bytes(self.tokens, bits.into()),
        }
    }

    /// Whether its tokens are as they are, and all of them are there.
    fn is_plain(&self, dtype: Dtype) -> bool {
        self.bits == 0 && self.codec.is_none() && self.bytes == self.packed_bytes(dtype)
    }
}

/// What stages need beside the block.
#[derive(Debug)]
pub struct Tools<'a> {
    /// The loops.
    pub kernels: &'a Kernels,
    /// Where blocks are compressed, at least [`SCRATCH_BYTES`]; where they are decompressed or
    /// dequantized, as long as a block; else it may be empty.
    pub scratch: &'a mut [u8],
    /// The table of `remap`; empty without one.
    pub table: &'a [u32],
    /// The user action of `wasm`; none without one.
    pub action: Option<&'a dyn TokenMap>,
    /// The number of the block's first token in its file.
    pub first_token: u64,
    /// Whether blocks are compressed where a stage says so. If not they stay as they are.
    pub compresses: bool,
}

/// What the compressor did with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// Bytes that went in.
    pub bytes_in: usize,
    /// Bytes that the block has then: as many if it did not become smaller.
    pub bytes_out: usize,
    /// Nanoseconds it took.
    pub nanos: u64,
}

/// The result of running stages over a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// The block as it is now.
    pub block: Received,
    /// Conversions executed.
    pub narrowed: u32,
    /// What the compressor did, if it ran.
    pub encoding: Option<Encoding>,
}

/// Why stages failed on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BlockError {
    /// A token that does not fit, or that the table has no entry for; the first one of the block.
    #[error("token {index} of the block is {value}, which does not fit")]
    Overflow {
        /// Its index in the block.
        index: usize,
        /// Its value, as it came to the stage.
        value: i128,
        /// The stage that refuses it, from 0.
        stage: u8,
    },
    /// The user action failed.
    #[error("the user action failed: {0}")]
    Action(MapFault),
    /// The block is malformed, or its CRC-32C does not match.
    #[error("the block is damaged")]
    Damaged,
    /// The kernels do not support the conversion, or the block is not a whole number of tokens.
    #[error("the block cannot be converted")]
    Unsupported,
}

impl From<NarrowError> for BlockError {
    fn from(error: NarrowError) -> BlockError {
        match error {
            NarrowError::Overflow { index, value, .. } => {
                BlockError::Overflow { index, value, stage: 0 }
            }
            _ => BlockError::Unsupported,
        }
    }
}

impl From<QuantizeError> for BlockError {
    fn from(error: QuantizeError) -> BlockError {
        match error {
            QuantizeError::Value { index, bits } => {
                BlockError::Overflow { index, value: bits.into(), stage: 0 }
            }
            QuantizeError::Unsupported => BlockError::Unsupported,
        }
    }
}

/// Runs stages over the block at the front of `buffer`. After an error the contents of the buffer
/// are unspecified.
///
/// # Errors
/// See [`BlockError`].
pub fn run(
    stages: &[Stage<BlockOp>],
    buffer: &mut [u8],
    received: Received,
    tools: &mut Tools<'_>,
) -> Result<Ran, BlockError> {
    if received.bytes > buffer.len() {
        return Err(BlockError::Damaged);
    }
    let mut ran = Ran { block: received, narrowed: 0, encoding: None };
    for (position, stage) in (0..).zip(stages) {
        step(stage, buffer, &mut ran, tools).map_err(|error| match error {
            BlockError::Overflow { index, value, .. } => {
                BlockError::Overflow { index, value, stage: position }
            }
            other => other,
        })?;
    }
    Ok(ran)
}

/// Runs one stage.
fn step(
    stage: &Stage<BlockOp>,
    buffer: &mut [u8],
    ran: &mut Ran,
    tools: &mut Tools<'_>,
) -> Result<(), BlockError> {
    let (kernels, Type { dtype, .. }) = (tools.kernels, stage.input);
    let block = &mut ran.block;
    let bytes = &mut buffer[..block.bytes];
    match stage.op {
        BlockOp::Remap { .. } => remap_in_place(bytes, dtype, tools.table)?,
        BlockOp::Wasm => {
            let action = tools.action.ok_or(BlockError::Unsupported)?;
            action.map(bytes, dtype, tools.first_token).map_err(BlockError::Action)?;
        }
        BlockOp::Narrow { to, instead: None } => {
            block.bytes = (kernels.narrow)(bytes, dtype, to)?;
            ran.narrowed += 1;
        }
        BlockOp::Narrow { to, instead: Some(id) } => {
            let (left, replaced) = (kernels.replace)(bytes, dtype, to, id)?;
            (block.bytes, block.replaced) = (left, block.replaced.saturating_add(replaced));
            ran.narrowed += 1;
        }
        BlockOp::Fit { bits } => fit(bytes, dtype, bits.into())?,
        BlockOp::Widen { to } => {
            let widened = (kernels.unpack)(buffer, block.tokens, 16, to);
            block.bytes = widened.ok_or(BlockError::Unsupported)?;
        }
        BlockOp::Quantize { to, row } => {
            block.bytes = (kernels.quantize)(bytes, dtype, to, row as usize)?;
            block.tokens = block.bytes;
        }
        BlockOp::Dequantize { from, row, to } => {
            let Some(source) = tools.scratch.get_mut(..block.bytes) else {
                return Err(BlockError::Unsupported);
            };
            source.copy_from_slice(bytes);
            block.bytes = (kernels.dequantize)(source, from, row as usize, to, buffer)?;
            block.tokens = block.bytes / to.bytes() as usize;
        }
        BlockOp::Checksum => block.crc32c = (kernels.crc32c)(0, bytes),
        BlockOp::Pack(packing) => {
            let bits = bits_of(packing, bytes, dtype);
            if bits > 0 {
                block.bytes = (kernels.pack)(bytes, dtype, bits)?;
                // Below 32.
                block.bits = bits as u8;
            }
        }
        BlockOp::Compress(compression) if tools.compresses => {
            ran.encoding = Some(compress(&compression, block, bytes, tools));
        }
        BlockOp::Compress(_) => {}
        BlockOp::Decompress(codec) => decompress(codec, block, buffer, dtype, tools)?,
        BlockOp::Unpack(packing) => unpack(packing, block, buffer, dtype, kernels)?,
        BlockOp::Verify => {
            if !block.is_plain(dtype) || (kernels.crc32c)(0, bytes) != block.crc32c {
                return Err(BlockError::Damaged);
            }
        }
    }
    Ok(())
}

/// Bits that the tokens of a block are packed into; 0 if they stay as they are.
fn bits_of(packing: Packing, bytes: &[u8], dtype: Dtype) -> u32 {
    match packing {
        Packing::Bits(bits) => bits.into(),
        Packing::Escape => match bits_needed(bytes, dtype).max(16) {
            bits @ ..32 => bits,
            _ => 0,
        },
        Packing::EscapeWhole => match bits_needed(bytes, dtype) {
            ..=16 => 16,
            _ => 0,
        },
    }
}

/// Compresses a block, if that makes it smaller.
fn compress(
    compression: &Compression,
    block: &mut Received,
    bytes: &mut [u8],
    tools: &mut Tools<'_>,
) -> Encoding {
    let bytes_in = bytes.len();
    let Compressed { bytes: made, nanos } =
        (tools.kernels.codecs.compress)(compression, bytes, tools.scratch);
    if let Some(made) = made.filter(|made| *made < bytes_in) {
        bytes[..made].copy_from_slice(&tools.scratch[..made]);
        (block.bytes, block.codec) = (made, Some(compression.codec));
    }
    Encoding { bytes_in, bytes_out: block.bytes, nanos }
}

/// Decompresses a block into its own buffer, by way of the scratch buffer.
fn decompress(
    codec: Codec,
    block: &mut Received,
    buffer: &mut [u8],
    dtype: Dtype,
    tools: &mut Tools<'_>,
) -> Result<(), BlockError> {
    let expected = block.packed_bytes(dtype);
    match block.codec {
        None if block.bytes == expected => return Ok(()),
        Some(given) if given == codec && block.bytes < expected => {}
        _ => return Err(BlockError::Damaged),
    }
    let (Some(source), Some(target)) =
        (tools.scratch.get_mut(..block.bytes), buffer.get_mut(..expected))
    else {
        return Err(BlockError::Damaged);
    };
    source.copy_from_slice(&target[..block.bytes]);
    if (tools.kernels.codecs.decompress)(codec, source, target) != Some(expected) {
        return Err(BlockError::Damaged);
    }
    (block.bytes, block.codec) = (expected, None);
    Ok(())
}

/// Unpacks a block in its own buffer.
fn unpack(
    packing: Packing,
    block: &mut Received,
    buffer: &mut [u8],
    dtype: Dtype,
    kernels: &Kernels,
) -> Result<(), BlockError> {
    let allowed = match packing {
        Packing::Bits(bits) => block.bits == bits,
        Packing::Escape => matches!(block.bits, 0 | 16..=31),
        Packing::EscapeWhole => matches!(block.bits, 0 | 16),
    };
    if !allowed || block.codec.is_some() || block.bytes != block.packed_bytes(dtype) {
        return Err(BlockError::Damaged);
    }
    if block.bits > 0 {
        let unpacked = (kernels.unpack)(buffer, block.tokens, block.bits.into(), dtype);
        (block.bytes, block.bits) = (unpacked.ok_or(BlockError::Damaged)?, 0);
    }
    Ok(())
}
