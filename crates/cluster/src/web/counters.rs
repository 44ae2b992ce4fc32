//! What the server has done beside what every web server does and counts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counters of one server that its kit does not have.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Subscriptions to events.
    pub(super) subscriptions: AtomicU64,
    /// Times that the view was written as JSON: once per change that somebody asked for.
    pub(super) serialised: AtomicU64,
}

impl Counters {
    /// All of them, by name, and those of the kit.
    pub(super) fn by_name(&self, kit: &service::http::Counters) -> BTreeMap<String, u64> {
        let mut all = kit.by_name();
        for (name, value) in
            [("web.subscriptions", &self.subscriptions), ("web.views_serialised", &self.serialised)]
        {
            all.insert(name.to_owned(), value.load(Ordering::Relaxed));
        }
        all
    }
}
