//! The header of a NumPy `.npy` file, format versions 1.0, 2.0 and 3.0.
//!
//! Six magic bytes, major and minor version, the header length (`u16` in version 1, `u32` later),
//! then a Python dictionary literal with the keys `descr`, `fortran_order` and `shape`, then the
//! array. The parser accepts that literal and nothing else: no expression, no other key, no
//! nesting, so a hostile header costs at most the parsing of [`MAX_HEADER_BYTES`].
//!
//! An array of any number of axes is read as one run of tokens in C order. Bytes after it are
//! ignored. As records ([`parse_records`]) its elements may be of any type of fixed size,
//! structures included, and are not looked at.

use alloc::string::String;

use super::{DatasetError, Dtype, Format, TokenFile};

/// First bytes of every `.npy` file.
pub const MAGIC: &[u8] = b"\x93NUMPY";

/// Bytes needed by [`header_bytes`].
pub const PREFIX_BYTES: usize = 12;

/// Longest header text accepted, in bytes. NumPy warns above 10,000.
pub const MAX_HEADER_BYTES: u64 = 65_536;

/// Bytes before the array, computed from the first [`PREFIX_BYTES`] of the file. A caller reads
/// that many bytes and passes them to [`parse`].
pub fn header_bytes(prefix: &[u8]) -> Result<u64, DatasetError> {
    let (text_at, text_len, _) = preamble(prefix)?;
    Ok(text_at as u64 + text_len)
}

/// Describes a `.npy` file of `file_len` bytes from its first bytes, at least [`header_bytes`] of
/// them, and refuses types that are delivered neither as tokens nor as floating point.
pub fn parse(head: &[u8], file_len: u64) -> Result<TokenFile, DatasetError> {
    let file = parse_elements(head, file_len, |descr| {
        Dtype::float_from_npy(descr).map_or_else(|| Dtype::from_npy(descr), Ok)
    })?;
    if !file.dtype.is_float() {
        file.dtype.token()?;
    }
    Ok(file)
}

/// As [`parse`], with integers of any type and nothing else.
pub fn parse_integers(head: &[u8], file_len: u64) -> Result<TokenFile, DatasetError> {
    parse_elements(head, file_len, Dtype::from_npy)
}

fn parse_elements(
    head: &[u8],
    file_len: u64,
    dtype_of: impl Fn(&str) -> Result<Dtype, DatasetError>,
) -> Result<TokenFile, DatasetError> {
    let (header, data_offset, version) = header(head)?;
    let dtype = match &header.descr {
        Descr::Simple(descr) => dtype_of(descr)?,
        Descr::Structure { .. } => {
            return Err(DatasetError::NotInteger { descr: "a structure".into(), kind: '[' });
        }
    };
    let element_bytes = dtype.bytes().into();
    let (_, format) = extent(&header, element_bytes, data_offset, (file_len, version))?;
    Ok(TokenFile { dtype, data_offset, tokens: header.elements, format })
}

/// Describes a `.npy` file as bytes, and says how many belong together: those of all elements with
/// the same index on the first axis. Elements may be of any type of fixed size.
pub fn parse_records(head: &[u8], file_len: u64) -> Result<(TokenFile, u64), DatasetError> {
    let (header, data_offset, version) = header(head)?;
    let element_bytes = header.descr.bytes()?;
    let (data_bytes, format) = extent(&header, element_bytes, data_offset, (file_len, version))?;
    // An array without elements has no record either.
    let record_bytes = data_bytes.checked_div(header.first_axis).unwrap_or(0);
    Ok((TokenFile { dtype: Dtype::U8, data_offset, tokens: data_bytes, format }, record_bytes))
}

/// The header, its length with all before it, and the major version.
fn header(head: &[u8]) -> Result<(Header, u64, u8), DatasetError> {
    let (text_at, text_len, version) = preamble(head)?;
    let data_offset = text_at as u64 + text_len;
    let text = usize::try_from(data_offset).ok().and_then(|end| head.get(text_at..end)).ok_or(
        DatasetError::Truncated { what: "npy header", have: head.len() as u64, need: data_offset },
    )?;
    Ok((Header::parse(text)?, data_offset, version))
}

/// Bytes of the array, which the file has to hold.
fn extent(
    header: &Header,
    element_bytes: u64,
    data_offset: u64,
    (file_len, version): (u64, u8),
) -> Result<(u64, Format), DatasetError> {
    if header.fortran_order {
        return Err(DatasetError::FortranOrder);
    }
    let too_large = DatasetError::TooLarge { field: "shape", value: header.elements };
    let data_bytes = header.elements.checked_mul(element_bytes);
    let end = data_bytes.and_then(|len| len.checked_add(data_offset));
    let (Some(data_bytes), Some(end)) = (data_bytes, end) else {
        return Err(too_large);
    };
    // NumPy too reads the array that the header describes and ignores the bytes after it.
    let trailing_bytes = file_len.checked_sub(end).ok_or(DatasetError::Truncated {
        what: "npy file",
        have: file_len,
        need: end,
    })?;
    Ok((data_bytes, Format::Npy { version, trailing_bytes }))
}

/// Offset and length of the header text, and the major version.
fn preamble(head: &[u8]) -> Result<(usize, u64, u8), DatasetError> {
    let short = |need| DatasetError::Truncated {
        what: "npy header",
        have: head.len() as u64,
        need: need as u64,
    };
    if !head.starts_with(&MAGIC[..MAGIC.len().min(head.len())]) {
        return Err(DatasetError::Magic { format: "npy" });
    }
    let &[major, minor] = head.get(6..8).and_then(|v| v.as_array()).ok_or(short(PREFIX_BYTES))?;
    let (text_at, text_len) = match (major, minor) {
        (1, 0) => (10, head.get(8..10).map(|b| u64::from(b[0]) | u64::from(b[1]) << 8)),
        (2 | 3, 0) => {
            let len = head.get(8..12).and_then(|b| b.as_array());
            (12, len.map(|b| u64::from(u32::from_le_bytes(*b))))
        }
        _ => {
            let version = u64::from(major);
            return Err(DatasetError::Version { format: "npy", version, known: "1.0, 2.0, 3.0" });
        }
    };
    let text_len = text_len.ok_or(short(text_at))?;
    if text_len > MAX_HEADER_BYTES {
        return Err(DatasetError::HeaderTooLong { len: text_len, max: MAX_HEADER_BYTES });
    }
    Ok((text_at, text_len, major))
}

/// The type of the elements.
enum Descr {
    /// A string such as `<u2`.
    Simple(String),
    /// A list of fields.
    Structure {
        /// All of them together.
        bytes: u64,
    },
}

impl Descr {
    /// Bytes of an element.
    fn bytes(&self) -> Result<u64, DatasetError> {
        match self {
            Descr::Simple(descr) => item_bytes(descr),
            Descr::Structure { bytes } => Ok(*bytes),
        }
    }
}

/// Bytes of an element of a simple type: text has four for each character, dates have a unit in
/// brackets.
fn item_bytes(descr: &str) -> Result<u64, DatasetError> {
    let no_records = || DatasetError::NoRecords { descr: descr.into() };
    let unknown = || DatasetError::DtypeName { name: descr.into() };
    let mut chars = descr.chars();
    if !matches!(chars.next(), Some('<' | '>' | '|' | '=')) {
        return Err(unknown());
    }
    let kind = chars.next().ok_or_else(unknown)?;
    let digits = match (kind, chars.as_str()) {
        ('O', _) => return Err(no_records()),
        ('M' | 'm', rest) => rest.split('[').next().unwrap_or(rest),
        ('b' | 'i' | 'u' | 'f' | 'c' | 'S' | 'a' | 'U' | 'V', rest) => rest,
        _ => return Err(unknown()),
    };
    let count: u64 = match digits.bytes().all(|digit| digit.is_ascii_digit()) {
        true => digits.parse().map_err(|_| unknown())?,
        false => return Err(unknown()),
    };
    let bytes = count.checked_mul(if kind == 'U' { 4 } else { 1 });
    bytes.filter(|bytes| *bytes > 0).ok_or_else(no_records)
}

/// The three fields of the dictionary.
struct Header {
    descr: Descr,
    fortran_order: bool,
    elements: u64,
    first_axis: u64,
}

/// Structures in structures.
const MAX_DEPTH: u32 = 8;

impl Header {
    fn parse(text: &[u8]) -> Result<Header, DatasetError> {
        let mut reader = Reader { text, at: 0 };
        let (mut descr, mut fortran_order, mut elements) = (None, None, None);
        reader.expect(b'{', "expected `{`")?;
        while !reader.accept(b'}') {
            let key_at = reader.at;
            let key = reader.string()?;
            reader.expect(b':', "expected `:`")?;
            match key {
                b"descr" => once("descr", &mut descr, reader.descr()?)?,
                b"fortran_order" => once("fortran_order", &mut fortran_order, reader.boolean()?)?,
                b"shape" => once("shape", &mut elements, reader.shape()?)?,
                _ => {
                    return Err(DatasetError::HeaderSyntax { at: key_at, why: "unknown key" });
                }
            }
            if !reader.accept(b',') {
                reader.expect(b'}', "expected `,` or `}`")?;
                break;
            }
        }
        reader.end()?;
        let missing = |field| DatasetError::HeaderField { field, state: "missing" };
        let (elements, first_axis) = elements.ok_or(missing("shape"))?;
        Ok(Header {
            descr: descr.ok_or(missing("descr"))?,
            fortran_order: fortran_order.ok_or(missing("fortran_order"))?,
            elements,
            first_axis,
        })
    }
}

fn once<T>(field: &'static str, slot: &mut Option<T>, value: T) -> Result<(), DatasetError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(DatasetError::HeaderField { field, state: "repeated" }),
    }
}

/// A cursor over the dictionary text.
struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn error(&self, why: &'static str) -> DatasetError {
        DatasetError::HeaderSyntax { at: self.at, why }
    }

    /// The next byte that is not white space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn accept(&mut self, byte: u8) -> bool {
        let hit = self.peek() == Some(byte);
        self.at += usize::from(hit);
        hit
    }

    fn expect(&mut self, byte: u8, why: &'static str) -> Result<(), DatasetError> {
        match self.accept(byte) {
            true => Ok(()),
            false => Err(self.error(why)),
        }
    }

    /// The longest run of bytes from here that `keep` accepts.
    fn run(&mut self, keep: impl Fn(u8) -> bool) -> &'a [u8] {
        let rest = &self.text[self.at..];
        let len = rest.iter().position(|&b| !keep(b)).unwrap_or(rest.len());
        self.at += len;
        &rest[..len]
    }

    fn string(&mut self) -> Result<&'a [u8], DatasetError> {
        let quote = self.peek().filter(|b| matches!(b, b'\'' | b'"'));
        let quote = quote.ok_or_else(|| self.error("expected a quoted string"))?;
        self.at += 1;
        let body = self.run(|b| b != quote && b != b'\\');
        self.expect(quote, "string without an end, or with an escape")?;
        Ok(body)
    }

    fn descr(&mut self) -> Result<Descr, DatasetError> {
        match self.peek() {
            Some(b'[') => Ok(Descr::Structure { bytes: self.structure(MAX_DEPTH)? }),
            _ => Ok(Descr::Simple(self.name()?)),
        }
    }

    fn name(&mut self) -> Result<String, DatasetError> {
        Ok(String::from_utf8_lossy(self.string()?).into_owned())
    }

    /// Bytes of a structure such as `[('id', '<u4'), ('image', '|u1', (3, 32, 32))]`.
    fn structure(&mut self, depth: u32) -> Result<u64, DatasetError> {
        let depth = depth.checked_sub(1).ok_or_else(|| self.error("structures too deep"))?;
        self.expect(b'[', "expected `[`")?;
        let mut total = 0_u64;
        while !self.accept(b']') {
            let bytes = self.field(depth)?;
            let too_large = DatasetError::TooLarge { field: "descr", value: bytes };
            total = total.checked_add(bytes).ok_or(too_large)?;
            if !self.accept(b',') {
                self.expect(b']', "expected `,` or `]`")?;
                break;
            }
        }
        match total {
            0 => Err(DatasetError::NoRecords { descr: "an empty structure".into() }),
            total => Ok(total),
        }
    }

    /// Bytes of a field: its name, or title and name; its type; the shape of an array in it.
    fn field(&mut self, depth: u32) -> Result<u64, DatasetError> {
        self.expect(b'(', "expected `(`")?;
        if self.accept(b'(') {
            self.string()?;
            self.expect(b',', "expected `,`")?;
            self.string()?;
            self.expect(b')', "expected `)`")?;
        } else {
            self.string()?;
        }
        self.expect(b',', "expected `,`")?;
        let bytes = match self.peek() {
            Some(b'[') => self.structure(depth)?,
            _ => item_bytes(&self.name()?)?,
        };
        let elements = match self.accept(b',') && self.peek() == Some(b'(') {
            true => self.shape()?.0,
            false => 1,
        };
        self.accept(b',');
        self.expect(b')', "expected `)`")?;
        let too_large = DatasetError::TooLarge { field: "descr", value: elements };
        bytes.checked_mul(elements).ok_or(too_large)
    }

    fn boolean(&mut self) -> Result<bool, DatasetError> {
        self.peek();
        match self.run(|b| b.is_ascii_alphabetic()) {
            b"True" => Ok(true),
            b"False" => Ok(false),
            _ => Err(self.error("expected True or False")),
        }
    }

    /// The product of the axes of a tuple such as `(3, 5)`, `(7,)`, and the first of them.
    fn shape(&mut self) -> Result<(u64, u64), DatasetError> {
        self.expect(b'(', "expected `(`")?;
        let (mut axes, mut empty, mut elements, mut first) = (0u32, false, 1u64, 0);
        while !self.accept(b')') {
            let axis = self.integer()?;
            if axes == 0 {
                first = axis;
            }
            axes += 1;
            empty |= axis == 0;
            // A zero axis makes the array empty whatever the others are, so those need not fit.
            elements = match elements.checked_mul(axis.max(1)) {
                Some(product) => product,
                None => {
                    return Err(DatasetError::TooLarge { field: "shape", value: axis });
                }
            };
            if !self.accept(b',') {
                self.expect(b')', "expected `,` or `)`")?;
                break;
            }
        }
        match (axes, empty) {
            (0, _) => Err(DatasetError::Scalar),
            (_, true) => Ok((0, first)),
            (_, false) => Ok((elements, first)),
        }
    }

    fn integer(&mut self) -> Result<u64, DatasetError> {
        self.peek();
        let digits = self.run(|b| b.is_ascii_digit());
        let text = core::str::from_utf8(digits).unwrap_or_default();
        let value = text.parse().map_err(|_| self.error("expected an axis length below 2^64"))?;
        // Python 2 wrote long integers with this suffix.
        self.accept(b'L');
        Ok(value)
    }

    /// Only padding may follow the dictionary.
    fn end(&mut self) -> Result<(), DatasetError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.error("bytes behind the dictionary")),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{format, vec::Vec};

    fn file(version: u8, dict: &str) -> Vec<u8> {
        let mut out = Vec::from(MAGIC);
        out.extend([version, 0]);
        match version {
            1 => out.extend((dict.len() as u16).to_le_bytes()),
            _ => out.extend((dict.len() as u32).to_le_bytes()),
        }
        out.extend(dict.as_bytes());
        out
    }

    fn dict(descr: &str, fortran: &str, shape: &str) -> String {
        format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}     \n")
    }

    #[test]
    fn headers_as_numpy_writes_them() {
        for version in 1..=3 {
            let head = file(version, &dict("<u2", "False", "(1000,)"));
            let parsed = parse(&head, head.len() as u64 + 2_000).unwrap();
            assert_eq!(parsed.dtype, Dtype::U16);
            assert_eq!(parsed.tokens, 1_000);
            assert_eq!(parsed.data_offset, head.len() as u64);
            assert_eq!(parsed.format, Format::Npy { version, trailing_bytes: 0 });
            assert_eq!(header_bytes(&head[..12]).unwrap(), head.len() as u64);
        }
        let head = file(1, &dict("<i8", "False", "(3, 5, 7)"));
        assert_eq!(parse(&head, head.len() as u64 + 840).unwrap().tokens, 105);
        let head = file(1, &dict("<i4", "False", "(12L,)"));
        assert_eq!(parse(&head, head.len() as u64 + 48).unwrap().tokens, 12);
        let head = file(1, &dict("<i4", "False", "(18446744073709551615, 0)"));
        assert_eq!(parse(&head, head.len() as u64).unwrap().tokens, 0);
    }

    #[test]
    fn bytes_behind_the_array_are_told_and_ignored() {
        for (data, trailing_bytes) in [(12, 0), (16, 4), (13, 1)] {
            let head = file(1, &dict("<u4", "False", "(3,)"));
            let parsed = parse(&head, head.len() as u64 + data).unwrap();
            assert_eq!(parsed.tokens, 3);
            assert_eq!(parsed.format, Format::Npy { version: 1, trailing_bytes });
        }
    }

    /// Headers written by NumPy 2.4 for `numpy.arange(5, dtype='<u2')` and others.
    #[test]
    fn files_written_by_numpy() {
        let file = |head: &[u8], dict: &str, data: usize| {
            let padding = 127 - head.len() - dict.len();
            let text = format!("{dict}{:padding$}\n", "");
            let bytes = [head, text.as_bytes(), &std::vec![0; data]].concat();
            parse(&bytes, bytes.len() as u64)
        };
        let one = b"\x93NUMPY\x01\x00v\x00";
        let two = b"\x93NUMPY\x02\x00t\x00\x00\x00";
        let three = b"\x93NUMPY\x03\x00t\x00\x00\x00";
        let vector = file(one, "{'descr': '<u2', 'fortran_order': False, 'shape': (5,), }", 10);
        let vector = vector.unwrap();
        assert_eq!((vector.dtype, vector.tokens, vector.data_offset), (Dtype::U16, 5, 128));
        let matrix = file(two, "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }", 24);
        assert_eq!((matrix.as_ref().unwrap().dtype, matrix.unwrap().tokens), (Dtype::I32, 6));
        let empty = file(three, "{'descr': '<u4', 'fortran_order': False, 'shape': (0, 7), }", 0);
        assert_eq!(empty.unwrap().tokens, 0);
        let columns = file(one, "{'descr': '<u2', 'fortran_order': True, 'shape': (2, 3), }", 12);
        assert_eq!(columns, Err(DatasetError::FortranOrder));
    }

    #[test]
    fn refusals_by_reason() {
        let cases = [
            (dict("<f8", "False", "(4,)"), "not-integer"),
            (dict(">u4", "False", "(4,)"), "big-endian"),
            (dict("|u1", "False", "(4,)"), "not-tokens"),
            (dict("<u4", "True", "(4,)"), "fortran-order"),
            (dict("<u4", "False", "()"), "scalar"),
            (dict("<u4", "False", "(5,)"), "truncated"),
            (dict("<u4", "False", "(4294967296, 4294967296)"), "too-large"),
            (dict("<u4", "False", "(9223372036854775807,)"), "too-large"),
            (dict("<u4", "False", "(-4,)"), "header-syntax"),
            (dict("<u4", "False", "(99999999999999999999,)"), "header-syntax"),
            (dict("<u4", "Maybe", "(4,)"), "header-syntax"),
            (
                "{'descr': [('a', '<u4')], 'fortran_order': False, 'shape': (4,)}".into(),
                "not-integer",
            ),
            ("{'descr': '<u4', 'descr': '<u4'}".into(), "header-field"),
            ("{'descr': '<u4', 'shape': (4,)}".into(), "header-field"),
            ("{'descr': '<u4', 'colour': 3}".into(), "header-syntax"),
            ("{} trailing".into(), "header-syntax"),
            ("__import__('os')".into(), "header-syntax"),
            ("".into(), "header-syntax"),
        ];
        for (text, reason) in cases {
            let head = file(1, &text);
            let error = parse(&head, head.len() as u64 + 16).unwrap_err();
            assert_eq!(error.reason(), reason, "{text}: {error}");
        }
    }

    #[test]
    fn records_are_of_any_type_of_fixed_size() {
        let image = "[('label', '|u1'), ('', '|V3'), ('image', '<f4', (3, 32, 32)), ]";
        let nested = "[('a', [('x', '>i2'), (('title', 'y'), '|S5')], (2,)), ('when', '<M8[ns]')]";
        for (descr, shape, bytes, record) in [
            ("'|u1'", "(10, 28, 28)", 7_840, 784),
            ("'|u1'", "(7,)", 7, 1),
            ("'<f8'", "(4, 3)", 96, 24),
            ("'>u4'", "(5,)", 20, 4),
            ("'<U5'", "(2,)", 40, 20),
            ("'<M8[ns]'", "(2, 2)", 32, 16),
            ("'|V16'", "(3,)", 48, 16),
            (image, "(2,)", 24_584, 12_292),
            (nested, "(3, 2)", 132, 44),
            ("'|b1'", "(0, 9)", 0, 0),
            ("'|b1'", "(4, 0)", 0, 0),
        ] {
            let text = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}");
            let head = file(1, &text);
            let (parsed, found) = parse_records(&head, head.len() as u64 + bytes + 2).unwrap();
            assert_eq!((parsed.dtype, parsed.tokens, found), (Dtype::U8, bytes, record), "{text}");
            assert_eq!(parsed.format, Format::Npy { version: 1, trailing_bytes: 2 });
            let short = parse_records(&head, head.len() as u64 + bytes.max(1) - 1);
            assert!(bytes == 0 || short.unwrap_err().reason() == "truncated", "{text}");
        }
        let deep = format!("{}'<u4'{}", "[('a', ".repeat(9), ")]".repeat(9));
        for (descr, reason) in [
            ("'|O'", "no-records"),
            ("[('a', '|O8')]", "no-records"),
            ("'|S0'", "no-records"),
            ("[]", "no-records"),
            ("'<q4'", "dtype-name"),
            ("'u4'", "dtype-name"),
            ("'<u+4'", "dtype-name"),
            ("''", "dtype-name"),
            ("[('a')]", "header-syntax"),
            ("[('a', '<u4', 3)]", "header-syntax"),
            ("[('a', '<u4'", "header-syntax"),
            (deep.as_str(), "header-syntax"),
            ("[('a', '|V4294967296', (4294967296,))]", "too-large"),
            ("[('a', '|V9223372036854775808'), ('b', '|V9223372036854775808')]", "too-large"),
            ("'<U9223372036854775808'", "no-records"),
        ] {
            let text = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (4,), }}");
            let error = parse_records(&file(1, &text), u64::MAX).unwrap_err();
            assert_eq!(error.reason(), reason, "{text}: {error}");
        }
        let columns = file(1, &dict("<u4", "True", "(2, 2)"));
        assert_eq!(parse_records(&columns, u64::MAX), Err(DatasetError::FortranOrder));
    }

    #[test]
    fn every_prefix_of_a_header_is_refused_without_panic() {
        let head = file(2, &dict("<u4", "False", "(4,)"));
        for len in 0..head.len() {
            let error = parse(&head[..len], head.len() as u64 + 16).unwrap_err();
            assert!(matches!(error, DatasetError::Truncated { .. }), "{len}: {error}");
        }
        let mut long = file(2, "");
        long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(parse(&long, u64::MAX).unwrap_err().reason(), "header-too-long");
        let mut version = head.clone();
        version[6] = 4;
        assert_eq!(parse(&version, 0).unwrap_err().reason(), "version");
        assert_eq!(parse(b"PK\x03\x04", 4).unwrap_err().reason(), "magic");
    }

    proptest! {
        #[test]
        fn no_input_panics_and_what_is_accepted_fits(
            text in prop_oneof![
                "\\{'descr': (\\[|\\(|\\]|\\)|'a'|'<u4'|, |3){0,12}, 'fortran_order': False, 'shape': \\([0-9]{1,20},\\)\\}",
                "[{}'a-z_:(), 0-9FTLu<>|]{0,80}",
                "\\{'descr': '[<>|][uif][1248]', 'fortran_order': (True|False), 'shape': \\([0-9]{1,20},\\)\\}",
            ],
            len in any::<u32>(),
        ) {
            let head = file(1, &text);
            if let Ok((parsed, record_bytes)) = parse_records(&head, len.into()) {
                prop_assert!(parsed.data_offset + parsed.tokens <= u64::from(len));
                prop_assert!(record_bytes <= parsed.tokens);
            }
            if let Ok(parsed) = parse(&head, len.into()) {
                let Format::Npy { trailing_bytes, .. } = parsed.format else { unreachable!() };
                let described = parsed.data_offset + parsed.data_bytes();
                prop_assert_eq!(described + trailing_bytes, u64::from(len));
            }
        }
    }
}
