//! What a stream reports about itself, as objects of `dquant._records` and dictionaries.

use client::{DatasetInfo, Drawn, Opened, StreamStatus};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::batch::Form;

/// Fields of a dataset, by their names in Python.
pub(crate) fn dataset_fields<'py>(
    py: Python<'py>,
    dataset: &DatasetInfo,
) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("name", &dataset.name)?;
    fields.set_item("format", &dataset.format)?;
    fields.set_item("dtype", &dataset.dtype)?;
    fields.set_item("tokens", dataset.tokens)?;
    fields.set_item("data_offset", dataset.data_offset)?;
    fields.set_item("fingerprint", dataset.fingerprint)?;
    fields.set_item("content", dataset.content)?;
    fields.set_item("documents", dataset.documents)?;
    fields.set_item("targets", dataset.targets)?;
    let [weights, weights_content] = dataset.identity().loss_weights;
    fields.set_item("loss_weights", weights)?;
    fields.set_item("loss_weights_content", weights_content)?;
    fields.set_item("filtered_documents", dataset.filtered_documents)?;
    fields.set_item("duplicate_documents", dataset.duplicate_documents)?;
    fields.set_item("packed_samples", dataset.packed_samples)?;
    fields.set_item("packed_tokens", dataset.packed_tokens)?;
    fields.set_item("samples", dataset.samples)?;
    fields.set_item("tokenizer", &dataset.tokenizer)?;
    fields.set_item("max_id", dataset.max_id)?;
    Ok(fields)
}

/// A `dquant.Opened`.
pub(crate) fn opened<'py>(
    py: Python<'py>,
    opened: &Opened,
    form: Form,
) -> PyResult<Bound<'py, PyAny>> {
    let records = py.import("dquant._records")?;
    let dataset = records.getattr("Dataset")?;
    let datasets = opened.datasets.iter().map(|info| {
        let fields = dataset_fields(py, info)?;
        dataset.call((), Some(&fields))
    });
    let datasets = PyTuple::new(py, datasets.collect::<PyResult<Vec<_>>>()?)?;
    let shape = PyTuple::new(py, form.shape())?;
    records.getattr("Opened")?.call1((&opened.plan, form.dtype(), shape, datasets))
}

/// What was drawn from each dataset: a tuple of `dquant.Drawn`.
pub(crate) fn drawn<'py>(
    py: Python<'py>,
    opened: &Opened,
    drawn: &[Drawn],
) -> PyResult<Bound<'py, PyAny>> {
    let class = py.import("dquant._records")?.getattr("Drawn")?;
    let datasets = opened.datasets.iter().zip(drawn).map(|(info, drawn)| {
        let Drawn { samples, tokens, padding } = *drawn;
        class.call1((&info.name, samples, tokens, padding, info.samples))
    });
    Ok(PyTuple::new(py, datasets.collect::<PyResult<Vec<_>>>()?)?.into_any())
}

/// A dictionary of counters; bytes and batches since the stream was opened.
pub(crate) fn status<'py>(py: Python<'py>, status: &StreamStatus) -> PyResult<Bound<'py, PyDict>> {
    let counters = PyDict::new(py);
    counters.set_item("batches", status.batches)?;
    counters.set_item("source_bytes", status.source_bytes)?;
    counters.set_item("wire_bytes", status.wire_bytes)?;
    counters.set_item("delivered_bytes", status.delivered_bytes)?;
    counters.set_item("counters", &status.counters)?;
    Ok(counters)
}
