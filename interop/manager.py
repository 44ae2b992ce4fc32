#!/usr/bin/env python3
"""Runs `dquant subnet manage` on fabrics of ibsim: dead links, other managers, questions of programs.

| test | what has to hold |
|---|---|
| link | a link dies by ibsim's console: the tables are set again in time, and `ibtracert` finds a path for random pairs; the link comes back |
| election | beside opensm on another host, with a higher and with a lower priority: one is master; it takes over when opensm ends |
| questions | `saquery`, `sminfo`, `smpquery` read what the manager did |
| restart | LIDs stay when the manager is killed and started again, and on a fabric that has lost them all |
| judge | `ibdmchk` of ibutils, if it is there, over the tables that the switches hold |

Exit status: 0 nothing failed; 1 something failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from subnet import INSTALLABLE, PRELOAD, ROOT, Simulated, plan, preload

LARGE, SMALL = "fat-tree:16", "fat-tree:4"
TRACES = 200
LIMIT_S = 30
REROUTE_S, REROUTE_CPU_S, SWEEP_CPU_S = 0.25, 0.05, 0.3


class Managed:
    """A program that stays on a host of a simulated fabric, and the lines that it wrote."""

    def __init__(self, simulated, command, host="host0"):
        environment = {**simulated.environment, "LD_PRELOAD": str(preload()), "SIM_HOST": host}
        self.lines, self.ready = [], threading.Condition()
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            with self.ready:
                self.lines.append((time.monotonic(), line.strip()))
                self.ready.notify_all()

    def wait(self, is_meant, since=0.0, seconds=LIMIT_S):
        """(time, line) of the first line after a time that is meant, or None."""
        end = time.monotonic() + seconds
        with self.ready:
            while True:
                found = next(((at, line) for at, line in self.lines if at >= since and is_meant(line)), None)
                left = end - time.monotonic()
                if found or left <= 0:
                    return found
                self.ready.wait(left)

    def event(self, name, since=0.0, seconds=LIMIT_S, text=""):
        """(time, event) of the first event of a name, or None."""
        is_meant = lambda line: f'"event":"{name}"' in line and text in line
        found = self.wait(is_meant, since, seconds)
        return (found[0], json.loads(found[1])) if found else None

    def status(self):
        since = time.monotonic()
        self.process.send_signal(signal.SIGUSR1)
        found = self.wait(lambda line: "dquant.subnet.status" in line, since, 5)
        return json.loads(found[1]) if found else None

    def close(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(5)


def console(simulated, command):
    simulated.process.stdin.write(command.encode() + b"\n")
    simulated.process.stdin.flush()


def trace(simulated, count, seed):
    """Complaints of ibtracert over random pairs of hosts."""
    _, text, _ = simulated.run(["ibnetdiscover"])
    ends = sorted(re.findall(r'^\[\d+\]\(\w+\).*# lid (\d+) lmc', text, re.M))
    generator, complaints = random.Random(seed), []
    for _ in range(count):
        one, other = generator.sample(ends, 2)
        code, text, _ = simulated.run(["ibtracert", one, other])
        if code != 0:
            complaints.append(f"ibtracert {one} {other}: {text.strip()[-200:]}")
    return complaints


def manage(dquant, *options):
    return [dquant, "subnet", "manage", "--json", *options]


def test_link(dquant, simulated, complaints):
    managed = Managed(simulated, manage(dquant))
    try:
        first = managed.event("set-up")
        if first is None:
            complaints.append(f"link: the fabric is not set up: {managed.lines[-3:]}")
            return
        print(f"  {first[1]['message']}; {first[1]['cpu_ns'] / 1e6:.1f} ms CPU")
        if first[1]["cpu_ns"] > SWEEP_CPU_S * 1e9:
            complaints.append(f"link: {first[1]['cpu_ns'] / 1e6:.1f} ms of CPU for a sweep")
        for pair in (('"agg0"[9]', '"edge0"[1]'), ('"core0"[1]', '"agg0"[1]')):
            time.sleep(1)
            before, since = managed.status(), time.monotonic()
            console(simulated, f"Unlink {pair[0]}")
            mended = managed.event("set-up", since)
            if mended is None:
                complaints.append(f"link: {pair} died, and nothing happened: {managed.lines[-3:]}")
                return
            took, cpu = mended[0] - since, (mended[1]["cpu_ns"] - before["cpu_ns"]) / 1e9
            print(f"  dead link {pair[0]}: {took * 1e3:.0f} ms to tables set, {cpu * 1e3:.1f} ms CPU: {mended[1]['message']}")
            if took > REROUTE_S or cpu > REROUTE_CPU_S:
                complaints.append(f"link: rerouting took {took:.3f} s, {cpu:.3f} s of CPU")
            complaints += [f"link: dead {pair[0]}: {one}" for one in trace(simulated, TRACES // 2, pair[0])]
            time.sleep(1)
            since = time.monotonic()
            console(simulated, f"Link {pair[0]} {pair[1]}")
            back = managed.event("set-up", since)
            if back is None:
                complaints.append(f"link: {pair} is back, and nothing happened: {managed.lines[-3:]}")
                return
            print(f"  it is back: {(back[0] - since) * 1e3:.0f} ms: {back[1]['message']}")
        complaints += [f"link: at last: {one}" for one in trace(simulated, TRACES, "last")]
    finally:
        managed.close()
    print(f"  {managed.lines[-1][1][:400]}")


TESTS = {"link": (LARGE, test_link)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dquant", default=str(ROOT / "target" / "release" / "dquant"), help="the program [default: the release build]")
    parser.add_argument("--only", default="", help="tests whose name contains this")
    options = parser.parse_args()
    missing = [program for program in ("ibsim", "opensm", "ibtracert", "saquery") if shutil.which(program) is None]
    if missing or preload() is None:
        print(f"skipped: no {', '.join(missing) or PRELOAD}; Debian has them in {' '.join(INSTALLABLE)}")
        return 77
    if not os.access(options.dquant, os.X_OK):
        print(f"skipped: no {options.dquant}; cargo build --release -p dquant makes it")
        return 77
    complaints = []
    for name, (topology, test) in TESTS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="dquant-manager-") as folder:
            net = pathlib.Path(folder) / "fabric.net"
            plan(options.dquant, topology, net)
            simulated = Simulated(net, pathlib.Path(folder), has_console=True)
            print(f"{name}: {topology}")
            try:
                test(options.dquant, simulated, complaints)
            finally:
                simulated.close()
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
