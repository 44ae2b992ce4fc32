#!/usr/bin/env python3
"""Registers buffers of another device (dma-buf) with our libibverbs, in a guest.

Few machines let a program make a dma-buf without a GPU. The guest's kernel has vgem, a graphics device without
hardware. The cases are those of bindings/ibverbs/tests/c/buffers.c, which the tests also run on this machine if it
has udmabuf or vgem. Soft-RoCE is unloaded in the guest first: it owns the UDP port of the whole machine.

Exit status: 0 every case passed; 1 a case failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import json
import pathlib
import subprocess
import sys

import build
import lab
import sandbox

SOURCE = lab.REPOSITORY / "bindings/ibverbs/tests/c/buffers.c"
CARGO = ("cargo", "build", "-p", "ibverbs", "--message-format=json-render-diagnostics")
SCRIPT = """rdma link delete rxe0; rmmod rdma_rxe; ls /dev/dri/card0 &&
LD_LIBRARY_PATH=/tmp DQUANT_DEVICES=lo /tmp/buffers"""
LIMIT_S = 200


def made_by(command):
    """What cargo says that it has made, one object for each artifact. Raises `Missing` without cargo."""
    sandbox.need({"cargo": "cargo"})
    done = subprocess.run(command, cwd=lab.REPOSITORY, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def library():
    """Path of our library. Raises `Missing` without cargo."""
    names = (name for made in made_by(CARGO) for name in made.get("filenames", []))
    return next(name for name in names if name.endswith("libibverbs.so"))


def program(source=SOURCE):
    """Path of the compiled test program. Raises `Missing` without a compiler or the headers."""
    sandbox.need({"cc": "gcc"})
    if not pathlib.Path("/usr/include/infiniband/verbs.h").exists():
        raise lab.Missing("not installed: libibverbs-dev (apt-get install libibverbs-dev)")
    path = build.cache_dir() / source.stem
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-std=gnu11", "-O1", "-Wall", "-o", path, source, "-libverbs"], check=True)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", metavar="FILE", help="our libibverbs.so, if it is not to be built with cargo")
    options = parser.parse_args()
    try:
        files = {"/tmp/libibverbs.so.1": options.library or library(), "/tmp/buffers": program()}
        files = {there: pathlib.Path(here).read_bytes() for there, here in files.items()}
        lab.prepare_guest()
        sandbox.enter()
        machines = lab.Lab()
    except lab.Missing as missing:
        print(f"skipped: {missing}")
        return lab.SKIPPED
    try:
        guest = machines.guests[0]
        for path, data in files.items():
            guest.put(data, path)
        result = guest.shell(SCRIPT, limit_s=LIMIT_S)
        print(result.text)
        if result.code != 0:
            print(guest.shell("dmesg | tail -5").text)
    finally:
        machines.close()
    return 0 if result.code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
