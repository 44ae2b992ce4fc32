#!/usr/bin/env python3
"""Lets SLURM read what `dquant parfait slurm-topology` writes.

For each fabric: slurmctld starts with a minimal slurm.conf (`auth/none`, so no munge; a port of its own, all files in a temporary
folder) and the exported topology.conf, and `scontrol show topology` has to print the same switches, with the same hosts and
switches below each, and the level of each. A file with a host that SLURM does not have must not pass. The topologies that are
no trees have to be refused by the exporter, unless the closest tree is asked for.

    python3 interop/slurm.py [--dquant target/release/dquant]

Exit status: 0 nothing failed; 1 something failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TREES = ("leaf-spine:4x3x6", "fat-tree:4", "fat-tree:8", "vl2:4x4x3", "rail:2x4x2x3")
OTHERS = ("torus:4x4:2", "bcube:3x2", "dragonfly:4x2x2")
START_S = 20


def lacking():
    """Why this machine cannot run slurmctld; empty if it can."""
    for program in ("slurmctld", "scontrol"):
        if not shutil.which(program):
            return f"{program} is not installed (Debian: slurmctld, slurm-client)"
    if os.geteuid() != 0:
        return "slurmctld is started as root here, as the user of its configuration"
    return ""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def exported(dquant, fabric, *options):
    command = [dquant, "parfait", "slurm-topology", fabric, *options]
    return subprocess.run(command, capture_output=True, text=True)


def switches(text, key):
    """By name: what is below each switch, and how it is said to be."""
    found = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if key in fields:
            found[fields[key]] = fields
    return found


def expanded(names):
    """A host list of SLURM, such as `host[0-3,7],login`, as single names."""
    found = set()
    for prefix, ranges, plain in re.findall(r"([^,\[\]]+)\[([^\]]+)\]|([^,\[\]]+)", names):
        if plain:
            found.add(plain)
        for part in ranges.split(",") if ranges else []:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            found.update(f"{prefix}{number:0{len(first)}}" for number in numbers)
    return found


def configured(folder, hosts, port):
    here = socket.gethostname().split(".")[0]
    (folder / "state").mkdir(exist_ok=True)
    nodes = "\n".join(f"NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN" for host in hosts)
    conf = folder / "slurm.conf"
    conf.write_text(
        f"ClusterName=test\nSlurmctldHost={here}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/none\nCredType=cred/none\n"
        f"SlurmctldPort={port}\nSlurmdPort={free_port()}\nStateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n"
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmctldLogFile={folder}/slurmctld.log\nProctrackType=proctrack/linuxproc\n"
        f"TaskPlugin=task/none\nSelectType=select/linear\nSwitchType=switch/none\nMpiDefault=none\nReturnToService=1\n"
        f"TopologyPlugin=topology/tree\n{nodes}\n"
        "PartitionName=all Nodes=ALL Default=YES State=UP\n"
    )
    return conf


def shown(folder, topology, hosts):
    """What scontrol says of a topology.conf; None and the log if slurmctld does not take it."""
    (folder / "topology.conf").write_text(topology)
    conf = configured(folder, hosts, free_port())
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    daemon = subprocess.Popen(["slurmctld", "-D", "-i"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(START_S * 5):
            asked = subprocess.run(["scontrol", "show", "topology"], env=environment, capture_output=True, text=True)
            if asked.returncode == 0 and "SwitchName=" in asked.stdout:
                return asked.stdout, ""
            if daemon.poll() is not None:
                break
            time.sleep(0.2)
        return None, (folder / "slurmctld.log").read_text()
    finally:
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def compared(text, answer):
    """What differs between a file and what SLURM says of it."""
    ours, theirs = switches(text, "SwitchName"), switches(answer, "SwitchName")
    if set(ours) != set(theirs):
        return f"switches differ: {sorted(set(ours) ^ set(theirs))}"

    def below(name):
        own = ours[name]
        if "Nodes" in own:
            return set(own["Nodes"].split(","))
        return set().union(*(below(child) for child in own["Switches"].split(",")))

    for name, own in theirs.items():
        if expanded(own.get("Nodes", "")) != below(name):
            return f"{name} has {own.get('Nodes')} below it"
        level, at = 0, name
        while "Switches" in ours[at]:
            level, at = level + 1, ours[at]["Switches"].split(",")[0]
        if int(own["Level"]) != level:
            return f"{name} is on level {own['Level']}, not {level}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dquant", default=str(ROOT / "target" / "release" / "dquant"), help="the program to test")
    options = parser.parse_args()
    why = lacking()
    if not why and not shutil.which(options.dquant):
        why = f"{options.dquant} is not there: cargo build --release -p dquant, or --dquant"
    if why:
        print(f"skipped: {why}")
        return 77
    failed = 0
    cases = [(fabric, ()) for fabric in TREES] + [(fabric, ("--closest",)) for fabric in OTHERS]
    for fabric, more in cases:
        export = exported(options.dquant, fabric, *more)
        text = export.stdout
        hosts = sorted({host for own in switches(text, "SwitchName").values() for host in own.get("Nodes", "").split(",") if host})
        with tempfile.TemporaryDirectory() as folder:
            answer, log = shown(pathlib.Path(folder), text, hosts)
        problem = compared(text, answer) if answer else f"slurmctld does not take it:\n{log[-2000:]}"
        print(f"{fabric:20} {len(hosts):4} hosts, {len(switches(text, 'SwitchName')):3} switches  {problem or 'the same'}")
        failed += bool(problem)
    for fabric in OTHERS:
        refused = exported(options.dquant, fabric)
        if refused.returncode == 0 or "no tree" not in refused.stderr:
            print(f"{fabric}: not refused: {refused.stderr}")
            failed += 1
    # What is compared can differ: a switch that is missing, and a host below another.
    text = exported(options.dquant, "fat-tree:4").stdout
    fewer = "\n".join(text.splitlines()[:-1])
    if not compared(text, fewer) or not compared(text, text.replace("host0,", "host9,")):
        print("the comparison finds no difference where there is one")
        failed += 1
    version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.strip()
    print(f"{version}: {'nothing failed' if not failed else f'{failed} failed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
