//! What the scheduler of Kubernetes asks the brain: paths of the web server.
//!
//! | path | what it answers |
//! |---|---|
//! | `/kubernetes/filter` | which nodes a pod may have: those where the brain placed its job |
//! | `/kubernetes/prioritize` | which of them it should have |
//!
//! A job that is not known is submitted when its first pod comes. It is released with
//! `dquant job cancel`: nobody tells an extender that pods are gone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parfait::brain::{Ask, Denial, Request};
use parfait::log::{Label, Outcome};
use tokio::sync::{mpsc, oneshot};

use super::inputs::{FoundJob, Input};
use crate::kubernetes::{self, ExtenderArgs, MarkError, State, Wanted};
use crate::web::{Hook, HookError};

/// Who jobs belong to that came this way.
const OWNER: &str = "kubernetes";

/// Asks the actor, from a thread that may wait.
struct Asking {
    inputs: mpsc::Sender<Input>,
    client: u64,
    sequence: AtomicU64,
}

impl Asking {
    fn tell<T>(&self, input: impl FnOnce(oneshot::Sender<T>) -> Input) -> Result<T, HookError> {
        let (sender, receiver) = oneshot::channel();
        let gone = || HookError::Unavailable("the brain is stopping".to_owned());
        self.inputs.try_send(input(sender)).map_err(|_| {
            HookError::Unavailable("the brain has too much to do: try again".to_owned())
        })?;
        receiver.blocking_recv().map_err(|_| gone())
    }

    /// Where the job of a pod is, if there is one of its name. It has to be the pod's: one that
    /// came this way, and the same.
    fn placed(&self, wanted: &Wanted) -> Result<Option<State>, HookError> {
        let name = wanted.name.clone();
        let found = self.tell(|answer| Input::Find { name, answer })?;
        let found =
            found.ok_or_else(|| HookError::Unavailable("this brain does not lead".to_owned()))?;
        Ok(found.map(|FoundJob { owner, job, nodes }| {
            if owner != OWNER {
                let whose = if owner.is_empty() { "nobody".to_owned() } else { format!("'{owner}'") };
                return State::Refused(format!(
                    "a job of that name belongs to {whose}, not to Kubernetes: cancel it, or name the pods' group otherwise"
                ));
            }
            if job != wanted.job {
                return State::Refused(format!(
                    "its first pod asked for '{job}', and this one for '{}': all pods of a group say the same",
                    wanted.job
                ));
            }
            State::Placed(nodes)
        }))
    }

    /// Where a job is; one that is nowhere is submitted.
    fn state(&self, wanted: &Wanted) -> Result<State, HookError> {
        if let Some(state) = self.placed(wanted)? {
            return Ok(state);
        }
        let label = || Label { name: wanted.name.clone(), owner: OWNER.to_owned() };
        let job = || wanted.job.clone();
        // A refusal that the log need not have: pods are asked about again and again.
        let caller = (None, OWNER.to_owned());
        let placing =
            self.tell(|answer| Input::Place { caller, label: label(), job: job(), answer })?;
        match placing {
            Err(why) => return Err(HookError::Unavailable(why.to_string())),
            Ok((Err(refused), _)) => return Ok(State::Refused(refused.text)),
            Ok((Ok(_), _)) => {}
        }
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let ask = Ask::Admit { label: label(), job: job(), unchanged_since: None };
        let request = Request { client: self.client, sequence, ask };
        match self.tell(|answer| Input::Ask { request, answer })? {
            Ok(Outcome::Admitted(_)) => Ok(self.placed(wanted)?.unwrap_or(State::Waiting)),
            Ok(Outcome::Refused(refused)) => Ok(State::Refused(refused.text)),
            // Two requests of this client overtook each other: it is asked again.
            Ok(_) | Err(Denial::Stale { .. } | Denial::Busy) => Ok(State::Waiting),
            Err(denial) => Err(HookError::Unavailable(denial.to_string())),
        }
    }

    fn with_state<R>(
        &self,
        args: &ExtenderArgs,
        answer: impl FnOnce(&ExtenderArgs, Result<Option<(&Wanted, &State)>, &MarkError>) -> R,
    ) -> Result<R, HookError> {
        match kubernetes::wanted(&args.pod) {
            Ok(None) => Ok(answer(args, Ok(None))),
            Ok(Some(wanted)) => {
                let state = self.state(&wanted)?;
                Ok(answer(args, Ok(Some((&wanted, &state)))))
            }
            Err(error) => Ok(answer(args, Err(&error))),
        }
    }
}

fn read(body: &[u8]) -> Result<ExtenderArgs, HookError> {
    serde_json::from_slice(body)
        .map_err(|error| HookError::Invalid(format!("no ExtenderArgs: {error}")))
}

fn written(answer: &impl serde::Serialize) -> Result<Vec<u8>, HookError> {
    serde_json::to_vec(answer).map_err(|error| HookError::Invalid(error.to_string()))
}

/// The paths, for the web server. `client` is a number of this brain's own.
pub(super) fn hooks(inputs: mpsc::Sender<Input>, client: u64) -> BTreeMap<String, Hook> {
    let asking = Arc::new(Asking { inputs, client, sequence: AtomicU64::new(1) });
    let filter = {
        let asking = Arc::clone(&asking);
        move |body: &[u8]| written(&asking.with_state(&read(body)?, kubernetes::filter)?)
    };
    let prioritize =
        move |body: &[u8]| written(&asking.with_state(&read(body)?, kubernetes::prioritize)?);
    [
        ("/kubernetes/filter".to_owned(), Arc::new(filter) as Hook),
        ("/kubernetes/prioritize".to_owned(), Arc::new(prioritize) as Hook),
    ]
    .into()
}
