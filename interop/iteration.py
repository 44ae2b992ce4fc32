#!/usr/bin/env python3
"""The iteration time of a training job beside a bulk job, with and without its bandwidth enforced.

Three hosts and a switch are network namespaces; every port, of hosts and of the switch, is a queue of HTB at the link's
rate. A ring job (`dquant job replay`, a rank on each host, DSCP 26) runs three times:

    alone          one queue at each port, nothing beside the job
    beside         the same, while `dquant perf` writes from the first host to the second as fast as it can
    enforced       the same bulk job, and at each port a class for the job's DSCP with its rate; what it leaves is the others'

Rates of classes are guarantees: each may borrow the whole link. The last line says how much longer the iterations are than
alone, at the 99th percentile of the slowest rank.

    python3 interop/iteration.py [--iterations 200] [--json]

Exit status: 0 the enforced job is within --within of alone; 1 it is not, or a byte was wrong; 77 the machine lacks
something (the reason is printed).
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import sandbox

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77
JOB_DSCP = 26
HOSTS = 3
ADDRESSES = [f"10.79.0.{number + 1}" for number in range(HOSTS)]
# Segmented sends are the unit of the queues: a turn of HTB holds a few of the largest, and so does a burst.
QUANTUM, BURST = 131_072, "256k"
# More than a window: a switch namespace gives no back-pressure, and losses are not what is measured.
BUFFER = "8mb"


def tc(arguments, prefix):
    done = subprocess.run([*prefix, "tc", *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise sandbox.Missing(f"tc {arguments}: {done.stderr.strip()}")


class Port:
    """An egress port: an interface in a namespace."""

    def __init__(self, net, name):
        self.net, self.name = net, name

    def clear(self):
        subprocess.run([*self.net.prefix, "tc", "qdisc", "del", "dev", self.name, "root"], capture_output=True)

    def shape(self, classes, link):
        """`classes`: DSCP, or none for all others, with the rate in Mbit/s. Each may borrow all of the link."""
        self.clear()
        tc(f"qdisc add dev {self.name} root handle 1: htb default 99", self.net.prefix)
        limit = f"burst {BURST} cburst {BURST} quantum {QUANTUM}"
        tc(f"class add dev {self.name} parent 1: classid 1:1 htb rate {link}mbit ceil {link}mbit {limit}", self.net.prefix)
        for dscp, rate in classes:
            number = 99 if dscp is None else dscp + 100
            tc(f"class add dev {self.name} parent 1:1 classid 1:{number} htb rate {rate}mbit ceil {link}mbit {limit}",
               self.net.prefix)
            tc(f"qdisc add dev {self.name} parent 1:{number} bfifo limit {BUFFER}", self.net.prefix)
            if dscp is not None:
                tc(f"filter add dev {self.name} parent 1: protocol ip u32 match ip dsfield {dscp << 2:#x} 0xfc "
                   f"flowid 1:{number}", self.net.prefix)


def network(mtu):
    """Hosts on a switch; returns them, and all ports."""
    switch = sandbox.Net()
    sandbox.ip("link add bridge type bridge", switch.prefix)
    sandbox.ip("link set bridge up", switch.prefix)
    hosts, ports = [], []
    for number, address in enumerate(ADDRESSES):
        host = sandbox.Net()
        sandbox.ip(f"link add eth0 netns {host.pid} mtu {mtu} type veth peer name port{number} netns {switch.pid} mtu {mtu}")
        sandbox.ip(f"addr add {address}/24 dev eth0", host.prefix)
        sandbox.ip(f"link set port{number} master bridge", switch.prefix)
        sandbox.ip(f"link set port{number} up", switch.prefix)
        sandbox.ip("link set eth0 up", host.prefix)
        sandbox.keep_order(host, "eth0")
        sandbox.keep_order(switch, f"port{number}")
        hosts.append(host)
        ports += [Port(host, "eth0"), Port(switch, f"port{number}")]
    return hosts, ports


class Bulk:
    """A bulk job from the first host to the second, for as long as it is entered."""

    def __init__(self, options, hosts):
        self.options, self.hosts, self.processes = options, hosts, []

    def __enter__(self):
        server = [*self.hosts[1].prefix, self.options.dquant, "perf", "serve", ADDRESSES[1]]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.processes.append(subprocess.Popen(server, **quiet))
        time.sleep(0.5)
        client = [*self.hosts[0].prefix, self.options.dquant, "perf", ADDRESSES[1], "write", "--size", "256KiB", "--mode",
                  "bandwidth", "--qps", str(self.options.bulk_qps), "--seconds", "3600s", "--cc", self.options.cc]
        self.processes.append(subprocess.Popen(client, **quiet))
        time.sleep(1.5)
        if self.processes[-1].poll() is not None:
            raise sandbox.Missing("the bulk job has ended")
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


def sent_bytes(port):
    shown = subprocess.run([*port.net.prefix, "cat", f"/sys/class/net/{port.name}/statistics/tx_bytes"],
                           capture_output=True, text=True, check=True)
    return int(shown.stdout)


def replay(options, hosts, port):
    """The job's results by rank, and Mbit/s on `port` meanwhile."""
    ranks = []
    began, before = time.monotonic(), sent_bytes(port)
    for rank in reversed(range(HOSTS)):
        command = [options.dquant, "job", "replay", f"ring:{HOSTS}@{options.rate}M", "--rank", str(rank), "--peers",
                   ",".join(ADDRESSES), "--iterations", str(options.iterations), "--compute", options.compute,
                   "--bytes-per-edge", options.bytes_per_edge, "--dscp", str(JOB_DSCP), "--cc", options.cc, "--json"]
        ranks.append(subprocess.Popen([*hosts[rank].prefix, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    results = []
    for rank in ranks:
        out, said = rank.communicate(timeout=600)
        if rank.returncode:
            raise SystemExit(f"a rank ended with {rank.returncode}: {said.strip()}")
        results.append(json.loads(out.splitlines()[-1]))
    mbps = (sent_bytes(port) - before) * 8 / (time.monotonic() - began) / 1e6
    return results, mbps


def slowest(results, what, share):
    return max(result[what][share] for result in results)


def run(options):
    hosts, ports = network(options.mtu)
    link, rate = options.link, options.rate
    plain = [(None, link)]
    divided = [(JOB_DSCP, rate), (None, link - rate)]
    rows = []
    for name, classes, has_bulk in (("alone", plain, False), ("beside", plain, True), ("enforced", divided, True)):
        for port in ports:
            port.shape(classes, link)
        # The port of the switch towards the second host: the ring's edge and the bulk job share it.
        shared = ports[3]
        if has_bulk:
            with Bulk(options, hosts):
                results, mbps = replay(options, hosts, shared)
        else:
            results, mbps = replay(options, hosts, shared)
        row = {"case": name, "port_mbps": round(mbps, 1)}
        for what in ("iteration_ms", "exchange_ms"):
            row[what] = {share: round(slowest(results, what, share), 3) for share in ("p50", "p90", "p99", "max")}
        row["wrong_messages"] = sum(result["wrong_messages"] for result in results)
        row["retransmitted"] = sum(result["retransmitted"] for result in results)
        rows.append(row)
        if not options.json:
            show(row)
    return rows


def show(row):
    if row["case"] == "alone":
        print(f"{'':<10}{'iteration ms':>34}{'exchange ms':>22}{'port':>10}{'sent':>8}")
        print(f"{'':<10}{'p50':>10}{'p90':>8}{'p99':>8}{'max':>8}{'p50':>11}{'p99':>11}{'Mbit/s':>10}{'again':>8}")
    iteration, exchange = row["iteration_ms"], row["exchange_ms"]
    print(f"{row['case']:<10}{iteration['p50']:>10.1f}{iteration['p90']:>8.1f}{iteration['p99']:>8.1f}{iteration['max']:>8.1f}"
          f"{exchange['p50']:>11.1f}{exchange['p99']:>11.1f}{row['port_mbps']:>10.1f}{row['retransmitted']:>8}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dquant", default=str(ROOT / "target" / "release" / "dquant"), help="the program [default: the release build]")
    parser.add_argument("--iterations", type=int, default=200, help="of each case [default: 200]")
    parser.add_argument("--compute", default="50ms", help="pause of an iteration [default: 50ms]")
    parser.add_argument("--bytes-per-edge", default="4MiB", help="what a rank sends in an iteration [default: 4MiB]")
    parser.add_argument("--link", type=int, default=1000, metavar="MBIT", help="rate of every port [default: 1000]")
    parser.add_argument("--rate", type=int, default=900, metavar="MBIT", help="what the job is guaranteed [default: 900]")
    parser.add_argument("--mtu", type=int, default=9000, help="of the links [default: 9000]")
    parser.add_argument("--cc", default="auto", help="congestion control of both jobs [default: auto]")
    parser.add_argument("--bulk-qps", type=int, default=2, help="queue pairs of the bulk job [default: 2]")
    parser.add_argument("--within", type=float, default=1.1, metavar="RATIO", help="most of enforced to alone [default: 1.1]")
    parser.add_argument("--json", action="store_true", help="one JSON object for each case, and one for the ratios")
    options = parser.parse_args()
    try:
        sandbox.need({"tc": "iproute2", "unshare": "util-linux"})
        if not pathlib.Path(options.dquant).exists():
            raise sandbox.Missing(f"{options.dquant} (cargo build --release -p dquant)")
        sandbox.enter()
        rows = run(options)
    except sandbox.Missing as missing:
        print(f"skipped: {missing}")
        return SKIPPED
    alone, beside, enforced = (row["iteration_ms"]["p99"] for row in rows)
    ratios = {"beside": round(beside / alone, 3), "enforced": round(enforced / alone, 3), "within": options.within}
    if options.json:
        for row in [*rows, {"p99_to_alone": ratios}]:
            print(json.dumps(row))
    else:
        print(f"p99 against alone: {ratios['beside']} beside the bulk job, {ratios['enforced']} enforced (at most {options.within})")
    is_good = enforced <= options.within * alone and not any(row["wrong_messages"] for row in rows)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
