//! What chat templates expect of Python: `json.dumps`, methods of `str`, `strftime`.
//!
//! The methods that differ between Python and [`pycompat`], or are missing there, are here.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// Deepest nesting that `tojson` writes.
const MAX_DEPTH: usize = 256;

/// Most bytes that `tojson` and the text of a value have: nothing else counts what they write, and
/// values share parts.
const MAX_TEXT: usize = 64 << 20;

fn refused(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    value: &Value,
    Rest(given): Rest<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let mut options = given.into_iter();
    let mut option = |name: &str| match options.next() {
        Some(value) => Ok(Some(value)),
        None => kwargs.get::<Option<Value>>(name),
    };
    let is_set = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let ascii = is_set(option("ensure_ascii")?);
    let indent = match option("indent")?.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(width @ 0..=64)) => " ".repeat(width),
            _ => return Err(refused("`indent` of tojson is a text or a number up to 64")),
        }),
    };
    let separators = option("separators")?.filter(|separators| !separators.is_none());
    let (item, key) = match separators {
        None if indent.is_some() => (String::from(","), String::from(": ")),
        None => (String::from(", "), String::from(": ")),
        Some(pair) => {
            let text = |at| pair.get_item_by_index(at).map(|value| value.to_string());
            (text(0)?, text(1)?)
        }
    };
    let sorted = is_set(option("sort_keys")?);
    kwargs.assert_all_used()?;
    let mut json = Json { ascii, indent, item, key, sorted, text: String::new() };
    json.value(value, 0)?;
    Ok(json.text)
}

/// The value as Python's `json.dumps(value, ensure_ascii=False)` writes it.
pub(super) fn json(value: &Value) -> Result<String, Error> {
    tojson(value, Rest(Vec::new()), Kwargs::from_iter(std::iter::empty::<(&str, Value)>()))
}

/// A writer of JSON in the manner of Python.
struct Json {
    ascii: bool,
    indent: Option<String>,
    /// Between two items, and between a key and its value.
    item: String,
    key: String,
    sorted: bool,
    text: String,
}

impl Json {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(refused("tojson: nested too deeply"));
        }
        if self.text.len() > MAX_TEXT {
            return Err(refused(format!("tojson: longer than {MAX_TEXT} bytes")));
        }
        match value.kind() {
            ValueKind::None => self.text += "null",
            ValueKind::Bool => self.text += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => self.text += &number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            kind => return Err(refused(format!("tojson: a value is {kind}"))),
        }
        Ok(())
    }

    fn list(&mut self, list: &Value, depth: usize) -> Result<(), Error> {
        let mut is_empty = true;
        self.text.push('[');
        for value in list.try_iter()?.checked() {
            self.begin(is_empty, depth + 1);
            is_empty = false;
            self.value(&value?, depth + 1)?;
        }
        self.end(is_empty, depth, ']');
        Ok(())
    }

    fn map(&mut self, map: &Value, depth: usize) -> Result<(), Error> {
        let mut pairs = Vec::new();
        for key in map.try_iter()? {
            let name = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                ValueKind::None => String::from("null"),
                ValueKind::Bool => key.to_string().to_lowercase(),
                ValueKind::Number => number(&key),
                kind => return Err(refused(format!("tojson: a key is {kind}"))),
            };
            pairs.push((name, map.get_item(&key)?));
        }
        if self.sorted {
            pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        let is_empty = pairs.is_empty();
        self.text.push('{');
        for (at, (name, value)) in pairs.iter().enumerate() {
            self.begin(at == 0, depth + 1);
            self.string(name);
            self.text += &self.key;
            self.value(value, depth + 1)?;
        }
        self.end(is_empty, depth, '}');
        Ok(())
    }

    fn begin(&mut self, is_first: bool, depth: usize) {
        if !is_first {
            self.text += &self.item;
        }
        self.line(depth);
    }

    fn end(&mut self, is_empty: bool, depth: usize, bracket: char) {
        if !is_empty {
            self.line(depth);
        }
        self.text.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for c in text.chars() {
            match c {
                '"' => self.text += "\\\"",
                '\\' => self.text += "\\\\",
                '\n' => self.text += "\\n",
                '\r' => self.text += "\\r",
                '\t' => self.text += "\\t",
                '\u{8}' => self.text += "\\b",
                '\u{c}' => self.text += "\\f",
                ..' ' => self.escape(c),
                '\u{7f}'.. if self.ascii => self.escape(c),
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }

    fn escape(&mut self, c: char) {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(self.text, "\\u{unit:04x}");
        }
    }
}

/// What `str(value)` is in Python.
///
/// # Errors
/// When values are nested too deeply.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let mut text = String::new();
    repr(value, &mut text, 0)?;
    Ok(text)
}

/// Appends what `repr(value)` is in Python.
fn repr(value: &Value, text: &mut String, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(refused("a value is nested too deeply to be written"));
    }
    if text.len() > MAX_TEXT {
        return Err(refused(format!("the text of a value is longer than {MAX_TEXT} bytes")));
    }
    let brackets = match value.kind() {
        ValueKind::String => {
            quote(value.as_str().unwrap_or_default(), text);
            return Ok(());
        }
        ValueKind::Number if !value.is_integer() => {
            let number = number(value);
            // As JSON has them otherwise.
            *text += &number.replace("Infinity", "inf").replace("NaN", "nan");
            return Ok(());
        }
        ValueKind::Seq if value.is_tuple() => ['(', ')'],
        ValueKind::Seq | ValueKind::Iterable => ['[', ']'],
        ValueKind::Map => ['{', '}'],
        _ => {
            *text += &value.to_string();
            return Ok(());
        }
    };
    text.push(brackets[0]);
    let mut count = 0;
    for item in value.try_iter()?.checked() {
        let item = item?;
        if count > 0 {
            *text += ", ";
        }
        count += 1;
        repr(&item, text, depth + 1)?;
        if value.kind() == ValueKind::Map {
            *text += ": ";
            repr(&value.get_item(&item)?, text, depth + 1)?;
        }
    }
    if count == 1 && value.is_tuple() {
        text.push(',');
    }
    text.push(brackets[1]);
    Ok(())
}

/// Appends a text in quotes.
fn quote(content: &str, text: &mut String) {
    let quote = if content.contains('\'') && !content.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in content.chars() {
        match c {
            '\\' => *text += "\\\\",
            '\n' => *text += "\\n",
            '\r' => *text += "\\r",
            '\t' => *text += "\\t",
            c if c == quote => text.extend(['\\', c]),
            ' '..='~' => text.push(c),
            c if is_printable(c) => text.push(c),
            c => {
                // Writing to a string cannot fail.
                let _ = match c as u32 {
                    code @ ..=0xff => write!(text, "\\x{code:02x}"),
                    code @ ..=0xffff => write!(text, "\\u{code:04x}"),
                    code => write!(text, "\\U{code:08x}"),
                };
            }
        }
    }
    text.push(quote);
}

/// What `str.isprintable` says of one character that is not ASCII: Rust escapes the same
/// categories, and marks at the beginning of a text, too.
fn is_printable(c: char) -> bool {
    String::from_iter(['a', c]).escape_debug().count() == 2
}

/// A number as Python's `repr` writes it, and as `json` writes what is none.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else {
        return value.to_string();
    };
    if !float.is_finite() {
        let sign = if float == f64::NEG_INFINITY { "-" } else { "" };
        return if float.is_nan() { String::from("NaN") } else { format!("{sign}Infinity") };
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        exponent @ (16.. | ..=-5) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ if float.fract() == 0.0 => format!("{float:.1}"),
        _ => float.to_string(),
    }
}

/// What `str.isspace` says of one character.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Which ends of a text are stripped.
#[derive(Clone, Copy)]
enum Ends {
    Both,
    Start,
    End,
}

fn strip(text: &str, ends: Ends, chars: Option<&str>) -> String {
    let strips = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = match ends {
        Ends::End => text,
        Ends::Both | Ends::Start => text.trim_start_matches(strips),
    };
    let text = match ends {
        Ends::Start => text,
        Ends::Both | Ends::End => text.trim_end_matches(strips),
    };
    text.to_owned()
}

/// The filter `trim`.
pub(super) fn trim(value: &Value, chars: Option<&str>) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(strip(text, Ends::Both, chars)),
        None => Ok(strip(&text(value)?, Ends::Both, chars)),
    }
}

/// The test `sequence`: what has a length and can be indexed, texts and maps too.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
        || value.is_undefined()
}

/// Methods that values do not have themselves.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
    let stripped = |ends| {
        let (chars,): (Option<&str>,) = from_args(args)?;
        Ok(Value::from(strip(text, ends, chars)))
    };
    let affix = || from_args::<(&str,)>(args).map(|(affix,)| affix);
    let all = |list: Vec<&str>| Ok(list.into_iter().map(Value::from).collect());
    match name {
        "strip" => stripped(Ends::Both),
        "lstrip" => stripped(Ends::Start),
        "rstrip" => stripped(Ends::End),
        "removeprefix" => Ok(Value::from(text.strip_prefix(affix()?).unwrap_or(text))),
        "removesuffix" => Ok(Value::from(text.strip_suffix(affix()?).unwrap_or(text))),
        "split" if args.is_empty() => {
            all(text.split(is_space).filter(|word| !word.is_empty()).collect())
        }
        "split" | "rsplit" if args.first().and_then(Value::as_str) == Some("") => {
            Err(refused("empty separator"))
        }
        "rsplit" if !args.is_empty() => {
            let (separator, most): (&str, Option<i64>) = from_args(args)?;
            let most = most.and_then(|most| usize::try_from(most).ok());
            let parts = text.rsplitn(most.map_or(usize::MAX, |most| most + 1), separator);
            let mut parts: Vec<&str> = parts.collect();
            parts.reverse();
            all(parts)
        }
        "title" if args.is_empty() => Ok(Value::from(title(text))),
        "splitlines" if args.is_empty() => all(lines(text)),
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Each word with a capital, as `str.title`: a word is a run of letters.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        let is_cased = c.is_lowercase() || c.is_uppercase();
        if in_word {
            titled.extend(c.to_lowercase());
        } else {
            // `ß` becomes `Ss`.
            let mut capitals = c.to_uppercase();
            titled.extend(capitals.next());
            titled.extend(capitals.flat_map(char::to_lowercase));
        }
        in_word = is_cased;
    }
    titled
}

/// The lines of a text, without their ends, as `str.splitlines`.
fn lines(text: &str) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    let ends =
        |c| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    while let Some(at) = rest.find(ends) {
        lines.push(&rest[..at]);
        let end = rest[at..].chars().next().map_or(0, char::len_utf8);
        let end = if rest[at..].starts_with("\r\n") { 2 } else { end };
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// A time in UTC, in seconds since 1970, as `strftime` of Python writes it.
///
/// # Errors
/// Names a directive that is not known.
pub(super) fn strftime(seconds: u64, format: &str) -> Result<String, Error> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let of_year = days - days_before(year) + 1;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[((days + 3) % 7) as usize]);
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = rest.next();
        let padded = directive != Some('-');
        if !padded {
            directive = rest.next();
        }
        let two = |number: u64| if padded { format!("{number:02}") } else { number.to_string() };
        text += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('j') if padded => format!("{of_year:03}"),
            Some('j') => of_year.to_string(),
            Some('e') if padded => format!("{day:2}"),
            Some('e') => day.to_string(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('p') => String::from(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => String::from("UTC"),
            Some('z') => String::from("+0000"),
            Some('%') => String::from("%"),
            _ => return Err(refused(format!("strftime_now: `{format}` is not understood"))),
        };
    }
    Ok(text)
}

/// Days from 1970 to the first of January of a year.
fn days_before(year: u64) -> u64 {
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}

/// Year, month and day of the month, from the days since 1970.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let is_leap = year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let february = if is_leap { 29 } else { 28 };
    let (mut month, mut day) = (1, days - days_before(year) + 1);
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day <= length {
            break;
        }
        (month, day) = (month + 1, day - length);
    }
    (year, month, day)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn value(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn json_is_that_of_python() {
        for text in [
            r#"{"b": 1, "a": [true, false, null, 1.5, -2], "c": {}, "d": []}"#,
            r#"["é😀<&>'", "\"\\\n\r\t\b\f\u0000\u001f\u007f"]"#.replace("\\u007f", "\u{7f}").as_str(),
            "[1.0, 0.0001, 1e-05, 1.5e-07, 1e+16, 123456789012345.0, 1.2345e+20, -0.0]",
        ] {
            assert_eq!(json(&value(text)).unwrap(), text);
        }
        let with =
            |options: Kwargs| tojson(&value(r#"{"b":[1,"é"],"a":{}}"#), Rest(vec![]), options);
        let indented = with(Kwargs::from_iter([("indent", Value::from(2))])).unwrap();
        assert_eq!(indented, "{\n  \"b\": [\n    1,\n    \"é\"\n  ],\n  \"a\": {}\n}");
        let sorted = Kwargs::from_iter([
            ("sort_keys", Value::from(true)),
            ("ensure_ascii", Value::from(true)),
            ("separators", Value::from(vec![",", ":"])),
        ]);
        assert_eq!(with(sorted).unwrap(), r#"{"a":{},"b":[1,"\u00e9"]}"#);
        assert!(with(Kwargs::from_iter([("other", Value::from(2))])).is_err());
        assert!(json(&Value::UNDEFINED).is_err());
    }

    #[test]
    fn values_are_written_as_by_python() {
        let of = |json: &str| text(&value(json)).unwrap();
        assert_eq!(
            of(r#"["a", "it's", "\"'", 1.0, 1e16, true, null]"#),
            r#"['a', "it's", '"\'', 1.0, 1e+16, True, None]"#
        );
        assert_eq!(
            of(r#"{"\n\u001f\u00a0": {}, "b": [2, "é\u0301\ufeff\u3000😀"]}"#),
            "{'\\n\\x1f\\xa0': {}, 'b': [2, 'é\u{301}\\ufeff\\u3000😀']}"
        );
        assert_eq!(of("\"it's\""), "it's");
        assert_eq!(title("it isn't ÅSTRÖM<b>ßß"), "It Isn'T Åström<B>Ssß");
        let nested = (0..300).fold(Value::from(1), |value, _| Value::from(vec![value]));
        assert!(text(&nested).is_err());
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds, format| strftime(seconds, format).unwrap();
        assert_eq!(at(0, "%A %d %B %Y %H:%M:%S %j"), "Thursday 01 January 1970 00:00:00 001");
        assert_eq!(at(951_782_400, "%d %b %Y, %a"), "29 Feb 2000, Tue");
        assert_eq!(at(1_735_689_599, "%F %T %j %I%p %y"), "2024-12-31 23:59:59 366 11PM 24");
        assert_eq!(at(1_767_225_600, "%-d/%-m %% %e"), "1/1 %  1");
        assert!(strftime(0, "%Q").is_err() && strftime(0, "%").is_err());
    }

    #[test]
    fn white_space_is_that_of_python() {
        assert_eq!(strip("\u{1f}\u{85} a \n", Ends::Both, None), "a");
        assert_eq!(strip("xxaxx", Ends::End, Some("x")), "xxa");
        assert_eq!(lines("a\r\nb\rc\n\nd\u{2028}e"), ["a", "b", "c", "", "d", "e"]);
        assert!(lines("").is_empty());
    }
}
