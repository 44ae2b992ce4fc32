//! Messages and services between brains, agents and clients, generated from
//! `proto/dquant/v1/cluster.proto`.

#![allow(missing_docs, clippy::all, clippy::too_many_lines, unreachable_pub, unused_qualifications)]

use bytes::{Buf, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType, skip_field};
use prost::{DecodeError, Message};

tonic::include_proto!("dquant.cluster.v1");
include!(concat!(env!("OUT_DIR"), "/server/dquant.cluster.v1.rs"));

/// A reply of a brain that is serialised already: whoever asks for it next gets the same bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Serialised(Bytes);

impl Serialised {
    /// Serialises a reply.
    pub fn of(reply: &impl Message) -> Serialised {
        Serialised(reply.encode_to_vec().into())
    }

    /// What goes over the wire.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// It is only sent: clients read the reply that it is.
impl Message for Serialised {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        buf.put_slice(&self.0);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        skip_field(wire_type, tag, buf, context)
    }

    fn encoded_len(&self) -> usize {
        self.0.len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}
