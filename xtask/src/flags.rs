//! The command line of one command: flags in any order, some of which have a value. What a value
//! means is the command's to know, but for times, which several have.

use std::time::Duration;

use crate::shell::Failure;

/// What is left of a command line.
pub(crate) struct Flags<'a> {
    rest: &'a [String],
    flag: &'a str,
}

impl<'a> Flags<'a> {
    pub(crate) fn new(args: &'a [String]) -> Flags<'a> {
        Flags { rest: args, flag: "" }
    }

    /// The next flag.
    pub(crate) fn next(&mut self) -> Option<&'a str> {
        let (flag, rest) = self.rest.split_first()?;
        (self.flag, self.rest) = (flag, rest);
        Some(flag)
    }

    /// The value of the flag that was returned last.
    ///
    /// # Errors
    /// A usage error when it has none.
    pub(crate) fn value(&mut self) -> Result<&'a str, Failure> {
        let missing = || Failure::usage(format!("{} needs a value; see --help", self.flag));
        let (value, rest) = self.rest.split_first().ok_or_else(missing)?;
        self.rest = rest;
        Ok(value)
    }

    /// The value as a time from `least` to a week, in seconds or with a unit: `20s`, `500ms`,
    /// `10min`, `60m`, `1h`.
    ///
    /// # Errors
    /// A usage error when it has none, or another one.
    pub(crate) fn time(&mut self, least: Duration) -> Result<Duration, Failure> {
        let text = self.value()?;
        let time = seconds(text).and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        time.filter(|time| (least..=LONGEST).contains(time)).ok_or_else(|| {
            let flag = self.flag;
            Failure::usage(format!(
                "{flag} is a time such as 500ms, 20s, 10min or 1h, not '{text}'"
            ))
        })
    }

    /// What to answer where nobody knows the flag that was returned last.
    pub(crate) fn unknown(&self) -> Failure {
        Failure::usage(format!("no option '{}'; see --help", self.flag))
    }
}

const LONGEST: Duration = Duration::from_hours(7 * 24);

fn seconds(text: &str) -> Option<f64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let unit_s = match &text[split..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3_600.0,
        _ => return None,
    };
    text[..split].parse::<f64>().ok().map(|number| number * unit_s)
}

/// A command line as it is typed, for tests.
#[cfg(test)]
pub(crate) fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_come_with_their_values_and_mistakes_are_named() {
        let line = words("--a x --b");
        let mut flags = Flags::new(&line);
        assert_eq!(flags.next(), Some("--a"));
        assert_eq!(flags.value().expect("given"), "x");
        assert_eq!(flags.next(), Some("--b"));
        let missing = flags.value().expect_err("the end");
        assert_eq!(
            (missing.exit_code(), missing.to_string().as_str()),
            (2, "--b needs a value; see --help")
        );
        assert_eq!(flags.unknown().to_string(), "no option '--b'; see --help");
        assert_eq!(flags.next(), None);
    }

    #[test]
    fn times_have_units_and_bounds() {
        let time = |text: &str| {
            let line = words(&format!("--for {text}"));
            let mut flags = Flags::new(&line);
            flags.next();
            flags.time(Duration::from_millis(100)).ok()
        };
        for (text, ms) in
            [("100ms", 100), ("5", 5_000), ("1.5s", 1_500), ("2m", 120_000), ("2min", 120_000)]
        {
            assert_eq!(time(text), Some(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(time("168h"), Some(LONGEST));
        for text in
            ["99ms", "169h", "0", "-1", "nan", "x", "5d", "1e3", "9999999999999999999999h", ""]
        {
            assert_eq!(time(text), None, "{text}");
        }
    }
}
