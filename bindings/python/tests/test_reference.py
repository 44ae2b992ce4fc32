"""Batches of the engine against those of reference.py, which knows nothing but docs/plan.md. No daemon takes part."""

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import unittest
from random import Random

import numpy

import dquant
from documents import hash_of
from modules import assembled
from reference import TYPES, Blend, Reference, as_stored, documents_beside, key, permute

SEEDS = (0, 7, 2**64 - 1)
LAST_SAMPLE = 2**53
"""Streams are endless up to here."""

# Tokens per MiB.
U16, U32, I64 = 1 << 19, 1 << 18, 1 << 17

FILES = {
    # Flat u32: less than a block, one token around a border of blocks, one sample, many blocks.
    "less": ("u32", 100_003),
    "below": ("u32", 3 * U32 - 1),
    "border": ("u32", 3 * U32),
    "above": ("u32", 3 * U32 + 1),
    "one sample": ("u32", 20_000),
    "many": ("u32", 11 * U32 + 12_345),
    "large": ("u32", 2 * U32 + 50_000),
    # The same of u16, and arrays that name their type.
    "short.u16": ("u16", 2 * U16 + 20_000),
    "whole.u16": ("u16", 9 * U16),
    "wide.npy": ("i64", 5 * I64 + 70_000),
    "signed.npy": ("i32", 2 * U32 + 1),
    "small.npy": ("u16", 77_777),
}

# More than 128, with blocks of 5 KiB to 256 KiB.
TINY = {f"tiny{i}": ("u32", 2_500 + 97 * i) for i in range(150)}

ONE_FILE = (
    ("less", "window(64) | batch(32)"),
    ("less", "window(64) | shuffle(seed)"),
    ("less", "window(100000) | shuffle(seed) | batch(2)"),
    ("one sample", "window(20000) | shuffle(seed) | batch(2)"),
    ("one sample", "window(1) | shuffle(seed, blocks=1) | batch(65)"),
    ("below", "window(65536) | shuffle(seed) | batch(1)"),
    ("border", "window(65536) | shuffle(seed, blocks=2) | batch(4)"),
    ("above", "window(tokens=16384) | shuffle(seed=seed, blocks=2) | batch(samples=5)"),
    ("border", "window(1024, overlap=1) | shuffle(seed, blocks=3) | batch(16)"),
    ("above", "window(20001, overlap=1) | shuffle(seed, blocks=2) | narrow(u16) | widen(i64) | pairs | batch(3)"),
    ("above", "window(131072, overlap=131071) | shuffle(seed) | narrow(u16) | batch(1)"),
    ("many", "window(50_000) | shuffle(seed) | narrow(u16) | batch(4)"),
    ("many", "window(33333, overlap=3333) | shuffle(seed, blocks=5) | batch(7)"),
    ("many", "batch(64) | narrow(u16) | shuffle(seed, blocks=16) | window(17)"),
    ("many", "window(2, overlap=1) | shuffle(seed, blocks=4) | pairs | widen(i64) | batch(1000)"),
    ("short.u16", "window(20000) | shuffle(seed, blocks=2) | batch(3)"),
    ("whole.u16", "window(8192) | shuffle(seed, blocks=4) | widen(u32) | batch(8)"),
    ("whole.u16", "window(99_999) | shuffle(seed, blocks=1) | batch(2)"),
    ("wide.npy", "window(30000) | shuffle(seed, blocks=3) | batch(2)"),
    ("wide.npy", "window(1000, overlap=500) | shuffle(seed) | narrow(u32) | widen(i64) | batch(9)"),
    ("signed.npy", "window(40_000, overlap=39_000) | shuffle(seed, blocks=2) | batch(2)"),
    ("small.npy", "window(128) | shuffle(seed) | widen(i32) | pairs | batch(33)"),
    # Blocks of other sizes, of one sample that is longer, and of more bytes than the file has.
    ("many", "window(2048) | shuffle(seed, blocks=5, block=64KiB) | narrow(u16) | batch(32)"),
    ("many", "window(1000, overlap=7) | shuffle(seed, block=36KiB, blocks=100) | batch(32)"),
    ("many", "window(20_000) | shuffle(seed, blocks=7, block=4KiB) | batch(3)"),
    ("wide.npy", "window(17_000, overlap=3) | shuffle(seed) | narrow(u16) | batch(5)"),
    ("short.u16", "window(512) | shuffle(seed, blocks=1024, block=1024KiB) | batch(8)"),
)

BLENDS = (
    (("less",), "window(64) | shuffle(seed) | blend(less=0.3) | batch(8)"),
    (("less", "many"), "window(512) | shuffle(seed) | blend(less=0.499999, many=0.500001) | batch(17)"),
    (("many", "less"), "window(512) | shuffle(seed) | blend(many=998, less=1) | batch(17)"),
    (("less", "border", "one sample"), 'window(20_000) | blend(less=.1, border=.7, "one sample"=.2) | batch(3)'),
    (
        ("less", "below", "above", "wide.npy"),
        "blend(less=0, below=0.000001, above=0, wide.npy=0.25) | window(4096, overlap=96) | shuffle(seed, blocks=2) "
        "| narrow(u16) | batch(5)",
    ),
    (
        ("wide.npy", "small.npy", "above", "one sample", "signed.npy"),
        'window(15_001, overlap=1) | shuffle(seed, blocks=2) | narrow(u16) | widen(i64) | pairs | batch(4) '
        '| blend(wide=0.2, small=0.2, above=0.2, "one sample"=0.199999, signed=0.2)',
    ),
    (
        ("less", "many", "border"),
        "window(600) | shuffle(seed) | blend(less=1:0:3, many=0:1:1, border=1) | phases(9, 40) | batch(8)",
    ),
    (
        ("many", "wide.npy", "above"),
        "blend(many=0.9:0.5:0, wide=0.1:0.5:0.3, above=0:0.00003:0.7) | phases(5_927, 100_000) | window(333) "
        "| shuffle(seed) | narrow(u16) | batch(16)",
    ),
    (
        ("below", "border", "above", "many", "less"),
        "window(1021) | shuffle(seed) | blend(below=1, border=2, above=3, many=5, less=7)",
    ),
)

TINY_BLEND = ", ".join(["many=5000", "less=0", *(f"{name}={1 + i % 60}" for i, name in enumerate(TINY))])

MANY = (
    (("many", "less", *TINY), f"window(64) | shuffle(seed) | blend({TINY_BLEND})"),
    (("many", "less", *TINY), f"window(2049, overlap=1) | shuffle(seed) | blend({TINY_BLEND}) | narrow(u16) | batch(100)"),
    (("many", "less", *TINY), f"window(100) | blend({TINY_BLEND}) | batch(70)"),
    (("many", "less", *TINY), f"window(50) | shuffle(seed, blocks=2, block=8KiB) | blend({TINY_BLEND}) | batch(200)"),
)


# Ids of "large" that do not fit 16 bits have odd places; every other file has none.
FORMS = (
    ("large", "window(1000) | shuffle(seed) | narrow(u16, overflow=saturate(65535))"),
    ("large", "window(1000, overlap=1) | narrow(to=u16, overflow=saturate(0)) | widen(i64) | pairs"),
    ("large", "window(1000) | shuffle(seed, blocks=2) | narrow(u16, overflow=escape) | widen(u32)"),
    ("large", "window(1000) | narrow(u16, overflow=escape) | widen(i64) | compress(zstd, level=3)"),
    ("large", "window(1000) | shuffle(seed) | bitpack(17) | widen(i64)"),
    ("large", "window(1000) | bitpack(bits=17) | batch(3)"),
    ("short.u16", "window(1000) | narrow(u16, overflow=escape) | widen(u32)"),
    ("wide.npy", "window(1000) | narrow(u16, overflow=error) | compress(lz4, when=always)"),
    ("large", "window(1000) | shuffle(seed) | remap(TABLE) | compress(lz4)"),
    ("large", "window(1000) | remap(TABLE) | narrow(u16, overflow=saturate(1)) | widen(i32)"),
    ("small.npy", "window(1000) | shuffle(seed) | remap(table=SMALL) | narrow(u16)"),
)


SEVENTH = assembled(7)
# Values of many sizes: zeros, both smallest numbers, and what is rounded to even.
VALUES = {"values": ("f32", 9_000), "half.npy": ("f16", 7_013), "brain": ("bf16", 8_000), "single.npy": ("f32", 6_000)}

QUANTIZED = (
    ("values", "window(100) | shuffle(seed) | batch(5)"),
    ("brain", "window(101, overlap=1) | shuffle(seed) | pairs | batch(5)"),
    ("values", "window(96) | shuffle(seed) | quantize(int8) | batch(2)"),
    ("single.npy", "window(100) | shuffle(seed) | quantize(e4m3) | compress(lz4) | batch(2)"),
    ("values", "window(33) | quantize(to=e5m2, deliver=f16) | batch(3)"),
    ("values", "window(40) | shuffle(seed) | quantize(e4m3, deliver=bf16) | pairs | batch(2)"),
    ("half.npy", "window(784) | shuffle(seed) | quantize(int8) | batch(1)"),
    ("half.npy", "window(31) | quantize(e4m3, deliver=f32) | batch(4)"),
    ("half.npy", "window(64) | shuffle(seed) | quantize(e5m2, deliver=quantized) | batch(2)"),
    ("brain", "window(65) | shuffle(seed) | quantize(int8, deliver=quantized) | batch(2)"),
    ("brain", "window(1) | shuffle(seed) | quantize(e4m3) | batch(50)"),
    ("brain", "window(64) | shuffle(seed) | quantize(e5m2) | batch(2)"),
)


# Type, tokens, mean tokens of a document and the smallest id that no token has.
CORPORA = {
    "tales": ("u16", 900_000, 150, 1 << 16),
    "code.npy": ("u32", 400_000, 900, 1 << 16),
    "wide ids": ("i32", 300_000, 300, 100_000),
    "notes.npy": ("i64", 150_000, 4, 1 << 16),
    "book": ("u16", 200_000, 1_000_000, 1 << 16),
    # Shorter than a window.
    "scraps": ("u16", 470, 20, 1 << 16),
}

DOCUMENTS = (
    (("tales",), "window(512) | pack(best) | shuffle(seed) | batch(16)"),
    (("tales",), "window(300) | pack(first, pad=7) | positions | batch(16)"),
    (("tales",), "window(128) | pack(single) | shuffle(seed) | pairs | batch(16)"),
    (("tales",), "window(1000) | shuffle(seed) | positions | batch(5)"),
    (("tales",), "window(257, overlap=1) | shuffle(seed) | widen(i64) | pairs(ignore=-100) | positions | batch(12)"),
    (
        ("code.npy",),
        "window(2048) | pack(best, pad=50256) | shuffle(seed, blocks=3) | narrow(u16) | widen(i64) "
        "| pairs(ignore=-100) | positions | batch(8)",
    ),
    (("code.npy",), "window(4097, overlap=1) | narrow(u16) | pairs(ignore=65535) | batch(9)"),
    (("code.npy",), "window(1_000) | pack(first) | shuffle(seed, blocks=100, block=16KiB) | widen(i64) | batch(7)"),
    (("wide ids",), "window(333) | pack(best, pad=99999) | shuffle(seed) | bitpack(17) | positions | batch(10)"),
    (("wide ids",), "window(64) | pack(first) | narrow(u16, overflow=escape) | widen(u32) | pairs | batch(31)"),
    (("notes.npy",), "window(60) | pack(best) | shuffle(seed, blocks=2, block=64KiB) | narrow(u16) | batch(50)"),
    (("notes.npy",), "window(16) | pack(single) | shuffle(seed) | pairs(ignore=-1) | positions | batch(50)"),
    (("book",), "window(2048) | pack(best) | shuffle(seed) | widen(i32) | pairs(ignore=-100) | positions | batch(11)"),
    (
        ("tales", "notes.npy"),
        "window(256) | pack(first, pad=1) | shuffle(seed) | blend(tales=3, notes=1) | narrow(u16) | widen(i64) "
        "| pairs(ignore=-100) | positions | batch(6)",
    ),
    (
        ("tales", "code.npy"),
        "window(700) | pack(best) | blend(tales=0.1:3:0, code=2:0:1) | phases(101, 5_003) | shuffle(seed) "
        "| narrow(u16) | positions | batch(8)",
    ),
    (("book", "tales"), "window(99) | shuffle(seed, blocks=3) | blend(book=1, tales=2) | positions | batch(30)"),
    (("tales",), 'window(400) | pack(best) | filter("SOME") | shuffle(seed) | batch(9)'),
    # What is left lies so far apart that a block ends before its samples are full.
    (("tales",), 'window(2000) | pack(best) | filter(keep="SOME") | batch(9)'),
    (("tales",), 'window(2500) | pack(first) | filter(keep="SOME") | shuffle(seed, blocks=2) | positions | batch(9)'),
    (("notes.npy",), 'window(100) | pack(first) | dedup | shuffle(seed, blocks=2) | positions | narrow(u16) | batch(9)'),
    (
        ("code.npy", "tales", "notes.npy"),
        'window(300) | pack(best) | dedup(across) | filter(keep="SOME") | shuffle(seed) | narrow(u16) '
        "| blend(code=0, tales=1, notes=1) | batch(5)",
    ),
)


def corpus(dtype, count, mean, ids, random):
    """Tokens and documents' lengths: many empty ones, some as an earlier one, some much longer than the mean."""
    documents, tokens = [], 0
    while tokens < count:
        kind = random.random()
        if kind < 0.05:
            document = numpy.zeros(0, TYPES[dtype])
        elif kind < 0.15 and documents:
            document = documents[random.integers(len(documents))]
        else:
            length = 1 + int(random.exponential(mean) * (20 if kind > 0.98 else 1))
            document = random.integers(0, ids, min(length, count - tokens)).astype(TYPES[dtype])
        document = document[: count - tokens]
        documents.append(document)
        tokens += len(document)
    return numpy.concatenate(documents), [len(document) for document in documents]


def index_of(lengths, dtype, random):
    """An index of documents, some of which are several sequences."""
    sequences, ends = [], [0]
    for length in lengths:
        cut = int(random.integers(length + 1))
        sequences += [cut, length - cut] if random.random() < 0.3 else [length]
        ends.append(len(sequences))
    starts = (numpy.cumsum(sequences) - sequences) * numpy.dtype(TYPES[dtype]).itemsize
    # Megatron has no type of 32 bits without sign.
    code = {"u16": 8, "u32": 4, "i32": 4, "i64": 5}[dtype]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    arrays = ((sequences, "<i4"), (starts, "<i8"), (ends, "<i8"))
    return head + b"".join(numpy.array(array, kind).tobytes() for array, kind in arrays)


def values_of(dtype, count):
    """Values of a type of floating point as it is stored."""
    random = numpy.random.default_rng(count)
    limits = {"f32": (-149, 127), "f16": (-24, 15), "bf16": (-126, 127)}[dtype]
    # Most blocks are of values of one size, as tensors are.
    size = numpy.repeat(random.integers(*limits, count // 50 + 1), 50)[:count] - random.integers(0, 12, count)
    values = numpy.ldexp(random.uniform(-2, 2, count), numpy.maximum(size, limits[0]))
    values[random.integers(0, count, count // 20)] = 0.0
    values[random.integers(0, count, count // 20)] = -0.0
    values[::7] = numpy.ldexp(random.integers(-64, 64, len(values[::7])) / 16, numpy.maximum(size[::7], limits[0]))
    return as_stored(numpy.clip(values, -60_000, 60_000).tolist(), dtype)


class Batches(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="dquant-reference-")
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        random = numpy.random.default_rng(5)
        for name, (dtype, count) in FILES.items():
            tokens = random.integers(0, 1 << 16, count, dtype=numpy.uint16).astype(TYPES[dtype])
            if name == "large":
                tokens[U32 + 1 :: 10_000] += 1 << 16
            if name.endswith(".npy"):
                numpy.save(os.path.join(cls.folder, name), tokens)
            else:
                tokens.tofile(os.path.join(cls.folder, f"{name}.bin"))
        for i, (name, (dtype, count)) in enumerate(TINY.items()):
            tokens = numpy.random.default_rng(i).integers(0, 1 << 16, count).astype(TYPES[dtype])
            tokens.tofile(os.path.join(cls.folder, f"{name}.bin"))
        for name, (dtype, count) in VALUES.items():
            values, path = values_of(dtype, count), os.path.join(cls.folder, name)
            if name.endswith(".npy"):
                numpy.save(path, values)
            else:
                values.tofile(f"{path}.bin")
        for name, (dtype, count, mean, ids) in CORPORA.items():
            tokens, lengths = corpus(dtype, count, mean, ids, random)
            path = os.path.join(cls.folder, name)
            with open(f"{path.removesuffix('.npy')}.idx", "wb") as index:
                index.write(index_of(lengths, dtype, random))
            if name.endswith(".npy"):
                numpy.save(path, tokens)
            else:
                tokens.tofile(f"{path}.bin")

    def path(self, name):
        return os.path.join(self.folder, name if name.endswith(".npy") else f"{name}.bin")

    def stream(self, source, plan, dtype="u32", **options):
        return dquant.Stream(source, plan, dtype=dtype, slots=2, **options)

    def reference(self, names, plan, seed=0, table=None):
        return Reference(plan, [((FILES | TINY | VALUES | CORPORA)[name][0], self.path(name)) for name in names], seed, table)

    def assert_equal(self, batch, reference):
        want = reference.batch(batch.number)
        dtype = "bfloat16" if reference.dtype == "bf16" else want.dtype.name
        self.assertEqual((batch.shape, batch.dtype), (want.shape, dtype))
        self.assertTrue(bytes(batch) == want.tobytes(), f"batch {batch.number} differs")

    def compare(self, source, names, plan, seed, table=None):
        """Two batches at two of four places: the beginning, some hundred on, far out, the end; to the byte."""
        reference = self.reference(names, plan, seed, table)
        dtype = next(((FILES | TINY | VALUES)[name][0] for name in names if not name.endswith(".npy")), "u32")
        end = LAST_SAMPLE // reference.samples - 2
        for first in {0: (0, 10**9 + 1234), 7: (371, end), 2**64 - 1: (0, 371)}[seed]:
            with self.stream(source, plan, dtype=dtype, seed=seed, first_batch=first, batches=2) as stream:
                for number in (first, first + 1):
                    batch = next(stream)
                    self.assertEqual(batch.number, number)
                    self.assert_equal(batch, reference)
                    del batch

    def test_one_file(self):
        for name, plan in ONE_FILE:
            for seed in SEEDS:
                with self.subTest(file=name, plan=plan, seed=seed):
                    self.compare(self.path(name), [name], plan, seed)

    def test_blends(self):
        for names, plan in (*BLENDS, *MANY):
            for seed in SEEDS:
                with self.subTest(plan=plan, seed=seed):
                    self.compare(self.folder, names, plan, seed)

    def compare_resumed(self, source, names, plan, seed):
        """Batches from the beginning and at random in the first epochs and far out, each resumed from a state, too."""
        reference = self.reference(names, plan, seed)
        chance = Random(f"{plan} {seed}")
        epoch = sum(dataset.samples for dataset in reference.datasets) // reference.samples
        for first in (0, chance.randrange(epoch), chance.randrange(5 * epoch), chance.randrange(10**12)):
            with self.stream(source, plan, dtype=None, seed=seed, first_batch=first, batches=3) as stream:
                for _ in range(2):
                    batch = next(stream)
                    self.assert_equal(batch, reference)
                    self.assert_rows(batch, reference)
                    del batch
                state = stream.state_dict()
            with self.stream(source, plan, dtype=None, seed=seed) as stream:
                stream.load_state_dict(state)
                batch = next(stream)
                self.assertEqual(batch.number, first + 2)
                self.assert_equal(batch, reference)
                del batch

    def assert_rows(self, batch, reference):
        """The rows of a batch by their names."""
        rows = list(reference.batch(batch.number)) if len(batch.shape) == 3 else [reference.batch(batch.number)]
        names = ["x", *(["y"] if reference.pairs else []), *(["positions", "documents"] if reference.positions else [])]
        for name, row in zip(names, rows, strict=True):
            array = getattr(batch, name)
            self.assertEqual((array.shape, array.dtype), (row.shape, row.dtype))
            self.assertTrue((array == row).all(), name)
        for name in {"y", "positions", "documents"} - set(names):
            with self.assertRaises(dquant.InvalidError):
                getattr(batch, name)

    def test_documents(self):
        some = os.path.join(self.folder, "some.npy")
        listed = set()
        for name, (dtype, *_) in CORPORA.items():
            if name in ("tales", "code.npy", "notes.npy"):
                hashing = [os.environ["DQUANT"], "documents", self.path(name), "--hash"]
                subprocess.run(hashing, check=True, capture_output=True)
                tokens = Reference("window(1)", [(dtype, self.path(name))]).datasets[0].tokens
                found = (tokens[first : first + count].tolist() for first, count in documents_beside(self.path(name)))
                listed |= {number for number in map(hash_of, found) if number % 3 == 0}
        numpy.save(some, numpy.array(sorted(listed), "<u8"))
        for names, plan in DOCUMENTS:
            plan = plan.replace("SOME", some)
            for seed in SEEDS:
                with self.subTest(files=names, plan=plan, seed=seed):
                    self.compare_resumed(self.folder if "blend" in plan else self.path(names[0]), names, plan, seed)

    def test_every_batch_of_some_packed_epochs(self):
        plan = "window(600) | pack(best) | shuffle(3) | blend(tales=4, book=1) | positions | batch(64)"
        reference = self.reference(("tales", "book"), plan)
        batches = 2 * reference.datasets[0].samples * 5 // 4 // 64 + 1
        with self.stream(self.folder, plan, dtype=None, batches=batches) as stream:
            for batch in stream:
                self.assert_equal(batch, reference)
                del batch
            self.assertEqual(stream.next_batch, batches)

    def test_packed_files_of_a_pattern_are_blended_in_proportion(self):
        names, some = ("book", "scraps", "tales"), os.path.join(self.folder, "pairs.npy")
        os.mkdir(os.path.join(self.folder, "pairs"))
        listed = set()
        for name in names:
            for file in (f"{name}.bin", f"{name}.idx"):
                os.link(os.path.join(self.folder, file), os.path.join(self.folder, "pairs", file))
            hashing = [os.environ["DQUANT"], "documents", os.path.join(self.folder, "pairs", f"{name}.bin"), "--hash"]
            subprocess.run(hashing, check=True, capture_output=True)
            tokens = Reference("window(1)", [("u16", self.path(name))]).datasets[0].tokens
            found = (tokens[first : first + count].tolist() for first, count in documents_beside(self.path(name)))
            listed |= {number for number in map(hash_of, found) if number % 5 == 0}
        numpy.save(some, numpy.array(sorted(listed), "<u8"))
        actions = ["pack(best)", "pack(first)", "pack(single)", f'pack(best) | filter("{some}") | dedup(across)']
        for how in actions:
            for seed in SEEDS:
                plan = f"window(500) | {how} | shuffle(seed) | batch(8)"
                with self.subTest(plan=plan, seed=seed):
                    self.compare_resumed(os.path.join(self.folder, "pairs", "*.bin"), names, plan, seed)

    def test_forms_and_policies(self):
        tables = {"TABLE": numpy.arange(1 << 17, dtype="<u4")[::-1], "SMALL": numpy.arange(1 << 16, dtype="<u4")[::-1]}
        for name, table in tables.items():
            numpy.save(os.path.join(self.folder, f"{name}.npy"), table)
        for name, plan in FORMS:
            used = next((table for table in tables if table in plan), None)
            plan = plan.replace(used or "-", f'"{self.folder}/{used}.npy"')
            for seed in SEEDS:
                with self.subTest(file=name, plan=plan, seed=seed):
                    self.compare(self.path(name), [name], plan, seed, tables.get(used))

    def test_a_module_of_webassembly(self):
        """Every 7th token of the file becomes the id that follows it."""
        module = os.path.join(self.folder, "seventh.wasm")
        with open(module, "wb") as file:
            file.write(SEVENTH)
        digest = hashlib.sha256(SEVENTH).hexdigest()

        def action(numbers, tokens):
            return numpy.where(numbers % 7 == 0, tokens + 1, tokens)

        for shape in ("window(1000) | shuffle(seed) | bitpack(18)", "window(1001, overlap=1) | widen(i64) | pairs"):
            plan = f'{shape} | wasm("{module[:-5]}", sha256={digest}) | batch(16)'
            for first in (0, 371):
                reference = Reference(plan, [("u32", self.path("large"))], 5, action=action)
                options = {"seed": 5, "first_batch": first, "batches": 2}
                with self.subTest(plan=plan), self.stream(self.path("large"), plan, **options) as stream:
                    for batch in stream:
                        self.assert_equal(batch, reference)
                        del batch
        # As a keyword, and what is refused.
        with dquant.Stream(self.path("large"), dtype="u32", seq_len=1000, wasm=(module, digest), batches=1) as stream:
            plan = f"window(1000) | shuffle(seed) | wasm(module, sha256={digest})"
            self.assert_equal(next(stream), Reference(plan, [("u32", self.path("large"))], action=action))
        for wasm, part in (((module, "0" * 64), "its SHA-256 is"), ((module, "12"), "is no SHA-256"), (module, "wasm is")):
            with self.assertRaisesRegex(dquant.InvalidError, part):
                dquant.Stream(self.path("large"), dtype="u32", seq_len=1000, wasm=wasm)

    def test_values_and_quantization(self):
        for name, plan in QUANTIZED:
            for seed in SEEDS:
                with self.subTest(file=name, plan=plan, seed=seed):
                    self.compare(self.path(name), [name], plan, seed)
        names, plan = ("single.npy", "half.npy"), "window(70) | shuffle(seed) | quantize(e4m3, deliver=f32) | batch(3)"
        for seed in SEEDS:
            blend = f"{plan} | blend(single=2, half=1)"
            self.compare(self.folder, list(names), blend, seed)

    def test_values_that_cannot_be_quantized(self):
        for special, action in ((numpy.nan, "int8"), (numpy.inf, "int8"), (-numpy.inf, "e4m3"), (1e9, "e5m2, deliver=f16")):
            path, values = os.path.join(self.folder, "special.npy"), numpy.ones(1000, "<f4")
            values[321] = special
            numpy.save(path, values)
            plan = f"window(100) | quantize({action}) | batch(1)"
            reference = Reference(plan, [(None, path)])
            with self.subTest(plan=plan, special=special), self.stream(path, plan, batches=10) as stream:
                with self.assertRaisesRegex(dquant.StreamError, r"special.npy: token 321 \(byte 1412\)") as raised:
                    for batch in stream:
                        self.assert_equal(batch, reference)
                        del batch
                self.assertIn("quantize(", raised.exception.hint)
                self.assertEqual(stream.next_batch, 3)
                with self.assertRaises(OverflowError):
                    reference.batch(3)
        for special, action in ((numpy.nan, "e4m3"), (-numpy.nan, "e5m2"), (numpy.inf, "e5m2"), (-numpy.inf, "e5m2")):
            values[321] = special
            numpy.save(path, values)
            for deliver in ("f32", "f16", "bf16", "quantized"):
                plan = f"window(100) | quantize({action}, deliver={deliver}) | batch(1)"
                reference = Reference(plan, [(None, path)])
                with self.subTest(plan=plan, special=special), self.stream(path, plan, batches=10) as stream:
                    for batch in stream:
                        self.assert_equal(batch, reference)
                        del batch

    def test_records_of_bytes(self):
        random = numpy.random.default_rng(3)
        fields = [("label", "u1"), ("image", ">f4", (3, 5, 7)), ("name", "U4"), ("when", "<M8[s]")]
        structured = numpy.frombuffer(random.bytes(445 * 300), numpy.dtype(fields))
        arrays = {"fields.npy": structured, "images.npy": random.integers(0, 256, (200, 3, 8, 8), dtype="u1")}
        for name, array in arrays.items():
            numpy.save(os.path.join(self.folder, name), array)
        random.integers(0, 256, (400, 3073), dtype="u1").tofile(os.path.join(self.folder, "cifar.bin"))
        for name, record in (("fields.npy", 445), ("images.npy", 192), ("cifar.bin", 3073)):
            path = os.path.join(self.folder, name)
            for plan in (f"window({record}) | shuffle(seed) | batch(7)", f"window({record}) | compress(zstd) | batch(9)"):
                for seed in SEEDS:
                    reference = Reference(plan, [("bytes", path)], seed)
                    with self.stream(path, plan, dtype="bytes", seed=seed, first_batch=seed % 1000, batches=3) as stream:
                        self.assertEqual(stream.opened.dtype, "uint8")
                        for batch in stream:
                            self.assert_equal(batch, reference)
                            self.assertEqual(batch.numpy().dtype, numpy.uint8)
                            del batch
        # A batch is an array of the structure again.
        with self.stream(os.path.join(self.folder, "fields.npy"), "window(445) | batch(10)", dtype="bytes") as stream:
            batch = next(stream)
            records = numpy.frombuffer(batch, structured.dtype)
            self.assertTrue((records["label"] == structured["label"][:10]).all())
            del batch, records
        with self.assertRaisesRegex(dquant.InvalidError, "a record has 445 bytes"):
            self.stream(os.path.join(self.folder, "fields.npy"), "window(444)", dtype="bytes")
        with self.assertRaisesRegex(dquant.InvalidError, "delivered whole"):
            self.stream(path, "window(3073)", dtype="bytes", rank=0, world_size=2, cp=2)

    def test_tokens_that_cannot_be_delivered(self):
        numpy.save(os.path.join(self.folder, "short.npy"), numpy.arange(1 << 16, dtype="<u4"))
        table = f'remap("{self.folder}/short.npy")'
        for action in ("narrow(u16)", "bitpack(16)", table):
            plan = f"window(1000) | {action} | batch(1)"
            reference = self.reference(["large"], plan, table=numpy.arange(1 << 16, dtype="<u4"))
            delivered = 0
            with self.subTest(plan=plan), self.stream(self.path("large"), plan, batches=500) as stream:
                with self.assertRaisesRegex(dquant.StreamError, f"large.bin: token {U32 + 1} "):
                    for batch in stream:
                        self.assert_equal(batch, reference)
                        delivered += 1
                        del batch
                self.assertEqual(delivered, U32 // 1000)
                with self.assertRaises(OverflowError):
                    reference.batch(delivered)

    def test_every_batch_of_some_epochs(self):
        names = ("less", "many")
        plan = "window(8192) | shuffle(3, blocks=2) | blend(less=1, many=4) | narrow(u16) | batch(8)"
        reference = self.reference(names, plan)
        batches = 3 * reference.datasets[1].samples * 5 // 4 // 8
        with self.stream(self.folder, plan, batches=batches) as stream:
            for batch in stream:
                self.assert_equal(batch, reference)
                del batch
            self.assertEqual(stream.next_batch, batches)

    def test_files_of_a_pattern_are_blended_in_proportion(self):
        names = ["above", "below", "one sample"]
        os.mkdir(os.path.join(self.folder, "set"))
        for name in names:
            os.link(self.path(name), os.path.join(self.folder, "set", f"{name}.bin"))
        # Exact weights, and those of more than a million samples, which are rounded.
        for plan in ("window(50) | shuffle(2)", "window(2, overlap=1) | shuffle(2, blocks=2)"):
            reference = self.reference(names, plan)
            with self.stream(os.path.join(self.folder, "set", "*"), plan, first_batch=125_000, batches=3) as stream:
                for batch in stream:
                    self.assert_equal(batch, reference)
                    del batch

    def test_every_batch_across_phases(self):
        names = ("less", "many")
        plan = "window(4096) | shuffle(3) | blend(less=1:5:1, many=4:1:0) | phases(100, 150) | narrow(u16) | batch(8)"
        reference = self.reference(names, plan)
        with self.stream(self.folder, plan, batches=40) as stream:
            for batch in stream:
                self.assert_equal(batch, reference)
                del batch
            self.assertEqual(stream.next_batch, 40)

    def test_batches_that_are_left_out_change_no_other(self):
        names = ("less", "many")
        plan = "window(8192) | shuffle(3) | blend(less=1, many=4) | narrow(u16) | batch(8)"
        reference = self.reference(names, plan)
        left_out = [(0, 2), (5, 6), (20, 10**6), (10**6, 10**6 + 3)]
        numbers = []
        with self.stream(self.folder, plan, batches=10**6 + 5, leave_out=left_out) as stream:
            for batch in stream:
                self.assert_equal(batch, reference)
                numbers.append(batch.number)
                del batch
        self.assertEqual(numbers, [2, 3, 4, *range(6, 20), 10**6 + 3, 10**6 + 4])

    def test_a_dataset_of_weight_0_may_be_too_short(self):
        numpy.save(os.path.join(self.folder, "tiny.npy"), numpy.arange(5, dtype="<u4"))
        plan = "window(64) | shuffle(3) | blend(less=1, tiny=0) | batch(8)"
        reference = Reference(plan, [(FILES["less"][0], self.path("less")), (None, os.path.join(self.folder, "tiny.npy"))])
        with self.stream(self.folder, plan, batches=3) as stream:
            for batch in stream:
                self.assert_equal(batch, reference)
                del batch
        with self.assertRaisesRegex(dquant.InvalidError, "tiny.*do not fill one window"):
            self.stream(self.folder, plan.replace("tiny=0", "tiny=0.001"))

    def test_another_seed_is_another_batch(self):
        plan = "window(64) | shuffle(seed) | batch(8)"
        with self.stream(self.path("many"), plan, seed=1, batches=1) as stream:
            batch = bytes(next(stream))
        self.assertEqual(batch, self.reference(["many"], plan, 1).batch(0).tobytes())
        self.assertNotEqual(batch, self.reference(["many"], plan, 2).batch(0).tobytes())

    def test_a_token_that_does_not_fit_is_an_error_of_both(self):
        path = os.path.join(self.folder, "big.npy")
        numpy.save(path, numpy.array([1, 2, 3, 70_000], dtype="<u4"))
        reference = Reference("window(2) | narrow(u16) | batch(1)", [(None, path)])
        with self.stream(path, "window(2) | narrow(u16) | batch(1)") as stream:
            with self.assertRaises(dquant.StreamError):
                for batch in stream:
                    del batch
        self.assertEqual(reference.batch(0).tolist(), [[1, 2]])
        with self.assertRaises(OverflowError):
            reference.batch(1)


class Itself(unittest.TestCase):
    """The reference alone: what the page promises of its functions."""

    def test_permutations_have_every_number_once(self):
        for n in (*range(1, 70), 1000, 4097):
            for seed in SEEDS:
                self.assertEqual(sorted(permute(key(seed, n), n, x) for x in range(n)), list(range(n)))

    def test_prefixes_of_a_blend_keep_the_ratio(self):
        for weights in ((1,), (3, 1), (998, 1), (0, 5, 0, 3), (199, 200, 201, 1, 7), (499_999, 500_001)):
            blend, total = Blend(weights), sum(weights)
            datasets = sum(weight > 0 for weight in weights)
            drawn = [0] * len(weights)
            for n in range(min(total + 5, 2000)):
                d, k = blend.draw(n)
                self.assertEqual(k, drawn[d])
                drawn[d] += 1
                if datasets > 1:
                    off = max(abs(have * total - (n + 1) * weight) for have, weight in zip(drawn, weights, strict=True))
                    self.assertLessEqual(off * (2 * datasets - 2), total * (2 * datasets - 3))
            self.assertTrue(all(have == 0 for have, weight in zip(drawn, weights, strict=True) if weight == 0))


if __name__ == "__main__":
    unittest.main()
