"""Loss weights beside the tokens: from a file of their own, delivered with the samples that they belong to."""

import itertools
import os
import shutil
import subprocess

import numpy

import dquant
from test_targets import Conversations
from world import World

TOKEN = "correct-horse-battery"


def weights_of(tokens):
    """The weight of a token of the corpora below: no two that are near each other have the same."""
    return ((tokens % 1009) / 8 + 0.25).astype("<f4")


class Weights(World):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.chat = Conversations(os.path.join(cls.root, "sft.bin"), 2_000, 1)
        numpy.save(os.path.join(cls.root, "sft.loss_weights.npy"), weights_of(numpy.arange(cls.chat.tokens)))
        # Ids from 2^24 on, none of which is said to weigh anything.
        cls.plain = Conversations(os.path.join(cls.root, "prose.bin"), 700, 2, first=1 << 24, targets=False)
        numpy.arange(90_000, dtype="<u2").tofile(os.path.join(cls.root, "small.bin"))
        numpy.save(os.path.join(cls.root, "small.loss_weights.npy"), weights_of(numpy.arange(90_000)))
        cls.pad = (1 << 30) - 1

    def ways(self, name):
        """The same data as a file, through the DPU, and from the target without one."""
        path, url = os.path.join(self.root, name + ".bin"), f"dq://{self.control}/{name}"
        return (path, {}), (url, {"dpu": self.socket, "token": TOKEN}), (url, {"offload": False, "token": TOKEN})

    def check_pairs(self, batch, missing=None):
        """Whether each label weighs what its token does, and labels that are ignored nothing."""
        inputs, labels = batch.numpy(copy=True)
        weights = batch.loss_weights
        self.assertEqual((weights.shape, weights.dtype), (labels.shape, numpy.float32))
        ignored = labels == -100
        self.assertTrue((weights[ignored] == 0).all())
        known = ~ignored & (labels < self.plain.first)
        numpy.testing.assert_array_equal(weights[known], weights_of(labels[known]))
        others = ~ignored & (labels >= self.plain.first)
        self.assertTrue((weights[others] == missing).all())
        return known.sum(), ignored.sum(), others.sum()

    def test_labels_weigh_what_their_tokens_do(self):
        shapes = {"packed": {"pack": "best", "pad": self.pad, "labels": "targets"}, "windows": {"labels": "targets"}}
        for name, shape in shapes.items():
            seen = []
            for source, where in self.ways("sft"):
                with self.subTest(shape=name, source=source):
                    options = dict(seq_len=63, batch_size=5, widen="i64", pairs=True, loss_weights=True, **shape, **where)
                    with dquant.Stream(source, seed=3, batches=120, **options) as stream:
                        self.assertIn("loss_weights", stream.opened.plan)
                        self.assertNotEqual(stream.opened.datasets[0].loss_weights, 0)
                        counts, got = numpy.zeros(3, int), []
                        for batch in stream:
                            counts += self.check_pairs(batch)
                            got.append((batch.numpy(copy=True), batch.loss_weights.copy()))
                    self.assertGreater(counts[0], 1_000)
                    self.assertGreater(counts[1], 1_000)
                    seen.append(got)
            for other in seen[1:]:
                for (one, weights), (two, same) in zip(seen[0], other, strict=True):
                    numpy.testing.assert_array_equal(one, two)
                    numpy.testing.assert_array_equal(weights, same)

    def test_tokens_of_any_type_and_slices_of_samples(self):
        for source, where in self.ways("small"):
            # Five tokens of two bytes in three samples: weights and batches are aligned all the same.
            for shape in ({"seq_len": 5, "batch_size": 3}, {"seq_len": 64, "batch_size": 3, "positions": False}):
                with dquant.Stream(source, seed=5, batches=40, loss_weights=True, **shape, **where) as stream:
                    for batch in stream:
                        tokens, weights = batch.numpy(copy=True), batch.loss_weights
                        self.assertTrue(weights.flags.aligned and not weights.flags.writeable)
                        # Ids wrap after 65535, so the tokens say where they come from.
                        first = tokens[:, :1].astype(int)
                        at = first + numpy.arange(tokens.shape[1])
                        either = [weights_of(at), weights_of(at + 65_536)]
                        for row in range(len(tokens)):
                            self.assertTrue(any((weights[row] == want[row]).all() for want in either))
                        del batch, weights
            for split in ("zigzag", "contiguous"):
                whole = dict(seq_len=64, batch_size=2, seed=9, batches=6, pairs=True, loss_weights=True, **where)
                with dquant.Stream(source, **whole) as stream:
                    all_of = [(batch.numpy(copy=True), batch.loss_weights.copy()) for batch in stream]
                for rank in range(2):
                    with dquant.Stream(source, cp=2, rank=rank, world_size=2, cp_split=split, **whole) as stream:
                        for (rows, weights), batch in zip(all_of, stream, strict=True):
                            part = batch.numpy(copy=True).reshape(2, 2, -1)
                            mine = batch.loss_weights.copy().reshape(2, -1)
                            del batch
                            labels = {int(label): weight for label, weight in zip(rows[1].ravel(), weights.ravel(), strict=True)}
                            for label, weight in zip(part[1].ravel(), mine.ravel(), strict=True):
                                self.assertEqual(labels[int(label)], weight)

    def test_weights_of_a_blend(self):
        for (chat, where), (plain, _) in zip(self.ways("sft"), self.ways("prose"), strict=True):
            options = dict(seq_len=64, batch_size=4, widen="i64", pairs=True, labels="targets", pack="best", pad=self.pad)
            with self.assertRaises(dquant.InvalidError) as caught:
                dquant.Stream({chat: 1, plain: 1}, loss_weights=True, **options, **where)
            self.assertIn("prose.loss_weights.npy", caught.exception.message)
            self.assertIn("missing=1", caught.exception.hint)
            # Nothing is drawn from it.
            dquant.Stream({chat: 1, plain: 0}, loss_weights=True, **options, **where).close()
            options |= {"loss_weights": True, "missing_weight": 1, "seed": 3, "batches": 80}
            with dquant.Stream({chat: 1, plain: 1}, **options, **where) as stream:
                counts = sum(numpy.array(self.check_pairs(batch, 1)) for batch in stream)
            self.assertTrue((counts > 100).all(), counts)

    def test_a_position_holds_with_its_weights_alone(self):
        path = os.path.join(self.root, "moved.bin")
        for end in (".bin", ".loss_weights.npy"):
            shutil.copy(os.path.join(self.root, "small" + end), path.replace(".bin", end))
        options = dict(seq_len=64, batch_size=4, seed=1, loss_weights=True)
        with dquant.Stream(path, **options) as stream:
            next(stream)
            state, batch = stream.state_dict(), next(stream)
            tokens, weights = batch.numpy(copy=True), batch.loss_weights.copy()
            del batch
        with dquant.Stream(path, **options) as stream:
            stream.load_state_dict(state)
            batch = next(stream)
            numpy.testing.assert_array_equal(batch.numpy(), tokens)
            numpy.testing.assert_array_equal(batch.loss_weights, weights)
            del batch
        numpy.save(path.replace(".bin", ".loss_weights.npy"), numpy.ones(90_000, "<f4"))
        with dquant.Stream(path, **options) as stream, self.assertRaises(dquant.StateError) as caught:
            stream.load_state_dict(state)
        self.assertIn("other loss weights", str(caught.exception))

    def test_files_that_are_no_weights_are_refused(self):
        wrong = {
            "float64": numpy.ones(90_000),
            "89999 loss weights for 90000": numpy.ones(89_999, "<f4"),
            "7 loss weights": numpy.ones(7, "<f4"),
            "float16": numpy.ones(90_000, "<f2"),
        }
        for name, array in wrong.items():
            shutil.copy(os.path.join(self.root, "small.bin"), os.path.join(self.root, "wrong.bin"))
            numpy.save(os.path.join(self.root, "wrong.loss_weights.npy"), array)
            for source, where in self.ways("wrong"):
                with self.subTest(name=name, source=source), self.assertRaises(dquant.InvalidError) as caught:
                    dquant.Stream(source, seq_len=64, loss_weights=True, **where)
                self.assertIn("wrong.loss_weights.npy", str(caught.exception))
                if name.startswith("float"):
                    self.assertIn('weights.astype("float32")', caught.exception.hint)
        # Weights beside tokens are no dataset that a pattern means, and a plan that does not ask for them has none.
        with dquant.Stream(os.path.join(self.root, "small*"), seq_len=64, batch_size=4) as stream:
            self.assertEqual([os.path.basename(info.name) for info in stream.opened.datasets], ["small.bin"])
            with self.assertRaises(dquant.InvalidError):
                _ = next(stream).loss_weights
        for options, says in (
            ({"missing_weight": 1}, "missing_weight is given, but loss_weights is not"),
            ({"loss_weights": True, "quantize": "int8"}, "quantize and loss_weights exclude each other"),
        ):
            with self.assertRaises(dquant.InvalidError) as caught:
                dquant.Stream(os.path.join(self.root, "small.bin"), seq_len=64, **options)
            self.assertIn(says, str(caught.exception))

    def test_links_and_shards_have_weights_of_their_own(self):
        for folder in ("store", "links"):
            os.mkdir(os.path.join(self.root, folder))
        at = lambda *names: os.path.join(self.root, *names)
        for number in range(2):
            numpy.arange(5_000, dtype="<u2").tofile(at("store", f"part.0000{number}"))
            numpy.save(at("store", f"part.0000{number}.loss_weights.npy"), numpy.full(5_000, number + 3, "<f4"))
            os.symlink(at("store", f"part.0000{number}"), at("links", f"{number}.bin"))
            os.symlink(at("store", f"part.0000{1 - number}.loss_weights.npy"), at("links", f"{number}.loss_weights.npy"))
        options = dict(seq_len=64, batch_size=4, batches=3, dtype="u16", loss_weights=True)
        for number in range(2):
            for path, want in ((at("store", f"part.0000{number}"), number + 3), (at("links", f"{number}.bin"), 4 - number)):
                with dquant.Stream(path, **options) as stream:
                    self.assertEqual(set(next(stream).loss_weights.ravel().tolist()), {want}, path)

    def test_a_manifest_may_come_and_go(self):
        path = os.path.join(self.root, "manifested.bin")
        for end in (".bin", ".loss_weights.npy"):
            shutil.copy(os.path.join(self.root, "small" + end), path.replace(".bin", end))
        weights = path.replace(".bin", ".loss_weights.npy")
        options = dict(seq_len=64, batch_size=4, seed=1, loss_weights=True)
        inspect = [self.binary, "inspect", weights]
        with dquant.Stream(path, **options) as stream:
            before = stream.state_dict()
        subprocess.run([*inspect, "--write-manifest"], check=True, capture_output=True)
        said = subprocess.run([*inspect, "--verify"], check=True, capture_output=True, text=True).stdout
        self.assertIn("every block is as it was", said)
        with dquant.Stream(path, **options) as stream:
            stream.load_state_dict(before)
            after = stream.state_dict()
        os.remove(weights + ".dquant.json")
        with dquant.Stream(path, **options) as stream:
            stream.load_state_dict(after)

    def test_a_damaged_file_of_weights_ends_the_stream(self):
        path = os.path.join(self.root, "damaged.bin")
        # A copy has a manifest for either file.
        convert = [self.binary, "convert", os.path.join(self.root, "small.bin"), path, "--dtype", "u16"]
        subprocess.run(convert, check=True, capture_output=True)
        weights = path.replace(".bin", ".loss_weights.npy")
        with open(weights, "r+b") as file:
            file.seek(200_000)
            file.write(b"\xff\xff\xff\xff")
        for source, where in self.ways("damaged"):
            with self.subTest(source=source), self.assertRaises(dquant.StreamError) as caught:
                with dquant.Stream(source, seq_len=64, batch_size=4, shuffle=False, epochs=1, loss_weights=True, **where) as stream:
                    for batch in stream:
                        self.assertTrue(numpy.isfinite(batch.loss_weights).all())
                        del batch
            self.assertIn("damaged.loss_weights.npy", str(caught.exception))

    def test_tensors(self):
        try:
            import torch
        except ImportError:
            self.skipTest("torch is not installed")
        from torch.utils.data import DataLoader

        from dquant.torch import TokenDataset

        source, _ = self.ways("sft")[0]
        options = dict(seq_len=64, batch_size=4, widen="i64", pairs=True, labels="targets", loss_weights=True, seed=3, batches=30)
        for copy in (True, False):
            with dquant.Stream(source, **options) as stream:
                for batch in itertools.islice(stream, 5):
                    inputs, labels, weights = batch.torch(copy=copy)
                    self.assertEqual((weights.dtype, weights.shape), (torch.float32, labels.shape))
                    numpy.testing.assert_array_equal(weights.numpy(), batch.loss_weights)
                    del batch, inputs, labels, weights
        for workers in (0, 2):
            dataset = TokenDataset(source, **options)
            with dquant.Stream(source, **options) as stream:
                loader = DataLoader(dataset, batch_size=None, num_workers=workers)
                for batch, (inputs, labels, weights) in zip(stream, loader, strict=True):
                    numpy.testing.assert_array_equal(batch.numpy(), numpy.stack([inputs, labels]))
                    numpy.testing.assert_array_equal(batch.loss_weights, weights)
        alone = dict(seq_len=8, batch_size=2, shuffle=False, batches=1, loss_weights=True)
        with dquant.Stream(self.ways("small")[0][0], plan=None, widen="i64", **alone) as stream:
            tokens, weights = next(stream).torch(copy=True)
            self.assertEqual((tokens.shape, weights.shape), ((2, 8), (2, 8)))
            numpy.testing.assert_array_equal(weights, weights_of(tokens.numpy()))
