//! Keyword arguments of a stream as a request to `client`.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use client::{LeaveOut, Options};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};

use crate::errors::invalid;

/// Port of a RoCE endpoint whose address names none.
const ROCE_PORT: u16 = 4791;

/// Longest wait for a lost target, in seconds: a year.
const MAX_RECONNECT_S: f64 = 365.0 * 86_400.0;

/// Everything that opens a stream.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) url: String,
    pub(crate) plan: String,
    pub(crate) offload: bool,
    pub(crate) options: Options,
}

impl Request {
    /// Checks the keyword arguments. What only the DPU or the target can judge is left to them.
    pub(crate) fn new(
        source: &Bound<'_, PyAny>,
        plan: Option<String>,
        offload: bool,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Request> {
        let (mut options, mut actions) = (Options::from_env(), Actions::default());
        for (name, value) in given.into_iter().flatten() {
            let name = name.extract::<String>()?;
            if !value.is_none() && !actions.set(&name, &value)? {
                set(&mut options, &name, &value)?;
            }
        }
        let (url, blend) = datasets(source)?;
        let plan = actions.plan(plan, blend)?;
        let end = options.batches.map_or(Some(0), |count| options.first_batch.checked_add(count));
        if end.is_none() {
            return Err(invalid(
                "first_batch and batches together exceed 64 bits",
                "leave batches out",
            ));
        }
        Ok(Request { url, plan, offload, options })
    }

    /// Number of the first batch that is not delivered; `None` for a stream without end.
    pub(crate) fn end(&self) -> Option<u64> {
        // No overflow: checked when the request was made, and later requests begin before this end.
        self.options.batches.map(|count| self.options.first_batch + count)
    }
}

fn set(options: &mut Options, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    match name {
        "token" => options.token = value.extract()?,
        "dpu" => options.dpu = value.extract()?,
        "dtype" => options.dtype = value.extract()?,
        "vocab" => options.vocabulary = Some(value.extract()?),
        "seed" => options.seed = value.extract()?,
        "first_batch" => options.first_batch = value.extract()?,
        "batches" => options.batches = Some(batches(value.extract()?)?),
        "leave_out" => options.leave_out = ranges(value)?,
        "slots" => options.slots = value.extract()?,
        "slot_size" => options.slot_bytes = value.extract()?,
        "roce" => options.roce = Some(roce_address(value.extract()?)?),
        "memory" => options.memory = value.extract()?,
        "reconnect" => options.reconnect = seconds(value.extract()?)?,
        _ => {
            return Err(PyTypeError::new_err(format!(
                "no option '{name}'; there are seq_len, batch_size, shuffle, narrow, widen, pairs in place of a plan, \
                 and token, dpu, dtype, vocab, seed, first_batch, batches, leave_out, slots, slot_size, roce, \
                 memory, reconnect"
            )));
        }
    }
    Ok(())
}

/// The actions of a plan as keyword arguments.
#[derive(Debug, Default)]
struct Actions {
    seq_len: Option<u32>,
    batch_size: Option<u32>,
    shuffle: Option<bool>,
    narrow: Option<String>,
    widen: Option<String>,
    pairs: bool,
    /// One of them, if any was given.
    given: Option<String>,
}

impl Actions {
    /// Whether there is an action of this name.
    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        match name {
            "seq_len" => self.seq_len = Some(value.extract()?),
            "batch_size" => self.batch_size = Some(value.extract()?),
            "shuffle" => self.shuffle = Some(value.extract()?),
            "narrow" => self.narrow = Some(value.extract()?),
            "widen" => self.widen = Some(value.extract()?),
            "pairs" => self.pairs = value.extract()?,
            _ => return Ok(false),
        }
        self.given = Some(name.to_owned());
        Ok(true)
    }

    /// The plan as text: the given one, or the one that the keyword arguments describe.
    fn plan(self, plan: Option<String>, blend: Option<String>) -> PyResult<String> {
        let mut text = match (plan, self.given) {
            (Some(_), Some(name)) => {
                let message = format!("both a plan and {name} are given");
                return Err(invalid(message, "write everything into the plan, or leave it out"));
            }
            (Some(plan), None) => plan,
            (None, _) => {
                let Some(seq_len) = self.seq_len else {
                    let hint = "give seq_len=2048, or a plan: \"window(2048) | shuffle(7)\"";
                    return Err(invalid("no plan and no seq_len is given", hint));
                };
                let window = match self.pairs {
                    true => format!("window({}, overlap=1)", u64::from(seq_len) + 1),
                    false => format!("window({seq_len})"),
                };
                let shuffle = self.shuffle.unwrap_or(true).then(|| "shuffle(seed)".to_owned());
                let narrow = self.narrow.map(|to| format!("narrow({to})"));
                let widen = self.widen.map(|to| format!("widen({to})"));
                let pairs = self.pairs.then(|| "pairs".to_owned());
                let batch = self.batch_size.map(|samples| format!("batch({samples})"));
                let actions = [Some(window), shuffle, narrow, widen, pairs, batch];
                actions.into_iter().flatten().collect::<Vec<_>>().join(" | ")
            }
        };
        if let Some(blend) = blend {
            text = format!("{text} | {blend}");
        }
        Ok(text)
    }
}

/// The URL of a stream, and the blend of datasets that are given with their weights.
fn datasets(source: &Bound<'_, PyAny>) -> PyResult<(String, Option<String>)> {
    let Ok(weights) = source.cast::<PyMapping>() else {
        return Ok((source.extract::<PathBuf>()?.to_string_lossy().into_owned(), None));
    };
    let (mut target, mut parts) = (None, Vec::new());
    for item in weights.items()?.iter() {
        let (name, weight) = item.extract::<(PathBuf, f64)>()?;
        let name = name.to_string_lossy().into_owned();
        let (at, name) = match name.strip_prefix("dq://").and_then(|rest| rest.split_once('/')) {
            Some((host, name)) => (format!("dq://{host}"), name.to_owned()),
            None => (".".to_owned(), name),
        };
        if target.get_or_insert_with(|| at.clone()) != &at {
            let message =
                format!("datasets of {} and of {at} in one stream", target.unwrap_or_default());
            return Err(invalid(
                message,
                "all datasets of a stream are at one target, or all are local",
            ));
        }
        let quoted = name.replace('\\', "\\\\").replace('"', "\\\"");
        parts.push(format!("\"{quoted}\"={weight}"));
    }
    let target =
        target.ok_or_else(|| invalid("no dataset is given", "{\"web\": 0.7, \"code\": 0.3}"))?;
    Ok((target, Some(format!("blend({})", parts.join(", ")))))
}

fn batches(count: u64) -> PyResult<u64> {
    match count {
        0 => Err(invalid(
            "batches is 0",
            "give at least 1, or leave it out for a stream without end",
        )),
        count => Ok(count),
    }
}

/// Pairs of a first batch and the batch after the last.
pub(crate) fn ranges(value: &Bound<'_, PyAny>) -> PyResult<Vec<Range<u64>>> {
    let hint = "give pairs of a first batch and the batch after the last: [(1000, 1200)]";
    let pairs = value.extract::<Vec<(u64, u64)>>();
    let pairs = pairs.map_err(|_| match value.repr() {
        Ok(given) => invalid(format!("leave_out is {given}"), hint),
        Err(error) => error,
    })?;
    let ranges = pairs.into_iter().map(|(first, end)| first..end);
    Ok(left_out(ranges)?.ranges().to_vec())
}

/// Ranges of batches in rising order, joined where they touch.
pub(crate) fn left_out(ranges: impl IntoIterator<Item = Range<u64>>) -> PyResult<LeaveOut> {
    let hint = "a range is (first, end), its last batch is end - 1";
    LeaveOut::new(ranges).map_err(|error| invalid(error.to_string(), hint))
}

fn seconds(value: f64) -> PyResult<Duration> {
    if (0.0..=MAX_RECONNECT_S).contains(&value) {
        return Ok(Duration::from_secs_f64(value));
    }
    Err(invalid(format!("reconnect is {value}"), "give seconds from 0 to a year"))
}

fn roce_address(text: &str) -> PyResult<SocketAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let without_port = bare.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, ROCE_PORT));
    without_port
        .or_else(|_| text.parse())
        .map_err(|_| invalid(format!("roce is {text:?}"), "write it as IP[:PORT]"))
}
