#!/usr/bin/env python3
"""Runs communication stacks on our library, UCX and Open MPI, and writes their table to docs/interop.md.

UCX: `ucx_perftest` with each transport over its `ib` interfaces, polling or sleeping between messages. Open MPI: ping-pong
and allreduce over UCX with two ranks, every byte checked (mpi_cases.c), and mpi4py's tests of one-sided operations;
`--mpi4py` names their directory, `test/` of the sources of Debian's version. All run on loopback; UCX also runs between two
network namespaces joined by a cable.

Exit status: 0 nothing failed; 1 something failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import pathlib
import re
import subprocess
import sys

import build
import lab
import matrix
import sandbox

INSTALLABLE = ("ucx-utils", "openmpi-bin", "libopenmpi-dev", "python3-mpi4py", "gcc", "iproute2", "util-linux")
PROGRAMS = {"ucx_perftest": "ucx-utils", "mpirun": "openmpi-bin", "mpicc": "libopenmpi-dev", "ip": "iproute2",
            "nsenter": "util-linux"}
PYTHON = "/usr/bin/python3"  # Debian's, because mpi4py is built for it
POLL, SLEEP = (2000, []), (5000, ["-E", "sleep"])  # iterations, and how the program waits for messages
TESTS = (("tag_lat", 8, POLL), ("tag_bw", 65536, POLL), ("ucp_put_bw", 65536, POLL), ("ucp_get", 65536, POLL),
         ("tag_lat", 8, SLEEP), ("tag_bw", 65536, SLEEP))
# rc_verbs alone does not work: UCX exchanges addresses over a second, connectionless transport.
TRANSPORTS = ("rc_verbs,ud_verbs:aux", "ud_verbs")
# Over ud_verbs UCX may apply a PUT before it builds the reply to an earlier GET, and osc/ucx sets no fence.
ONE_SIDED = TRANSPORTS[0]
LIMIT_S = 60
PORTS = iter(range(21000, 22000))


def environment(transport, device):
    return ["env", f"UCX_TLS={transport}", f"UCX_NET_DEVICES={device}:1"]


def ucx(test, transport, ends, options):
    """(state, figure or reason) of one run of ucx_perftest. `ends`: (prefix, pid, device) of client and server."""
    name, size, (count, waiting) = test
    port = str(next(PORTS))
    (client_prefix, client_pid, client_device), (prefix, pid, device) = ends
    command = lab.ours(["ucx_perftest", "-p", port, *waiting], options.runner)
    server = lab.HostRun([*prefix, *environment(transport, device), *command], pid, LIMIT_S)
    if not server.wait_listening(int(port)):
        return matrix.cases.FAIL, matrix.cases.complaint(server.finish().text)
    command += ["-t", name, "-s", str(size), "-n", str(count), "-w", "100", options.server]
    client = lab.HostRun([*client_prefix, *environment(transport, client_device), *command], client_pid, LIMIT_S)
    result = client.finish()
    server.stop()
    other = server.finish()
    final = re.search(r"(?m)^Final: +\d+ +[\d.]+ +[\d.]+ +([\d.]+) +[\d.]+ +([\d.]+)", result.text)
    if result.code != 0 or not final:
        return matrix.cases.FAIL, matrix.cases.complaint(result.text + other.text)
    latency, rate = final.groups()
    return matrix.cases.PASS, f"{latency} us" if name == "tag_lat" else f"{rate} MB/s"


def mpi_program():
    source, program = pathlib.Path(__file__).with_name("mpi_cases.c"), build.cache_dir() / "mpi_cases"
    program.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mpicc", "-O2", "-Wall", "-Wextra", "-o", program, source], check=True)
    return str(program)


def ranks(transport, osc, program, options):
    """The result of an MPI program with two ranks over UCX."""
    pml = ["--mca", "pml", "ucx", "--mca", "btl", "^openib,uct", "--mca", "osc", osc]
    command = lab.ours(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *pml, *program], options.runner)
    return lab.HostRun([*environment(transport, "dq_lo"), *command], "self", 2 * LIMIT_S).finish()


def mpi(transport, options):
    """(state, figures) of both MPI cases."""
    result = ranks(transport, "^ucx", [mpi_program()], options)
    if result.code != 0 or "as expected" not in result.text:
        return [(matrix.cases.FAIL, matrix.cases.complaint(result.text))] * 2
    last = {name: re.findall(rf"{name} (\d+) bytes: ([\d.]+) us", result.text)[-1] for name in ("ping-pong", "allreduce")}
    return [(matrix.cases.PASS, f"{us} us for {size} bytes") for size, us in last.values()]


def one_sided(transport, options):
    """(state, number of tests) of mpi4py's `test_rma` over Open MPI's `osc/ucx`."""
    tests = [PYTHON, str(options.mpi4py.resolve() / "runtests.py"), "--no-builddir", "--include", "test_rma$"]
    return of_unittest(ranks(transport, "ucx", tests, options))


def of_unittest(result):
    """(state, text) of a run of `unittest` on every rank. Lines of the ranks and of libraries are interleaved."""
    counts = re.findall(r"Ran (\d+) tests", result.text)
    if result.code == 0 and counts and result.text.count("OK") == len(counts):
        return matrix.cases.PASS, f"{counts[0]} tests on each of {len(counts)} ranks"
    failed = re.search(r"(FAIL|ERROR): .*", result.text)
    return matrix.cases.FAIL, failed.group() if failed else matrix.cases.complaint(result.text)


def places():
    loop = (((), "self", "dq_lo"),) * 2
    addresses = (("10.79.0.1", "fd79::1"), ("10.79.0.2", "fd79::2"))
    nets = sandbox.veth_pair(lab.LINK_MTU, *addresses)
    cable = [(net.prefix, net.pid, f"dq_{name}") for net, name in zip(nets, ("left", "right"))]
    return (("loopback", loop, "127.0.0.1"), ("two namespaces", cable, "10.79.0.2"))


def run(options):
    rows, failed = [], 0
    columns = places()
    for transport in TRANSPORTS:
        for test in TESTS:
            cells = []
            for _, ends, options.server in columns:
                state, text = ucx(test, transport, ends, options)
                failed += state == matrix.cases.FAIL
                cells.append(f"{state}, {text}")
            name, size, (_, waiting) = test
            rows.append([f"`UCX_TLS={transport} {' '.join(['ucx_perftest', *waiting])} -t {name} -s {size}`", *cells])
            print(*rows[-1], sep=" | ", flush=True)
        for name, (state, text) in zip(("ping-pong", "allreduce"), mpi(transport, options)):
            failed += state == matrix.cases.FAIL
            rows.append([f"Open MPI, {name}, `--mca pml ucx`, `UCX_TLS={transport}`", f"{state}, {text}", ""])
            print(*rows[-1], sep=" | ", flush=True)
    if options.mpi4py:
        state, text = one_sided(ONE_SIDED, options)
        failed += state == matrix.cases.FAIL
        rows.append([f"mpi4py, `test_rma`, `--mca pml ucx --mca osc ucx`, `UCX_TLS={ONE_SIDED}`", f"{state}, {text}", ""])
        print(*rows[-1], sep=" | ", flush=True)
    heads = ["program", *(title for title, *_ in columns)]
    table = [heads, ["---"] * len(heads), *rows]
    return failed, "\n".join("| " + " | ".join(row) + " |" for row in table)


def version(command, pattern):
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(pattern, text)
    return found.group(1) if found else "of unknown version"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", default=lab.RUNNER, help="command that starts a program on our library (default: %(default)s)")
    parser.add_argument("--mpi4py", type=pathlib.Path, metavar="FOLDER", help="directory of mpi4py's tests; without it they do not run")
    parser.add_argument("--no-write", action="store_true", help="do not change docs/interop.md")
    parser.add_argument("--install", action="store_true", help="apt-get install what is missing (root)")
    options = parser.parse_args()
    try:
        if options.install:
            subprocess.run(["apt-get", "install", "-y", "-qq", *INSTALLABLE], check=True, stdout=subprocess.DEVNULL)
        sandbox.need(PROGRAMS)
        if options.mpi4py and not (options.mpi4py / "runtests.py").exists():
            raise lab.Missing(f"no tests of mpi4py in {options.mpi4py}: --mpi4py names test/ of its sources")
        if options.mpi4py and subprocess.run([PYTHON, "-c", "import mpi4py"], check=False, capture_output=True).returncode:
            raise lab.Missing("not installed: python3-mpi4py (apt-get install python3-mpi4py)")
        sandbox.enter()
        failed, table = run(options)
    except lab.Missing as reason:
        print(f"skipped: {reason}")
        return lab.SKIPPED
    ucx_version = version(["ucx_info", "-v"], r"# Version ([0-9.]+)")
    mpi_version = version(["mpirun", "--version"], r"Open MPI\) ([0-9.]+)")
    note = f"UCX {ucx_version}, Open MPI {mpi_version}; both sides on one machine: the figures only say that it runs."
    if options.no_write:
        print(note, table, sep="\n\n")
    else:
        matrix.write_between_markers(matrix.DOCUMENT, "stacks", f"{note}\n\n{table}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
