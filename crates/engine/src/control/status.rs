//! The status that a daemon of either kind reports.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use service::auth::AddToken;
use service::error::Error;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};
use tonic::{Code, Status};

use super::peer::Peer;
use crate::data::Commands;
use crate::proto::dpu_client::DpuClient;
use crate::proto::target_client::TargetClient;
use crate::proto::{StatusReply, StatusRequest};
use crate::status::Counters;

/// Time between two reports of an engine.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Shares an engine's counters among callers. However many call, and whether they wait for the
/// reply or not, the engine gets one command at a time; callers that came before it was sent share
/// its reply.
#[derive(Debug)]
pub(crate) struct Reports<C> {
    commands: Commands<C>,
    ask: fn(SyncSender<Counters>) -> C,
    last: Arc<Mutex<Option<Report>>>,
}

#[derive(Debug)]
struct Report {
    begun: Instant,
    counters: Counters,
}

impl<C: Send + 'static> Reports<C> {
    pub(crate) fn new(commands: Commands<C>, ask: fn(SyncSender<Counters>) -> C) -> Reports<C> {
        Reports { commands, ask, last: Arc::default() }
    }

    /// The counters of the engine at some time after this call began.
    pub(crate) async fn get(&self) -> Result<Counters, Status> {
        let asked = Instant::now();
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some(report) = last.as_ref() {
            if report.begun >= asked {
                return Ok(report.counters.clone());
            }
            sleep_until(report.begun + REPORT_INTERVAL).await;
        }
        let (commands, ask) = (self.commands.clone(), self.ask);
        // The task holds the lock: a caller that gives up does not let a second command start.
        let report = tokio::task::spawn_blocking(move || {
            let begun = Instant::now();
            let counters = commands.call(ask)?;
            *last = Some(Report { begun, counters: counters.clone() });
            Ok::<_, crate::data::EngineError>(counters)
        });
        report
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::unavailable(error.to_string()))
    }
}

/// Queries the status of the daemon at `host[:port]`.
///
/// # Errors
/// When no daemon replies there, or it refuses the token.
pub async fn daemon_status(host: &str, token: &str) -> Result<StatusReply, Error> {
    let peer = Peer::connect("daemon", host, "`dquant serve` or `dquant dpu`").await?;
    let token = AddToken::new(token);
    let mut target = TargetClient::with_interceptor(peer.channel.clone(), token.clone());
    match peer.answer(target.status(StatusRequest {})).await? {
        Ok(reply) => return Ok(reply.into_inner()),
        // Each daemon serves only its own kind: this one is not a target.
        Err(status) if status.code() == Code::Unimplemented => {}
        Err(status) => return Err(peer.refused(&status)),
    }
    let mut dpu = DpuClient::with_interceptor(peer.channel.clone(), token);
    Ok(peer.within(dpu.status(StatusRequest {})).await?.into_inner())
}

#[cfg(test)]
mod tests {
    use nic::waiter::Waiter;

    use super::*;

    #[test]
    fn a_flood_of_callers_is_one_command_at_a_time() {
        let waiter = Waiter::new().expect("an eventfd");
        let (commands, inbox) = Commands::<SyncSender<Counters>>::new(waiter.waker());
        let reports = Arc::new(Reports::new(commands, |reply| reply));
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.expect("threads");
        let flood = |count: usize| -> Vec<_> {
            let ask = |_| {
                let reports = Arc::clone(&reports);
                runtime.spawn(async move { reports.get().await })
            };
            (0..count).map(ask).collect()
        };
        // Callers that do not wait do not cause a command each.
        for call in flood(300) {
            call.abort();
        }
        let calls = flood(300);
        let (began, mut commands) = (Instant::now(), 0);
        let mut counters = Counters::default();
        while !calls.iter().all(tokio::task::JoinHandle::is_finished) {
            assert!(began.elapsed() < Duration::from_secs(30), "in vain: {commands} commands");
            std::thread::sleep(Duration::from_millis(20));
            let Some(command) = inbox.take() else { continue };
            assert!(inbox.take().is_none(), "two commands at a time");
            commands += 1;
            counters.set("commands", commands);
            command.send(counters.clone()).expect("somebody waits");
        }
        // Those under way when a caller comes are too old for it.
        assert!(commands <= 5, "{commands} commands");
        for call in calls {
            let report = runtime.block_on(call).expect("no panic").expect("an answer");
            assert!(report.get("commands") >= 1);
        }
    }
}
