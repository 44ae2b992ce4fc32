"""Files that change between two resumes: what differs is said, and no batch mixes two contents."""

import hashlib
import os
import shutil
import subprocess

import numpy

import dquant
from modules import assembled
from world import World

BATCHES = 60


def in_place(path, other):
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.write(other.tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def beside(path, other):
    """Another file of the same length and time of modification."""
    before = os.stat(path)
    other.tofile(path + ".new")
    os.utime(path + ".new", ns=(before.st_atime_ns, before.st_mtime_ns))
    return path + ".new"


def copied(path, other):
    subprocess.run(["cp", "-p", beside(path, other), path], check=True)
    os.remove(path + ".new")


def synchronised(path, other):
    new = beside(path, other)
    if shutil.which("rsync"):
        subprocess.run(["rsync", "-t", "--checksum", new, path], check=True)
        os.remove(new)
    else:
        os.rename(new, path)


def replaced(path, other):
    os.rename(beside(path, other), path)


def truncated(path, _other):
    os.truncate(path, 3_000_000)


WAYS = (in_place, copied, synchronised, replaced, truncated)


class Changes(World):
    def setUp(self):
        self.file = self.path("turn.bin")
        self.manifest = self.file + ".dquant.json"
        self.other = self.tokens[::-1].copy()
        self.sources = (f"dq://{self.control}/turn", self.file)

    def restore(self, has_manifest):
        if os.path.exists(self.manifest):
            os.remove(self.manifest)
        self.tokens.tofile(self.file)
        if has_manifest:
            self.write_manifest()

    def write_manifest(self):
        line = [self.binary, "inspect", self.file, "--dtype", "u32", "--write-manifest"]
        subprocess.run(line, check=True, capture_output=True)

    def whole(self, source):
        with self.stream(url=source, batches=BATCHES) as stream:
            return [bytes(batch) for batch in stream]

    def saved(self, source):
        """The position behind three batches."""
        with self.stream(url=source, batches=BATCHES) as stream:
            for _ in range(3):
                next(stream)
            return stream.state_dict()

    def resumed(self, source, state, want):
        """Resumes, and checks that all that comes is right. Returns the exception, if there is one."""
        try:
            with self.stream(url=source, batches=BATCHES) as stream:
                stream.load_state_dict(state)
                for number, batch in enumerate(stream, 3):
                    self.assertEqual(bytes(batch), want[number], f"batch {number}")
                    del batch
        except dquant.Error as error:
            return error
        self.assertEqual(number, BATCHES - 1)
        return None

    def test_a_file_that_changed_is_refused_or_ends_the_stream_with_its_block(self):
        for has_manifest in (False, True):
            for source in self.sources:
                for change in WAYS:
                    with self.subTest(manifest=has_manifest, source=source, change=change.__name__):
                        self.restore(has_manifest)
                        want, state = self.whole(source), self.saved(source)
                        change(self.file, self.other)
                        error = self.resumed(source, state, want)
                        self.assertIn("turn.bin", error.message)
                        self.assertIsNotNone(error.hint)
                        if change is truncated:
                            self.assertIn("750000 tokens" if not has_manifest else "3000000 bytes", error.message)
                        elif has_manifest:
                            self.assertIsInstance(error, dquant.StreamError)
                            self.assertRegex(error.message, r"block \d+ \(from byte \d+\) differs from the manifest")
                        else:
                            self.assertIsInstance(error, dquant.StateError)
                            self.assertIn("written or replaced", error.message)

    def test_a_manifest_that_comes_or_goes_is_no_change(self):
        for source in self.sources:
            with self.subTest(source=source):
                self.restore(False)
                want, state = self.whole(source), self.saved(source)
                self.write_manifest()
                self.assertIsNone(self.resumed(source, state, want))
                state = self.saved(source)
                self.assertNotEqual(state["datasets"][0]["content"], 0)
                # With manifests the contents decide: another copy of them is the same dataset.
                replaced(self.file, self.tokens)
                self.assertIsNone(self.resumed(source, state, want))
                os.remove(self.manifest)
                error = self.resumed(source, state, want)
                self.assertIn("manifest at one of the two times", error.message)

    def test_a_manifest_of_other_contents_is_refused(self):
        for source in self.sources:
            with self.subTest(source=source):
                self.restore(True)
                want, state = self.whole(source), self.saved(source)
                self.other.tofile(self.file)
                os.remove(self.manifest)
                self.write_manifest()
                error = self.resumed(source, state, want)
                self.assertIsInstance(error, dquant.StateError)
                self.assertIn("its manifest describes other contents", error.message)

    def test_a_table_that_changed_is_refused(self):
        self.restore(False)
        table = self.path("new-ids.npy")
        ids = numpy.arange(1 << 16, dtype="<u4")
        for source, name in zip(self.sources, ("new-ids.npy", table), strict=True):
            with self.subTest(source=source):
                numpy.save(table, ids)
                plan = f'window(64) | remap("{name}") | batch(4)'
                with self.stream(source, plan, batches=BATCHES) as stream:
                    next(stream)
                    state = stream.state_dict()
                with self.stream(source, plan, batches=BATCHES) as stream:
                    stream.load_state_dict(state)
                numpy.save(table, ids[::-1])
                with self.stream(source, plan, batches=BATCHES) as stream:
                    with self.assertRaisesRegex(dquant.StateError, "table .*new-ids.*written or replaced"):
                        stream.load_state_dict(state)
                    with self.assertRaisesRegex(dquant.StateError, "not in the state"):
                        stream.load_state_dict({key: value for key, value in state.items() if key != "table"})

    def test_another_module_is_refused(self):
        self.restore(False)
        file, modules = self.path("every.wasm"), {step: assembled(step) for step in (7, 5)}
        hashes = {step: hashlib.sha256(module).hexdigest() for step, module in modules.items()}

        def plan_of(name, step):
            return f'window(64) | wasm("{name}", sha256={hashes[step]}) | batch(4)'

        def write(step):
            with open(file, "wb") as module:
                module.write(modules[step])

        for source, name in zip(self.sources, ("every", file), strict=True):
            with self.subTest(source=source):
                write(7)
                with self.stream(source, plan_of(name, 7), batches=BATCHES) as stream:
                    next(stream)
                    state = stream.state_dict()
                    want = bytes(next(stream))
                with self.stream(source, plan_of(name, 7), batches=BATCHES) as stream:
                    stream.load_state_dict(state)
                    self.assertEqual(bytes(next(stream)), want)
                # A module of the same name: with the hash of the state it does not run, with its own it is another plan.
                write(5)
                with self.assertRaisesRegex(dquant.InvalidError, f"every.wasm: its SHA-256 is {hashes[5]}"):
                    self.stream(source, plan_of(name, 7), batches=BATCHES)
                with self.stream(source, plan_of(name, 5), batches=BATCHES) as stream:
                    refused = f"plan is .*{hashes[7]}.* in the state, .*{hashes[5]}.* here"
                    with self.assertRaisesRegex(dquant.StateError, refused):
                        stream.load_state_dict(state)
