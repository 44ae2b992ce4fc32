#!/usr/bin/env python3
"""Runs rdma-core's own test suite on our library, and writes its table to docs/interop.md.

The tests are those of rdma-core 44, the version of Debian 12, run with Debian's pyverbs; this repository has no copy.
`--tests` names their directory: `tests/` of a checkout of rdma-core v44.0, or the one that the package rdma-core installs
below /usr/share/doc. They run on loopback and on an interface of a network namespace, all queue pairs in one process.

Exit status: 0 nothing failed; 1 something failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import collections
import gzip
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import traceback
import unittest
from importlib.machinery import SourceFileLoader

import lab
import matrix
import sandbox

INSTALLABLE = ("python3-pyverbs", "rdma-core", "iproute2", "util-linux")
PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux"}
PYTHON = "/usr/bin/python3"  # Debian's, because pyverbs is built for it
PACKAGED = "/usr/share/doc/rdma-core/tests"
LIMIT_S = 300
PASS, SKIP, FAIL = "pass", "skip", "fail"

# Why a test is skipped: the first pattern that matches "MODULE: NAME: TEXT OF THE SUITE".
REASONS = (
    (r"^test_(mlx5_|efa)", "other vendors' devices"),
    (r"^test_rdmacm", "connection manager"),
    (r"^test_odp|ODP", "on-demand paging"),
    (r"XRC", "XRC"),
    (r"[Dd]evice memory", "device memory"),
    (r"^test_(flow|rss_traffic)|Raw Packet", "flow steering and raw packets"),
    (r"dmabuf|cuda|dri/", "memory of GPUs"),
    (r"^test_tag_matching", "tag matching"),
    (r"Importing", "objects of other processes"),
    (r"test_qp_ex_rc_atomic_write", "atomic WRITE"),
    (r"[Hh]uge pages", "huge pages, which this machine has none of"),
    (r"gid indices populated", "an empty entry of the GID table, which has none"),
)


# ---- within the suite: Debian's Python, on our library -----------------------------------------------------------


class Records(unittest.TestResult):
    """Writes a line for each test when it ends, so that a crash loses none."""

    def __init__(self, path):
        super().__init__()
        self.file = open(path, "w", buffering=1)

    def note(self, test, state, text=""):
        module, _, name = test.id().removeprefix("tests.").partition(".")
        self.file.write(json.dumps({"module": module, "name": name, "state": state, "text": text}) + "\n")

    def addSuccess(self, test):
        self.note(test, PASS)

    def addSkip(self, test, reason):
        self.note(test, SKIP, reason)

    def addError(self, test, error):
        self.note(test, FAIL, "".join(traceback.format_exception(*error)))

    addFailure = addError


def within(folder, device, records):
    """Does what the suite's run_tests.py does."""
    sys.path.insert(0, str(folder))
    sys.argv[1:] = ["--dev", device]
    from args_parser import parser
    tests = SourceFileLoader("tests", str(folder / "__init__.py")).load_module()
    parser.parse_args()
    unittest.defaultTestLoader.loadTestsFromModule(tests).run(Records(records))


# ---- outside -----------------------------------------------------------------------------------------------------


def sources(folder, unpacked):
    """The directory with the tests. A package compresses its larger files; they are unpacked to `unpacked`."""
    if not (folder / "run_tests.py").exists():
        raise lab.Missing(f"no tests of rdma-core in {folder}: --tests names tests/ of a checkout of v44.0")
    if not list(folder.glob("*.gz")):
        return folder
    for file in folder.glob("*.py*"):
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        (unpacked / file.name.removesuffix(".gz")).write_bytes(data)
    return unpacked


def run(prefix, pid, device, folder, options):
    """The result of each test on one device."""
    with tempfile.NamedTemporaryFile() as records:
        own = [PYTHON, str(pathlib.Path(__file__).resolve()), "--within", device, "--records", records.name]
        command = [*prefix, *lab.ours([*own, "--tests", str(folder)], options.runner)]
        result = lab.HostRun(command, pid, LIMIT_S).finish()
        found = [json.loads(line) for line in pathlib.Path(records.name).read_text().splitlines()]
    if result.code != 0:
        last = found[-1]["name"] if found else "the beginning"
        text = f"the suite ended with {result.code} after {last}:\n{result.text[-2000:]}"
        found.append({"module": "run_tests", "name": "the end", "state": FAIL, "text": text})
    return found


def reason(test):
    told = f"{test['module']}: {test['name']}: {test['text']}"
    return next((why for pattern, why in REASONS if re.search(pattern, told)), test["text"])


def cell(tests):
    counts = collections.Counter(test["state"] for test in tests)
    said = (f"{counts[PASS]} pass", f"**{counts[FAIL]} fail**" if counts[FAIL] else "",
            f"{counts[SKIP]} skipped" if counts[SKIP] else "")
    return ", ".join(part for part in said if part)


def why_skipped(tests):
    return collections.Counter(reason(test) for test in tests if test["state"] == SKIP)


def rows(columns):
    """Rows of the table: one per module, and one for all modules of other vendors. `columns`: title -> tests."""
    by_module = collections.defaultdict(lambda: {title: [] for title in columns})
    for title, tests in columns.items():
        for test in tests:
            vendor = re.match(r"test_(mlx5_|efa)", test["module"])
            name = "`test_mlx5_*`, `test_efa*`" if vendor else f"`{test['module']}`"
            by_module[name][title].append(test)
    for module, cells in sorted(by_module.items(), key=lambda item: item[0].strip("`")):
        whys = collections.Counter()
        for tests in cells.values():
            whys |= why_skipped(tests)
        told = "; ".join(f"{why}: {count}" for why, count in whys.items())
        yield [module, *(cell(tests) for tests in cells.values()), told]
    yield ["all", *(cell(tests) for tests in columns.values()), ""]


def everywhere(folder, options):
    left, _ = sandbox.veth_pair(lab.LINK_MTU, ("10.79.0.1", "fd79::1"), ("10.79.0.2", "fd79::2"))
    return {"loopback": run((), "self", "dq_lo", folder, options),
            "interface": run(left.prefix, left.pid, "dq_left", folder, options)}


def version():
    command = ["dpkg-query", "--show", "--showformat=${Version}", "python3-pyverbs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout or "of unknown version"


def report(columns, options):
    """Prints failures and writes the table. Returns the number of failures."""
    for title, tests in columns.items():
        for test in (test for test in tests if test["state"] == FAIL):
            print(f"FAILED on {title}: {test['module']}.{test['name']}\n{test['text']}")
    heads = ["module", *columns, "skipped for want of"]
    table = [heads, ["---"] * len(heads), *rows(columns)]
    text = "\n".join("| " + " | ".join(row) + " |" for row in table)
    note = f"pyverbs {version()} of Debian, the tests of rdma-core of the same version."
    if options.no_write:
        print(note, text, sep="\n\n")
    else:
        matrix.write_between_markers(matrix.DOCUMENT, "rdma-core", f"{note}\n\n{text}")
    for title, tests in columns.items():
        print(f"{title}: {cell(tests)}")
    return sum(test["state"] == FAIL for tests in columns.values() for test in tests)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=pathlib.Path, default=PACKAGED, help="directory of the tests (default: %(default)s)")
    parser.add_argument("--runner", default=lab.RUNNER, help="command that starts a program on our library (default: %(default)s)")
    parser.add_argument("--no-write", action="store_true", help="do not change docs/interop.md")
    parser.add_argument("--install", action="store_true", help="apt-get install what is missing (root)")
    parser.add_argument("--within", metavar="DEVICE", help=argparse.SUPPRESS)
    parser.add_argument("--records", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = pathlib.Path(options.tests).resolve()
    if options.within:
        return within(folder, options.within, options.records)
    try:
        if options.install:
            subprocess.run(["apt-get", "install", "-y", "-qq", *INSTALLABLE], check=True, stdout=subprocess.DEVNULL)
        sandbox.need(PROGRAMS)
        if subprocess.run([PYTHON, "-c", "import pyverbs"], capture_output=True, check=False).returncode:
            raise lab.Missing("not installed: python3-pyverbs (apt-get install python3-pyverbs)")
        with tempfile.TemporaryDirectory() as unpacked:
            folder = sources(folder, pathlib.Path(unpacked))
            sandbox.enter()
            failed = report(everywhere(folder, options), options)
    except lab.Missing as missing:
        print(f"skipped: {missing}")
        return lab.SKIPPED
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
