//! The newest view, written as JSON once per change and not once per request.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::watch;

use super::counters::Counters;
use crate::view::View;

/// A view and what was made of it so far.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) view: Arc<View>,
    /// Counts the views that were asked for.
    pub(super) version: u64,
    /// When it was first seen here.
    since: Instant,
    json: OnceLock<Bytes>,
}

/// The newest [`Published`].
#[derive(Debug)]
pub(super) struct Newest {
    views: watch::Receiver<Arc<View>>,
    current: Mutex<Arc<Published>>,
}

impl Newest {
    pub(super) fn new(views: watch::Receiver<Arc<View>>) -> Newest {
        let view = Arc::clone(&views.borrow());
        let current = Mutex::new(Arc::new(Published::new(view, 1)));
        Newest { views, current }
    }

    /// The newest view.
    pub(super) fn get(&self) -> Arc<Published> {
        let newest = Arc::clone(&self.views.borrow());
        // Nothing panics while it is held.
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&current.view, &newest) {
            *current = Arc::new(Published::new(newest, current.version + 1));
        }
        Arc::clone(&current)
    }
}

impl Published {
    fn new(view: Arc<View>, version: u64) -> Published {
        Published { view, version, since: Instant::now(), json: OnceLock::new() }
    }

    /// How long it has been the newest.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// The view as JSON.
    pub(super) fn json(&self, counters: &Counters) -> Bytes {
        let json = self.json.get_or_init(|| {
            counters.serialised.fetch_add(1, Ordering::Relaxed);
            // A view is plain data: it is always JSON.
            serde_json::to_vec(&*self.view).unwrap_or_default().into()
        });
        json.clone()
    }
}
