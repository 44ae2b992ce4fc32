//! Go-back-N: after a loss, everything from the missing packet on is retransmitted (IBA 9.7.5.1.1,
//! 9.7.6). The mode of the specification, and the only one used with other implementations.

pub(in crate::qp) mod requester;
pub(in crate::qp) mod responder;
