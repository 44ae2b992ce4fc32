//! Admitted jobs by number and by name. No two have the same name.

use alloc::collections::BTreeMap;
use alloc::string::String;

use super::entry::Held;
use crate::ledger::JobId;

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub(super) struct Jobs {
    pub(super) held: BTreeMap<JobId, Held>,
    names: BTreeMap<String, JobId>,
}

impl Jobs {
    /// The job with that name.
    pub(super) fn named(&self, name: &str) -> Option<JobId> {
        self.names.get(name).copied()
    }

    pub(super) fn get(&self, job: JobId) -> Result<&Held, String> {
        self.held.get(&job).ok_or_else(|| alloc::format!("there is no job {job}"))
    }

    pub(super) fn get_mut(&mut self, job: JobId) -> Result<&mut Held, String> {
        self.held.get_mut(&job).ok_or_else(|| alloc::format!("there is no job {job}"))
    }

    /// Whether a job's label can be, and is not that of another one.
    pub(super) fn has_room_for(&self, held: &Held) -> bool {
        held.label.is_valid() && !self.names.contains_key(&held.label.name)
    }

    pub(super) fn insert(&mut self, job: JobId, held: Held) {
        self.names.insert(held.label.name.clone(), job);
        self.held.insert(job, held);
    }

    pub(super) fn remove(&mut self, job: JobId) {
        if let Some(held) = self.held.remove(&job) {
            self.names.remove(&held.label.name);
        }
    }
}
