//! The part of JSON that one document needs: built as a tree, written once.
//!
//! A library loaded by every RDMA program should have few dependencies, and nothing in here is ever
//! parsed.

use std::fmt::{self, Write};

/// A JSON value. Numbers are whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Null,
    Truth(bool),
    Number(u64),
    Text(String),
    List(Vec<Value>),
    Object(Vec<(&'static str, Value)>),
}

impl From<bool> for Value {
    fn from(truth: bool) -> Value {
        Value::Truth(truth)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Number(number)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Value {
        Value::Number(number.into())
    }
}

impl From<u8> for Value {
    fn from(number: u8) -> Value {
        Value::Number(number.into())
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Value {
        Value::Number(number as u64)
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(text)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Value {
        value.map_or(Value::Null, T::into)
    }
}

impl<T: Into<Value>> FromIterator<T> for Value {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Value {
        Value::List(items.into_iter().map(T::into).collect())
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Null => f.write_str("null"),
            Value::Truth(truth) => truth.fmt(f),
            Value::Number(number) => number.fmt(f),
            Value::Text(text) => quote(f, text),
            Value::List(items) => {
                separated(f, ('[', ']'), items.iter(), |f, item| write!(f, "{item}"))
            }
            Value::Object(members) => {
                separated(f, ('{', '}'), members.iter(), |f, (name, value)| {
                    quote(f, name)?;
                    write!(f, ":{value}")
                })
            }
        }
    }
}

fn separated<T>(
    f: &mut fmt::Formatter<'_>,
    (open, close): (char, char),
    items: impl Iterator<Item = T>,
    mut one: impl FnMut(&mut fmt::Formatter<'_>, T) -> fmt::Result,
) -> fmt::Result {
    f.write_char(open)?;
    for (at, item) in items.enumerate() {
        if at > 0 {
            f.write_char(',')?;
        }
        one(f, item)?;
    }
    f.write_char(close)
}

fn quote(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_char('"')?;
    for c in text.chars() {
        match c {
            '"' | '\\' => write!(f, "\\{c}")?,
            '\n' => f.write_str("\\n")?,
            c if c.is_control() => write!(f, "\\u{:04x}", u32::from(c))?,
            c => f.write_char(c)?,
        }
    }
    f.write_char('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_json() {
        let value = Value::Object(vec![
            ("a", Value::from_iter([1_u64, 2])),
            ("b", Value::from(None::<u64>)),
            ("c", Value::from("x\"\\\n\u{1}é")),
            ("d", Value::Object(vec![])),
            ("e", Value::from(true)),
        ]);
        let text = r#"{"a":[1,2],"b":null,"c":"x\"\\\n\u0001é","d":{},"e":true}"#;
        assert_eq!(value.to_string(), text);
    }
}
