"""A sandbox: private network, process and mount namespaces that end with their last process.

Nothing here has a name that could be left behind. The caller becomes the first process of a process namespace.
If it ends, by whatever signal, the kernel ends every process started in the namespace, and interfaces, bridges
and addresses disappear with the last one.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


class Missing(Exception):
    """This machine lacks something that the lab needs; the text names it."""


RESCUED = "a wake-up was lost"
"""What programs print whose sleeping thread found work that nobody had announced: a defect."""


def check(result, what):
    if result != 0:
        raise Missing(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(kind, target):
    check(LIBC.mount(kind.encode(), target.encode(), kind.encode(), 0, None), f"mount {kind}")


def need(programs):
    """`programs`: name of a program -> Debian package that contains it."""
    lacking = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if lacking:
        raise Missing(f"not installed: {' '.join(lacking)} (apt-get install {' '.join(lacking)})")


def _unshare():
    """Creates namespaces as root, or as an ordinary user who may create a user namespace."""
    flags, user, group = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS, os.geteuid(), os.getegid()
    if user == 0:
        check(LIBC.unshare(flags), "network namespaces")
        return
    check(LIBC.unshare(flags | CLONE_NEWUSER), "neither root nor user namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        pathlib.Path("/proc/self", name).write_text(text)


def _supervise(child):
    """The parent: ends the sandbox when it is ended itself, and exits with the sandbox's status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGKILL))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def enter():
    """Returns in a forked process, the first of the sandbox; the original process waits for it and exits.

    Raises `Missing` if namespaces are not permitted.
    """
    sys.stdout.flush()
    _unshare()
    child = os.fork()
    if child:
        _supervise(child)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    check(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    mount("proc", "/proc")
    with contextlib.suppress(Missing):  # /sys then shows the outer interfaces, but only their names
        mount("sysfs", "/sys")
    ip("link set lo up")


def ip(arguments, prefix=()):
    done = subprocess.run([*prefix, "ip", *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"ip {arguments}: {done.stderr.strip()}")


def sysctl(name, value, prefix=()):
    subprocess.run([*prefix, "sh", "-c", f"echo {value} > /proc/sys/{name}"], check=False, capture_output=True)


class Net:
    """A further network namespace, held open by a sleeping process."""

    def __init__(self):
        script = "mount -t sysfs sysfs /sys 2>/dev/null; echo ready; exec sleep infinity"
        command = ["unshare", "--net", "--mount", "sh", "-c", script]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.holder.stdout.readline()
        self.pid = self.holder.pid
        self.prefix = ("nsenter", f"--target={self.pid}", "--net", "--mount")
        ip("link set lo up", self.prefix)


def keep_order(net, name):
    """Lets packets of a flow arrive in the order in which they left, as a cable does.

    An end of a veth pair takes each packet in on the processor that sent it. The packets of a flow are sent by whichever
    processor empties the queueing discipline, so without this some of them overtake others.
    """
    processors = f"{(1 << min(os.cpu_count(), 32)) - 1:x}"
    done = subprocess.run([*net.prefix, "sh", "-c", f"echo {processors} > /sys/class/net/{name}/queues/rx-0/rps_cpus"],
                          capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: packets may overtake each other: {done.stderr.strip()}", file=sys.stderr)


def veth_pair(mtu, first, second):
    """Two namespaces joined by a veth pair; `first` and `second` are the (IPv4, IPv6) addresses of its ends."""
    ends = (Net(), Net())
    names = ("left", "right")
    ip(f"link add left netns {ends[0].pid} mtu {mtu} type veth peer name right netns {ends[1].pid} mtu {mtu}")
    for net, name, (v4, v6) in zip(ends, names, (first, second)):
        sysctl(f"net/ipv6/conf/{name}/accept_dad", 0, net.prefix)
        ip(f"addr add {v4}/24 dev {name}", net.prefix)
        ip(f"addr add {v6}/64 dev {name} nodad", net.prefix)
        ip(f"link set {name} up", net.prefix)
    for net, name in zip(ends, names):
        wait_for_ipv6(net, name)
    return ends


def wait_for_ipv6(net, name):
    """Waits for the link-local address: Linux enables IPv6 up to a second after the carrier is up."""
    command = [*net.prefix, "ip", "-6", "addr", "show", "dev", name, "scope", "link", "-tentative"]
    for _ in range(50):
        if subprocess.run(command, capture_output=True, check=False).stdout:
            return
        time.sleep(0.1)
