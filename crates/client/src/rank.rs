//! The place of a trainer among those of its job: which batches are for it, and who reads them with
//! it.

use thiserror::Error;

use crate::proto::Ranks;

/// The place of a trainer in its job.
///
/// Batch `b` of a stream that begins at batch `f` is for data-parallel rank `(b - f) mod ranks`. So
/// a step of the job consumes `ranks` consecutive batches, whichever trainer gets them, and the
/// position of a job is one number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Data-parallel ranks of the job, at least one.
    pub ranks: u32,
    /// That of this trainer, from 0.
    pub rank: u32,
    /// The trainers of this machine that read one stream of the DPU together; `None`: each has its
    /// own. Without offload, and over local files, each has its own in any case.
    pub group: Option<Group>,
}

/// The trainers of a machine that share a stream. All of them open it with the same name, options
/// and counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// What they have in common: the name of a run.
    pub name: String,
    /// The first data-parallel rank with trainers on this machine.
    pub first: u32,
    /// How many such ranks there are.
    pub count: u32,
    /// Trainers of this machine in each of them (tensor-, pipeline- and context-parallel ones): all
    /// of a rank read the same batches, from the same memory.
    pub readers: u32,
    /// Which of them this is, from 0.
    pub reader: u32,
}

impl Default for Rank {
    /// The only trainer.
    fn default() -> Rank {
        Rank { ranks: 1, rank: 0, group: None }
    }
}

impl Rank {
    /// As a part of the request; with `shared` also who reads the stream together.
    pub(crate) fn to_request(&self, shared: bool) -> Option<Ranks> {
        let Rank { ranks, rank, ref group } = *self;
        let alone = Ranks {
            ranks,
            first: rank,
            count: 1,
            rank,
            readers: 1,
            reader: 0,
            group: String::new(),
        };
        match group.as_ref().filter(|_| shared) {
            Some(Group { name, first, count, readers, reader }) => Some(Ranks {
                first: *first,
                count: *count,
                readers: *readers,
                reader: *reader,
                group: name.clone(),
                ..alone
            }),
            None => (ranks > 1).then_some(alone),
        }
    }
}

/// How the trainers of a job divide the work. Ranks are numbered as Megatron-core's default order
/// `tp-cp-dp-pp` has it: those of one tensor-parallel group are neighbours, pipeline stages lie
/// furthest apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Trainers of the job.
    pub world_size: u32,
    /// Trainers that share each layer: they need the same samples.
    pub tensor_parallel: u32,
    /// Trainers that get slices of the same samples.
    pub context_parallel: u32,
    /// Trainers that hold successive layers: they need the same samples.
    pub pipeline_parallel: u32,
}

/// The trainers of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The trainer's number among them, from 0.
    pub local_rank: u32,
    /// How many there are; their ranks are consecutive.
    pub local_world_size: u32,
}

impl Layout {
    /// Data-parallel ranks, if the trainers can be divided so.
    pub fn data_parallel(&self) -> Option<u32> {
        let parts = [self.tensor_parallel, self.context_parallel, self.pipeline_parallel];
        let replica =
            parts.into_iter().try_fold(1_u32, u32::checked_mul).filter(|size| *size > 0)?;
        (self.world_size > 0 && self.world_size.is_multiple_of(replica))
            .then(|| self.world_size / replica)
    }

    /// Which slice of its samples trainer `rank` gets, from 0.
    pub fn context_rank(&self, rank: u32) -> u32 {
        rank / self.tensor_parallel.max(1) % self.context_parallel.max(1)
    }

    fn data_rank(&self, rank: u32, ranks: u32) -> u32 {
        rank / (self.tensor_parallel * self.context_parallel) % ranks
    }

    /// The place of trainer `rank`; with `machine` and a name it shares a stream with the trainers
    /// beside it.
    ///
    /// # Errors
    /// When there is no such trainer, or the numbers do not divide.
    pub fn place(&self, rank: u32, shared: Option<(Machine, &str)>) -> Result<Rank, LayoutError> {
        let Layout { world_size, tensor_parallel, context_parallel, pipeline_parallel } = *self;
        let ranks = self.data_parallel().ok_or(LayoutError::Indivisible {
            world_size,
            tensor_parallel,
            context_parallel,
            pipeline_parallel,
        })?;
        if rank >= world_size {
            return Err(LayoutError::Rank { rank, world_size });
        }
        let data_rank = self.data_rank(rank, ranks);
        let group = match shared {
            Some((machine, name)) => Some(self.group(rank, ranks, machine, name)?),
            None => None,
        };
        Ok(Rank { ranks, rank: data_rank, group })
    }

    /// Who reads a stream together: all trainers of the machine, if their data-parallel ranks are
    /// consecutive and have equally many trainers each; else those of each rank.
    fn group(
        &self,
        rank: u32,
        ranks: u32,
        machine: Machine,
        name: &str,
    ) -> Result<Group, LayoutError> {
        let Machine { local_rank, local_world_size } = machine;
        let bad = LayoutError::Machine {
            rank,
            local_rank,
            local_world_size,
            world_size: self.world_size,
        };
        let first = rank.checked_sub(local_rank).ok_or_else(|| bad.clone())?;
        let end = first.checked_add(local_world_size).filter(|end| *end <= self.world_size);
        let end = end.filter(|_| local_rank < local_world_size).ok_or(bad)?;
        let ours = self.data_rank(rank, ranks);
        let with =
            |data: u32| (first..end).filter(move |other| self.data_rank(*other, ranks) == data);
        let readers = with(ours).count() as u32;
        let reader = with(ours).filter(|other| *other < rank).count() as u32;
        let mut here: Vec<u32> = (first..end).map(|other| self.data_rank(other, ranks)).collect();
        here.sort_unstable();
        here.dedup();
        let is_run = here.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let is_even = here.iter().all(|data| with(*data).count() as u32 == readers);
        let (first, count, name) = match is_run && is_even {
            true => (here[0], here.len() as u32, name.to_owned()),
            false => (ours, 1, format!("{name}, rank {ours}")),
        };
        Ok(Group { name, first, count, readers, reader })
    }
}

/// Why a trainer has no place in a layout.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The trainers cannot be divided so.
    #[error(
        "{world_size} trainers cannot be divided into {tensor_parallel} tensor-parallel x {context_parallel} \
         context-parallel x {pipeline_parallel} pipeline-parallel ones"
    )]
    Indivisible {
        /// Trainers.
        world_size: u32,
        /// Tensor-parallel ones.
        tensor_parallel: u32,
        /// Context-parallel ones.
        context_parallel: u32,
        /// Pipeline stages.
        pipeline_parallel: u32,
    },
    /// There is no such trainer.
    #[error("rank {rank} of {world_size} trainers: ranks count from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// Trainers.
        world_size: u32,
    },
    /// The numbers of the machine contradict those of the job.
    #[error(
        "trainer {local_rank} of {local_world_size} on this machine cannot be rank {rank} of {world_size}"
    )]
    Machine {
        /// The rank.
        rank: u32,
        /// Its number on the machine.
        local_rank: u32,
        /// Trainers of the machine.
        local_world_size: u32,
        /// Trainers of the job.
        world_size: u32,
    },
}

/// From the batches of a rank to those of the stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbering {
    first: u64,
    ranks: u64,
    rank: u64,
}

impl Numbering {
    /// Of a stream that begins at batch `first`.
    pub(crate) fn new(first: u64, rank: &Rank) -> Numbering {
        Numbering { first, ranks: rank.ranks.into(), rank: rank.rank.into() }
    }

    /// The stream's first batch.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// The number of a batch of the ring, which counts those of its rank, from the stream's first.
    /// A false ring cannot make it overflow.
    pub(crate) fn number(&self, in_ring: u64) -> u64 {
        self.step(in_ring).saturating_add(self.rank)
    }

    /// The first batch of the step after a batch of the ring: where all ranks go on.
    pub(crate) fn next(&self, in_ring: u64) -> u64 {
        self.step(in_ring).saturating_add(self.ranks)
    }

    fn step(&self, in_ring: u64) -> u64 {
        let step = in_ring.saturating_sub(self.first);
        self.first.saturating_add(step.saturating_mul(self.ranks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_batches_of_all_ranks_are_those_of_the_stream() {
        let mut seen: Vec<u64> = (0..3)
            .flat_map(|rank| {
                let numbering = Numbering::new(7, &Rank { ranks: 3, rank, group: None });
                (7..11).map(move |in_ring| numbering.number(in_ring))
            })
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, (7..19).collect::<Vec<u64>>());
        let last = Numbering::new(7, &Rank { ranks: 3, rank: 1, group: None });
        assert_eq!((last.number(8), last.next(8)), (11, 13));
        assert_eq!(Numbering::new(5, &Rank::default()).next(5), 6);
    }

    fn layout(world_size: u32, tp: u32, cp: u32, pp: u32) -> Layout {
        Layout { world_size, tensor_parallel: tp, context_parallel: cp, pipeline_parallel: pp }
    }

    /// The ranks of Megatron-core's order `tp-cp-dp-pp`, for 16 trainers with 2 x 2 x 2.
    #[test]
    fn trainers_are_numbered_as_megatron_does() {
        let layout = layout(16, 2, 2, 2);
        let place = |rank| {
            let found = layout.place(rank, None).expect("a rank");
            (found.rank, layout.context_rank(rank))
        };
        assert_eq!(layout.data_parallel(), Some(2));
        let expected = [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)];
        let found: Vec<(u32, u32)> = (0..16).map(place).collect();
        assert_eq!(found, [expected, expected].concat());
    }

    /// Every trainer of a machine agrees with the others on who reads what, and every ring is read
    /// by as many as it was made for.
    #[test]
    fn the_trainers_of_a_machine_take_every_seat_once() {
        for (world, tp, cp, pp, local) in [
            (8, 1, 1, 1, 8),
            (8, 2, 1, 1, 8),
            (16, 2, 2, 2, 8),
            (8, 8, 1, 1, 8),
            (24, 2, 1, 2, 8),
            (8, 1, 1, 8, 4),
        ] {
            let layout = layout(world, tp, cp, pp);
            for machine in 0..world / local {
                let mut seats: Vec<(String, u32, u32, u32, u32, u32)> = (0..local)
                    .map(|local_rank| {
                        let here = Machine { local_rank, local_world_size: local };
                        let rank = machine * local + local_rank;
                        let place = layout.place(rank, Some((here, "run"))).expect("a place");
                        let Group { name, first, count, readers, reader } =
                            place.group.expect("one");
                        assert!((first..first + count).contains(&place.rank));
                        (name, first, count, readers, place.rank, reader)
                    })
                    .collect();
                seats.sort();
                let all = seats.len();
                let mut groups: Vec<_> = seats.iter().map(|s| (&s.0, s.1, s.2, s.3)).collect();
                seats.iter().for_each(|seat| assert!(seat.5 < seat.3));
                groups.dedup();
                let room: u32 = groups.iter().map(|(_, _, count, readers)| count * readers).sum();
                assert_eq!(room, local, "no seat is left over: {seats:?}");
                let mut distinct = seats.clone();
                distinct.dedup();
                assert_eq!(distinct.len(), all, "no seat is taken twice: {seats:?}");
            }
        }
    }

    #[test]
    fn what_does_not_divide_is_refused() {
        let here = Machine { local_rank: 0, local_world_size: 8 };
        assert!(matches!(layout(8, 3, 1, 1).place(0, None), Err(LayoutError::Indivisible { .. })));
        assert!(matches!(layout(8, 0, 1, 1).place(0, None), Err(LayoutError::Indivisible { .. })));
        assert!(matches!(layout(8, 1, 1, 1).place(8, None), Err(LayoutError::Rank { .. })));
        let beyond = layout(4, 1, 1, 1).place(0, Some((here, "run")));
        assert!(matches!(beyond, Err(LayoutError::Machine { .. })));
    }
}
