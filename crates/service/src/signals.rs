//! The signals that ask a process to end: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as
//! under `nohup`.

use std::fmt;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::Error;
use crate::runtime;

/// A signal that ends the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndSignal {
    /// The terminal is gone.
    Hangup,
    /// Ctrl-C.
    Interrupt,
    /// What a service manager sends.
    Terminate,
}

impl EndSignal {
    /// The exit code that shells show for a process that this signal killed.
    pub fn exit_code(self) -> i32 {
        match self {
            EndSignal::Hangup => 129,
            EndSignal::Interrupt => 130,
            EndSignal::Terminate => 143,
        }
    }
}

impl fmt::Display for EndSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EndSignal::Hangup => "SIGHUP",
            EndSignal::Interrupt => "SIGINT",
            EndSignal::Terminate => "SIGTERM",
        })
    }
}

/// Listens for these signals. From here on they no longer kill the process.
#[derive(Debug)]
pub struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Option<Signal>,
}

impl EndSignals {
    /// Begins to listen, inside a runtime.
    ///
    /// # Errors
    /// When the signals cannot be listened to.
    pub fn listen() -> Result<EndSignals, Error> {
        let ignores_hangup = ignores_hangup();
        let listen = |kind| signal(kind).map_err(Error::from_cause);
        Ok(EndSignals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: (!ignores_hangup).then(|| listen(SignalKind::hangup())).transpose()?,
        })
    }

    /// Waits for one of them.
    pub async fn received(&mut self) -> EndSignal {
        let EndSignals { terminate, interrupt, hangup } = self;
        let hung_up = async {
            match hangup {
                Some(hangup) => drop(hangup.recv().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = terminate.recv() => EndSignal::Terminate,
            _ = interrupt.recv() => EndSignal::Interrupt,
            () = hung_up => EndSignal::Hangup,
        }
    }
}

/// Starts a thread that waits for the first of them and runs `react`.
///
/// # Errors
/// When the signals cannot be listened to, or the thread cannot be started.
pub fn on_end_signal(react: impl FnOnce(EndSignal) + Send + 'static) -> Result<(), Error> {
    let runtime = runtime::current_thread()?;
    let mut signals = {
        let _entered = runtime.enter();
        EndSignals::listen()?
    };
    let wait = move || react(runtime.block_on(signals.received()));
    let thread = std::thread::Builder::new().name("end-signals".into());
    thread.spawn(wait).map(drop).map_err(Error::from_cause)
}

/// Starts a thread that runs `react` whenever this process is asked for its status (SIGUSR1).
///
/// # Errors
/// When the signal cannot be listened to, or the thread cannot be started.
pub fn on_status_signal(mut react: impl FnMut() + Send + 'static) -> Result<(), Error> {
    let runtime = runtime::current_thread()?;
    let mut signals = {
        let _entered = runtime.enter();
        signal(SignalKind::user_defined1()).map_err(Error::from_cause)?
    };
    let wait = move || {
        while runtime.block_on(signals.recv()).is_some() {
            react();
        }
    };
    let thread = std::thread::Builder::new().name("status-signals".into());
    thread.spawn(wait).map(drop).map_err(Error::from_cause)
}

/// Whether this process was started to outlive its terminal, as by `nohup`.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 != 0)
}

#[cfg(test)]
mod tests {
    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    #[test]
    fn a_hangup_asks_the_process_to_end_as_the_others_do() {
        let runtime = runtime::current_thread().expect("descriptors");
        let _entered = runtime.enter();
        let mut signals = EndSignals::listen().expect("signals");
        let sent = [
            (Signal::HUP, EndSignal::Hangup),
            (Signal::INT, EndSignal::Interrupt),
            (Signal::TERM, EndSignal::Terminate),
        ];
        // The test runner may have made this process ignore it.
        let listens = |signal| signal != EndSignal::Hangup || !ignores_hangup();
        for (signal, expected) in sent.into_iter().filter(|&(_, signal)| listens(signal)) {
            kill_process(getpid(), signal).expect("this process may signal itself");
            assert_eq!(runtime.block_on(signals.received()), expected);
        }
    }
}
