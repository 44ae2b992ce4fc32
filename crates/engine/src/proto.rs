//! Messages and services of the control plane and of the local socket, generated from
//! `proto/dquant/v1/control.proto`.

#![allow(missing_docs, clippy::all, clippy::too_many_lines, unreachable_pub, unused_qualifications)]

tonic::include_proto!("dquant.v1");
