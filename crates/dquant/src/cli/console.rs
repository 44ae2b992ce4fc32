//! Output of a command: results on stdout, narration on stderr.
//!
//! A result is a [`Report`]: one value with both its text for people and its JSON for programs, so
//! the two cannot differ. Whatever text of others is in it, a terminal finds nothing to obey
//! ([`service::text`]). Colour appears on a terminal only, and `NO_COLOR` and `CLICOLOR_FORCE` are
//! honoured. A reader that closes the pipe ends the command quietly ([`CliError::PipeClosed`]).

use std::env;
use std::fmt::Display;
use std::io::{self, BufWriter, IsTerminal, Stderr, Stdout, Write};

use serde::Serialize;
use service::text;

use crate::exit::CliError;

/// A result: `Display` is what people read, `Serialize` what programs read.
pub trait Report: Display + Serialize {
    /// Name and version of the JSON object. The version rises when a field changes its meaning or is removed.
    const SCHEMA: &'static str;
}

/// A report in its JSON form: the schema first, then its own fields.
#[derive(Serialize)]
struct Envelope<'a, R> {
    schema: &'static str,
    #[serde(flatten)]
    report: &'a R,
}

/// The two output streams of a command.
#[derive(Debug)]
pub struct Console {
    out: BufWriter<Stdout>,
    err: Stderr,
    json: bool,
    colour: bool,
    /// Whether a progress line is on the terminal and must be cleared first.
    progress_shown: bool,
}

impl Console {
    /// The streams of this process; `json` chooses the form of results.
    pub fn new(json: bool) -> Console {
        let err = io::stderr();
        let colour = wants_colour(err.is_terminal());
        Console { out: BufWriter::new(io::stdout()), err, json, colour, progress_shown: false }
    }

    /// Whether results are for programs, which get more of them than people can read.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Writes one result.
    ///
    /// # Errors
    /// When stdout cannot be written; a closed pipe is [`CliError::PipeClosed`].
    pub fn report<R: Report>(&mut self, report: &R) -> Result<(), CliError> {
        self.clear_progress();
        if !self.json {
            return self.line(&text::lines(&report.to_string()));
        }
        let envelope = Envelope { schema: R::SCHEMA, report };
        let json = serde_json::to_string(&envelope)
            .map_err(|error| CliError::usage(format_args!("cannot write JSON: {error}")))?;
        self.line(&text::json(&json))
    }

    /// Rows of the terminal that results go to, without the last one, where the cursor rests; `None` where they go
    /// elsewhere, or are JSON.
    pub fn screen_rows(&self) -> Option<usize> {
        if self.json || !io::stdout().is_terminal() {
            return None;
        }
        let size = rustix::termios::tcgetwinsize(io::stdout()).ok();
        let rows = size.map(|size| usize::from(size.ws_row)).filter(|rows| *rows > 1);
        Some(rows.unwrap_or(24) - 1)
    }

    /// Writes a result in place of the one before: for a terminal.
    ///
    /// # Errors
    /// As [`Console::report`].
    pub fn redraw<R: Report>(&mut self, report: &R) -> Result<(), CliError> {
        self.clear_progress();
        // To the top; each line is cleared and written; what is below goes. The screen is never
        // empty in between.
        let text = text::lines(&report.to_string()).replace('\n', "\r\n\x1b[2K");
        let written =
            write!(self.out, "\x1b[H\x1b[2K{text}\r\n\x1b[J").and_then(|()| self.out.flush());
        written.map_err(|error| CliError::from_output(&error))
    }

    fn line(&mut self, text: &str) -> Result<(), CliError> {
        let written = writeln!(self.out, "{text}").and_then(|()| self.out.flush());
        written.map_err(|error| CliError::from_output(&error))
    }

    /// Writes narration beside the results. Its loss is no reason to stop.
    pub fn note(&mut self, text: impl Display) {
        self.clear_progress();
        let _ = writeln!(self.err, "{}", text::lines(&text.to_string()));
    }

    /// Replaces the progress line; nothing happens where stderr is no terminal.
    pub fn progress(&mut self, text: impl Display) {
        if self.err.is_terminal() {
            let _ = write!(self.err, "\r\x1b[K{}", text::one_line(&text.to_string()));
            let _ = self.err.flush();
            self.progress_shown = true;
        }
    }

    /// Reports why the command stops.
    pub fn error(&mut self, error: &CliError) {
        let CliError::Failed { message, hint, .. } = error else {
            return;
        };
        self.clear_progress();
        let label = self.paint("error:", "1;31");
        let _ = writeln!(self.err, "{label} {}", text::lines(message));
        if let Some(hint) = hint {
            let label = self.paint("hint:", "1;36");
            let _ = writeln!(self.err, "{label} {}", text::one_line(hint));
        }
    }

    /// Writes what is still buffered.
    ///
    /// # Errors
    /// As [`Console::report`].
    pub fn finish(&mut self) -> Result<(), CliError> {
        self.clear_progress();
        self.out.flush().map_err(|error| CliError::from_output(&error))
    }

    fn paint(&self, text: &str, style: &str) -> String {
        if self.colour { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn clear_progress(&mut self) {
        if self.progress_shown {
            let _ = write!(self.err, "\r\x1b[K");
            self.progress_shown = false;
        }
    }
}

/// Warns where no console is at hand: of what a command goes on with.
pub(super) fn warn(message: &str, hint: &str) {
    let (message, hint) = (text::one_line(message), text::one_line(hint));
    let _ = writeln!(io::stderr(), "warning: {message}\nhint: {hint}");
}

fn wants_colour(terminal: bool) -> bool {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    if is_set("NO_COLOR") {
        return false;
    }
    let forced =
        env::var_os("CLICOLOR_FORCE").is_some_and(|value| !value.is_empty() && value != "0");
    forced || terminal
}
