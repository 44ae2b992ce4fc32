#!/usr/bin/env python3
"""Discovers fabrics of ibsim, sets them up, and routes them beside opensm.

For each topology, on ibsim: `dquant subnet discover` and `ibnetdiscover` have to see the same nodes and links. `dquant subnet
sweep` sets the fabric up; the LFTs that `dump_fts` reads then load links as `dquant subnet plan` says, and `ibtracert` finds a
path for random pairs of hosts. Every routing engine of opensm routes the fabric, too. Its LFTs are judged as `dquant subnet
plan` judges its own: the path of every ordered pair of hosts is followed and counted on each direction of each link.
`--write` writes the table to docs/routing.md.

Exit status: 0 nothing failed; 1 something failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import collections
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
import time

INSTALLABLE = ("opensm", "ibsim-utils", "libumad2sim0", "infiniband-diags")
TOPOLOGIES = ("leaf-spine:18x18x18", "fat-tree:8", "torus:6x6:4", "dragonfly:4x2x2", "random:32x4x4:1", "rail:4x8x4x8", "fat-tree:16")
ENGINES = ("minhop", "updn", "ftree", "dor", "lash", "dfsssp", "nue")
PRELOAD = "libumad2sim.so"
SWEPT = ("balanced", "up-down")  # engines of ours that the switches get
TRACES = 40
LIMIT_S = 20
ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "routing.md"
BEGIN = "<!-- opensm: begin. Written by `python3 interop/subnet.py --write`. -->"
END = "<!-- opensm: end -->"


def preload():
    """The library that puts programs on ibsim, or None."""
    places = ["/usr/lib/umad2sim", *pathlib.Path("/usr/lib").glob("*/umad2sim")]  # Debian has it in the latter
    found = [pathlib.Path(place) / PRELOAD for place in places]
    return next((path for path in found if path.exists()), None)


class Simulated:
    """ibsim with one topology, and the programs that are attached to it."""

    def __init__(self, net, folder, has_console=False):
        self.environment = {**os.environ, "IBSIM_SOCKNAME": f"dquant-{os.getpid()}-{net.stem}", "OSM_TMP_DIR": str(folder),
                            "OSM_CACHE_DIR": str(folder)}
        self.log = open(folder / "ibsim.log", "w", encoding="utf-8")
        # Its console reads standard input, and its end would end it.
        quiet = [] if has_console else ["-n"]
        self.process = subprocess.Popen(["ibsim", "-s", *quiet, "-N", "4096", "-S", "1024", "-P", "65536", str(net)], stdin=subprocess.PIPE,
                                        stdout=self.log, stderr=subprocess.STDOUT, env=self.environment)
        time.sleep(0.5)

    def run(self, command, seconds=LIMIT_S):
        """(exit status, output, seconds) of a program on the simulated fabric; status None if it did not end."""
        environment = {**self.environment, "LD_PRELOAD": str(preload()), "SIM_HOST": "host0"}
        started = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=seconds,
                                  text=True, check=False)
        except subprocess.TimeoutExpired:
            return None, "", time.monotonic() - started
        return done.returncode, done.stdout + (done.stderr if done.returncode else ""), time.monotonic() - started

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def links_of(text):
    """Links of a net file, or of what ibnetdiscover printed, each as a sorted pair of (name, port)."""
    names, sections, links = {}, [], set()
    for line in text.splitlines():
        node = re.match(r'(?:Switch|Ca|Hca)\s+\d+\s+"([^"]+)"(?:\s*#\s*"([^"]*)")?', line)
        if node:
            names[node[1]] = node[2] or node[1]
            sections.append(node[1])
        port = re.match(r'\[(\d+)\](?:\(\w+\))?\s+"([^"]+)"\[(\d+)\]', line)
        if port and sections:
            links.add(((sections[-1], int(port[1])), (port[2], int(port[3]))))
    named = lambda end: (names.get(end[0], end[0]), end[1])
    return {tuple(sorted((named(a), named(b)))) for a, b in links}


def tables_of(dump):
    """{switch: {host: port}} of opensm-lfts.dump, by node descriptions; hosts with several ports have one entry for each."""
    tables, current = {}, None
    for line in dump.splitlines():
        switch = re.match(r"Unicast lids .* of switch .*\((.*?)\)\s*:?$", line.strip())
        if switch:
            current = tables.setdefault(switch[1].strip("'"), {})
        entry = re.match(r"(0x[0-9a-fA-F]+)\s+(\d+)\s*[:#]\s*\(?(Channel Adapter|Switch)\s+portguid\s+(0x[0-9a-fA-F]+):\s*'(.*?)'", line.strip())
        if entry and current is not None and entry[3] == "Channel Adapter":
            current[(entry[5], entry[4])] = int(entry[2])
    return tables


def judge(tables, links, hosts):
    """Loads and hops of all ordered pairs of end ports; None if a pair has no path."""
    beyond = {a: b for pair in links for a, b in (pair, pair[::-1])}
    ends = sorted({entry for table in tables.values() for entry in table})
    # Where each end port is: the switch whose table leads to a host.
    load, hops, pairs = collections.Counter(), 0, 0
    attached = collections.Counter()
    for (name, _), (peer, _) in ((a, b) for pair in links for a, b in (pair, pair[::-1])):
        if name in hosts and peer in tables:
            attached[peer] += 1
    for end in ends:
        for switch, senders in attached.items():
            at, path = switch, []
            while len(path) <= len(tables):
                port = tables[at].get(end)
                far = beyond.get((at, port))
                if far is None:
                    return None
                if far[0] in hosts:
                    break
                path.append((at, port))
                at = far[0]
            else:
                return None
            if far[0] != end[0]:
                return None
            senders -= at == switch
            pairs += senders
            hops += senders * (len(path) + 1)
            for channel in path:
                load[channel] += senders
    return {"hops": hops / pairs, "most": max(load.values()), "least": min(load.values()),
            "mean": sum(load.values()) / len(load), "used": len(load)}


def sweep(dquant, simulated, ours, expected, hosts):
    """Complaints about fabrics that we set up, one for each engine of ours."""
    complaints = []
    for engine in SWEPT:
        planned = next(one for one in ours["engines"] if one["engine"] == engine)
        code, text, seconds = simulated.run([dquant, "subnet", "sweep", "--engine", engine, "--json"])
        if planned["credit_loop"]:
            if code != 2 or "credit loops" not in text:
                complaints.append(f"dquant subnet sweep --engine {engine}: exit {code}, although the paths need lanes: {text.strip()[-300:]}")
            continue
        if code != 0:
            complaints.append(f"dquant subnet sweep --engine {engine}: exit {code}: {text.strip()[-300:]}")
            continue
        print(f"  swept by {engine}: {json.loads(text)['sent']} datagrams, {seconds:.2f} s")
        code, dump, _ = simulated.run(["dump_fts"])
        verdict = judge(tables_of(dump), expected, hosts) if code == 0 else None
        if verdict is None or verdict["most"] != planned["most_load"]:
            complaints.append(f"after {engine}: the switches' tables give {verdict}, planned was {planned['most_load']}")
        code, text, _ = simulated.run(["ibnetdiscover"])
        lids = dict(re.findall(r'#\s+"([^"]+)"\s+lid\s+(\d+)', text))
        ends = sorted(lid for name, lid in lids.items() if name in hosts)
        found = trace(simulated, ends, TRACES, engine)
        complaints += [f"after {engine}: {complaint}" for complaint in found]
    return complaints


def trace(simulated, lids, count, seed):
    """Complaints of ibtracert over random pairs of these LIDs."""
    generator, complaints = random.Random(seed), []
    for _ in range(count):
        one, other = generator.sample(lids, 2)
        code, text, _ = simulated.run(["ibtracert", one, other])
        if code != 0:
            complaints.append(f"ibtracert {one} {other}: {text.strip()[-200:]}")
    return complaints


def plan(dquant, topology, net):
    run = subprocess.run([dquant, "subnet", "plan", topology, "--write", net, "--json"], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(run.stdout)


def compare(dquant, topology, folder, engines):
    """(rows of the table, complaints) of one topology."""
    net = folder / "fabric.net"
    ours = plan(dquant, topology, net)
    hosts = {match[1] for match in re.finditer(r'Hca \d+ "([^"]+)"', net.read_text())}
    expected, complaints, rows = links_of(net.read_text()), [], []
    simulated = Simulated(net, folder)
    try:
        found = folder / "found.net"
        code, text, seconds = simulated.run([dquant, "subnet", "discover", "--write", str(found), "--json"])
        if code != 0 or links_of(found.read_text()) != expected:
            complaints.append(f"{topology}: dquant subnet discover: exit {code}: {text.strip()[-300:]}")
        else:
            print(f"{topology}: discovered {json.loads(text)['sent']} datagrams, {seconds:.2f} s")
        code, text, seconds = simulated.run(["ibnetdiscover"])
        if code != 0 or links_of(text) != expected:
            complaints.append(f"{topology}: ibnetdiscover sees {len(links_of(text))} links of {len(expected)}, exit {code}")
        else:
            print(f"{topology}: ibnetdiscover {seconds:.2f} s")
        complaints += [f"{topology}: {one}" for one in sweep(dquant, simulated, ours, expected, hosts)]
        for engine in engines:
            for old in folder.glob("opensm-lfts.dump"):
                old.unlink()
            code, _, seconds = simulated.run(["opensm", "-R", engine, "-Q", "-o", "-D", "0x43", "-f", str(folder / "opensm.log")])
            dump = folder / "opensm-lfts.dump"
            verdict = judge(tables_of(dump.read_text()), expected, hosts) if code == 0 and dump.exists() else None
            rows.append((topology, f"opensm {engine}", verdict, seconds))
            print(f"{topology}: opensm {engine}: {verdict} {seconds:.2f} s")
    finally:
        simulated.close()
    for one in ours["engines"]:
        verdict = {"hops": one["mean_hops"], "most": one["most_load"], "least": one["least_load"], "mean": one["mean_load"],
                   "used": one["links_used"], "lanes": one["vls"]}
        rows.append((topology, one["engine"], verdict, one["wall_ns"] / 1e9))
    best = min((row[2]["most"] for row in rows if row[1].startswith("opensm") and row[2]), default=None)
    mine = next(row[2]["most"] for row in rows if row[1] == "balanced")
    if best is not None and mine > best:
        complaints.append(f"{topology}: balanced loads a link with {mine} pairs, opensm's best engine with {best}")
    return rows, complaints


def table(rows):
    lines = ["| topology | engine | hops | most load | mean | least | channels used | VLs |", "|---|---|---|---|---|---|---|---|"]
    for topology, engine, verdict, _ in rows:
        if verdict is None:
            lines.append(f"| {topology} | {engine} | cannot route it | | | | | |")
            continue
        lanes = verdict.get("lanes", "")
        lines.append(f"| {topology} | {engine} | {verdict['hops']:.3f} | {verdict['most']} | {verdict['mean']:.1f} | {verdict['least']} | "
                     f"{verdict['used']} | {lanes if lanes is not None else '> 15'} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dquant", default=str(ROOT / "target" / "release" / "dquant"), help="the program [default: the release build]")
    parser.add_argument("--only", default="", help="topologies whose name contains this")
    parser.add_argument("--engine", action="append", help="an engine of opensm, all by default")
    parser.add_argument("--write", action="store_true", help="write the table to docs/routing.md")
    options = parser.parse_args()
    missing = [program for program in ("ibsim", "opensm", "ibnetdiscover") if shutil.which(program) is None]
    if missing or preload() is None:
        print(f"skipped: no {', '.join(missing) or PRELOAD}; Debian has them in {' '.join(INSTALLABLE)}")
        return 77
    if not os.access(options.dquant, os.X_OK):
        print(f"skipped: no {options.dquant}; cargo build --release -p dquant makes it")
        return 77
    rows, complaints = [], []
    for topology in (name for name in TOPOLOGIES if options.only in name):
        with tempfile.TemporaryDirectory(prefix="dquant-subnet-") as folder:
            new, wrong = compare(options.dquant, topology, pathlib.Path(folder), options.engine or ENGINES)
        rows += new
        complaints += wrong
    print(table(rows))
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
