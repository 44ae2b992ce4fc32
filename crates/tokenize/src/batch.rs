//! What passes between the threads of a run: text of several documents, and the tokens of it.
//!
//! Documents of a few hundred bytes share a batch, so that a queue is used once per chunk of text
//! and not once per document.

use std::fmt;
use std::sync::Arc;

use formats::manifest::Part;

use super::chat::Chat;
use super::checkpoint::Position;
use super::turns::Turns;
use super::vocabulary::Vocabulary;

/// Where a document comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Which source, counted from 0.
    pub(super) source: usize,
    /// Which line or row of it, counted from 0; 0 for plain text.
    pub(super) record: u64,
}

/// What follows the text of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// More text of the document; `forced` when the cut may change a token or two.
    More { forced: bool },
    /// The end of the document.
    End,
    /// Nothing: the document is left out.
    Discard,
}

/// A part of the text of a batch that belongs to one document.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) place: Place,
    /// End of its text in the batch.
    pub(super) end: usize,
    pub(super) after: After,
    /// The part that the document goes to.
    pub(super) part: Part,
}

/// Why a document is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It holds no text.
    Empty,
    /// A file is not UTF-8 from this byte on.
    NotUtf8 {
        /// Offset of the first byte that is not part of UTF-8 text.
        valid_bytes: u64,
    },
    /// A line or row has no text, for this reason.
    Broken(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Empty => f.write_str("empty"),
            Reason::NotUtf8 { valid_bytes } => write!(f, "not UTF-8 at byte {valid_bytes}"),
            Reason::Broken(reason) => f.write_str(reason),
        }
    }
}

/// Text on its way to an encoder.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) text: String,
    pub(super) segments: Vec<Segment>,
    /// Documents left out, with the number of segments before each.
    pub(super) left_out: Vec<(usize, Place, Reason)>,
    /// Where a run goes on that was killed after this batch.
    pub(super) position: Position,
    /// Bytes of the inputs that were read for this batch and those before it.
    pub(super) input_bytes: u64,
}

impl Batch {
    /// Ends a segment at the end of the text.
    pub(super) fn segment(&mut self, place: Place, after: After, part: Part) {
        self.segments.push(Segment { place, end: self.text.len(), after, part });
    }

    pub(super) fn leave_out(&mut self, place: Place, reason: Reason) {
        self.left_out.push((self.segments.len(), place, reason));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.left_out.is_empty()
    }

    /// Whether it should be sent on. Entries count too: a million empty lines have no text.
    pub(super) fn is_full(&self, chunk_bytes: usize) -> bool {
        self.text.len() >= chunk_bytes || self.segments.len() + self.left_out.len() >= 1 << 14
    }

    /// The tokens of the batch, with the end of each segment among them.
    ///
    /// # Errors
    /// Names the document that the vocabulary cannot encode, and its reason.
    pub(super) fn encode(&self, encoder: &Encoder<'_>) -> Result<Encoded, (Place, String)> {
        let mut tokens = Vec::with_capacity(self.text.len() / 3);
        let (mut ends, mut start) = (Vec::with_capacity(self.segments.len()), 0);
        let mut conversations = Vec::new();
        for segment in &self.segments {
            let text = &self.text[start..segment.end];
            if let Some(chat) = encoder.chat {
                let before = tokens.len();
                let turns = encoder.conversation(chat, text, &mut tokens);
                if turns.is_err() {
                    tokens.truncate(before);
                }
                conversations.push(turns);
            } else {
                let encoded = encoder.vocabulary.encode(text, &mut tokens);
                encoded.map_err(|reason| (segment.place, reason))?;
                if segment.after == After::End {
                    tokens.extend(encoder.eos);
                }
            }
            ends.push(tokens.len());
            start = segment.end;
        }
        Ok(Encoded { tokens, ends, conversations })
    }
}

/// What makes ids of text; threads share it.
pub(super) struct Encoder<'a> {
    pub(super) vocabulary: &'a Vocabulary,
    /// The id that ends a document.
    pub(super) eos: Option<u32>,
    /// What makes conversations of documents.
    pub(super) chat: Option<&'a Chat>,
}

impl Encoder<'_> {
    fn conversation(
        &self,
        chat: &Chat,
        record: &str,
        tokens: &mut Vec<u32>,
    ) -> Result<Turns, String> {
        let mut turns = self.vocabulary.encode_conversation(chat, record, tokens)?;
        if let Some(eos) = self.eos.filter(|_| !turns.is_empty()) {
            tokens.push(eos);
            turns.extend()?;
            turns.weights.extend(turns.weights.last().copied());
        }
        Ok(turns)
    }
}

/// The tokens of a batch.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) tokens: Vec<u32>,
    /// End of each segment's tokens.
    pub(super) ends: Vec<usize>,
    /// Of each segment that is a conversation: its turns, or why it is left out.
    pub(super) conversations: Vec<Result<Turns, String>>,
}

/// A batch that encoder and writer both look at.
pub(super) type Shared = Arc<Batch>;
