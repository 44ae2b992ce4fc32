//! Direct accesses between processes that do not lie: what an owner learns of them, and what an
//! initiator may do after the owner's end.

use roce::endpoint::{Extent, Placement};
use roce::verbs::{Access, PdId};
use roce::world::Path;

use super::hostile::ip;
use super::*;

const INITIATOR: u8 = 43;
const OWNER: u8 = 44;

/// The numbers before are those of other tests.
const FIRST_TEST: u8 = 120;

const BYTES: usize = 32 << 20;

fn qpn(slot: u8) -> Qpn {
    Qpn::new(u32::from(slot) << SLOT_SHIFT | 1)
}

/// A process that WRITEs into the memory of another, both in this one.
struct Pair {
    initiator: LocalPeers,
    owner: LocalPeers,
    address: IpAddr,
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Pair {
    fn new(test: u8) -> Pair {
        let address = ip(FIRST_TEST + test);
        let open = |slot| LocalPeers::open(ROCE_PORT, slot, &[address]).expect("shared memory");
        let (mut initiator, owner) = (open(INITIATOR), open(OWNER));
        let found = initiator.shared().discover(SocketAddr::new(address, ROCE_PORT), OWNER);
        initiator.route(qpn(INITIATOR), Some(found.expect("it answers")));
        let (from, mut to) = (vec![7; BYTES], vec![0; BYTES]);
        let (own, peer, pd, access) = (address, address, PdId(1), Access::ALL);
        let (serves, serves_reads) = (true, true);
        let (qpn, dest_qp) = (qpn(OWNER), qpn(INITIATOR));
        owner.publish_qp(&QpDescriptor {
            qpn,
            dest_qp,
            pd,
            own,
            peer,
            access,
            serves,
            serves_reads,
        });
        let addr = to.as_mut_ptr().expose_provenance() as u64;
        let (len, backing, in_file) = (BYTES as u64, addr, None);
        owner.publish_region(&RegionDescriptor {
            rkey: 9,
            pd,
            addr,
            len,
            backing,
            in_file,
            access,
        });
        Pair { initiator, owner, address, from, to }
    }

    fn write(&mut self, len: u32) -> Result<(), DirectRefusal> {
        let addr = self.from.as_ptr().expose_provenance() as u64;
        let local = [Placement { addr, len }];
        self.initiator.carry_out(&DirectRequest {
            kind: DirectKind::Write,
            path: Path::new(SocketAddr::new(self.address, ROCE_PORT)),
            qpn: qpn(INITIATOR),
            dest_qp: qpn(OWNER),
            rkey: 9,
            remote_addr: self.to.as_ptr().expose_provenance() as u64,
            len,
            part: Extent { offset: 0, len },
            local: &local,
        })
    }
}

#[test]
fn an_owner_sees_an_access_while_it_lasts() {
    let mut pair = Pair::new(0);
    let owner = Arc::clone(pair.owner.shared());
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let writing = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            pair.write(BYTES as u32).expect("permitted");
        }
        pair
    });
    let begun = Instant::now();
    while owner.unfinished().0.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(30), "no access was announced");
    }
    stop.store(true, Ordering::Relaxed);
    let pair = writing.join().expect("no panic");
    assert!(owner.quiesce() && owner.unfinished().0.is_empty());
    assert_eq!(pair.to, pair.from);
}

#[test]
fn nothing_is_written_into_memory_whose_owner_has_ended() {
    let mut pair = Pair::new(1);
    assert_eq!(pair.write(1), Ok(()));
    assert_eq!(pair.to[..2], [7, 0]);
    // The segment and the memory are still there, as they are while a process ends.
    pair.owner.shared.own.owner().store(0, Ordering::Release);
    assert_eq!(pair.write(2), Err(DirectRefusal::System));
    assert_eq!(pair.to[..2], [7, 0]);
}

/// A segment may lose its owner while the process goes on, when it executes another program; and a
/// process number may belong to another namespace, so that only both together say that nobody
/// accesses anything any more.
#[test]
fn an_access_is_over_when_board_and_process_have_ended() {
    let mut child = std::process::Command::new("true").spawn().expect("a program");
    let ended = child.id() as i32;
    child.wait().expect("it ends");
    let lives = std::process::id() as i32;
    for (owned, pid, is_over) in
        [(true, lives, false), (true, ended, false), (false, lives, false), (false, ended, true)]
    {
        let (own, file) = OwnBoard::create((ROCE_PORT, INITIATOR), &[]).expect("memfd");
        own.owner().store(u32::from(owned), Ordering::Release);
        own.announce(OWNER, 5);
        let segment = Arc::new(ControlSegment::of_other(&file).expect("a segment"));
        let initiator = Arc::new(Initiator { segment, file: (0, 0), pid });
        let mut left = Unfinished(vec![(Arc::clone(&initiator), OWNER, 5 << 8 | u64::from(OWNER))]);
        assert_eq!(left.is_over(), is_over, "owned: {owned}, has ended: {}", pid == ended);
        // A later access is not one that was waited for.
        own.announce(OWNER, 6);
        assert!(left.is_over());
    }
}

/// A program may close all descriptors it does not know, and go on.
#[test]
fn a_process_that_has_lost_its_listeners_is_alive_to_its_neighbours() {
    let mut pair = Pair::new(3);
    pair.owner.shared().listeners.iter().for_each(Kept::close);
    // Whoever calls wakes the thread that answers, or a look does.
    let begun = Instant::now();
    while begun.elapsed() < LOOK + LOOK / 2 {
        assert_eq!(pair.write(1), Ok(()));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// It holds a segment, two FIFOs and perhaps a pool; a daemon that nobody calls any more would keep
/// them for good.
#[test]
fn an_ended_process_is_forgotten_without_a_call_of_another() {
    let mut pair = Pair::new(2);
    let Pair { owner, address, .. } = &mut pair;
    let found = owner.shared().discover(SocketAddr::new(*address, ROCE_PORT), INITIATOR);
    owner.route(qpn(OWNER), Some(found.expect("it answers")));
    assert!(!owner.has_work() && owner.reads_fifos());
    assert_eq!(owner.packets.outgoing.len(), 1);
    // Both are in this process, which goes on: the one that accesses it is somebody else from now
    // on.
    let mut child = std::process::Command::new("true").spawn().expect("a program");
    let pid = child.id() as i32;
    child.wait().expect("it ends");
    let initiators = &owner.shared().initiators;
    let known = locked(initiators).pop().expect("the initiator");
    let (segment, file) = (Arc::clone(&known.segment), known.file);
    locked(initiators).push(Arc::new(Initiator { segment, file, pid }));
    drop(pair.initiator);
    pair.owner.route(qpn(OWNER), None);
    let begun = Instant::now();
    while pair.owner.has_work()
        || pair.owner.reads_fifos()
        || !pair.owner.packets.outgoing.is_empty()
        || !locked(&pair.owner.shared().initiators).is_empty()
    {
        assert!(begun.elapsed() < Duration::from_secs(30), "it is kept");
        std::thread::sleep(Duration::from_millis(10));
    }
}
