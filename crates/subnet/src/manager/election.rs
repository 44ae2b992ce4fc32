//! Which of several managers is the master (IBA 14.4.1): this one's state, the others that it
//! knows, and what follows from both. Nothing is sent or scheduled here; methods return what the
//! manager has to do.

use alloc::collections::{BTreeMap, BTreeSet};
use core::time::Duration;

use super::event::{Refusal, Why};
use crate::discovery::Place;
use crate::exchange::Fate;
use crate::mad::DirectedRoute;
use crate::sm_info::{Control, SmInfo, Standing};

/// Most managers with another SM_Key that are reported.
const MAX_FOREIGN: usize = 64;

/// Another manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Other {
    pub(super) info: SmInfo,
    pub(super) route: DirectedRoute,
}

/// A manager of higher priority that has not taken over.
#[derive(Clone, Copy, Debug)]
struct Unwilling {
    guid: u64,
    /// It is not asked again before this time,
    until: Duration,
    /// nor before a fabric was set up.
    has_set_up: bool,
}

/// What follows once all nodes and managers are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Another is the master.
    StandBy(Other),
    /// This one is.
    Lead(Why),
    /// It is no longer, if the other agrees.
    HandOver(Other),
    /// Another is master, too, and has time to give way.
    Wait(SmInfo),
    /// It is still.
    Continue,
}

/// What another manager may make this one do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Nothing,
    /// To look whether a master has given way.
    Sweep,
    /// To look for the master again.
    Seek(Why),
    /// To do nothing any more.
    Stop,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Election {
    /// What it tells others about itself. The GUID of its port is 0 until that has responded.
    pub(super) own: SmInfo,
    /// Other managers that the last heavy sweep found.
    others: BTreeMap<Place, Other>,
    /// The master that a standby watches, and polls of it without a response.
    master: Option<(Other, u32)>,
    /// The master has handed over.
    is_promoted: bool,
    /// Why it looks for the master.
    why: Option<Why>,
    unwilling: Option<Unwilling>,
    /// Another master, which goes after it, by its GUID, and until when it may give way.
    rival: Option<(u64, Duration)>,
    /// GUIDs of managers with another SM_Key that were reported.
    foreign: BTreeSet<u64>,
}

impl Election {
    pub(super) fn new(priority: u8, key: u64) -> Election {
        Election {
            own: SmInfo { guid: 0, key, count: 0, priority, standing: Standing::Discovering },
            others: BTreeMap::new(),
            master: None,
            is_promoted: false,
            why: None,
            unwilling: None,
            rival: None,
            foreign: BTreeSet::new(),
        }
    }

    /// The GUID of its port, once that is known.
    pub(super) fn guid(&self) -> Option<u64> {
        (self.own.guid != 0).then_some(self.own.guid)
    }

    pub(super) fn is_master(&self) -> bool {
        self.own.standing == Standing::Master
    }

    /// The master that a standby watches.
    pub(super) fn master(&self) -> Option<&Other> {
        let (master, _) = self.master.as_ref()?;
        (self.own.standing == Standing::Standby).then_some(master)
    }

    /// Whether the last heavy sweep found no other manager.
    pub(super) fn is_alone(&self) -> bool {
        self.others.is_empty()
    }

    /// A heavy sweep asks anew.
    pub(super) fn forget_others(&mut self) {
        self.others.clear();
    }

    /// A manager may be at this port. Returns the GUID of one that has another SM_Key, the first
    /// time.
    pub(super) fn handle_manager(
        &mut self,
        place: Place,
        route: DirectedRoute,
        fate: &Fate,
    ) -> Option<u64> {
        let info = parsed(fate)?;
        if self.is_of_subnet(&info) {
            self.others.insert(place, Other { info, route });
            return None;
        }
        let is_new = self.foreign.len() < MAX_FOREIGN && self.foreign.insert(info.guid);
        is_new.then_some(info.guid)
    }

    /// Whether another manager has this SM_Key. It tells 0 to those whom it does not take for the
    /// master, as opensm does.
    fn is_of_subnet(&self, other: &SmInfo) -> bool {
        other.key == 0 || other.key == self.own.key
    }

    /// The first of the other managers in a state.
    fn first_of(&self, is_meant: impl Fn(&SmInfo) -> bool) -> Option<Other> {
        let meant = self.others.values().filter(|other| is_meant(&other.info));
        meant
            .copied()
            .reduce(|best, other| if other.info.is_before(&best.info) { other } else { best })
    }

    /// All nodes and managers are known: who is master? Another one may give way for `rival_rest`
    /// before its part of the fabric is taken.
    pub(super) fn decide(&mut self, now: Duration, rival_rest: Duration) -> Decision {
        let own = self.own;
        if self.is_master() {
            return self.defend(now, rival_rest);
        }
        let master = self.first_of(|other| other.standing == Standing::Master);
        let is_candidate = |other: &SmInfo| {
            matches!(other.standing, Standing::Standby | Standing::Discovering)
                && other.is_before(&own)
        };
        let ahead = master.or_else(|| self.first_of(is_candidate));
        match ahead.filter(|_| !self.is_promoted) {
            Some(other) => Decision::StandBy(other),
            None => {
                self.is_promoted = false;
                Decision::Lead(self.why.take().unwrap_or(Why::First))
            }
        }
    }

    /// A master hands over to whoever goes before it, and lets others hand over to it before it
    /// goes on.
    fn defend(&mut self, now: Duration, rival_rest: Duration) -> Decision {
        let own = self.own;
        let rests = |other: &Unwilling| now < other.until || !other.has_set_up;
        let unwilling = self.unwilling.filter(rests).map(|other| other.guid);
        let is_ahead = |other: &SmInfo| {
            Some(other.guid) != unwilling
                && match other.standing {
                    Standing::Master => other.is_before(&own),
                    Standing::Standby => other.priority > own.priority,
                    _ => false,
                }
        };
        if let Some(other) = self.first_of(is_ahead) {
            return Decision::HandOver(other);
        }
        let rival = self.first_of(|other| other.standing == Standing::Master);
        // Whoever has not given way in that time is not waited for again as long as it is there.
        let known = |rival: Other| {
            let before = self.rival.filter(|(guid, _)| *guid == rival.info.guid);
            before.unwrap_or((rival.info.guid, now + rival_rest))
        };
        self.rival = rival.map(known);
        match rival.zip(self.rival) {
            Some((rival, (_, until))) if now < until => Decision::Wait(rival.info),
            _ => Decision::Continue,
        }
    }

    /// Another manager has not taken over: it is not asked again before this time.
    pub(super) fn keep_mastership(&mut self, guid: u64, until: Duration) {
        self.unwilling = Some(Unwilling { guid, until, has_set_up: false });
    }

    /// The fabric was set up.
    pub(super) fn note_setup(&mut self) {
        if let Some(other) = &mut self.unwilling {
            other.has_set_up = true;
        }
    }

    /// It is no master any more.
    pub(super) fn give_up(&mut self) {
        self.unwilling = None;
        self.rival = None;
    }

    /// From now on it watches this master.
    pub(super) fn watch(&mut self, master: Other) {
        self.master = Some((master, 0));
    }

    /// The master was polled, and is silent after so many misses. Returns why the next one is
    /// looked for, if it is.
    pub(super) fn handle_poll(&mut self, fate: &Fate, most_misses: u32) -> Option<Why> {
        let info = parsed(fate).filter(|info| self.is_of_subnet(info));
        let (master, misses) = self.master.as_mut()?;
        let guid = master.info.guid;
        match info.map(|info| info.standing) {
            Some(Standing::Master | Standing::Discovering) => *misses = 0,
            Some(Standing::Standby | Standing::NotActive) => return Some(Why::MasterGone(guid)),
            None => *misses += 1,
        }
        (*misses > 0 && *misses >= most_misses).then_some(Why::MasterSilent(guid, *misses))
    }

    /// From now on it looks for the master, and becomes it if there is none.
    pub(super) fn seek(&mut self, why: Why) {
        self.master = None;
        self.why = Some(why);
    }

    /// What another manager wants, if that makes sense.
    pub(super) fn obey(&mut self, modifier: u32, data: &[u8; 64]) -> Result<Command, Refusal> {
        let other = SmInfo::parse(data).ok_or(Refusal::Malformed)?;
        let control = Control::of(modifier).ok_or(Refusal::Malformed)?;
        if other.key != self.own.key {
            return Err(Refusal::WrongKey(other.guid));
        }
        let is_known = self.others.values().any(|known| known.info.guid == other.guid);
        match (control, self.own.standing) {
            // Another master gives way.
            (Control::Handover, Standing::Master) => Ok(Command::Sweep),
            _ if !is_known => Err(Refusal::Unknown(other.guid)),
            (Control::Handover, Standing::Standby | Standing::Discovering) => {
                self.is_promoted = true;
                Ok(Command::Seek(Why::HandedOver(other.guid)))
            }
            (Control::Acknowledge, _) => Ok(Command::Nothing),
            (Control::Disable, Standing::Standby | Standing::Discovering) => Ok(Command::Stop),
            (Control::Standby, Standing::NotActive) | (Control::Discover, Standing::Standby) => {
                Ok(Command::Seek(Why::Told))
            }
            (_, standing) => Err(Refusal::Standing(standing)),
        }
    }
}

/// What a manager has told, if it has.
fn parsed(fate: &Fate) -> Option<SmInfo> {
    match fate {
        Fate::Response(data) => SmInfo::parse(data),
        Fate::Refused(_) | Fate::Silent => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: u64 = 1;

    fn info(guid: u64, priority: u8, standing: Standing) -> SmInfo {
        SmInfo { guid, key: KEY, count: 0, priority, standing }
    }

    fn at(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    /// A manager with GUID 5 and priority 3 that knows these others.
    fn election(standing: Standing, others: &[SmInfo]) -> Election {
        let mut election = Election::new(3, KEY);
        election.own = info(5, 3, standing);
        for other in others {
            let fate = Fate::Response(other.emit());
            election.handle_manager((other.guid, 1), DirectedRoute::HERE, &fate);
        }
        election
    }

    fn other(info: SmInfo) -> Other {
        Other { info, route: DirectedRoute::HERE }
    }

    #[test]
    fn a_master_is_followed_whatever_its_priority_and_else_the_first_leads() {
        let low = info(9, 0, Standing::Master);
        let mut one = election(Standing::Discovering, &[low, info(4, 9, Standing::Standby)]);
        assert_eq!(one.decide(at(0), at(30)), Decision::StandBy(other(low)));
        let first = info(4, 3, Standing::Discovering);
        let mut one = election(Standing::Discovering, &[first, info(6, 3, Standing::Standby)]);
        assert_eq!(one.decide(at(0), at(30)), Decision::StandBy(other(first)));
        let mut one = election(Standing::Discovering, &[info(6, 3, Standing::Standby)]);
        assert_eq!(one.decide(at(0), at(30)), Decision::Lead(Why::First));
    }

    #[test]
    fn who_was_handed_over_to_leads_once_though_the_master_is_there_still() {
        let master = info(9, 0, Standing::Master);
        let mut one = election(Standing::Standby, &[master]);
        let command = one.obey(Control::Handover.modifier(), &master.emit());
        let Ok(Command::Seek(why)) = command else { panic!("{command:?}") };
        one.seek(why);
        assert_eq!(one.decide(at(0), at(30)), Decision::Lead(Why::HandedOver(9)));
        assert_eq!(one.decide(at(0), at(30)), Decision::StandBy(other(master)));
    }

    #[test]
    fn a_master_hands_over_and_asks_the_unwilling_again_after_a_rest_and_a_setup() {
        let urgent = info(9, 4, Standing::Standby);
        let mut one = election(Standing::Master, &[urgent]);
        assert_eq!(one.decide(at(0), at(30)), Decision::HandOver(other(urgent)));
        one.keep_mastership(9, at(2));
        assert_eq!(one.decide(at(3), at(30)), Decision::Continue, "nothing was set up");
        one.note_setup();
        assert_eq!(one.decide(at(1), at(30)), Decision::Continue, "it rests");
        assert_eq!(one.decide(at(3), at(30)), Decision::HandOver(other(urgent)));
    }

    #[test]
    fn a_rival_has_its_time_once() {
        let rival = info(9, 3, Standing::Master);
        let mut one = election(Standing::Master, &[rival]);
        let decisions = [0, 29, 30, 31].map(|s| one.decide(at(s), at(30)));
        let wait = Decision::Wait(rival);
        assert_eq!(decisions, [wait, wait, Decision::Continue, Decision::Continue]);
    }

    #[test]
    fn a_master_is_gone_at_once_and_silent_after_misses_in_turn() {
        let mut one = election(Standing::Standby, &[]);
        one.watch(other(info(9, 3, Standing::Master)));
        let said = |standing| Fate::Response(info(9, 3, standing).emit());
        let polls = [
            (Fate::Silent, None),
            (said(Standing::Master), None),
            (Fate::Silent, None),
            (Fate::Refused(1), Some(Why::MasterSilent(9, 2))),
            (said(Standing::NotActive), Some(Why::MasterGone(9))),
        ];
        for (fate, why) in polls {
            assert_eq!(one.handle_poll(&fate, 2), why);
        }
    }

    #[test]
    fn commands_come_from_known_managers_with_the_key_and_foreign_ones_are_named_once() {
        let known = info(9, 3, Standing::Master);
        let mut one = election(Standing::Standby, &[known]);
        let stop = Control::Disable.modifier();
        assert_eq!(one.obey(stop, &known.emit()), Ok(Command::Stop));
        assert_eq!(one.obey(99, &known.emit()), Err(Refusal::Malformed));
        let stranger = info(8, 3, Standing::Master);
        assert_eq!(one.obey(stop, &stranger.emit()), Err(Refusal::Unknown(8)));
        let foreign = SmInfo { key: 2, ..stranger };
        assert_eq!(one.obey(stop, &foreign.emit()), Err(Refusal::WrongKey(8)));
        let fate = Fate::Response(foreign.emit());
        let named = [0; 2].map(|_| one.handle_manager((8, 1), DirectedRoute::HERE, &fate));
        assert_eq!(named, [Some(8), None]);
        one.own.standing = Standing::Master;
        let refused = Err(Refusal::Standing(Standing::Master));
        assert_eq!(one.obey(stop, &known.emit()), refused);
        assert_eq!(one.obey(Control::Handover.modifier(), &stranger.emit()), Ok(Command::Sweep));
    }
}
