//! What is read from the book alone: where a job is, and the topology with all jobs.

use parfait::log::Book;
use parfait::network::Network;
use parfait::spread::Ecmp;

use super::cluster::Cluster;
use super::inputs::FoundJob;
use crate::convert;
use crate::kubernetes::nodes_by_rank;
use crate::proto::{self, Serialised};

/// Where a job of this name is.
pub(super) fn find(book: &Book, network: &Network, name: &str) -> Option<FoundJob> {
    let held = book.jobs().get(&book.job_named(name)?)?;
    let name_of = |host| network.host_name(host);
    let nodes = nodes_by_rank(&held.job.pattern, held.order, &held.pieces, name_of);
    Some(FoundJob { owner: held.label.owner.clone(), job: held.job.clone(), nodes })
}

/// The topology and all jobs, serialised once for all who ask before the jobs change.
#[derive(Debug, Default)]
pub(super) struct TopologyReply {
    /// The reply, and the entry of the log that changed it last.
    made: Option<(u64, Serialised)>,
    /// How often it was made.
    pub(super) count: u64,
}

impl TopologyReply {
    /// Another log may have other jobs under the same numbers of entries.
    pub(super) fn clear(&mut self) {
        self.made = None;
    }

    pub(super) fn get(&mut self, book: &Book, network: &Network, cluster: &Cluster) -> Serialised {
        let unchanged_since = book.changed_index();
        if let Some((since, reply)) = &self.made
            && *since == unchanged_since
        {
            return reply.clone();
        }
        let held = book.jobs().iter().map(|(job, held)| {
            let is_degraded = book.is_degraded(*job);
            proto::Held { is_degraded, ..convert::held_message(*job, held, network) }
        });
        let Cluster { text, slots, reservable_ppm, ecmp, .. } = cluster;
        let reply = Serialised::of(&proto::TopologyReply {
            topology: text.clone(),
            slots: *slots,
            reservable_ppm: *reservable_ppm,
            ecmp: match ecmp {
                Ecmp::Even => "even",
                Ecmp::Worst => "worst",
            }
            .to_owned(),
            held: held.collect(),
            unchanged_since,
            down: Some(convert::down_message(&book.names_down())),
        });
        self.count += 1;
        self.made = Some((unchanged_since, reply.clone()));
        reply
    }
}
