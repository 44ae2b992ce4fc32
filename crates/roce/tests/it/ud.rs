//! Unreliable datagrams: queue keys, route headers, lengths, multicast groups (IBA 9.8.3, 10.5).

use std::net::IpAddr;

use roce::Time;
use roce::device;
use roce::endpoint::{AttrMask, Connect, Counters, EndpointConfig, Insert, Mtu, QpAttr, QpState};
use roce::verbs::{
    Completion, Datagram, GRH_BYTES, MULTICAST_QPN, MemoryRegion, Qpn, SendOp, SendWr, SgList, Sge,
    Transport, VerbsError, WcOpcode, WcStatus,
};
use roce::wire::{DEFAULT_PKEY, Headers, Opcode};
use roce::world::{Ecn, Origin, Path};

use WcStatus::{LocalProtectionError, Success, WrFlushError};

use crate::harness::{BASE, End, Network, NetworkConfig};
use crate::kit::{QKEY, brief, first_psn, list, recv, registered, send};

const GRH: u32 = GRH_BYTES;

/// Datagram queue pairs, one per node, all of whose memories are registered.
struct Party {
    network: Network,
    ends: Vec<End>,
    regions: Vec<MemoryRegion>,
}

impl Party {
    fn new() -> Party {
        Party::build(&NetworkConfig::default())
    }

    fn build(config: &NetworkConfig) -> Party {
        let mut network = Network::new(config);
        let regions = network.nodes.iter_mut().map(registered).collect();
        let mut party = Party { network, ends: Vec::new(), regions };
        for node in 0..config.nodes {
            party.join(node as usize);
        }
        party.network.record();
        party
    }

    /// One more queue pair.
    fn join(&mut self, node: usize) -> End {
        let end = self.network.create(node, Transport::Ud, None);
        self.network.bring_up(end, end, Transport::Ud, Mtu::M1024);
        self.ends.push(end);
        end
    }

    fn receive(&mut self, end: End, wr_id: u64, offset: u64, len: u32) {
        let sges = list(self.regions[end.node], offset, len);
        self.network.post_recv(end, recv(wr_id, sges));
    }

    fn wr(&self, wr_id: u64, to: Datagram, offset: u64, len: u32) -> SendWr {
        let sges = list(self.regions[0], offset, len);
        SendWr { to: Some(to), ..send(wr_id, SendOp::Send, sges) }
    }

    /// From the first queue pair to `to`.
    fn send(&mut self, wr_id: u64, to: Datagram, len: u32) {
        let wr = self.wr(wr_id, to, 0, len);
        self.network.post_send(self.ends[0], wr);
    }

    fn received(&mut self, end: End) -> Vec<Completion> {
        self.network.run(10_000);
        self.network.received_by(end)
    }

    fn counters(&self, node: usize) -> &Counters {
        self.network.nodes[node].endpoint.counters()
    }

    /// Memory of a node.
    fn bytes(&self, node: usize, offset: u64, len: u32) -> &[u8] {
        self.network.nodes[node].memory.peek(BASE + offset, len as usize)
    }

    fn address(&self, of: usize) -> Datagram {
        self.network.address(self.ends[of])
    }
}

#[test]
fn a_datagram_comes_with_its_route_header_and_its_sender() {
    for ipv6 in [false, true] {
        let mut party = Party::build(&NetworkConfig { ipv6, ..NetworkConfig::default() });
        let (a, b) = (party.ends[0], party.ends[1]);
        party.receive(b, 7, 10_000, 2000);
        let wr = party.wr(1, party.address(1), 0, 777);
        party.network.post_send(a, SendWr { op: SendOp::SendImm(0xabcd), solicited: true, ..wr });
        let received = party.received(b);
        assert_eq!(brief(&party.network.sent_by(a)), [(1, Success)]);
        let done = received[0];
        assert_eq!((done.wr_id, done.status, done.opcode), (7, Success, WcOpcode::Recv));
        assert_eq!((done.byte_len, done.imm), (777 + GRH, Some(0xabcd)));
        assert_eq!((done.src_qp, done.solicited), (Some(a.qpn), true));
        assert_eq!(party.bytes(1, 10_000 + u64::from(GRH), 777), party.bytes(0, 0, 777));
        let source = party.network.nodes[0].ip();
        let grh = party.bytes(1, 10_000, GRH);
        match source {
            IpAddr::V4(v4) => {
                assert_eq!(
                    (&grh[..20], grh[20], &grh[32..36]),
                    (&[0; 20][..], 0x45, &v4.octets()[..])
                );
            }
            IpAddr::V6(v6) => assert_eq!((grh[0] >> 4, &grh[8..24]), (6, &v6.octets()[..])),
        }
    }
}

#[test]
fn datagrams_count_up_and_say_where_they_come_from() {
    let mut party = Party::build(&NetworkConfig { nodes: 3, ..NetworkConfig::default() });
    for (wr_id, to) in [(1, 1), (2, 2), (3, 1)] {
        let to = party.address(to);
        party.send(wr_id, to, 3);
    }
    party.network.run(1000);
    let (own, trace) = (party.ends[0].qpn, party.network.trace.as_ref().unwrap());
    for (at, (headers, to)) in trace.iter().zip([1, 2, 1]).enumerate() {
        let bth = headers.bth();
        assert_eq!((bth.opcode, bth.dest_qp), (Opcode::UdSendOnly, party.ends[to].qpn));
        assert_eq!((bth.psn, bth.pkey, bth.pad), (first_psn(own).plus(at as u32), DEFAULT_PKEY, 1));
        let deth = headers.ext().deth().unwrap();
        assert_eq!((deth.qkey, deth.src_qp), (QKEY, own));
    }
}

#[test]
fn another_queue_key_is_not_heard() {
    let mut party = Party::new();
    let b = party.ends[1];
    party.receive(b, 7, 0, 200);
    let right = party.address(1);
    party.send(1, Datagram { qkey: QKEY + 1, ..right }, 20);
    // The high bit selects the sender's own key, which is the right one.
    party.send(2, Datagram { qkey: 1 << 31 | 99, ..right }, 30);
    assert_eq!(brief(&party.received(b)), [(7, Success)]);
    assert_eq!(party.counters(1).bad_qkey, 1);
    let change = QpAttr { mask: AttrMask::QKEY, qkey: 0x8000_0001, ..QpAttr::to(QpState::Rts) };
    party.network.endpoint(b).modify_qp(Time::ZERO, b.qpn, &change).unwrap();
    party.receive(b, 8, 0, 200);
    party.send(3, right, 20);
    assert_eq!(party.received(b), []);
    assert_eq!(party.counters(1).bad_qkey, 2);
}

#[test]
fn datagrams_find_room_for_header_and_payload_or_are_dropped() {
    let mut party = Party::new();
    let (b, to) = (party.ends[1], party.address(1));
    party.send(1, to, 100);
    assert_eq!(party.received(b), []);
    assert_eq!(party.counters(1).no_receive, 1);
    party.receive(b, 7, 0, 100 + GRH);
    party.send(2, to, 101);
    party.send(3, to, 100);
    let received = party.received(b);
    assert_eq!((brief(&received), received[0].byte_len), (vec![(7, Success)], 100 + GRH));
    assert_eq!(party.counters(1).receive_too_small, 1);
    // An empty datagram still needs room for the header.
    party.receive(b, 8, 0, GRH - 1);
    party.receive(b, 9, 0, GRH);
    party.send(4, to, 0);
    assert_eq!(party.received(b), []);
    assert_eq!(party.network.state(b), QpState::Rts);
}

#[test]
fn header_and_payload_are_scattered_alike() {
    let mut party = Party::new();
    let (b, to, region) = (party.ends[1], party.address(1), party.regions[1]);
    let piece = |offset, len| Sge { addr: region.addr + offset, len, lkey: region.lkey };
    let sges: SgList =
        [piece(0, 30), piece(1000, 15), piece(2000, 0), piece(3000, 500)].into_iter().collect();
    party.network.post_recv(b, recv(7, sges));
    party.send(1, to, 400);
    assert_eq!(brief(&party.received(b)), [(7, Success)]);
    let sent = party.bytes(0, 0, 400).to_vec();
    assert_eq!(party.bytes(1, 20, 1)[0], 0x45);
    assert_eq!(party.bytes(1, 1010, 5), &sent[..5]);
    assert_eq!(party.bytes(1, 3000, 395), &sent[5..]);
}

#[test]
fn a_receive_that_may_not_be_written_ends_the_queue_pair() {
    let mut party = Party::new();
    let (b, to) = (party.ends[1], party.address(1));
    let bad: SgList = [Sge { addr: BASE, len: 100, lkey: 1 }].into_iter().collect();
    party.network.post_recv(b, recv(7, bad));
    party.receive(b, 8, 0, 100);
    party.send(1, to, 10);
    let wanted = [(7, LocalProtectionError), (8, WrFlushError)];
    assert_eq!(brief(&party.received(b)), wanted);
    assert_eq!(party.network.state(b), QpState::Error);
}

#[test]
fn what_datagrams_cannot_do_is_refused() {
    let endpoint = EndpointConfig { mtu: Mtu::M1024, ..EndpointConfig::default() };
    let mut party = Party::build(&NetworkConfig { endpoint, ..NetworkConfig::default() });
    let (a, to) = (party.ends[0], party.address(1));
    let good = party.wr(1, to, 0, 1024);
    let refused = [
        SendWr { to: None, ..good.clone() },
        party.wr(1, to, 0, 1025),
        SendWr { op: SendOp::Write { remote_addr: 0, rkey: 0 }, ..good.clone() },
        SendWr { op: SendOp::Read { remote_addr: 0, rkey: 0 }, ..good.clone() },
        SendWr { op: SendOp::SendInvalidate(1), ..good.clone() },
        SendWr { op: SendOp::LocalInvalidate(1), ..good.clone() },
    ];
    for wr in refused {
        let done = party.network.endpoint(a).post_send(Time::ZERO, a.qpn, wr.clone());
        assert!(matches!(done, Err(VerbsError::Invalid { .. })), "{wr:?}");
    }
    party.network.post_send(a, good);
    party.network.run(100);
    assert_eq!(brief(&party.network.sent_by(a)), [(1, Success)]);
    let connect = Connect::new(to.ah.path, to.dest_qp, first_psn(a.qpn));
    let fresh = party.network.create(0, Transport::Ud, None);
    let done = device::connect(party.network.endpoint(fresh), Time::ZERO, fresh.qpn, &connect);
    assert!(matches!(done, Err(VerbsError::Invalid { .. })));
}

#[test]
fn anyone_may_send_but_only_datagrams_of_the_partition() {
    let mut party = Party::new();
    let (b, to) = (party.ends[1], party.address(1));
    for wr_id in 0..4 {
        party.receive(b, wr_id, 0, 200);
    }
    party.send(1, to, 20);
    let transmit = party.network.endpoint(party.ends[0]).poll_transmit(Time::ZERO).unwrap();
    let genuine = transmit.headers;
    let stranger = Origin::new("192.0.2.9:5".parse().unwrap(), party.network.nodes[1].ip());
    let mut hand = |headers: &Headers, len| {
        let endpoint = party.network.endpoint(b);
        endpoint.handle_packet(Time::ZERO, &stranger, headers, len).pieces.len()
    };
    assert_eq!(hand(&genuine, 20), 1);
    let mut bth = *genuine.bth();
    bth.pkey = 0x1234;
    let other = Headers::new(bth, *genuine.ext()).unwrap();
    assert_eq!(hand(&other, 20), 0);
    bth.pkey = 0x7fff;
    let limited = Headers::new(bth, *genuine.ext()).unwrap();
    assert_eq!(hand(&limited, 20), 1);
    assert_eq!(hand(&limited, 4097), 0, "longer than any MTU");
    let counters = party.counters(1);
    assert_eq!((counters.bad_pkey, counters.bad_length), (1, 1));
}

#[test]
fn congestion_on_the_way_is_noted() {
    let mut party = Party::new();
    let (b, to) = (party.ends[1], party.address(1));
    party.receive(b, 7, 0, 200);
    party.send(1, to, 20);
    let sent = party.network.endpoint(party.ends[0]).poll_transmit(Time::ZERO).unwrap();
    let source = party.network.nodes[0].path().remote;
    let origin = Origin { ecn: Ecn::Ce, dscp: 5, ..Origin::new(source, source.ip()) };
    let delivery = party.network.endpoint(b).handle_packet(Time::ZERO, &origin, &sent.headers, 20);
    assert_eq!(party.counters(1).ecn_marked, 1);
    let Insert::RouteHeader(grh) = delivery.insert else {
        panic!("no route header");
    };
    assert_eq!(grh[21], 5 << 2 | 3);
}

// ---- multicast ---------------------------------------------------------------------------------

const GROUP: &str = "239.1.2.3";

fn group() -> IpAddr {
    GROUP.parse().unwrap()
}

fn to_group() -> Datagram {
    let path = Path::new(format!("{GROUP}:4791").parse().unwrap());
    Datagram { ah: path.into(), dest_qp: MULTICAST_QPN, qkey: QKEY }
}

fn attach(party: &mut Party, end: End) {
    party.network.endpoint(end).attach_multicast(end.qpn, group()).unwrap();
}

#[test]
fn a_group_is_heard_by_all_who_joined_it() {
    let mut party = Party::build(&NetworkConfig { nodes: 3, ..NetworkConfig::default() });
    let more = [party.join(1), party.join(1), party.join(2)];
    let [deaf, keyless, far] = more;
    let members = [party.ends[1], far, keyless];
    for end in members {
        attach(&mut party, end);
        attach(&mut party, end);
    }
    let change = QpAttr { mask: AttrMask::QKEY, qkey: 1, ..QpAttr::to(QpState::Rts) };
    party.network.endpoint(keyless).modify_qp(Time::ZERO, keyless.qpn, &change).unwrap();
    for (at, end) in party.ends.clone().into_iter().enumerate() {
        party.receive(end, 7, 5_000 * at as u64, 300);
    }
    party.send(1, to_group(), 250);
    party.network.run(1000);
    for end in party.ends.clone() {
        let heard = end.qpn == members[0].qpn || end.qpn == members[1].qpn;
        let at = party.ends.iter().position(|other| other.qpn == end.qpn).unwrap() as u64;
        let received = party.network.received_by(end);
        assert_eq!(received.len(), usize::from(heard), "{end:?}");
        if heard {
            assert_eq!(received[0].byte_len, 250 + GRH);
            let there = 5_000 * at + u64::from(GRH);
            assert_eq!(party.bytes(end.node, there, 250), party.bytes(0, 0, 250));
            let dest: [u8; 4] = [239, 1, 2, 3];
            assert_eq!(party.bytes(end.node, there - 4, 4), dest);
        }
    }
    assert_eq!((party.counters(1).bad_qkey, party.counters(1).unknown_qp), (1, 0));
    let leave = party.network.endpoint(far).detach_multicast(far.qpn, group());
    assert_eq!(leave, Ok(()));
    party.receive(far, 8, 0, 300);
    party.send(2, to_group(), 10);
    assert_eq!(party.received(far), []);
    assert_eq!(party.counters(2).unknown_qp, 1, "nobody there listens any more");
    assert_eq!(party.network.received_by(deaf), []);
}

#[test]
fn groups_have_rules() {
    let mut party = Party::new();
    let (end, unicast) = (party.ends[0], "10.0.0.1".parse().unwrap());
    let rc = party.network.create(0, Transport::Rc, None);
    let endpoint = party.network.endpoint(end);
    let invalid = |done: Result<(), VerbsError>| {
        assert!(matches!(done, Err(VerbsError::Invalid { .. })), "{done:?}");
    };
    invalid(endpoint.attach_multicast(rc.qpn, group()));
    invalid(endpoint.attach_multicast(end.qpn, unicast));
    invalid(endpoint.detach_multicast(end.qpn, group()));
    let ghost = Qpn::new(3);
    assert_eq!(endpoint.attach_multicast(ghost, group()), Err(VerbsError::NoQp(3)));
    // A mapped address is the same group.
    endpoint.attach_multicast(end.qpn, group()).unwrap();
    let mapped = format!("::ffff:{GROUP}").parse().unwrap();
    assert_eq!(endpoint.next_of_group(mapped, None), Some(end.qpn));
    endpoint.detach_multicast(end.qpn, mapped).unwrap();
    // Destroyed queue pairs have left.
    endpoint.attach_multicast(end.qpn, group()).unwrap();
    endpoint.destroy_qp(Time::ZERO, end.qpn).unwrap();
    assert_eq!(endpoint.next_of_group(group(), None), None);
}
