#!/usr/bin/env python3
"""Runs the conformance cells on the kernel's soft-RoCE, and writes their table to docs/interop.md.

The cells are those of crates/nic/tests/conformance, which every device must pass. Here they run in a guest on
`rxe0`, behind Debian's own libibverbs.so.1, with both queue pairs on that device. A cell that the device refuses
as not supported is listed with the call that refused it. A cell on which soft-RoCE is known to deviate from the
specification is listed with the deviation.

Exit status: 0 no cell failed; 1 a cell failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import collections
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time

import cases
import lab
import matrix
import sandbox

DEVIATES = "deviates"
LIMIT_S = 400
CARGO = ("cargo", "test", "-p", "nic", "--test", "conformance", "--no-run", "--message-format=json-render-diagnostics")
PROGRAM = "/bin/conformance"
SCRIPT = f"DQUANT_CONFORMANCE_LIBRARY=libibverbs.so.1 DQUANT_CONFORMANCE_DEVICE=rxe0 {PROGRAM} --exact loaded_device --nocapture"

# Deviations of soft-RoCE in Linux 6.1 from the specification: cell -> how the cell ends there, and why.
DEVIATIONS = {
    "rc: send with invalidate": (
        "the reported key: None",
        "invalidates the key, but reports it with the kernel's bit 2 in `wc_flags` instead of `IBV_WC_WITH_INV`"),
    "rc: bounds of a memory window": (
        "how the send ended: Success and not RemoteAccessError",
        "checks the bounds of the window's region, not those of the window (IBA 10.6.7)"),
    "rc: wrong local key": (
        "how the send ended: LocalQpError and not LocalProtectionError",
        "completes the send with `LOC_QP_OP_ERR` and not `LOC_PROT_ERR` (IBA 11.6.2)"),
    "rc: receive that is too short": (
        "how the receive ended: LocalQpError and not LocalLengthError",
        "completes the receive with `LOC_QP_OP_ERR` and not `LOC_LEN_ERR` (IBA 11.6.2)"),
    "rc: event of a refused request": (
        "waited in vain for the event",
        "raises no event when it refuses a request (IBA 11.6.3)"),
}

Named = collections.namedtuple("Named", "name")


def build():
    """Path of the test program. Raises `Missing` without cargo."""
    if not shutil.which(CARGO[0]):
        raise lab.Missing("not installed: cargo")
    done = subprocess.run(CARGO, cwd=lab.REPOSITORY, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    found = [json.loads(line).get("executable") for line in done.stdout.splitlines() if line.startswith("{")]
    return next(path for path in found if path)


def judge(state, name, why):
    """The cell of one line of the program."""
    if state == "pass":
        return matrix.Cell(cases.PASS, "")
    if state == "lacks":
        return matrix.Cell(cases.UNSUPPORTED, f"soft-RoCE does not support `{why}`")
    ending, deviation = DEVIATIONS.get(name, (None, ""))
    if ending and why.startswith(ending):
        return matrix.Cell(DEVIATES, f"soft-RoCE {deviation}")
    return matrix.Cell(cases.FAIL, why)


def parse(result):
    """Cells by name, in their order. A program that did not report all of them has failed."""
    lines = re.findall(r"(?m)^(pass|lacks|wrong) +(.*?)(?: \((.*)\))?$", result.text)
    cells = {name: judge(state, name, why) for state, name, why in lines}
    total = re.search(r"(?m)^passed \d+ of (\d+) cells$", result.text)
    if not total or int(total.group(1)) != len(cells):
        ended = "was killed" if result.code is None else f"ended with {result.code}"
        cells["the end"] = matrix.Cell(cases.FAIL, f"the program {ended}: {cases.complaint(result.text)}")
    return cells


def report(cells, seconds, kernel, options):
    """Prints every cell and writes the table. Returns the number of failures."""
    for name, cell in cells.items():
        print(f"{cell.state:<11} {name}{': ' if cell.reason else ''}{cell.reason}")
    counts = collections.Counter(cell.state for cell in cells.values())
    summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    notes = [f"Linux {kernel}, soft-RoCE; {len(cells)} cells: {summary}; {seconds:.0f} s."]
    title = "`rxe0`, Debian's libibverbs"
    by_column = {(name, title): cell for name, cell in cells.items()}
    column = matrix.Column(title, None, None, 4)
    if not options.no_write:
        table = matrix.markdown([Named(name) for name in cells], [column], by_column, notes)
        matrix.write_between_markers(matrix.DOCUMENT, "conformance", table.replace("| program |", "| cell |"))
    print(*notes)
    return counts[cases.FAIL]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", metavar="FILE", help="the test program, if it is not to be built with cargo")
    parser.add_argument("--no-write", action="store_true", help="do not change docs/interop.md")
    options = parser.parse_args()
    try:
        program = pathlib.Path(options.program or build()).read_bytes()
        lab.prepare_guest()
        sandbox.enter()
        machines = lab.Lab()
    except lab.Missing as missing:
        print(f"skipped: {missing}")
        return lab.SKIPPED
    try:
        guest, begun = machines.guests[0], time.monotonic()
        guest.put(program, PROGRAM)
        cells = parse(guest.shell(SCRIPT, limit_s=LIMIT_S))
        kernel = guest.shell("uname -r").text.strip()
        failed = report(cells, time.monotonic() - begun, kernel, options)
        if failed:
            print(guest.troubles())
    finally:
        machines.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
