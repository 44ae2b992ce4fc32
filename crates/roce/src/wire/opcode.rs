//! BTH opcodes (IBA table 35, and annex A17 for CNP).
//!
//! One table has everything that depends on the opcode alone: its code, its name, its operation,
//! its place in the message and the extension headers. Codes that are not in the table (other
//! services, reserved values) cannot be represented: [`Opcode::from_u8`] refuses them.
//!
//! Codes from 0xc0 are for manufacturers to define. Ours are those of the selective-repeat mode of
//! RC queue pairs; the five low bits have the same meaning as for RC (see `docs/reliability.md`).

use super::WireError;

/// Transport service of an opcode: its three high bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification (annex A17).
    Cnp,
    /// Reliable connection between two of our own endpoints with selective repeat.
    Selective,
}

/// The operation of a packet, whatever its service and place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are the specification's")]
pub enum Operation {
    Send,
    Write,
    ReadRequest,
    ReadResponse,
    Acknowledge,
    AtomicAcknowledge,
    CompareSwap,
    FetchAdd,
    Cnp,
}

/// The place of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// First of several.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several.
    Last,
    /// The whole message: also requests and responses that are never split.
    Only,
}

/// The extension headers after the base header, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the variants name the headers")]
pub enum ExtKind {
    None,
    Imm,
    Ieth,
    Reth,
    RethImm,
    Aeth,
    AtomicEth,
    AethAtomicAck,
    Deth,
    DethImm,
    Cnp,
    Sreth,
    SrethImm,
    SrethIeth,
    RethSreth,
    RethSrethImm,
    AethSreth,
    AethSack,
}

impl ExtKind {
    /// Length of the extension headers in bytes.
    pub const fn len(self) -> usize {
        match self {
            ExtKind::None => 0,
            ExtKind::Imm | ExtKind::Ieth | ExtKind::Aeth => 4,
            ExtKind::Deth | ExtKind::Sreth => 8,
            ExtKind::AethAtomicAck | ExtKind::DethImm => 12,
            ExtKind::SrethImm | ExtKind::SrethIeth | ExtKind::AethSreth => 12,
            ExtKind::Reth | ExtKind::Cnp => 16,
            ExtKind::RethImm => 20,
            ExtKind::RethSreth => 24,
            ExtKind::AtomicEth | ExtKind::RethSrethImm | ExtKind::AethSack => 28,
        }
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        matches!(self, ExtKind::None)
    }
}

macro_rules! opcodes {
    ($($variant:ident $code:literal $name:literal $operation:ident $place:ident $ext:ident;)*) => {
        /// Every opcode of RC, UC and UD, the congestion notification packet, and those of the
        /// selective-repeat mode.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        #[expect(missing_docs, reason = "the names are the specification's")]
        pub enum Opcode {
            $($variant = $code,)*
        }

        impl Opcode {
            /// Every opcode, by rising code.
            pub const ALL: &[Opcode] = &[$(Opcode::$variant,)*];

            /// The opcode with this code, if a supported service defines it.
            pub const fn from_u8(code: u8) -> Option<Opcode> {
                match code {
                    $($code => Some(Opcode::$variant),)*
                    _ => None,
                }
            }

            /// Service and name as in the specification; stable, for use in reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Opcode::$variant => $name,)*
                }
            }

            /// The operation of the packet.
            pub const fn operation(self) -> Operation {
                match self {
                    $(Opcode::$variant => Operation::$operation,)*
                }
            }

            /// The place of the packet in its message.
            pub const fn place(self) -> Place {
                match self {
                    $(Opcode::$variant => Place::$place,)*
                }
            }

            /// The extension headers after the base header.
            pub const fn ext_kind(self) -> ExtKind {
                match self {
                    $(Opcode::$variant => ExtKind::$ext,)*
                }
            }
        }
    };
}

opcodes! {
    RcSendFirst          0x00 "RC SEND_FIRST"           Send              First  None;
    RcSendMiddle         0x01 "RC SEND_MIDDLE"          Send              Middle None;
    RcSendLast           0x02 "RC SEND_LAST"            Send              Last   None;
    RcSendLastImm        0x03 "RC SEND_LAST_IMM"        Send              Last   Imm;
    RcSendOnly           0x04 "RC SEND_ONLY"            Send              Only   None;
    RcSendOnlyImm        0x05 "RC SEND_ONLY_IMM"        Send              Only   Imm;
    RcWriteFirst         0x06 "RC WRITE_FIRST"          Write             First  Reth;
    RcWriteMiddle        0x07 "RC WRITE_MIDDLE"         Write             Middle None;
    RcWriteLast          0x08 "RC WRITE_LAST"           Write             Last   None;
    RcWriteLastImm       0x09 "RC WRITE_LAST_IMM"       Write             Last   Imm;
    RcWriteOnly          0x0a "RC WRITE_ONLY"           Write             Only   Reth;
    RcWriteOnlyImm       0x0b "RC WRITE_ONLY_IMM"       Write             Only   RethImm;
    RcReadRequest        0x0c "RC READ_REQUEST"         ReadRequest       Only   Reth;
    RcReadResponseFirst  0x0d "RC READ_RESPONSE_FIRST"  ReadResponse      First  Aeth;
    RcReadResponseMiddle 0x0e "RC READ_RESPONSE_MIDDLE" ReadResponse      Middle None;
    RcReadResponseLast   0x0f "RC READ_RESPONSE_LAST"   ReadResponse      Last   Aeth;
    RcReadResponseOnly   0x10 "RC READ_RESPONSE_ONLY"   ReadResponse      Only   Aeth;
    RcAcknowledge        0x11 "RC ACKNOWLEDGE"          Acknowledge       Only   Aeth;
    RcAtomicAcknowledge  0x12 "RC ATOMIC_ACKNOWLEDGE"   AtomicAcknowledge Only   AethAtomicAck;
    RcCompareSwap        0x13 "RC COMPARE_SWAP"         CompareSwap       Only   AtomicEth;
    RcFetchAdd           0x14 "RC FETCH_ADD"            FetchAdd          Only   AtomicEth;
    RcSendLastInvalidate 0x16 "RC SEND_LAST_INVALIDATE" Send              Last   Ieth;
    RcSendOnlyInvalidate 0x17 "RC SEND_ONLY_INVALIDATE" Send              Only   Ieth;
    UcSendFirst          0x20 "UC SEND_FIRST"           Send              First  None;
    UcSendMiddle         0x21 "UC SEND_MIDDLE"          Send              Middle None;
    UcSendLast           0x22 "UC SEND_LAST"            Send              Last   None;
    UcSendLastImm        0x23 "UC SEND_LAST_IMM"        Send              Last   Imm;
    UcSendOnly           0x24 "UC SEND_ONLY"            Send              Only   None;
    UcSendOnlyImm        0x25 "UC SEND_ONLY_IMM"        Send              Only   Imm;
    UcWriteFirst         0x26 "UC WRITE_FIRST"          Write             First  Reth;
    UcWriteMiddle        0x27 "UC WRITE_MIDDLE"         Write             Middle None;
    UcWriteLast          0x28 "UC WRITE_LAST"           Write             Last   None;
    UcWriteLastImm       0x29 "UC WRITE_LAST_IMM"       Write             Last   Imm;
    UcWriteOnly          0x2a "UC WRITE_ONLY"           Write             Only   Reth;
    UcWriteOnlyImm       0x2b "UC WRITE_ONLY_IMM"       Write             Only   RethImm;
    UdSendOnly           0x64 "UD SEND_ONLY"            Send              Only   Deth;
    UdSendOnlyImm        0x65 "UD SEND_ONLY_IMM"        Send              Only   DethImm;
    Cnp                  0x81 "CNP"                     Cnp               Only   Cnp;
    SrSendFirst          0xc0 "SR SEND_FIRST"           Send              First  Sreth;
    SrSendMiddle         0xc1 "SR SEND_MIDDLE"          Send              Middle Sreth;
    SrSendLast           0xc2 "SR SEND_LAST"            Send              Last   Sreth;
    SrSendLastImm        0xc3 "SR SEND_LAST_IMM"        Send              Last   SrethImm;
    SrSendOnly           0xc4 "SR SEND_ONLY"            Send              Only   Sreth;
    SrSendOnlyImm        0xc5 "SR SEND_ONLY_IMM"        Send              Only   SrethImm;
    SrWriteLastImm       0xc9 "SR WRITE_LAST_IMM"       Write             Last   RethSrethImm;
    SrReadRequest        0xcc "SR READ_REQUEST"         ReadRequest       Only   RethSreth;
    SrReadResponse       0xce "SR READ_RESPONSE"        ReadResponse      Only   AethSreth;
    SrAcknowledge        0xd1 "SR ACKNOWLEDGE"          Acknowledge       Only   AethSack;
    SrSendLastInvalidate 0xd6 "SR SEND_LAST_INVALIDATE" Send              Last   SrethIeth;
    SrSendOnlyInvalidate 0xd7 "SR SEND_ONLY_INVALIDATE" Send              Only   SrethIeth;
}

impl Opcode {
    /// The code in the packet.
    pub const fn as_u8(self) -> u8 {
        self as u8
    }

    /// The service that defines it.
    pub const fn service(self) -> Service {
        match self.as_u8() >> 5 {
            0 => Service::Rc,
            1 => Service::Uc,
            3 => Service::Ud,
            6 => Service::Selective,
            _ => Service::Cnp,
        }
    }

    /// First packet of a message of several.
    pub const fn is_first(self) -> bool {
        matches!(self.place(), Place::First)
    }

    /// Neither first nor last packet of its message.
    pub const fn is_middle(self) -> bool {
        matches!(self.place(), Place::Middle)
    }

    /// Last packet of a message of several.
    pub const fn is_last(self) -> bool {
        matches!(self.place(), Place::Last)
    }

    /// The whole message in one packet; true for READ requests, atomics and acknowledgements too.
    pub const fn is_only(self) -> bool {
        matches!(self.place(), Place::Only)
    }

    /// First or only packet.
    pub const fn starts_message(self) -> bool {
        matches!(self.place(), Place::First | Place::Only)
    }

    /// Last or only packet.
    pub const fn ends_message(self) -> bool {
        matches!(self.place(), Place::Last | Place::Only)
    }

    /// SEND of any service.
    pub const fn is_send(self) -> bool {
        matches!(self.operation(), Operation::Send)
    }

    /// RDMA WRITE of any service.
    pub const fn is_write(self) -> bool {
        matches!(self.operation(), Operation::Write)
    }

    /// RDMA READ request.
    pub const fn is_read_request(self) -> bool {
        matches!(self.operation(), Operation::ReadRequest)
    }

    /// RDMA READ response.
    pub const fn is_read_response(self) -> bool {
        matches!(self.operation(), Operation::ReadResponse)
    }

    /// Compare-and-swap or fetch-and-add request.
    pub const fn is_atomic_request(self) -> bool {
        matches!(self.operation(), Operation::CompareSwap | Operation::FetchAdd)
    }

    /// Goes from requester to responder.
    pub const fn is_request(self) -> bool {
        !self.is_response() && !matches!(self, Opcode::Cnp)
    }

    /// Goes from responder to requester: acknowledgements and READ responses.
    pub const fn is_response(self) -> bool {
        matches!(
            self.operation(),
            Operation::ReadResponse | Operation::Acknowledge | Operation::AtomicAcknowledge
        )
    }

    /// 32 bits of immediate data follow.
    pub const fn carries_imm(self) -> bool {
        matches!(
            self.ext_kind(),
            ExtKind::Imm
                | ExtKind::RethImm
                | ExtKind::DethImm
                | ExtKind::SrethImm
                | ExtKind::RethSrethImm
        )
    }

    /// An rkey to invalidate follows.
    pub const fn carries_invalidate(self) -> bool {
        matches!(self.ext_kind(), ExtKind::Ieth | ExtKind::SrethIeth)
    }

    /// A RETH follows.
    pub const fn carries_reth(self) -> bool {
        matches!(
            self.ext_kind(),
            ExtKind::Reth | ExtKind::RethImm | ExtKind::RethSreth | ExtKind::RethSrethImm
        )
    }

    /// An AETH follows.
    pub const fn carries_aeth(self) -> bool {
        matches!(
            self.ext_kind(),
            ExtKind::Aeth | ExtKind::AethAtomicAck | ExtKind::AethSreth | ExtKind::AethSack
        )
    }

    /// The packet may hold message payload.
    pub const fn carries_payload(self) -> bool {
        matches!(self.operation(), Operation::Send | Operation::Write | Operation::ReadResponse)
    }
}

impl TryFrom<u8> for Opcode {
    type Error = WireError;

    fn try_from(code: u8) -> Result<Opcode, WireError> {
        Opcode::from_u8(code).ok_or(WireError::UnknownOpcode(code))
    }
}

impl core::fmt::Display for Opcode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_rise() {
        for code in 0..=u8::MAX {
            if let Some(opcode) = Opcode::from_u8(code) {
                assert_eq!(opcode.as_u8(), code);
            }
        }
        assert!(Opcode::ALL.windows(2).all(|pair| pair[0] < pair[1]));
        let known = (0..=u8::MAX).filter(|&code| Opcode::from_u8(code).is_some()).count();
        assert_eq!(known, Opcode::ALL.len());
    }

    #[test]
    fn names_agree_with_the_predicates() {
        for &opcode in Opcode::ALL {
            let name = opcode.name();
            assert_eq!(opcode.is_first(), name.ends_with("_FIRST"), "{name}");
            assert_eq!(opcode.is_middle(), name.ends_with("_MIDDLE"), "{name}");
            assert_eq!(opcode.is_last(), name.contains("_LAST"), "{name}");
            assert_eq!(opcode.carries_imm(), name.ends_with("_IMM"), "{name}");
            assert_eq!(opcode.carries_invalidate(), name.ends_with("_INVALIDATE"), "{name}");
            assert_eq!(opcode.is_send(), name.contains(" SEND_"), "{name}");
            assert_eq!(opcode.is_write(), name.contains(" WRITE_"), "{name}");
            assert_eq!(opcode.is_read_response(), name.contains("READ_RESPONSE"), "{name}");
        }
    }

    #[test]
    fn services_follow_the_high_bits() {
        assert_eq!(Opcode::RcSendOnlyInvalidate.service(), Service::Rc);
        assert_eq!(Opcode::UcWriteOnlyImm.service(), Service::Uc);
        assert_eq!(Opcode::UdSendOnly.service(), Service::Ud);
        assert_eq!(Opcode::Cnp.service(), Service::Cnp);
        assert_eq!(Opcode::SrReadResponse.service(), Service::Selective);
    }

    #[test]
    fn a_packet_is_request_response_or_notification() {
        for &opcode in Opcode::ALL {
            let kinds = [opcode.is_request(), opcode.is_response(), opcode == Opcode::Cnp];
            assert_eq!(kinds.iter().filter(|&&kind| kind).count(), 1, "{opcode}");
        }
    }
}
