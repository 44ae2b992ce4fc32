#!/usr/bin/env python3
"""Two training jobs that take turns on a link: their iteration times alone, together, and with the shifts of a brain.

Four hosts and two switches are network namespaces; the link between the switches and every other one is a queue at the same
rate. Jobs `a` and `b` are rings of two ranks (`dquant job replay`) with one host each at either switch: they share the link
between the switches and nothing else. An iteration is a pause and then an exchange that has the link to itself for about a
third of the period.

    alone       each job by itself
    together    both begin at one time, and exchange at one time in each iteration
    shifts      the same, once each job was submitted to `dquant brain` with the cycle that it has alone, and each host's
                `dquant agent --enforce none` keeps the times of the brain's plan

Ranks ask their agent for the DSCP (--job).

    cargo build --release -p dquant
    python3 interop/shifts.py [--iterations 100] [--check]

Exit status: 0 (with --check: with shifts both medians are at most --within of alone, and no gate was dropped); 1 that is not
so, or a byte was wrong; 77 the machine lacks something (the reason is printed).
"""

import argparse
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

import sandbox
from iteration import Port

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77
# DSCP and hosts of each job, until the brain says where it is.
JOBS = {"a": (26, (1, 2)), "b": (27, (3, 4))}
# By host: its switch.
SWITCHES = {1: 0, 2: 1, 3: 0, 4: 1}
BRAIN, TOKEN = "10.82.0.1:4795", "shifts-token"
# Ranks meet, and begin together after that.
MEET_S = 4


def address(host):
    return f"10.82.0.{host}"


def network(options):
    """Namespaces by host, and all ports."""
    mtu, hosts, ports = options.mtu, {}, []
    switches = [sandbox.Net() for _ in range(2)]
    for switch in switches:
        sandbox.ip("link add bridge type bridge", switch.prefix)
        sandbox.ip("link set bridge up", switch.prefix)

    def joined(switch, name):
        sandbox.ip(f"link set {name} master bridge", switch.prefix)
        sandbox.ip(f"link set {name} up", switch.prefix)
        sandbox.keep_order(switch, name)
        ports.append(Port(switch, name))

    left, right = switches
    sandbox.ip(f"link add trunk netns {left.pid} mtu {mtu} type veth peer name trunk netns {right.pid} mtu {mtu}")
    for switch in switches:
        joined(switch, "trunk")
    for number, at in SWITCHES.items():
        switch, host = switches[at], sandbox.Net()
        sandbox.ip(f"link add eth0 netns {host.pid} mtu {mtu} type veth peer name port{number} netns {switch.pid} mtu {mtu}")
        sandbox.ip(f"addr add {address(number)}/24 dev eth0", host.prefix)
        joined(switch, f"port{number}")
        sandbox.ip("link set eth0 up", host.prefix)
        sandbox.keep_order(host, "eth0")
        hosts[number] = host
        ports.append(Port(host, "eth0"))
    for port in ports:
        port.shape([(None, options.link)], options.link)
    return hosts


class Cluster:
    """A brain on the first host and an agent on each, for as long as it is entered."""

    def __init__(self, options, hosts, folder):
        self.options, self.hosts, self.folder, self.running, self.jobs = options, hosts, folder, {}, dict(JOBS)

    def paths(self, host):
        return {name: self.folder / f"host{host}.{name}" for name in ("state", "sock", "paces")}

    def environment(self, host):
        paths = self.paths(host)
        return {"DQUANT_AGENT": str(paths["sock"]), "DQUANT_PACES": str(paths["paces"])}

    def topology(self):
        lines = ['[[switch]]\nname = "sw0"\n', '[[switch]]\nname = "sw1"\n']
        lines += [f'[[host]]\nname = "host{host}"\n' for host in SWITCHES]
        ends = [("sw0:1", "sw1:1")] + [(f"host{host}:1", f"sw{at}:{host + 1}") for host, at in SWITCHES.items()]
        lines += [f'[[link]]\nends = ["{one}", "{other}"]\nrate = "{self.options.link}Mbit"\n' for one, other in ends]
        path = self.folder / "cluster.toml"
        path.write_text("\n".join(lines))
        return str(path)

    def start(self, name, host, *command):
        with open(self.folder / f"{name}.log", "w") as log:
            self.running[name] = subprocess.Popen([*self.hosts[host].prefix, self.options.dquant, *command], stdout=log, stderr=subprocess.STDOUT,
                                                  env={**os.environ, "DQUANT_TOKEN": TOKEN})

    def __enter__(self):
        self.start("brain", 1, "brain", "--topology", self.topology(), "--slots", "1", "--state", str(self.folder / "brain.redb"), "--listen", BRAIN)
        self.wait_for("brain", "leads in term")
        for host in self.hosts:
            paths = self.paths(host)
            self.start(f"host{host}", host, "agent", "--node", f"host{host}", "--port", f"1=eth0:{self.options.link}Mbit", "--enforce", "none",
                       "--state", str(paths["state"]), "--socket", str(paths["sock"]), "--paces", str(paths["paces"]), "--brain", BRAIN)
        for host in self.hosts:
            self.wait_for(f"host{host}", "follows brain")
        return self

    def __exit__(self, *_):
        for process in self.running.values():
            process.kill()
            process.wait()

    def said(self, name):
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name, text):
        until = time.monotonic() + 20
        while text not in self.said(name):
            if time.monotonic() > until or self.running[name].poll() is not None:
                raise sandbox.Missing(f"{name}: {self.said(name).strip()[-600:]}")
            time.sleep(0.05)

    def dquant(self, *command):
        done = subprocess.run([*self.hosts[1].prefix, self.options.dquant, "job", *command, "--brain", BRAIN], capture_output=True, text=True,
                              env={**os.environ, "DQUANT_TOKEN": TOKEN})
        if done.returncode:
            raise SystemExit(f"dquant job {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, name, row):
        """With the cycle that it had alone, in whole milliseconds."""
        period, exchange = math.ceil(row["iteration_ms"]["p50"]), math.ceil(row["exchange_ms"]["p50"])
        text = f"ring:2@{self.options.link * 2 // 5}M spread=leaves:2 cycle={period}ms/{exchange}ms"
        report = json.loads(self.dquant("submit", text, "--name", name, "--json"))
        hosts = {rank: int(run["host"].removeprefix("host")) for run in report["workers"] for rank in range(run["first"], run["last"] + 1)}
        self.jobs[name] = (report["dscp"], tuple(hosts[rank] for rank in sorted(hosts)))
        return text

    def explained(self, name):
        """What `dquant job explain` says of its turns."""
        return next((line for line in self.dquant("explain", name).splitlines() if "turn" in line), "it takes no turns")

    def settle(self):
        """Waits until each agent has put the last plan into force."""
        time.sleep(2)
        for name, (_, hosts) in self.jobs.items():
            for host in hosts:
                self.wait_for(f"host{host}", "guarantees of 1 job are in force")

    def exchanges(self, host, name):
        """Begun, milliseconds waited, and late ones, from the file that senders share: a line of 64 bytes for each DSCP."""
        line = (self.paths(host)["paces"] / "buckets").read_bytes()[64 * self.jobs[name][0]:]
        begun, waited_ns, late = struct.unpack_from("=3Q", line, 32)
        return begun, waited_ns / 1e6, late


# ---- runs --------------------------------------------------------------------------------------------------------------


def replay(options, hosts, jobs, names, environment):
    """Runs these jobs from one time on; results by job, each the slowest of its ranks."""
    start_at = f"{time.time() + MEET_S:.3f}"
    running = []
    for name in names:
        dscp, members = jobs[name]
        peers = ",".join(address(host) for host in members)
        for rank, host in enumerate(members):
            own = environment(host)
            marked = ["--job", name] if "DQUANT_AGENT" in own else ["--dscp", str(dscp)]
            command = [options.dquant, "job", "replay", f"ring:{len(members)}@{options.link}M", "--rank", str(rank), "--peers", peers, "--json",
                       "--iterations", str(options.iterations), "--warm-up", "5", "--compute", options.compute, "--cc", options.cc,
                       "--bytes-per-edge", options.bytes_per_edge, "--start-at", start_at, *marked]
            running.append((name, subprocess.Popen([*hosts[host].prefix, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                                   env={**os.environ, **own})))
    ranks = {name: [] for name in names}
    for name, process in running:
        out, said = process.communicate(timeout=900)
        if process.returncode:
            raise SystemExit(f"a rank of job {name} ended with {process.returncode}: {said.strip()}")
        ranks[name].append(json.loads(out.splitlines()[-1]))
    results = {}
    for name, own in ranks.items():
        row = {what: {share: round(max(rank[what][share] for rank in own), 3) for share in ("p50", "p90", "p99", "max")}
               for what in ("iteration_ms", "exchange_ms")}
        results[name] = row | {"wrong_messages": sum(rank["wrong_messages"] for rank in own)}
    return results


def show(options, case, results):
    for name, row in results.items():
        if options.json:
            print(json.dumps({"case": case, "job": name, **row}), flush=True)
            continue
        iteration, exchange = row["iteration_ms"], row["exchange_ms"]
        print(f"{case:<10}{name:<4}{iteration['p50']:>10.1f}{iteration['p90']:>8.1f}{iteration['p99']:>8.1f}{iteration['max']:>8.1f}"
              f"{exchange['p50']:>11.1f}{exchange['p99']:>11.1f}", flush=True)


def run(options, folder):
    hosts = network(options)
    if not options.json:
        print(f"{'':<14}{'iteration ms':>34}{'exchange ms':>22}")
        print(f"{'case':<10}{'job':<4}{'p50':>10}{'p90':>8}{'p99':>8}{'max':>8}{'p50':>11}{'p99':>11}")
    without = lambda host: {"DQUANT_PACES": ""}
    alone = {}
    for name in JOBS:
        alone |= replay(options, hosts, JOBS, [name], without)
    show(options, "alone", alone)
    together = replay(options, hosts, JOBS, JOBS, without)
    show(options, "together", together)
    with Cluster(options, hosts, folder) as cluster:
        texts = {name: cluster.submit(name, alone[name]) for name in JOBS}
        turns = {name: cluster.explained(name) for name in JOBS}
        cluster.settle()
        shifts = replay(options, hosts, cluster.jobs, JOBS, cluster.environment)
        show(options, "shifts", shifts)
        dropped = [text for host in hosts for text in cluster.said(f"host{host}").splitlines() if "does not keep" in text]
        waits = {f"host{host}": cluster.exchanges(host, name) for name, (_, members) in cluster.jobs.items() for host in members}
    ratios = {name: {"together": round(together[name]["iteration_ms"]["p50"] / alone[name]["iteration_ms"]["p50"], 3),
                     "shifts": round(shifts[name]["iteration_ms"]["p50"] / alone[name]["iteration_ms"]["p50"], 3)} for name in JOBS}
    summary = {"jobs": texts, "turns": turns, "p50_to_alone": ratios, "dropped": dropped,
               "exchanges": {host: {"begun": begun, "waited_ms": round(waited / max(begun, 1), 2), "late": late}
                             for host, (begun, waited, late) in waits.items()}}
    if options.json:
        print(json.dumps(summary))
    else:
        print("\nmedian iteration against alone: "
              + ", ".join(f"{name} {own['together']} together, {own['shifts']} with shifts" for name, own in ratios.items()))
        for name in JOBS:
            print(f"job {name}: {texts[name]}\n  {turns[name]}")
        for host, own in summary["exchanges"].items():
            print(f"{host}: {own['begun']} exchanges, waited {own['waited_ms']} ms each, {own['late']} beyond the tolerance")
        for text in dropped:
            print(text)
    is_whole = not any(row["wrong_messages"] for rows in (alone, together, shifts) for row in rows.values())
    keeps = not dropped and all(own["shifts"] <= options.within for own in ratios.values())
    return is_whole and (keeps or not options.check)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    parser.add_argument("--dquant", default=str(target / "dquant"), help="the program [default: the release build]")
    parser.add_argument("--iterations", type=int, default=100, help="of each case [default: 100]")
    parser.add_argument("--compute", default="265ms", help="pause of an iteration [default: 265ms]")
    parser.add_argument("--bytes-per-edge", default="8MiB", help="what a rank sends in an iteration [default: 8MiB]")
    parser.add_argument("--link", type=int, default=500, metavar="MBIT", help="rate of every link [default: 500]")
    parser.add_argument("--mtu", type=int, default=9000, help="of the links [default: 9000]")
    parser.add_argument("--cc", default="off", help="congestion control of both jobs [default: off, so that only turns differ]")
    parser.add_argument("--within", type=float, default=1.05, metavar="RATIO", help="most of shifts to alone [default: 1.05]")
    parser.add_argument("--json", action="store_true", help="one JSON object for each job of each case, and one for the ratios")
    parser.add_argument("--check", action="store_true", help="exit status 1 unless the jobs take turns")
    options = parser.parse_args()
    try:
        sandbox.need({"tc": "iproute2", "unshare": "util-linux"})
        if not pathlib.Path(options.dquant).exists():
            raise sandbox.Missing(f"{options.dquant} (cargo build --release -p dquant)")
        sandbox.enter()
        with tempfile.TemporaryDirectory() as folder:
            good = run(options, pathlib.Path(folder))
    except sandbox.Missing as missing:
        print(f"skipped: {missing}")
        return SKIPPED
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
