#!/usr/bin/env python3
"""Builds the guest: a Debian kernel with soft-RoCE and the programs of the matrix, from Debian packages alone.

The packages are downloaded with apt-get, never installed, and read as archives, so neither root, chroot nor an
unpacked tree is needed. The results are a kernel image that QEMU boots directly and an initramfs. Both are in a
cache outside the repository ($DQUANT_INTEROP_CACHE, else $XDG_CACHE_HOME/dquant/interop, else
~/.cache/dquant/interop). A second run finds the stamp of the first and does nothing.

Usage: build.py [--force]      prints the cache directory
"""

import hashlib
import io
import lzma
import os
import pathlib
import posixpath
import stat
import struct
import subprocess
import sys
import tarfile

HERE = pathlib.Path(__file__).resolve().parent

# What the guest runs. Libraries follow from the ELF headers; their packages must be in PACKAGES.
PROGRAMS = [
    "/bin/busybox", "/bin/dash", "/bin/rdma",
    "/usr/bin/ibv_devices", "/usr/bin/ibv_devinfo",
    *(f"/usr/bin/ibv_{kind}_pingpong" for kind in ("rc", "uc", "ud", "srq", "xsrq")),
    *(f"/usr/bin/ib_{verb}_{kind}" for verb in ("send", "write", "read", "atomic") for kind in ("bw", "lat")),
    "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so",
    "/lib/x86_64-linux-gnu/libgcc_s.so.1",  # of Rust programs
]
PACKAGES = [
    "busybox-static", "dash", "iproute2", "ibverbs-utils", "ibverbs-providers", "libibverbs1", "librdmacm1",
    "libibumad3", "perftest", "libpci3", "libnl-3-200", "libnl-route-3-200", "libmnl0", "libc6", "libgcc-s1",
    "zlib1g", "libudev1", "libcap2", "libselinux1", "libpcre2-8-0", "libbsd0", "libmd0", "libelf1", "libbpf1",
]
# Modules to load, in order; their dependencies are loaded before them.
MODULES = ["virtio_pci", "virtio_net", "crc32_generic", "ib_uverbs", "rdma_rxe", "vgem"]
MODULE_DIRS = ("kernel/drivers/infiniband/", "kernel/drivers/virtio/", "kernel/drivers/net/", "kernel/net/",
               "kernel/crypto/", "kernel/arch/x86/crypto/", "kernel/lib/", "kernel/drivers/block/",
               "kernel/drivers/gpu/drm/vgem/", "kernel/drivers/gpu/drm/drm")
LIBRARY_DIRS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64")
LOADER = "/lib64/ld-linux-x86-64.so.2"


class BuildError(Exception):
    """The guest cannot be built here; the text names what is missing."""


def cache_dir():
    named = os.environ.get("DQUANT_INTEROP_CACHE")
    if named:
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "dquant" / "interop"


# ---- packages ------------------------------------------------------------------------------------------


def output_of(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def kernel_package():
    """The package that the metapackage depends on; its name contains the version."""
    for line in output_of("apt-cache", "depends", "linux-image-amd64").splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-"):
            return name
    raise BuildError("apt knows no linux-image-amd64: run `apt-get update`")


def download(names, folder):
    """Paths of the packages' archives, downloaded if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not list(folder.glob(f"{name}_*.deb"))]
    if missing:
        command = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *missing]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"apt-get download: {done.stderr.strip()} (after `apt-get update`?)")
    return [max(folder.glob(f"{name}_*.deb"), key=lambda path: path.stat().st_mtime) for name in names]


class Tree:
    """Files of packages by absolute path: their bytes, or the target of a link."""

    def __init__(self):
        self.files, self.links = {}, {}

    def add_package(self, path, wanted):
        """Reads an archive as a stream: the kernel's is 400 MB unpacked, of which 20 MB are needed."""
        reader = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE)
        with tarfile.open(fileobj=reader.stdout, mode="r|") as archive:
            for entry in archive:
                name = entry.name.removeprefix(".")
                if entry.issym():
                    self.links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), entry.linkname))
                elif entry.isfile() and wanted(name):
                    self.files[name] = archive.extractfile(entry).read()
        if reader.wait():
            raise BuildError(f"{path}: not a Debian package")

    def resolve(self, name):
        """The contents of the file at a path, or None; /lib and /usr/lib are one directory on a Debian system."""
        for _ in range(8):
            for spelling in (name, "/usr" + name, name.removeprefix("/usr")):
                if spelling in self.files:
                    return self.files[spelling]
                if spelling in self.links:
                    name = self.links[spelling]
                    break
            else:
                return None
        return None


# ---- ELF: needed libraries and module dependencies -------------------------------------------------------


def needed_libraries(elf):
    """DT_NEEDED of a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return []
    table, = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", elf, table + index * size) for index in range(count)]
    loads = [(header[3], header[2], header[5]) for header in headers if header[0] == 1]
    dynamic = [header for header in headers if header[0] == 2]
    if not dynamic:
        return []
    entries = struct.iter_unpack("<QQ", elf[dynamic[0][2]:dynamic[0][2] + dynamic[0][5] // 16 * 16])
    entries = list(entries)
    strings = next(value for tag, value in entries if tag == 5)
    offset = next(strings - start + file for start, file, length in loads if start <= strings < start + length)
    return [elf[offset + value:elf.index(b"\0", offset + value)].decode() for tag, value in entries if tag == 1]


def module_dependencies(elf):
    """Names in the `depends=` line of a kernel module."""
    table, = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + index * size) for index in range(count)]
    names = sections[names_at][4]
    for section in sections:
        name = elf[names + section[0]:elf.index(b"\0", names + section[0])]
        if name == b".modinfo":
            for line in elf[section[4]:section[4] + section[5]].split(b"\0"):
                if line.startswith(b"depends="):
                    return [word for word in line[8:].decode().replace("-", "_").split(",") if word]
    return []


def load_order(modules, available):
    """`modules` and their dependencies, each after its dependencies. Unknown names are built into the kernel."""
    order = []

    def visit(name):
        if name in available and name not in order:
            for other in module_dependencies(available[name]):
                visit(other)
            order.append(name)

    for module in modules:
        visit(module)
    return order


# ---- kernel and initramfs --------------------------------------------------------------------------------


def uncompressed_kernel(bzimage):
    """The ELF image inside. QEMU enters it directly (PVH), which avoids emulated decompression."""
    setup = (bzimage[0x1F1] or 4) + 1
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    payload = bzimage[setup * 512 + offset:][:length]
    image = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(payload)
    if image[:4] != b"\x7fELF":
        raise BuildError("the kernel's payload is not an ELF image")
    return image


def cpio(entries):
    """A `newc` archive of (path, mode, bytes)."""
    out = io.BytesIO()

    def put(number, name, mode, data):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out.write(b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0")
        out.write(bytes(-out.tell() % 4))
        out.write(data)
        out.write(bytes(-out.tell() % 4))

    for number, (name, mode, data) in enumerate(entries, 1):
        put(number, name, mode, data)
    put(0, "TRAILER!!!", 0, b"")
    return out.getvalue()


def guest_files(tree):
    """The programs and, transitively, their libraries."""
    files, queue = {}, [(path, path) for path in PROGRAMS] + [(LOADER, LOADER)]
    while queue:
        path, why = queue.pop()
        if path in files:
            continue
        data = tree.resolve(path)
        if data is None:
            raise BuildError(f"no package in the list has {path} (for {why})")
        files[path] = data
        for library in needed_libraries(data):
            homes = [f"{folder}/{library}" for folder in LIBRARY_DIRS]
            found = next((home for home in homes if tree.resolve(home) is not None), homes[0])
            queue.append((found, path))
    return files


def initramfs(tree, available):
    files = guest_files(tree)
    order = load_order(MODULES, available)
    files |= {f"/modules/{name}.ko": available[name] for name in order}
    files["/modules/order"] = "".join(f"{name}\n" for name in order).encode()
    files["/etc/libibverbs.d/rxe.driver"] = b"driver rxe\n"
    files["/etc/passwd"] = b"root:x:0:0:root:/:/bin/sh\n"
    files["/etc/hosts"] = b"127.0.0.1 localhost\n"
    files["/init"] = (HERE / "guest-init").read_bytes()
    folders = {"/dev", "/proc", "/sys", "/tmp", "/run"}
    for path in files:
        folders |= {str(parent) for parent in pathlib.PurePosixPath(path).parents} - {"/"}
    entries = [(folder.lstrip("/"), stat.S_IFDIR | 0o755, b"") for folder in sorted(folders)]
    entries += [(path.lstrip("/"), stat.S_IFREG | 0o755, data) for path, data in sorted(files.items())]
    # dash is first in the path, because busybox's shell would run its own `ip` and `rdma`.
    entries.append(("bin/sh", stat.S_IFLNK | 0o777, b"dash"))
    return cpio(entries)


def build(force=False):
    """Builds missing or stale files. Returns the directory with `vmlinux`, `initramfs.cpio` and `version`."""
    cache = cache_dir()
    try:
        archives = download([kernel_package(), *PACKAGES], cache / "packages")
    except OSError as error:
        raise BuildError(f"{error.filename}: {error.strerror} (needed: Debian's tools, a writable directory)") from error
    parts = [path.name.encode() for path in archives]
    parts += [(HERE / name).read_bytes() for name in ("build.py", "guest-init")]
    stamp = hashlib.sha256(b"\0".join(parts)).hexdigest()
    if not force and (cache / "stamp").is_file() and (cache / "stamp").read_text() == stamp:
        return cache
    kernel, tree = Tree(), Tree()
    kernel.add_package(archives[0], lambda name: name.startswith("/boot/vmlinuz") or (
        name.endswith(".ko") and any(folder in name for folder in MODULE_DIRS)))
    for archive in archives[1:]:
        tree.add_package(archive, lambda name: name.startswith(("/bin/", "/sbin/", "/lib", "/usr/bin/", "/usr/lib")))
    boot = next(name for name in kernel.files if name.startswith("/boot/vmlinuz"))
    modules = {pathlib.PurePosixPath(name).stem.replace("-", "_"): data
               for name, data in kernel.files.items() if name.endswith(".ko")}
    (cache / "vmlinux").write_bytes(uncompressed_kernel(kernel.files[boot]))
    (cache / "initramfs.cpio").write_bytes(initramfs(tree, modules))
    (cache / "version").write_text(boot.removeprefix("/boot/vmlinuz-") + "\n")
    (cache / "stamp").write_text(stamp)
    return cache


if __name__ == "__main__":
    try:
        print(build(force="--force" in sys.argv[1:]))
    except BuildError as error:
        sys.exit(f"build.py: {error}")
