//! What a file holds, which type its tokens have, and who says so.
//!
//! [`identify`] and [`describe`] decide for every command, for the target and for Python: first
//! whether the file describes itself, an index beside it does, or it has to be converted, then
//! which type its tokens have. A header says what the file holds. A flat file does not record its
//! type. It comes from the manifest or from the user, and what the bytes of the file rule out is
//! refused, whoever says it. Without both, the bytes decide when they leave no doubt, and the
//! caller has to report that it is a guess ([`Origin::Guess`]). A file of another format, or with a
//! header that nobody knows, is refused by name: its ids would be shifted.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use xio::dataset::guess::{Evidence, SAMPLE_BYTES, sample_offsets};
use xio::dataset::{
    Container, DatasetError, Dtype, Foreign, Format, SNIFF_BYTES, Sniff, TokenFile, npy,
    sniff as sniff_head,
};

use crate::dochash;
use crate::kind::Kind;
use crate::manifest::{self, Manifest, REWRITE_HINT};
use crate::read_at::ReadAt;

/// Who says which type the tokens have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The header of the file, or the index beside it.
    File,
    /// A header in front of the tokens, of this writer and with so many bytes.
    Header {
        /// Who writes such headers.
        writer: &'static str,
        /// Its length.
        bytes: u64,
    },
    /// The manifest beside it.
    Manifest,
    /// The user.
    Given,
    /// Nobody: the bytes look like it, for this reason.
    Guess(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File => f.write_str("file"),
            Origin::Header { writer, bytes } => {
                write!(f, "file: its header of {bytes} bytes, as {writer} writes it")
            }
            Origin::Manifest => f.write_str("manifest"),
            Origin::Given => f.write_str("given"),
            Origin::Guess(why) => write!(f, "guess: {why}"),
        }
    }
}

/// Why no type is accepted, and the next thing to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong, to follow the name of the file.
    pub why: String,
    /// The next thing to try.
    pub hint: String,
    /// The same for programs.
    pub cause: Cause,
}

/// What kind of reason a [`Refusal`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The file is of another format, whose tokens are no run of bytes.
    Foreign,
    /// Nothing tells the type of the tokens, or the bytes contradict what does.
    Type,
    /// The manifest describes another file.
    Manifest,
}

impl Refusal {
    /// What is wrong with the type of the tokens.
    pub fn of_type(why: impl Into<String>, hint: impl Into<String>) -> Refusal {
        Refusal { why: why.into(), hint: hint.into(), cause: Cause::Type }
    }
}

impl From<Foreign> for Refusal {
    fn from(Foreign { what, hint }: Foreign) -> Refusal {
        let why = format!("is {what}");
        Refusal { cause: Cause::Foreign, ..Refusal::of_type(why, hint) }
    }
}

const FLAT_HINT: &str = "name the type with --dtype, for example --dtype u32, or write a manifest: \
                         dquant inspect FILE --dtype u32 --write-manifest";

/// Reads samples of the tokens in this range of a file, in bytes.
///
/// # Errors
/// When the file cannot be read.
pub fn sample(
    file: &dyn ReadAt,
    range: Range<u64>,
    vocabulary: Option<u64>,
) -> io::Result<Evidence> {
    let len = range.end.saturating_sub(range.start);
    let mut evidence = Evidence::new(len, vocabulary);
    let mut buffer = [0; SAMPLE_BYTES as usize];
    for at in sample_offsets(len) {
        let want = SAMPLE_BYTES.min(len - at) as usize;
        let mut have = 0;
        while have < want {
            match file.read_at(&mut buffer[have..want], range.start + at + have as u64)? {
                0 => break,
                read => have += read,
            }
        }
        evidence.add(&buffer[..have]);
    }
    Ok(evidence)
}

/// What is asked of a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    /// The type, where the user says it.
    pub dtype: Option<Dtype>,
    /// Ids are below this number.
    pub vocabulary: Option<u64>,
    /// Believe the given type of a flat file, without a look at its bytes.
    pub trusted: bool,
    /// Describe integers of any type, also those that are not delivered.
    pub any_integer: bool,
}

/// Why a file is not read as tokens.
#[derive(Debug)]
pub enum NoTokens {
    /// It cannot be read.
    Io(io::Error),
    /// Its header or its length is invalid.
    Dataset(DatasetError),
    /// It is something else, or of an unknown type.
    Refused(Refusal),
}

impl From<io::Error> for NoTokens {
    fn from(error: io::Error) -> NoTokens {
        NoTokens::Io(error)
    }
}

impl From<DatasetError> for NoTokens {
    fn from(error: DatasetError) -> NoTokens {
        NoTokens::Dataset(error)
    }
}

impl From<Refusal> for NoTokens {
    fn from(refusal: Refusal) -> NoTokens {
        NoTokens::Refused(refusal)
    }
}

/// Whether a file of this name lies beside a dataset and describes it: manifests, hashes, and what
/// datatrove writes beside its tokens. Patterns such as `corpus/*` name them, too.
pub fn is_sidecar(name: &str) -> bool {
    let endings = [manifest::ENDING, dochash::ENDING, ".ds.index", ".ds.metadata", ".ds.loss"];
    let base = name.rsplit('/').next().unwrap_or(name);
    base == manifest::IN_FOLDER || endings.iter().any(|ending| base.ends_with(ending))
}

/// How the name of a file of loss weights ends.
const LOSS_WEIGHTS: &str = "loss_weights.npy";

/// The name that the loss weights of the tokens of this file have: `NAME.loss_weights.npy` beside
/// `NAME.bin`, `NAME.npy`, `NAME.idx` or `NAME`.
pub fn loss_weights_of(path: &Path) -> PathBuf {
    let has_ending = |known: &str| path.extension().is_some_and(|ending| ending == known);
    if ["bin", "npy", "idx"].into_iter().any(has_ending) {
        return path.with_extension(LOSS_WEIGHTS);
    }
    // Other endings tell files apart: `train.00000` and `train.00001`.
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(LOSS_WEIGHTS);
    path.with_file_name(name)
}

/// Whether a file of this name holds loss weights.
pub fn is_loss_weights(name: &str) -> bool {
    name.strip_suffix(LOSS_WEIGHTS).is_some_and(|before| before.ends_with('.'))
}

/// The name that an index of the tokens of this file has: `NAME.idx` beside `NAME.bin` or
/// `NAME.npy`.
pub fn index_of(path: &Path) -> Option<PathBuf> {
    let ending = path.extension()?;
    (ending == "bin" || ending == "npy").then(|| path.with_extension("idx"))
}

/// What describes the tokens of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identified<I> {
    /// The file itself: [`describe`] goes on.
    Alone,
    /// This index beside it.
    Indexed(I),
    /// It is an index, and holds no tokens.
    Index,
    /// Its samples lie between headers.
    Samples(Container),
}

/// Decides what describes the tokens of a file, by what [`sniff`] found, its manifest, an index
/// beside it, and its name. `open_index` opens the index that [`index_of`] names, if it exists.
///
/// # Errors
/// Those of `open_index`.
pub fn identify<I, E>(
    path: &Path,
    sniffed: Sniff,
    manifest: Option<&Manifest>,
    open_index: impl FnOnce() -> Result<Option<I>, E>,
) -> Result<Identified<I>, E> {
    match sniffed {
        // Such a header was written with the tokens and accounts for every byte of the file. An
        // index of the same name may be a leftover of another file, or describe the tokens behind
        // the header.
        Sniff::Npy | Sniff::Headed(_) => return Ok(Identified::Alone),
        Sniff::MegatronIndex => return Ok(Identified::Index),
        // Ids can spell a magic number, but an index fits to the last byte or is refused.
        Sniff::Container(_) | Sniff::Foreign(_) | Sniff::Unmarked => {}
    }
    if let Some(index) = open_index()? {
        return Ok(Identified::Indexed(index));
    }
    let is_run = |manifest: &Manifest| {
        [Kind::Flat, Kind::Megatron].iter().any(|kind| kind.name() == manifest.format)
    };
    let container = match sniffed {
        _ if manifest.is_some_and(is_run) => None,
        Sniff::Container(container) => Some(container),
        // Streams of Arrow and the oldest tar archives have no magic number.
        Sniff::Unmarked => match path.extension().and_then(|ending| ending.to_str()) {
            Some("arrow") => Some(Container::Arrow),
            Some("tar") => Some(Container::Tar),
            _ => None,
        },
        _ => None,
    };
    Ok(container.map_or(Identified::Alone, Identified::Samples))
}

/// Checks the type that a user gave to plain bytes of a dataset: a column or a member. `bytes` are
/// those of the first samples, one after the other.
///
/// # Errors
/// When they cannot be of it, or begin with a header.
pub fn plain_bytes(given: Dtype, bytes: &[u8]) -> Result<(), Refusal> {
    // The length of the first sample is not known, so no field may be taken for it: it is beyond
    // all of them.
    let mut evidence = Evidence::new(1 << 62, None);
    evidence.add(bytes);
    // Single bytes may be text, which can begin with anything.
    let is_wide = given.bytes() > 1;
    let header = |why| Err(Refusal::of_type(why, "write the ids alone into it, without a header"));
    if let Some(what) = magic_of(bytes).filter(|_| is_wide) {
        return header(format!("is not {given} but {what}"));
    }
    if let Some(why) = evidence.against(given) {
        return Err(Refusal::of_type(why, "name the type that they have with --dtype"));
    }
    match evidence.header(given).filter(|_| is_wide) {
        None => Ok(()),
        Some(why) => header(format!("begins with an unknown header, not with {given}: {why}")),
    }
}

/// What a sample is that begins like a file of another format.
fn magic_of(bytes: &[u8]) -> Option<&'static str> {
    match sniff_head(bytes, bytes.len() as u64) {
        Ok(Sniff::Unmarked) => None,
        Ok(Sniff::Npy) => Some("an array with NumPy's header"),
        Ok(Sniff::MegatronIndex) => Some("an index"),
        Ok(Sniff::Container(container)) => Some(container.foreign().what),
        Ok(Sniff::Foreign(foreign)) => Some(foreign.what),
        // These bytes may be fewer or more than the header describes.
        Ok(Sniff::Headed(_)) | Err(_) => Some("tokens behind a header"),
    }
}

/// Bytes that are enough for [`plain_bytes`].
pub const PLAIN_BYTES: usize = 64 << 10;

/// What the first bytes of a file say it is.
///
/// # Errors
/// When the file cannot be read, or has a header of tokens that does not describe it.
pub fn sniff(file: &dyn ReadAt, len: u64) -> Result<Sniff, NoTokens> {
    Ok(sniff_head(&head(file, len, SNIFF_BYTES as u64)?, len)?)
}

/// Describes a file of `len` bytes that no index describes. A header counts more than the type that
/// is asked for.
///
/// # Errors
/// When it cannot be read, holds no tokens, or nothing tells their type.
pub fn describe(
    file: &dyn ReadAt,
    len: u64,
    asked: Asked,
    manifest: Option<&Manifest>,
) -> Result<(TokenFile, Origin), NoTokens> {
    let found = match asked.trusted {
        // Nothing is refused that the program itself has written.
        true if !head(file, len, npy::PREFIX_BYTES as u64)?.starts_with(npy::MAGIC) => {
            Sniff::Unmarked
        }
        _ => sniff(file, len)?,
    };
    let (found, origin) = match found {
        Sniff::Npy => {
            let header = npy::header_bytes(&head(file, len, npy::PREFIX_BYTES as u64)?)?;
            let header = head(file, len, header)?;
            let parse = if asked.any_integer { npy::parse_integers } else { npy::parse };
            (parse(&header, len)?, Origin::File)
        }
        Sniff::Headed(found) => {
            let Format::Headed { writer } = found.format else {
                return Err(DatasetError::Magic { format: "token" }.into());
            };
            (found, Origin::Header { writer, bytes: found.data_offset })
        }
        Sniff::MegatronIndex => {
            let why = "is an index, which holds no tokens";
            return Err(Refusal::of_type(why, "name the .bin that it describes").into());
        }
        Sniff::Foreign(foreign) if manifest.is_none() => return Err(Refusal::from(foreign).into()),
        Sniff::Container(container) if manifest.is_none() => {
            return Err(Refusal::from(container.foreign()).into());
        }
        Sniff::Foreign(_) | Sniff::Container(_) | Sniff::Unmarked => {
            flat(file, len, asked, manifest)?
        }
    };
    if !asked.any_integer && !found.dtype.is_float() {
        found.dtype.token()?;
    }
    Ok((found, origin))
}

fn flat(
    file: &dyn ReadAt,
    len: u64,
    asked: Asked,
    manifest: Option<&Manifest>,
) -> Result<(TokenFile, Origin), NoTokens> {
    let (dtype, origin) = match asked.dtype.filter(|_| asked.trusted) {
        Some(dtype) => (dtype, Origin::Given),
        None if len == 0 && asked.dtype.is_none() && manifest.is_none() => {
            let hint = "leave it out, or name its type with --dtype: then it is not drawn";
            return Err(Refusal::of_type("is empty: it holds no tokens", hint).into());
        }
        None => {
            // A manifest tells more than samples.
            let evidence = match manifest {
                Some(_) => Evidence::new(len, asked.vocabulary),
                None => sample(file, 0..len, asked.vocabulary)?,
            };
            flat_type(asked.dtype, manifest, &evidence)
                .map_err(|refusal| by_vocabulary(file, len, asked, refusal))?
        }
    };
    let (bytes, data_offset) = (u64::from(dtype.bytes()), 0);
    match len % bytes {
        0 => Ok((
            TokenFile { dtype, data_offset, tokens: len / bytes, format: Format::Flat },
            origin,
        )),
        left => Err(DatasetError::Ragged { dtype, len, left }.into()),
    }
}

/// Why nothing tells the type of a flat file: a vocabulary that is smaller than its ids leaves no
/// type.
fn by_vocabulary(file: &dyn ReadAt, len: u64, asked: Asked, refusal: Refusal) -> Refusal {
    let Some(vocabulary) = asked.vocabulary.filter(|_| asked.dtype.is_none()) else {
        return refusal;
    };
    let guess = sample(file, 0..len, None).ok().and_then(|evidence| evidence.guess().ok());
    let Some((dtype, _)) = guess else { return refusal };
    let why = format!("holds ids beyond the vocabulary of {vocabulary}, if they are {dtype}");
    let hint = format!(
        "is it the tokenizer that made the file? if the type is another than {dtype}, name it: --dtype"
    );
    Refusal::of_type(why, hint)
}

/// The first `bytes` of a file of `len` bytes, or all of it.
fn head(file: &dyn ReadAt, len: u64, bytes: u64) -> io::Result<Vec<u8>> {
    // Callers pass lengths that are bounded by their format.
    let mut head = vec![0; bytes.min(len) as usize];
    file.read_exact_at(&mut head, 0)?;
    Ok(head)
}

/// The type of a flat file, from the manifest, the user, or its bytes.
///
/// # Errors
/// When the user contradicts the manifest, the bytes contradict the user, or nothing tells the
/// type.
pub fn flat_type(
    given: Option<Dtype>,
    manifest: Option<&Manifest>,
    evidence: &Evidence,
) -> Result<(Dtype, Origin), Refusal> {
    match (manifest.map(Manifest::dtype), given) {
        (Some(recorded), Some(given)) if recorded != given => Err(Refusal::of_type(
            format!("holds {recorded} according to its manifest, not {given}"),
            "leave --dtype out: the manifest tells the type",
        )),
        (Some(recorded), _) => Ok((recorded, Origin::Manifest)),
        (None, Some(given)) => match evidence.against(given) {
            None => unless_header(given, evidence, Origin::Given),
            Some(why) => match evidence.guess_behind_header() {
                Some((dtype, why)) => Err(header_refusal(dtype, &why)),
                None => Err(Refusal::of_type(why, against_hint(given))),
            },
        },
        (None, None) => match evidence.guess() {
            Ok((guess, why)) => unless_header(guess, evidence, Origin::Guess(why)),
            Err(why) => Err(match evidence.guess_behind_header() {
                Some((dtype, why)) => header_refusal(dtype, &why),
                None => {
                    let why = format!("has no header that tells the type of its tokens, and {why}");
                    Refusal::of_type(why, FLAT_HINT)
                }
            }),
        },
    }
}

/// Accepts a type, unless the file begins with a header.
fn unless_header(
    dtype: Dtype,
    evidence: &Evidence,
    origin: Origin,
) -> Result<(Dtype, Origin), Refusal> {
    match evidence.header(dtype) {
        None => Ok((dtype, origin)),
        Some(why) => Err(header_refusal(dtype, &why)),
    }
}

fn header_refusal(dtype: Dtype, why: &str) -> Refusal {
    Refusal::of_type(
        format!("begins with an unknown header, not with {dtype}: {why}"),
        format!(
            "cut it off: tail -c +N FILE > NEW, where N is the header's length plus 1; if there is none, record \
             that: dquant inspect FILE --dtype {dtype} --write-manifest --force"
        ),
    )
}

fn against_hint(given: Dtype) -> String {
    format!(
        "leave --dtype out; if it is {given} after all, record it: \
         dquant inspect FILE --dtype {given} --write-manifest --force"
    )
}

/// Checks that the manifest is of this file.
///
/// # Errors
/// Says in what they differ.
pub fn agrees(
    manifest: &Manifest,
    (name, bytes): (&str, u64),
    (dtype, tokens): (Dtype, u64),
) -> Result<(), Refusal> {
    let refuse = |why: String| {
        Err(Refusal { cause: Cause::Manifest, ..Refusal::of_type(why, REWRITE_HINT) })
    };
    let base = name.rsplit('/').next().unwrap_or(name);
    let Some(recorded) = manifest.files.iter().find(|file| file.name == base) else {
        return refuse(format!("its manifest describes other files, not {base}"));
    };
    if recorded.bytes != bytes {
        let recorded = recorded.bytes;
        return refuse(format!("has {bytes} bytes, its manifest describes {recorded}"));
    }
    if (manifest.dtype(), manifest.tokens) != (dtype, tokens) {
        let (was, count) = (manifest.dtype(), manifest.tokens);
        return refuse(format!("holds {tokens} {dtype} tokens, its manifest says {count} {was}"));
    }
    Ok(())
}

/// Checks the ids against the vocabulary of the user, as far as they are known.
///
/// # Errors
/// Names the id that is beyond it.
pub fn within_vocabulary(
    vocabulary: u64,
    manifest: Option<&Manifest>,
    dtype: Dtype,
    evidence: &Evidence,
) -> Result<(), Refusal> {
    let hint = "is it the tokenizer that made the file, and the right --dtype?";
    match manifest.and_then(|manifest| manifest.max_id) {
        Some(largest) if largest >= i128::from(vocabulary) => {
            let why = format!("holds id {largest}, beyond the vocabulary of {vocabulary}");
            Err(Refusal::of_type(why, hint))
        }
        Some(_) => Ok(()),
        None => evidence.against(dtype).map_or(Ok(()), |why| Err(Refusal::of_type(why, hint))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn evidence(bytes: usize) -> Evidence {
        let ids = (0..5_000_u64).map(|i| i * i * 2_654_435_761 % 50_257);
        let data: Vec<u8> = ids.flat_map(|id| id.to_le_bytes()[..bytes].to_vec()).collect();
        let mut evidence = Evidence::new(data.len() as u64, None);
        evidence.add(&data);
        evidence
    }

    #[test]
    fn a_given_type_is_checked_and_a_missing_one_is_guessed() {
        let (narrow, wide) = (evidence(2), evidence(4));
        let given = |dtype, evidence| flat_type(Some(dtype), None, evidence);
        assert_eq!(given(Dtype::U16, &narrow).unwrap(), (Dtype::U16, Origin::Given));
        assert_eq!(given(Dtype::U32, &wide).unwrap(), (Dtype::U32, Origin::Given));
        for (dtype, evidence, right) in [(Dtype::U16, &wide, "u32"), (Dtype::U32, &narrow, "u16")] {
            let refusal = given(dtype, evidence).unwrap_err();
            assert!(refusal.why.contains(&format!("is not {dtype} but {right}")), "{refusal:?}");
            assert!(refusal.hint.contains("--force"), "{refusal:?}");
        }
        let (dtype, origin) = flat_type(None, None, &narrow).unwrap();
        assert!(dtype == Dtype::U16 && matches!(origin, Origin::Guess(_)), "{origin}");
        let refusal = flat_type(None, None, &Evidence::new(0, None)).unwrap_err();
        assert!(refusal.why.contains("too few") && refusal.hint.contains("--dtype"), "{refusal:?}");
    }
}
