"""Real daemons for the tests: a target and a DPU on loopback addresses of their own, ended with the test.

`DQUANT` names the binary. Everything lives in one temporary folder; nothing is found by name.
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import unittest

import numpy

import dquant

TOKEN = "correct-horse-battery"
PATIENCE_S = 60
"""No wait is longer: far above what a loaded machine needs, so whoever runs into it has found a hang."""

_addresses = 0


def fresh_ip():
    """A loopback address that no other test and no other run uses."""
    global _addresses
    _addresses += 1
    pid = os.getpid()
    return f"127.{2 + (pid >> 8) % 250}.{pid % 256}.{_addresses}"


def eventually(what, look):
    """Waits until `look` returns something."""
    started = time.monotonic()
    while time.monotonic() - started < PATIENCE_S:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(f"in vain: {what}")


class Daemon:
    """A daemon that has reported that it is ready."""

    def __init__(self, world, args):
        self.process = subprocess.Popen(
            [world.binary, *args], stdout=subprocess.PIPE, stderr=world.log, env=world.env, stdin=subprocess.DEVNULL
        )
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.kill()
            raise AssertionError(f"{args} did not start: {world.said()}")
        self.ready = json.loads(line)

    def kill(self):
        """`kill -9`, at once."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class World(unittest.TestCase):
    """A target that serves `web` (ids below 2^16) and `big` (one id above), and a DPU, for a class of tests."""

    PLAN = "window(64) | shuffle(7) | narrow(u16) | batch(32)"
    SHAPE = (32, 64)

    @classmethod
    def setUpClass(cls):
        cls.binary = os.environ["DQUANT"]
        cls.folder = tempfile.mkdtemp(prefix="dquant-py-")
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.log = open(os.path.join(cls.folder, "log"), "wb")
        cls.addClassCleanup(cls.log.close)
        cls.addClassCleanup(cls.check_log)
        cls.env = {**os.environ, "DQUANT_TOKEN": TOKEN, "XDG_RUNTIME_DIR": cls.folder}
        cls.env.pop("DQUANT_DPU", None)
        root = os.path.join(cls.folder, "root")
        os.mkdir(root)
        cls.tokens = numpy.random.default_rng(1).integers(0, 50_000, 1_000_000, dtype=numpy.uint32)
        cls.tokens.tofile(os.path.join(root, "web.bin"))
        cls.tokens[::-1].tofile(os.path.join(root, "code.bin"))
        big = cls.tokens.copy()
        big[500_000] = 70_000
        big.tofile(os.path.join(root, "big.bin"))
        cls.root = root
        ip = fresh_ip()
        args = ["serve", "--json", "--quiet", "--die-with-parent", "--root", root]
        args += ["--roce", f"{ip}:4791", "--control", f"{ip}:0"]
        target = Daemon(cls, args)
        cls.addClassCleanup(target.kill)
        cls.control = target.ready["control"]
        cls.url = f"dq://{cls.control}/web"
        cls.dpu = cls.start_dpu()
        cls.socket = cls.dpu.ready["socket"]

    @classmethod
    def start_dpu(cls):
        """A DPU of its own."""
        ip = fresh_ip()
        socket = os.path.join(cls.folder, f"{ip}.sock")
        args = ["dpu", "--json", "--quiet", "--die-with-parent", "--socket", socket]
        args += ["--roce", f"{ip}:4791", "--control", f"{ip}:0"]
        dpu = Daemon(cls, args)
        cls.addClassCleanup(dpu.kill)
        return dpu

    @classmethod
    def check_log(cls):
        """Fails when a daemon has lost a wake-up, however well the tests went."""
        assert "a wake-up was lost" not in cls.said(), cls.said()

    @classmethod
    def said(cls):
        """What the daemons wrote."""
        with open(cls.log.name, encoding="utf-8", errors="replace") as log:
            return log.read()

    def options(self, offload=True, **more):
        """How the tests reach their daemons."""
        where = {"dpu": self.socket} if offload else {"roce": fresh_ip(), "memory": 32 << 20}
        return {"token": TOKEN, "dtype": "u32", "slot_size": 64 << 10, "slots": 4, **where, **more}

    def stream(self, url=None, plan=None, offload=True, **more):
        """A stream that is closed with the test, whatever is left of it."""
        return self.opened(url or self.url, plan or self.PLAN, offload, **more)

    def opened(self, source, plan=None, offload=True, **more):
        """As `stream`, with arguments as they are."""
        stream = dquant.Stream(source, plan, offload, **self.options(offload, **more))

        def close():
            try:
                stream.close()
            except BufferError:
                pass

        self.addCleanup(close)
        return stream

    def path(self, name):
        """A path of this machine, in the folder that the target serves."""
        return os.path.join(self.root, name)

    def cat(self, *args, url=None, plan=None, dpu=None):
        """Runs `dquant cat` through a DPU."""
        line = [self.binary, "cat", url or self.url, "--plan", plan or self.PLAN, "--dpu", dpu or self.socket]
        line += [*args] if "--dtype" in args else ["--dtype", "u32", *args]
        return subprocess.run(line, env=self.env, capture_output=True, timeout=PATIENCE_S, check=False)
