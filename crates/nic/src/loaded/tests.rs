//! A library that breaks its contract: an error with a name or a trouble to log, never a wait
//! without end.

use std::cell::Cell;
use std::ffi::c_void;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;

use roce::endpoint::Mtu;
use roce::verbs::WcStatus;

use super::library::Functions;
use super::*;

/// The device of a fake library. All its objects are at its own address; only these two are looked
/// into.
#[repr(C)]
struct Fake {
    context: ibv_context,
    channel: ibv_comp_channel,
    qp: ibv_qp,
    descriptor: File,
    /// What polling returns.
    polled: Cell<c_int>,
    /// What arming returns.
    armed: Cell<c_int>,
    /// Events without end of this type, about no object.
    event: Cell<Option<u32>>,
    /// Notifications without end about this queue.
    notified: Cell<Option<usize>>,
    taken: Cell<u32>,
}

fn fake<T>(object: *mut T) -> &'static Fake {
    // SAFETY: every object of these tests is at the address of a leaked fake.
    unsafe { &*object.cast::<Fake>() }
}

extern "C" fn poll_cq(cq: *mut ibv_cq, _: c_int, _: *mut ibv_wc) -> c_int {
    fake(cq).polled.get()
}

extern "C" fn req_notify_cq(cq: *mut ibv_cq, _: c_int) -> c_int {
    fake(cq).armed.get()
}

extern "C" fn post_send(_: *mut ibv_qp, _: *mut ibv_send_wr, _: *mut *mut ibv_send_wr) -> c_int {
    libc::EIO
}

extern "C" fn post_recv(_: *mut ibv_qp, _: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    libc::EIO
}

extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    (&raw const fake(context).channel).cast_mut()
}

extern "C" fn query_device(_: *mut ibv_context, _: *mut ibv_device_attr) -> c_int {
    0
}

extern "C" fn query_port(_: *mut ibv_context, _: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller's structure.
    unsafe { ((*attr).gid_tbl_len, (*attr).active_mtu) = (1, Mtu::M1024 as u32 + 1) };
    0
}

extern "C" fn query_gid_ex(
    _: *mut ibv_context,
    _: u32,
    _: u32,
    entry: *mut ibv_gid_entry,
    _: u32,
    _: usize,
) -> c_int {
    let gid = translate::gid_of(Ipv4Addr::LOCALHOST.into());
    // SAFETY: the caller's structure.
    unsafe { ((*entry).gid, (*entry).gid_type) = (gid, IBV_GID_TYPE_ROCE_V2) };
    0
}

extern "C" fn create_cq(
    context: *mut ibv_context,
    _: c_int,
    _: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    context.cast()
}

extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    context.cast()
}

extern "C" fn create_qp(pd: *mut ibv_pd, _: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    (&raw const fake(pd).qp).cast_mut()
}

extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    _: *mut *mut ibv_cq,
    name: *mut *mut c_void,
) -> c_int {
    // SAFETY: the channel of a fake, and the caller's place for a name.
    let fake = fake(unsafe { (*channel).context });
    let Some(number) = fake.notified.get() else { return -1 };
    fake.taken.set(fake.taken.get() + 1);
    // SAFETY: as above.
    unsafe { *name = ptr::without_provenance_mut(number) };
    0
}

extern "C" fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let fake = fake(context);
    let Some(event_type) = fake.event.get() else { return -1 };
    fake.taken.set(fake.taken.get() + 1);
    let element = ibv_event_element { qp: null_mut() };
    // SAFETY: the caller's structure.
    unsafe { *event = ibv_async_event { element, event_type } };
    0
}

extern "C" fn no_cq_ack(_: *mut ibv_cq, _: u32) {}
extern "C" fn no_ack(_: *mut ibv_async_event) {}
extern "C" fn destroyed<T>(_: *mut T) -> c_int {
    0
}

/// A fake without defects whose `change` was made, and what opening it returns.
fn open(change: impl FnOnce(&mut Fake)) -> (&'static Fake, Result<LoadedDevice, LoadError>) {
    let functions = Functions {
        create_comp_channel,
        destroy_comp_channel: destroyed,
        close_device: destroyed,
        query_device,
        query_port,
        query_gid_ex,
        create_cq,
        destroy_cq: destroyed,
        alloc_pd,
        dealloc_pd: destroyed,
        create_qp,
        destroy_qp: destroyed,
        get_cq_event,
        ack_cq_events: no_cq_ack,
        get_async_event,
        ack_async_event: no_ack,
        ..Functions::absent()
    };
    let descriptor = File::open("/dev/null").expect("every system has it");
    // SAFETY: numbers, pointers and optional functions, for which zero is a value.
    let (context, channel, qp) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed()) };
    let mut made = Box::new(Fake {
        context,
        channel,
        qp,
        descriptor,
        polled: Cell::new(0),
        armed: Cell::new(0),
        event: Cell::new(None),
        notified: Cell::new(None),
        taken: Cell::new(0),
    });
    let ops = &mut made.context.ops;
    ops.poll_cq = Some(poll_cq);
    ops.req_notify_cq = Some(req_notify_cq);
    ops.post_send = Some(post_send);
    ops.post_recv = Some(post_recv);
    let fd = made.descriptor.as_raw_fd();
    (made.context.async_fd, made.channel.fd) = (fd, fd);
    change(&mut made);
    let made = Box::into_raw(made);
    let context = made.cast::<ibv_context>();
    // SAFETY: it was just leaked, and nobody else has it.
    unsafe { (*made).channel.context = context };
    (fake(context), LoadedDevice::adopt(&Library { functions }, "fake0", context))
}

fn loaded() -> (&'static Fake, LoadedDevice, CqId) {
    let (fake, device) = open(|_| ());
    let mut device = device.expect("it has no defects");
    let cq = device.create_cq(8).expect("it has no defects");
    (fake, device, cq)
}

fn troubles(loaded: &mut LoadedDevice) -> Vec<Trouble> {
    std::iter::from_fn(|| loaded.poll_trouble()).collect()
}

/// The counter of this name.
fn count(loaded: &LoadedDevice, name: &str) -> u64 {
    let mut found = None;
    loaded.counters(&mut |counter, value| found = found.or((counter == name).then_some(value)));
    found.expect("there is such a counter")
}

#[test]
fn a_library_that_is_none_of_verbs_is_refused_by_symbol() {
    let error = Library::load(std::path::Path::new("libc.so.6")).expect_err("it has no devices");
    assert_eq!(error.to_string(), "the library does not export ibv_get_device_list");
}

#[test]
fn a_device_without_an_operation_is_refused_by_name() {
    type Remove = fn(&mut ibv_context_ops);
    let without: [(Remove, &str); 4] = [
        (|ops| ops.poll_cq = None, "poll_cq"),
        (|ops| ops.req_notify_cq = None, "req_notify_cq"),
        (|ops| ops.post_send = None, "post_send"),
        (|ops| ops.post_recv = None, "post_recv"),
    ];
    for (remove, name) in without {
        let error = open(|fake| remove(&mut fake.context.ops)).1.expect_err("it is incomplete");
        assert_eq!(error.to_string(), format!("device fake0 has no operation {name}"));
    }
    assert!(open(|_| ()).1.is_ok());
}

#[test]
fn a_wrong_count_of_completions_is_an_error_and_reported_once() {
    let (fake, mut loaded, cq) = loaded();
    for polled in [-1, 5, 17, c_int::MAX] {
        fake.polled.set(polled);
        let mut into = ArrayVec::<Completion, 4>::new();
        let error = loaded.poll_cq(cq, &mut into).expect_err("it cannot be true");
        assert!(matches!(error, VerbsError::Device { call: "ibv_poll_cq", .. }), "{error}");
        assert!(into.is_empty(), "{:?}", into.first().map(|done| done.status == WcStatus::Success));
    }
    assert!(matches!(&troubles(&mut loaded)[..], [Trouble::Degraded(_)]));
}

#[test]
fn a_queue_that_cannot_be_armed_makes_sleeps_short() {
    let (fake, mut loaded, _) = loaded();
    fake.armed.set(libc::EIO);
    assert!(!loaded.prepare_sleep(), "the sleep that was planned may be long");
    assert!(loaded.next_wakeup().is_some());
    assert!(loaded.prepare_sleep(), "a sleep, not a spin");
    assert!(matches!(&troubles(&mut loaded)[..], [Trouble::Degraded(_)]));
    fake.armed.set(0);
    assert!(!loaded.prepare_sleep(), "earlier completions are not announced");
    assert!(loaded.prepare_sleep());
    assert_eq!(loaded.next_wakeup(), None);
}

#[test]
fn events_and_notifications_without_end_do_not_end_in_a_loop() {
    let (fake, mut loaded, _) = loaded();
    const PORT_ACTIVE: u32 = 9;
    fake.event.set(Some(PORT_ACTIVE));
    assert_eq!(loaded.poll_event(), None, "it is about no object");
    loaded.collect();
    assert_eq!(count(&loaded, "device.unknown.events"), 0);
    for event in [IBV_EVENT_QP_FATAL, IBV_EVENT_COMM_EST] {
        fake.event.set(Some(event));
        assert_eq!(loaded.poll_event(), None, "it is about no object of ours");
        loaded.collect();
    }
    fake.notified.set(Some(1));
    loaded.collect();
    assert_eq!(count(&loaded, "device.unknown.notifications"), 0);
    for queue in [77, usize::MAX] {
        fake.notified.set(Some(queue));
        loaded.collect();
    }
    for kind in ["events", "notifications"] {
        assert!(count(&loaded, &format!("device.unknown.{kind}")) > 1, "{kind}");
    }
    let [Trouble::Degraded(event), Trouble::Degraded(notification)] = &troubles(&mut loaded)[..]
    else {
        panic!("each kind is reported once");
    };
    assert!(event.contains("for an unknown object the event 0x1:"), "{event}");
    assert!(notification.contains("the unknown completion queue 0x4d:"), "{notification}");
    assert!(fake.taken.get() > 0);
}

#[test]
fn completions_of_no_queue_pair_are_dropped_counted_and_reported_once() {
    let (fake, mut loaded, cq) = loaded();
    let poll = |loaded: &mut LoadedDevice| {
        let mut into = ArrayVec::<Completion, 4>::new();
        loaded.poll_cq(cq, &mut into).expect("it is read");
        into.len()
    };
    let counts = |loaded: &LoadedDevice| {
        ["device.unknown.completions", "device.late_completions"].map(|name| count(loaded, name))
    };
    let most = MAX_UNKNOWN as u64;
    // Completions of queue pair 0 without end.
    fake.polled.set(4);
    for round in 1..3 {
        assert_eq!(poll(&mut loaded), 0);
        assert_eq!(counts(&loaded), [round * most, 0]);
    }
    let [Trouble::Degraded(why)] = &troubles(&mut loaded)[..] else {
        panic!("it is reported once");
    };
    assert!(why.contains("a completion of the unknown queue pair 0x0:"), "{why}");
    let pd = loaded.alloc_pd().expect("it has no defects");
    for round in 1..3 {
        let qpn = loaded.create_qp(QpConfig::rc(pd, cq, 8, 8)).expect("no defects");
        assert_eq!((qpn.get(), poll(&mut loaded)), (0, 4));
        // Drivers may leave completions of destroyed queue pairs.
        loaded.destroy_qp(Time::ZERO, qpn).expect("it has no defects");
        assert_eq!(poll(&mut loaded), 0);
        assert_eq!(counts(&loaded), [2 * most, round * most]);
    }
    assert!(troubles(&mut loaded).is_empty());
}

#[test]
fn a_fatal_event_of_the_device_is_reported_once() {
    let (fake, mut loaded, _) = loaded();
    fake.event.set(Some(IBV_EVENT_DEVICE_FATAL));
    loaded.collect();
    loaded.collect();
    let why = "device fake0 has failed: its library reports IBV_EVENT_DEVICE_FATAL";
    assert_eq!(troubles(&mut loaded), [Trouble::Gone(why.into())]);
}

#[test]
fn a_refused_batch_without_the_rejected_request_counts_as_not_accepted() {
    let (_, mut loaded, cq) = loaded();
    let device = &mut loaded;
    let pd = device.alloc_pd().expect("it has no defects");
    let qpn = device.create_qp(QpConfig::rc(pd, cq, 8, 8)).expect("it has no defects");
    let sent = device.post_send(Time::ZERO, qpn, &[SendWr::default(), SendWr::default()]);
    let received = RecvWr { wr_id: 0, sges: [].into_iter().collect() };
    let received = device.post_recv(Time::ZERO, qpn, &[received.clone(), received]);
    for refused in [sent, received] {
        assert_eq!(refused.expect_err("it refuses all").accepted, 0);
    }
}

#[test]
fn the_largest_mtu_is_that_of_the_port() {
    let (_, loaded, _) = loaded();
    assert_eq!(loaded.largest_mtu(), 1024);
}
