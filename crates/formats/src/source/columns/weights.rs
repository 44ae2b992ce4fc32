//! A column of lists beside that of the tokens with the [loss weight](crate::source::weights) of
//! each of them.

use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float16Type, Float32Type, Float64Type};
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, Schema};

use super::targets::numbers;
use super::{Lists, column_of, list_type};
use crate::error::Error;
use crate::source::weights::{HINT, append};

/// The column.
#[derive(Clone, Debug)]
pub(super) struct Weights {
    pub(super) column: usize,
    pub(super) name: String,
}

impl Weights {
    /// Finds the column of this name.
    pub(super) fn find(path: &Path, schema: &Schema, name: &str) -> Result<Weights, Error> {
        let (column, field) = column_of(path, schema, name)?;
        let is_float = matches!(
            field.data_type(),
            DataType::List(of) | DataType::LargeList(of) | DataType::FixedSizeList(of, _)
                if of.data_type().is_floating() || *of.data_type() == DataType::Boolean
        );
        if !is_float && list_type(field.data_type()).is_none() {
            let why = format!("column {name:?} holds no lists of numbers");
            return Err(Error::refused(path, why, HINT));
        }
        Ok(Weights { column, name: name.to_owned() })
    }
}

type Values<'a> = Box<dyn Fn(usize) -> f64 + 'a>;

/// The values of an array of numbers.
fn values(array: &ArrayRef) -> Option<Values<'_>> {
    macro_rules! of {
        ($type:ty) => {{
            let values = array.as_primitive_opt::<$type>()?.values();
            Box::new(move |at| f64::from(values[at]))
        }};
    }
    Some(match array.data_type() {
        DataType::Float16 => of!(Float16Type),
        DataType::Float32 => of!(Float32Type),
        DataType::Float64 => of!(Float64Type),
        _ => {
            let numbers = numbers(array)?;
            Box::new(move |at| numbers(at) as f64)
        }
    })
}

/// The weights of rows.
pub(super) struct Weighted<'a> {
    path: &'a Path,
    name: &'a str,
    /// Number of the first row in its file.
    first: u64,
    lists: Lists<'a>,
    value: Values<'a>,
}

impl<'a> Weighted<'a> {
    pub(super) fn new(
        path: &'a Path,
        weights: &'a Weights,
        first: u64,
        column: &'a ArrayRef,
    ) -> Result<Weighted<'a>, Error> {
        let lists = Lists::new(column);
        let value = values(lists.values)
            .ok_or_else(|| Error::corrupt(path, "has another type than its schema"))?;
        Ok(Weighted { path, name: &weights.name, first, lists, value })
    }

    /// The weights of a row of so many tokens.
    pub(super) fn row(&self, row: usize, tokens: usize) -> Result<Vec<u8>, Error> {
        let places = self.lists.row(self.path, self.first, row)?;
        let refused = |why: &dyn std::fmt::Display| {
            Error::refused(self.path, format!("row {}: {why}", self.first + row as u64), HINT)
        };
        let value = |at| (self.value)(places.start + at);
        append((self.name, tokens, places.len()), value, &refused)
    }
}
