//! What each link carried and had reserved in the last ten minutes.
//!
//! Memory has a bound: [`MAX_BYTES`] for all links. A cluster with so many links that a sample per
//! second would take more is sampled less often; the ten minutes stay.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;

use crate::view::{LinkView, View};

/// How far back samples go.
const SPAN: Duration = Duration::from_secs(600);

/// Most samples of a link: one per second.
const MAX_SAMPLES: usize = SPAN.as_secs() as usize;

/// Fewest samples of a link.
const MIN_SAMPLES: usize = 20;

/// Memory of all samples. 600 samples of 13,981 links fit: a fat-tree of 1,024 hosts (k = 16) has
/// 6,144.
pub const MAX_BYTES: usize = 64 << 20;

/// Most links that have a history; of a larger cluster the first ones have.
const MAX_LINKS: usize = MAX_BYTES / (MIN_SAMPLES * size_of::<Sample>());

/// What stands for "not measured".
const NOT_MEASURED: u32 = u32::MAX;

/// A link at one moment, in kbit/s: up to 4.29 Tbit/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    used_kbps: u32,
    reserved_kbps: u32,
}

/// Samples of all links, for the topology that the newest view has.
#[derive(Debug, Default)]
pub(super) struct History {
    /// From, to and port of each link.
    links: Vec<(u32, u32, u32)>,
    /// Names of the nodes that they are between.
    nodes: Vec<String>,
    /// One row of all links per sample, the oldest first.
    rows: VecDeque<Box<[Sample]>>,
    /// When the newest row was taken, in milliseconds since 1970.
    newest_unix_ms: u64,
}

/// The samples of a link, as they are served; the oldest first.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct LinkHistory<'h> {
    link: usize,
    from: &'h str,
    to: &'h str,
    port: u32,
    step_ms: u64,
    newest_unix_ms: u64,
    used_kbps: Vec<Option<u32>>,
    reserved_kbps: Vec<u32>,
}

fn kbps(bps: u64) -> u32 {
    u32::try_from(bps / 1000).unwrap_or(NOT_MEASURED).min(NOT_MEASURED - 1)
}

impl Sample {
    /// `is_current` is whether somebody still measures.
    fn of(link: &LinkView, is_current: bool) -> Sample {
        let used = link.used_bps.filter(|_| is_current);
        Sample {
            used_kbps: used.map_or(NOT_MEASURED, kbps),
            reserved_kbps: kbps(link.reserved_bps),
        }
    }
}

impl History {
    /// Begins the history of a view's topology if it has not begun.
    pub(super) fn begin(&mut self, view: &View, is_current: bool, unix_ms: u64) {
        if !self.is_of(view) {
            self.sample(view, is_current, unix_ms);
        }
    }

    /// Takes a sample. A view of another topology begins a new history.
    pub(super) fn sample(&mut self, view: &View, is_current: bool, unix_ms: u64) {
        if !self.is_of(view) {
            let links = view.links.iter().take(MAX_LINKS);
            self.links = links.map(|link| (link.from, link.to, link.port)).collect();
            self.nodes = view.nodes.iter().map(|node| node.name.clone()).collect();
            self.rows = VecDeque::new();
        }
        if self.links.is_empty() {
            return;
        }
        if self.rows.len() >= self.most_rows() {
            self.rows.pop_front();
        }
        let links = view.links.iter().take(MAX_LINKS);
        self.rows.push_back(links.map(|link| Sample::of(link, is_current)).collect());
        self.newest_unix_ms = unix_ms;
    }

    /// The time between two samples.
    pub(super) fn step(&self) -> Duration {
        SPAN / self.most_rows() as u32
    }

    fn most_rows(&self) -> usize {
        let fitting = MAX_BYTES / (self.links.len().max(1) * size_of::<Sample>());
        fitting.clamp(MIN_SAMPLES, MAX_SAMPLES)
    }

    fn is_of(&self, view: &View) -> bool {
        let links = view.links.iter().take(MAX_LINKS);
        links.map(|link| (link.from, link.to, link.port)).eq(self.links.iter().copied())
            && view.nodes.iter().map(|node| &node.name).eq(&self.nodes)
    }

    /// The samples of a link of the view, by its index there.
    pub(super) fn of_link(&self, link: usize) -> Option<LinkHistory<'_>> {
        let (from, to, port) = *self.links.get(link)?;
        let name = |node: u32| self.nodes.get(node as usize).map_or("", String::as_str);
        let samples = || self.rows.iter().filter_map(|row| row.get(link));
        let used = |sample: &Sample| Some(sample.used_kbps).filter(|used| *used != NOT_MEASURED);
        Some(LinkHistory {
            link,
            from: name(from),
            to: name(to),
            port,
            step_ms: self.step().as_millis() as u64,
            newest_unix_ms: self.newest_unix_ms,
            used_kbps: samples().map(used).collect(),
            reserved_kbps: samples().map(|sample| sample.reserved_kbps).collect(),
        })
    }

    /// Memory of the samples, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.rows.len() * self.links.len() * size_of::<Sample>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::NodeView;

    fn view(links: u32, used_bps: Option<u64>) -> View {
        let node = |name: &str| NodeView { name: name.into(), ..NodeView::default() };
        let link = |port| LinkView {
            from: 0,
            to: 1,
            port,
            reserved_bps: 5_000_000,
            used_bps,
            ..LinkView::default()
        };
        View {
            nodes: vec![node("h0"), node("s0")],
            links: (0..links).map(link).collect(),
            ..View::default()
        }
    }

    #[test]
    fn ten_minutes_are_kept_one_sample_per_second() {
        let mut history = History::default();
        for second in 0..1000 {
            history.sample(&view(2, Some(second * 1000)), true, second * 1000);
        }
        let link = history.of_link(1).expect("it is there");
        assert_eq!((link.from, link.to, link.port, link.step_ms), ("h0", "s0", 1, 1000));
        assert_eq!(link.used_kbps.len(), 600);
        assert_eq!((link.used_kbps[0], link.used_kbps[599]), (Some(400), Some(999)));
        assert_eq!((link.reserved_kbps[0], link.newest_unix_ms), (5000, 999_000));
        assert!(history.of_link(2).is_none());
    }

    #[test]
    fn what_nobody_measures_is_not_zero() {
        let mut history = History::default();
        history.sample(&view(1, None), true, 0);
        history.sample(&view(1, Some(7_000)), true, 1);
        history.sample(&view(1, Some(7_000)), false, 2);
        history.sample(&view(1, Some(u64::MAX)), true, 3);
        let used = history.of_link(0).expect("it is there").used_kbps;
        assert_eq!(used, [None, Some(7), None, Some(u32::MAX - 1)]);
    }

    #[test]
    fn another_topology_begins_anew() {
        let mut history = History::default();
        history.sample(&view(2, Some(1)), true, 0);
        let mut renamed = view(2, Some(1));
        renamed.nodes[1].name = "s1".into();
        history.sample(&renamed, true, 1);
        let link = history.of_link(0).expect("it is there");
        assert_eq!((link.to, link.used_kbps.len()), ("s1", 1));
        history.sample(&View::default(), true, 2);
        assert!(history.of_link(0).is_none());
    }

    #[test]
    fn memory_has_a_bound_however_many_links_there_are() {
        for links in [13_981, 13_982, 100_000, 600_000] {
            let mut history = History::default();
            let view = view(links, Some(1));
            (0..25).for_each(|second| history.sample(&view, true, second));
            let most = history.most_rows() * history.links.len() * size_of::<Sample>();
            assert!(most <= MAX_BYTES && history.bytes() <= most, "{links} links: {most} bytes");
            assert!(history.step() * history.most_rows() as u32 > SPAN - Duration::from_secs(1));
        }
    }
}
