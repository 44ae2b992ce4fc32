//! A NIC for tests: the other end of the socket answers as the kernel and a driver do. It shares
//! nothing with the code that it tests but the numbers of `linux/dcbnl.h`, written out again.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};
use std::thread;

use nic::netlink::Socket;
use parfait::job::Latency;
use parfait::queues::{Dscp, Guarantee, Plan, Port, Scheme};

use super::Dcb;
use crate::enforce::{EnforceError, Enforcer, PortPlan};

/// What the NIC has, and what its driver cannot do.
#[derive(Clone, Default)]
struct Nic {
    ets: Vec<u8>,
    entries: Vec<[u8; 4]>,
    refuses_ets: bool,
    ignores_entries: bool,
    changes: usize,
}

type Shared = Arc<Mutex<Nic>>;

/// A NIC with 8 classes, and an entry of an administrator's for a code point of no job.
fn nic() -> Shared {
    let mut ets = vec![0; 59];
    (ets[0], ets[1]) = (1, 8);
    let entries = vec![[5, 6, 46, 0], [5, 3, 26, 0], [1, 4, 0x15, 0x89]];
    Arc::new(Mutex::new(Nic { ets, entries, ..Nic::default() }))
}

/// A connection to the NIC, for one agent.
fn connect(nic: &Shared) -> Dcb {
    let (ours, kernel) = UnixDatagram::pair().expect("sockets");
    let nic = Arc::clone(nic);
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(len) = kernel.recv(&mut buffer) {
            if len == 0 {
                break;
            }
            let answer = nic.lock().expect("no panic").answer(&buffer[..len]);
            kernel.send(&answer).expect("the agent reads");
        }
    });
    Dcb { socket: Socket::to(OwnedFd::from(ours)), before: BTreeMap::new() }
}

/// Attributes of a message: kind without flags, and value.
fn parse(mut bytes: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut found = Vec::new();
    while bytes.len() >= 4 {
        let len = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let kind = u16::from_ne_bytes([bytes[2], bytes[3]]) & 0x7fff;
        found.push((kind, bytes[4..len].to_vec()));
        bytes = &bytes[len.next_multiple_of(4).min(bytes.len())..];
    }
    found
}

fn attribute_of(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = (4 + value.len()) as u16;
    let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn message(kind: u16, id: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = (16 + body.len() as u32).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend([0, 0]);
    bytes.extend_from_slice(id);
    bytes.extend_from_slice(body);
    bytes
}

impl Nic {
    fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        let kind = u16::from_ne_bytes([request[4], request[5]]);
        let (id, command) = (&request[8..16], request[17]);
        let attributes = parse(&request[20..]);
        let ieee = attributes.iter().find(|(kind, _)| *kind == 13).map(|(_, value)| parse(value));
        let mut body = vec![0, command, 0, 0];
        body.extend(match (kind, command, ieee) {
            (78, 21, None) => attribute_of(13, &self.state()),
            (79, 20 | 27, Some(ieee)) => attribute_of(13, &[self.set(command, &ieee)]),
            _ => panic!("no such request: {request:?}"),
        });
        let mut answer = message(kind, id, &body);
        let mut done = vec![0; 4];
        done.extend_from_slice(&request[..16]);
        answer.extend(message(2, id, &done));
        answer
    }

    fn state(&self) -> Vec<u8> {
        let entries: Vec<u8> =
            self.entries.iter().flat_map(|entry| attribute_of(1, entry)).collect();
        [attribute_of(1, &self.ets), attribute_of(3, &entries)].concat()
    }

    /// 0, or a negative number of errno.
    fn set(&mut self, command: u8, ieee: &[(u16, Vec<u8>)]) -> u8 {
        self.changes += 1;
        for (kind, value) in ieee {
            match kind {
                1 if self.refuses_ets => return 22u8.wrapping_neg(),
                1 => self.ets.clone_from(value),
                3 if !self.ignores_entries => parse(value).iter().for_each(|(_, entry)| {
                    let entry = *entry.first_chunk().expect("four bytes");
                    self.entries.retain(|own| *own != entry);
                    if command == 20 {
                        self.entries.push(entry);
                    }
                }),
                _ => {}
            }
        }
        0
    }

    fn priority(&self, dscp: u8) -> Vec<u8> {
        let own = self.entries.iter().filter(|entry| entry[0] == 5 && entry[2] == dscp);
        own.map(|entry| entry[1]).collect()
    }
}

/// Jobs by number, DSCP and percent of a port of 100 Gbit/s with 7 queues.
pub(super) fn plan(jobs: &[(u64, u8, u64)]) -> Plan {
    let port = Port {
        rate_bps: 100_000_000_000,
        queues: 7,
        weight_units: 100,
        quantum_bytes: 256,
        frame_bytes: 4200,
        buffer_bytes: 1 << 20,
    };
    let shares = jobs.iter().map(|(job, dscp, percent)| (*job, *dscp, percent * 1_000_000_000));
    plan_of(port, &shares.collect::<Vec<_>>())
}

/// Jobs by number, DSCP and bits per second on this port.
pub(super) fn plan_of(port: Port, jobs: &[(u64, u8, u64)]) -> Plan {
    let guarantee = |(job, dscp, bps): &(u64, u8, u64)| Guarantee {
        job: *job,
        dscp: Dscp::new(*dscp).expect("a code point"),
        bps: *bps,
        flows: 1,
        latency: Latency::Normal,
        burst_bytes: 0,
        is_contended: true,
    };
    let guarantees: Vec<Guarantee> = jobs.iter().map(guarantee).collect();
    Plan::new(port, Scheme::Matched, &guarantees).expect("a plan")
}

fn port(jobs: &[(u64, u8, u64)]) -> [PortPlan; 1] {
    [PortPlan { interface: "eth0".to_owned(), plan: plan(jobs) }]
}

#[test]
fn a_plan_is_kept_changed_and_taken_back() {
    let nic = nic();
    let before = nic.lock().expect("no panic").clone();
    let mut dcb = connect(&nic);
    dcb.apply(&port(&[(1, 10, 50), (2, 18, 30)])).expect("a NIC");
    let look = |check: &dyn Fn(&Nic)| check(&nic.lock().expect("no panic"));
    look(&|nic| {
        let (one, two) = (nic.priority(10), nic.priority(18));
        assert_eq!((one.len(), two.len(), nic.priority(48)), (1, 1, vec![3]));
        assert_eq!(nic.ets[3 + usize::from(one[0])], 50);
        assert_eq!(nic.ets[3 + usize::from(two[0])], 30);
        assert_eq!((nic.ets[0], nic.ets[1], nic.ets[3]), (0, 8, 20));
        // Of jobs' code points only those of the plan are left; what is no job's stays.
        assert_eq!((nic.priority(26), nic.priority(46)), (vec![], vec![6]));
        assert!(nic.entries.contains(&[1, 4, 0x15, 0x89]));
    });
    let changes = nic.lock().expect("no panic").changes;
    dcb.apply(&port(&[(1, 10, 50), (2, 18, 30)])).expect("a NIC");
    connect(&nic).apply(&port(&[(1, 10, 50), (2, 18, 30)])).expect("a NIC");
    look(&|nic| assert_eq!(nic.changes, changes, "a plan in force changes nothing"));
    dcb.apply(&port(&[(1, 10, 20), (3, 12, 40)])).expect("a NIC");
    look(&|nic| {
        assert_eq!((nic.priority(18), nic.priority(12).len()), (vec![], 1));
        assert_eq!(nic.ets[3 + usize::from(nic.priority(12)[0])], 40);
    });
    dcb.apply(&[]).expect("a NIC");
    look(&|nic| {
        assert_eq!(nic.ets, before.ets);
        let sorted = |nic: &Nic| {
            let mut entries = nic.entries.clone();
            entries.sort_unstable();
            entries
        };
        assert_eq!(sorted(nic), sorted(&before));
    });
}

#[test]
fn what_a_driver_refuses_or_ignores_is_said_and_taken_back() {
    let nic = nic();
    let before = nic.lock().expect("no panic").clone();
    nic.lock().expect("no panic").refuses_ets = true;
    let error = connect(&nic).apply(&port(&[(1, 10, 50)])).expect_err("refused");
    assert!(matches!(&error, EnforceError::Refused { what: "ETS", .. }), "{error}");
    nic.lock().expect("no panic").refuses_ets = false;
    nic.lock().expect("no panic").ignores_entries = true;
    let error = connect(&nic).apply(&port(&[(1, 10, 50)])).expect_err("ignored");
    assert!(
        matches!(&error, EnforceError::Unsupported { what: "priorities by DSCP", .. }),
        "{error}"
    );
    assert_eq!(nic.lock().expect("no panic").ets, before.ets);
    let two = [port(&[(1, 10, 50)]), port(&[(1, 10, 50)])].concat();
    let error = connect(&nic).apply(&two).expect_err("two plans");
    assert!(error.to_string().contains("two"), "{error}");
}
