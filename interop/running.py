#!/usr/bin/env python3
"""Runs what docs/running.md describes, as far as one machine can: the units, and the container's root file system.

1. Units: `systemd-analyze verify` has nothing to say about them, and `systemd-analyze security` finds little exposed.
2. By hand: the ExecStart line of each unit, as a user without privilege (the agent with CAP_NET_ADMIN alone, in a network
   namespace of its own), reports that it serves (NOTIFY_SOCKET) and ends with 0 on SIGTERM.
3. Image: `dist/container/rootfs.sh` makes the root file system of the container; target and DPU run in it (chroot), and a trainer
   of another user outside reads through both. Where buildah is installed, it builds the second stage of the Containerfile
   from that folder and runs the program in it.
4. With --boot: systemd boots over a copy of this machine's files that is thrown away, in namespaces of its own (boot.sh), and
   runs the units as they are installed: their sandboxes, a trainer of the group, one who is not in it, one in a user
   namespace, a DPU that is killed.

    python3 interop/running.py [--dquant target/release/dquant] [--boot]

Exit status: 0 nothing failed; 1 something failed; 77 the machine lacks something (the reason is printed).
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNITS = ROOT / "dist/systemd"
NAMES = ("serve", "dpu", "brain", "agent")
# Of 0 to 10, as systemd-analyze rates them.
MOST_EXPOSED = 2.5
SERVICE, TRAINER, TRAINERS, IMAGE = 64791, 64792, 64790, 4791
TOKEN = "correct-horse-battery"
PATIENCE_S = 30
failures = []


def report(what, why=""):
    print(f"{'FAIL' if why else 'ok':<5} {what}{': ' if why else ''}{why}", flush=True)
    if why:
        failures.append(what)


def skipped(what, why):
    print(f"skip  {what}: {why}", flush=True)


def run(command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, **options)


def unit(name):
    return (UNITS / f"dquant-{name}.service").read_text()


def options(name):
    """The options of the example file for a unit."""
    return re.search(r"^\w+_OPTIONS=(.*)$", (UNITS / f"{name}.env").read_text(), re.MULTILINE)[1]


def check_units(dquant, folder):
    if not shutil.which("systemd-analyze"):
        return skipped("units", "systemd-analyze is not installed (Debian: systemd)")
    for name in NAMES:
        copy = folder / f"dquant-{name}.service"
        copy.write_text(unit(name).replace("/usr/bin/dquant", str(dquant)))
        found = run(["systemd-analyze", "verify", "--man=no", copy])
        said = "\n".join(line for line in (found.stdout + found.stderr).splitlines() if copy.name in line)
        report(f"{copy.name}: verify", said or ("" if found.returncode == 0 else found.stderr))
        rated = run(["systemd-analyze", "security", "--offline=true", "--no-pager", copy])
        exposure = re.search(r"exposure level for \S+: ([0-9.]+)", rated.stdout)
        if not exposure:
            skipped(f"{copy.name}: security", f"no exposure is printed: {rated.stderr.strip()}")
            continue
        too_much = float(exposure[1]) > MOST_EXPOSED
        report(f"{copy.name}: exposure {exposure[1]}", f"above {MOST_EXPOSED}" if too_much else "")


class Manager:
    """What a service manager does: starts a daemon, hears that it serves, asks it to end."""

    def __init__(self, folder):
        self.name = folder / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.name))
        self.name.chmod(0o666)
        self.socket.settimeout(PATIENCE_S)

    def start(self, command, environment):
        environment = os.environ | environment | {"NOTIFY_SOCKET": str(self.name)}
        daemon = subprocess.Popen(
            [str(word) for word in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            told = self.socket.recv(64)
        except TimeoutError:
            daemon.kill()
            raise RuntimeError(f"it does not serve: {daemon.communicate()[1].strip()}") from None
        if told != b"READY=1\n":
            daemon.kill()
            raise RuntimeError(f"it said {told}")
        return daemon

    @staticmethod
    def end(daemon):
        """What was wrong with its end."""
        daemon.send_signal(signal.SIGTERM)
        try:
            _, said = daemon.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            return f"it does not end on SIGTERM: {daemon.communicate()[1].strip()}"
        return "" if daemon.returncode == 0 else f"it ended with {daemon.returncode}: {said.strip()}"


def as_user(uid, capabilities=()):
    """The words before a command that is to run without privilege."""
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={TRAINERS}", "--no-new-privs"]
    kept = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    return words + [f"--inh-caps={kept}", f"--bounding-set={kept}", f"--ambient-caps={kept}"]


def by_hand(dquant, folder, manager):
    for name in ("data", "run", "state"):
        (folder / name).mkdir()
        os.chown(folder / name, SERVICE, SERVICE)
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o400)
    os.chown(token, SERVICE, SERVICE)
    # Where the examples name what a machine has; everything else is as it stands there.
    places = {
        "/usr/bin/dquant": str(dquant),
        "/srv/dquant": f"{folder}/data --control 127.0.0.1:0 --roce 127.0.0.1:0",
        "/run/dquant-dpu/": f"{folder}/run/",
        "--socket-group dquant-trainers": f"--socket-group {TRAINERS} --control 127.0.0.1:0",
        "--roce 127.0.0.2:4791": "--roce 127.0.0.2:0",
        "/var/lib/dquant-brain/brain.redb": f"{folder}/state/brain.redb --listen 127.0.0.1:0",
        "1=eth0:25Gbit --brain 10.0.0.5": f"1=lo:25Gbit --brain 127.0.0.1:1 --state {folder}/state/agent.state "
        f"--socket {folder}/run/agent.sock --paces {folder}/run/paces",
        "${CREDENTIALS_DIRECTORY}": str(folder),
    }
    for name in NAMES:
        line = re.search(r"^ExecStart=(.*)$", unit(name), re.MULTILINE)[1]
        line = line.replace(f"${name.upper()}_OPTIONS", options(name))
        for there, here in places.items():
            line = line.replace(there, here)
        # Queues of its own loopback interface, not of this machine's.
        privilege = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if name == "agent" else []
        privilege += as_user(SERVICE, ["net_admin"] if name == "agent" else [])
        try:
            daemon = manager.start([*privilege, *line.split()], {})
        except RuntimeError as error:
            report(f"dquant-{name}: {line}", str(error))
            continue
        uids = re.search(r"^Uid:\s+(\d+)", pathlib.Path(f"/proc/{daemon.pid}/status").read_text(), re.MULTILINE)[1]
        why = manager.end(daemon)
        report(f"dquant-{name} by hand, as user {uids}: serves, and ends on SIGTERM", why)


def in_image(image, uid, words):
    """A command in the image's root file system, with /proc as a container has it."""
    inside = 'mount -t proc proc "$0/proc" && root=$0 && user=$1 && shift && '
    inside += f'exec chroot --userspec="$user:$user" --groups={TRAINERS} "$root" /usr/bin/dquant "$@"'
    return ["unshare", "--mount", "bash", "-c", inside, image, uid, *words]


def check_image(dquant, folder, manager):
    image = folder / "image"
    made = run([ROOT / "dist/container/rootfs.sh", dquant, image])
    if made.returncode != 0:
        return report("rootfs.sh", made.stderr.strip())
    files = sorted(str(path.relative_to(image)) for path in image.rglob("*") if path.is_file())
    size = sum((image / name).stat().st_size for name in files) >> 20
    report(f"image: {len(files)} files, {size} MiB")
    (image / "data").mkdir()
    (image / "data/web.bin").write_bytes(b"".join((at % 50_000).to_bytes(4, "little") for at in range(100_000)))
    os.chown(image / "run/dquant-dpu", IMAGE, IMAGE)
    token = {"DQUANT_TOKEN": TOKEN}
    running = []
    try:
        at = ["--control", "127.0.0.1:0", "--roce", "127.0.0.1:0", "--json"]
        running.append(manager_in(image, manager, ["serve", "--root", "/data", *at], token))
        running.append(
            manager_in(image, manager, ["dpu", "--socket", "/run/dquant-dpu/dpu.sock", "--socket-group", TRAINERS, *at], token)
        )
        control = json.loads(running[0].stdout.readline())["control"]
        plan = ["--plan", "window(64) | shuffle(3) | batch(8)", "--dtype", "u32", "--batches", "20"]
        through = ["cat", f"dq://{control}/web", "--dpu", image / "run/dquant-dpu/dpu.sock", *plan]
        read = run_bytes([*as_user(TRAINER), dquant, *through, "--dpu-user", IMAGE], token)
        local = run_bytes([dquant, "cat", image / "data/web.bin", *plan], {})
        same = read.returncode == 0 and read.stdout == local.stdout and len(read.stdout) == 20 * 8 * 64 * 4
        report("image: a trainer of another user reads the bytes of the file", "" if same else read.stderr.decode())
        refused = run_bytes([*as_user(TRAINER), dquant, *through], token)
        report("image: without its name nothing is sent", "" if b"belongs to user 4791" in refused.stderr else refused.stderr.decode())
    except RuntimeError as error:
        report("image", str(error))
    for name, daemon in zip(("target", "DPU"), running):
        report(f"image: the {name} ends on SIGTERM", manager.end(daemon))
    if shutil.which("buildah"):
        with_buildah(folder, image)
    else:
        skipped("the Containerfile's second stage", "buildah is not installed (Debian: buildah)")


def manager_in(image, manager, words, environment):
    # The program sees the manager's socket inside its own root.
    inside = image / "notify"
    if not inside.exists():
        os.link(manager.name, inside)
    daemon_manager = Manager.__new__(Manager)
    daemon_manager.name, daemon_manager.socket = pathlib.Path("/notify"), manager.socket
    return daemon_manager.start(in_image(image, IMAGE, words), environment)


def run_bytes(command, environment):
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, timeout=300, env=os.environ | environment)


def with_buildah(folder, image):
    text = (ROOT / "dist/container/Containerfile").read_text()
    second = text[text.index("FROM scratch") :].replace("--from=build /rootfs/", "image/")
    (folder / "Second").write_text(second)
    store = ["buildah", "--root", folder / "store", "--runroot", folder / "runroot", "--storage-driver", "vfs"]
    built = run([*store, "build", "--isolation", "chroot", "-f", folder / "Second", "-t", "dquant", folder])
    if built.returncode != 0:
        return report("buildah build", built.stderr.strip())
    container = run([*store, "from", "--pull-never", "localhost/dquant"]).stdout.strip()
    ran = run([*store, "run", "--isolation", "chroot", container, "/usr/bin/dquant", "--version"])
    report(f"buildah: {ran.stdout.strip()}", "" if ran.returncode == 0 else ran.stderr.strip())


class Machine:
    """systemd in namespaces of its own."""

    def __init__(self, folder):
        apart = ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--cgroup", "--net", "--kill-child"]
        self.outer = subprocess.Popen([*apart, ROOT / "interop/boot.sh", folder], stderr=subprocess.PIPE, text=True)
        self.inner = None
        for _ in range(PATIENCE_S * 5):
            time.sleep(0.2)
            if self.outer.poll() is not None:
                raise RuntimeError(self.outer.stderr.read().strip())
            children = pathlib.Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text().split()
            self.inner = children[0] if children else None
            is_booted = self.inner and pathlib.Path(f"/proc/{self.inner}/comm").read_text() == "systemd\n"
            if is_booted and self.run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded"):
                return
        self.end()
        raise RuntimeError(f"systemd does not boot within {PATIENCE_S} s")

    def run(self, *words, **options):
        root = f"/proc/{self.inner}/root"
        inside = ["nsenter", "--target", self.inner, "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"]
        return run([*inside, f"--root={root}", f"--wd={root}", *words], **options)

    def shell(self, script):
        return self.run("/bin/bash", "-ec", script)

    def property(self, name, what):
        return self.run("systemctl", "show", f"dquant-{name}", "--property", what, "--value").stdout.strip()

    def end(self):
        self.outer.kill()
        self.outer.wait()


INSTALL = """
install -m 755 /given/dquant /usr/bin/dquant
install -m 644 /given/units/dquant.sysusers /usr/lib/sysusers.d/dquant.conf
systemd-sysusers
install -m 644 /given/units/dquant-*.service /etc/systemd/system/
mkdir -p /etc/dquant /srv/dquant
install -m 644 /given/units/*.env /etc/dquant/
echo 'AGENT_OPTIONS=--node host0 --port 1=lo:1Gbit --brain 127.0.0.1' > /etc/dquant/agent.env
(umask 077; echo {token} > /etc/dquant/token; echo {token} > /etc/dquant/brain.token)
install -m 644 /given/web.bin /srv/dquant/
useradd dquant-alice && useradd dquant-bob && usermod -aG dquant-trainers dquant-alice
systemctl daemon-reload
"""
CAT = (
    "DQUANT_TOKEN={token} DQUANT_DPU=/run/dquant-dpu/dpu.sock DQUANT_DPU_USER={trusted} setpriv --reuid=dquant-{user} "
    "--regid=dquant-{user} --init-groups {inside} dquant cat {source} --plan 'window(64) | batch(8)' --dtype u32 --batches 20 | sha256sum"
)


def check_booted(folder):
    given, machine = folder / "machine/given", None
    given.mkdir(parents=True)
    shutil.copytree(UNITS, given / "units")
    shutil.copy(folder / "dquant", given)
    shutil.copy(folder / "image/data/web.bin", given)
    try:
        machine = Machine(folder / "machine")
        made = machine.shell(INSTALL.replace("{token}", TOKEN))
        if made.returncode != 0:
            return report("booted: units are installed", made.stderr.strip())
        booted(machine)
    except RuntimeError as error:
        report("booted", str(error))
    finally:
        if machine:
            machine.end()


def booted(machine):
    for name in NAMES:
        started = machine.run("systemctl", "start", f"dquant-{name}")
        said = machine.run("journalctl", "--no-pager", "--output=cat", "-n", "20", "-u", f"dquant-{name}").stdout
        status = machine.shell(f"cat /proc/{machine.property(name, 'MainPID')}/status").stdout
        capabilities = re.search(r"^CapEff:\s+0*([0-9a-f]+)$", status, re.MULTILINE)
        # CAP_NET_ADMIN is the twelfth.
        confined = bool(capabilities) and capabilities[1] == ("1000" if name == "agent" else "0")
        confined = confined and bool(re.search(r"^Seccomp:\s+2$", status, re.MULTILINE))
        ok = started.returncode == 0 and confined
        report(f"booted: dquant-{name} serves, confined", "" if ok else f"{started.stderr}{said}{status}")

    def cat(user, source="dq://127.0.0.1/web", inside="", trusted="dquant"):
        words = CAT.format(token=TOKEN, user=user, source=source, inside=inside, trusted=trusted)
        return machine.shell(f"set -o pipefail; {words}")

    local, member, stranger = cat("alice", "/srv/dquant/web.bin"), cat("alice"), cat("bob")
    same = member.returncode == 0 and member.stdout == local.stdout
    report("booted: a member of the group reads the bytes of the file", "" if same else member.stderr)
    status = machine.shell(f"DQUANT_TOKEN={TOKEN} dquant status --control 127.0.0.1:4790 --json")
    direct = status.returncode == 0 and json.loads(status.stdout)["counters"]["roce.direct_writes"] > 0
    report("booted: target and DPU need no packets", "" if direct else status.stdout + status.stderr)
    report("booted: others are refused", "" if "permission denied" in stranger.stderr else stranger.stderr)
    for trusted, why in (("dquant", "belongs to user 65534"), ("65534", "stands for many users")):
        unmapped = cat("alice", inside="unshare --user --map-current-user", trusted=trusted)
        report(f"booted: in a user namespace nothing is sent to {trusted}", "" if why in unmapped.stderr else unmapped.stderr)
    machine.run("systemctl", "kill", "--signal=KILL", "dquant-dpu")
    for _ in range(PATIENCE_S * 2):
        time.sleep(0.5)
        if machine.property("dpu", "NRestarts") == "1" and machine.property("dpu", "ActiveState") == "active":
            break
    member = cat("alice")
    same = member.returncode == 0 and member.stdout == local.stdout
    report("booted: a DPU that is killed serves again", "" if same else member.stderr)
    for name in NAMES:
        machine.run("systemctl", "stop", f"dquant-{name}")
        result = f"{machine.property(name, 'Result')}, {machine.property(name, 'ExecMainStatus')}"
        report(f"booted: dquant-{name} stops", "" if result == "success, 0" else result)


def lacking():
    if os.geteuid() != 0:
        return "the daemons are started as other users, which needs root"
    for program in ("setpriv", "unshare", "chroot", "ip"):
        if not shutil.which(program):
            return f"{program} is not installed (Debian: util-linux, coreutils, iproute2)"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dquant", default=ROOT / "target/release/dquant", type=pathlib.Path)
    parser.add_argument("--boot", action="store_true", help="boot systemd in namespaces, and run the units")
    arguments = parser.parse_args()
    given = arguments.dquant.resolve()
    if why := lacking():
        print(f"cannot run here: {why}")
        return 77
    with tempfile.TemporaryDirectory(prefix="dquant-running-") as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        # Where every user can execute it.
        dquant = pathlib.Path(shutil.copy(given, folder / "dquant"))
        dquant.chmod(0o755)
        check_units(dquant, folder)
        manager = Manager(folder)
        by_hand(dquant, folder, manager)
        check_image(dquant, folder, manager)
        if not arguments.boot:
            skipped("booted", "without --boot no systemd is started")
        elif not os.path.exists("/lib/systemd/systemd"):
            skipped("booted", "systemd is not installed")
        else:
            check_booted(folder)
    print(f"{len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
