#!/usr/bin/env python3
"""Runs the registration cache on the kernel's soft-RoCE, in a guest.

Soft-RoCE pins the pages of a region when it is registered, as adapters do: with a key that is kept while the memory is
freed and allocated again, it sends what the old pages held. The program is crates/adapter/examples/registration.rs. Its
last line tells whether the device pins pages, which this demands, so that the test could fail.

Exit status: 0 only right bytes arrived, through the cache; 1 otherwise; 77 the machine lacks something (the reason is
printed).
"""

import pathlib
import sys

import buffers
import lab
import sandbox

CARGO = ("cargo", "build", "-p", "adapter", "--example", "registration", "--message-format=json-render-diagnostics")
SCRIPT = """lib=$(ls /usr/lib/*/libibverbs.so.1 /lib/*/libibverbs.so.1 2>/dev/null | head -1)
/tmp/registration "$lib" rxe0"""
WANTED = ("200 from the cache, 0 not", "hits: 100, misses: 100, invalidated: 99", "this device pins pages")
LIMIT_S = 200


def program():
    """Path of the example. Raises `Missing` without cargo."""
    return next(made["executable"] for made in buffers.made_by(CARGO) if made.get("executable"))


def main():
    try:
        data = pathlib.Path(program()).read_bytes()
        lab.prepare_guest()
        sandbox.enter()
        machines = lab.Lab(cpus=2)
    except lab.Missing as missing:
        print(f"skipped: {missing}")
        return lab.SKIPPED
    try:
        guest = machines.guests[0]
        guest.put(data, "/tmp/registration")
        result = guest.shell(SCRIPT, limit_s=LIMIT_S)
        print(result.text)
    finally:
        machines.close()
    missing = [text for text in WANTED if text not in result.text]
    if missing:
        print(f"not found: {missing}")
    return 1 if missing or result.code else 0


if __name__ == "__main__":
    sys.exit(main())
