//! Keyword arguments of a stream as a request to `client`.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use client::Options;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

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
        url: String,
        plan: String,
        offload: bool,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Request> {
        let mut options = Options::from_env();
        for (name, value) in given.into_iter().flatten() {
            if !value.is_none() {
                set(&mut options, &name.extract::<String>()?, &value)?;
            }
        }
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
        "slots" => options.slots = value.extract()?,
        "slot_size" => options.slot_bytes = value.extract()?,
        "roce" => options.roce = Some(roce_address(value.extract()?)?),
        "memory" => options.memory = value.extract()?,
        "reconnect" => options.reconnect = seconds(value.extract()?)?,
        _ => {
            return Err(PyTypeError::new_err(format!(
                "no option '{name}'; there are token, dpu, dtype, vocab, seed, first_batch, batches, slots, slot_size, \
                 roce, memory, reconnect"
            )));
        }
    }
    Ok(())
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
