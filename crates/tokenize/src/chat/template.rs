//! Chat templates: Jinja as `apply_chat_template` of transformers sets it up.
//!
//! `{% generation %}`, which is transformers' own, marks what the assistant says. It becomes a call
//! block of a function that puts a mark at either end; the marks are taken out of the rendered
//! text. One tag takes the place of one tag, so white space around it is stripped as before.
//!
//! A template comes from outside. Fuel bounds its steps and the bytes it makes, and with them how
//! deeply values can be nested; [`STACK_BYTES`] is enough for whoever walks these.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use twox_hash::XxHash3_128;

use super::super::TokenizeError;
use super::super::guard::guarded;
use super::python;

/// Steps of one rendering; one is also used up for every 64 bytes that are made. Bounds time and
/// memory.
const FUEL: u64 = 1 << 21;

/// Stack of a thread that renders: a level of nesting takes more than one step, and up to about 500
/// bytes. It is address space; only what is used takes memory.
pub(crate) const STACK_BYTES: usize = 1 << 30;

/// The function in the place of `generation`.
const TRACKER: &str = "dquant_generation";

/// Named tokens of `tokenizer_config.json` that are variables.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Functions that templates call.
const GLOBALS: [&str; 4] = ["raise_exception", "strftime_now", "range", "namespace"];

/// Names of templates in the environment.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// The templates of a model: one, or another one for conversations with tools.
pub(super) struct Templates {
    environment: Environment<'static>,
    /// The named tokens.
    tokens: Vec<(String, Value)>,
    /// Those of [`DEFAULT`] and [`TOOL_USE`] that say what the assistant says.
    tracking: Vec<&'static str>,
    has_tool_use: bool,
    /// Characters of sources and tokens that are no marks.
    used: Used,
    identity: String,
    uses_time: bool,
}

/// What one rendering made.
#[derive(Debug, PartialEq)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// Characters in generation blocks.
    pub(super) spans: Vec<Range<usize>>,
    /// How much the tokens in each of them weigh in the loss; empty where all weigh 1.
    pub(super) weights: Vec<f32>,
}

impl Templates {
    /// Loads the template in `file`, or that beside a `tokenizer.json`. `now` is the time of
    /// `strftime_now`.
    ///
    /// # Errors
    /// When there is none, or it is no template.
    pub(super) fn load(
        tokenizer: &Path,
        file: Option<&Path>,
        now: u64,
    ) -> Result<Templates, TokenizeError> {
        let config_path = tokenizer.with_file_name("tokenizer_config.json");
        let config = match fs::read(&config_path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| broken(&config_path, error.to_string()))?,
            Err(_) => serde_json::Value::Null,
        };
        let (path, sources) = sources(tokenizer, file, &config_path, &config)?;
        let mut environment = environment(now);
        let mut tracking = Vec::new();
        let mut hash = XxHash3_128::new();
        for (name, source) in &sources {
            part_of(&mut hash, name);
            part_of(&mut hash, source);
            // As Python reads text, and as Jinja takes it.
            let source = source.replace("\r\n", "\n").replace('\r', "\n");
            let (source, is_tracking) = track(&source);
            if is_tracking {
                tracking.push(*name);
            }
            let added = guarded(|| environment.add_template_owned(*name, source));
            added
                .map_err(|panic| broken(&path, panic))?
                .map_err(|error| broken(&path, described(&error)))?;
        }
        let tokens = TOKENS.iter().filter_map(|name| {
            let value = config.get(name)?;
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            part_of(&mut hash, name);
            part_of(&mut hash, text);
            Some(((*name).to_owned(), Value::from(text)))
        });
        let tokens: Vec<_> = tokens.collect();
        let mut used = Used::default();
        sources.iter().for_each(|(_, source)| used.text(source));
        tokens.iter().for_each(|(_, token)| used.value(token));
        let file_name = path.file_name().unwrap_or_default().display();
        Ok(Templates {
            environment,
            tokens,
            used,
            tracking,
            has_tool_use: sources.iter().any(|(name, _)| *name == TOOL_USE),
            identity: format!("{file_name} (xxh3 {:032x})", hash.finish_128()),
            uses_time: sources.iter().any(|(_, source)| source.contains("strftime_now")),
        })
    }

    /// The file and the hash of the templates.
    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    /// Whether what is rendered may depend on the time.
    pub(super) fn uses_time(&self) -> bool {
        self.uses_time
    }

    /// The template for a conversation with these variables.
    fn name(&self, variables: &[(String, Value)]) -> &'static str {
        let has_tools = variables.iter().any(|(name, tools)| name == "tools" && !tools.is_none());
        if self.has_tool_use && has_tools { TOOL_USE } else { DEFAULT }
    }

    /// Whether the template for a conversation with these variables has generation blocks.
    pub(super) fn is_tracking(&self, variables: &[(String, Value)]) -> bool {
        self.tracking.contains(&self.name(variables))
    }

    /// Renders messages. The characters in `marks` must not occur in them.
    ///
    /// # Errors
    /// With the template's reason, or that of the engine.
    pub(super) fn render(
        &self,
        messages: &[Value],
        variables: &[(String, Value)],
        prompts: bool,
        marks: [char; 2],
    ) -> Result<Rendered, String> {
        let tracker = move |state: &mut State<'_, '_>, kwargs: Kwargs| -> Result<String, Error> {
            let body: Value = kwargs.get("caller")?;
            let said = body.call(state, &[])?;
            Ok(format!("{}{said}{}", marks[0], marks[1]))
        };
        let own = [
            ("messages", Value::from(messages.to_vec())),
            ("add_generation_prompt", Value::from(prompts)),
            (TRACKER, Value::from_function(tracker)),
        ];
        let absent = ["tools", "documents"].map(|name| (name.to_owned(), Value::from(())));
        let own = own.map(|(name, value)| (name.to_owned(), value));
        // What the model's files say, a record does not change.
        let is_free = |(name, _): &&(String, Value)| {
            !GLOBALS.contains(&name.as_str()) && self.tokens.iter().all(|(own, _)| own != name)
        };
        let of_record = variables.iter().filter(is_free);
        let given = self.tokens.iter().chain(&absent).chain(of_record).chain(&own).cloned();
        let context = Value::from_pairs(given);
        let template = self.environment.get_template(self.name(variables));
        let template = template.map_err(|error| error.to_string())?;
        let rendered = guarded(|| template.render(context))?;
        let rendered = rendered.map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => {
                String::from("the template does not end, or the conversation is too long for it")
            }
            _ => format!("the template: {}", described(&error)),
        })?;
        separate(&rendered, marks)
            .ok_or_else(|| String::from("the template changes what is in its generation blocks"))
    }
}

fn broken(path: &Path, reason: String) -> TokenizeError {
    TokenizeError::ChatTemplate { path: path.to_owned(), reason }
}

/// An error of the engine, with the line where there is one.
fn described(error: &Error) -> String {
    let mut text = match (error.kind(), error.detail()) {
        // Also what templates raise themselves.
        (ErrorKind::InvalidOperation | ErrorKind::SyntaxError, Some(detail)) => detail.to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    if let Some(line) = error.line() {
        text += &format!(" (line {line})");
    }
    text
}

/// The file of the templates, and the source of each by its name.
type Sources = (PathBuf, Vec<(&'static str, String)>);

/// Finds the templates.
fn sources(
    tokenizer: &Path,
    file: Option<&Path>,
    config_path: &Path,
    config: &serde_json::Value,
) -> Result<Sources, TokenizeError> {
    let beside = tokenizer.with_file_name("chat_template.jinja");
    let file = file.or_else(|| beside.exists().then_some(beside.as_path()));
    if let Some(file) = file {
        let bytes = fs::read(file).map_err(TokenizeError::io("open", file))?;
        let source = String::from_utf8(bytes).map_err(|error| {
            broken(file, format!("not UTF-8 at byte {}", error.utf8_error().valid_up_to()))
        })?;
        return Ok((file.to_owned(), vec![(DEFAULT, source)]));
    }
    let template = config.get("chat_template");
    if let Some(source) = template.and_then(serde_json::Value::as_str) {
        return Ok((config_path.to_owned(), vec![(DEFAULT, source.to_owned())]));
    }
    let list = template.and_then(serde_json::Value::as_array);
    let named = |wanted: &'static str| {
        let mut all = list.into_iter().flatten();
        let found = all.find(|one| one.get("name").and_then(|name| name.as_str()) == Some(wanted));
        Some((wanted, found?.get("template")?.as_str()?.to_owned()))
    };
    let found: Vec<_> = [DEFAULT, TOOL_USE].into_iter().filter_map(named).collect();
    match found.first() {
        Some((DEFAULT, _)) => Ok((config_path.to_owned(), found)),
        _ if list.is_some() => {
            Err(broken(config_path, String::from("none of its chat templates is `default`")))
        }
        _ => Err(TokenizeError::NoChatTemplate { tokenizer: tokenizer.to_owned() }),
    }
}

/// What `apply_chat_template` gives its templates.
fn environment(now: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    // The usual delimiters do not conflict, so there is one.
    environment.set_syntax(syntax.unwrap_or_default());
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(python::method);
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("trim", python::trim);
    environment.add_filter("string", python::text);
    environment.set_formatter(|output, _, value| match value.as_str() {
        Some(text) => Ok(output.write_str(text)?),
        None => Ok(output.write_str(&python::text(value)?)?),
    });
    environment.add_test("sequence", python::is_sequence);
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
    });
    environment.add_function("strftime_now", move |format: &str| python::strftime(now, format));
    environment
}

/// Adds a text to an identity.
fn part_of(hash: &mut XxHash3_128, text: &str) {
    hash.write(&(text.len() as u64).to_le_bytes());
    hash.write(text.as_bytes());
}

/// Which of the characters to which Unicode gives no meaning, from U+FDD0 to U+FDEF, occur
/// somewhere: a bit for each.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Used(u32);

impl Used {
    fn text(&mut self, text: &str) {
        for c in text.chars().filter(|c| ('\u{fdd0}'..='\u{fdef}').contains(c)) {
            self.0 |= 1 << (c as u32 - 0xfdd0);
        }
    }

    /// The texts in a value, which is as deep as JSON may be.
    pub(super) fn value(&mut self, value: &Value) {
        if let Some(text) = value.as_str() {
            return self.text(text);
        }
        if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
            return;
        }
        for item in value.try_iter().into_iter().flatten() {
            if value.kind() == ValueKind::Map {
                self.value(&value.get_item(&item).unwrap_or_default());
            }
            self.value(&item);
        }
    }

    /// The first two that do not occur.
    fn free(self) -> Option<[char; 2]> {
        let mut free = (0..32_u32).filter(|bit| self.0 >> bit & 1 == 0);
        let mut next = || char::from_u32(0xfdd0 + free.next()?);
        Some([next()?, next()?])
    }
}

impl Templates {
    /// The marks for a conversation: two characters that nothing of it and of the model holds.
    pub(super) fn marks(
        &self,
        messages: &[Value],
        variables: &[(String, Value)],
    ) -> Option<[char; 2]> {
        let mut used = self.used;
        messages.iter().for_each(|message| used.value(message));
        for (name, value) in variables {
            used.text(name);
            used.value(value);
        }
        used.free()
    }
}

/// Takes the marks out of a rendered text. `None` when they do not match.
fn separate(rendered: &str, [open, close]: [char; 2]) -> Option<Rendered> {
    let mut text = String::with_capacity(rendered.len());
    let (mut spans, mut opened, mut characters) = (Vec::new(), Vec::new(), 0);
    for c in rendered.chars() {
        if c == open {
            opened.push(characters);
        } else if c == close {
            let start = opened.pop()?;
            if opened.is_empty() {
                spans.push(start..characters);
            }
        } else {
            characters += 1;
            text.push(c);
        }
    }
    opened.is_empty().then_some(Rendered { text, spans, weights: Vec::new() })
}

/// Puts call blocks in the place of generation blocks; tells whether there are any.
fn track(source: &str) -> (String, bool) {
    let (mut written, mut rest, mut found) = (String::with_capacity(source.len()), source, false);
    while let Some(at) = rest.find('{') {
        let (text, tag) = rest.split_at(at);
        written += text;
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'{') => inside(&tag[2..], "}}").map_or(tag.len(), |end| end + 4),
            Some(b'%') => {
                let (name, name_end) = name_of(tag);
                let instead = match name {
                    "generation" => Some(format!("call {TRACKER}()")),
                    "endgeneration" => Some(String::from("endcall")),
                    _ => None,
                };
                if let Some(instead) = instead {
                    found = true;
                    written += &tag[..name_end - name.len()];
                    written += &instead;
                    rest = &tag[name_end..];
                    continue;
                }
                match name {
                    "raw" => end_of_raw(tag).unwrap_or(tag.len()),
                    _ => inside(&tag[2..], "%}").map_or(tag.len(), |end| end + 4),
                }
            }
            _ => 1,
        };
        written += &tag[..end];
        rest = &tag[end..];
    }
    written += rest;
    (written, found)
}

/// The word that a block tag begins with, and where it ends.
fn name_of(tag: &str) -> (&str, usize) {
    let body = &tag[2..];
    let body = body.strip_prefix(['-', '+']).unwrap_or(body).trim_start();
    let length = body.bytes().take_while(|c| c.is_ascii_alphanumeric() || *c == b'_').count();
    (&body[..length], tag.len() - body.len() + length)
}

/// Where the end of a tag begins, from its inside: strings and brackets are stepped over.
fn inside(body: &str, end: &str) -> Option<usize> {
    let (mut depth, mut at) = (0_usize, 0);
    let bytes = body.as_bytes();
    while at < bytes.len() {
        match bytes[at] {
            _ if depth == 0 && bytes[at..].starts_with(end.as_bytes()) => return Some(at),
            quote @ (b'"' | b'\'') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            b'{' | b'[' | b'(' => depth += 1,
            b'}' | b']' | b')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Where a raw block ends, from its first tag.
fn end_of_raw(tag: &str) -> Option<usize> {
    let mut at = 2;
    loop {
        at += tag[at..].find("{%")?;
        let (name, end) = name_of(&tag[at..]);
        if name == "endraw" {
            return Some(at + end);
        }
        at += 2;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

    fn templates(source: &str) -> Result<Templates, TokenizeError> {
        let name = format!(
            "dquant-template-{}-{}",
            std::process::id(),
            XxHash3_128::oneshot(source.as_bytes())
        );
        let path = std::env::temp_dir().join(name);
        fs::write(&path, source).unwrap();
        let loaded = Templates::load(Path::new("/nowhere/tokenizer.json"), Some(&path), 86_400);
        fs::remove_file(path).unwrap();
        loaded
    }

    fn render(source: &str) -> Result<Rendered, String> {
        let messages: Vec<Value> = serde_json::from_str(
            r#"[{"role":"user","content":"a <b>"},{"role":"assistant","content":" é\n","n":null}]"#,
        )
        .unwrap();
        templates(source).map_err(|error| error.to_string())?.render(&messages, &[], true, MARKS)
    }

    fn text(source: &str) -> String {
        render(source).unwrap().text
    }

    #[test]
    fn the_environment_is_that_of_transformers() {
        assert_eq!(text("  {% if true %}\n x\n  {% endif %}\ny\n"), " x\ny");
        assert_eq!(text("{{ messages[0].content }}{{ messages[1]['content'].strip() }}"), "a <b>é");
        assert_eq!(text("{{ messages[0] | tojson }}"), r#"{"role": "user", "content": "a <b>"}"#);
        assert_eq!(text("{{ tools is none }}{{ documents }}{{ x is defined }}"), "TrueNoneFalse");
        assert_eq!(text("{{ strftime_now('%d %b %Y') }}"), "02 Jan 1970");
        assert_eq!(
            text(
                "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.index }}{% endfor %}"
            ),
            "1"
        );
        let namespace = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}\
                         {{ ns.n }}";
        assert_eq!(text(namespace), "2");
        assert_eq!(
            text("{{ 'x' is sequence }}{{ {} is sequence }}{{ 1 is sequence }}"),
            "TrueTrueFalse"
        );
        let refused = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert_eq!(refused, "the template: roles must alternate (line 1)");
    }

    #[test]
    fn generation_blocks_are_marked() {
        let source = "{% for m in messages %}\n{{ m.role }}:\n  {%- generation -%}\n  {{ m.content }}\
                      {{ loop.index }}\n  \
                      {%- endgeneration +%}\n{% endfor %}";
        let found = render(source).unwrap();
        assert_eq!(found.text, "user:a <b>1\nassistant: é\n2\n");
        assert_eq!(found.spans, [5..11, 22..26]);
        let plain = source.replace("endgeneration", "endif").replace("generation", "if true");
        assert_eq!(text(&plain), found.text, "white space is that of any block");
        for (source, found) in [
            ("{#{% generation %}#}", false),
            ("{% raw %}{% generation %}{% endraw %}", false),
            ("{{ '{% generation %}' }}", false),
            ("{{ {'a': {}} }}{%generation%}{% endgeneration %}", true),
            ("{% set x = '%}' %}{%+ generation-%}{%- endgeneration %}", true),
            ("{% generation", true),
            ("{{ ' {% raw %} \\", false),
        ] {
            let (tracked, is_found) = track(source);
            assert_eq!(is_found, found, "{source}");
            assert_eq!(is_found, tracked != source, "{source}");
        }
    }

    #[test]
    fn marks_are_characters_that_nothing_holds() {
        let marks = |record: &str| {
            let mut used = Used::default();
            used.value(&serde_json::from_str(record).unwrap());
            used.free()
        };
        assert_eq!(marks("{}"), Some(MARKS));
        let escaped = r#"{"a": ["\ufdd0 \uFDD1", {"\uFdd3": "\ufDd2"}]}"#;
        assert_eq!(marks(escaped), Some(['\u{fdd4}', '\u{fdd5}']));
        let all: String = ('\u{fdd0}'..='\u{fdef}').collect();
        assert_eq!(marks(&format!("[\"{all}\"]")), None);
        assert_eq!(separate("a\u{fdd1}", MARKS), None);
        assert_eq!(separate("\u{fdd0}a", MARKS), None);
    }

    #[test]
    fn broken_templates_are_refused() {
        for (source, why) in [
            ("{% for m in messages %}", "line 1"),
            ("{% generation %}", "line 1"),
            ("{% endgeneration %}", "line 1"),
            ("{{ 'a' }", "line 1"),
            ("\n{% frob %}", "(line 2)"),
        ] {
            let error = templates(source).err().unwrap().to_string();
            assert!(error.contains(why), "{source}: {error}");
        }
        for (source, why) in [
            ("{{ messages[0].a.b }}", "undefined"),
            ("{{ messages | frob }}", "frob"),
            ("{{ messages[0].content.frob() }}", "frob"),
            ("{{ 1 + 'a' }}", "(line 1)"),
            ("{{ messages[9] | tojson }}", "undefined"),
        ] {
            let error = render(source).unwrap_err();
            assert!(error.contains(why), "{source}: {error}");
        }
    }

    /// Loops, recursion, and values that grow or nest without an end.
    #[test]
    fn a_template_without_an_end_is_stopped() {
        let nested = "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(99) %}\
                      {% set ns.x = [[[[[[[[[[[[[[[[ns.x]]]]]]]]]]]]]]]] %}{% endfor %}{% endfor %}";
        let deep = "{% set ns = namespace(x=[]) %}{% for i in range(20000) %}\
                    {% set ns.x = [[[[[[[[[[[[[[[[ns.x]]]]]]]]]]]]]]]] %}{% endfor %}";
        for (source, why) in [
            (
                "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                "does not end",
            ),
            ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}", "recursion"),
            (
                "{% macro f(n) %}{% generation %}{{ f(n) }}{% endgeneration %}{% endmacro %}{{ f(0) }}",
                "recursion",
            ),
            (
                "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
                "does not end",
            ),
            ("{{ 'a' * 1000000000 }}", ""),
            (nested, "does not end"),
            (&format!("{deep}{{{{ ns.x }}}}"), "too deeply"),
            (&format!("{deep}{{{{ 'a' ~ ns.x }}}}"), ""),
            (&format!("{deep}{{{{ ns.x | tojson }}}}"), "too deeply"),
            (&format!("{deep}{{% set y = ns.x %}}{{{{ y == ns.x }}}}"), ""),
        ] {
            let source = source.to_owned();
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            let rendered =
                thread.spawn(move || render(&source).map(|_| ())).unwrap().join().unwrap();
            let reason = rendered.err().unwrap_or_default();
            assert!(reason.contains(why), "{reason}");
        }
    }
}
