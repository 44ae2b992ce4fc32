#!/usr/bin/env python3
"""Runs one case on the simulated and on the real UDP wire, with the same congestion control, and compares them.

The case is scenarios/slow-link.toml: two flows over 200 Mbit/s with 50 ms of queue; the second one begins later and ends
earlier. Here the slow link is a token bucket in a router between network namespaces, and the flows are two
`dquant perf` clients. Both sides write samples of their queue pairs, and `dquant sim compare` puts them side by side.

    python3 interop/two_wires.py [--control delay] [--plot both.svg]

Exit status: 0 the figures agree within --within percent (throughput of each flow in each phase), or none was asked for;
1 they do not; 77 the machine lacks something (the reason is printed).
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import sandbox

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCENARIO = ROOT / "scenarios" / "slow-link.toml"
SKIPPED = 77
SENDER, NEAR, FAR, RECEIVER = "10.78.1.1", "10.78.1.254", "10.78.2.254", "10.78.2.2"
# The measured part of a test follows a tenth of its length in which it already sends, and 10 ms.
WARM_UP, WARM_UP_S = 0.1, 0.01


def slow_link():
    """Sender and receiver on both sides of a router whose token bucket is the slow link."""
    sender, router, receiver = sandbox.Net(), sandbox.Net(), sandbox.Net()
    for net, name, own, gateway in ((sender, "near", SENDER, NEAR), (receiver, "far", RECEIVER, FAR)):
        sandbox.ip(f"link add {name} netns {net.pid} type veth peer name {name} netns {router.pid}")
        sandbox.ip(f"addr add {own}/24 dev {name}", net.prefix)
        sandbox.ip(f"addr add {gateway}/24 dev {name}", router.prefix)
        sandbox.ip(f"link set {name} up", net.prefix)
        sandbox.ip(f"link set {name} up", router.prefix)
        sandbox.ip(f"route add default via {gateway}", net.prefix)
    sandbox.sysctl("net/ipv4/ip_forward", 1, router.prefix)
    # A bucket of 64 KiB holds the largest segmented send.
    bucket = "qdisc add dev far root tbf rate 200mbit burst 64kb latency 50ms"
    done = subprocess.run([*router.prefix, "tc", *bucket.split()], capture_output=True, text=True)
    if done.returncode:
        raise sandbox.Missing(f"tc {bucket}: {done.stderr.strip()}")
    return sender, receiver


def wait_for(net, port):
    """Until somebody listens on this TCP port there."""
    for _ in range(100):
        shown = subprocess.run([*net.prefix, "ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True)
        if shown.stdout.strip():
            return
        time.sleep(0.05)
    raise sandbox.Missing(f"no server on port {port}")


def seconds_of(total):
    """The measured part of a test that sends for this long in all."""
    return f"{round((total - WARM_UP_S) / (1 + WARM_UP) * 1000)}ms"


def measure(options, folder):
    """Two clients, each with a server of its own; returns their files of samples."""
    sender, receiver = slow_link()
    servers, clients, files = [], [], []
    first_port = 4792
    try:
        for number in range(2):
            port = first_port + number
            servers.append(subprocess.Popen([*receiver.prefix, options.dquant, "perf", "serve", f"{RECEIVER}:{port}"],
                                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            wait_for(receiver, port)
        for number, (after, lasts) in enumerate(((0, 12), (4, 4))):
            time.sleep(after)
            files.append(folder / f"measured-{number}.csv")
            command = ["perf", f"{RECEIVER}:{first_port + number}", "write", "--size", "64KiB", "--mode", "bandwidth",
                       "--mtu", "1024", "--cc", options.control, "--seconds", seconds_of(lasts), "--samples", files[-1]]
            clients.append(subprocess.Popen([*sender.prefix, options.dquant, *command], stdout=subprocess.DEVNULL))
        for client in clients:
            if client.wait(timeout=60):
                raise sandbox.Missing("dquant perf failed")
    finally:
        for process in [*servers, *clients]:
            process.kill()
            process.wait()
    return files


def simulated_control(control):
    """The name without the rate of the link, which the scenario knows."""
    return control.partition(":")[0]


def simulate(options, folder):
    file = folder / "simulated.csv"
    control = f"transport.control={simulated_control(options.control)}"
    subprocess.run([options.dquant, "sim", "run", SCENARIO, "--set", control, "--samples", file],
                   stdout=subprocess.DEVNULL, check=True)
    return file


def agree(rows, percent):
    """Whether each flow got about the same in each phase."""
    for row in rows:
        simulated, measured = row["simulated"]["mbps"], row["measured"]["mbps"]
        if abs(simulated - measured) > percent / 100 * max(simulated, measured):
            print(f"flow {row['flow']} in phase {row['phase']}: {simulated:.1f} and {measured:.1f} Mbit/s")
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dquant", default=str(ROOT / "target" / "release" / "dquant"), help="the program [default: the release build]")
    parser.add_argument("--control", default="delay", help="as for `dquant perf --cc`: delay, swift, advertised:1")
    parser.add_argument("--plot", metavar="FILE", help="draw both side by side, as SVG")
    parser.add_argument("--within", type=float, metavar="PERCENT", help="by how much throughputs may differ")
    options = parser.parse_args()
    try:
        sandbox.need({"tc": "iproute2", "ss": "iproute2", "unshare": "util-linux"})
        if not pathlib.Path(options.dquant).exists():
            raise sandbox.Missing(f"{options.dquant} (cargo build --release -p dquant)")
        sandbox.enter()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            measured, simulated = measure(options, folder), simulate(options, folder)
            compare = [options.dquant, "sim", "compare", "--simulated", simulated, "--measured", *measured]
            compare += ["--title", f"scenarios/slow-link.toml, {options.control}"]
            if options.plot:
                compare += ["--plot", options.plot]
            subprocess.run(compare, check=True)
            if options.within is None:
                return 0
            found = subprocess.run([*compare, "--json"], check=True, capture_output=True, text=True)
            return 0 if agree(json.loads(found.stdout)["rows"], options.within) else 1
    except sandbox.Missing as missing:
        print(f"skipped: {missing}")
        return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
