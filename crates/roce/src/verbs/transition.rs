//! The legal state transitions of a queue pair, and their attributes (IBA 10.3.1, 11.2.4.2).
//!
//! ```text
//!   RESET -> INIT -> RTR -> RTS <-> SQD       any state -> RESET, ERROR
//!            INIT           RTS  <- SQE
//! ```
//!
//! For every transition and transport, one table lists the required and the optional attributes;
//! everything else is refused before anything has changed. It is the table of the specification as
//! Linux verbs have it, with two differences: a rate limit may be set wherever sending begins or
//! continues, and alternate paths (with their migration state), which do not exist on Ethernet, are
//! refused by value rather than ignored.
//!
//! Only checks are here; the effects of a transition are in `qp`.

use core::net::IpAddr;

use super::QpState::{self, Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
use super::{AttrMask, Mtu, QpAttr, Transport};

/// Most READs and atomics in flight, or served concurrently, on one queue pair.
pub const MAX_RD_ATOMIC: u8 = 128;

/// Largest code of the ACK timeout: five bits.
const MAX_TIMEOUT_CODE: u8 = 31;

/// The bits of the RNR timer and of retry counts. Adapters keep these, and programs rely on that.
pub(crate) const RNR_TIMER_BITS: u8 = 31;
pub(crate) const RETRY_BITS: u8 = 7;

/// Attributes for RC, UC and UD.
type ByTransport = [AttrMask; 3];

/// A legal transition.
struct Rule {
    from: QpState,
    to: QpState,
    needs: ByTransport,
    allows: ByTransport,
}

macro_rules! mask {
    ($($name:ident)*) => { AttrMask::empty()$(.union(AttrMask::$name))* };
}

macro_rules! rules {
    ($($from:ident -> $to:ident
        needs [$($needs_rc:ident)*] [$($needs_uc:ident)*] [$($needs_ud:ident)*]
        allows [$($rc:ident)*] [$($uc:ident)*] [$($ud:ident)*];
    )*) => {
        &[$(Rule {
            from: $from,
            to: $to,
            needs: [mask!($($needs_rc)*), mask!($($needs_uc)*), mask!($($needs_ud)*)],
            allows: [mask!($($rc)*), mask!($($uc)*), mask!($($ud)*)],
        },)*]
    };
}

/// All but those to RESET and ERROR. In each line: RC, UC, UD.
#[rustfmt::skip]
const RULES: &[Rule] = rules! {
    Reset -> Init
        needs  [PKEY_INDEX PORT ACCESS_FLAGS] [PKEY_INDEX PORT ACCESS_FLAGS] [PKEY_INDEX PORT QKEY]
        allows [] [] [];
    Init -> Init
        needs  [] [] []
        allows [PKEY_INDEX PORT ACCESS_FLAGS] [PKEY_INDEX PORT ACCESS_FLAGS] [PKEY_INDEX PORT QKEY];
    Init -> Rtr
        needs  [AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER]
               [AV PATH_MTU DEST_QPN RQ_PSN]
               []
        allows [ALT_PATH ACCESS_FLAGS PKEY_INDEX] [ALT_PATH ACCESS_FLAGS PKEY_INDEX] [PKEY_INDEX QKEY];
    Rtr -> Rts
        needs  [TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC] [SQ_PSN] [SQ_PSN]
        allows [CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE RATE_LIMIT]
               [CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE RATE_LIMIT]
               [CUR_STATE QKEY RATE_LIMIT];
    Rts -> Rts
        needs  [] [] []
        allows [CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE RATE_LIMIT]
               [CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE RATE_LIMIT]
               [CUR_STATE QKEY RATE_LIMIT];
    Rts -> Sqd
        needs  [] [] []
        allows [EN_SQD_ASYNC_NOTIFY] [EN_SQD_ASYNC_NOTIFY] [EN_SQD_ASYNC_NOTIFY];
    Sqd -> Sqd
        needs  [] [] []
        allows [PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC MAX_DEST_RD_ATOMIC ALT_PATH
                ACCESS_FLAGS PKEY_INDEX MIN_RNR_TIMER PATH_MIG_STATE]
               [AV ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE]
               [PKEY_INDEX QKEY];
    Sqd -> Rts
        needs  [] [] []
        allows [CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE RATE_LIMIT]
               [CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE RATE_LIMIT]
               [CUR_STATE QKEY RATE_LIMIT];
    Sqe -> Rts
        needs  [] [] []
        allows [] [CUR_STATE ACCESS_FLAGS] [CUR_STATE QKEY];
};

/// The required and the optional attributes of the transition; `None` if it is not legal.
pub(crate) fn rule(
    transport: Transport,
    from: QpState,
    to: QpState,
) -> Option<(AttrMask, AttrMask)> {
    if matches!(to, Reset | Error) {
        return Some((AttrMask::empty(), AttrMask::empty()));
    }
    if from == Sqe && transport == Transport::Rc {
        return None;
    }
    let rule = RULES.iter().find(|rule| rule.from == from && rule.to == to)?;
    Some((rule.needs[transport as usize], rule.allows[transport as usize]))
}

/// Checks that the transition is legal with exactly the attributes of `mask`.
pub(crate) fn check(
    transport: Transport,
    from: QpState,
    to: QpState,
    attr: &QpAttr,
) -> Result<(), &'static str> {
    let (needs, allows) = rule(transport, from, to).ok_or("there is no such transition")?;
    let missing = needs - attr.mask;
    if !missing.is_empty() {
        return Err(complaint(missing).0);
    }
    let extra = attr.mask - needs - allows - AttrMask::STATE;
    if !extra.is_empty() {
        return Err(complaint(extra).1);
    }
    if attr.mask.contains(AttrMask::CUR_STATE) && attr.cur_state != from {
        return Err("it is not in the state that the caller names");
    }
    Ok(())
}

macro_rules! complaints {
    ($($name:ident $text:literal,)*) => {
        &[$((
            AttrMask::$name,
            concat!($text, " is missing"),
            concat!($text, " may not be set here"),
        ),)*]
    };
}

/// The messages for an attribute that is missing, or set where it may not be.
const COMPLAINTS: &[(AttrMask, &str, &str)] = complaints! {
    CUR_STATE "the current state",
    EN_SQD_ASYNC_NOTIFY "the drained notification",
    ACCESS_FLAGS "the access flags",
    PKEY_INDEX "the partition key index",
    PORT "the port",
    QKEY "the queue key",
    AV "the path",
    PATH_MTU "the path MTU",
    TIMEOUT "the timeout",
    RETRY_CNT "the retry count",
    RNR_RETRY "the RNR retry count",
    RQ_PSN "the receive PSN",
    MAX_QP_RD_ATOMIC "the number of READs in flight",
    ALT_PATH "an alternate path",
    MIN_RNR_TIMER "the RNR timer",
    SQ_PSN "the send PSN",
    MAX_DEST_RD_ATOMIC "the number of READs served",
    PATH_MIG_STATE "the migration state",
    CAP "the capacity",
    DEST_QPN "the peer's queue pair",
    RATE_LIMIT "the rate limit",
};

fn complaint(about: AttrMask) -> (&'static str, &'static str) {
    let unknown = "an unknown attribute may not be set";
    COMPLAINTS
        .iter()
        .find(|(bit, ..)| about.contains(*bit))
        .map_or((unknown, unknown), |&(_, missing, extra)| (missing, extra))
}

/// Checks the value of every attribute that is set; `port_mtu` bounds the path MTU.
pub(crate) fn check_values(attr: &QpAttr, port_mtu: Mtu) -> Result<(), &'static str> {
    let is_bad = [
        (AttrMask::PKEY_INDEX, attr.pkey_index != 0, "the partition key index is not 0"),
        (AttrMask::PORT, attr.port != 1, "the port is not 1"),
        (AttrMask::AV, !is_path(attr), "the destination is not a unicast address"),
        (AttrMask::AV, attr.path.dscp > 63, "the DSCP is above 63"),
        (AttrMask::PATH_MTU, attr.mtu > port_mtu, "the path MTU is above the port's"),
        // Its low bits may be 0, which waits for ever. Soft-RoCE refuses it, too.
        (AttrMask::TIMEOUT, attr.timeout > MAX_TIMEOUT_CODE, "the timeout is above 31"),
        (
            AttrMask::MAX_QP_RD_ATOMIC,
            attr.max_rd_atomic > MAX_RD_ATOMIC,
            "too many READs in flight",
        ),
        (
            AttrMask::MAX_DEST_RD_ATOMIC,
            attr.max_dest_rd_atomic > MAX_RD_ATOMIC,
            "too many READs served",
        ),
        (AttrMask::ALT_PATH, true, "alternate paths do not exist on Ethernet"),
        (AttrMask::PATH_MIG_STATE, true, "paths do not migrate on Ethernet"),
    ];
    let bad = is_bad.into_iter().find(|&(bit, bad, _)| bad && attr.mask.contains(bit));
    bad.map_or(Ok(()), |(_, _, why)| Err(why))
}

fn is_path(attr: &QpAttr) -> bool {
    let ip = attr.path.remote.ip();
    let is_broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
    !(ip.is_unspecified() || ip.is_multicast() || is_broadcast)
}
