//! Text of others, for a terminal or a log.
//!
//! Names, notes and reasons come from agents, brains, targets, other users' processes and files.
//! Written as they are, they could move the cursor, set the title of a window, or look like lines
//! of ours. So whatever is shown passes through here: text that is one line where it enters or is
//! put into a sentence ([`one_line`]), and all output once more ([`lines`]).

use std::borrow::Cow;

/// What stands for a character that is not shown.
const HIDDEN: char = '\u{fffd}';

/// Whether a terminal may take a character for a command, for the end of a line, for a change of
/// direction, or for nothing.
fn is_command(char: char) -> bool {
    char.is_control()
        || matches!(
            char,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

fn without(text: &str, is_hidden: impl Fn(char) -> bool) -> Cow<'_, str> {
    match text.contains(&is_hidden) {
        true => text.chars().map(|char| if is_hidden(char) { HIDDEN } else { char }).collect(),
        false => Cow::Borrowed(text),
    }
}

/// The text as a single line without commands to a terminal.
pub fn one_line(text: &str) -> Cow<'_, str> {
    without(text, is_command)
}

/// The text without commands to a terminal; its lines and tabs stay.
pub fn lines(text: &str) -> Cow<'_, str> {
    without(text, |char| is_command(char) && !matches!(char, '\n' | '\t'))
}

/// JSON whose strings have the same characters as escapes. Serializers leave all above U+007E as
/// they are.
pub fn json(text: &str) -> Cow<'_, str> {
    let is_raw = |char| is_command(char) && !matches!(char, '\n' | '\t' | '\r');
    if !text.contains(is_raw) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        match is_raw(char) {
            // All of them have four digits at most.
            true => safe.push_str(&format!("\\u{:04x}", char as u32)),
            false => safe.push(char),
        }
    }
    safe.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        let attack = "\x1b]0;title\x07\x1b[2J\u{9b}31mred\u{202e}txt.exe\u{2028}ne\u{200b}xt\r\nadmitted job 9\x7f";
        let line = one_line(attack);
        assert_eq!(line.chars().count(), attack.chars().count());
        assert!(!line.contains(is_command), "{line:?}");
        assert_eq!(lines("a\n\tb\x1b[0m\rc"), "a\n\tb\u{fffd}[0m\u{fffd}c");
        for plain in ["", "job 'llm': ring:8@5G", "Grüße — 漢字 🙂"] {
            assert!(matches!(one_line(plain), Cow::Borrowed(same) if same == plain));
        }
    }

    #[test]
    fn json_keeps_its_meaning() {
        assert_eq!(
            json("{\"a\":\"\u{9b}1m\u{202e}\x7f\",\"b\":\"ü\"}\n"),
            "{\"a\":\"\\u009b1m\\u202e\\u007f\",\"b\":\"ü\"}\n"
        );
        assert!(matches!(json("{\"a\":\"\\u001b\"}"), Cow::Borrowed(_)));
    }
}
