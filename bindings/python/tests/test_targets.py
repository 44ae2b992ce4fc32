"""Labels of data that says which of its tokens a model is trained to say."""

import itertools
import json
import os
import random
import shutil
import struct
import subprocess

import numpy

import dquant
from world import World


def fnv(parts):
    """FNV-1a, 64 bits."""
    value = 0xCBF29CE484222325
    for byte in b"".join(parts):
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def write_manifest(path, targets):
    """A manifest that says whether the sequences of the index take turns."""
    run = [os.environ["DQUANT"], "inspect", path, "--write-manifest"]
    subprocess.run(run, check=True, capture_output=True)
    if not targets:
        return
    with open(path + ".dquant.json") as manifest:
        fields = json.load(manifest)
    fields["targets"] = True
    numbers = struct.pack("<QQ", fields["tokens"], len(fields["files"]))
    files = [part for file in fields["files"] for part in (struct.pack("<Q", file["bytes"]), file["crc32c"].encode())]
    parts = [fields["format"].encode(), fields["dtype"].encode(), numbers, *files, b"targets"]
    fields["fingerprint"] = f"{fnv(parts):016x}"
    with open(path + ".dquant.json", "w") as manifest:
        json.dump(fields, manifest)


class Conversations:
    """A pair whose ids are their places in the file, and which of them are targets."""

    def __init__(self, path, count, seed, first=0, targets=True):
        chance = random.Random(seed)
        documents = []
        for _ in range(count):
            turns = [chance.choice((0, 1, 2, 7, 40)) for _ in range(chance.choice((0, 1, 2, 3, 6)))]
            documents.append(turns)
        self.first = first
        self.tokens = sum(map(sum, documents))
        self.mask = numpy.zeros(self.tokens, bool)
        self.document = numpy.zeros(self.tokens, int)
        at = 0
        for number, turns in enumerate(documents):
            for turn, tokens in enumerate(turns):
                self.mask[at : at + tokens] = not targets or turn % 2 == 1
                self.document[at : at + tokens] = number
                at += tokens
        numpy.arange(first, first + self.tokens, dtype="<i4").tofile(path)
        lengths = list(itertools.chain(*documents))
        ends = numpy.cumsum([0, *map(len, documents)])
        head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(ends))
        starts = numpy.cumsum([0, *lengths])[:-1] * 4
        arrays = numpy.array(lengths, "<i4"), starts.astype("<i8"), ends.astype("<i8")
        with open(path.replace(".bin", ".idx"), "wb") as index:
            index.write(head + b"".join(array.tobytes() for array in arrays))
        write_manifest(path, targets)

    def label(self, token):
        """What the label is whose input is this token."""
        at = token - self.first
        is_inside = at + 1 < self.tokens and self.document[at] == self.document[at + 1]
        return token + 1 if is_inside and self.mask[at + 1] else -100


class Targets(World):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        path = os.path.join(cls.root, "chat.bin")
        cls.chat = Conversations(path, 3_000, 1)
        cls.plain = Conversations(os.path.join(cls.root, "plain.bin"), 900, 2, first=1 << 24, targets=False)
        cls.pad = (1 << 30) - 1

    def paths(self, name):
        """The same data as a file and at the target, through the DPU and without it."""
        path = os.path.join(self.root, name + ".bin")
        url = f"dq://{self.control}/{name}"
        return (path, {}), (url, {"dpu": self.socket, "token": "correct-horse-battery"})

    def check(self, stream, batches):
        seen = set()
        for batch in itertools.islice(stream, batches):
            inputs, labels = batch.numpy(copy=True)
            self.assertEqual(inputs.shape, labels.shape)
            for token, label in zip(inputs.reshape(-1), labels.reshape(-1), strict=True):
                if token == self.pad:
                    self.assertEqual(label, -100)
                    continue
                data = self.chat if token < self.plain.first else self.plain
                want = data.label(int(token))
                # The last token of a sample has no label of its own where its document goes on in the next.
                self.assertEqual(label, want, (token, label))
                seen.add(int(label))
        return seen

    def test_labels_are_targets(self):
        shapes = {"packed": {"pack": "best", "pad": self.pad}, "windows": {}}
        for name, shape in shapes.items():
            for source, where in self.paths("chat"):
                with self.subTest(shape=name, source=source):
                    options = dict(seq_len=64, batch_size=4, widen="i64", pairs=True, labels="targets", **shape, **where)
                    with dquant.Stream(source, seed=3, epochs=1, **options) as stream:
                        self.assertIn("pairs(ignore=-100, labels=targets)", stream.opened.plan)
                        seen = self.check(stream, 10_000)
                    spoken = int(self.chat.mask.sum())
                    self.assertGreater(len(seen), 0.7 * spoken)
                    self.assertLess(len(seen), spoken + 2)

    def test_others_in_a_blend_are_targets(self):
        for (chat, where), (plain, _) in zip(self.paths("chat"), self.paths("plain"), strict=True):
            options = dict(seq_len=64, batch_size=4, widen="i64", pairs=True, labels="targets", pack="best", pad=self.pad)
            with dquant.Stream({chat: 1, plain: 1}, seed=3, batches=60, **options, **where) as stream:
                seen = self.check(stream, 60)
            self.assertTrue(any(label >= self.plain.first for label in seen))

    def test_silent_mistakes_are_refused(self):
        for source, where in self.paths("chat"):
            with self.assertRaises(dquant.InvalidError) as caught:
                dquant.Stream(source, seq_len=64, pairs=True, **where)
            self.assertIn("which of its tokens are targets", caught.exception.message)
            self.assertIn("labels=all", caught.exception.hint)
            with dquant.Stream(source, seq_len=64, pairs=True, labels="all", **where) as stream:
                inputs, labels = next(stream).numpy(copy=True)
                self.assertTrue((labels == inputs + 1).all())
        for source, where in self.paths("plain"):
            with self.assertRaises(dquant.InvalidError) as caught:
                dquant.Stream(source, seq_len=64, widen="i64", pairs=True, labels="targets", **where)
            self.assertIn("no dataset says which", caught.exception.message)
        source, _ = self.paths("chat")[0]
        for options, says in (
            ({"labels": "targets"}, "pairs"),
            ({"labels": "some", "pairs": True}, "some"),
            ({"labels": "targets", "pairs": True, "ignore": -100}, "-100"),
        ):
            with self.subTest(options=options), self.assertRaises(dquant.InvalidError) as caught:
                dquant.Stream(source, seq_len=64, narrow="u32", **options)
            self.assertIn(says, str(caught.exception))

    def test_positions_do_not_survive_other_targets(self):
        path = os.path.join(self.root, "moved.bin")
        Conversations(path, 200, 5)
        options = dict(seq_len=32, batch_size=2, widen="i64", pairs=True, labels="targets", seed=1)
        with dquant.Stream(path, **options) as stream:
            next(stream)
            state = stream.state_dict()
        with dquant.Stream(path, **options) as stream:
            stream.load_state_dict(state)
        index = path.replace(".bin", ".idx")
        with open(index, "rb") as file:
            data = bytearray(file.read())
        # The first two sequences of a document change their lengths and nothing else does.
        lengths = struct.unpack_from(f"<{(len(data) - 34) // 12}i", data, 34)
        sequences = struct.unpack_from("<Q", data, 18)[0]
        ends = struct.unpack_from(f"<{struct.unpack_from('<Q', data, 26)[0]}q", data, 34 + 12 * sequences)
        at = next(start for start, end in itertools.pairwise(ends) if end - start >= 2 and lengths[start] > 0)
        struct.pack_into("<2i", data, 34 + 4 * at, lengths[at] - 1, lengths[at + 1] + 1)
        start = struct.unpack_from("<q", data, 34 + 4 * sequences + 8 * (at + 1))[0]
        struct.pack_into("<q", data, 34 + 4 * sequences + 8 * (at + 1), start - 4)
        with open(index, "wb") as file:
            file.write(data)
        # Another index of the same documents would turn labels around, unless a manifest says that it is meant.
        for source, where in self.paths("moved"):
            with self.assertRaises(dquant.InvalidError) as caught:
                dquant.Stream(source, **options, **where)
            self.assertIn("moved.idx: is not that of its manifest", caught.exception.message)
        os.remove(path + ".dquant.json")
        write_manifest(path, True)
        with dquant.Stream(path, **options) as stream, self.assertRaises(dquant.StateError) as caught:
            stream.load_state_dict(state)
        self.assertIn("other targets", str(caught.exception))

    def test_a_copy_without_its_manifest_is_no_other_text(self):
        for name in ("chat.bin", "chat.idx"):
            shutil.copy(os.path.join(self.root, name), os.path.join(self.root, "copy" + name[4:]))
        chat, copy = os.path.join(self.root, "chat.bin"), os.path.join(self.root, "copy.bin")
        with self.assertRaises(dquant.InvalidError) as caught:
            dquant.Stream({chat: 1, copy: 1}, seq_len=64, pack="best", widen="i64", pairs=True, labels="targets")
        self.assertIn("no manifest says whether they take turns", caught.exception.message)

    def test_all_labels_are_those_of_conversations(self):
        for source, where in self.paths("chat"):
            options = dict(seq_len=64, batch_size=4, widen="i64", pairs=True, labels="all", pack="best", pad=self.pad)
            with dquant.Stream(source, batches=40, **options, **where) as stream:
                for batch in stream:
                    inputs, labels = batch.numpy(copy=True)
                    at = numpy.minimum(inputs, self.chat.tokens - 2)
                    inside = (inputs != self.pad) & (self.chat.document[at] == self.chat.document[at + 1])
                    self.assertTrue((labels[inside] == inputs[inside] + 1).all())
                    self.assertTrue((labels[inputs == self.pad] == -100).all())
                    self.assertTrue((labels[(inputs < self.chat.tokens - 1) & ~inside] == -100).all())
