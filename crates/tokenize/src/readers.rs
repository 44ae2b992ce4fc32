//! The reading side of a run: documents from the inputs, in order, as batches.
//!
//! Each input is read once, from front to back. A document that turns out to be invalid after part
//! of it was sent is withdrawn ([`After::Discard`]). Which part a document goes to is known when
//! its first text is sent. A run that goes on where another was killed reads the part of the input
//! that is done once more, without encoding it, and compares its checksum: standard input and
//! compressed files cannot be entered in the middle, and an input that has changed is noticed.
//! Parquet files are entered at the row.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use formats::manifest::Part;

use super::TokenizeError;
use super::batch::{After, Batch, Place, Reason, Segment};
use super::chat::Chat;
use super::checkpoint::Position;
use super::cut::{ChunkReader, ReadError};
use super::holdout::{DECIDING_BYTES, Rule};
use super::input::{self, Bytes, BytesRead};
use super::jsonl::Wanted;
use super::sources::{Format, Source};

/// Bytes of the longest line, and of the longest document that must be encoded whole; bounds
/// memory.
pub(super) const MAX_WHOLE_BYTES: u64 = 64 << 20;

/// Why a reader stops.
pub(super) enum Stop {
    /// The run has ended: nothing takes batches any more.
    Over,
    /// An input cannot be read.
    Failed(TokenizeError),
}

impl From<TokenizeError> for Stop {
    fn from(error: TokenizeError) -> Stop {
        Stop::Failed(error)
    }
}

/// What documents are read from and how.
pub(super) struct Reader<'a> {
    pub(super) sources: &'a [Source],
    /// The field or column that holds the text.
    pub(super) field: &'a str,
    /// What makes conversations of whole records.
    pub(super) chat: Option<&'a Chat>,
    /// Which documents are held out.
    pub(super) rule: Option<Rule>,
    /// Whether documents may be sent in parts.
    pub(super) cuts: bool,
    pub(super) chunk_bytes: usize,
    /// Where a Parquet file that cannot be read in place is kept.
    #[cfg_attr(not(feature = "parquet"), expect(dead_code))]
    pub(super) spool: &'a Path,
    /// Takes full batches; false when the run has ended.
    pub(super) send: &'a mut dyn FnMut(Batch) -> bool,
    pub(super) batch: Batch,
    pub(super) position: Position,
    pub(super) bytes_read: BytesRead,
}

impl Reader<'_> {
    /// Reads every source from the position on.
    pub(super) fn read_all(&mut self) -> Result<(), Stop> {
        let done = &self.sources[..self.position.source.min(self.sources.len())];
        self.bytes_read.add(done.iter().filter_map(|source| source.bytes).sum());
        while let Some(source) = self.sources.get(self.position.source) {
            match source.format {
                Format::Text => self.text(source)?,
                Format::Jsonl => self.jsonl(source)?,
                Format::Parquet => self.parquet(source)?,
            }
            self.position = Position { source: self.position.source + 1, ..Position::default() };
            self.flush_if_full()?;
        }
        self.flush()
    }

    fn place(&self) -> Place {
        Place { source: self.position.source, record: self.position.record }
    }

    /// The part of a document with this text.
    fn part(&self, text: &[u8]) -> Part {
        self.rule.map_or(Part::Train, |rule| rule.part(text))
    }

    /// The part of what was taken of an object.
    fn part_of_record(&self, text: &str) -> Result<Part, String> {
        match (self.rule, self.chat) {
            (Some(rule), Some(chat)) => Ok(rule.part(chat.deciding(text)?.as_bytes())),
            _ => Ok(self.part(text.as_bytes())),
        }
    }

    fn flush_if_full(&mut self) -> Result<(), Stop> {
        if self.batch.is_full(self.chunk_bytes) { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Stop> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let mut batch = std::mem::take(&mut self.batch);
        batch.position = self.position;
        batch.input_bytes = self.bytes_read.get();
        if (self.send)(batch) { Ok(()) } else { Err(Stop::Over) }
    }

    fn advance(&mut self, bytes: &[u8]) {
        self.position.bytes += bytes.len() as u64;
        self.position.crc = crc32c::crc32c_append(self.position.crc, bytes);
    }

    /// Opens an input at the position.
    fn open(&self, source: &Source) -> Result<Bytes, TokenizeError> {
        let mut bytes = input::open(&source.path, source.is_stdin(), &self.bytes_read)?;
        let (mut left, mut crc) = (self.position.bytes, 0);
        let mut block = vec![0; if left > 0 { 1 << 20 } else { 0 }];
        while left > 0 {
            let len = left.min(block.len() as u64) as usize;
            let read = bytes.read_exact(&mut block[..len]);
            match read {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                read => read.map_err(TokenizeError::io("read", &source.path))?,
            }
            crc = crc32c::crc32c_append(crc, &block[..len]);
            left -= len as u64;
        }
        if left > 0 || crc != self.position.crc {
            let reason = format!("{source} does not begin with what was read from it then");
            return Err(TokenizeError::Resume { reason });
        }
        Ok(bytes)
    }

    /// One document of plain text.
    fn text(&mut self, source: &Source) -> Result<(), Stop> {
        let mut bytes = self.open(source)?;
        if self.rule.is_some() && self.position.bytes == 0 {
            let mut beginning = Vec::new();
            let read = bytes.by_ref().take(DECIDING_BYTES as u64).read_to_end(&mut beginning);
            read.map_err(TokenizeError::io("read", &source.path))?;
            self.position.part = self.part(&beginning);
            bytes = Box::new(Cursor::new(beginning).chain(bytes));
        }
        if !self.cuts {
            return self.whole_text(source, bytes);
        }
        let place = self.place();
        let (begun, part) = (self.position.bytes, self.position.part);
        let mut chunks = ChunkReader::new(bytes, self.chunk_bytes);
        loop {
            match chunks.next_chunk() {
                Ok(Some(chunk)) => {
                    self.batch.text += &chunk.text;
                    self.batch.segment(place, After::More { forced: chunk.forced_cut }, part);
                    self.advance(chunk.text.as_bytes());
                    self.flush_if_full()?;
                }
                Ok(None) if self.position.bytes == 0 => {
                    self.batch.leave_out(place, Reason::Empty);
                    return Ok(());
                }
                Ok(None) => {
                    self.batch.segment(place, After::End, part);
                    return Ok(());
                }
                Err(ReadError::Io(error)) => Err(TokenizeError::io("read", &source.path)(error))?,
                Err(ReadError::NotUtf8 { valid_bytes }) => {
                    self.batch.segment(place, After::Discard, part);
                    let valid_bytes = begun + valid_bytes;
                    self.batch.leave_out(place, Reason::NotUtf8 { valid_bytes });
                    return Ok(());
                }
            }
        }
    }

    /// One document that cannot be encoded in parts.
    fn whole_text(&mut self, source: &Source, bytes: Bytes) -> Result<(), Stop> {
        let mut text = Vec::new();
        let read = bytes.take(MAX_WHOLE_BYTES + 1).read_to_end(&mut text);
        read.map_err(TokenizeError::io("read", &source.path))?;
        let place = self.place();
        match std::str::from_utf8(&text) {
            Ok("") => self.batch.leave_out(place, Reason::Empty),
            _ if text.len() as u64 > MAX_WHOLE_BYTES => {
                self.batch.leave_out(place, Reason::Broken(too_long()));
            }
            Ok(text) => {
                self.batch.text += text;
                self.batch.segment(place, After::End, self.position.part);
            }
            Err(error) => {
                let valid_bytes = error.valid_up_to() as u64;
                self.batch.leave_out(place, Reason::NotUtf8 { valid_bytes });
            }
        }
        Ok(())
    }

    /// One document per line.
    fn jsonl(&mut self, source: &Source) -> Result<(), Stop> {
        let bytes = self.open(source)?;
        let mut lines = BufReader::with_capacity(1 << 20, bytes);
        let wanted = match self.chat {
            Some(_) => Wanted::Object,
            None => Wanted::Field(self.field),
        };
        let mut line = Vec::new();
        loop {
            line.clear();
            let unreadable = TokenizeError::io("read", &source.path);
            let read = lines.by_ref().take(MAX_WHOLE_BYTES).read_until(b'\n', &mut line);
            if read.map_err(unreadable)? == 0 {
                return Ok(());
            }
            let place = self.place();
            self.advance(&line);
            if line.len() as u64 == MAX_WHOLE_BYTES && !line.ends_with(b"\n") {
                self.batch.leave_out(place, Reason::Broken(too_long()));
                self.skip_line(source, &mut lines)?;
            } else {
                self.line(wanted, line.trim_ascii(), place);
            }
            self.position.record += 1;
            self.flush_if_full()?;
        }
    }

    fn line(&mut self, wanted: Wanted<'_>, line: &[u8], place: Place) {
        let mut text = std::mem::take(&mut self.batch.text);
        let mut start = text.len();
        wanted.read(line, &mut text, &mut |text, result| {
            let end = text.len();
            let part = result.and_then(|()| self.part_of_record(&text[start..]));
            match part {
                Err(reason) => {
                    text.truncate(start);
                    self.batch.leave_out(place, Reason::Broken(reason));
                }
                Ok(_) if end == start => self.batch.leave_out(place, Reason::Empty),
                Ok(part) => {
                    self.batch.segments.push(Segment { place, end, after: After::End, part });
                }
            }
            start = text.len();
        });
        self.batch.text = text;
    }

    fn skip_line(&mut self, source: &Source, lines: &mut impl BufRead) -> Result<(), Stop> {
        loop {
            let bytes = lines.fill_buf().map_err(TokenizeError::io("read", &source.path))?;
            let end = memchr::memchr(b'\n', bytes);
            let len = end.map_or(bytes.len(), |at| at + 1);
            let skipped = bytes[..len].to_vec();
            lines.consume(len);
            self.advance(&skipped);
            if end.is_some() || len == 0 {
                return Ok(());
            }
        }
    }

    #[cfg(not(feature = "parquet"))]
    fn parquet(&mut self, source: &Source) -> Result<(), Stop> {
        let path = source.path.clone();
        Err(TokenizeError::NotBuilt { path, feature: "parquet" })?
    }

    /// One document per row.
    #[cfg(feature = "parquet")]
    fn parquet(&mut self, source: &Source) -> Result<(), Stop> {
        let mut column = super::parquet::TextColumn::open(
            source,
            self.field,
            self.position.record,
            self.spool,
            &self.bytes_read,
        )?;
        loop {
            let rows = column.next_rows()?;
            if rows.is_empty() {
                return Ok(());
            }
            for row in rows {
                self.row(row.as_ref().map(|row| row.data()));
                self.position.record += 1;
                self.flush_if_full()?;
            }
        }
    }

    #[cfg(feature = "parquet")]
    fn row(&mut self, row: Option<&[u8]>) {
        let place = self.place();
        let reason = match row.map(std::str::from_utf8) {
            Some(Ok("")) => Reason::Empty,
            Some(Ok(text)) if text.len() as u64 <= MAX_WHOLE_BYTES => {
                self.batch.text += text;
                return self.batch.segment(place, After::End, self.part(text.as_bytes()));
            }
            Some(Ok(_)) => Reason::Broken(too_long()),
            Some(Err(error)) => {
                Reason::Broken(format!("not UTF-8 at byte {}", error.valid_up_to()))
            }
            None => Reason::Broken(String::from("the row is null")),
        };
        self.batch.leave_out(place, reason);
    }
}

fn too_long() -> String {
    format!("longer than {} MiB", MAX_WHOLE_BYTES >> 20)
}
