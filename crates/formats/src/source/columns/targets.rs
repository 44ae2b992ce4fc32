//! A column of lists beside that of the tokens that says which of them are
//! [targets](crate::source::turns).

use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, Schema};

use super::{Lists, Weighted, column_of, list_type, raw_values};
use crate::error::Error;
use crate::source::Sink;
use crate::source::turns::{Form, HINT, Row, Told};
use crate::source::weights as loss_weights;

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
        let (column, field) = column_of(path, schema, name)?;
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
pub(super) fn numbers(array: &ArrayRef) -> Option<Numbers<'_>> {
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

    fn refused(&self, row: usize, why: &dyn Display) -> Error {
        Error::refused(self.path, format!("row {}: {why}", self.first + row as u64), HINT)
    }

    /// Calls `each` with a row, and where its tokens are.
    fn with_row<T>(
        &self,
        row: usize,
        each: impl FnOnce(&Row<'_>, Range<usize>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let tokens = self.tokens.row(self.path, self.first, row)?;
        let marks = self.marks.row(self.path, self.first, row)?;
        let row = Row {
            name: &self.targets.name,
            tokens: tokens.len(),
            values: marks.len(),
            token: &|at| (self.token)(tokens.start + at),
            value: &|at| (self.mark)(marks.start + at),
        };
        each(&row, tokens.clone())
    }

    /// Whether the values are booleans, which are no labels.
    pub(super) fn are_booleans(&self) -> bool {
        *self.marks.values.data_type() == DataType::Boolean
    }

    /// What the column holds, as far as these rows tell.
    pub(super) fn told(&self) -> Told {
        let mut all = Told::Nothing;
        for row in 0..self.tokens.column.len() {
            match self.with_row(row, |row, _| Ok(row.told())) {
                Ok(Told::Form(form)) => return Told::Form(form),
                Ok(Told::Both) => all = Told::Both,
                // Rows that are invalid are refused when they are read.
                Ok(Told::Nothing) | Err(_) => {}
            }
        }
        all
    }

    /// Passes the rows on, each a document whose sequences take turns.
    pub(super) fn pass(
        &self,
        weights: Option<&Weighted<'_>>,
        sink: &mut dyn Sink,
    ) -> Result<(), Error> {
        let (bytes, width) = raw_values(self.tokens.values)
            .ok_or_else(|| Error::corrupt(self.path, "has another type than its schema"))?;
        for number in 0..self.tokens.column.len() {
            self.with_row(number, |row, tokens| {
                let weights = weights.map(|all| all.row(number, tokens.len())).transpose()?;
                let put = |sink: &mut dyn Sink, run: Range<usize>| {
                    let weights = weights.as_ref().map(|row| {
                        &row[run.start * loss_weights::WEIGHT_BYTES
                            ..run.end * loss_weights::WEIGHT_BYTES]
                    });
                    let (start, end) = (tokens.start + run.start, tokens.start + run.end);
                    let run = bytes.get(start * width..end * width).unwrap_or_default();
                    loss_weights::pass(sink, run, width, weights)
                };
                row.pass(self.targets.form, sink, &put, &|why| self.refused(number, why))
            })?;
        }
        Ok(())
    }
}
