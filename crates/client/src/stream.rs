//! An open stream: batches out of the ring, counters over the local socket.

use std::time::Duration;

use bytemuck::AnyBitPattern;
use host::attach::{AttachError, Connection, DEFAULT_TIMEOUT, MAX_MESSAGE_BYTES};
use host::ring::{BatchView, Batches as SlotBatches, Consumer, RingError, RingFds};
use prost::Message;

use crate::error::{Error, Server};
use crate::proto::{OpenReply, OpenRequest, Opened, StreamStatus, StreamStatusRequest, open_reply};
use crate::rank::{Numbering, Rank};

#[cfg(feature = "in-process")]
pub(crate) use engine::files::{FileStream, OpenedFiles};
#[cfg(feature = "in-process")]
pub(crate) use engine::local::LocalDpu;

/// Never constructed: streams without offload are not built in.
#[cfg(not(feature = "in-process"))]
pub(crate) type LocalDpu = std::convert::Infallible;

/// How long the opening of a stream may take: longer than all calls that the DPU makes for it, so
/// that the DPU, which knows the cause, reports a target that sends no reply.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);

#[cfg(feature = "in-process")]
const _: () = assert!(OPEN_TIMEOUT.as_secs() >= 12 * engine::control::CALL_TIMEOUT.as_secs());

/// How long to wait for the next slot before checking whether all is well.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// An open stream of batches.
#[derive(Debug)]
pub struct Stream {
    consumer: Consumer,
    slot: Option<SlotBatches>,
    opened: Opened,
    numbering: Numbering,
    next_batch: u64,
    origin: Origin,
}

/// Who fills the ring.
#[derive(Debug)]
enum Origin {
    /// The DPU daemon, or a DPU in this process. The connection comes first: the thread of the
    /// latter ends when its client has closed its connection.
    Dpu(Connection, Option<Box<LocalDpu>>),
    /// An engine in this process that reads files of this machine.
    #[cfg(feature = "in-process")]
    Files(FileStream),
}

impl Stream {
    pub(crate) fn begin(
        mut connection: Connection,
        local: Option<LocalDpu>,
        request: &OpenRequest,
        rank: &Rank,
    ) -> Result<Stream, Error> {
        let server = server(local.is_some());
        let lost = |error| Error::lost(server, error);
        let sent = connection.send(&request.encode_to_vec(), &[]);
        connection.set_timeout(OPEN_TIMEOUT);
        let answer = sent.and_then(|()| connection.recv(MAX_MESSAGE_BYTES));
        // A DPU that refuses us sends the reason and closes the connection without having read: its
        // message comes after the error.
        let answer = answer.or_else(|error| match error {
            AttachError::Closed => connection.recv(MAX_MESSAGE_BYTES).map_err(|_| error),
            error => Err(error),
        });
        let message = answer.map_err(lost)?;
        connection.set_timeout(DEFAULT_TIMEOUT);
        let reply = OpenReply::decode(message.bytes.as_slice())?;
        let opened = match reply.result {
            Some(open_reply::Result::Opened(opened)) => opened,
            Some(open_reply::Result::Failure(failure)) => return Err(failure.into()),
            None => return Err(Error::EmptyReply { server }),
        };
        let (_, fds) = message.with_fds::<{ RingFds::COUNT }>()?;
        let liveness = connection.liveness()?;
        let consumer = Consumer::attach(fds.into(), liveness)?;
        let numbering = Numbering::new(request.first_batch, rank);
        let (next_batch, origin) =
            (request.first_batch, Origin::Dpu(connection, local.map(Box::new)));
        Ok(Stream { consumer, slot: None, opened, numbering, next_batch, origin })
    }

    /// A stream over local files.
    #[cfg(feature = "in-process")]
    pub(crate) fn over_files(files: OpenedFiles, numbering: Numbering) -> Result<Stream, Error> {
        let OpenedFiles { stream, opened, ring, liveness } = files;
        let consumer = Consumer::attach(ring, liveness)?;
        // The same message, generated for another crate.
        let opened = Opened::decode(opened.encode_to_vec().as_slice())?;
        let (next_batch, origin) = (numbering.first(), Origin::Files(stream));
        Ok(Stream { consumer, slot: None, opened, numbering, next_batch, origin })
    }

    /// What was opened: datasets, the plan printed back, shape and type of the batches.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Bytes of one batch.
    pub fn batch_bytes(&self) -> usize {
        self.opened.batch_bytes()
    }

    /// Number of the next batch, of whatever rank: the first batch of the step that comes next.
    pub fn next_batch(&self) -> u64 {
        self.next_batch
    }

    /// Whether the work is done by an engine in this process.
    pub fn is_local(&self) -> bool {
        !matches!(self.origin, Origin::Dpu(_, None))
    }

    /// The batches, in order. Each is a view of the ring; dropping it returns its memory, so a
    /// stream stops when more batches are held than the ring has room for.
    pub fn batches(&mut self) -> Batches<'_> {
        Batches { stream: self, failed: false }
    }

    /// The next batch; `None` at the end of the stream.
    ///
    /// # Errors
    /// When the stream failed, and when its DPU died.
    pub fn next_view(&mut self) -> Result<Option<Batch>, Error> {
        loop {
            match self.next_view_within(LOOK_EVERY)? {
                Next::Batch(batch) => return Ok(Some(batch)),
                Next::End => return Ok(None),
                Next::Pending | Next::SlotsHeld { .. } => {}
            }
        }
    }

    /// As [`Stream::next_view`], but waits at most `limit` for each slot; with `limit` zero it does
    /// not sleep. For callers that have other events to check, and that must not wait for
    /// themselves.
    ///
    /// # Errors
    /// As [`Stream::next_view`].
    pub fn next_view_within(&mut self, limit: Duration) -> Result<Next, Error> {
        loop {
            if let Some(view) = self.slot.as_mut().and_then(Iterator::next) {
                self.next_batch = self.numbering.next(view.number());
                return Ok(Next::Batch(Batch { view, numbering: self.numbering }));
            }
            self.slot = None;
            match self.consumer.next(limit) {
                Ok(Some(slot)) => self.slot = Some(slot.batches()),
                Ok(None) => return Ok(Next::End),
                Err(RingError::TimedOut { .. }) => return Ok(self.nothing_yet()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn nothing_yet(&self) -> Next {
        let slots = self.consumer.geometry().slots();
        if self.consumer.held_slots() == slots { Next::SlotsHeld { slots } } else { Next::Pending }
    }

    /// What the stream did so far.
    ///
    /// # Errors
    /// When the DPU does not reply.
    pub fn status(&self) -> Result<StreamStatus, Error> {
        let connection = match &self.origin {
            Origin::Dpu(connection, _) => connection,
            #[cfg(feature = "in-process")]
            Origin::Files(stream) => {
                return Ok(StreamStatus::decode(stream.status()?.encode_to_vec().as_slice())?);
            }
        };
        let lost = |error| Error::lost(server(self.is_local()), error);
        let request = StreamStatusRequest { version: 1 }.encode_to_vec();
        connection.send(&request, &[]).map_err(lost)?;
        let message = connection.recv(MAX_MESSAGE_BYTES).map_err(lost)?;
        Ok(StreamStatus::decode(message.bytes.as_slice())?)
    }
}

fn server(is_local: bool) -> Server {
    if is_local { Server::OwnEngine } else { Server::Daemon }
}

/// What [`Stream::next_view_within`] found.
#[derive(Debug)]
pub enum Next {
    /// The next batch.
    Batch(Batch),
    /// The stream has ended, and every batch was delivered.
    End,
    /// Nothing came within the limit; call again.
    Pending,
    /// Nothing came within the limit, and nothing will until a batch is dropped: the views of this
    /// process hold every slot.
    SlotsHeld {
        /// Slots of the ring.
        slots: u32,
    },
}

/// Iterator over the batches of a stream; ends after an error.
#[derive(Debug)]
pub struct Batches<'a> {
    stream: &'a mut Stream,
    failed: bool,
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.stream.next_view().transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

/// A batch, where the DPU put it. Its memory is returned when this is dropped.
#[derive(Clone, Debug)]
pub struct Batch {
    view: BatchView,
    numbering: Numbering,
}

impl Batch {
    /// Its number in the stream.
    pub fn number(&self) -> u64 {
        self.numbering.number(self.view.number())
    }

    /// Number of the first batch of the step after it: where all ranks go on.
    pub fn next_batch(&self) -> u64 {
        self.numbering.next(self.view.number())
    }

    /// Samples one after the other, tokens little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.view
    }

    /// The tokens as numbers; `None` if the bytes are not whole, aligned values of `T`.
    pub fn tokens<T: AnyBitPattern>(&self) -> Option<&[T]> {
        bytemuck::try_cast_slice(&self.view).ok()
    }
}

#[cfg(test)]
mod tests {
    use host::ring::{Producer, RingConfig, SlotMeta};

    use super::*;

    /// A client refused by a full DPU gets the DPU's message, whether its request was under way or
    /// not.
    #[test]
    fn a_client_that_is_turned_away_hears_why() {
        let request = OpenRequest { slots: 1, ..OpenRequest::default() };
        for request_comes_first in [false, true] {
            let (ours, theirs) = Connection::pair().expect("a pair of sockets");
            let full = service::Error::invalid("no room today").hint("try again later");
            if request_comes_first {
                ours.send(b"more", &[]).expect("there is room");
            }
            engine::stream::refuse_client(theirs, &full);
            let refused =
                Stream::begin(ours, None, &request, &Rank::default()).expect_err("no ring came");
            assert_eq!(refused.to_string(), "no room today");
        }
    }

    /// Waiting within a limit tells a late batch from one that cannot come, and goes on after both.
    #[test]
    fn a_reader_that_holds_every_slot_is_told() {
        let (ours, theirs) = Connection::pair().expect("a pair of sockets");
        let config = RingConfig { slots: 2, slot_bytes: 4096 };
        let (mut producer, fds) = Producer::create(config).expect("a ring");
        let result = Some(open_reply::Result::Opened(Opened::default()));
        let reply = OpenReply { result }.encode_to_vec();
        theirs.send(&reply, &fds.to_pass()).expect("there is room");
        let request = OpenRequest { slots: 2, ..OpenRequest::default() };
        let mut stream =
            Stream::begin(ours, None, &request, &Rank::default()).expect("a ring came");
        let mut publish = |number| {
            let slot = producer.free_slot().expect("a slot is free");
            let meta = SlotMeta {
                bytes: 64,
                first_batch: number,
                batch_count: 2,
                batch_bytes: 32,
                crc32c: None,
            };
            producer.publish(slot, meta).expect("the slot was free");
        };
        let mut next = || stream.next_view_within(Duration::ZERO).expect("no failure");
        assert!(matches!(next(), Next::Pending));
        publish(0);
        publish(2);
        let kept: Vec<Next> = (0..4).map(|_| next()).collect();
        assert!(kept.iter().all(|found| matches!(found, Next::Batch(_))));
        assert!(matches!(next(), Next::SlotsHeld { slots: 2 }));
        drop(kept);
        assert!(matches!(next(), Next::Pending));
        publish(4);
        assert!(matches!(next(), Next::Batch(batch) if batch.number() == 4));
    }
}
