#!/usr/bin/env python3
"""Runs the matrix of programs and writes its table.

Three tables, each from one run:
  (default)   our library on this machine, the Linux kernel's soft-RoCE in a guest; each side is client and server
  --local     our library on both sides: over loopback, and in two network namespaces joined by a cable
  --control   kernel to kernel, two guests: the programs and the kernel without our library

A full run writes the table between its markers in docs/interop.md; a partial run (--quick, --only) prints it.
All results, with the output of failed programs, go to TARGET/interop/TABLE.json (TARGET is cargo's).

Exit status: 0 no cell failed; 1 a cell failed; 2 usage; 77 the machine lacks something (the reason is printed).
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
import time

import cases
import lab
import sandbox

DOCUMENT = lab.REPOSITORY / "docs" / "interop.md"
RESULTS = lab.TARGET / "interop"
NOT_RUN = "not run"
GRACE_S = 3  # for the server once its client is gone
INSTALLABLE = ("perftest", "ibverbs-utils", "qemu-system-x86", "iproute2", "tcpdump", "util-linux", "gcc", "libibverbs-dev")


@dataclasses.dataclass(frozen=True)
class Column:
    title: str
    client: object
    server: object
    family: int


@dataclasses.dataclass
class Cell:
    state: str
    reason: str
    seconds: float = 0.0
    details: dict = dataclasses.field(default_factory=dict)


# ---- one cell ------------------------------------------------------------------------------------------------


class Runner:
    """Runs cases between ends. No TCP port is used twice, so that late connections cannot interfere."""

    def __init__(self, machines=None):
        self.ports, self.devices, self.machines = itertools.count(20000), {}, machines

    def device(self, end):
        if end.name not in self.devices:
            self.devices[end.name] = end.device()
        return self.devices[end.name]

    def run(self, case, column):
        begun = time.monotonic()
        try:
            cell = self._pair(case, column)
        except lab.Missing as reason:
            cell = Cell(cases.UNSUPPORTED, str(reason))
        except (OSError, LookupError) as error:
            cell = Cell(cases.FAIL, f"{type(error).__name__}: {str(error).strip()[:200]}")
            cell.details = {"guests": self.machines.revive() if self.machines else ""}
        cell.seconds = round(time.monotonic() - begun, 2)
        return cell

    def _pair(self, case, column):
        port = next(self.ports)
        client, server = self.device(column.client), self.device(column.server)
        for end, device in ((column.client, client), (column.server, server)):
            if column.family not in device.gids:
                return Cell(cases.FAIL, f"{end.name}: {device.name} has no IPv{column.family} GID")
        command = case.command(server.name, server.gids[column.family], port)
        waiting = column.server.start(command, case.limit_s, port)
        if not case.meets or waiting.wait_listening(port):
            command = case.command(client.name, client.gids[column.family], port, column.server.v4)
            finished = column.client.start(command, case.limit_s).finish()
            if finished.code != 0:
                time.sleep(0.2)
                waiting.stop()
        else:
            waiting.stop()
            finished = lab.Result(1, "not started: the server did not listen")
        return self._judge(case, column, waiting.finish(), finished)

    @staticmethod
    def _judge(case, column, server, client):
        state, reason = cases.verdict(case, server, client)
        cell = Cell(state, reason)
        if state != cases.PASS:
            ends = {"client": column.client, "server": column.server}
            cell.details = {"client": client.text[-3000:], "server": server.text[-3000:],
                            **{f"{side} kernel": end.troubles() for side, end in ends.items()}}
        return cell


# ---- the whole table -------------------------------------------------------------------------------------------


def run_all(chosen, columns, budget_s, machines):
    """Cells by (case name, column title); when the budget is spent, the rest is marked as not run."""
    runner, cells, begun = Runner(machines), {}, time.monotonic()
    for case in chosen:
        line = []
        for column in columns:
            if time.monotonic() - begun > budget_s:
                cell = Cell(NOT_RUN, f"the budget of {budget_s} s was spent")
            else:
                cell = runner.run(case, column)
            cells[case.name, column.title] = cell
            line.append(f"{cell.state} {cell.seconds:.1f}s")
            if cell.state not in (cases.PASS, NOT_RUN):
                print(f"    {case.name} | {column.title}: {cell.state}: {cell.reason}", flush=True)
        print(f"{case.name}: {', '.join(line)}", flush=True)
    return cells, time.monotonic() - begun


def markdown(chosen, columns, cells, notes):
    """The table, with reasons as numbered notes; each reason is written once."""
    reasons = {}
    lines = ["| program | " + " | ".join(column.title for column in columns) + " |",
             "|---|" + "---|" * len(columns)]
    for case in chosen:
        row = []
        for column in columns:
            cell = cells[case.name, column.title]
            if cell.state == cases.PASS:
                row.append("pass")
            else:
                number = reasons.setdefault(cell.reason, len(reasons) + 1)
                row.append(f"{'**fail**' if cell.state == cases.FAIL else cell.state} ({number})")
        lines.append(f"| `{case.name}` | " + " | ".join(row) + " |")
    text = "\n".join([*notes, "", *lines])
    if reasons:
        listed = [f"{number}. {reason.replace('|', '/')}" for reason, number in reasons.items()]
        text += "\n\n" + "\n".join(listed)
    return text


def write_between_markers(path, name, text):
    """Replaces the text between the two markers of `name`."""
    begin, end = f"<!-- interop:{name}:begin -->", f"<!-- interop:{name}:end -->"
    document = path.read_text()
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(document):
        raise SystemExit(f"{path} lacks the markers {begin} and {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document))


def as_json(table, chosen, columns, cells, seconds, notes):
    rows = [{"case": case.name, "group": case.group, "cells": {
        column.title: {key: value for key, value in dataclasses.asdict(cells[case.name, column.title]).items() if value}
        for column in columns}} for case in chosen]
    counts = collections.Counter(cell.state for cell in cells.values())
    return {"table": table, "seconds": round(seconds, 1), "notes": notes, "counts": counts, "rows": rows}


# ---- the three kinds of table ------------------------------------------------------------------------------------


def both_ways(first, second, families):
    for family in families:
        yield Column(f"{first.name} → {second.name}, IPv{family}", first, second, family)
        yield Column(f"{second.name} → {first.name}, IPv{family}", second, first, family)


def kernel_table(options):
    machines = lab.Lab(1, cpus=options.cpus, mtu=options.mtu)
    guest = machines.guests[0]
    guest.name = "kernel"
    host = lab.HostEnd("ours", lab.HOST_V4, lab.HOST_V6, options.runner)
    columns = list(both_ways(host, guest, (4, 6)))
    return columns, [f"Peer: Linux {guest.shell('uname -r').text.strip()}, soft-RoCE, link MTU {options.mtu}. "
                     "A → B: the client A, the server B."], machines


def control_table(options):
    machines = lab.Lab(2, cpus=options.cpus, mtu=options.mtu)
    client, server = machines.guests
    columns = [Column(f"kernel → kernel, IPv{family}", client, server, family) for family in (4, 6)]
    return columns, [f"Linux {client.shell('uname -r').text.strip()} on both sides, link MTU {options.mtu}."], \
        machines


def local_table(options):
    loop = [lab.HostEnd(f"loopback {side}", "127.0.0.1", "::1", options.runner) for side in ("client", "server")]
    addresses = (("10.78.0.1", "fd78::1"), ("10.78.0.2", "fd78::2"))
    nets = sandbox.veth_pair(options.mtu, *addresses)
    cable = [lab.HostEnd(f"net {index}", *addresses[index], options.runner, net) for index, net in enumerate(nets)]
    columns = [Column(f"{title}, IPv{family}", client, server, family)
               for title, (client, server) in (("loopback", loop), ("two namespaces", cable)) for family in (4, 6)]
    return columns, [f"Our library on both sides; link MTU of the namespaces {options.mtu}."], None


TABLES = {"kernel": kernel_table, "local": local_table, "control": control_table}


# ---- the command ---------------------------------------------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    for name in ("local", "control"):
        which.add_argument(f"--{name}", dest="table", action="store_const", const=name)
    parser.set_defaults(table="kernel")
    parser.add_argument("--quick", action="store_true", help="a third of the cases")
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--columns", metavar="REGEX", help="columns whose title matches")
    parser.add_argument("--runner", default=lab.RUNNER, help="command that starts a program on our library (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write the table even of a partial run")
    parser.add_argument("--no-write", action="store_true", help="do not change docs/interop.md")
    parser.add_argument("--add", action="store_true", help="keep the cells of the last TABLE.json that this run does not touch; implies --write")
    parser.add_argument("--budget", type=int, default=1200, metavar="S", help="seconds for all cases (default %(default)s)")
    parser.add_argument("--cpus", type=int, default=1, help="virtual processors of a guest (default 1)")
    parser.add_argument("--mtu", type=int, default=lab.LINK_MTU, help="MTU of the link (default %(default)s)")
    parser.add_argument("--capture", metavar="FILE", help="write the RoCE packets between us and the guests to this pcap file")
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    parser.add_argument("--install", action="store_true", help="apt-get install what is missing (root)")
    return parser.parse_args()


def chosen_cases(options):
    chosen = [case for case in cases.all_cases() if case.quick or not options.quick]
    return [case for case in chosen if not options.only or re.search(options.only, case.name)]


def prepare(options):
    """Raises `Missing`. Runs before the sandbox, which has no network to fetch packages from."""
    if options.install:
        subprocess.run(["apt-get", "install", "-y", "-qq", *INSTALLABLE], check=True, stdout=subprocess.DEVNULL)
    if options.table != "control":
        program = options.runner.split()[0] if options.runner else "true"
        if not shutil.which(program):
            raise lab.Missing(f"{program} does not exist: cargo build --release")
    sandbox.need(lab.PROGRAMS)
    with contextlib.suppress(lab.Missing):  # its cells report it
        lab.wire_cases()
    if options.table != "local":
        lab.prepare_guest()
    sandbox.enter()


def with_former(former, columns, cells, seconds):
    """Adds the cells of the previous run that this one did not touch: (cases, cells, seconds)."""
    titles = [column.title for column in columns]
    for row in former["rows"]:
        for title, cell in row["cells"].items():
            if title in titles and cell["state"] != NOT_RUN:
                cells.setdefault((row["case"], title), Cell(**{"reason": "", **cell}))
    # Cells that were not run are not part of the table; a later run may add them.
    chosen = [case for case in cases.all_cases() if all((case.name, title) in cells for title in titles)]
    return chosen, {(case.name, title): cells[case.name, title] for case in chosen for title in titles}, \
        seconds + former["seconds"]


def publish(options, chosen, columns, cells, seconds, notes):
    if options.add:
        former = json.loads((RESULTS / f"{options.table}.json").read_text())
        chosen, cells, seconds = with_former(former, columns, cells, seconds)
    counts = collections.Counter(cell.state for cell in cells.values())
    summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    notes = [*notes, f"{len(chosen)} programs with options, {len(cells)} cells: {summary}; {seconds:.0f} s."]
    part = " ".join(f"`--{name} {value}`" if value is not True else f"`--{name}`" for name, value in (
        ("quick", options.quick), ("only", options.only), ("columns", options.columns)) if value)
    missing = [f"`{case.name}`" for case in cases.all_cases() if case not in chosen]
    if options.add:
        notes.extend([f"Several runs; not run yet: {', '.join(missing)}."] if missing else ["Several runs."])
    elif part:
        notes.append(f"A part of the matrix: {part}.")
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = RESULTS / f"{options.table}.json"
    result.write_text(json.dumps(as_json(options.table, chosen, columns, cells, seconds, notes), indent=1))
    table = markdown(chosen, columns, cells, notes)
    if options.no_write or (part and not options.write and not options.add):
        print("", table, sep="\n")
    else:
        write_between_markers(DOCUMENT, options.table, table)
    print(f"{summary}; {seconds:.0f} s; details in {result}")
    return 1 if counts[cases.FAIL] or counts[NOT_RUN] else 0


def stop(process):
    process.terminate()
    process.wait()


def main():
    options = arguments()
    chosen = chosen_cases(options)
    if options.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    try:
        prepare(options)
        columns, notes, machines = TABLES[options.table](options)
    except lab.Missing as reason:
        print(f"skipped: {reason}")
        return lab.SKIPPED
    columns = [column for column in columns if not options.columns or re.search(options.columns, column.title)]
    with contextlib.ExitStack() as cleanup:
        if machines:
            cleanup.callback(machines.close)
            if options.capture:
                cleanup.callback(stop, machines.capture(options.capture))
        cells, seconds = run_all(chosen, columns, options.budget, machines)
    return publish(options, chosen, columns, cells, seconds, notes)


if __name__ == "__main__":
    sys.exit(main())
