//! What the first bytes of a file say it is.
//!
//! Token files with a header of their own are described by it, and the header has to account for
//! every byte of the file. Files of other formats are recognized so that they can be refused by
//! name instead of being read as ids. What has no known magic is [`Sniff::Unmarked`]:
//! [`guess`](super::guess) looks at its bytes.
//!
//! | header | bytes | written by |
//! |---|---|---|
//! | 256 `i32`: 20240520, version 1, number of tokens; then `u16` | 1,024 | llm.c, modded-nanogpt |
//! | 256 `i32`: 20240801, version 7, number of tokens; then `u32` | 1,024 | llm.c with Llama 3 |
//! | `LITPKDS`, `u64` version 1, `u8` code of the type, `u64` number of tokens | 24 | Lit-GPT and TinyLlama |
//!
//! Magic bytes that ids could spell by chance are longer than two of them, or are checked together
//! with a length.

use super::{DatasetError, Dtype, Format, TokenFile, exact_len, megatron, npy};

/// As much of the start of a file as [`sniff`] may look at.
pub const SNIFF_BYTES: usize = 1 << 10;

/// What the first bytes of a file announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sniff {
    /// A NumPy file: go on with [`npy::parse`].
    Npy,
    /// A Megatron index: go on with [`megatron::parse`] and the `.bin` beside it.
    MegatronIndex,
    /// Tokens behind a header, both described.
    Headed(TokenFile),
    /// Samples between headers.
    Container(Container),
    /// No run of tokens.
    Foreign(Foreign),
    /// No known magic: a flat file, if its type is known.
    Unmarked,
}

/// A file format whose samples lie between headers. It can be converted, and not be streamed as it
/// is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// Columns, as Apache Parquet has them.
    Parquet,
    /// Columns, in a file or a stream of Apache Arrow.
    Arrow,
    /// Members of an archive.
    Tar,
}

impl Container {
    /// How it is refused where a run of tokens is needed.
    pub const fn foreign(self) -> Foreign {
        let what = match self {
            Container::Parquet => "a Parquet file",
            Container::Arrow => "an Arrow file",
            Container::Tar => "a tar archive",
        };
        Foreign { what, hint: "convert it to a flat file once: dquant convert FILE FILE.bin" }
    }
}

/// A file format that holds no run of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// What the file is, with its article.
    pub what: &'static str,
    /// What to do with it.
    pub hint: &'static str,
}

const DECOMPRESS: &str = "decompress it first";
const ARRAY: &str = "save the array of ids alone, with numpy.save or tofile";
const NOT_DATA: &str = "name the file that it describes";
const NO_TOKENS: &str = "it is no dataset of tokens: name another file";

/// Magic bytes at the start of a file, and what it is.
const FOREIGN: &[(&[u8], &str, &str)] = &[
    (b"\x28\xb5\x2f\xfd", "a Zstandard file, compressed as a whole", DECOMPRESS),
    (b"\xfd7zXZ\0", "an xz file, compressed as a whole", DECOMPRESS),
    (b"\x04\x22\x4d\x18", "an LZ4 file, compressed as a whole", DECOMPRESS),
    (b"\xff\x06\0\0sNaPpY", "a Snappy file, compressed as a whole", DECOMPRESS),
    (b"PK\x03\x04", "a zip archive, as .npz and .pt files are", ARRAY),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", ARRAY),
    (b"FEA1", "a Feather file of version 1", "write it as Arrow or Parquet"),
    (b"Obj\x01", "an Avro file", "write it as Parquet"),
    (b"SQLite format 3\0", "an SQLite database", NO_TOKENS),
    (b"GGUF", "a GGUF model", NO_TOKENS),
    (b"TNTIDX\0\0", "an index of fairseq", NOT_DATA),
    (b"TwoDMMIDIDX\0\0", "an index of fairseq", NOT_DATA),
    (b"DQDOCHSH", "the hashes of documents", NOT_DATA),
    (&20_240_326_u32.to_le_bytes(), "a model of llm.c", NO_TOKENS),
    (&20_240_327_u32.to_le_bytes(), "a debug state of llm.c", NO_TOKENS),
    (&20_240_328_u32.to_le_bytes(), "a tokenizer of llm.c", NO_TOKENS),
    (
        &20_240_522_u32.to_le_bytes(),
        "an evaluation file of llm.c, whose tokens are no run",
        NO_TOKENS,
    ),
    (&20_240_527_u32.to_le_bytes(), "a training state of llm.c", NO_TOKENS),
    (b"24ka", "a model of llama2.c", NO_TOKENS),
];

/// Tells a file of `file_len` bytes by its first bytes: [`SNIFF_BYTES`] of them, or all.
///
/// # Errors
/// When it has a known header of tokens that does not describe it.
pub fn sniff(head: &[u8], file_len: u64) -> Result<Sniff, DatasetError> {
    if head.starts_with(npy::MAGIC) {
        return Ok(Sniff::Npy);
    }
    if head.starts_with(megatron::MAGIC) {
        return Ok(Sniff::MegatronIndex);
    }
    if let Some(file) = headed(head, file_len)? {
        return Ok(Sniff::Headed(file));
    }
    if let Some(container) = container(head) {
        return Ok(Sniff::Container(container));
    }
    Ok(foreign(head, file_len).map_or(Sniff::Unmarked, Sniff::Foreign))
}

fn container(head: &[u8]) -> Option<Container> {
    if head.starts_with(b"PAR1") {
        return Some(Container::Parquet);
    }
    if head.starts_with(b"ARROW1\0\0") {
        return Some(Container::Arrow);
    }
    (head.get(257..262) == Some(b"ustar")).then_some(Container::Tar)
}

fn headed(head: &[u8], file_len: u64) -> Result<Option<TokenFile>, DatasetError> {
    let header = match word(head, 0) {
        Some(20_240_520) => llm_c(head, 1, "1", Dtype::U16)?,
        Some(20_240_801) => llm_c(head, 7, "7", Dtype::U32)?,
        _ if head.starts_with(b"LITPKDS") => packed(head)?,
        _ => return Ok(None),
    };
    let (writer, dtype, data_offset, tokens) = header;
    let need = tokens.checked_mul(dtype.bytes().into());
    let need = need.and_then(|bytes| bytes.checked_add(data_offset));
    let need = need.ok_or(DatasetError::TooLarge { field: "number of tokens", value: tokens })?;
    exact_len("file with a header of its own", file_len, need)?;
    Ok(Some(TokenFile { dtype, data_offset, tokens, format: Format::Headed { writer } }))
}

/// The writer of a header, the type of the tokens, where they begin, and their number.
type Header = (&'static str, Dtype, u64, u64);

fn llm_c(
    head: &[u8],
    version: u32,
    known: &'static str,
    dtype: Dtype,
) -> Result<Header, DatasetError> {
    let format = "llm.c header:";
    match (word(head, 4), word(head, 8)) {
        (Some(found), _) if found != version => {
            Err(DatasetError::Version { format, version: found.into(), known })
        }
        (_, Some(tokens)) => Ok(("llm.c", dtype, 1_024, tokens.into())),
        _ => Err(short("header of llm.c", head, 12)),
    }
}

fn packed(head: &[u8]) -> Result<Header, DatasetError> {
    let Some(fixed) = head.first_chunk::<24>() else {
        return Err(short("header of Lit-GPT", head, 24));
    };
    let number = |at: usize| fixed[at..].first_chunk().map_or(0, |raw| u64::from_le_bytes(*raw));
    let version = number(7);
    if version != 1 {
        return Err(DatasetError::Version { format: "Lit-GPT header:", version, known: "1" });
    }
    let dtype = match fixed[15] {
        1 => Dtype::U8,
        2 => Dtype::I8,
        3 => Dtype::I16,
        4 => Dtype::I32,
        5 => Dtype::I64,
        8 => Dtype::U16,
        code => return Err(DatasetError::HeaderCode { code }),
    };
    Ok(("Lit-GPT", dtype, 24, number(16)))
}

fn short(what: &'static str, head: &[u8], need: u64) -> DatasetError {
    DatasetError::Truncated { what, have: head.len() as u64, need }
}

fn foreign(head: &[u8], file_len: u64) -> Option<Foreign> {
    let of = |what, hint| Some(Foreign { what, hint });
    if let Some((_, what, hint)) = FOREIGN.iter().find(|(magic, ..)| head.starts_with(magic)) {
        return of(what, hint);
    }
    // Two bytes of magic, the one method that exists, and flags of which three are reserved.
    if head.starts_with(b"\x1f\x8b\x08") && head.get(3).is_some_and(|flags| flags & 0xe0 == 0) {
        return of("a gzip file, compressed as a whole", DECOMPRESS);
    }
    if head.starts_with(b"BZh") && head.get(4..10) == Some(b"1AY&SY") {
        return of("a bzip2 file, compressed as a whole", DECOMPRESS);
    }
    // Protocols 4 and 5 begin with a frame whose length has 64 bits.
    if matches!(head, [0x80, 4 | 5, 0x95, _, _, _, _, _, 0, 0, 0, ..]) {
        return of("a Python pickle", ARRAY);
    }
    let length = head.first_chunk().map(|raw| u64::from_le_bytes(*raw))?;
    if head.get(8..10) == Some(b"{\"") && length.checked_add(8).is_some_and(|end| end <= file_len) {
        return of("a safetensors file", ARRAY);
    }
    let masked = crc32c(&head[..8]).rotate_right(15).wrapping_add(0xa282_ead8);
    if length > 0 && length < file_len && word(head, 8) == Some(masked) {
        return of("a TFRecord file", "write its ids as .npy or as a flat file");
    }
    None
}

/// The CRC-32C of a few bytes, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let bit = |crc: u32, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), bit))
}

/// The little-endian number of four bytes at an offset.
fn word(head: &[u8], at: usize) -> Option<u32> {
    head.get(at..)?.first_chunk().map(|raw| u32::from_le_bytes(*raw))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn llm_c_head(number: u32, version: u32, tokens: u32) -> Vec<u8> {
        let mut head: Vec<u8> =
            [number, version, tokens].iter().flat_map(|word| word.to_le_bytes()).collect();
        head.resize(1_024, 0);
        head
    }

    #[test]
    fn magic_tells_the_format() {
        assert_eq!(sniff(b"\x93NUMPY\x01\x00v", 9), Ok(Sniff::Npy));
        assert_eq!(sniff(b"MMIDIDX\x00\x00\x01", 10), Ok(Sniff::MegatronIndex));
        assert_eq!(sniff(b"MMID", 4), Ok(Sniff::Unmarked));
        assert_eq!(sniff(b"", 0), Ok(Sniff::Unmarked));
    }

    #[test]
    fn headers_of_tokens_describe_their_file() {
        let of = |head: &[u8], len| match sniff(head, len) {
            Ok(Sniff::Headed(file)) => Ok((file.dtype, file.data_offset, file.tokens)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.reason()),
        };
        let gpt2 = llm_c_head(20_240_520, 1, 70_000);
        assert_eq!(of(&gpt2, 141_024), Ok((Dtype::U16, 1_024, 70_000)));
        assert_eq!(of(&gpt2, 141_023), Err("truncated"));
        assert_eq!(of(&gpt2, 141_026), Err("excess"));
        assert_eq!(of(&gpt2[..10], 10), Err("truncated"));
        assert_eq!(of(&llm_c_head(20_240_520, 2, 70_000), 141_024), Err("version"));
        let llama = llm_c_head(20_240_801, 7, 70_000);
        assert_eq!(of(&llama, 281_024), Ok((Dtype::U32, 1_024, 70_000)));
        let packed = |version: u64, code, tokens: u64| {
            let (version, tokens) = (version.to_le_bytes(), tokens.to_le_bytes());
            [&b"LITPKDS"[..], &version, &[code], &tokens].concat()
        };
        assert_eq!(of(&packed(1, 8, 500), 1_024), Ok((Dtype::U16, 24, 500)));
        assert_eq!(of(&packed(1, 4, 500), 2_024), Ok((Dtype::I32, 24, 500)));
        assert_eq!(of(&packed(1, 8, u64::MAX), 1_024), Err("too-large"));
        assert_eq!(of(&packed(2, 8, 500), 1_024), Err("version"));
        assert_eq!(of(&packed(1, 6, 500), 1_024), Err("header-code"));
        assert_eq!(of(&packed(1, 6, 500)[..23], 23), Err("truncated"));
    }

    #[test]
    fn files_of_other_formats_are_named() {
        let what = |head: &[u8], len| match sniff(head, len) {
            Ok(Sniff::Foreign(foreign)) => foreign.what,
            Ok(Sniff::Container(container)) => container.foreign().what,
            other => panic!("{head:?}: {other:?}"),
        };
        for (magic, expected, _) in FOREIGN {
            let head = [magic, &[7; 40][..]].concat();
            assert_eq!(what(&head, 4_000), *expected);
        }
        assert!(what(b"PAR1\x15\x04", 400).contains("Parquet"));
        assert!(what(b"ARROW1\0\0\xff\xff\xff\xff", 400).contains("Arrow"));
        assert!(what(b"\x1f\x8b\x08\x08abc", 400).contains("gzip"));
        assert!(what(b"BZh91AY&SYxx", 400).contains("bzip2"));
        assert!(what(b"\x80\x04\x95\x10\x27\0\0\0\0\0\0]", 400).contains("pickle"));
        assert!(what(b"\x10\0\0\0\0\0\0\0{\"a\":1}", 400).contains("safetensors"));
        let mut tar = [1; 512];
        tar[257..262].copy_from_slice(b"ustar");
        assert!(what(&tar, 10_240).contains("tar"));
        let length = 3_u64.to_le_bytes();
        let crc = crc32c(&length).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes();
        let record = [&length[..], &crc, b"abc\0\0\0\0"].concat();
        assert!(what(&record, 19).contains("TFRecord"));
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    /// Ids that share the short part of a magic number.
    #[test]
    fn tokens_that_begin_like_another_format_are_tokens() {
        for head in [
            &b"\x1f\x8b\x09\x08abcdefghij"[..],
            b"\x1f\x8b\x00\x00\x12\x00\x00\x00",
            b"BZh9abcdefgh",
            b"\x80\x04\x95\x10\x27\x05\x20\x09\x33\x08\x01",
        ] {
            assert_eq!(sniff(head, 4_000), Ok(Sniff::Unmarked), "{head:?}");
        }
    }
}
