//! The place of a trainer in its job: from keyword arguments, from `torch.distributed`, or from
//! what `torchrun` tells its processes.
//!
//! The arithmetic is `client`'s; here are names, defaults and the slices of a sample that
//! context-parallel trainers see.

use client::{Layout, Machine, Rank};
use pyo3::prelude::*;

use crate::errors::{U32, invalid, value_of};

/// The part of each sample that a trainer sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Into how many parts samples are cut.
    pub(crate) parts: u32,
    /// Which part this is.
    pub(crate) part: u32,
    /// Whether a part is two pieces, one from either half of the sample: with causal attention all
    /// parts then cost the same.
    pub(crate) zigzag: bool,
}

impl Slice {
    pub(crate) const WHOLE: Slice = Slice { parts: 1, part: 0, zigzag: false };
}

/// Keyword arguments about ranks.
#[derive(Debug, Default)]
pub(crate) struct Given {
    rank: Option<u32>,
    world_size: Option<u32>,
    local_rank: Option<u32>,
    local_world_size: Option<u32>,
    tensor_parallel: Option<u32>,
    context_parallel: Option<u32>,
    pipeline_parallel: Option<u32>,
    cp_split: Option<String>,
    group: Option<String>,
}

impl Given {
    /// Whether there is an argument of this name.
    pub(crate) fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let number = match name {
            "rank" => &mut self.rank,
            "world_size" => &mut self.world_size,
            "local_rank" => &mut self.local_rank,
            "local_world_size" => &mut self.local_world_size,
            "tp" => &mut self.tensor_parallel,
            "cp" => &mut self.context_parallel,
            "pp" => &mut self.pipeline_parallel,
            "cp_split" => {
                self.cp_split = Some(value_of(name, value, "\"zigzag\" or \"contiguous\"")?);
                return Ok(true);
            }
            "group" => {
                self.group = Some(value_of(name, value, "the name of a run")?);
                return Ok(true);
            }
            _ => return Ok(false),
        };
        *number = Some(value_of(name, value, U32)?);
        Ok(true)
    }

    /// The trainer's place, and its slice of the samples.
    pub(crate) fn place(mut self, py: Python<'_>) -> PyResult<(Rank, Slice)> {
        let from_env = (self.rank, self.world_size) == (None, None);
        if from_env {
            (self.rank, self.world_size) = match of_torch(py)? {
                Some((rank, world_size)) => (Some(rank), Some(world_size)),
                None => (number("RANK")?, number("WORLD_SIZE")?),
            };
        }
        let (rank, world_size) = match (self.rank, self.world_size) {
            (None, None | Some(1)) => (0, 1),
            (Some(rank), Some(world_size)) => (rank, world_size),
            (None, Some(world_size)) => {
                let message = format!("world_size is {world_size}, but no rank is given");
                return Err(invalid(message, "give rank, from 0 to world_size - 1"));
            }
            (Some(rank), None) => {
                let message = format!("rank is {rank}, but no world_size is given");
                return Err(invalid(message, "give world_size, the number of trainers"));
            }
        };
        let layout = Layout {
            world_size,
            tensor_parallel: self.tensor_parallel.unwrap_or(1),
            context_parallel: self.context_parallel.unwrap_or(1),
            pipeline_parallel: self.pipeline_parallel.unwrap_or(1),
        };
        let machine = self.machine(from_env, rank, world_size)?;
        let name = self.group.clone().or_else(|| run_name().filter(|_| from_env));
        let shared = machine.zip(name.as_deref());
        let place = layout.place(rank, shared).map_err(|error| {
            invalid(error.to_string(), "world_size = tp x cp x pp x data-parallel ranks")
        })?;
        let parts = layout.context_parallel;
        let zigzag = self.zigzag()? && parts > 1;
        Ok((place, Slice { parts, part: layout.context_rank(rank), zigzag }))
    }

    fn zigzag(&self) -> PyResult<bool> {
        match self.cp_split.as_deref() {
            None | Some("zigzag") => Ok(true),
            Some("contiguous") => Ok(false),
            Some(other) => {
                let message = format!("cp_split is {other:?}");
                Err(invalid(message, "\"zigzag\" or \"contiguous\""))
            }
        }
    }

    /// The trainers of this machine, if they are several.
    fn machine(&self, from_env: bool, rank: u32, world_size: u32) -> PyResult<Option<Machine>> {
        let (mut local_rank, mut local_world_size) = (self.local_rank, self.local_world_size);
        if from_env && (local_rank, local_world_size) == (None, None) {
            (local_rank, local_world_size) = (number("LOCAL_RANK")?, number("LOCAL_WORLD_SIZE")?);
            // Some launchers set the first alone, which does not say who shares a machine.
            local_rank = local_rank.filter(|_| local_world_size.is_some());
        }
        match (local_rank, local_world_size) {
            (Some(local_rank), Some(local_world_size)) => {
                Ok(Some(Machine { local_rank, local_world_size }))
            }
            (None, None) if self.group.is_some() => {
                Ok(Some(Machine { local_rank: rank, local_world_size: world_size }))
            }
            (None, None) => Ok(None),
            _ => Err(invalid(
                "one of local_rank and local_world_size is given without the other",
                "give both, or neither where all trainers are on this machine",
            )),
        }
    }
}

/// Rank and number of the processes of an initialised `torch.distributed`, which also knows jobs
/// that were started without variables. Torch is not imported for it.
fn of_torch(py: Python<'_>) -> PyResult<Option<(u32, u32)>> {
    let modules = py.import("sys")?.getattr("modules")?;
    let Ok(distributed) = modules.get_item("torch.distributed") else {
        return Ok(None);
    };
    let says = |name: &str| distributed.call_method0(name)?.is_truthy();
    if !says("is_available")? || !says("is_initialized")? {
        return Ok(None);
    }
    let number = |name: &str| distributed.call_method0(name)?.extract::<u32>();
    Ok(Some((number("get_rank")?, number("get_world_size")?)))
}

/// A number that `torchrun` sets.
fn number(name: &str) -> PyResult<Option<u32>> {
    let Ok(text) = std::env::var(name) else {
        return Ok(None);
    };
    text.trim().parse().map(Some).map_err(|_| {
        let message = format!("the variable {name} is {text:?}");
        invalid(message, "it should be a number; or give rank and world_size")
    })
}

/// A name that only the trainers of this start of this run have.
fn run_name() -> Option<String> {
    let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    let (address, port) = (variable("MASTER_ADDR")?, variable("MASTER_PORT")?);
    let run = variable("TORCHELASTIC_RUN_ID").unwrap_or_default();
    let start = variable("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
    Some(format!("{run} {address}:{port} {start}"))
}
