//! Which tokens of a row are targets: a column of lists beside that of the tokens.
//!
//! A mask holds 1 or `true` for each target, and 0 or `false` for every other token. Labels, as collators of Hugging Face make
//! them, hold the token itself, and -100 in place of a token that is no target. Integers are labels when the first row
//! that tells them apart holds anything but 0 and 1; each row is then checked against that. Nothing is guessed of one row.

use std::ops::Range;
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, Schema};

use super::{Lists, list_type, raw_values};
use crate::error::Error;
use crate::manifest::MAX_TURNS;
use crate::source::{MAX_PIECE, Sink};

/// The label of a token that is no target.
const IGNORED: i128 = -100;

/// Longest run of tokens of one kind: a sequence of a Megatron index.
const MAX_RUN: usize = i32::MAX as usize;

const HINT: &str = "a mask holds 1 for a target and 0 for other tokens, or booleans; labels hold -100 or the token itself";

/// What a column of targets holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Mask,
    Labels,
}

impl Form {
    /// Whether the token is a target; none when the value says nothing about it.
    fn is_target(self, value: i128, token: i128) -> Option<bool> {
        match (self, value) {
            (Form::Mask, 0 | 1) => Some(value == 1),
            (Form::Labels, IGNORED) => Some(false),
            (Form::Labels, label) if label == token => Some(true),
            _ => None,
        }
    }
}

/// The column, once it is known what it holds.
#[derive(Clone, Debug)]
pub(super) struct Targets {
    pub(super) column: usize,
    pub(super) name: String,
    pub(super) form: Form,
}

impl Targets {
    /// Finds the column of this name.
    pub(super) fn find(path: &Path, schema: &Schema, name: &str) -> Result<Targets, Error> {
        let Some((column, field)) = schema.column_with_name(name) else {
            let shown: Vec<&str> = schema.fields().iter().map(|f| f.name().as_str()).collect();
            let hint = format!("its columns are {}", shown.join(", "));
            return Err(Error::refused(path, format!("has no column {name:?}"), hint));
        };
        let is_mask = matches!(
            field.data_type(),
            DataType::List(of) | DataType::LargeList(of) | DataType::FixedSizeList(of, _)
                if *of.data_type() == DataType::Boolean
        );
        if !is_mask && list_type(field.data_type()).is_none() {
            let why = format!("column {name:?} holds no lists of booleans or integers");
            return Err(Error::refused(path, why, HINT));
        }
        Ok(Targets { column, name: name.to_owned(), form: Form::Mask })
    }
}

type Numbers<'a> = Box<dyn Fn(usize) -> i128 + 'a>;

/// The values of an array of booleans or integers.
fn numbers(array: &ArrayRef) -> Option<Numbers<'_>> {
    macro_rules! of {
        ($type:ty) => {{
            let values = array.as_primitive_opt::<$type>()?.values();
            Box::new(move |at| i128::from(values[at]))
        }};
    }
    Some(match array.data_type() {
        DataType::Boolean => {
            let values = array.as_boolean_opt()?;
            Box::new(move |at| i128::from(values.value(at)))
        }
        DataType::UInt8 => of!(UInt8Type),
        DataType::Int8 => of!(Int8Type),
        DataType::UInt16 => of!(UInt16Type),
        DataType::Int16 => of!(Int16Type),
        DataType::UInt32 => of!(UInt32Type),
        DataType::Int32 => of!(Int32Type),
        DataType::UInt64 => of!(UInt64Type),
        DataType::Int64 => of!(Int64Type),
        _ => return None,
    })
}

/// Rows of both columns.
pub(super) struct Rows<'a> {
    path: &'a Path,
    targets: &'a Targets,
    /// Number of the first row in its file.
    first: u64,
    tokens: Lists<'a>,
    marks: Lists<'a>,
    token: Numbers<'a>,
    mark: Numbers<'a>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(
        path: &'a Path,
        targets: &'a Targets,
        first: u64,
        [tokens, marks]: [&'a ArrayRef; 2],
    ) -> Result<Rows<'a>, Error> {
        let (tokens, marks) = (Lists::new(tokens), Lists::new(marks));
        let other = || Error::corrupt(path, "has another type than its schema");
        let token = numbers(tokens.values).ok_or_else(other)?;
        let mark = numbers(marks.values).ok_or_else(other)?;
        Ok(Rows { path, targets, first, tokens, marks, token, mark })
    }

    fn refused(&self, row: usize, why: impl std::fmt::Display) -> Error {
        Error::refused(self.path, format!("row {}: {why}", self.first + row as u64), HINT)
    }

    /// Where the lists of a row are.
    fn row(&self, row: usize) -> Result<[Range<usize>; 2], Error> {
        let name = &self.targets.name;
        let tokens = self.tokens.row(self.path, self.first, row)?;
        let marks = self.marks.row(self.path, self.first, row)?;
        if tokens.len() != marks.len() {
            let (count, marks) = (tokens.len(), marks.len());
            let why = format!("`{name}` holds {marks} values for {count} tokens");
            return Err(self.refused(row, why));
        }
        if tokens.len() > MAX_RUN {
            return Err(self.refused(row, format_args!("has more than {MAX_RUN} tokens")));
        }
        Ok([tokens, marks])
    }

    /// Whether they have a token at all.
    pub(super) fn hold_tokens(&self) -> bool {
        (0..self.tokens.column.len())
            .any(|row| self.row(row).is_ok_and(|[tokens, _]| !tokens.is_empty()))
    }

    /// Whether the values are booleans, which are no labels.
    pub(super) fn are_booleans(&self) -> bool {
        *self.marks.values.data_type() == DataType::Boolean
    }

    /// What the column holds, as far as these rows tell. Rows that are invalid are refused when they are read.
    pub(super) fn form(&self) -> Option<Form> {
        (0..self.tokens.column.len()).find_map(|row| {
            let [tokens, marks] = self.row(row).ok()?;
            let mut mask = None;
            for (token, mark) in tokens.zip(marks) {
                match (self.mark)(mark) {
                    0 | 1 if (self.mark)(mark) == (self.token)(token) => {}
                    0 | 1 => mask = Some(Form::Mask),
                    _ => return Some(Form::Labels),
                }
            }
            mask
        })
    }

    /// Passes the rows on, each a document whose sequences take turns.
    pub(super) fn pass(&self, sink: &mut dyn Sink) -> Result<(), Error> {
        let (bytes, width) = raw_values(self.tokens.values)
            .ok_or_else(|| Error::corrupt(self.path, "has another type than its schema"))?;
        let put = |sink: &mut dyn Sink, run: Range<usize>| {
            let run = bytes.get(run.start * width..run.end * width).unwrap_or_default();
            run.chunks(MAX_PIECE).try_for_each(|piece| sink.tokens(piece))
        };
        for row in 0..self.tokens.column.len() {
            let [tokens, marks] = self.row(row)?;
            let (start, end) = (tokens.start, tokens.end);
            let (mut begun, mut is_target, mut turns) = (start, false, 1_u64);
            for (at, mark) in tokens.zip(marks) {
                let (value, token) = ((self.mark)(mark), (self.token)(at));
                let found = self.targets.form.is_target(value, token).ok_or_else(|| {
                    let (at, name) = (at - start, &self.targets.name);
                    let why = format!("token {at} is {token}, and `{name}` holds {value} for it");
                    self.refused(row, why)
                })?;
                if found != is_target {
                    put(sink, begun..at)?;
                    sink.end_sequence()?;
                    (begun, is_target, turns) = (at, found, turns + 1);
                    if turns > MAX_TURNS {
                        let why = format_args!("targets begin or end more than {MAX_TURNS} times");
                        return Err(self.refused(row, why));
                    }
                }
            }
            put(sink, begun..end)?;
            sink.end_document()?;
        }
        Ok(())
    }
}
