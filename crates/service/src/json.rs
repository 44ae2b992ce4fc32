//! What other processes say as JSON, fit for a terminal.
//!
//! Only the reading: what a reply means is a matter of the command that asked.

use crate::text::one_line;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// What another process said as JSON. Its texts are single lines that a terminal shows and does not
/// obey.
///
/// # Errors
/// When it is not JSON, or of another form.
pub fn heard<T: DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    serde_json::from_value(cleaned(serde_json::from_slice(json)?))
}

fn cleaned(value: Value) -> Value {
    let line = |text: String| one_line(&text).into_owned();
    match value {
        Value::String(text) => Value::String(line(text)),
        Value::Array(values) => values.into_iter().map(cleaned).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (line(name), cleaned(value))).collect()
        }
        plain => plain,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn what_is_heard_has_no_commands_to_a_terminal() {
        let json =
            br#"{"a\u001b[2J":["b\nerror: c",["\u009b1m\u202e"]],"n":[[18446744073709551615]]}"#;
        let heard: BTreeMap<String, Vec<Value>> = heard(json).expect("JSON");
        let shown = format!("{heard:?}");
        assert!(!shown.contains("\\u{1b}") && !shown.contains("\\n"), "{shown}");
        assert_eq!(heard["a\u{fffd}[2J"][0], "b\u{fffd}error: c");
        assert_eq!(heard["n"][0][0], u64::MAX);
        assert!(super::heard::<u8>(b"256").is_err() && super::heard::<u8>(b"").is_err());
    }
}
