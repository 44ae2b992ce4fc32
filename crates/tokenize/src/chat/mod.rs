//! Conversations: rendered by the chat template of a model, encoded, and divided into what the
//! model is trained to say and what not.
//!
//! ```text
//! record -> messages -> rendered text, spans of characters -> ids, spans of tokens -> turns
//! ```
//!
//! The text and the ids are those of `apply_chat_template(..., tokenize=True)` of transformers.
//! Where the template has generation blocks, so are the targets
//! (`return_assistant_tokens_mask=True`). Where it has none, a message of the assistant is what
//! rendering it adds to what is rendered before it, with the prompt for the assistant.

mod messages;
mod python;
mod template;

use std::ops::Range;
use std::path::Path;

use messages::Conversation;
use minijinja::Value;
pub(super) use template::STACK_BYTES;
use template::{Rendered, Templates};

use super::TokenizeError;
use super::hugging_face::HuggingFace;
use super::turns::Turns;

/// Messages that are rendered for one conversation to find out what the assistant says in it: it is
/// rendered up to each of them, so that time grows with the square.
const MAX_RENDERED_MESSAGES: usize = 1 << 21;

/// Text that is rendered for one conversation to find out what the assistant says in it.
const MAX_RENDERED_BYTES: usize = 1 << 32;

/// How conversations are read and rendered; threads share it.
pub(super) struct Chat {
    templates: Templates,
    field: Option<String>,
    /// Whether messages may weigh more than nothing and less than others.
    weights: bool,
}

impl Chat {
    /// Loads the template in `file`, or that beside a `tokenizer.json`. Messages are in `field`, or
    /// where the two usual shapes have them. `now` is the time for templates.
    ///
    /// # Errors
    /// When there is no template, or it is broken.
    pub(super) fn load(
        tokenizer: &Path,
        file: Option<&Path>,
        field: Option<&str>,
        now: u64,
    ) -> Result<Chat, TokenizeError> {
        let templates = Templates::load(tokenizer, file, now)?;
        Ok(Chat { templates, field: field.map(str::to_owned), weights: false })
    }

    /// The same, where the weight of each message is kept.
    pub(super) fn with_weights(self, weights: bool) -> Chat {
        Chat { weights, ..self }
    }

    /// The file and the hash of the template.
    pub(super) fn identity(&self) -> &str {
        self.templates.identity()
    }

    /// Whether ids may depend on the time.
    pub(super) fn uses_time(&self) -> bool {
        self.templates.uses_time()
    }

    /// The text of a record that decides whether it is held out; no template changes it.
    ///
    /// # Errors
    /// Says why it is no conversation.
    pub(super) fn deciding(&self, record: &str) -> Result<String, String> {
        Conversation::read(record, self.field.as_deref())?.text()
    }

    /// Appends the ids of a record.
    ///
    /// # Errors
    /// Says why it is no conversation, or why it cannot be rendered, divided or encoded.
    pub(super) fn encode(
        &self,
        record: &str,
        tokenizer: &HuggingFace,
        tokens: &mut Vec<u32>,
    ) -> Result<Turns, String> {
        let conversation = Conversation::read(record, self.field.as_deref())?;
        self.check_weights(&conversation)?;
        let Rendered { text, spans, weights } = self.render(&conversation)?;
        let (ids, offsets) = tokenizer.encode_with_offsets(&text)?;
        tokens.extend_from_slice(&ids);
        let said = masked(&offsets, &spans);
        let targets: Vec<bool> = said.iter().map(Option::is_some).collect();
        let mut turns = Turns::new(text.len() as u64, &targets)?;
        if self.weights {
            let weight = |span: Option<usize>| match span {
                Some(span) => weights.get(span).copied().unwrap_or(1.0),
                None => 0.0,
            };
            turns.weights = said.into_iter().map(weight).collect();
        }
        Ok(turns)
    }

    /// Refuses messages that weigh something between nothing and all where that is not kept: they
    /// would be trained in full.
    fn check_weights(&self, conversation: &Conversation) -> Result<(), String> {
        let Conversation { messages, unknown_weight, .. } = conversation;
        if let Some(at) = unknown_weight.filter(|_| self.weights) {
            return Err(format!(
                "message {at} has a weight of null or NaN, which is no number from 0 on"
            ));
        }
        let between = |message: &Value| ![0.0, 1.0].contains(&messages::weight(message));
        match messages.iter().position(|message| messages::is_said(message) && between(message)) {
            Some(at) if !self.weights => Err(format!(
                "message {at} has a weight of {}, neither 0 nor 1: --loss-weights keeps it",
                messages::weight(&messages[at])
            )),
            _ => Ok(()),
        }
    }

    /// The text, and the characters that the assistant says.
    fn render(&self, conversation: &Conversation) -> Result<Rendered, String> {
        let Conversation { messages, variables, .. } = conversation;
        let marks = self
            .templates
            .marks(messages, variables)
            .ok_or("it holds all 32 characters from U+FDD0 to U+FDEF, which mark what is said")?;
        let mut whole = self.templates.render(messages, variables, false, marks)?;
        if self.templates.is_tracking(variables) {
            let unlike = |message: &Value| {
                messages::is_unweighted(message)
                    || messages::is_said(message) && messages::weight(message) != 1.0
            };
            if let Some(at) = messages.iter().position(unlike) {
                let what = match messages::is_unweighted(&messages[at]) {
                    true => "is not to be learnt",
                    false => "weighs more or less than others",
                };
                return Err(format!(
                    "message {at} {what}, which a template with `{{% generation %}}` blocks does not know"
                ));
            }
        } else {
            let mut render = |messages: &[Value], prompts| {
                let rendered = self.templates.render(messages, variables, prompts, marks)?;
                Ok(rendered.text)
            };
            (whole.spans, whole.weights) = added(&whole.text, messages, &mut render)?;
        }
        Ok(whole)
    }
}

/// Renders messages, with the prompt for the assistant or without it.
type Render<'a> = &'a mut dyn FnMut(&[Value], bool) -> Result<String, String>;

/// Characters, and how much what is in them weighs.
type Said = (Vec<Range<usize>>, Vec<f32>);

/// The characters of `whole` that messages of the assistant add.
fn added(whole: &str, messages: &[Value], render: Render<'_>) -> Result<Said, String> {
    let ((mut spans, mut weights), mut bytes_left) = (Said::default(), MAX_RENDERED_BYTES);
    // Where the last span ends, in bytes and in characters.
    let (mut byte, mut character) = (0, 0);
    let said: Vec<usize> =
        (0..messages.len()).filter(|at| messages::is_said(&messages[*at])).collect();
    if said.len().saturating_mul(2 * messages.len()) > MAX_RENDERED_MESSAGES {
        let (count, answers) = (messages.len(), said.len());
        return Err(format!(
            "it has {count} messages, {answers} of the assistant: too many for a template without `{{% generation %}}` \
             blocks"
        ));
    }
    for at in said {
        let undivided = |what: &str| {
            format!(
                "{what} message {at}, so that it is not known where the assistant begins and ends: use a template with \
                 `{{% generation %}}` blocks"
            )
        };
        let prompt = render(&messages[..at], true)
            .map_err(|reason| undivided(&format!("{reason}, in front of")))?;
        let rendered = match at + 1 == messages.len() {
            true => whole.to_owned(),
            false => render(&messages[..=at], false)
                .map_err(|reason| undivided(&format!("{reason}, up to")))?,
        };
        if !rendered.starts_with(&prompt) {
            return Err(undivided("the template does not end its prompt where it begins with"));
        }
        if !whole.starts_with(&rendered) {
            return Err(undivided(
                "the template writes more or less for later messages in or before",
            ));
        }
        bytes_left = bytes_left
            .checked_sub(prompt.len() + rendered.len())
            .ok_or_else(|| undivided("it takes too long to render the conversation up to"))?;
        let start = prompt.len().max(byte);
        let end = rendered.len().max(start);
        let first = character + whole[byte..start].chars().count();
        character = first + whole[start..end].chars().count();
        byte = end;
        if first < character {
            spans.push(first..character);
            weights.push(messages::weight(&messages[at]));
        }
    }
    Ok((spans, weights))
}

/// The span that each token is in, as `apply_chat_template` decides it: the first that it overlaps.
/// Both are in order.
fn masked(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> Vec<Option<usize>> {
    let mut spans = spans.iter().enumerate().peekable();
    let of = |(start, end): &(usize, usize)| {
        while spans.next_if(|(_, span)| *start >= span.end).is_some() {}
        spans.peek().filter(|(_, span)| *end > span.start).map(|(at, _)| *at)
    };
    offsets.iter().map(of).collect()
}
