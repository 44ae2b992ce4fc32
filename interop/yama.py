#!/usr/bin/env python3
"""Runs the same-host path of our libibverbs under each setting of Yama, in a guest.

Yama is a part of the kernel that restricts which processes reach each other's memory. The guest is needed because
its setting `ptrace_scope` belongs to the whole machine, and because 3 cannot be left again. The case is one of
bindings/ibverbs/tests/c/same_host.c, which the tests also run under the setting of this machine. It gives up root.
Soft-RoCE is unloaded in the guest first: it owns the UDP port of the whole machine.

Exit status: 0 the case passed under every setting; 1 it failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import pathlib
import sys

import buffers
import lab
import sandbox

SOURCE = lab.REPOSITORY / "bindings/ibverbs/tests/c/same_host.c"
CASE = "yama_decides_who_is_reached_directly"
SETTINGS = range(4)
SCRIPT = f"""chmod 1777 /tmp; rdma link delete rxe0; rmmod rdma_rxe; cd /proc/sys/kernel/yama || exit 77
for scope in {" ".join(map(str, SETTINGS))}; do
    echo $scope >ptrace_scope && [ "$(cat ptrace_scope)" = $scope ] || exit 1
    LD_LIBRARY_PATH=/tmp DQUANT_DEVICES=lo DQUANT_PATH=auto /tmp/same_host {CASE} || exit 1
done"""
LIMIT_S = 200


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", metavar="FILE", help="our libibverbs.so, if it is not to be built with cargo")
    options = parser.parse_args()
    try:
        library, program = options.library or buffers.library(), buffers.program(SOURCE)
        lab.prepare_guest()
        sandbox.enter()
        machines = lab.Lab(cpus=2)
    except lab.Missing as missing:
        print(f"skipped: {missing}")
        return lab.SKIPPED
    try:
        guest = machines.guests[0]
        guest.put(pathlib.Path(library).read_bytes(), "/tmp/libibverbs.so.1")
        guest.put(program.read_bytes(), "/tmp/same_host")
        result = guest.shell(SCRIPT, limit_s=LIMIT_S)
        print(result.text)
    finally:
        machines.close()
    if result.code == lab.SKIPPED:
        print("skipped: the guest's kernel has no Yama")
        return lab.SKIPPED
    return 0 if result.code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
