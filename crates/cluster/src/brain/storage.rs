//! Calls of the store, beside the actor: claims of the lease, the log, and also trials, so that all
//! of them end with it.
//!
//! Claims of the lease run beside everything else, so a slow log does not lose the lease. Calls to
//! the log run one after another, in a task of their own. All of them end with the actor: no claim
//! takes the lease back that was resigned. What answers mean is not decided here.

use std::sync::Arc;

use parfait::brain::StorageError;
use parfait::log::Book;
use service::log;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::inputs::Input;
use super::placing::{self, Lent, Waiting};
use crate::store::{Candidate, Store, UNSIGNED_HINT};

/// A call to the log.
enum LogCall {
    Open { ticket: u64, term: u64 },
    Append { opening: u64, ticket: u64, at: u64, bytes: Vec<u8> },
    Snapshot { opening: u64, ticket: u64, bytes: Vec<u8> },
}

/// See the module's text.
pub(super) struct Storage<S> {
    store: Arc<S>,
    candidate: Candidate,
    answers: mpsc::Sender<Input>,
    log_calls: mpsc::Sender<LogCall>,
    /// What is under way.
    calls: JoinSet<()>,
    /// What is to be appended with the next sync.
    appending: Option<(u64, Vec<u8>)>,
}

impl<S: Store> Storage<S> {
    /// The receiver gets what the store answers.
    pub(super) fn new(store: Arc<S>, candidate: Candidate) -> (Storage<S>, mpsc::Receiver<Input>) {
        // The state machine has one call outstanding; an opening may follow one that is still under
        // way.
        let (log_calls, to_serve) = mpsc::channel(16);
        let (answers, stored) = mpsc::channel(16);
        let mut calls = JoinSet::new();
        calls.spawn(serve_log(Arc::clone(&store), to_serve, answers.clone()));
        (Storage { store, candidate, answers, log_calls, calls, appending: None }, stored)
    }

    pub(super) fn claim(&mut self, ticket: u64) {
        // Claims that ended.
        while self.calls.try_join_next().is_some() {}
        let (store, candidate) = (Arc::clone(&self.store), self.candidate.clone());
        let answers = self.answers.clone();
        self.calls.spawn(async move {
            let holder = store.claim(&candidate).await;
            // Without an actor nobody needs it.
            let _ = answers.send(Input::Claimed { ticket, holder }).await;
        });
    }

    pub(super) fn open(&mut self, ticket: u64, term: u64) {
        self.appending = None;
        self.call(LogCall::Open { ticket, term });
    }

    /// To be appended with the next sync.
    pub(super) fn append(&mut self, at: u64, bytes: Vec<u8>) {
        self.appending = Some((at, bytes));
    }

    pub(super) fn sync(&mut self, opening: u64, ticket: u64) {
        if let Some((at, bytes)) = self.appending.take() {
            self.call(LogCall::Append { opening, ticket, at, bytes });
        }
    }

    pub(super) fn snapshot(&self, opening: u64, ticket: u64, bytes: Vec<u8>) {
        self.call(LogCall::Snapshot { opening, ticket, bytes });
    }

    /// A full queue means that the log hangs: the state machine opens it again after a while.
    fn call(&self, call: LogCall) {
        if self.log_calls.try_send(call).is_err() {
            log::line("the log hangs");
        }
    }

    /// Begins a trial.
    pub(super) fn place(&mut self, trial: Waiting, book: Book, lent: Lent) {
        let answers = self.answers.clone();
        self.calls.spawn_blocking(move || {
            placing::place(trial, book, lent);
            // An actor that has no room for it looks soon.
            let _ = answers.try_send(Input::Tried);
        });
    }

    /// Objects of the store without a valid signature.
    pub(super) fn unsigned(&self) -> u64 {
        self.store.report().counters.unsigned
    }

    /// Reports a call of the store that failed, with the store's reason; of signatures also what to
    /// do.
    pub(super) fn report_failure(&self, what: &str, error: &StorageError) {
        let reason = self.store.report().last_failure;
        match (error, reason) {
            (StorageError::Unsigned, Some(why)) => {
                log::line(format_args!("{what}: {why}; hint: {UNSIGNED_HINT}"));
            }
            (_, Some(why)) => log::line(format_args!("{what}: {error}: {why}")),
            (_, None) => log::line(format_args!("{what}: {error}")),
        }
    }
}

/// Calls the log, one call after another.
async fn serve_log<S: Store>(
    store: Arc<S>,
    mut calls: mpsc::Receiver<LogCall>,
    sender: mpsc::Sender<Input>,
) {
    while let Some(call) = calls.recv().await {
        let input = match call {
            LogCall::Open { ticket, term } => {
                Input::Opened { ticket, opened: store.open(term, ticket).await }
            }
            LogCall::Append { opening, ticket, at, bytes } => {
                Input::Stored { ticket, stored: store.append(opening, at, bytes).await }
            }
            LogCall::Snapshot { opening, ticket, bytes } => {
                Input::Stored { ticket, stored: store.snapshot(opening, bytes).await }
            }
        };
        if sender.send(input).await.is_err() {
            return;
        }
    }
}
