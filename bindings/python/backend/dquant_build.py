"""Builds the package: maturin makes the wheel of the module, and the command line is added to it.

`pip install ./bindings/python` then puts `dquant` into the `bin` of its environment, and the
libibverbs.so.1 of `dquant run` into `lib/dquant`, where `dquant` looks for it. `DQUANT_PROGRAMS`
names a folder of cargo in which both are built already; when it is empty, the module comes alone.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

import maturin
from maturin import *  # noqa: F403 -- the hooks that are as they were

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = {"dquant": "scripts/dquant", "deps/libibverbs.so": "data/lib/dquant/libibverbs.so.1"}


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    _add_programs(Path(wheel_directory, name))
    return name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = maturin.build_editable(wheel_directory, config_settings, metadata_directory)
    _add_programs(Path(wheel_directory, name))
    return name


def _add_programs(wheel):
    folder = _programs()
    if folder is None:
        return
    with tempfile.TemporaryDirectory() as scratch:
        added = {}
        for built, place in PROGRAMS.items():
            file = shutil.copy(folder / built, Path(scratch, Path(place).name))
            # Line tables are two thirds of the size.
            if shutil.which("strip"):
                subprocess.run(["strip", "--strip-debug", file], check=True)
            added[place] = Path(file).read_bytes()
    _add(wheel, added)


def _programs():
    """The folder of cargo with the programs, built if need be; none without them."""
    given = os.environ.get("DQUANT_PROGRAMS")
    if given is not None:
        return Path(given) if given else None
    if not Path(ROOT, "crates", "dquant").is_dir():
        print("the package is not in the folder of the project: it comes without the command line")
        return None
    cargo = [os.environ.get("CARGO", "cargo")]
    subprocess.run(
        cargo + ["build", "--release", "--locked", "--package", "dquant", "--bin", "dquant"],
        cwd=ROOT,
        check=True,
    )
    metadata = cargo + ["metadata", "--no-deps", "--locked", "--format-version", "1"]
    answer = subprocess.run(metadata, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    return Path(json.loads(answer)["target_directory"], "release")


def _add(wheel, added):
    """Adds data files to a wheel: its record lists them with their hashes."""
    whole = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as new:
        (record,) = (name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        data = record.removesuffix(".dist-info/RECORD") + ".data/"
        lines = old.read(record).decode().rstrip("\n")
        for entry in old.infolist():
            if entry.filename != record:
                new.writestr(entry, old.read(entry))
        for place, content in added.items():
            entry = zipfile.ZipInfo(data + place)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100755 << 16
            new.writestr(entry, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            lines += f"\n{entry.filename},sha256={digest.decode()},{len(content)}"
        new.writestr(record, lines + "\n")
    whole.replace(wheel)
