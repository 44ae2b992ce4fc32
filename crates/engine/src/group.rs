//! Trainers of one job that read one stream: who belongs together, who is still missing, who has
//! left.
//!
//! The trainers of a machine that work on one job open the same stream under one name. The first
//! request opens it, with a ring for each data-parallel rank; the others take their seats at it.
//! Trainers that need the same batches (tensor-, pipeline- and context-parallel ones) read one ring
//! together. So what several ranks need is fetched, blended and copied once.
//!
//! A job goes on only with all its ranks. When one leaves a stream that has not ended, the others
//! get every batch that is ready and then an error that names it, and so they do when one does not
//! come within [`JOIN_LIMIT`].
//!
//! A seat is taken once. Who asks for a seat that was taken before begins a new stream under the
//! same name, as a job does that resumes: the streams of one name do not mix.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host::ring::RingFds;
use service::error::Error;
use service::log;

use crate::handle::OpenStream;
use crate::proto::{OpenRequest, Opened, Ranks};

/// How long trainers wait for those that have not come.
pub(crate) const JOIN_LIMIT: Duration = Duration::from_secs(300);

/// Most seats of all groups that can be joined: a DPU serves no more clients at once.
const MAX_SEATS: usize = 64;

/// After this long the log says who is missing.
const JOIN_NOTICE: Duration = Duration::from_secs(10);

/// A place at a stream.
#[derive(Clone, Copy, Debug)]
struct Seat {
    /// Data-parallel rank of the job.
    rank: u32,
    ring: usize,
    reader: usize,
}

impl Seat {
    fn of(ranks: &Ranks) -> Seat {
        let Ranks { rank, first, reader, .. } = *ranks;
        Seat { rank, ring: (rank - first) as usize, reader: reader as usize }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Free,
    Taken,
    Left,
}

/// The stream of a group.
enum Phase {
    /// Its first trainer opens it.
    Opening,
    Open {
        stream: Arc<OpenStream>,
        opened: Box<Opened>,
        /// By ring and reader, until its trainer has taken it.
        rings: Vec<Vec<Option<RingFds>>>,
    },
    Failed(Error),
}

struct State {
    /// By ring and reader.
    places: Vec<Vec<Place>>,
    phase: Phase,
    noticed: bool,
}

struct Group {
    user: u32,
    name: String,
    /// The request, without whose it is.
    request: OpenRequest,
    first_rank: u32,
    begun: Instant,
    state: Mutex<State>,
    opened: Condvar,
}

/// The groups that can be joined.
#[derive(Clone, Default)]
pub(crate) struct Groups(Arc<Mutex<Vec<Arc<Group>>>>);

/// A trainer's seat; dropping it leaves the stream.
pub(crate) struct Member {
    groups: Groups,
    group: Arc<Group>,
    seat: Seat,
    /// The process, for messages.
    client: String,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No change is left half made.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Groups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} groups", lock(&self.0).len())
    }
}

impl Groups {
    /// Takes a seat at the stream of `request`, which `open` opens if this is the first.
    ///
    /// # Errors
    /// When the stream cannot be opened; all who ask for it get the same error.
    pub(crate) fn join(
        &self,
        (user, client): (u32, &str),
        request: &OpenRequest,
        ranks: &Ranks,
        open: impl FnOnce() -> Result<(OpenStream, Opened, Vec<Vec<RingFds>>), Error>,
    ) -> Result<(Member, Arc<OpenStream>, Opened, RingFds), Error> {
        let seat = Seat::of(ranks);
        let (group, is_first) = self.take_seat(user, request, ranks, seat)?;
        let groups = self.clone();
        let member = Member { groups, group, seat, client: client.to_owned() };
        if is_first {
            member.group.set(match open() {
                Ok((stream, opened, rings)) => Phase::Open {
                    stream: Arc::new(stream),
                    opened: Box::new(opened),
                    rings: rings
                        .into_iter()
                        .map(|ring| ring.into_iter().map(Some).collect())
                        .collect(),
                },
                Err(error) => Phase::Failed(error),
            });
        }
        let (stream, opened, fds) = member.group.take_ring(seat)?;
        Ok((member, stream, opened, fds))
    }

    /// The group, and whether it is new.
    fn take_seat(
        &self,
        user: u32,
        request: &OpenRequest,
        ranks: &Ranks,
        seat: Seat,
    ) -> Result<(Arc<Group>, bool), Error> {
        let shared = shared_part(request, ranks);
        let mut groups = lock(&self.0);
        let same = |group: &&Arc<Group>| {
            group.user == user && group.name == ranks.group && group.request == shared
        };
        for group in groups.iter().filter(same) {
            let place = &mut lock(&group.state).places[seat.ring][seat.reader];
            if *place == Place::Free {
                *place = Place::Taken;
                return Ok((Arc::clone(group), false));
            }
        }
        let seats =
            |group: &Arc<Group>| lock(&group.state).places.iter().map(Vec::len).sum::<usize>();
        let taken: usize = groups.iter().map(seats).sum();
        if taken + (ranks.count * ranks.readers) as usize > MAX_SEATS {
            let why = format!("the DPU has {taken} of {MAX_SEATS} seats for trainers in use");
            return Err(Error::invalid(why).hint("try again when another job has ended"));
        }
        let mut places = vec![vec![Place::Free; ranks.readers as usize]; ranks.count as usize];
        places[seat.ring][seat.reader] = Place::Taken;
        let state = State { places, phase: Phase::Opening, noticed: false };
        let group = Arc::new(Group {
            user,
            name: ranks.group.clone(),
            request: shared,
            first_rank: ranks.first,
            begun: Instant::now(),
            state: Mutex::new(state),
            opened: Condvar::new(),
        });
        groups.push(Arc::clone(&group));
        Ok((group, true))
    }

    /// Nobody joins this group any more: the rings that wait for trainers go.
    fn forget(&self, group: &Arc<Group>) {
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, group));
        if let Phase::Open { rings, .. } = &mut lock(&group.state).phase {
            rings.clear();
        }
    }

    /// How another stream of the same name and user differs, if there is one.
    fn other_stream(&self, group: &Arc<Group>) -> Option<&'static str> {
        let groups = lock(&self.0);
        let other = groups.iter().find(|other| {
            !Arc::ptr_eq(other, group) && other.user == group.user && other.name == group.name
        })?;
        Some(difference(&group.request, &other.request))
    }
}

/// What must be equal in the requests of a group.
fn shared_part(request: &OpenRequest, ranks: &Ranks) -> OpenRequest {
    let ranks = Ranks { rank: 0, reader: 0, ..ranks.clone() };
    OpenRequest { ranks: Some(ranks), ..request.clone() }
}

fn difference(one: &OpenRequest, other: &OpenRequest) -> &'static str {
    match () {
        () if one.target != other.target => "its target",
        () if one.token != other.token => "its token",
        () if one.datasets != other.datasets => "its datasets",
        () if one.plan != other.plan => "its plan or seed",
        () if (one.first_batch, one.shift) != (other.first_batch, other.shift) => "where it begins",
        () if one.batches != other.batches => "its number of batches",
        () if one.ranks != other.ranks => "its layout of ranks",
        () => "its slots",
    }
}

impl Group {
    fn set(&self, phase: Phase) {
        lock(&self.state).phase = phase;
        self.opened.notify_all();
    }

    /// Waits until the stream is open. Opening it has time limits of its own.
    fn take_ring(&self, seat: Seat) -> Result<(Arc<OpenStream>, Opened, RingFds), Error> {
        let opening = |state: &mut State| matches!(state.phase, Phase::Opening);
        let waited = self.opened.wait_while(lock(&self.state), opening);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        match &mut state.phase {
            Phase::Open { stream, opened, rings } => {
                let fds =
                    rings.get_mut(seat.ring).and_then(|ring| ring.get_mut(seat.reader)?.take());
                let fds = fds.ok_or_else(|| {
                    Error::invalid("another trainer has left this stream").hint("open it again")
                })?;
                Ok((Arc::clone(stream), (**opened).clone(), fds))
            }
            Phase::Failed(error) => Err(error.clone()),
            Phase::Opening => Err(Error::invalid("the stream is not open")),
        }
    }

    /// The ranks that have not come, as text: each once.
    fn missing(&self, state: &State) -> Option<String> {
        let is_missing = |places: &&Vec<Place>| places.contains(&Place::Free);
        let ranks = (self.first_rank..).zip(&state.places).filter(|(_, places)| is_missing(places));
        let names: Vec<String> = ranks
            .map(|(rank, places)| match places.len() {
                1 => format!("rank {rank}"),
                readers => {
                    let free = places.iter().filter(|place| **place == Place::Free).count();
                    format!("{free} of the {readers} readers of rank {rank}")
                }
            })
            .collect();
        (!names.is_empty()).then(|| names.join(", "))
    }
}

impl Member {
    /// Looks after those that have not come. Called from time to time; `failed` once the stream
    /// has.
    pub(crate) fn look(&self, stream: &OpenStream, failed: bool) {
        if failed {
            return self.groups.forget(&self.group);
        }
        let waited = self.group.begun.elapsed();
        if waited < JOIN_NOTICE {
            return;
        }
        let mut state = lock(&self.group.state);
        let Some(missing) = self.group.missing(&state) else { return };
        let first_notice = !std::mem::replace(&mut state.noticed, true);
        drop(state);
        let other = self.groups.other_stream(&self.group);
        let but = other.map_or(String::new(), |what| {
            format!("; another stream of that name differs in {what}")
        });
        let (id, name) = (stream.id, &self.group.name);
        if first_notice {
            log::line(format_args!("stream {id} of group {name} waits for {missing}{but}"));
        }
        if waited >= JOIN_LIMIT {
            let limit = JOIN_LIMIT.as_secs();
            let why = format!("{missing} of group {name} did not come within {limit} s{but}");
            self.groups.forget(&self.group);
            stream.rank_left(why);
        }
    }

    /// The data-parallel rank.
    pub(crate) fn rank(&self) -> u32 {
        self.seat.rank
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.groups.forget(&self.group);
        let mut state = lock(&self.group.state);
        state.places[self.seat.ring][self.seat.reader] = Place::Left;
        if matches!(state.phase, Phase::Opening) {
            let why = "the trainer that opened the stream ended meanwhile";
            state.phase = Phase::Failed(Error::invalid(why).hint("open it again"));
            self.group.opened.notify_all();
        }
        let others = state.places.iter().flatten().any(|place| *place != Place::Left);
        if let (true, Phase::Open { stream, .. }) = (others, &state.phase) {
            let (rank, name) = (self.seat.rank, &self.group.name);
            let why = format!("rank {rank} of group {name}, {}, left the stream", self.client);
            stream.rank_left(why);
        }
    }
}
