#!/usr/bin/env python3
"""The lab: guests with the kernel's soft-RoCE, and the places where one side of a test can run.

`Lab` boots guests in QEMU (emulated, no KVM) on a bridge inside the sandbox. `HostEnd` and `GuestEnd` are the
two kinds of place: both start a program with `start` and describe their RDMA device with `device`.

Usage: lab.py [--guests N] [--capture FILE] COMMAND...    COMMAND runs on the host side of the link
       lab.py [--guests N] --in-guest 'COMMAND'           COMMAND runs in the first guest
Exit status: the command's; 77 if the machine lacks something (the reason is printed).
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time

import build
import sandbox
from sandbox import Missing

SKIPPED = 77
AGENT_PORT = 7777
HOST_V4, HOST_V6 = "10.77.0.1", "fd77::1"
LINK_MTU = 4500  # room for a path MTU of 4096 and every header
QUEUE_PACKETS = 20000  # of the tap: unreliable transports have no other flow control
BOOT_LIMIT_S = 120
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target")
RUNNER = f"{TARGET}/release/dquant run --"
PROGRAMS = {"ibv_devinfo": "ibverbs-utils", "ib_send_bw": "perftest", "ip": "iproute2", "nsenter": "util-linux"}
GUEST_PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "apt-get": "apt", "dpkg-deb": "dpkg"}


def ours(command, runner):
    """`command` (a list) as it is started on our library. Only this function knows how."""
    return [*shlex.split(runner), *command]


WIRE_CASES = "wire_cases"


def wire_cases():
    """Path of our own test program, compiled if its source is newer. Raises `Missing` without a compiler."""
    sandbox.need({"cc": "gcc"})
    if not pathlib.Path("/usr/include/infiniband/verbs.h").exists():
        raise Missing("not installed: libibverbs-dev (apt-get install libibverbs-dev)")
    source, program = pathlib.Path(__file__).with_name("wire_cases.c"), build.cache_dir() / WIRE_CASES
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        try:
            program.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Missing(f"{error.filename}: {error.strerror}") from error
        command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, source, "-libverbs"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"{WIRE_CASES} does not compile: {done.stderr[:300]}")
    return program


@dataclasses.dataclass
class Result:
    """`code` is None for a program that had to be killed."""
    code: int | None
    text: str


@dataclasses.dataclass
class Device:
    """Name, and GID index by IP version (4 or 6)."""
    name: str
    gids: dict


def parse_devinfo(text, v4, v6):
    """The device in the output of `ibv_devinfo -v` that has one of the addresses."""
    for block in re.split(r"(?m)^hca_id:", text)[1:]:
        gids = {}
        for index, gid in re.findall(r"GID\[\s*(\d+)\]:\s*([0-9a-fA-F:.]+)", block):
            for family, wanted in ((4, f"::ffff:{v4}"), (6, v6)):
                if wanted and _address(gid) == _address(wanted):
                    gids.setdefault(family, int(index))
        if gids:
            return Device(block.split()[0], gids)
    raise LookupError(f"no device has {v4} or {v6}:\n{text[-600:]}")


def _address(text):
    return socket.inet_pton(socket.AF_INET6, text)


def losses(net):
    """Counters of a network namespace that tell of lost packets and are not 0. `net`: its /proc/PID/net."""
    counters = dict(line.split() for line in (net / "snmp6").read_text().splitlines())
    lines = (net / "snmp").read_text().splitlines()
    for names, values in zip(lines[::2], lines[1::2]):
        kind, *names = names.replace(":", "").split()
        counters |= {kind + name: value for name, value in zip(names, values.split()[1:])}
    for line in (net / "dev").read_text().splitlines()[2:]:
        name, *values = line.replace(":", " ").split()
        counters |= {f"{name} rx Discards": values[3], f"{name} tx Discards": values[11]}
    lost = re.compile(r"(Errors|Discards|NoRoutes|NoPorts)$")
    return "".join(f"{name}: {value}\n" for name, value in counters.items() if lost.search(name) and value != "0")


# ---- one side of a test on this machine --------------------------------------------------------------------


class HostRun:
    """A program on this machine, in a process group of its own."""

    def __init__(self, command, net_pid, limit_s):
        self.net, self.deadline = f"/proc/{net_pid}/net", time.monotonic() + limit_s
        self.output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.output,
                                        stderr=subprocess.STDOUT, start_new_session=True)

    def wait_listening(self, port):
        """True once a program listens on the TCP port; False if the program ended or the limit passed."""
        while self.process.poll() is None and time.monotonic() < self.deadline:
            if any(_listens(pathlib.Path(self.net, name), port) for name in ("tcp", "tcp6")):
                return True
            time.sleep(0.01)
        return False

    def finish(self):
        try:
            code = self.process.wait(max(0.1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        text = self._end()
        # A program that lost a wake-up ends well a little later than it should.
        return Result(1 if code == 0 and sandbox.RESCUED in text else code, text)

    def stop(self):
        self.deadline = 0

    def _end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        with self.output:
            self.output.seek(0)
            return self.output.read().decode(errors="replace")


def _listens(table, port):
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return False
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


class HostEnd:
    """A network namespace of this machine, with our library (without a runner, with the installed one)."""

    def __init__(self, name, v4, v6, runner, net=None):
        self.name, self.v4, self.v6, self.runner = name, v4, v6, runner
        self.prefix, self.net_pid = (net.prefix, net.pid) if net else ((), "self")

    def start(self, command, limit_s, port=None):
        if command[0] == WIRE_CASES:
            command = [str(wire_cases()), *command[1:]]
        command = [*self.prefix, *(ours(command, self.runner) if self.runner else command)]
        return HostRun(command, self.net_pid, limit_s)

    def device(self):
        result = self.start(["ibv_devinfo", "-v"], 20).finish()
        return parse_devinfo(result.text, self.v4, self.v6)

    def troubles(self):
        """Packets that the kernel has lost, by counter: for failed cases."""
        return losses(pathlib.Path(f"/proc/{self.net_pid}/net"))


# ---- one side of a test in a guest ---------------------------------------------------------------------------


class GuestRun:
    """A program in a guest, over its own connection to the guest's shell.

    The shell prints two marks on the connection: when the port is open, and the exit status.
    """

    def __init__(self, address, command, limit_s, port):
        self.deadline = time.monotonic() + limit_s + 5  # the guest's own limit comes first
        self.connection = socket.create_connection((address, AGENT_PORT), 10)
        self.received = b""
        quiet = "exec 2>&1 </dev/null"
        run = f"timeout -s KILL {limit_s} {shlex.join(command)}"
        script = f"{quiet}; {run} & p=$!; {self._watch(port)} wait $p; c=$?; echo; echo @@exit $c; exit\n"
        self.connection.sendall(f"eval {shlex.quote(script.strip())}; exit\n".encode())

    @staticmethod
    def _watch(port):
        if port is None:
            return ""
        mark = f":{port:04X} [0-9A-F]*:0000 0A"
        look = f"grep -q '{mark}' /proc/net/tcp /proc/net/tcp6"
        return f"while [ -d /proc/$p ]; do {look} && echo && echo @@listens && break; usleep 20000; done;"

    def _read_until(self, done):
        while not done():
            left = self.deadline - time.monotonic()
            if left <= 0:
                return
            self.connection.settimeout(left)
            try:
                data = self.connection.recv(65536)
            except TimeoutError:
                return
            if not data:
                return
            self.received += data

    def wait_listening(self, port):
        self._read_until(lambda: b"@@listens" in self.received or b"@@exit" in self.received)
        return b"@@listens" in self.received

    def finish(self):
        self._read_until(lambda: re.search(rb"@@exit \d+\n", self.received))
        self.connection.close()
        text, _, code = self.received.decode(errors="replace").rpartition("@@exit ")
        code = int(code) if code.strip().isdigit() else None
        # 137 is the guest's own time limit
        return Result(None if code == 137 else code, text.replace("@@listens\n", "").strip("\n"))

    def stop(self):
        self.deadline = min(self.deadline, time.monotonic() + 1)


class GuestEnd:
    """A guest: its kernel is the peer."""

    def __init__(self, number):
        self.number, self.name = number, f"guest {number}"
        self.v4, self.v6 = f"10.77.0.{number + 1}", f"fd77::{number + 1}"
        self.has_wire_cases, self.serial = False, None

    def start(self, command, limit_s, port=None):
        if command[0] == WIRE_CASES and not self.has_wire_cases:
            self.put(wire_cases().read_bytes(), f"/bin/{WIRE_CASES}")
            self.has_wire_cases = True
        return GuestRun(self.v4, command, limit_s, port)

    def shell(self, script, limit_s=30):
        return self.start(["sh", "-c", script], limit_s).finish()

    def put(self, data, path):
        """Writes a file in the guest, executable.

        The data is sent only after the shell has read its line; otherwise the shell would read ahead into it.
        """
        with socket.create_connection((self.v4, AGENT_PORT), 10) as connection:
            def expect(word):
                answer = b""
                while word not in answer:
                    part = connection.recv(4096)
                    if not part:
                        raise OSError(f"{self.name}: {path} was not written")
                    answer += part

            line = f"echo ready; head -c {len(data)} > {path}; chmod 755 {path}; echo written; exit\n"
            connection.sendall(line.encode())
            expect(b"ready")
            connection.sendall(data)
            expect(b"written")

    def device(self):
        return parse_devinfo(self.shell("ibv_devinfo -v").text, self.v4, self.v6)

    def troubles(self):
        """Kernel messages since the last call, and error counters: for failed cases."""
        counters = "cd /sys/class/infiniband/rxe0/ports/1/hw_counters; grep -v '^0$' *"
        try:
            return self.shell(f"dmesg -c | tail -5; {counters}").text
        except OSError as error:
            return f"{self.name} does not answer: {error}"


# ---- the guests ------------------------------------------------------------------------------------------------


class Lab:
    """Bridge, taps and guests. Create it inside the sandbox; it ends with the sandbox."""

    def __init__(self, guests=1, mtu=LINK_MTU, cpus=1, verbose=False):
        self.cache, self.mtu, self.cpus, self.verbose = build.cache_dir(), mtu, cpus, verbose
        self._bridge()
        self.guests = [GuestEnd(number) for number in range(1, guests + 1)]
        for guest in self.guests:
            self._tap(guest)
        self.machines = [self._boot(guest) for guest in self.guests]
        for guest, machine in zip(self.guests, self.machines):
            self._wait_for(guest, machine)

    def _bridge(self):
        ip = sandbox.ip
        ip("link add lab type bridge forward_delay 0 mcast_snooping 0")
        sandbox.sysctl("net/ipv6/conf/lab/accept_dad", 0)
        ip(f"link set lab address 52:54:00:77:00:01 mtu {self.mtu} up")
        ip(f"addr add {HOST_V4}/24 dev lab")
        ip(f"addr add {HOST_V6}/64 dev lab nodad")

    def _tap(self, guest):
        tap = f"tap{guest.number}"
        sandbox.ip(f"tuntap add dev {tap} mode tap")
        sandbox.ip(f"link set {tap} mtu {self.mtu} txqueuelen {QUEUE_PACKETS} master lab up")

    def _boot(self, guest):
        tap = f"tap{guest.number}"
        kernel = ("console=ttyS0 quiet panic=-1 tsc=reliable no_timer_check mitigations=off nokaslr "
                  f"random.trust_cpu=on lab.v4={guest.v4}/24 lab.v6={guest.v6}/64 "
                  f"lab.mtu={self.mtu} lab.agent={AGENT_PORT}")
        command = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-M", "q35", "-smp", str(self.cpus),
                   "-m", "768", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
                   "-kernel", self.cache / "vmlinux", "-initrd", self.cache / "initramfs.cpio", "-append", kernel,
                   "-netdev", f"tap,id=net,ifname={tap},script=no,downscript=no,vhost=off",
                   "-device", f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:{guest.number + 1:02x},romfile=",
                   "-serial", "stdio"]
        guest.serial = tempfile.TemporaryFile()  # has no name that could be left behind
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=guest.serial)

    def _wait_for(self, guest, machine):
        begun = time.monotonic()
        while time.monotonic() < begun + BOOT_LIMIT_S:
            if machine.poll() is not None:
                raise Missing(f"{guest.name}: QEMU ended with {machine.returncode}\n{self.console(guest)}")
            try:
                socket.create_connection((guest.v4, AGENT_PORT), 1).close()
                if self.verbose:
                    print(f"{guest.name}: {self.console(guest)}", file=sys.stderr)
                return
            except OSError:
                time.sleep(0.05)
        raise Missing(f"{guest.name} did not boot in {BOOT_LIMIT_S} s\n{self.console(guest)}")

    def console(self, guest):
        length = os.fstat(guest.serial.fileno()).st_size
        return os.pread(guest.serial.fileno(), length, 0).decode(errors="replace").strip()[-2000:]

    def capture(self, path, expression="udp port 4791"):
        """Starts tcpdump on the link; stop it with `terminate` and `wait`."""
        command = ["tcpdump", "-Z", "root", "-i", "lab", "--immediate-mode", "-U", "-s", "0", "-w", path, expression]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        process.stderr.readline()  # "listening on": from here on every packet is captured
        return process

    def revive(self):
        """Reboots every guest that no longer answers. Returns the end of their console output."""
        words = []
        for index, guest in enumerate(self.guests):
            try:
                guest.shell("true", limit_s=10)
            except OSError:
                words.append(f"{guest.name} stopped: {self.console(guest)}")
                self.machines[index].kill()
                self.machines[index].wait()
                self.machines[index] = self._boot(guest)
                self._wait_for(guest, self.machines[index])
                guest.has_wire_cases = False
        return "\n".join(words)

    def close(self):
        for machine in self.machines:
            machine.kill()
            machine.wait()


def prepare_guest():
    """Prepares what must exist before the sandbox is entered; raises `Missing`."""
    sandbox.need(PROGRAMS | GUEST_PROGRAMS)
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise Missing("/dev/net/tun is not accessible: run as root")
    try:
        build.build()
    except build.BuildError as error:
        raise Missing(str(error)) from error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guests", type=int, default=1)
    parser.add_argument("--cpus", type=int, default=1, help="virtual processors of a guest (default 1)")
    parser.add_argument("--capture", help="write the link's RoCE packets to this pcap file")
    parser.add_argument("--in-guest", help="run this shell command in the first guest instead")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        prepare_guest()
        sandbox.enter()
        lab = Lab(options.guests, cpus=options.cpus, verbose=True)
    except Missing as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    try:
        capture = lab.capture(options.capture) if options.capture else None
        if options.in_guest:
            result = lab.guests[0].shell(options.in_guest, limit_s=600)
            print(result.text)
            code = SKIPPED if result.code is None else result.code
        else:
            code = subprocess.run(options.command or [os.environ.get("SHELL", "/bin/sh")]).returncode
        if capture:
            capture.terminate()
            capture.wait()
        return code
    finally:
        lab.close()


if __name__ == "__main__":
    sys.exit(main())
