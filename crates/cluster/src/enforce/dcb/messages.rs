//! What the kernel is told and asked about data centre bridging: messages of route netlink, as
//! `linux/dcbnl.h` defines them, and what comes back.

use nic::netlink::{Request, attribute, attributes};
use rustix::io::Errno;

use super::table::{Bandwidth, CLASSES, Mapping};

const GET_DCB: u16 = 78;
const SET_DCB: u16 = 79;

const IEEE_SET: u8 = 20;
const IEEE_GET: u8 = 21;
const IEEE_DELETE: u8 = 27;

/// Bytes of the fixed header (`dcbmsg`).
const HEADER_BYTES: usize = 4;

const DCB_IFNAME: u16 = 1;
const DCB_IEEE: u16 = 13;
const IEEE_ETS: u16 = 1;
const IEEE_APP_TABLE: u16 = 3;
const IEEE_APP: u16 = 1;

/// Of an application entry: its protocol is a DSCP (`IEEE_8021QAZ_APP_SEL_DSCP`).
const SELECTOR_DSCP: u8 = 5;

/// The bytes of `struct ieee_ets`: three flags, then seven tables of 8.
const ETS_BYTES: usize = 3 + 7 * CLASSES;
const WILLING: usize = 0;
const CAPACITY: usize = 1;
const PERCENT: usize = 3;
const SELECTION: usize = 3 + 2 * CLASSES;
const CLASS_OF: usize = 3 + 3 * CLASSES;

/// What a NIC does with its classes, as the kernel has it: what this program decides, and what it
/// leaves alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ets([u8; ETS_BYTES]);

impl Ets {
    /// A NIC's with that many classes, all of whose tables are 0.
    #[cfg(test)]
    pub(super) fn of_classes(classes: u8) -> Ets {
        let mut bytes = [0; ETS_BYTES];
        bytes[CAPACITY] = classes;
        Ets(bytes)
    }

    /// What this program decides.
    pub(super) fn bandwidth(&self) -> Bandwidth {
        let table = |at: usize| std::array::from_fn(|number| self.0[at + number]);
        Bandwidth {
            percent: table(PERCENT),
            selection: table(SELECTION),
            class_of: table(CLASS_OF),
        }
    }

    /// The same with other bandwidths, and not to be changed by what the NIC's neighbour announces.
    pub(super) fn with(&self, bandwidth: &Bandwidth) -> Ets {
        let mut ets = *self;
        ets.0[WILLING] = 0;
        let Bandwidth { percent, selection, class_of } = bandwidth;
        for (at, table) in [(PERCENT, percent), (SELECTION, selection), (CLASS_OF, class_of)] {
            ets.0[at..at + CLASSES].copy_from_slice(table);
        }
        ets
    }

    /// How many traffic classes the NIC has; 0 stands for all.
    pub(super) fn classes(&self) -> usize {
        match self.0[CAPACITY] {
            0 => CLASSES,
            classes => usize::from(classes),
        }
    }
}

/// What is at an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// None if the NIC has no ETS.
    pub(super) ets: Option<Ets>,
    /// All code points with a priority, in order.
    pub(super) mappings: Vec<Mapping>,
}

fn request(kind: u16, command: u8, interface: &str) -> Request {
    Request::new(kind, 0, &[0, command, 0, 0]).text(DCB_IFNAME, interface)
}

/// Asks for the state of an interface.
pub(super) fn get(interface: &str) -> Request {
    request(GET_DCB, IEEE_GET, interface)
}

/// Sets the bandwidths of classes, and the classes of priorities.
pub(super) fn set_ets(interface: &str, ets: &Ets) -> Request {
    request(SET_DCB, IEEE_SET, interface).nest(DCB_IEEE, |ieee| ieee.attribute(IEEE_ETS, &ets.0))
}

/// Adds priorities of code points.
pub(super) fn add(interface: &str, mappings: &[Mapping]) -> Request {
    with_table(request(SET_DCB, IEEE_SET, interface), mappings)
}

/// Removes priorities of code points.
pub(super) fn delete(interface: &str, mappings: &[Mapping]) -> Request {
    with_table(request(SET_DCB, IEEE_DELETE, interface), mappings)
}

fn with_table(request: Request, mappings: &[Mapping]) -> Request {
    // `struct dcb_app`: selector, priority, protocol.
    let entry = |Mapping { dscp, priority }: &Mapping| {
        let [low, high] = u16::from(*dscp).to_ne_bytes();
        [SELECTOR_DSCP, *priority, low, high]
    };
    request.nest(DCB_IEEE, |ieee| {
        ieee.nest(IEEE_APP_TABLE, |table| {
            mappings.iter().fold(table, |table, own| table.attribute(IEEE_APP, &entry(own)))
        })
    })
}

/// The state in the kernel's reply; none if there is none in it.
pub(super) fn state(reply: &[u8]) -> Option<State> {
    let ieee = attribute(reply.get(HEADER_BYTES..)?, DCB_IEEE)?;
    let ets = attribute(ieee, IEEE_ETS).and_then(|bytes| bytes.first_chunk()).map(|ets| Ets(*ets));
    let entries = attribute(ieee, IEEE_APP_TABLE).unwrap_or_default();
    let mapping = |(kind, entry): (u16, &[u8])| match (kind, entry) {
        (IEEE_APP, [SELECTOR_DSCP, priority, low, high]) => {
            let dscp = u8::try_from(u16::from_ne_bytes([*low, *high])).ok()?;
            Some(Mapping { dscp, priority: *priority })
        }
        _ => None,
    };
    let mut mappings: Vec<Mapping> = attributes(entries).filter_map(mapping).collect();
    mappings.sort_unstable();
    Some(State { ets, mappings })
}

/// What the driver answered to a change: the acknowledgement only says that the driver was asked.
pub(super) fn verdict(reply: &[u8]) -> Result<(), Errno> {
    let status = reply.get(HEADER_BYTES..).and_then(|rest| attribute(rest, DCB_IEEE));
    match status.and_then(|status| status.first()) {
        None | Some(0) => Ok(()),
        // A negative number of errno, of which one byte is left.
        Some(status) => Err(Errno::from_raw_os_error(i32::from(status.wrapping_neg()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply as the kernel builds it.
    fn reply(ets: &[u8], entries: &[[u8; 4]]) -> Vec<u8> {
        let message = request(GET_DCB, IEEE_GET, "eth0").nest(DCB_IEEE, |ieee| {
            ieee.attribute(IEEE_ETS, ets).nest(IEEE_APP_TABLE, |table| {
                entries.iter().fold(table, |table, entry| table.attribute(IEEE_APP, entry))
            })
        });
        message.body().to_vec()
    }

    #[test]
    fn the_kernels_state_is_read() {
        let mut ets = [0; ETS_BYTES];
        (ets[CAPACITY], ets[PERCENT + 1], ets[SELECTION + 1], ets[CLASS_OF + 5]) = (4, 70, 2, 1);
        let reply = reply(&ets, &[[5, 3, 26, 0], [1, 4, 0x15, 0x89], [5, 1, 10, 0]]);
        let state = state(&reply).expect("a state");
        let found = state.ets.expect("it has ETS");
        let Bandwidth { percent, selection, class_of } = found.bandwidth();
        assert_eq!((percent[1], selection[1], class_of[5], found.classes()), (70, 2, 1, 4));
        assert_eq!(
            state.mappings,
            [Mapping { dscp: 10, priority: 1 }, Mapping { dscp: 26, priority: 3 }]
        );
        assert_eq!(found.with(&found.bandwidth()), found);
    }

    #[test]
    fn malformed_replies_are_no_state() {
        let whole = reply(&[0; ETS_BYTES], &[[5, 3, 26, 0]]);
        for len in 0..whole.len() {
            // Not all of it may be there, but nothing is made up.
            let found = state(&whole[..len]);
            assert!(found.is_none_or(|state| state.mappings.len() <= 1));
        }
        assert_eq!(state(&reply(&[0; ETS_BYTES - 1], &[])).expect("a state").ets, None);
    }

    #[test]
    fn a_drivers_refusal_is_in_one_byte() {
        let answer = |status: u8| {
            request(SET_DCB, IEEE_SET, "eth0").attribute(DCB_IEEE, &[status]).body().to_vec()
        };
        assert_eq!(verdict(&answer(0)), Ok(()));
        assert_eq!(verdict(&answer(22u8.wrapping_neg())), Err(Errno::INVAL));
    }
}
