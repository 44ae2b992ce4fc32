"""Tables of documents, their hashes and what a filter and a deduplication keep, as the second implementation has them."""

import json
import os
import random
import struct
import subprocess
import tempfile
import unittest

import documents as reference
import dquant

CODES = {"H": 8, "q": 5}


def index(documents, size, cuts):
    """An index of documents, some of which are several sequences."""
    lengths, ends = [], [0]
    for document in documents:
        first = cuts.randint(0, len(document))
        lengths += [first, len(document) - first] if cuts.random() < 0.5 else [len(document)]
        ends.append(len(lengths))
    starts = [sum(lengths[:at]) * struct.calcsize(size) for at in range(len(lengths))]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[size], len(lengths), len(ends))
    return head + struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(ends)}q", *lengths, *starts, *ends)


class Documents(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="dquant-documents-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        chance = random.Random(7)
        pool = [[chance.randrange(50_000) for _ in range(n)] for n in (0, 1, 2, 3, 15, 16, 17, 30, 31, 127, 128, 129, 900)]
        self.ids, self.index = {}, {}
        for name, size, count in (("a.bin", "H", 60), ("b.npy", "q", 90)):
            # Two that the other file has not.
            own = [[count] * 5, [count] * 7]
            self.ids[name] = documents = [chance.choice(pool) for _ in range(count)] + own
            flat = [token for document in documents for token in document]
            data = struct.pack(f"<{len(flat)}{size}", *flat)
            if name.endswith("npy"):
                text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({len(flat)},), }}\n".encode()
                data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data
            self.index[name] = index(documents, size, chance)
            self.write(name, data)
            self.write(name[0] + ".idx", self.index[name])

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)

    def ask(self, *options):
        """What `dquant documents` says of both datasets."""
        command = [os.environ["DQUANT"], "documents", self.path("a.bin"), self.path("b.npy"), "--json", *options]
        ran = subprocess.run(command, capture_output=True, check=True, text=True)
        return [json.loads(line) for line in ran.stdout.splitlines()]

    def test_tables_and_hashes(self):
        tables = {name: reference.documents_of(data) for name, data in self.index.items()}
        self.ask("--hash")
        for said, (name, table) in zip(self.ask("--hashes"), tables.items(), strict=True):
            self.assertEqual(list(zip(said["starts"], said["lengths"], strict=True)), table)
            self.assertEqual(said["fingerprint"], f"{reference.fingerprint_of(table):016x}")
            hashes = [f"{reference.hash_of(ids):016x}" for ids in self.ids[name]]
            self.assertEqual(said["hashes"], hashes)

    def test_selection(self):
        self.ask("--hash")
        datasets = []
        for name, data in self.index.items():
            hashes = [reference.hash_of(ids) for ids in self.ids[name]]
            datasets.append(list(zip(reference.documents_of(data), hashes, strict=True)))
        own = [dataset[-1][1] for dataset in datasets]
        kept = {dataset[-2][1] for dataset in datasets}
        others = {found for dataset in datasets for _, found in dataset} - kept
        listed = sorted({*sorted(others)[::3], *own})
        text = "# a third of them\n" + "".join(f"{found:016x}\n" for found in listed)
        self.write("list.txt", text.encode())
        head = f"{{'descr': '<u8', 'fortran_order': False, 'shape': ({len(listed)},), }}\n".encode()
        array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + struct.pack(f"<{len(listed)}Q", *listed)
        self.write("list.npy", array)
        for keep, filtered in (
            (None, []),
            (False, ["--filter", self.path("list.txt")]),
            (True, ["--keep", self.path("list.npy")]),
        ):
            for dedup in (None, "within", "across"):
                with self.subTest(keep=keep, dedup=dedup):
                    want = reference.select(datasets, set(listed), keep, dedup)
                    said = self.ask(*filtered, *(["--dedup", dedup] if dedup else []))
                    got = [list(zip(one["starts"], one["lengths"], strict=True)) for one in said]
                    self.assertEqual(got, want)

    def test_keywords_are_actions(self):
        with self.assertRaises(dquant.InvalidError) as caught:
            dquant.Stream(self.path("a.bin"), seq_len=8, pack="best", dedup=True)
        self.assertIn("no hashes of its documents", caught.exception.message)
        self.assertIn("--hash", caught.exception.hint)
        self.ask("--hash")
        with self.assertRaises(dquant.InvalidError) as caught:
            dquant.Stream(self.path("a.bin"), seq_len=8, pack="best", filter=self.path("no list"), dedup="across")
        self.assertIn("no list", caught.exception.message)
        with dquant.Stream(self.path("a.bin"), seq_len=8, pack="best", dedup=True, batches=2, batch_size=2) as stream:
            self.assertIn("pack(best", stream.opened.plan)
            self.assertIn("dedup", stream.opened.plan)
            (dataset,) = stream.opened.datasets
            (said,) = self.ask("--dedup", "within")[:1]
            self.assertEqual(dataset.duplicate_documents, said["duplicate_documents"])
            self.assertGreater(dataset.duplicate_documents, 0)
            self.assertNotEqual(f"{dataset.documents:016x}", self.ask()[0]["fingerprint"])
            self.assertEqual(stream.state_dict()["datasets"][0]["documents"], dataset.documents)
        for wrong in ({"dedup": "all"}, {"dedup": 3.5}, {"filter": 7}):
            with self.subTest(wrong), self.assertRaises((dquant.InvalidError, TypeError)):
                dquant.Stream(self.path("a.bin"), seq_len=8, **wrong)


if __name__ == "__main__":
    unittest.main()
