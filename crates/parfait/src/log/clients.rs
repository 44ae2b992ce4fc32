//! The last answer to each client, so that a request that is repeated is carried out once.

use alloc::collections::BTreeMap;

use super::entry::Answered;

/// Most clients whose last answer is kept: those that asked last. One that repeats a request after
/// so many others asked is taken for new.
pub const MAX_CLIENTS: usize = 4096;

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clients {
    pub(super) answers: BTreeMap<u64, Answered>,
    /// By the entry that recorded the last answer: the client.
    asked: BTreeMap<u64, u64>,
}

impl Clients {
    /// Keeps the last answer to a client, and forgets whoever asked longest ago where there are too
    /// many.
    pub(super) fn remember(&mut self, client: u64, answered: Answered) {
        self.asked.insert(answered.index, client);
        if let Some(before) = self.answers.insert(client, answered) {
            self.asked.remove(&before.index);
        }
        if self.answers.len() > MAX_CLIENTS
            && let Some((_, oldest)) = self.asked.pop_first()
        {
            self.answers.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Outcome;

    #[test]
    fn whoever_asked_longest_ago_is_forgotten() {
        let mut clients = Clients::default();
        let answered = |index| Answered { sequence: 1, index, outcome: Outcome::Admitted(index) };
        let most = MAX_CLIENTS as u64;
        (0..most).for_each(|client| clients.remember(client, answered(client)));
        // The first asks again, so the second is the one that asked longest ago.
        clients.remember(0, answered(most));
        clients.remember(most, answered(most + 1));
        assert_eq!(clients.answers.len(), MAX_CLIENTS);
        assert!(clients.answers.contains_key(&0) && !clients.answers.contains_key(&1));
    }
}
