"""megatron_reference.py, which knows nothing but docs/megatron.md, against what megatron-core itself made, and streams
against megatron_reference.py."""

import os
import pathlib
import struct
import tempfile
import unittest
import zlib

import dquant
from megatron_reference import samples, split

GOLDEN = pathlib.Path(__file__).resolve().parents[3] / "crates/xio/tests/data/megatron.txt"
BLOCK = 256


def golden():
    corpora, cases = {}, []
    for line in GOLDEN.read_text().splitlines():
        key, _, rest = line.partition(" ")
        if key == "corpus":
            name, *lengths = rest.split()
            corpora[name] = [int(length) for length in lengths]
        elif key == "case":
            cases.append({"case": rest, "sample": []})
        elif key == "sample":
            cases[-1]["sample"].append(rest)
        elif key != "#":
            cases[-1][key] = rest
    return corpora, cases


class MegatronOrder(unittest.TestCase):
    def test_the_page_gives_the_order_of_megatron_core(self):
        corpora, cases = golden()
        self.assertGreaterEqual(len(cases), 50)
        for case in cases:
            with self.subTest(case=case["case"], seed=case["seed"]):
                self.compare(case, corpora)

    def compare(self, case, corpora):
        ratio, part = case["split"].split()
        data = [entry.partition("=")[::2] for entry in case["data"].split()]
        used = [(corpora[name], split(ratio.split(","), len(corpora[name]), int(part))) for name, _ in data]
        weights = [weight for _, weight in data] if data[0][1] else None
        number = None if case["samples"] == "-" else int(case["samples"])
        found = samples(used, weights, number, int(case["seed"]), int(case["sequence"]), int(case["extra"]))
        datasets = next(found)
        self.assertEqual(" ".join(str(len(dataset)) for dataset in datasets), case["sizes"])
        order = list(found)
        for (dataset, k), sample in zip(order, case["sample"]):
            runs = [tuple(map(int, run.split("-"))) for run in sample.split()[1:]]
            tokens = [token for first, last in runs for token in range(first, last + 1)]
            self.assertEqual(dataset, int(sample.split()[0]))
            self.assertEqual(list(datasets[dataset].tokens(k)), tokens)
        # All samples of a block, of some blocks: the reference walks from the first document to each sample.
        crcs = case["crc"].split()
        self.assertEqual(len(crcs), -(-len(order) // BLOCK))
        for block in {0, len(crcs) // 2, len(crcs) - 1}:
            crc = 0
            for dataset, k in order[block * BLOCK:(block + 1) * BLOCK]:
                tokens = list(datasets[dataset].tokens(k))
                crc = zlib.crc32(struct.pack(f"<{len(tokens) + 1}I", dataset, *tokens), crc)
            self.assertEqual(f"{crc:08x}", crcs[block], f"block {block}")


def write_pair(path, lengths):
    """A `.bin` of the tokens 0, 1, 2 and so on as i32, and its `.idx`."""
    tokens = sum(lengths)
    starts = [4 * sum(lengths[:at]) for at in range(len(lengths))]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    arrays = struct.pack(f"<{len(lengths)}i{2 * len(lengths) + 1}q", *lengths, *starts, *range(len(lengths) + 1))
    pathlib.Path(f"{path}.idx").write_bytes(head + arrays)
    pathlib.Path(f"{path}.bin").write_bytes(struct.pack(f"<{tokens}i", *range(tokens)))


class Streams(unittest.TestCase):
    SEED, SEQUENCE, SAMPLES, BATCH = 1234, 64, 403, 8

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="dquant-megatron-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        corpora, _ = golden()
        self.corpora = {name: corpora[name][:400] for name in ("mixed", "tiny", "long")}
        for name, lengths in self.corpora.items():
            write_pair(os.path.join(self.folder, name), lengths)

    def order(self, *, split=""):
        return f"order(megatron, seed={self.SEED}, samples={self.SAMPLES}{split})"

    def expected(self, names, weights, ratio=(1,)):
        """The tokens of each sample."""
        used = [(self.corpora[name], split(ratio, len(self.corpora[name]), 0)) for name in names]
        found = samples(used, weights, self.SAMPLES, self.SEED, self.SEQUENCE, 1)
        datasets = next(found)
        return [list(datasets[dataset].tokens(k)) for dataset, k in found][: self.SAMPLES]

    def test_a_stream_has_the_samples_of_the_page(self):
        plan = f"window({self.SEQUENCE + 1}, overlap=1) | batch({self.BATCH}) | "
        one, blend = os.path.join(self.folder, "mixed.bin"), self.folder + "/"
        for source, text, want in (
            (one, self.order(), self.expected(["mixed"], None)),
            (one, self.order(split=', split="969,30,1"'), self.expected(["mixed"], None, ("969", "30", "1"))),
            (
                blend,
                self.order() + " | blend(mixed=0.5, tiny=0.2, long=0.3)",
                self.expected(["mixed", "tiny", "long"], ["0.5", "0.2", "0.3"]),
            ),
        ):
            with self.subTest(plan=text), dquant.Stream(source, plan + text) as stream:
                got = [row for batch in stream for row in batch.numpy().tolist()]
                # The three samples that fill no batch are left out.
                self.assertEqual(got, want[: self.SAMPLES // self.BATCH * self.BATCH])

    def test_a_stream_goes_on_where_another_stopped(self):
        plan = f"window({self.SEQUENCE + 1}, overlap=1) | pairs | batch({self.BATCH}) | {self.order()}"
        source, want = os.path.join(self.folder, "mixed.bin"), self.expected(["mixed"], None)
        with dquant.Stream(source, plan) as stream:
            for _ in range(7):
                next(stream)
            state = stream.state_dict()
        with dquant.Stream(source, plan) as stream:
            stream.load_state_dict(state)
            batch = next(stream)
            self.assertEqual(batch.number, 7)
            rows = want[7 * self.BATCH : 8 * self.BATCH]
            self.assertEqual(batch.x.tolist(), [row[:-1] for row in rows])
            self.assertEqual(batch.y.tolist(), [row[1:] for row in rows])
            self.assertEqual(len(list(stream)), self.SAMPLES // self.BATCH - 8)


if __name__ == "__main__":
    unittest.main()
