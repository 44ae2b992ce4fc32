//! Token files of the three formats, and the batches that the reference builds from them.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use xio::dataset::{Dtype, Format, TokenFile};
use xio::plan::Plan;
use xio::reference::Reference;

use super::documents::{U16, write_index};

/// Ids of the usual vocabularies lie below this.
const VOCABULARY: u64 = 50_257;

/// A token file on disk and its content.
#[derive(Clone, Debug)]
pub(crate) struct Corpus {
    pub(crate) path: PathBuf,
    pub(crate) dtype: Dtype,
    pub(crate) tokens: Vec<i128>,
    /// Where its documents are, if it has an index of them.
    pub(crate) documents: Vec<Range<u64>>,
}

/// Tokens that encode their place, so that any mix-up is found.
pub(crate) fn tokens(count: usize, salt: u64) -> Vec<i128> {
    let mixed = |i: u64| (i + salt * 1_000_003).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    (0..count as u64).map(|i| i128::from(mixed(i) % VOCABULARY)).collect()
}

fn encode(tokens: &[i128], dtype: Dtype) -> Vec<u8> {
    let width = dtype.bytes() as usize;
    tokens.iter().flat_map(|token| token.to_le_bytes().into_iter().take(width)).collect()
}

impl Corpus {
    /// A file without a header.
    pub(crate) fn flat(path: &Path, dtype: Dtype, tokens: Vec<i128>) -> Corpus {
        fs::write(path, encode(&tokens, dtype)).expect("the folder is writable");
        Corpus { path: path.to_owned(), dtype, tokens, documents: Vec::new() }
    }

    /// A NumPy file of 64-bit integers.
    pub(crate) fn npy(path: &Path, tokens: Vec<i128>) -> Corpus {
        let shape = tokens.len();
        let header = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': ({shape},), }}\n");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend(u16::try_from(header.len()).expect("a short header").to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(encode(&tokens, Dtype::I64));
        fs::write(path, bytes).expect("the folder is writable");
        let (dtype, documents) = (Dtype::I64, Vec::new());
        Corpus { path: path.to_owned(), dtype, tokens, documents }
    }

    /// A Megatron pair of 16-bit tokens: `path` is the `.bin`; one document.
    pub(crate) fn megatron(path: &Path, tokens: Vec<i128>) -> Corpus {
        let all = u32::try_from(tokens.len()).expect("short");
        Corpus::with_documents(path, tokens, vec![all])
    }

    /// A Megatron pair of 16-bit tokens with documents of these lengths.
    pub(crate) fn with_documents(path: &Path, tokens: Vec<i128>, lengths: Vec<u32>) -> Corpus {
        write_index(&path.with_extension("idx"), &lengths, U16);
        let mut end = 0;
        let range = |length: &u32| {
            let start = end;
            end += u64::from(*length);
            start..end
        };
        let documents = lengths.iter().map(range).collect();
        Corpus { documents, ..Corpus::flat(path, Dtype::U16, tokens) }
    }

    fn described(&self) -> TokenFile {
        TokenFile {
            dtype: self.dtype,
            data_offset: 0,
            tokens: self.tokens.len() as u64,
            format: Format::Flat,
        }
    }
}

/// What a stream over these files, in the order of the blend, has to deliver.
pub(crate) fn expected(plan: &str, corpora: &[&Corpus], batches: Range<u64>) -> Vec<u8> {
    let plan = Plan::parse(plan, Some(0)).expect("the test's plan is right");
    let file = |corpus: &&Corpus| {
        let tokens = corpus.tokens.clone();
        (corpus.described(), move |index: u64| tokens.get(index as usize).copied())
    };
    let files = corpora.iter().map(file).collect();
    let reference = Reference::new(&plan, files).expect("the files go with the plan");
    let documents = corpora.iter().map(|corpus| corpus.documents.clone()).collect();
    let mut reference = reference.with_documents(documents).expect("documents with tokens");
    batches.flat_map(|batch| reference.batch(batch).expect("every token fits")).collect()
}

/// Compares without printing megabytes.
#[track_caller]
pub(crate) fn assert_same(got: &[u8], want: &[u8]) {
    let differs = got.iter().zip(want).position(|(got, want)| got != want);
    if let Some(at) = differs {
        panic!(
            "byte {at} is {}, not {} ({} and {} bytes)",
            got[at],
            want[at],
            got.len(),
            want.len()
        );
    }
    assert_eq!(got.len(), want.len(), "one is the beginning of the other");
}
