//! When the view of the cluster is made: while things change, while nothing does, and for who waits
//! for it. What it shows is not here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

use crate::view::View;

/// A view is made at most so often while things change.
pub(super) const VIEW_EVERY: Duration = Duration::from_millis(200);

/// And so often while nothing does, since measurements and silences change by themselves.
const VIEW_IDLE: Duration = Duration::from_secs(1);

/// Who waits for a view gets one once so many times its cost have passed since the last one: views
/// take at most a fifth of the actor's time, however many ask.
const VIEW_SPARE: u32 = 4;

/// Larger topologies are shown so often.
const LARGE_NODES: usize = 5_000;
const LARGE_EVERY: Duration = Duration::from_secs(10);

/// See the module's text.
pub(super) struct Views {
    sender: watch::Sender<Arc<View>>,
    /// The cluster has many nodes.
    is_large: bool,
    made_at: Option<Instant>,
    /// Views made.
    count: u64,
    /// What the last view took.
    cost: Duration,
    /// Those who wait for a view that has what they did before.
    pub(super) waiting: Vec<oneshot::Sender<()>>,
    pub(super) is_changed: bool,
}

impl Views {
    pub(super) fn new(sender: watch::Sender<Arc<View>>, nodes: usize) -> Views {
        Views {
            sender,
            is_large: nodes > LARGE_NODES,
            made_at: None,
            count: 0,
            cost: Duration::ZERO,
            waiting: Vec::new(),
            is_changed: true,
        }
    }

    /// How long until the next view is made.
    pub(super) fn due(&self) -> Duration {
        let every = match (self.waiting.is_empty(), self.is_large, self.is_changed) {
            (false, _, _) => self.cost * VIEW_SPARE,
            (true, true, _) => LARGE_EVERY,
            (true, false, true) => VIEW_EVERY,
            (true, false, false) => VIEW_IDLE,
        };
        self.made_at.map_or(Duration::ZERO, |made_at| every.saturating_sub(made_at.elapsed()))
    }

    /// Makes a view if one is due, and answers those who wait for it.
    pub(super) fn show(&mut self, make: impl FnOnce() -> View) {
        if self.is_changed || self.waiting.is_empty() {
            if !self.due().is_zero() {
                return;
            }
            let begun = Instant::now();
            let mut view = make();
            self.count += 1;
            view.counters.insert("brain.views".to_owned(), self.count);
            self.sender.send_replace(Arc::new(view));
            self.cost = begun.elapsed();
            self.made_at = Some(Instant::now());
            self.is_changed = false;
        }
        for answer in self.waiting.drain(..) {
            // Who asked may be gone.
            let _ = answer.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_shares_a_view_and_none_is_made_where_nothing_changed_since_the_last() {
        let (sender, view) = watch::channel(Arc::default());
        let mut views = Views::new(sender, 3);
        views.show(View::default);
        let ask = |views: &mut Views| {
            let (answer, answered) = oneshot::channel();
            views.waiting.push(answer);
            answered
        };
        let asked = [ask(&mut views), ask(&mut views)];
        views.show(|| unreachable!("the last one has all"));
        views.is_changed = true;
        let later = ask(&mut views);
        while views.is_changed {
            views.show(View::default);
        }
        for mut answered in asked.into_iter().chain([later]) {
            assert_eq!(answered.try_recv(), Ok(()));
        }
        assert_eq!(view.borrow().counters["brain.views"], 2);
    }
}
