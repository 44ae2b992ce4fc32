#!/usr/bin/env python3
"""Builds `crates/roce/tests/golden/roce_v1.pcap`: RoCEv1 packets of several kinds, with scapy.

Soft-RoCE speaks version 2 only, so nothing in a virtual machine can be recorded. Scapy's classes lay out the packets. It
computes the ICRC only behind UDP; here the fields that switches may change are set to ones by name, and zlib's CRC-32 is
taken over eight bytes of ones and what scapy builds from that (IBA 7.8.1, annex A16).

    python3 -m venv venv && venv/bin/pip install scapy
    venv/bin/python interop/roce_v1.py crates/roce/tests/golden/roce_v1.pcap
"""

import ipaddress
import struct
import sys
import zlib

from scapy.contrib.roce import AETH, BTH, GRH, CNPPadding, opcode
from scapy.layers.l2 import Ether
from scapy.packet import Raw
from scapy.utils import wrpcap

ICRC_BYTES = 4
ETHERNET = {"dst": "02:00:00:00:00:02", "src": "02:00:00:00:00:01", "type": 0x8915}


def gid(text):
    """The GID of an address, as a number."""
    address = ipaddress.ip_address(text)
    if address.version == 4:
        return 0xFFFF << 32 | int(address)
    return int(address)


def icrc(grh, bth, rest):
    """The four bytes that end the packet of these headers."""
    masked_grh, masked_bth = grh.copy(), bth.copy()
    masked_grh.tclass, masked_grh.flowlabel, masked_grh.hoplmt = 0xFF, 0xFFFFF, 0xFF
    masked_bth.fecn, masked_bth.becn, masked_bth.resv6 = 1, 1, 0x3F
    covered = masked_grh.self_build() + masked_bth.self_build()[:12] + rest
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + covered))


def packet(kind, ext=None, payload=b"", ends=("10.0.0.1", "10.0.0.2"), grh=None, bth=None):
    """An Ethernet frame; `ext` is a layer or bytes."""
    pad = -len(payload) % 4
    rest = bytes(ext or b"") + payload + bytes(pad)
    fields = {"nexthdr": 0x1B, "flowlabel": 0, "sgid": gid(ends[0]), "dgid": gid(ends[1])}
    header = GRH(paylen=12 + len(rest) + ICRC_BYTES, **(fields | (grh or {})))
    base = {"opcode": kind, "migreq": 1, "padcount": pad, "dqpn": 0x11, "psn": 0xFED06E}
    # A given ICRC keeps scapy from computing one.
    transport = BTH(icrc=0, **(base | (bth or {})))
    end = icrc(header, transport, rest)
    return Ether(**ETHERNET) / header / Raw(transport.self_build()[:12] + rest + end)


def reth(length):
    """Address, key and length of an RDMA operation."""
    return struct.pack(">QII", 0x7F00_0000_1000, 0x1234_5678, length)


def packets():
    """One packet of each kind."""
    rc = lambda name: opcode("RC", name)[0]
    long = bytes(range(256)) * 4
    v6 = ("fd00::1", "fe80::200:ff:fe00:2")
    marked = {"tclass": 0xB8, "flowlabel": 0xABCDE, "hoplmt": 64}
    yield packet(rc("SEND_ONLY"), payload=b"{" * 101, bth={"ackreq": 1})
    yield packet(rc("RDMA_WRITE_FIRST"), reth(2048), long)
    yield packet(rc("ACKNOWLEDGE"), AETH(syndrome=31, msn=7))
    yield packet(rc("RDMA_READ_REQUEST"), reth(4096), bth={"ackreq": 1})
    deth = struct.pack(">II", 0x8001_0000, 0x2A)
    yield packet(opcode("UD", "SEND_ONLY")[0], deth, b"datagram!", ends=v6)
    yield packet(0x81, CNPPadding(), ends=v6, bth={"becn": 1})
    yield packet(rc("SEND_MIDDLE"), payload=long, grh=marked, bth={"fecn": 1})
    yield packet(opcode("UC", "RDMA_WRITE_ONLY")[0], reth(5), b"bytes", grh=marked)


def main():
    """Writes the file that is named."""
    built = list(packets())
    for at, one in enumerate(built):
        one.time = 1_700_000_000 + at
        parsed = Ether(bytes(one))
        assert parsed.haslayer(GRH) and parsed.haslayer(BTH), "scapy does not recognise it"
    wrpcap(sys.argv[1], built)


if __name__ == "__main__":
    main()
