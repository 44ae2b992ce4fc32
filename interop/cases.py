"""The cases of the matrix: every program with every option that it takes.

A case is one program with one set of options, the same on both sides. `verdict` decides about a finished pair
from exit codes and output: a row of results for every requested size, and no report of wrong data.
"""

import dataclasses
import re

MTUS = (256, 512, 1024, 2048, 4096)
ALL_SIZES = [2**power for power in range(1, 24)]
# ACK timeout 4.096 us * 2^18: an emulated guest on a busy machine takes longer for 8 MiB than the default of 67 ms
# times eight, and the program would fail.
PATIENT = ("-u", "18")
PASS, FAIL, UNSUPPORTED = "pass", "fail", "unsupported"

# Options that the programs themselves refuse before they open a device, whatever the library.
REFUSED = re.compile(r"Events feature not available on \w+ verb")


@dataclasses.dataclass(frozen=True)
class Case:
    group: str
    program: str
    options: tuple
    expect: str  # a key of JUDGES
    sizes: tuple = ()
    quick: bool = False
    limit_s: int = 20

    @property
    def name(self):
        return " ".join((self.program, *self.options))

    @property
    def meets(self):
        """Whether the two sides talk to each other."""
        return self.expect != "devinfo"

    def command(self, device, gid_index, port, server=None):
        if not self.meets:
            return [self.program, "-d", device, *self.options]
        flag = "-x" if self.expect == "rows" else "-g"
        extra = ("-F", *(PATIENT if "-a" in self.options else ())) if self.expect == "rows" else ()
        command = [self.program, "-d", device, flag, str(gid_index), "-p", str(port), *extra, *self.options]
        return [*command, server] if server else command


# ---- the list ----------------------------------------------------------------------------------------------


def pingpongs():
    count = {"rc": 100, "uc": 50, "ud": 50, "srq": 20}
    for kind, rounds in count.items():
        options = ("-c", "-n", str(rounds))
        if kind == "rc":
            yield Case("pingpong", "ibv_rc_pingpong", (*options, "-N"), "pingpong")
        yield Case("pingpong", f"ibv_{kind}_pingpong", options, "pingpong", quick=True)
        yield Case("pingpong", f"ibv_{kind}_pingpong", (*options, "-e"), "pingpong", quick=True)


TRANSPORTS = {"send": ("RC", "UC", "UD"), "write": ("RC", "UC"), "read": ("RC",), "atomic": ("RC",)}


def perftest(group, verb, kind, transport, extra, size=None, count=20, quick=False, limit_s=20):
    options = (() if verb in ("read", "atomic") else ("-c", transport)) + tuple(extra)
    every = "-a" in extra
    if size and not every:
        options += ("-s", str(size))
    sizes = tuple(ALL_SIZES) if every else (8,) if verb == "atomic" else (size,)
    if every and transport == "UD":
        sizes = ()  # as far as the path MTU reaches; at least one row
    options += ("-n", str(count))
    return Case(group, f"ib_{verb}_{kind}", options, "rows", sizes, quick, limit_s)


def plain():
    for verb, transports in TRANSPORTS.items():
        for transport in transports:
            for kind in ("bw", "lat"):
                if verb == "atomic":
                    for operation in ("FETCH_AND_ADD", "CMP_AND_SWAP"):
                        yield perftest("plain", verb, kind, transport, ("-A", operation), quick=True)
                else:
                    size = 1024 if transport == "UD" else 8192
                    yield perftest("plain", verb, kind, transport, (), size, quick=True)


def variants():
    """All sizes, eight queue pairs, both directions, events."""
    for verb, transports in TRANSPORTS.items():
        for transport in transports:
            size = None if verb == "atomic" else 1024 if transport == "UD" else 8192
            for kind in ("bw", "lat"):
                if verb != "atomic":
                    yield perftest("all sizes", verb, kind, transport, ("-a",), count=5, limit_s=180)
                if (verb, kind) != ("write", "lat"):  # it polls memory: perftest has no -e there
                    yield perftest("events", verb, kind, transport, ("-e",), size)
            yield perftest("8 queue pairs", verb, "bw", transport, ("-q", "8"), size, quick=True)
            yield perftest("bidirectional", verb, "bw", transport, ("-b",), size)
    yield perftest("8 queue pairs", "send", "bw", "RC", ("-q", "8", "-b"), 8192)


def options_of_posting():
    yield perftest("posting", "send", "bw", "RC", ("--use_old_post_send",), 8192)
    yield perftest("posting", "write", "bw", "RC", ("--use_old_post_send",), 8192)
    yield perftest("posting", "send", "lat", "RC", ("-I", "64"), 64)
    yield perftest("posting", "send", "bw", "RC", ("--use-srq", "-q", "2"), 8192)
    yield perftest("posting", "write", "bw", "RC", ("-l", "4"), 8192)


def path_mtus():
    for mtu in MTUS:
        more = ("-m", str(mtu))
        yield Case("MTU", "ibv_rc_pingpong", ("-c", "-n", "50", "-s", "20000", *more), "pingpong")
        yield Case("MTU", "ibv_uc_pingpong", ("-c", "-n", "20", "-s", "9000", *more), "pingpong")
        yield perftest("MTU", "send", "bw", "RC", more, 20000)
        yield perftest("MTU", "write", "bw", "RC", more, 20000)
        yield perftest("MTU", "read", "bw", "RC", more, 20000)


WIRE_CASES = ("write_imm", "send_imm", "send_inv", "read_order", "nak_write", "nak_read", "nak_atomic", "nak_length", "rnr",
              "ud")


def operations():
    """Operations that no other program uses: immediate data in writes, windows, invalidation, refusals."""
    for name in WIRE_CASES:
        yield Case("operations", "wire_cases", (name,), "as expected", quick=True)


def all_cases():
    return [Case("device", "ibv_devinfo", ("-v",), "devinfo", quick=True), *pingpongs(), *operations(), *plain(), *variants(), *options_of_posting(), *path_mtus()]


# ---- the verdict ---------------------------------------------------------------------------------------------


def rows_of(text):
    """Result rows of perftest: (bytes, iterations, first figure)."""
    found = re.findall(r"(?m)^ *(\d+) +(\d+) +(-?[\d.]+|inf|nan)", text)
    return [(int(size), int(count), float(figure)) for size, count, figure in found]


def complaint(text):
    """The last line that is neither a figure nor a rule: usually the reason."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not re.match(r"^[-\d]|^(local|remote) address|^#", line)]
    return lines[-1][:160] if lines else "no output"


def verdict(case, server, client):
    """(state, reason) of a pair of `Result`s."""
    refused = REFUSED.search(client.text) or REFUSED.search(server.text)
    if refused and client.code != 0 and server.code != 0:
        return UNSUPPORTED, f"perftest: {refused.group()}"
    for side, result in (("client", client), ("server", server)):
        if result.code is None:
            return FAIL, f"{side} did not end in time: {complaint(result.text)}"
        if result.code != 0:
            return FAIL, f"{side} exit {result.code}: {complaint(result.text)}"
        if "invalid data" in result.text:
            return FAIL, f"{side} found wrong data"
    return JUDGES[case.expect](case, server.text, client.text)


def _judge_pingpong(case, server, client):
    for side, text in (("client", client), ("server", server)):
        if not re.search(r"\d+ iters in [\d.]+ seconds", text):
            return FAIL, f"{side} printed no result"
    return PASS, re.search(r"iters in [\d.]+ seconds = ([\d.]+ usec/iter)", client).group(1)


def _judge_rows(case, _, client):
    rows = rows_of(client)
    sizes = {size for size, _, _ in rows}
    if not rows or not set(case.sizes) <= sizes:
        return FAIL, f"rows of {len(sizes)} sizes, {len(case.sizes) or 'some'} expected"
    wanted = int(case.options[case.options.index("-n") + 1])
    size, _, figure = rows[-1]
    # A figure may be rounded to zero on a slow machine, but the number of iterations is exact.
    if any(count < wanted for _, count, _ in rows) or not 0 <= figure < float("inf"):
        return FAIL, f"{figure} at {size} bytes, {min(count for _, count, _ in rows)} of {wanted} iterations"
    return PASS, f"{figure} at {size} bytes"


def _judge_expected(case, server, client):
    missing = [side for side, text in (("client", client), ("server", server)) if "as expected" not in text]
    return (FAIL, f"{' and '.join(missing)} did not finish") if missing else (PASS, "as expected")


def _judge_devinfo(case, server, client):
    wanted = ("hca_id:", "PORT_ACTIVE", "GID[", "RoCE v2")
    for side, text in (("client", client), ("server", server)):
        missing = [word for word in wanted if word not in text]
        if missing:
            return FAIL, f"{side} does not show {missing[0]}"
    return PASS, "both devices are described"


JUDGES = {"devinfo": _judge_devinfo, "pingpong": _judge_pingpong, "rows": _judge_rows, "as expected": _judge_expected}
