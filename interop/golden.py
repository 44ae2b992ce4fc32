#!/usr/bin/env python3
"""Records the kernel-to-kernel packets of the operations in `wire_cases`, as test vectors.

Usage: golden.py DIRECTORY [NAME...]     one NAME.pcap each, RoCE packets only
"""

import pathlib
import sys
import time

import cases
import lab
import matrix
import sandbox

RECORDINGS = {
    "write_imm": ("write_imm",),
    "send_imm": ("send_imm",),
    "send_inv": ("send_inv",),
    "refusals": ("nak_write", "nak_read", "nak_atomic", "nak_length", "rnr"),
}


def record(machines, path, names):
    client, server = machines.guests
    runner, column = matrix.Runner(), matrix.Column("kernel → kernel", client, server, 4)
    capture = machines.capture(path)
    try:
        for name in names:
            case = next(case for case in cases.operations() if case.options == (name,))
            cell = runner.run(case, column)
            print(f"{path.name}: {name}: {cell.state}: {cell.reason}", cell.details or "")
        time.sleep(0.3)
    finally:
        capture.terminate()
        capture.wait()


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder, chosen = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:] or RECORDINGS
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lab.prepare_guest()
        lab.wire_cases()
        sandbox.need({"tcpdump": "tcpdump"})
        sandbox.enter()
        machines = lab.Lab(2)
    except lab.Missing as reason:
        print(f"skipped: {reason}")
        return lab.SKIPPED
    try:
        for name in chosen:
            record(machines, folder / f"{name}.pcap", RECORDINGS[name])
    finally:
        machines.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
