//! Messages and services between brains, agents and clients, generated from `proto/dquant/v1/cluster.proto`.

#![allow(missing_docs, clippy::all, clippy::too_many_lines, unreachable_pub, unused_qualifications)]

tonic::include_proto!("dquant.cluster.v1");
