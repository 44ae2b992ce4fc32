//! What the commands share that read datasets of this machine.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use lab::units::Count;
use xio::dataset::Dtype;

use super::Console;

/// Reads a token type.
pub(super) fn token_type(name: &str) -> Result<Dtype, String> {
    let unknown = || "token types are u8, i8, u16, i16, u32, i32, u64 and i64".to_owned();
    Dtype::integer_from_name(name).ok_or_else(unknown)
}

/// Reports a type that nobody gave.
pub(super) fn note_guess(
    console: &mut Console,
    name: impl fmt::Display,
    dtype: &str,
    origin: &str,
) {
    if let Some(why) = origin.strip_prefix("guess: ") {
        console.note(format_args!(
            "{name}: {dtype} is a guess: {why}; --dtype {dtype} or a manifest settles it"
        ));
    }
}

/// The path as a user would write it.
pub(super) fn shown(folder: &Path, name: &Path) -> String {
    let here = folder == Path::new(".");
    if here { name.display().to_string() } else { folder.join(name).display().to_string() }
}

/// A bar with a rate and the time that is left, refreshed a few times a second.
pub(super) struct Bar {
    verb: &'static str,
    started: Instant,
    shown: Instant,
    /// Tokens that were there at the start.
    first: u64,
}

impl Bar {
    const REFRESH: Duration = Duration::from_millis(200);

    const WIDTH: usize = 24;

    pub(super) fn new(verb: &'static str, first: u64) -> Bar {
        Bar { verb, started: Instant::now(), shown: Instant::now(), first }
    }

    pub(super) fn show(&mut self, console: &mut Console, tokens: u64, share: f64) {
        if self.shown.elapsed() < Bar::REFRESH {
            return;
        }
        self.shown = Instant::now();
        let (seconds, share) = (self.started.elapsed().as_secs_f64(), share.clamp(0.0, 1.0));
        let full = (share * Bar::WIDTH as f64) as usize;
        let rate = tokens.saturating_sub(self.first) as f64 / 1e6 / seconds.max(1e-9);
        let left = match share > 0.0 {
            true => format!(", {:.0} s left", seconds / share * (1.0 - share)),
            false => String::new(),
        };
        console.progress(format_args!(
            "{} [{}{}] {:3.0} %  {} tokens, {rate:.0} M/s{left}",
            self.verb,
            "#".repeat(full),
            "-".repeat(Bar::WIDTH - full),
            share * 100.0,
            Count(tokens),
        ));
    }
}
