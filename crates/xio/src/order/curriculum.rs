//! A blend whose weights depend on the global sample: a sequence of phases, each with a [`Blend`]
//! of its own.
//!
//! Phase `i` begins at a global sample and lasts until the next one begins. In it, sample `n` is
//! step `n - start` of its blend, so every prefix of a phase keeps the ratio of that phase.
//! Datasets go on where the phase before left them: the draws of the earlier phases are counted
//! once, when the curriculum is made, and a seek costs a walk in one phase.

use alloc::vec::Vec;

use super::{Blend, BlendCursor, MAX_TOTAL_WEIGHT, OrderError};

/// Most phases of a curriculum.
pub const MAX_PHASES: usize = 64;

/// One phase.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Phase {
    /// Its first global sample.
    start: u64,
    blend: Blend,
    /// Samples drawn from each dataset before it.
    drawn: Vec<u64>,
}

/// Blends of the same datasets, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Curriculum {
    /// At least one.
    phases: Vec<Phase>,
}

impl From<Blend> for Curriculum {
    fn from(blend: Blend) -> Curriculum {
        let drawn = alloc::vec![0; blend.weights().len()];
        Curriculum { phases: Vec::from([Phase { start: 0, blend, drawn }]) }
    }
}

impl Curriculum {
    /// Phases by their first sample, the first of which is 0. Walks each blend but the last once at
    /// most.
    ///
    /// # Errors
    /// When a phase does not begin after the one before it or blends another number of datasets,
    /// when there are too many, and when the weights of all phases add up to more than
    /// [`MAX_TOTAL_WEIGHT`].
    pub fn new(phases: impl IntoIterator<Item = (u64, Blend)>) -> Result<Curriculum, OrderError> {
        let mut phases = phases.into_iter();
        let first = match phases.next() {
            Some((0, first)) => first,
            other => {
                let start = other.map_or(0, |(start, _)| start);
                return Err(OrderError::Phase { phase: 0, start });
            }
        };
        let mut total = u64::from(first.total());
        let mut curriculum = Curriculum::from(first);
        for (start, blend) in phases {
            let (phase, last) = (curriculum.phases.len(), curriculum.last());
            if start <= last.start || phase == MAX_PHASES {
                return Err(OrderError::Phase { phase, start });
            }
            let (weights, datasets) = (blend.weights().len(), last.drawn.len());
            if weights != datasets {
                return Err(OrderError::Count { weights, datasets });
            }
            total += u64::from(blend.total());
            if total > MAX_TOTAL_WEIGHT {
                return Err(OrderError::TotalTooLarge { total });
            }
            let end = last.blend.cursor_at(start - last.start);
            let drawn = (0..).zip(&last.drawn).map(|(d, before)| before + end.drawn(d)).collect();
            curriculum.phases.push(Phase { start, blend, drawn });
        }
        Ok(curriculum)
    }

    fn last(&self) -> &Phase {
        &self.phases[self.phases.len() - 1]
    }

    /// Datasets of each phase.
    pub fn datasets(&self) -> usize {
        self.phases[0].drawn.len()
    }

    /// Whether a dataset has a weight in some phase.
    pub fn draws(&self, dataset: usize) -> bool {
        let weight = |phase: &Phase| phase.blend.weights().get(dataset).copied();
        self.phases.iter().any(|phase| weight(phase).is_some_and(|weight| weight > 0))
    }

    /// The dataset of sample `n`, and how many samples were drawn from it before. Costs a seek.
    pub fn pick(&self, n: u64) -> (usize, u64) {
        self.cursor_at(n).step()
    }

    /// A cursor whose next step is sample `n`.
    pub fn cursor_at(&self, n: u64) -> CurriculumCursor {
        let phase = self.phase_of(n);
        let Phase { start, blend, .. } = &self.phases[phase];
        CurriculumCursor { cursor: blend.cursor_at(n - start), curriculum: self.clone(), phase }
    }

    /// The phase of sample `n`.
    fn phase_of(&self, n: u64) -> usize {
        self.phases.partition_point(|phase| phase.start <= n) - 1
    }
}

/// Walks a curriculum sample by sample.
#[derive(Clone, Debug)]
pub struct CurriculumCursor {
    curriculum: Curriculum,
    phase: usize,
    /// Counts samples and draws from the start of the phase.
    cursor: BlendCursor,
}

impl CurriculumCursor {
    fn current(&self) -> &Phase {
        &self.curriculum.phases[self.phase]
    }

    /// The global index of the next sample.
    pub fn position(&self) -> u64 {
        self.current().start.wrapping_add(self.cursor.position())
    }

    /// Samples drawn from a dataset before the next one.
    pub fn drawn(&self, dataset: usize) -> u64 {
        self.current().drawn[dataset].wrapping_add(self.cursor.drawn(dataset))
    }

    /// A cursor whose next step is sample `n`: walks on from here if that is shorter than
    /// [`Curriculum::cursor_at`].
    pub(crate) fn forward_to(&self, n: u64) -> CurriculumCursor {
        if self.curriculum.phase_of(n) != self.phase {
            return self.curriculum.cursor_at(n);
        }
        let cursor = self.cursor.forward_to(n - self.current().start);
        CurriculumCursor { curriculum: self.curriculum.clone(), phase: self.phase, cursor }
    }

    /// The dataset of the next sample, and how many samples were drawn from it before.
    pub fn step(&mut self) -> (usize, u64) {
        if let Some(next) = self.curriculum.phases.get(self.phase + 1)
            && CurriculumCursor::position(self) >= next.start
        {
            self.cursor = next.blend.cursor_at(0);
            self.phase += 1;
        }
        let (dataset, draw) = self.cursor.step();
        (dataset, self.current().drawn[dataset].wrapping_add(draw))
    }
}

impl Iterator for CurriculumCursor {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<(usize, u64)> {
        Some(self.step())
    }
}
