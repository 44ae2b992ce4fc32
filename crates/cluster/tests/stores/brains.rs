//! Brains that are driven over a store: effects become calls of the store, and calls' answers go back. No network and
//! no agents; a brain is killed by dropping it with all it waits for, at any instant.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::store::{Candidate, Holder, Store};
use parfait::brain::{Brain, Config, Denial, Effect, Image, Request, State, StorageError};
use parfait::demand::Abstraction;
use parfait::log::Outcome;
use parfait::network::Network;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};

/// Most requests, and most answers of the store, that wait for the brain.
const WAITING: usize = 1024;

/// An answer to a client.
pub(crate) type Answer = Result<Outcome, Denial>;

enum Input {
    Ask(Request, oneshot::Sender<Answer>),
    Lease { ticket: u64, claimed: Result<Holder, StorageError> },
    Opened { ticket: u64, opened: Result<Image, StorageError> },
    Stored { ticket: u64, stored: Result<(), StorageError> },
}

enum LogCall {
    Open { ticket: u64, term: u64 },
    Append { opening: u64, ticket: u64, at: u64, bytes: Vec<u8> },
    Snapshot { opening: u64, ticket: u64, bytes: Vec<u8> },
}

/// A brain that runs.
#[derive(Clone)]
pub(crate) struct Running {
    inputs: mpsc::Sender<Input>,
    is_leading: watch::Receiver<bool>,
    task: AbortHandle,
}

impl Running {
    /// Starts a brain with that number.
    pub(crate) fn start<S: Store>(store: S, network: Network, number: u64) -> Running {
        let config = Config {
            holder: number,
            lease_ns: 1_000_000_000,
            claim_every_ns: 250_000_000,
            // Nobody answers commands.
            resend_ns: u64::MAX / 4,
            storage_timeout_ns: 4_000_000_000,
            snapshot_bytes: 64 << 10,
            abstraction: Abstraction::Parfait,
            iterations: 4,
        };
        let (inputs, inbox) = mpsc::channel(WAITING);
        let (leading, is_leading) = watch::channel(false);
        let candidate = Candidate { number, address: format!("[::1]:{number}") };
        let driver = Driver {
            brain: Brain::new(config, network, &[]),
            store: Arc::new(store),
            candidate,
            begun: Instant::now(),
            sender: inputs.clone(),
            calls: JoinSet::new(),
            waiting: HashMap::new(),
        };
        let task = tokio::spawn(driver.run(inbox, leading)).abort_handle();
        Running { inputs, is_leading, task }
    }

    /// As `kill -9`.
    pub(crate) fn kill(&self) {
        self.task.abort();
    }

    pub(crate) fn is_leading(&self) -> bool {
        let is_running = self.is_leading.has_changed().is_ok();
        is_running && *self.is_leading.borrow()
    }

    /// Asks and waits; `None` when no answer comes in time.
    pub(crate) async fn ask(&self, request: Request, wait: Duration) -> Option<Answer> {
        let (sender, answer) = oneshot::channel();
        self.inputs.try_send(Input::Ask(request, sender)).ok()?;
        tokio::time::timeout(wait, answer).await.ok()?.ok()
    }
}

struct Driver<S> {
    brain: Brain,
    store: Arc<S>,
    candidate: Candidate,
    begun: Instant,
    sender: mpsc::Sender<Input>,
    /// What is being waited for; it ends with the driver.
    calls: JoinSet<()>,
    waiting: HashMap<(u64, u64), oneshot::Sender<Answer>>,
}

impl<S: Store> Driver<S> {
    fn now_ns(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    async fn run(mut self, mut inbox: mpsc::Receiver<Input>, leading: watch::Sender<bool>) {
        let (log, log_calls) = mpsc::channel(WAITING);
        self.calls.spawn(serve_log(Arc::clone(&self.store), log_calls, self.sender.clone()));
        loop {
            self.carry_out(&log).await;
            leading.send_replace(self.brain.state() == State::Leading);
            let due = self.brain.poll_timeout().saturating_sub(self.now_ns());
            let due = Duration::from_nanos(due.min(1_000_000_000));
            tokio::select! {
                input = inbox.recv() => match input {
                    Some(input) => self.handle(input),
                    None => return,
                },
                () = tokio::time::sleep(due) => self.brain.handle_timeout(self.now_ns()),
                Some(_) = self.calls.join_next() => {}
            }
        }
    }

    fn handle(&mut self, input: Input) {
        let now_ns = self.now_ns();
        match input {
            Input::Ask(request, answer) => {
                self.waiting.insert((request.client, request.sequence), answer);
                self.brain.handle_request(request, now_ns);
            }
            Input::Lease { ticket, claimed: Ok(holder) } => {
                self.brain.handle_lease(ticket, holder.lease, now_ns);
            }
            Input::Lease { .. } => {}
            Input::Opened { ticket, opened } => self.brain.handle_opened(ticket, opened, now_ns),
            Input::Stored { ticket, stored } => self.brain.handle_stored(ticket, stored, now_ns),
        }
    }

    async fn carry_out(&mut self, log: &mpsc::Sender<LogCall>) {
        let mut appended = None;
        while let Some(effect) = self.brain.poll_effect() {
            let call = match effect {
                Effect::Claim { ticket } => {
                    self.claim(ticket);
                    continue;
                }
                Effect::Answer { client, sequence, answer } => {
                    if let Some(waiting) = self.waiting.remove(&(client, sequence)) {
                        let _ = waiting.send(answer);
                    }
                    continue;
                }
                Effect::Send { .. } => continue,
                Effect::Open { ticket, term } => LogCall::Open { ticket, term },
                Effect::Append { opening, at, bytes } => {
                    appended = Some((opening, at, bytes));
                    continue;
                }
                Effect::Sync { opening, ticket } => match appended.take() {
                    Some((of, at, bytes)) if of == opening => {
                        LogCall::Append { opening, ticket, at, bytes }
                    }
                    other => panic!("a sync of {opening} without its write: {other:?}"),
                },
                Effect::Snapshot { opening, ticket, bytes } => {
                    LogCall::Snapshot { opening, ticket, bytes }
                }
            };
            log.send(call).await.expect("the log is served as long as the brain runs");
        }
    }

    fn claim(&mut self, ticket: u64) {
        let (store, candidate) = (Arc::clone(&self.store), self.candidate.clone());
        let sender = self.sender.clone();
        self.calls.spawn(async move {
            let claimed = store.claim(&candidate).await;
            let _ = sender.send(Input::Lease { ticket, claimed }).await;
        });
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
