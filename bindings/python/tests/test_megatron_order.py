"""megatron_reference.py, which knows nothing but docs/megatron.md, against what megatron-core itself made."""

import pathlib
import struct
import unittest
import zlib

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


if __name__ == "__main__":
    unittest.main()
