//! One line of JSON: the text of one field of each object in it, or the objects themselves.
//!
//! Only what is wanted is kept; the others are checked and skipped. As in Python's `json`, the last
//! of two fields of one name counts. What that module writes and reads beyond the standard is read,
//! too: `NaN` and `Infinity` among the values, and halves of surrogate pairs in texts, which become
//! U+FFFD, as in tiktoken. Files that were put together without a thought have byte order marks
//! before any line and several objects in one; both are read.
//!
//! Lines that conform are parsed once. Others cost a few passes over the object that does not.

use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Most objects of a line; bounds memory.
const MAX_OBJECTS: usize = 1 << 14;

/// What is taken of each object.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted<'a> {
    /// The text of the field of this name.
    Field(&'a str),
    /// The object itself, as JSON.
    Object,
}

impl Wanted<'_> {
    /// Appends what is wanted of each object of this line to `text`, and passes on how each ended:
    /// `text` ends with it, or with what it held before and why it is broken.
    pub(super) fn read(
        self,
        line: &[u8],
        text: &mut String,
        each: &mut dyn FnMut(&mut String, Result<(), String>),
    ) {
        let mut rest = match std::str::from_utf8(line) {
            Ok(line) => trimmed(line),
            Err(error) => {
                return each(text, Err(format!("not UTF-8 at byte {}", error.valid_up_to())));
            }
        };
        for number in 0.. {
            if rest.is_empty() {
                return;
            }
            if number == MAX_OBJECTS {
                return each(text, Err(format!("more than {MAX_OBJECTS} objects in a line")));
            }
            let start = text.len();
            let mut parser = serde_json::Deserializer::from_str(rest);
            let parsed = self.parse(&mut parser, text);
            if parsed.is_ok() && parser.end().is_ok() {
                self.keep(rest, text);
                return each(text, Ok(()));
            }
            let object = &rest[..object_end(rest).unwrap_or(rest.len())];
            let result = parsed.map(|()| self.keep(object, text)).or_else(|error| {
                text.truncate(start);
                match conforming(object) {
                    Some(object) => self.read_alone(&object, text),
                    None => Err(described(&error)),
                }
            });
            if result.is_err() {
                text.truncate(start);
            }
            each(text, result);
            rest = trimmed(&rest[object.len()..]);
        }
    }

    /// Appends the text of an object that has nothing behind it.
    fn read_alone(self, object: &str, text: &mut String) -> Result<(), String> {
        let mut parser = serde_json::Deserializer::from_str(object);
        let parsed = self.parse(&mut parser, text).and_then(|()| parser.end());
        parsed.map_err(|error| described(&error))?;
        self.keep(object, text);
        Ok(())
    }

    /// Reads an object, and appends the text of the wanted field.
    fn parse<'de>(
        self,
        parser: impl Deserializer<'de, Error = serde_json::Error>,
        text: &mut String,
    ) -> Result<(), serde_json::Error> {
        match self {
            Wanted::Field(name) => Object { name, text }.deserialize(parser),
            Wanted::Object => parser.deserialize_map(Whole),
        }
    }

    /// Appends an object that was read.
    fn keep(self, object: &str, text: &mut String) {
        if let Wanted::Object = self {
            *text += object;
        }
    }
}

/// Without blanks and byte order marks at both ends.
fn trimmed(line: &str) -> &str {
    line.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\u{feff}')
}

pub(super) fn described(error: &serde_json::Error) -> String {
    // The parser counts lines, but there is only one.
    error.to_string().replace("line 1 column", "column")
}

/// Where the object or list ends that a line begins with.
fn object_end(line: &str) -> Option<usize> {
    let (mut depth, mut in_text, mut is_escaped) = (0_usize, false, false);
    for (at, byte) in line.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_text => is_escaped = true,
            b'{' | b'[' if !in_text => depth += 1,
            _ if depth == 0 => return None,
            b'"' => in_text = !in_text,
            b'}' | b']' if !in_text => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// The object as the standard has it: numbers that are none become null, halves of surrogate pairs
/// U+FFFD. None where it holds neither.
pub(super) fn conforming(object: &str) -> Option<String> {
    let mut written = String::with_capacity(object.len());
    let (mut rest, mut in_text, mut is_changed) = (object, false, false);
    loop {
        let stops: &[char] = if in_text { &['"', '\\'] } else { &['"', 'N', 'I', '-'] };
        let Some(next) = rest.find(stops) else {
            written += rest;
            return is_changed.then_some(written);
        };
        written += &rest[..next];
        rest = &rest[next..];
        let (instead, length) = match rest.as_bytes()[0] {
            b'"' => {
                in_text = !in_text;
                ("\"", 1)
            }
            b'\\' => escape(rest),
            _ => ["NaN", "Infinity", "-Infinity"]
                .iter()
                .find(|word| rest.starts_with(**word))
                .map_or((&rest[..1], 1), |word| ("null", word.len())),
        };
        is_changed |= *instead != rest[..length];
        written += instead;
        rest = &rest[length..];
    }
}

/// The escape that a text begins with, or what stands for it, and its length.
fn escape(text: &str) -> (&str, usize) {
    let unit = |at: usize| {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        u32::from_str_radix(digits, 16).ok()
    };
    match (unit(0), unit(6)) {
        (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => (&text[..12], 12),
        (Some(0xd800..=0xdfff), _) => ("\\ufffd", 6),
        _ => {
            let length = 1 + text[1..].chars().next().map_or(0, char::len_utf8);
            (&text[..length], length)
        }
    }
}

/// An object of which nothing is looked at.
struct Whole;

impl<'de> Visitor<'de> for Whole {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(())
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

    fn texts(line: impl AsRef<[u8]>) -> Vec<Result<String, String>> {
        let (mut text, mut found) = (String::from("before"), Vec::new());
        Wanted::Field("text").read(line.as_ref(), &mut text, &mut |text, result| {
            found.push(result.map(|()| text.split_off("before".len())));
            assert_eq!(text, "before", "nothing is left of what is broken");
        });
        found
    }

    /// Of a line that holds one object.
    fn text(line: impl AsRef<[u8]>) -> Result<String, String> {
        let mut found = texts(line);
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    #[test]
    fn what_python_reads_is_read() {
        assert_eq!(text(r#"{"text":"a","score":NaN}"#).as_deref(), Ok("a"));
        let line = r#"{"x":[-Infinity,Infinity,-1],"text":"NaN \"-Infinity\"","y":NaN}"#;
        assert_eq!(text(line).as_deref(), Ok("NaN \"-Infinity\""));
        for (line, expected) in [
            (r#"{"text":"a \ud83d b"}"#, "a \u{fffd} b"),
            (r#"{"text":"\ud83d\ude00 \ude00\ud83d"}"#, "\u{1f600} \u{fffd}\u{fffd}"),
            (r#"{"text":"\\ud83d \ud800\\"}"#, "\\ud83d \u{fffd}\\"),
            (r#"{"k\udc00":1,"text":"b"}"#, "b"),
            ("\u{feff}{\"text\":\"c\"}\u{feff}", "c"),
        ] {
            assert_eq!(text(line).as_deref(), Ok(expected), "{line}");
        }
        assert!(text(r#"{"text":NaN}"#).unwrap_err().contains("null"));
        assert!(text(r#"{"text":"a","x":Nan}"#).unwrap_err().contains("column"));
    }

    #[test]
    fn each_object_of_a_line_is_a_document() {
        let ok = |text: &str| Ok(text.to_owned());
        let line = r#"{"text":"a}{"}{"text":"b","x":NaN} {"text":"\""}"#;
        assert_eq!(texts(line), [ok("a}{"), ok("b"), ok("\"")]);
        let found = texts(r#"{"other":1}{"text":"b"}{"text":"cut"#);
        assert_eq!((found.len(), &found[1]), (3, &ok("b")));
        assert!(found[0].is_err() && found[2].is_err(), "{found:?}");
        let found = texts(r#"{"text":"a"} and more"#);
        assert!(found.len() == 2 && found[0] == ok("a") && found[1].is_err(), "{found:?}");
        let many = r#"{"text":"a"}"#.repeat(MAX_OBJECTS + 5);
        let found = texts(many);
        assert_eq!(found.len(), MAX_OBJECTS + 1);
        assert!(found[MAX_OBJECTS].as_ref().unwrap_err().contains("objects in a line"));
    }

    #[test]
    fn whole_objects_are_split() {
        let objects = |line: &str| {
            let (mut text, mut found) = (String::from("before"), Vec::new());
            Wanted::Object.read(line.as_bytes(), &mut text, &mut |text, result| {
                found.push(result.map(|()| text.split_off("before".len())));
            });
            found
        };
        let ok = |text: &str| Ok(text.to_owned());
        assert_eq!(objects(r#" {"a":{"b":"}"}} "#), [ok(r#"{"a":{"b":"}"}}"#)]);
        assert_eq!(objects(r#"{"a":1}{"b":[]}"#), [ok(r#"{"a":1}"#), ok(r#"{"b":[]}"#)]);
        assert_eq!(objects(r#"{"a":NaN}"#), [ok(r#"{"a":null}"#)]);
        for (line, why) in [("[1]", "a JSON object"), (r#"{"a":"#, "EOF"), ("a", "expected")] {
            let found = objects(line);
            assert!(found.len() == 1 && found[0].as_ref().unwrap_err().contains(why), "{found:?}");
        }
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
            (br#"{"text":"\u12"}"#, "escape"),
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
