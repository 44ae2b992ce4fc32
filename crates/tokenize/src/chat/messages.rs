//! A record of a conversation: its messages and its other fields.
//!
//! Two shapes are read. OpenAI's has `messages`, each with `role`, `content` and whatever a
//! template knows besides. ShareGPT's has `conversations`, each with `from` and `value`; these
//! become roles and contents. What transformers does to messages before it renders them is done
//! here.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::super::jsonl;
use super::python;

/// Names of a message's reasoning, the one that counts first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// What ShareGPT calls roles.
const ROLES: [(&str, &str); 8] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("model", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("observation", "tool"),
];

/// A conversation, ready for a template.
#[derive(Debug)]
pub(super) struct Conversation {
    /// Objects with a role.
    pub(super) messages: Vec<Value>,
    /// What else a template may look at, `tools` and `documents` among them.
    pub(super) variables: Vec<(String, Value)>,
    /// The first message whose weight is null, as NaN is read.
    pub(super) unknown_weight: Option<usize>,
}

impl Conversation {
    /// Reads a record: a JSON object.
    ///
    /// # Errors
    /// Says what is not as in either shape.
    pub(super) fn read(record: &str, field: Option<&str>) -> Result<Conversation, String> {
        let parsed = serde_json::from_str(record).or_else(|error| {
            let conforming = jsonl::conforming(record).ok_or(error)?;
            serde_json::from_str(&conforming)
        });
        let record: Value = parsed.map_err(|error: serde_json::Error| jsonl::described(&error))?;
        let mut fields = pairs(&record).ok_or("it is not an object")?;
        let names: &[&str] = match &field {
            Some(field) => std::slice::from_ref(field),
            None => &["messages", "conversations"],
        };
        let is_there = |name: &&&str| fields.iter().any(|(key, _)| key == **name);
        let Some(name) = names.iter().find(is_there) else {
            let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
            return Err(format!("no field {}", names.join(" or ")));
        };
        let mut list = Value::UNDEFINED;
        fields.retain(|(key, value)| {
            let is_list = key == name;
            if is_list {
                list = value.clone();
            }
            !is_list
        });
        let is_list = list.kind() == ValueKind::Seq;
        if !is_list {
            return Err(format!("`{name}` is {}, not a list of messages", kind(&list)));
        }
        let mut all = list.try_iter().map_err(|error| error.to_string())?;
        let unknown_weight = all.position(|message| get(&message, "weight").is_none());
        let all = list.try_iter().map_err(|error| error.to_string())?;
        let messages = all.enumerate().map(|(at, value)| {
            message(&value).map_err(|reason| format!("message {at} of `{name}` {reason}"))
        });
        let mut messages = messages.collect::<Result<Vec<_>, _>>()?;
        if messages.is_empty() {
            return Err(format!("`{name}` has no messages"));
        }
        if *name == "conversations" {
            begin_with_system(&mut messages, &fields);
        }
        Ok(Conversation { messages, variables: variables(fields)?, unknown_weight })
    }

    /// What decides whether it is held out: role and content of each message.
    ///
    /// # Errors
    /// When a content is nested too deeply.
    pub(super) fn text(&self) -> Result<String, String> {
        let mut text = String::new();
        for message in &self.messages {
            let [role, content] = ["role", "content"].map(|name| get(message, name));
            text += role.as_str().unwrap_or_default();
            text.push('\n');
            match content.as_str() {
                Some(content) => text += content,
                None if content.is_undefined() => {}
                None => text += &python::json(&content).map_err(|error| error.to_string())?,
            }
            text.push('\n');
        }
        Ok(text)
    }
}

/// The entries of an object.
fn pairs(value: &Value) -> Option<Vec<(String, Value)>> {
    let pairs = value.as_object()?.try_iter_pairs()?;
    let pairs = pairs.map(|(key, value)| Some((key.as_str()?.to_owned(), value)));
    (value.kind() == ValueKind::Map).then(|| pairs.collect())?
}

/// The entry of an object, or undefined.
pub(super) fn get(value: &Value, name: &str) -> Value {
    value.get_attr(name).unwrap_or_default()
}

/// Whether a model is to learn to say a message: one of the assistant that has no weight of 0, as
/// OpenAI's and Mistral's files mark those that it is not to learn.
pub(super) fn is_said(message: &Value) -> bool {
    get(message, "role").as_str() == Some("assistant") && !is_unweighted(message)
}

/// Whether a message has a weight of 0, or is not to be trained.
pub(super) fn is_unweighted(message: &Value) -> bool {
    let weight = get(message, "weight");
    let train = get(message, "train");
    weight.kind() == ValueKind::Number && !weight.is_true()
        || train.kind() == ValueKind::Bool && !train.is_true()
}

/// What a value is, for whoever expected another.
fn kind(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::None => "null",
        ValueKind::Bool => "a boolean",
        ValueKind::Number => "a number",
        ValueKind::String => "a string",
        ValueKind::Seq => "a list",
        ValueKind::Map => "an object",
        _ => "missing",
    }
}

/// A message with role and content.
fn message(value: &Value) -> Result<Value, String> {
    let Some(mut fields) = pairs(value) else {
        return Err(format!("is {}, not an object", kind(value)));
    };
    // As transformers: APIs write null for what is missing.
    fields.retain(|(_, value)| !value.is_none());
    let has = |name: &str| fields.iter().any(|(key, _)| key == name);
    if !has("role") && has("from") {
        for (key, value) in &mut fields {
            match key.as_str() {
                "from" => {
                    let role = value.as_str().and_then(role);
                    let role = role.ok_or_else(|| {
                        format!("is from `{value}`, none of human, user, gpt, assistant, model, system, tool and observation")
                    })?;
                    (*key, *value) = (String::from("role"), Value::from(role));
                }
                "value" => *key = String::from("content"),
                _ => {}
            }
        }
    }
    let find = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value);
    match find("role") {
        None => return Err(String::from("has no `role`")),
        Some(role) if role.as_str().is_none() => {
            return Err(format!("has a role that is {}, not a string", kind(role)));
        }
        Some(_) => {}
    }
    if let Some(content) = find("content")
        && content.as_str().is_none()
        && content.kind() != ValueKind::Seq
    {
        return Err(format!("has a content that is {}, not a string", kind(content)));
    }
    if find("role").and_then(Value::as_str) == Some("assistant") {
        check_weight(find("weight"), find("train"))?;
    }
    let reasoning = REASONING.iter().find_map(|name| find(name)).cloned();
    if let Some(reasoning) = reasoning {
        fields.insert(0, (String::from("thinking"), reasoning.clone()));
        fields.push((String::from("reasoning_content"), reasoning));
    }
    Ok(Value::from_pairs(fields))
}

/// How much a message weighs in the loss that a model is to learn to say: 1 where it does not say
/// otherwise.
pub(super) fn weight(message: &Value) -> f32 {
    if get(message, "train").kind() == ValueKind::Bool && !get(message, "train").is_true() {
        return 0.0;
    }
    let weight = get(message, "weight");
    number(&weight).map_or(1.0, |weight| weight as f32)
}

/// A number that a message may weigh.
fn number(value: &Value) -> Option<f64> {
    let number = f64::try_from(value.clone()).ok().filter(|_| value.kind() == ValueKind::Number)?;
    (0.0..=f64::from(f32::MAX)).contains(&number).then_some(number)
}

/// Whether what a message says of its training is understood.
fn check_weight(weight: Option<&Value>, train: Option<&Value>) -> Result<(), String> {
    if let Some(weight) = weight
        && number(weight).is_none()
    {
        let weight = serde_json::to_string(weight).unwrap_or_default();
        return Err(format!("has a weight of `{weight}`, which is no number from 0 on"));
    }
    match train {
        Some(train) if train.kind() != ValueKind::Bool => {
            Err(format!("has a `train` that is {}, not a boolean", kind(train)))
        }
        _ => Ok(()),
    }
}

fn role(from: &str) -> Option<&'static str> {
    ROLES.iter().find(|(name, _)| *name == from).map(|(_, role)| *role)
}

/// Some sets in ShareGPT's shape keep the system message outside of the list.
fn begin_with_system(messages: &mut Vec<Value>, fields: &[(String, Value)]) {
    let system = fields.iter().find(|(name, _)| name == "system").map(|(_, value)| value);
    let text = system.and_then(Value::as_str).filter(|text| !text.is_empty());
    if let Some(text) = text
        && get(&messages[0], "role").as_str() != Some("system")
    {
        let pairs = [("role", Value::from("system")), ("content", Value::from(text))];
        messages.insert(0, Value::from_pairs(pairs));
    }
}

/// The other fields as variables: `tools` may be JSON in a string, and `chat_template_kwargs` holds
/// more of them.
fn variables(fields: Vec<(String, Value)>) -> Result<Vec<(String, Value)>, String> {
    let mut variables = Vec::new();
    for (name, mut value) in fields {
        match name.as_str() {
            "chat_template_kwargs" => {
                variables.extend(pairs(&value).into_iter().flatten());
                continue;
            }
            "tools" => {
                if let Some(text) = value.as_str() {
                    let parsed = if text.is_empty() {
                        Ok(Value::from(()))
                    } else {
                        serde_json::from_str(text)
                    };
                    value = parsed.map_err(|error| format!("`tools` is no JSON: {error}"))?;
                }
                objects(&name, &value)?;
            }
            "documents" => objects(&name, &value)?,
            _ => {}
        }
        variables.push((name, value));
    }
    Ok(variables)
}

/// Refuses what is neither nothing nor a list of objects.
fn objects(name: &str, value: &Value) -> Result<(), String> {
    if value.is_none() {
        return Ok(());
    }
    let list = (value.kind() == ValueKind::Seq).then(|| value.try_iter());
    let are_objects = list
        .and_then(Result::ok)
        .is_some_and(|mut list| list.all(|value| value.kind() == ValueKind::Map));
    match are_objects {
        true => Ok(()),
        false => Err(format!("`{name}` is no list of objects")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn messages(record: &str) -> String {
        let found = Conversation::read(record, None).unwrap();
        python::json(&Value::from(found.messages)).unwrap()
    }

    #[test]
    fn both_shapes_become_the_same() {
        let openai = r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"a"},
            {"role":"assistant","content":"b"}]}"#;
        let sharegpt = r#"{"conversations":[{"from":"system","value":"s"},{"from":"human","value":"a"},
            {"from":"gpt","value":"b"}]}"#;
        let beside = r#"{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b"}],
            "system":"s"}"#;
        assert_eq!(messages(openai), messages(sharegpt));
        assert_eq!(messages(openai), messages(beside));
        let text = |record| Conversation::read(record, None).unwrap().text().unwrap();
        assert_eq!(text(sharegpt), "system\ns\nuser\na\nassistant\nb\n");
    }

    #[test]
    fn messages_are_prepared_as_by_transformers() {
        let line = r#"{"messages":[{"role":"assistant","content":null,"z":1,"reasoning":"r","a":"\ud800"}]}"#;
        assert_eq!(
            messages(line),
            "[{\"thinking\": \"r\", \"role\": \"assistant\", \"z\": 1, \"reasoning\": \"r\", \"a\": \"\u{fffd}\", \
             \"reasoning_content\": \"r\"}]"
        );
    }

    #[test]
    fn other_fields_are_variables() {
        let read = |rest: &str| {
            let record = format!(r#"{{"messages":[{{"role":"user"}}],{rest}}}"#);
            Conversation::read(&record, None).map(|found| found.variables)
        };
        let found = read(r#""tools":"[{\"a\":1}]","chat_template_kwargs":{"think":true},"id":7"#);
        let names: Vec<String> = found.unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["tools", "think", "id"]);
        for (rest, why) in [
            (r#""tools":"[""#, "`tools` is no JSON"),
            (r#""tools":[1]"#, "no list of objects"),
            (r#""documents":{}"#, "no list of objects"),
        ] {
            assert!(read(rest).unwrap_err().contains(why), "{rest}");
        }
        assert!(read(r#""tools":null,"documents":[]"#).is_ok());
    }

    #[test]
    fn what_has_another_shape_is_refused() {
        for (record, why) in [
            ("{}", "no field `messages` or `conversations`"),
            (r#"{"text":"a"}"#, "no field `messages`"),
            (r#"{"messages":"a"}"#, "`messages` is a string, not a list"),
            (r#"{"messages":[]}"#, "`messages` has no messages"),
            (r#"{"messages":["a"]}"#, "message 0 of `messages` is a string, not an object"),
            (r#"{"messages":[{"content":"a"}]}"#, "message 0 of `messages` has no `role`"),
            (r#"{"messages":[{"role":1}]}"#, "has a role that is a number"),
            (r#"{"messages":[{"role":"user","content":7}]}"#, "a content that is a number"),
            (r#"{"messages":[{"role":"user","content":{}}]}"#, "a content that is an object"),
            (r#"{"conversations":[{"from":"x","value":"a"}]}"#, "is from `x`, none of human"),
            (r#"{"conversations":[{"from":"gpt","value":true}]}"#, "a content that is a boolean"),
        ] {
            let reason = Conversation::read(record, None).unwrap_err();
            assert!(reason.contains(why), "{record}: {reason}");
        }
        let deep = format!(r#"{{"messages":{}"#, "[".repeat(10_000));
        assert!(Conversation::read(&deep, None).unwrap_err().contains("recursion"));
        let other = Conversation::read(r#"{"messages":[]}"#, Some("chat")).unwrap_err();
        assert_eq!(other, "no field `chat`");
    }
}
