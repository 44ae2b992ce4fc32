//! One line of JSON: the text of one field.
//!
//! Only the wanted field is kept; the others are checked and skipped. As in Python's `json`, the last of two fields of
//! one name counts.

use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The field that holds the text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<'a> {
    name: &'a str,
}

impl<'a> Field<'a> {
    pub(super) fn new(name: &'a str) -> Field<'a> {
        Field { name }
    }

    /// Appends the text of the field in this line to `text`; after an error, part of it may have been.
    ///
    /// # Errors
    /// Why the line is broken.
    pub(super) fn append(self, line: &[u8], text: &mut String) -> Result<(), String> {
        let line = std::str::from_utf8(line)
            .map_err(|error| format!("not UTF-8 at byte {}", error.valid_up_to()))?;
        let mut parser = serde_json::Deserializer::from_str(line);
        let parsed = Object { name: self.name, text }.deserialize(&mut parser);
        parsed.and_then(|()| parser.end()).map_err(|error| {
            // The parser counts lines, but there is only one.
            error.to_string().replace("line 1 column", "column")
        })
    }
}

struct Object<'a> {
    name: &'a str,
    text: &'a mut String,
}

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let start = self.text.len();
        let mut found = false;
        while let Some(wanted) = map.next_key_seed(Name(self.name))? {
            if wanted {
                found = true;
                self.text.truncate(start);
                map.next_value_seed(Text { name: self.name, text: &mut *self.text })?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        let missing = || Error::custom(format_args!("no field `{}`", self.name));
        if found { Ok(()) } else { Err(missing()) }
    }
}

/// Whether a key is this name.
struct Name<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<bool, E> {
        Ok(name == self.0)
    }
}

/// The value of the field.
struct Text<'a> {
    name: &'a str,
    text: &'a mut String,
}

impl Text<'_> {
    fn refuse<E: Error>(&self, found: &str) -> E {
        E::custom(format_args!("field `{}` is {found}, not a string", self.name))
    }
}

impl<'de> DeserializeSeed<'de> for Text<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Text<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.text.push_str(text);
        Ok(())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Err(self.refuse("null"))
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        Err(self.refuse("a boolean"))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        Err(self.refuse("a number"))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        Err(self.refuse("a number"))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        Err(self.refuse("a number"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(self.refuse("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(self.refuse("an object"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn text(line: impl AsRef<[u8]>) -> Result<String, String> {
        let mut text = String::new();
        Field::new("text").append(line.as_ref(), &mut text).map(|()| text)
    }

    #[test]
    fn the_field_is_found_among_others() {
        let line = r#"{"id":[1,{"text":"no"}],"text":"a\n\u00e9\ud83d\ude00","meta":{"text":1}}"#;
        assert_eq!(text(line).as_deref(), Ok("a\n\u{e9}\u{1f600}"));
        assert_eq!(text(r#"{"text":"first","text":"last"}"#).as_deref(), Ok("last"));
        assert_eq!(text(r#" {"te\u0078t" : "escaped name"} "#).as_deref(), Ok("escaped name"));
        assert_eq!(text(r#"{"text":""}"#).as_deref(), Ok(""));
    }

    #[test]
    fn broken_lines_say_why() {
        for (line, why) in [
            (&br#"{"other":"x"}"#[..], "no field `text`"),
            (br#"{"text":null}"#, "field `text` is null, not a string"),
            (br#"{"text":1.5}"#, "field `text` is a number"),
            (br#"{"text":[1]}"#, "field `text` is a list"),
            (br#"{"text":{}}"#, "field `text` is an object"),
            (br#"["text"]"#, "expected a JSON object"),
            (br#"{"text":"cut off"#, "EOF while parsing"),
            (br#"{"text":"a"} {"text":"b"}"#, "trailing characters at column 14"),
            (br#"{"text":"\ud800"}"#, "escape"),
            (b"{\"text\":\"a\tb\"}", "control character"),
            (b"{\"text\":\"a\xff\"}", "not UTF-8 at byte 10"),
            (b"{\"other\":\"\xff\",\"text\":\"a\"}", "not UTF-8 at byte 10"),
        ] {
            let reason = text(line).unwrap_err();
            assert!(reason.contains(why), "{}: {reason}", String::from_utf8_lossy(line));
        }
        let deep = "[".repeat(100_000);
        // Skipped without recursion, and refused before any.
        assert!(text(format!("{{\"a\":{deep}")).unwrap_err().contains("EOF"));
        assert!(text(format!("{{\"text\":{deep}")).unwrap_err().contains("a list"));
    }
}
