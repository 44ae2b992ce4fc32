#!/usr/bin/env python3
"""A cluster from end to end: three hosts and a switch in network namespaces, brains, an agent each, and jobs that really send.

Two brains share an etcd; each host and the switch has `dquant agent`, which governs its ports by HTB. Three jobs are submitted:
`llm`, a ring whose iterations `dquant job replay` runs, and two tenants that send as fast as they can with `ib_write_bw` under
`dquant run --job`. All of them send to one host, so its port of the switch is contended. Measured are what each job gets and
how long an iteration takes: alone, beside the tenants without enforcement, with it, and while the leading brain is killed.

    cargo build --release -p dquant -p ibverbs
    python3 interop/cluster.py [--seconds 10] [--rate 1000] [--check]

Exit status: 0 (with --check: guarantees hold, and an iteration takes at most 1.1 times what it takes alone); 1 it does not; 77 the machine lacks something, which is printed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import sandbox

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77
TOKEN = "end-to-end-token"
HOSTS, SWITCH_HOST = (1, 2, 3), 254
BRAIN_PORT, ETCD_PORT = 4795, 2379
ENVIRONMENT = {"DQUANT_PATH": "udp", "DQUANT_CONGESTION": "auto", "DQUANT_TOKEN": TOKEN}
SETTLE_S = 3
# Of the iteration time alone, at the 99th percentile.
ALLOWED = 1.10
# A guarantee holds if no less than this part of it is sent.
HOLDS = 0.98


def address(host):
    return f"10.81.0.{host}"


class Job:
    """A tenant's job: of its ring's edges, the one into the contended host carries perftest."""

    def __init__(self, name, part, slots, queue_pairs, port, latency):
        self.name, self.part, self.slots, self.queue_pairs, self.port, self.latency = name, part, slots, queue_pairs, port, latency

    def text(self, rate):
        return f"ring:3@{round(self.part * rate)}M slots={self.slots} most=host:1 latency={self.latency}"

    def guarantee(self, rate):
        return round(self.part * rate) * 1e6


# Hosts have 15 slots: one worker of each job fits, no two of one job, and one slot is left.
LLM = Job("llm", 0.60, 8, 0, 0, "low")
TENANTS = [Job("batch", 0.20, 4, 2, 18701, "bulk"), Job("scan", 0.14, 2, 8, 18702, "bulk")]
JOBS = [LLM, *TENANTS]


class Cluster:
    """Namespaces, daemons and the commands of a user."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.started, self.logs = [], {}
        self.switch, self.hosts = self.network()
        self.topology = folder / "cluster.toml"
        lines = ['[[switch]]\nname = "sw"\n']
        lines += [f'[[host]]\nname = "host{host}"\n' for host in HOSTS]
        lines += [f'[[link]]\nends = ["host{host}:1", "sw:{host}"]\nrate = "{options.rate}Mbit"\n' for host in HOSTS]
        self.topology.write_text("\n".join(lines))
        self.brains = ",".join(f"{address(host)}:{BRAIN_PORT}" for host in HOSTS[:2])

    def network(self):
        mtu = self.options.mtu
        switch, hosts = sandbox.Net(), {}
        sandbox.ip("link add name bridge type bridge", switch.prefix)
        sandbox.ip("link set bridge up", switch.prefix)
        sandbox.ip(f"addr add {address(SWITCH_HOST)}/24 dev bridge", switch.prefix)
        for number in HOSTS:
            host = hosts[number] = sandbox.Net()
            sandbox.ip(f"link add eth netns {host.pid} mtu {mtu} type veth peer name port{number} netns {switch.pid} mtu {mtu}")
            sandbox.ip(f"link set port{number} master bridge", switch.prefix)
            sandbox.ip(f"link set port{number} up", switch.prefix)
            sandbox.ip(f"addr add {address(number)}/24 dev eth", host.prefix)
            sandbox.ip("link set eth up", host.prefix)
            sandbox.keep_order(host, "eth")
            sandbox.keep_order(switch, f"port{number}")
        return switch, hosts

    def start(self, name, prefix, command, **extra):
        log = open(self.folder / f"{name}.log", "w+")
        environment = {**os.environ, **ENVIRONMENT, **extra}
        process = subprocess.Popen([*prefix, *command], stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        self.started.append(process)
        self.logs[name] = log
        return process

    def text(self, name):
        self.logs[name].seek(0)
        return self.logs[name].read()

    def wait_for(self, name, wanted, seconds=20):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = re.search(wanted, self.text(name))
            if found:
                return found
            time.sleep(0.05)
        raise sandbox.Missing(f"{name} did not say '{wanted}' in {seconds} s: {self.text(name).strip()[-600:]}")

    def end(self, process, hard=True):
        """Ends a process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL if hard else signal.SIGTERM)
        process.wait()

    def close(self):
        for process in reversed(self.started):
            self.end(process)
        rescued = [name for name in self.logs if sandbox.RESCUED in self.text(name)]
        for log in self.logs.values():
            log.close()
        if rescued:
            raise SystemExit(f"{', '.join(rescued)}: {sandbox.RESCUED}")

    def etcd(self):
        url = f"http://{address(SWITCH_HOST)}:{ETCD_PORT}"
        peer = f"http://127.0.0.1:{ETCD_PORT + 1}"
        command = ["etcd", "--name", "one", "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url,
                   "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"]
        self.start("etcd", self.switch.prefix, command)
        self.wait_for("etcd", r"ready to serve client requests")

    def brain(self, host):
        command = [self.options.dquant, "brain", "--topology", str(self.topology), "--slots", "15", "--listen", f"{address(host)}:{BRAIN_PORT}",
                   "--etcd", f"{address(SWITCH_HOST)}:{ETCD_PORT}", "--switch-agents", "all"]
        process = self.start(f"brain{host}", self.hosts[host].prefix, command)
        self.wait_for(f"brain{host}", r"brain ready")
        return process

    def agents(self):
        mine = {f"host{host}": (self.hosts[host].prefix, [(1, "eth")]) for host in HOSTS}
        mine["sw"] = (self.switch.prefix, [(host, f"port{host}") for host in HOSTS])
        self.running = []
        for node, (prefix, ports) in mine.items():
            command = [self.options.dquant, "agent", "--node", node, "--brain", self.brains, "--state", str(self.folder / f"{node}.state"),
                       "--socket", str(self.folder / f"{node}.sock"), "--paces", ""]
            command += [word for port, interface in ports for word in ("--port", f"{port}={interface}:{self.options.rate}Mbit")]
            self.running.append(self.start(f"agent-{node}", prefix, command))
        for node in mine:
            self.wait_for(f"agent-{node}", r"follows brain")

    def dquant(self, *command):
        """What a user on the first host runs."""
        done = subprocess.run([*self.hosts[1].prefix, self.options.dquant, *command, "--brain", self.brains], capture_output=True, text=True,
                              env={**os.environ, **ENVIRONMENT})
        if done.returncode:
            raise sandbox.Missing(f"dquant {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def view(self):
        return json.loads(self.dquant("job", "list", "--json"))

    def submit(self, job):
        report = json.loads(self.dquant("job", "submit", job.text(self.options.rate), "--name", job.name, "--json"))
        ranks = {rank: int(run["host"].removeprefix("host")) for run in report["workers"] for rank in range(run["first"], run["last"] + 1)}
        job.number, job.dscp, job.hosts = report["job"], report["dscp"], [ranks[rank] for rank in sorted(ranks)]

    def enforced(self, jobs):
        """Waits until the switch's port has a class for each of them."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if all(0x100 | job.dscp in self.sent() for job in jobs):
                return
            time.sleep(0.1)
        raise sandbox.Missing(f"the switch's agent did not enforce: {self.text('agent-sw').strip()[-400:]}")

    def sent(self):
        """Bytes by class of the contended port."""
        command = [*self.switch.prefix, "tc", "-s", "class", "show", "dev", f"port{HOSTS[-1]}"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {int(number, 16): int(count) for number, count in re.findall(r"class htb daa0:([0-9a-f]+) .*?Sent (\d+) bytes", text, re.DOTALL)}

    def received(self):
        """Bytes that left the contended port."""
        command = [*self.switch.prefix, "cat", f"/sys/class/net/port{HOSTS[-1]}/statistics/tx_bytes"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def plain(self):
        """A port of that rate with one queue, as a switch without guarantees has it."""
        for host in HOSTS:
            command = f"qdisc replace dev port{host} root tbf rate {self.options.rate}mbit burst 128k limit 2m"
            subprocess.run([*self.switch.prefix, "tc", *command.split()], check=True)

    def unplain(self):
        for host in HOSTS:
            subprocess.run([*self.switch.prefix, "tc", "qdisc", "del", "dev", f"port{host}", "root"], check=False, capture_output=True)

    def tenant(self, job, seconds):
        """perftest over the edge of the job's ring that ends in the contended host; its server and its client."""
        rank = job.hosts.index(HOSTS[-1])
        sender = job.hosts[rank - 1]
        ends = []
        for host, peer in ((HOSTS[-1], []), (sender, [address(HOSTS[-1])])):
            command = [self.options.dquant, "run", "--devices", "eth", "--job", job.name, "--", "ib_write_bw", "-d", "dq_eth", "-x", "0", "-s", "65536",
                       "-q", str(job.queue_pairs), "-t", "32", "-D", str(seconds), "-p", str(job.port), *peer]
            name = f"{job.name}-{'client' if peer else 'server'}"
            ends.append(self.start(name, self.hosts[host].prefix, command, DQUANT_AGENT=str(self.folder / f"host{host}.sock")))
            if not peer:
                self.listens(host, job.port)
        return ends

    def listens(self, host, port):
        for _ in range(200):
            shown = subprocess.run([*self.hosts[host].prefix, "ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True)
            if shown.stdout.strip():
                return
            time.sleep(0.05)
        raise sandbox.Missing(f"no server on port {port}")

    def ring(self, iterations):
        """All ranks of the replayed job; times of its iterations in milliseconds."""
        peers = ",".join(address(host) for host in LLM.hosts)
        ranks = []
        for rank, host in enumerate(LLM.hosts):
            command = [self.options.dquant, "job", "replay", f"ring:3@{round(LLM.part * self.options.rate)}M", "--rank", str(rank), "--peers", peers,
                       "--iterations", str(iterations), "--bytes-per-edge", self.options.bytes, "--compute", self.options.compute, "--job", LLM.name, "--json",
                       "--device", "dq_eth", "--verbs-library", self.options.library]
            # As the tenants do: one UDP port for all processes of a host.
            ranks.append(self.start(f"ring{rank}", self.hosts[host].prefix, command, DQUANT_AGENT=str(self.folder / f"host{host}.sock"),
                                    DQUANT_DEVICES="eth"))
        return ranks

    def iterations(self, ranks, seconds):
        for rank, process in enumerate(ranks):
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise sandbox.Missing(f"rank {rank} did not end: {self.text(f'ring{rank}').strip()[-400:]}")
            if process.returncode:
                raise sandbox.Missing(f"rank {rank}: {self.text(f'ring{rank}').strip()[-600:]}")
        slowest = {}
        for rank in range(len(ranks)):
            for line in self.text(f"ring{rank}").splitlines():
                with contextlib.suppress(ValueError, KeyError):
                    entry = json.loads(line)
                    took = 1000 * entry["seconds"]
                    slowest[entry["iteration"]] = max(took, slowest.get(entry["iteration"], 0))
        # The first ones find their rate.
        return [slowest[number] for number in sorted(slowest)][self.options.warm_up:]


def percentile(times, part):
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


def measure(cluster, title, tenants, during=None):
    """Runs the ring, beside the tenants if there are any; returns its times and what each tenant gets in bit/s."""
    options = cluster.options
    seconds = options.seconds + 3 * SETTLE_S
    running = [end for job in tenants for end in cluster.tenant(job, seconds)]
    if running:
        time.sleep(SETTLE_S)
    before, begun, all_before = cluster.sent(), time.monotonic(), cluster.received()
    ranks = cluster.ring(options.iterations)
    said = during() if during else None
    times = cluster.iterations(ranks, 60 + 20 * options.seconds)
    after, took, all_after = cluster.sent(), time.monotonic() - begun, cluster.received()
    for process in running:
        cluster.end(process)
    rates = {job.name: (after[0x100 | job.dscp] - before.get(0x100 | job.dscp, 0)) * 8 / took
             for job in JOBS if 0x100 | job.dscp in after}
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    shown = ", ".join(f"{name} {rate / 1e6:.0f}" for name, rate in rates.items()) or "one queue"
    print(f"| {title} | {len(times)} | {p50:.1f} | {p99:.1f} | {max(times):.1f} | {shown} | {(all_after - all_before) * 8 / took / 1e6:.0f} |", flush=True)
    return times, rates, said


def failover(cluster, leaders):
    """Kills the leader, and times the next admission."""
    def happen():
        time.sleep(cluster.options.seconds / 3)
        listed = next(host for host in leaders if re.search(r"leads in term", cluster.text(f"brain{host}")))
        cluster.end(leaders[listed])
        begun = time.monotonic()
        cluster.dquant("job", "submit", "ring:2@1M", "--name", "after", "--json")
        took = time.monotonic() - begun
        cluster.dquant("job", "cancel", "after")
        return listed, took
    return happen


def run(options, folder):
    cluster = Cluster(options, folder)
    with contextlib.closing(cluster):
        cluster.etcd()
        leaders = {host: cluster.brain(host) for host in HOSTS[:2]}
        cluster.agents()
        for job in JOBS:
            cluster.submit(job)
        print(cluster.dquant("job", "list"))
        cluster.enforced(JOBS)
        print("| | iterations | p50, ms | p99, ms | slowest, ms | on the wire into host3, Mbit/s | port, Mbit/s |\n|---|---|---|---|---|---|---|")
        alone, _, _ = measure(cluster, "alone", [])
        with_, rates, _ = measure(cluster, "beside the tenants, enforced", TENANTS)
        killed, later, (dead, took) = measure(cluster, "the same, leading brain killed", TENANTS, failover(cluster, leaders))
        ends = [end for job in TENANTS for end in cluster.tenant(job, 12)]
        ranks = cluster.ring(100_000)
        time.sleep(SETTLE_S + 2)
        explained = "\n\n".join(cluster.dquant("job", "explain", job.name).strip() for job in (LLM, TENANTS[0]))
        for process in (*ranks, *ends):
            cluster.end(process)
        # Sockets and DSCPs stay, queues go: the agents would put them back.
        for process in cluster.running:
            process.send_signal(signal.SIGSTOP)
        cluster.plain()
        without = None
        if options.without:
            with contextlib.ExitStack() as stack:
                for process in cluster.running[:3]:
                    process.send_signal(signal.SIGCONT)
                stack.callback(cluster.unplain)
                for host in HOSTS:
                    subprocess.run([*cluster.hosts[host].prefix, "tc", "qdisc", "del", "dev", "eth", "root"], check=False, capture_output=True)
                without, _, _ = measure(cluster, "beside the tenants, one queue", TENANTS)
        print(f"\nthe leader on host{dead} was killed; the next job was admitted after {took:.2f} s\n\n{explained}")
        base = percentile(alone, 0.99)
        good = percentile(with_, 0.99) <= ALLOWED * base and percentile(killed, 0.99) <= ALLOWED * base
        for job in TENANTS:
            good &= rates[job.name] >= HOLDS * job.guarantee(options.rate) and later[job.name] >= HOLDS * job.guarantee(options.rate)
        print(f"p99 of alone: {percentile(with_, 0.99) / base:.3f} enforced, {percentile(killed, 0.99) / base:.3f} with the brain killed"
              + (f", {percentile(without, 0.99) / base:.3f} without enforcement" if without else ""))
        return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    parser.add_argument("--dquant", default=str(target / "dquant"), help="the program [default: the release build]")
    parser.add_argument("--library", default=str(target / "libibverbs.so"), help="the drop-in library [default: the release build]")
    parser.add_argument("--seconds", type=int, default=20, help="about how long each run takes [default: 20]")
    parser.add_argument("--iterations", type=int, default=120, help="of the ring in each run [default: 120]")
    parser.add_argument("--warm-up", type=int, default=5, help="iterations that are not counted [default: 5]")
    parser.add_argument("--bytes", default="1MiB", help="that each edge carries in an iteration [default: 1MiB]")
    parser.add_argument("--compute", default="50ms", help="pause of each iteration [default: 50ms]")
    parser.add_argument("--rate", type=int, default=1000, help="of all ports, in Mbit/s [default: 1000]")
    parser.add_argument("--mtu", type=int, default=9000, help="of all interfaces [default: 9000]")
    parser.add_argument("--without", action=argparse.BooleanOptionalAction, default=True, help="also measure without enforcement")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the logs there")
    parser.add_argument("--check", action="store_true", help="exit status 1 unless guarantees hold")
    options = parser.parse_args()
    try:
        sandbox.need({"tc": "iproute2", "ss": "iproute2", "unshare": "util-linux", "ib_write_bw": "perftest", "etcd": "etcd-server"})
        if not pathlib.Path(options.dquant).exists():
            raise sandbox.Missing(f"{options.dquant} (cargo build --release -p dquant)")
        sandbox.enter()
        with tempfile.TemporaryDirectory() as name:
            try:
                good = run(options, pathlib.Path(name))
            finally:
                if options.keep:
                    shutil.copytree(name, options.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", "etcd"))
    except sandbox.Missing as missing:
        print(f"skipped: {missing}")
        return SKIPPED
    if options.check:
        print("guarantees hold" if good else "guarantees do not hold")
        return 0 if good else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
