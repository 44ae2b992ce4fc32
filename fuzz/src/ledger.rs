//! Every posted work request, and its completion.
//!
//! A work request completes at most once, on its own queue pair and queue, and not before those
//! posted to the same queue earlier (except unsignaled sends). Its number is its index in the
//! ledger, so a completion of a request that was never posted is detected at once.

use roce::verbs::{Completion, Qpn, SgList, Sge, SrqId, WcOpcode, WcStatus};

/// Where a work request was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    Send(Qpn),
    Recv(Qpn),
    Shared(SrqId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Open,
    /// Its queue is gone; an earlier completion may still be polled.
    Orphaned,
    Done,
    Succeeded,
}

/// A peer's immediate data: number of the work request, and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) wr_id: u32,
    pub(crate) byte_len: u32,
}

/// The direction of a work request's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Into its buffers: a receive, a READ, an atomic.
    In,
    /// Out of them.
    Out,
}

#[derive(Clone, Debug)]
struct Entry {
    queue: Queue,
    /// It completes in any case.
    signaled: bool,
    /// Memory, by backing address.
    buffers: SgList,
    /// Its direction.
    flow: Flow,
    /// Part of it was read for a packet.
    is_read: bool,
    bytes: u64,
    /// Length of the message, if its immediate data tells the peer the number of this work request.
    announces: Option<u32>,
    fate: Fate,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    entries: Vec<Entry>,
    /// Queue pairs whose retries ran out.
    exhausted: Vec<Qpn>,
}

impl Ledger {
    /// The number of the next work request.
    pub(crate) fn next_id(&self) -> u64 {
        self.entries.len() as u64
    }

    /// A work request was accepted. `buffers` is memory by backing address.
    pub(crate) fn posted(&mut self, queue: Queue, signaled: bool, flow: Flow, buffers: SgList) {
        let bytes = buffers.iter().map(|sge| u64::from(sge.len)).sum();
        let (announces, fate) = (None, Fate::Open);
        let is_read = false;
        let entry = Entry { queue, signaled, buffers, flow, is_read, bytes, announces, fate };
        self.entries.push(entry);
    }

    /// The work request posted last sends its number as immediate data.
    pub(crate) fn announced(&mut self, bytes: u32) {
        if let Some(entry) = self.entries.last_mut() {
            entry.announces = Some(bytes);
        }
    }

    /// Checks the messages of a queue pair against the peer's receives: each received once, in
    /// order, with its length.
    pub(crate) fn judge_heard(&self, sender: Qpn, heard: &[Heard]) {
        let mut numbers = Vec::new();
        for Heard { wr_id, byte_len } in heard {
            let entry = self.entries.get(*wr_id as usize).expect("somebody sent it");
            if entry.queue == Queue::Send(sender) {
                assert_eq!(entry.announces, Some(*byte_len), "message {wr_id} became another");
                numbers.push(*wr_id as usize);
            }
        }
        assert!(numbers.is_sorted_by(|a, b| a < b), "twice or out of order: {numbers:?}");
    }

    /// Checks that no successful message of a queue pair is missing from the peer's receives.
    pub(crate) fn judge_missing(&self, sender: Qpn, heard: &[Heard]) {
        for (number, entry) in self.entries.iter().enumerate() {
            let done = entry.announces.is_some() && entry.fate == Fate::Succeeded;
            if done && entry.queue == Queue::Send(sender) {
                let is_heard = heard.iter().any(|message| message.wr_id as usize == number);
                assert!(is_heard, "{number} succeeded, and nobody heard of it");
            }
        }
    }

    /// A queue was destroyed.
    pub(crate) fn orphan(&mut self, gone: impl Fn(Queue) -> bool) {
        for entry in self.entries.iter_mut().filter(|entry| gone(entry.queue)) {
            if entry.fate == Fate::Open {
                entry.fate = Fate::Orphaned;
            }
        }
    }

    /// Checks and records a completion.
    pub(crate) fn completed(&mut self, completion: &Completion) {
        let index = completion.wr_id as usize;
        let entry =
            self.entries.get(index).unwrap_or_else(|| panic!("nobody posted {completion:?}"));
        let is_first = matches!(entry.fate, Fate::Open | Fate::Orphaned);
        assert!(is_first, "completed twice: {completion:?}");
        match entry.queue {
            Queue::Send(qpn) | Queue::Recv(qpn) => {
                assert_eq!(qpn, completion.qpn, "{completion:?}");
            }
            Queue::Shared(_) => {}
        }
        judge_kind(entry, completion);
        if completion.status == WcStatus::RetryExceeded {
            self.exhausted.push(completion.qpn);
        }
        let (queue, orphaned) = (entry.queue, entry.fate == Fate::Orphaned);
        if !orphaned && !matches!(queue, Queue::Shared(_)) {
            self.retire_before(index, queue);
        }
        self.entries[index].fate = match completion.status {
            WcStatus::Success => Fate::Succeeded,
            _ => Fate::Done,
        };
    }

    /// Earlier work requests of the same queue have completed, or never will report it.
    fn retire_before(&mut self, index: usize, queue: Queue) {
        for (number, entry) in self.entries[..index].iter_mut().enumerate().rev() {
            if entry.queue != queue {
                continue;
            }
            if entry.fate != Fate::Open {
                break;
            }
            assert!(!entry.signaled, "work request {index} completed before {number}");
            entry.fate = Fate::Done;
        }
    }

    /// Work requests of a queue without a completion yet.
    pub(crate) fn open(&self, queue: Queue) -> usize {
        let due =
            |entry: &&Entry| entry.queue == queue && entry.signaled && entry.fate == Fate::Open;
        self.entries.iter().filter(due).count()
    }

    /// Whether a posted receive has these bytes in its buffers.
    pub(crate) fn receives_into(&self, addr: u64, len: u64) -> bool {
        self.expects(addr, len, |queue| !matches!(queue, Queue::Send(_)))
    }

    /// Whether a READ or atomic in flight has these bytes in its buffers.
    pub(crate) fn awaits_into(&self, addr: u64, len: u64) -> bool {
        self.expects(addr, len, |queue| matches!(queue, Queue::Send(_)))
    }

    fn expects(&self, addr: u64, len: u64, at: impl Fn(Queue) -> bool) -> bool {
        let fits = |entry: &&Entry| entry.flow == Flow::In && at(entry.queue);
        self.entries.iter().filter(fits).any(|entry| entry.has(addr, len))
    }

    /// Bytes were read for a packet: marks all requests that they may belong to.
    pub(crate) fn gathered(&mut self, addr: u64, len: u64) {
        for entry in self.entries.iter_mut().filter(|entry| entry.flow == Flow::Out) {
            entry.is_read |= entry.has(addr, len);
        }
    }

    /// Whether the retries of a queue pair ran out.
    pub(crate) fn is_exhausted(&self, qpn: Qpn) -> bool {
        self.exhausted.contains(&qpn)
    }
}

impl Entry {
    /// Whether it is open and these bytes are in its buffers.
    fn has(&self, addr: u64, len: u64) -> bool {
        let holds = |sge: &Sge| {
            addr.checked_sub(sge.addr).is_some_and(|offset| offset + len <= u64::from(sge.len))
        };
        self.fate == Fate::Open && self.buffers.iter().any(holds)
    }
}

fn judge_kind(entry: &Entry, completion: &Completion) {
    if completion.status != WcStatus::Success {
        return;
    }
    let received = matches!(completion.opcode, WcOpcode::Recv | WcOpcode::RecvWriteImm);
    let sent = matches!(entry.queue, Queue::Send(_));
    assert_ne!(received, sent, "completed as something else: {completion:?}");
    let unsent = entry.flow == Flow::Out && entry.bytes > 0 && !entry.is_read;
    assert!(!unsent, "succeeded, yet nothing was sent: {completion:?}");
    if completion.opcode == WcOpcode::Recv {
        let bytes = u64::from(completion.byte_len);
        assert!(bytes <= entry.bytes, "{completion:?} into {} bytes", entry.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QPN: Qpn = Qpn::new(9);

    fn ledger(sends: usize) -> Ledger {
        let mut ledger = Ledger::default();
        for _ in 0..sends {
            ledger.posted(Queue::Send(QPN), true, Flow::Out, SgList::new());
        }
        ledger
    }

    fn sent(wr_id: u64) -> Completion {
        Completion::new(wr_id, WcStatus::Success, WcOpcode::Send, QPN)
    }

    #[test]
    fn each_completes_once_and_in_order() {
        let mut ledger = ledger(2);
        ledger.completed(&sent(0));
        ledger.completed(&sent(1));
        assert_eq!(ledger.open(Queue::Send(QPN)), 0);
    }

    #[test]
    #[should_panic(expected = "completed twice")]
    fn a_second_completion_is_seen() {
        let mut ledger = ledger(1);
        ledger.completed(&sent(0));
        ledger.completed(&sent(0));
    }

    #[test]
    #[should_panic(expected = "completed before")]
    fn a_completion_out_of_order_is_seen() {
        ledger(2).completed(&sent(1));
    }

    #[test]
    #[should_panic(expected = "nobody posted")]
    fn a_completion_from_nowhere_is_seen() {
        ledger(2).completed(&sent(2));
    }

    #[test]
    #[should_panic(expected = "nothing was sent")]
    fn success_without_sending_is_seen() {
        let mut ledger = Ledger::default();
        let bytes = SgList::from_iter([Sge { addr: 64, len: 8, lkey: 1 }]);
        ledger.posted(Queue::Send(QPN), true, Flow::Out, bytes);
        ledger.completed(&sent(0));
    }

    #[test]
    #[should_panic(expected = "twice or out of order")]
    fn a_message_heard_twice_is_seen() {
        let mut ledger = ledger(1);
        ledger.announced(3);
        ledger.judge_heard(QPN, &[Heard { wr_id: 0, byte_len: 3 }; 2]);
    }

    #[test]
    #[should_panic(expected = "nobody heard of it")]
    fn a_message_that_got_lost_is_seen() {
        let mut ledger = ledger(1);
        ledger.announced(0);
        ledger.completed(&sent(0));
        ledger.judge_missing(QPN, &[]);
    }
}
