//! Messages of etcd, generated from `proto/etcd/rpc.proto`, and short ways to make them.

#![allow(missing_docs, clippy::all, clippy::too_many_lines, unreachable_pub, unused_qualifications)]
// Tests watch; the store does not.
#![allow(dead_code)]

tonic::include_proto!("etcdserverpb");

use compare::{CompareResult, CompareTarget, TargetUnion};
use request_op::Request;
use response_op::Response;

/// All keys that begin with `prefix` are from it to this.
pub(super) fn end_of_prefix(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // To the end of all keys.
    vec![0]
}

pub(super) fn get(key: &[u8]) -> RangeRequest {
    RangeRequest { key: key.to_vec(), ..RangeRequest::default() }
}

/// All keys that begin with `prefix`, at most `limit` at a time.
pub(super) fn below(prefix: &[u8], limit: i64) -> RangeRequest {
    let (key, range_end) = (prefix.to_vec(), end_of_prefix(prefix));
    RangeRequest { key, range_end, limit, ..RangeRequest::default() }
}

pub(super) fn put(key: Vec<u8>, value: Vec<u8>) -> RequestOp {
    op(Request::RequestPut(PutRequest { key, value, lease: 0 }))
}

/// Deletes the keys from `key` to before `range_end`.
pub(super) fn delete(key: Vec<u8>, range_end: Vec<u8>) -> RequestOp {
    op(Request::RequestDeleteRange(DeleteRangeRequest { key, range_end }))
}

pub(super) fn op(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// Holds if the key was made in that revision; 0 means that it does not exist.
pub(super) fn made_in(key: &[u8], revision: i64) -> Compare {
    Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Create.into(),
        key: key.to_vec(),
        target_union: Some(TargetUnion::CreateRevision(revision)),
    }
}

/// Holds if the key exists and its value is so to that one.
pub(super) fn value_is(key: &[u8], result: CompareResult, value: &[u8]) -> Compare {
    Compare {
        result: result.into(),
        target: CompareTarget::Value.into(),
        key: key.to_vec(),
        target_union: Some(TargetUnion::Value(value.to_vec())),
    }
}

impl TxnResponse {
    /// What the range at that place of the list found first.
    pub(super) fn found(&self, place: usize) -> Option<&KeyValue> {
        match self.responses.get(place)?.response.as_ref()? {
            Response::ResponseRange(range) => range.kvs.first(),
            _ => None,
        }
    }

    pub(super) fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }
}
