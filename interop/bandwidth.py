#!/usr/bin/env python3
"""Measures what three jobs get of a port whose plan HTB keeps, with perftest under the drop-in library.

Three hosts and a switch are network namespaces: a bridge, whose port towards the receiving host has 1 Gbit/s. Job 1 sends
from the first host, jobs 2 and 3 from the second one, each with `ib_write_bw` and its own DSCP (--tclass); job 3 is
greedy: it has eight queue pairs, the others two. All packets take the wire, with congestion control.

    cargo build --release -p dquant -p ibverbs && cargo build --release -p cluster --example enforce
    python3 interop/bandwidth.py [--seconds 10] [--runs 3] [--rate 1000] [--check]

Printed are Mbit/s on the wire, as the switch's classes count them (Ethernet frames without preamble and checksum), and in
brackets the payload that perftest counts. Without enforcement the port has the same rate and one queue.

Exit status: 0 with --check, each job has 98 % of its guarantee at least, and what an idle one leaves is used; 1 it is not; 77
the machine lacks something (the reason is printed).
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import sandbox

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77
RECEIVER, FIRST_PORT, WRITE_BYTES = 3, 18600, 65536
# Packets are sent through sockets, and paced by the delay that they measure.
ENVIRONMENT = {"DQUANT_PATH": "udp", "DQUANT_CONGESTION": "auto"}
# Time until all jobs send, and as long at the end, when some may have ended. perftest leaves both out, too.
SETTLE_S = 3
# How long perftest may take to end after that.
END_S = 30
WITHIN = 0.02
LEFT_UNUSED = 0.03


class Job:
    def __init__(self, number, host, dscp, part, queue_pairs):
        self.number, self.host, self.dscp, self.part, self.queue_pairs = number, host, dscp, part, queue_pairs

    def guarantee(self, rate):
        """In bit/s, on a port of `rate` Mbit/s."""
        return self.part * rate * 1e6


JOBS = [Job(1, 1, 10, 0.5, 2), Job(2, 2, 18, 0.3, 2), Job(3, 2, 26, 0.2, 8)]


def network(mtu):
    """The switch and the hosts 1 to 3; a host's interface is `eth`, the switch's ports are `port1` to `port3`."""
    switch, hosts = sandbox.Net(), {}
    sandbox.ip("link add name bridge type bridge", switch.prefix)
    sandbox.ip("link set bridge up", switch.prefix)
    for number in (1, 2, RECEIVER):
        host = hosts[number] = sandbox.Net()
        sandbox.ip(f"link add eth netns {host.pid} mtu {mtu} type veth peer name port{number} netns {switch.pid} mtu {mtu}")
        sandbox.ip(f"link set port{number} master bridge", switch.prefix)
        sandbox.ip(f"link set port{number} up", switch.prefix)
        sandbox.ip(f"addr add 10.80.0.{number}/24 dev eth", host.prefix)
        sandbox.ip(f"addr add fd80::{number}/64 dev eth nodad", host.prefix)
        sandbox.ip("link set eth up", host.prefix)
        sandbox.keep_order(host, "eth")
        sandbox.keep_order(switch, f"port{number}")
    for host in hosts.values():
        sandbox.wait_for_ipv6(host, "eth")
    return switch, hosts


def enforce(options, switch, jobs):
    plan = [f"{job.number}:{job.dscp}:{round(job.part * options.rate)}" for job in jobs]
    command = [*switch.prefix, options.enforce, f"port{RECEIVER}", str(options.rate), *plan]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise sandbox.Missing(f"enforce: {done.stderr.strip()}")


def sent(switch):
    """Bytes by class of the port, as `tc` reads them."""
    command = [*switch.prefix, "tc", "-s", "class", "show", "dev", f"port{RECEIVER}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {int(number, 16): int(count) for number, count in
            re.findall(r"class htb daa0:([0-9a-f]+) .*?Sent (\d+) bytes", text, re.DOTALL)}


def perftest(options, host, job, address, is_v6, seconds, folder):
    """One side of a job's traffic: the server, or with an address the client."""
    command = [*host.prefix, options.dquant, "run", "--devices", "eth", "--", "ib_write_bw", "-d", "dq_eth", "-x", str(int(is_v6)),
               "-s", str(WRITE_BYTES), "-q", str(job.queue_pairs), "-t", "32", "-D", str(seconds), "-f", str(SETTLE_S),
               "-p", str(FIRST_PORT + job.number), "--tclass", str(job.dscp << 2), *address]
    name = "client" if address else "server"
    log = open(folder / f"{name}{job.number}.log", "w+")
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log


def listens(host, port):
    for _ in range(100):
        shown = subprocess.run([*host.prefix, "ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True)
        if shown.stdout.strip():
            return
        time.sleep(0.05)
    raise sandbox.Missing(f"no server on port {port}")


def payload(options, process, log):
    """Bit/s of the measured part, from perftest's count of writes: its own rates rest on a guess of the processor's clock.

    None where that guess failed, since nothing is printed then, as happens on busy machines.
    """
    log.seek(0)
    text = log.read()
    rows = re.findall(rf"^\s*{WRITE_BYTES}\s+(\d+)\s+[\d.]+\s+[\d.]+", text, re.MULTILINE)
    if rows:
        return int(rows[-1]) * WRITE_BYTES * 8 / options.seconds
    if "Can't produce a report" in text:
        return None
    raise sandbox.Missing(f"ib_write_bw ended with status {process.returncode} and no figure: {text.strip()[:2000]}")


def measure(options, switch, hosts, active, is_v6):
    """Runs the jobs; returns bit/s on the wire by class number, and perftest's by job."""
    seconds = SETTLE_S + options.seconds + SETTLE_S
    processes = []
    with tempfile.TemporaryDirectory() as name:
        try:
            for job in active:
                processes.append(perftest(options, hosts[RECEIVER], job, [], is_v6, seconds, pathlib.Path(name)))
                listens(hosts[RECEIVER], FIRST_PORT + job.number)
            clients = [perftest(options, hosts[job.host], job, [f"10.80.0.{RECEIVER}"], is_v6, seconds, pathlib.Path(name))
                       for job in active]
            processes += clients
            time.sleep(SETTLE_S)
            before, begin = sent(switch), time.monotonic()
            time.sleep(options.seconds)
            after, took = sent(switch), time.monotonic() - begin
            for process, _ in processes:
                process.wait(timeout=seconds + END_S)
            reported = {job.number: payload(options, *client) for job, client in zip(active, clients)}
        finally:
            for process, log in processes:
                process.kill()
                process.wait()
                log.close()
    return {number: (after[number] - before.get(number, 0)) * 8 / took for number in after}, reported


def middle(values):
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def median(options, switch, hosts, active, is_v6):
    """Medians of several runs: one in which the processors were busy elsewhere tells nothing of the plan."""
    runs = [measure(options, switch, hosts, active, is_v6) for _ in range(options.runs)]
    return tuple({key: middle(run[part][key] for run in runs) for key in runs[0][part]} for part in range(2))


def head(options):
    jobs = [f"job {job.number}: {job.guarantee(options.rate) / 1e6:.0f}, {job.queue_pairs} queue pair{'s'[:job.queue_pairs > 1]}"
            for job in JOBS]
    print("| | " + " | ".join(jobs) + " | port |")
    print("|---" * (len(JOBS) + 2) + "|", flush=True)


def row(title, active, wire, reported, is_enforced):
    """Mbit/s on the wire, and in brackets perftest's payload."""
    cells = []
    for job in JOBS:
        own = f"{wire.get(0x100 | job.dscp, 0) / 1e6:.1f} " if is_enforced else ""
        payload_shown = f"({reported[job.number] / 1e6:.1f})" if reported.get(job.number) else "(unknown)"
        cells.append(own + payload_shown if job in active else "idle")
    total = sum(rate for number, rate in wire.items() if number != 1)
    print(f"| {title} | " + " | ".join(cells) + f" | {total / 1e6:.1f} |", flush=True)


def holds(options, wire):
    """Whether each job has its guarantee. One may have more: what another did not send in time."""
    return all(wire[0x100 | job.dscp] >= (1 - WITHIN) * job.guarantee(options.rate) for job in JOBS)


def uses_all(options, wire, active):
    """Whether the jobs that send use what the idle one leaves, and none has less than its guarantee."""
    rates = {job.number: wire[0x100 | job.dscp] for job in active}
    enough = all(rates[job.number] >= (1 - WITHIN) * job.guarantee(options.rate) for job in active)
    return enough and sum(rates.values()) >= (1 - LEFT_UNUSED) * options.rate * 1e6


def run(options):
    switch, hosts = network(options.mtu)
    good = True
    head(options)
    for is_v6 in (False, True):
        name = "IPv6" if is_v6 else "IPv4"
        enforce(options, switch, [])
        wire, reported = measure(options, switch, hosts, JOBS, is_v6)
        row(f"{name}, one queue", JOBS, wire, reported, False)
        enforce(options, switch, JOBS)
        wire, reported = median(options, switch, hosts, JOBS, is_v6)
        row(f"{name}, the plan", JOBS, wire, reported, True)
        good &= holds(options, wire)
        for idle in JOBS:
            active = [job for job in JOBS if job is not idle]
            wire, reported = median(options, switch, hosts, active, is_v6)
            row(f"{name}, the plan", active, wire, reported, True)
            good &= uses_all(options, wire, active)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    parser.add_argument("--dquant", default=str(target / "dquant"), help="the program [default: the release build]")
    parser.add_argument("--enforce", default=str(target / "examples" / "enforce"), help="the driver [default: the release build]")
    parser.add_argument("--seconds", type=int, default=10, help="measured part of each run [default: 10]")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case with the plan, of which the median counts [default: 3]")
    parser.add_argument("--rate", type=int, default=1000, help="of the port, in Mbit/s [default: 1000]")
    parser.add_argument("--mtu", type=int, default=9000, help="of all interfaces [default: 9000]")
    parser.add_argument("--check", action="store_true", help="exit status 1 unless guarantees hold")
    options = parser.parse_args()
    try:
        sandbox.need({"tc": "iproute2", "ss": "iproute2", "unshare": "util-linux", "ib_write_bw": "perftest"})
        for program in (options.dquant, options.enforce):
            if not pathlib.Path(program).exists():
                raise sandbox.Missing(f"{program} (see --help for how it is built)")
        sandbox.enter()
        good = run(options)
    except sandbox.Missing as missing:
        print(f"skipped: {missing}")
        return SKIPPED
    if options.check:
        print("\nguarantees hold" if good else "\nguarantees do not hold")
        return 0 if good else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
