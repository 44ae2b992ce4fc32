//! What the bytes of a file without a header say about the type of its tokens.
//!
//! A flat file read with the wrong type gives numbers all the same: half of a `u32`, or two `u16`
//! in one. The structure of token files shows the mistake. An id is below [`LARGEST_VOCABULARY`],
//! so the upper half of every wide number is almost zero, and two neighbouring ids in one wide
//! number almost never are. [`Evidence`] counts this over a few samples of the file. It proposes a
//! type only when the bytes leave no doubt, and it contradicts a type that the user gave when the
//! bytes do.
//!
//! A header in front of the ids shows too ([`Evidence::header`]): its first bytes are not like the
//! rest of the file.
//!
//! Callers read [`SAMPLE_BYTES`] at each of the offsets of [`sample_offsets`]: the work does not
//! depend on the length of the file.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::{Dtype, LARGEST_VOCABULARY, head};

/// Bytes read at each of the [`sample_offsets`], or as many as there are.
pub const SAMPLE_BYTES: u64 = 16 << 10;

/// Samples of a file.
const SAMPLES: u64 = 4;

/// Fewer numbers say nothing.
const ENOUGH: u64 = 64;

/// Different lower halves that token files have, unlike constants and counters.
const VARIETY: u32 = 48;

/// Byte above which upper bytes of two-byte ids are rare and lower ones are not.
const ENDLESS: u8 = 0xf0;

/// Negative numbers that label files hold, such as -100 for "no loss here".
const SMALLEST_LABEL: i64 = -256;

/// Where to read samples of a file of `file_len` bytes: whole numbers of eight bytes, spread over
/// the file.
pub fn sample_offsets(file_len: u64) -> impl Iterator<Item = u64> {
    let last = file_len.saturating_sub(SAMPLE_BYTES) & !7;
    let whole = file_len <= SAMPLES * SAMPLE_BYTES;
    (0..SAMPLES).map_while(move |sample| match whole {
        true => Some(sample * SAMPLE_BYTES).filter(|at| *at < file_len),
        // Not `last * sample / 3`, which could exceed 64 bits.
        false => Some((last / (SAMPLES - 1) * sample) & !7),
    })
}

/// Numbers of one width in the samples.
#[derive(Clone, Copy, Debug, Default)]
struct Words {
    count: u64,
    /// Beyond the vocabulary, and no label either.
    beyond: u64,
    negative: u64,
    largest: u64,
}

impl Words {
    fn add(&mut self, value: u64, signed: i64, bound: u64) {
        self.count += 1;
        if (SMALLEST_LABEL..0).contains(&signed) {
            self.negative += 1;
        } else {
            self.largest = self.largest.max(value);
            self.beyond += u64::from(value >= bound);
        }
    }

    /// Adds numbers of up to 32 bits, of which those from `labels` on are negative ones near 0.
    /// Without a branch: a stream may have thousands of files.
    fn add_small(&mut self, values: impl ExactSizeIterator<Item = u32>, labels: u32, bound: u64) {
        let (mut beyond, mut negative, mut largest) = (0u32, 0u32, 0u32);
        let (count, limit) = (values.len(), u32::try_from(bound).unwrap_or(u32::MAX));
        for value in values {
            let is_label = value >= labels;
            let id = if is_label { 0 } else { value };
            negative += u32::from(is_label);
            beyond += u32::from(id >= limit);
            largest = largest.max(id);
        }
        self.count += count as u64;
        self.negative += u64::from(negative);
        self.largest = self.largest.max(largest.into());
        if bound <= u64::from(u32::MAX) {
            self.beyond += u64::from(beyond);
        }
    }

    fn all_are_ids(&self) -> bool {
        self.count >= ENOUGH && self.beyond == 0
    }

    fn mostly_beyond(&self) -> bool {
        self.count >= ENOUGH && 2 * self.beyond >= self.count
    }
}

/// What samples of a file say about its type.
#[derive(Clone, Debug)]
pub struct Evidence {
    file_len: u64,
    vocabulary: Option<u64>,
    words2: Words,
    words4: Words,
    words8: Words,
    /// Bytes of printable ASCII text.
    text: u64,
    bytes: u64,
    /// Numbers of two bytes in the uppermost 256, which compressed data has and vocabularies rarely
    /// do.
    uppermost: u64,
    /// Which lower halves of numbers of four bytes occurred, one bit each, until they are varied.
    lower_halves: Box<[u64; 1024]>,
    varieties: u32,
    /// All samples, in the order of the file.
    sampled: Vec<u8>,
}

impl Evidence {
    /// Nothing seen of a file of `file_len` bytes; ids are below `vocabulary` where it is known.
    pub fn new(file_len: u64, vocabulary: Option<u64>) -> Evidence {
        let none = Words::default();
        Evidence {
            file_len,
            vocabulary,
            words2: none,
            words4: none,
            words8: none,
            text: 0,
            bytes: 0,
            uppermost: 0,
            lower_halves: Box::new([0; 1024]),
            varieties: 0,
            sampled: Vec::new(),
        }
    }

    /// Adds a sample that was read at one of the [`sample_offsets`].
    pub fn add(&mut self, sample: &[u8]) {
        let bound = self.vocabulary.unwrap_or(LARGEST_VOCABULARY);
        let halves = sample.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
        self.words2.add_small(halves.clone().map(u32::from), u32::MAX, bound);
        self.uppermost += u64::from(halves.map(|value| u32::from(value >= 0xff00)).sum::<u32>());
        let words = sample.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        self.words4.add_small(words.clone(), SMALLEST_LABEL as u32, bound);
        for lower in words.map(|value| value & 0xffff) {
            if self.varieties >= VARIETY {
                break;
            }
            let (bits, bit) = (&mut self.lower_halves[lower as usize / 64], 1 << (lower % 64));
            self.varieties += u32::from(*bits & bit == 0);
            *bits |= bit;
        }
        for &bytes in sample.as_chunks::<8>().0 {
            let value = u64::from_le_bytes(bytes);
            self.words8.add(value, value as i64, bound);
        }
        let is_text = |byte: &u8| u8::from(matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~'));
        // Few enough bytes at a time that their number is a byte.
        let texts = sample.chunks(128).map(|bytes| bytes.iter().map(is_text).sum::<u8>());
        self.text += texts.map(u64::from).sum::<u64>();
        self.bytes += sample.len() as u64;
        self.sampled.extend_from_slice(sample);
    }

    /// Whether the lower halves differ as ids do.
    fn is_varied(&self) -> bool {
        self.varieties >= VARIETY
    }

    fn is_text(&self) -> bool {
        self.bytes >= ENOUGH && self.text * 100 >= self.bytes * 95
    }

    /// The type that the bytes leave no doubt about, and why; or why they do not.
    pub fn guess(&self) -> Result<(Dtype, String), String> {
        if self.is_text() {
            return Err("its bytes are text, not token ids".into());
        }
        if let Some(why) = [8, 4, 2].iter().find_map(|width| self.big_endian(*width)) {
            return Err(why);
        }
        if self.words4.count < ENOUGH || !self.is_varied() {
            return Err("its bytes are too few or too uniform to tell the type".into());
        }
        let bound = self.vocabulary.unwrap_or(LARGEST_VOCABULARY);
        let below = |words: &Words, bytes| {
            let Words { count, largest, .. } = words;
            format!("all {count} sampled numbers of {bytes} bytes are ids of at most {largest}")
        };
        if self.words8.all_are_ids() && self.file_len.is_multiple_of(8) {
            return self.unless_rising(Dtype::I64, below(&self.words8, 8));
        }
        if self.words4.all_are_ids() && self.file_len.is_multiple_of(4) {
            let dtype = if self.words4.negative > 0 { Dtype::I32 } else { Dtype::U32 };
            return self.unless_rising(dtype, below(&self.words4, 4));
        }
        let narrow = self.words2.all_are_ids() && self.file_len.is_multiple_of(2);
        let compressed = self.vocabulary.is_none() && self.uppermost * 1024 >= self.words2.count;
        if narrow && self.words4.mostly_beyond() && !compressed {
            let Words { count, beyond, .. } = self.words4;
            let why = format!("{beyond} of {count} sampled numbers of 4 bytes are beyond {bound}");
            return Ok((Dtype::U16, why));
        }
        Err("its bytes look like ids of no type".into())
    }

    /// Numbers that never fall are no text: an index holds the ends of documents.
    fn unless_rising(&self, dtype: Dtype, why: String) -> Result<(Dtype, String), String> {
        match head::numbers(&self.sampled, dtype.bytes()).is_sorted() {
            true => Err("its numbers only rise, as the ends of documents in an index do".into()),
            false => Ok((dtype, why)),
        }
    }

    /// Why the bytes are big-endian ids of this width, where they leave no doubt.
    fn big_endian(&self, width: u32) -> Option<String> {
        let bound = LARGEST_VOCABULARY as i64;
        let is_big = match width {
            // The upper bytes of ids end somewhere, the lower ones take all values.
            2 => {
                let (mut count, mut high) = (0_u64, 0_u64);
                for &[first, second] in self.sampled.as_chunks::<2>().0 {
                    if first > ENDLESS {
                        return None;
                    }
                    count += 1;
                    high += u64::from(second > ENDLESS);
                }
                count >= 16 * ENOUGH && high * 64 >= count
            }
            _ => {
                let mut count = 0;
                let mut swapped = self.sampled.chunks_exact(width as usize).map(|number| {
                    number.iter().fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
                });
                let are_ids = swapped.by_ref().all(|id| {
                    count += 1;
                    id < LARGEST_VOCABULARY
                });
                let is_beyond = |id: &i64| !(SMALLEST_LABEL..bound).contains(id);
                let mut beyond = head::numbers(&self.sampled, width).filter(is_beyond);
                are_ids && count >= ENOUGH && beyond.nth(count as usize / 2).is_some()
            }
        };
        is_big.then(|| {
            format!(
                "its bytes are big-endian ids of {width} bytes: write it with numpy's byteswap()"
            )
        })
    }

    /// Why the first bytes of the file are a header and no ids of this type, where they leave no
    /// doubt.
    pub fn header(&self, dtype: Dtype) -> Option<String> {
        head::header(&self.sampled, self.file_len, dtype)
    }

    /// As [`guess`](Evidence::guess), of what follows a header: its type, and why there is one.
    pub fn guess_behind_header(&self) -> Option<(Dtype, String)> {
        let (_, body) = head::split(&self.sampled, self.file_len);
        let mut behind = Evidence::new(self.file_len & !7, self.vocabulary);
        behind.add(body);
        let (dtype, _) = behind.guess().ok()?;
        Some((dtype, self.header(dtype)?))
    }

    /// Why the bytes cannot be tokens of the type `given`, where they leave no doubt.
    pub fn against(&self, given: Dtype) -> Option<String> {
        let big_endian = (2..=8).contains(&given.bytes()) && !given.is_float();
        if let Some(why) = big_endian.then(|| self.big_endian(given.bytes())).flatten() {
            return Some(format!("is not {given}: {why}"));
        }
        if self.is_text() && given.bytes() > 1 {
            return Some(format!("is not {given}: its bytes are text, not token ids"));
        }
        let none = Words::default();
        let words = match given.bytes() {
            _ if given.is_float() => &none,
            2 => &self.words2,
            4 => &self.words4,
            8 => &self.words8,
            _ => &none,
        };
        if let Some(vocabulary) = self.vocabulary.filter(|_| words.beyond > 0) {
            let largest = words.largest;
            return Some(format!(
                "holds id {largest} as {given}, beyond the vocabulary of {vocabulary}"
            ));
        }
        let (guess, why) = self.guess().ok()?;
        // Almost no two neighbours in floating point look like one id; a single half may.
        let differs = match given.is_float() {
            true => guess.bytes() > 2,
            false => guess.bytes() != given.bytes(),
        };
        let wrong = given.is_float() || guess.bytes() > given.bytes() || words.mostly_beyond();
        (differs && wrong).then(|| format!("is not {given} but {guess}: {why}"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// Ids as a tokenizer gives them: small ones often.
    fn ids(count: u64, vocabulary: u64) -> Vec<u64> {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) % vocabulary
        };
        (0..count).map(|_| next().min(next())).collect()
    }

    fn stored(ids: &[u64], bytes: usize) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes()[..bytes].to_vec()).collect()
    }

    fn evidence(data: &[u8], vocabulary: Option<u64>) -> Evidence {
        let mut evidence = Evidence::new(data.len() as u64, vocabulary);
        for at in sample_offsets(data.len() as u64) {
            let end = data.len().min((at + SAMPLE_BYTES) as usize);
            evidence.add(&data[at as usize..end]);
        }
        evidence
    }

    #[test]
    fn the_type_of_token_files_is_found() {
        for vocabulary in [256, 32_000, 50_257] {
            for count in [200, 5_000, 300_000] {
                let ids = ids(count, vocabulary);
                for (bytes, dtype) in [(2, Dtype::U16), (4, Dtype::U32), (8, Dtype::I64)] {
                    for known in [None, Some(vocabulary)] {
                        let found = evidence(&stored(&ids, bytes), known).guess();
                        let found = found.map(|(dtype, _)| dtype);
                        assert_eq!(found, Ok(dtype), "{count} of {vocabulary}, {known:?}");
                    }
                }
            }
        }
        let wide = stored(&ids(5_000, 262_144), 4);
        assert_eq!(evidence(&wide, None).guess().unwrap().0, Dtype::U32);
    }

    #[test]
    fn a_wrong_type_is_contradicted_and_the_right_one_is_not() {
        let ids = ids(5_000, 50_257);
        let all = [(2, Dtype::U16), (4, Dtype::U32), (8, Dtype::U64)];
        for (bytes, right) in all {
            let evidence = evidence(&stored(&ids, bytes), None);
            for (_, given) in all {
                let why = evidence.against(given);
                assert_eq!(why.is_none(), given == right, "{right} given as {given}: {why:?}");
            }
        }
        let small = evidence(&stored(&ids, 4), Some(40_000)).against(Dtype::U32).unwrap();
        assert!(small.contains("beyond the vocabulary of 40000"), "{small}");
    }

    #[test]
    fn floating_point_is_contradicted_by_ids_only() {
        let ids = ids(5_000, 50_257);
        for given in Dtype::FLOATS {
            for bytes in [4, 8] {
                let why = evidence(&stored(&ids, bytes), None).against(given).unwrap();
                assert!(why.contains(&std::format!("is not {given}")), "{why}");
            }
        }
        let values = |width: usize| -> Vec<u8> {
            let bits = ids.iter().map(|id| ((*id as f32 - 25_000.0) / 7_000.0).to_bits());
            bits.flat_map(|bits| bits.to_le_bytes()[4 - width..].to_vec()).collect()
        };
        assert_eq!(evidence(&values(4), None).against(Dtype::F32), None);
        assert_eq!(evidence(&values(2), None).against(Dtype::Bf16), None);
        assert_eq!(evidence(&values(2), None).against(Dtype::F16), None);
    }

    #[test]
    fn labels_below_zero_are_of_a_signed_type() {
        let mut labels = stored(&ids(5_000, 50_257), 4);
        for at in (0..labels.len()).step_by(28) {
            labels[at..at + 4].copy_from_slice(&(-100_i32).to_le_bytes());
        }
        assert_eq!(evidence(&labels, None).guess().unwrap().0, Dtype::I32);
    }

    #[test]
    fn what_leaves_a_doubt_is_not_guessed() {
        let noise: Vec<u8> = ids(9_000, 1 << 31).iter().map(|id| (id >> 9) as u8).collect();
        let text = "It was the best of times, it was the worst of times.\n".repeat(90);
        for data in [&[][..], &[7; 40], &[0; 9_000], &stored(&[5; 900], 4), &noise] {
            let guess = evidence(data, None).guess();
            assert!(guess.is_err(), "{} bytes: {guess:?}", data.len());
            assert_eq!(evidence(data, None).against(Dtype::U32), None);
        }
        let text = evidence(text.as_bytes(), None);
        assert!(text.guess().unwrap_err().contains("text"));
        assert!(text.against(Dtype::U16).unwrap().contains("text"));
        assert_eq!(text.against(Dtype::U8), None, "bytes are ids, too");
        // Digits stored as u16: the halves of u32 would be as small.
        assert!(evidence(&stored(&ids(9_000, 10), 2), None).guess().is_err());
    }

    #[test]
    fn big_endian_ids_are_no_others() {
        for vocabulary in [5_000, 32_000, 50_257] {
            let ids = ids(9_000, vocabulary);
            let big = |bytes: usize| -> Vec<u8> {
                ids.iter().flat_map(|id| id.to_be_bytes()[8 - bytes..].to_vec()).collect()
            };
            for (bytes, dtype) in [(2, Dtype::U16), (4, Dtype::U32), (8, Dtype::I64)] {
                let found = evidence(&big(bytes), None);
                let why = format!("big-endian ids of {bytes} bytes");
                assert!(found.guess().unwrap_err().contains(&why), "{bytes}");
                assert!(found.against(dtype).unwrap().contains(&why), "{bytes}");
            }
        }
    }

    #[test]
    fn samples_lie_in_the_file_and_on_whole_numbers() {
        for len in [0, 1, 7, 16_384, 16_385, 65_536, 65_537, 1_000_003, u64::MAX] {
            let offsets: Vec<u64> = sample_offsets(len).collect();
            assert_eq!(offsets.is_empty(), len == 0);
            assert!(
                offsets.iter().all(|at| *at < len && at.is_multiple_of(8)),
                "{len}: {offsets:?}"
            );
            assert!(offsets.is_sorted());
        }
    }
}
