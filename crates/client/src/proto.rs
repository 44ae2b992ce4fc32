//! Messages, generated from `proto/dquant/v1/control.proto`; those of the local socket are used.

#![allow(missing_docs, clippy::all, unreachable_pub, unused_qualifications, dead_code)]

include!(concat!(env!("OUT_DIR"), "/dquant.v1.rs"));
