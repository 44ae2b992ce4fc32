"""Parts for training and validation, epochs, weights as people write them, and positions of data that moves."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from fractions import Fraction

import numpy

import dquant
from reference import Reference
from world import World


def index_of(lengths, dtype="u16"):
    """An index of documents of these lengths, each of which is one sequence."""
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, {"u16": 8, "i32": 4}[dtype], len(lengths), len(lengths) + 1)
    starts = numpy.cumsum([0, *lengths[:-1]], dtype="<u8") * (2 if dtype == "u16" else 4)
    arrays = numpy.array(lengths, "<i4"), starts, numpy.arange(len(lengths) + 1, dtype="<u8")
    return head + b"".join(array.tobytes() for array in arrays)


class Folder(unittest.TestCase):
    """A folder for the files of a test, and streams of them without a daemon."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="dquant-split-")
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, count, seed=0, lengths=None):
        ids = numpy.random.default_rng(seed).integers(0, 50_000, count, dtype=numpy.uint16)
        ids.tofile(self.path(name))
        if lengths is not None:
            with open(self.path(name.replace(".bin", ".idx")), "wb") as index:
                index.write(index_of(lengths))
        return ids

    def manifest(self, name):
        binary = os.environ["DQUANT"]
        run = [binary, "inspect", self.path(name), "--dtype", "u16", "--write-manifest"]
        subprocess.run(run, check=True, capture_output=True)

    def batches(self, source, plan=None, **options):
        options = {"dtype": "u16", **options}
        with dquant.Stream(source, plan, **options) as stream:
            return [batch.numpy(copy=True) for batch in itertools.islice(stream, 4000)]


class Parts(Folder):
    def samples(self, **options):
        """The first tokens of the samples of an epoch, which are unlike each other."""
        found = self.batches(self.path("web.bin"), seq_len=16, batch_size=1, epochs=1, **options)
        return [tuple(batch[0]) for batch in found]

    def test_windows_are_in_one_part(self):
        ids = self.write("web.bin", 16 * 3_000 + 5)
        every = {tuple(ids[at : at + 16]) for at in range(0, 48_000, 16)}
        parts = {part: self.samples(split="90,8,2", part=part) for part in ("train", "valid", "test")}
        seen = [sample for part in parts.values() for sample in part]
        self.assertEqual((len(seen), set(seen)), (3_000, every))
        self.assertEqual([len(part) for part in parts.values()], [2_700, 240, 60])
        # Neither the order nor its seed decides what is in a part; the split's own seed does.
        for other in ({"shuffle": False}, {"seed": 5}):
            self.assertEqual(set(parts["valid"]), set(self.samples(split=(90, 8, 2), part="valid", **other)))
        self.assertNotEqual(set(parts["valid"]), set(self.samples(split="90,8,2", part="valid", split_seed=1)))

    def test_a_part_stays_when_others_join_the_blend(self):
        self.write("web.bin", 40_000)
        self.write("code.bin", 30_000, seed=1)
        alone = set(self.samples(split="9,1", part="valid"))
        blend = {self.path("web.bin"): 3, self.path("code.bin"): 2}
        found = self.batches(blend, seq_len=16, batch_size=1, batches=400, split="9,1", part="valid")
        web = numpy.fromfile(self.path("web.bin"), "<u2")
        every = {tuple(web[at : at + 16]) for at in range(0, 40_000, 16)}
        drawn = {tuple(batch[0]) for batch in found} & every
        self.assertGreater(len(drawn), 200)
        self.assertLessEqual(drawn, alone)

    def test_documents_are_in_one_part(self):
        lengths = [3 + at * 7 % 41 for at in range(900)]
        ids = self.write("web.bin", sum(lengths), lengths=lengths)
        ends = numpy.cumsum(lengths)
        every = {tuple(ids[end - length : end]) for end, length in zip(ends, lengths, strict=True)}
        seen = []
        for part in ("train", "valid"):
            with dquant.Stream(
                self.path("web.bin"), seq_len=48, pack="best", positions=True, split="95,5", part=part, epochs=1, batch_size=1
            ) as stream:
                for batch in stream:
                    tokens, _, numbers = batch.numpy()[:, 0]
                    for number in range(1, numbers.max() + 1):
                        seen.append(tuple(tokens[numbers == number]))
                    del batch, tokens, _, numbers
        self.assertEqual((len(seen), set(seen)), (900, every))

    def test_few_documents_are_packed(self):
        """One in a hundred of them, which a filter kept: this was refused."""
        lengths = [200 + at * 7 % 300 for at in range(9_000)]
        self.write("web.bin", sum(lengths), lengths=lengths)
        for share in ("99,1", "76,24", "53,47"):
            with dquant.Stream(
                self.path("web.bin"), seq_len=512, pack="best", split=share, part="valid", epochs=1, batch_size=1
            ) as stream:
                self.assertEqual(len(stream), stream.opened.datasets[0].packed_samples)
                self.assertGreater(sum(1 for _ in stream), 10)

    def test_the_reference_agrees_and_every_part_resumes(self):
        lengths = [20 + at * 7 % 300 for at in range(2_000)]
        self.write("web.bin", sum(lengths), lengths=lengths)
        self.write("code.bin", 400 * 301, seed=1, lengths=[301] * 400)
        files = [("u16", self.path("code.bin")), ("u16", self.path("web.bin"))]
        blend = f'blend("{files[0][1]}"=1/3, "{files[1][1]}"=2/3)'
        for text, part, seed in itertools.product(
            ("window(32)", "window(33, overlap=1) | shuffle(3)", "window(64) | pack(best) | shuffle(3)", "window(64) | pack(single)"),
            ("train", "valid", "test"),
            (0, 9),
        ):
            plan = f'{text} | {blend} | split("90,7,3", part={part}, seed={seed}) | batch(5)'
            with self.subTest(plan=plan), dquant.Stream(".", plan, batches=60) as stream:
                reference = Reference(plan, files)
                for batch in stream:
                    numpy.testing.assert_array_equal(batch.numpy(), reference.batch(batch.number))
                    if batch.number == 20:
                        state = stream.state_dict()
                    del batch
                with dquant.Stream(".", plan, batches=60) as resumed:
                    resumed.load_state_dict(state)
                    self.assertEqual(bytes(next(resumed)), reference.batch(21).tobytes())
                other = "valid" if part == "train" else "train"
                with dquant.Stream(".", plan.replace(f"part={part}", f"part={other}")) as another:
                    with self.assertRaises(dquant.StateError):
                        another.load_state_dict(state)

    def test_a_part_may_have_nothing_of_one_of_many_files(self):
        for name, documents in (("a.bin", 400), ("b.bin", 20)):
            self.write(name, 40 * documents, lengths=[40] * documents)
        for pack in ({}, {"pack": "best"}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batches = self.batches(
                    self.path("*.bin"), seq_len=40, batch_size=1, split="98,1,1", part="valid", epochs=1, dtype=None, **pack
                )
            self.assertEqual(len(batches), 4)

    def test_both_parts_of_a_hold_out_are_refused_together(self):
        with open(self.path("text.txt"), "w") as text:
            text.write("\n".join(f"line {at} of a text" for at in range(3000)))
        for at in range(40):
            with open(self.path(f"text{at}.txt"), "w") as text:
                text.write(f"text {at} " * 200)
        texts = [self.path(f"text{at}.txt") for at in range(40)]
        run = [os.environ["DQUANT"], "tokenize", *texts, "--encoding", "r50k_base", "--holdout", "20%", "-o", self.path("web.bin")]
        subprocess.run(run, check=True, capture_output=True)
        with self.assertRaisesRegex(dquant.InvalidError, "two parts of one hold-out"):
            dquant.Stream(self.path("web*.bin"), seq_len=16)
        for name in ("web.bin", "web-valid.bin"):
            dquant.Stream(self.path(name), seq_len=16).close()

    def test_what_cannot_be_is_refused(self):
        self.write("web.bin", 160)
        for options, word in (
            ({"split": "98,1,1", "part": "valid"}, "10 samples are too few for the part valid"),
            ({"split": "9,1", "part": "test"}, "no part"),
            ({"split": "9,1", "part": "eval"}, "no part `eval`|no part \"eval\""),
            ({"split": "x", "part": "train"}, "cannot divide"),
            ({"part": "valid"}, "part is given, but split is not"),
            ({"split": [1, "x"]}, "the weight of the split|weight"),
        ):
            with self.subTest(options=options), self.assertRaisesRegex(dquant.InvalidError, word):
                dquant.Stream(self.path("web.bin"), seq_len=16, dtype="u16", **options)


class Epochs(Folder):
    def test_epochs_and_what_was_drawn(self):
        self.write("web.bin", 16 * 100)
        self.write("code.bin", 16 * 50, seed=1)
        blend = {self.path("web.bin"): 3, self.path("code.bin"): 1}
        with dquant.Stream(blend, seq_len=16, batch_size=4, epochs=2, dtype="u16") as stream:
            self.assertEqual((len(stream), stream.batches_per_epoch, stream.epoch), (75, 37, 0))
            self.assertEqual([one.epoch_samples for one in stream.drawn], [100, 50])
            count = 0
            for batch in stream:
                count += 1
                del batch
            self.assertEqual(count, 75)
            self.assertEqual([(one.samples, one.tokens, one.padding) for one in stream.drawn], [(225, 3600, 0), (75, 1200, 0)])
            self.assertEqual(stream.epoch, 2)
            self.assertTrue(stream)
        endless = dquant.Stream(blend, seq_len=16, dtype="u16")
        with self.assertRaises(TypeError):
            len(endless)
        self.assertTrue(endless)
        endless.close()

    def test_the_next_epoch_has_the_same_samples_in_another_order(self):
        self.write("web.bin", 16 * 96)
        first, second = (
            self.batches(self.path("web.bin"), seq_len=16, batch_size=4, epochs=1, epoch=epoch) for epoch in (0, 1)
        )
        as_set = lambda batches: {tuple(row) for batch in batches for row in batch}
        self.assertEqual((len(first), len(second)), (24, 24))
        self.assertEqual(as_set(first), as_set(second))
        self.assertFalse(numpy.array_equal(first, second))

    def test_padding_is_counted(self):
        lengths = [10] * 30
        self.write("web.bin", 300, lengths=lengths)
        with dquant.Stream(self.path("web.bin"), seq_len=16, pack="best", batch_size=1, epochs=1) as stream:
            self.assertEqual(sum(1 for _ in stream), 30)
            (drawn,) = stream.drawn
            self.assertEqual((drawn.samples, drawn.tokens, drawn.padding), (30, 300, 180))

    def test_an_evaluation_begins_again(self):
        self.write("web.bin", 16 * 100)
        with dquant.Stream(self.path("web.bin"), seq_len=16, batch_size=8, evaluate=True, dtype="u16") as stream:
            self.assertNotIn("shuffle", stream.opened.plan)
            runs = [[bytes(batch) for batch in stream] for _ in range(3)]
            self.assertEqual([len(run) for run in runs], [12] * 3)
            self.assertEqual(runs[0], runs[2])
            iterator = iter(stream)
            for _ in range(3):
                next(iterator)
            state = stream.state_dict()
            self.assertEqual([bytes(batch) for batch in stream], runs[0], "also where one was broken off")
            stream.load_state_dict(state)
            self.assertEqual([bytes(batch) for batch in stream], runs[0][3:], "but not at a loaded position")
            stream.load_state_dict({**state, "leave_out": [[40, 56]]})
            self.assertEqual([bytes(batch) for batch in stream], runs[0][3:5] + runs[0][7:])
            self.assertEqual([bytes(batch) for batch in stream], runs[0][:5] + runs[0][7:], "what is left out stays so")

    def test_wrong_epochs(self):
        self.write("web.bin", 16 * 10)
        for options, word in (
            ({"epochs": 1, "batches": 3}, "both epochs and batches"),
            ({"epochs": 1, "batch_size": 11}, "less than a batch"),
            ({"epoch": 2}, "how long a pass is was not given"),
            ({"epochs": -1}, "epochs is -1"),
            ({"epochs": 1, "epoch": 2**63, "batch_size": 1}, "exceed 64 bits|beyond the last"),
        ):
            with self.subTest(options=options), self.assertRaisesRegex(dquant.InvalidError, word):
                dquant.Stream(self.path("web.bin"), seq_len=16, dtype="u16", **options)


class Weights(Folder):
    def test_any_numbers_are_weights(self):
        for name in "abc":
            self.write(f"{name}.bin", 160)
        a, b, c = (self.path(f"{name}.bin") for name in "abc")
        for weights, expected in (
            ({a: 1 / 3, b: 2 / 3}, [1, 2]),
            ({a: 1 / 6, b: 1 / 3, c: 1 / 2}, [1, 2, 3]),
            ({a: Fraction(1, 7), b: Fraction(6, 7)}, [1, 6]),
            ({a: 6_972_290, b: 3_291_033, c: 77}, [679_333, 320_656, 7]),
            ({a: numpy.float32(0.5), b: numpy.int64(2)}, [1, 4]),
            ({a: 0.7, b: 0.3}, [7, 3]),
            ({a: "1/3", b: "2/3"}, [1, 2]),
            ({a: "0.5", b: Fraction(1, 6)}, [3, 1]),
            ({a: 1e-3, b: 2}, [1, 2000]),
        ):
            with self.subTest(weights=weights), dquant.Stream(weights, seq_len=16, dtype="u16") as stream:
                parts = stream.opened.plan.split("blend(")[1].split(")")[0].split(", ")
                self.assertEqual([int(part.rsplit("=", 1)[1]) for part in parts], expected)
        for weights in ({a: -1, b: 1}, {a: float("nan"), b: 1}, {a: float("inf"), b: 1}, {a: "x", b: 1}, {a: 0, b: 0}):
            with self.subTest(weights=weights), self.assertRaises(dquant.InvalidError):
                dquant.Stream(weights, seq_len=16, dtype="u16")


class Files(Folder):
    def test_a_list_of_files_is_the_pattern_that_matches_them(self):
        for at, name in enumerate(("a.bin", "b.bin", "c.bin")):
            self.write(name, 1_600 * (at + 1), seed=at)
        a, b, c = (self.path(f"{name}.bin") for name in "abc")
        want = self.batches(self.path("[ab].bin"), seq_len=16, batches=20)
        for source in ([b, a], (a, b), [self.path("[a].bin"), b]):
            numpy.testing.assert_array_equal(self.batches(source, seq_len=16, batches=20), want)
        for source, options, word in (
            ([], {"seq_len": 16}, "empty list"),
            ([a, a], {"seq_len": 16}, "given twice"),
            ([a, os.path.relpath(a)], {"seq_len": 16}, "are the same file"),
            ([a, self.path("a")], {"seq_len": 16}, "are the same file"),
            ([a, "dq://host/b"], {"seq_len": 16}, "by weights"),
            ([a, self.path("none.bin")], {"seq_len": 16}, "none.bin: no such file"),
            ([a, c], {"plan": "window(16) | blend(a=1, c=1)"}, "has a blend"),
        ):
            with self.subTest(source=source), self.assertRaisesRegex(dquant.InvalidError, word):
                dquant.Stream(source, dtype="u16", **options)

    def test_files_too_short_for_a_sample_are_named_and_not_drawn(self):
        self.write("a.bin", 1_600)
        self.write("b.bin", 7)
        self.write("c.bin", 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = self.batches(self.path("*.bin"), seq_len=16, batch_size=4, epochs=1)
        self.assertEqual(len(batches), 25)
        for name in ("b.bin", "c.bin"):
            self.assertTrue(any(f"{name}: it has no sample" in str(one.message) for one in caught), name)
        with self.assertRaisesRegex(dquant.InvalidError, "none of 2 files has a sample"):
            self.batches(self.path("[bc].bin"), seq_len=16)

    def test_a_slot_holds_a_batch_of_any_size(self):
        """Pairs of 8,192 tokens have 4 MiB: more than a slot of 1 MiB, which had to be asked for."""
        self.write("a.bin", 300_000)
        batches = self.batches(self.path("a.bin"), seq_len=8192, pairs=True, widen="i64", batches=2)
        self.assertEqual(batches[0].shape, (2, 32, 8192))
        with self.assertRaisesRegex(dquant.InvalidError, "does not fit a slot"):
            self.batches(self.path("a.bin"), seq_len=8192, slot_size=1 << 18)


def reads_slowly(rank, url, options, delay_s, results):
    """A trainer of four that begins late and leaves as soon as it has its part."""
    with dquant.Stream(url, "window(64) | batch(8)", **options, rank=rank, world_size=4, group="four") as stream:
        count = 0
        for batch in stream:
            if count == 0:
                time.sleep(delay_s)
            count += 1
            del batch
    results.put((rank, count, len(stream)))


class Targets(World):
    """The same through a target, with a DPU and without."""

    def test_parts_and_epochs_are_those_of_local_files(self):
        for text in ("window(64) | shuffle(5)", "window(65, overlap=1) | narrow(u16) | widen(i64) | pairs"):
            plan = f'{text} | split("9,1", part=valid, seed=4) | batch(16)'
            with dquant.Stream(self.path("web.bin"), plan, dtype="u32", epochs=1) as stream:
                want, count = b"".join(bytes(batch) for batch in stream), len(stream)
            for offload in (True, False):
                with self.opened(self.url, plan, offload, epochs=1) as stream:
                    self.assertEqual((b"".join(bytes(batch) for batch in stream), len(stream)), (want, count))

    def test_a_rank_that_ends_its_epoch_first_ends_nobody_elses(self):
        context = multiprocessing.get_context("fork")
        for options in ({"epochs": 1}, {"evaluate": True}, {"epochs": 1, "epoch": 1}):
            results = context.Queue()
            args = (self.url, self.options(**options))
            trainers = [context.Process(target=reads_slowly, args=(rank, *args, rank * 0.3, results)) for rank in range(4)]
            for trainer in trainers:
                trainer.start()
                self.addCleanup(trainer.kill)
            found = sorted(results.get(timeout=60) for _ in trainers)
            self.assertEqual(found, [(rank, 488, 488) for rank in range(4)], options)
            for trainer in trainers:
                trainer.join(60)

    def test_a_slot_holds_a_batch_of_any_size(self):
        for offload in (True, False):
            options = self.options(offload, seq_len=8192, pairs=True, widen="i64", batches=1, slot_size=None)
            with dquant.Stream(self.url, None, offload, **options) as stream:
                self.assertEqual(next(stream).shape, (2, 32, 8192))


class Moves(Folder):
    def position(self, source, **options):
        with dquant.Stream(source, seq_len=16, batch_size=4, seed=3, **options) as stream:
            for _ in range(5):
                next(stream)
            return stream.state_dict(), bytes(next(stream))

    def goes_on(self, source, state, rename=None, **options):
        with dquant.Stream(source, seq_len=16, batch_size=4, seed=3, **options) as stream:
            stream.load_state_dict(state, rename=rename)
            return bytes(next(stream))

    def test_a_file_has_many_names(self):
        self.write("web.bin", 16_000)
        state, want = self.position(self.path("web.bin"), dtype="u16")
        relative = os.path.relpath(self.path("web.bin"))
        os.symlink(self.path("web.bin"), self.path("link.bin"))
        for name in (relative, os.path.join(".", relative), self.path("web"), self.path("link.bin")):
            self.assertEqual(self.goes_on(name, state, dtype="u16"), want, name)

    def test_a_copy_with_a_manifest_is_the_same_and_one_without_is_renamed(self):
        self.write("web.bin", 16_000)
        bare, want = self.position(self.path("web.bin"), dtype="u16")
        self.manifest("web.bin")
        known, _ = self.position(self.path("web.bin"))
        os.mkdir(self.path("moved"))
        for name in ("web.bin", "web.bin.dquant.json"):
            shutil.copy(self.path(name), self.path("moved"))
        moved = self.path("moved/web.bin")
        self.assertEqual(self.goes_on(moved, known), want)
        os.remove(self.path("moved/web.bin.dquant.json"))
        for state in (bare, known):
            with self.assertRaisesRegex(dquant.StateError, "rename"):
                self.goes_on(moved, state, dtype="u16")
            old = state["datasets"][0]["name"]
            self.assertEqual(self.goes_on(moved, state, {old: moved}, dtype="u16"), want)
            self.assertEqual(self.goes_on(moved, state, {f"./{old}" if old[0] != "/" else old: moved}, dtype="u16"), want)
            with self.assertRaisesRegex(dquant.StateError, "rename says"):
                self.goes_on(moved, state, {"other": moved}, dtype="u16")
        self.write("moved/short.bin", 8_000)
        short = self.path("moved/short.bin")
        with self.assertRaisesRegex(dquant.StateError, "8000 tokens now"):
            self.goes_on(short, bare, {bare["datasets"][0]["name"]: short}, dtype="u16")

    def test_blends_are_matched_by_manifest(self):
        for at, name in enumerate(("a.bin", "b.bin")):
            self.write(name, 16_000, seed=at)
            self.manifest(name)
        state, want = self.position({self.path("a.bin"): 2, self.path("b.bin"): 1})
        for name in ("a.bin", "b.bin"):
            # A folder of its own for each: the names say nothing of the order.
            os.mkdir(self.path(name[0]))
            for ending in ("", ".dquant.json"):
                os.rename(self.path(name + ending), self.path(f"{name[0]}/{name}{ending}"))
        a, b = self.path("a/a.bin"), self.path("b/b.bin")
        self.assertEqual(self.goes_on({a: 2, b: 1}, state), want)
        with self.assertRaises(dquant.StateError):
            self.goes_on({b: 2, a: 1}, state)
        with self.assertRaisesRegex(dquant.StateError, "plan is"):
            self.goes_on({a: 3, b: 1}, state)


class Vocabularies(Folder):
    def describe(self, name, tokenizer, largest):
        """A manifest that names a tokenizer: fields that its fingerprint does not cover."""
        self.manifest(name)
        path = self.path(name + ".dquant.json")
        with open(path) as file:
            manifest = json.load(file)
        manifest.update(tokenizer=tokenizer, max_id=largest)
        with open(path, "w") as file:
            json.dump(manifest, file)

    def test_datasets_of_several_tokenizers_are_refused(self):
        for name, tokenizer in (("a.bin", "cl100k_base"), ("b.bin", "r50k_base"), ("c.bin", "cl100k_base")):
            self.write(name, 1_600)
            self.describe(name, tokenizer, 50_000)
        a, b, c = (self.path(f"{name}.bin") for name in "abc")
        with self.assertRaises(dquant.InvalidError) as caught:
            dquant.Stream({a: 1, b: 1}, seq_len=16)
        for part in ("a.bin holds ids of cl100k_base", "b.bin holds ids of r50k_base", "tokenizers(any)"):
            self.assertIn(part, str(caught.exception))
        with self.assertRaises(dquant.InvalidError):
            dquant.Stream(self.path("*.bin"), seq_len=16)
        for source, options in (({a: 1, c: 1}, {}), ({a: 1, b: 0}, {}), ({a: 1, b: 1}, {"tokenizers": "any"})):
            dquant.Stream(source, seq_len=16, **options).close()

    def test_ids_that_do_not_fit_are_refused_when_a_stream_opens(self):
        numpy.arange(60_000, 100_258, dtype="<u4").tofile(self.path("large.bin"))
        subprocess.run(
            [os.environ["DQUANT"], "inspect", self.path("large.bin"), "--dtype", "u32", "--write-manifest"],
            check=True,
            capture_output=True,
        )
        source = self.path("large.bin")
        for options, words in (
            ({"narrow": "u16"}, "ids up to 100257, which narrow"),
            ({"bitpack": 16}, "ids up to 100257, which bitpack"),
            ({"vocab": 100_257}, "100257|vocabulary"),
        ):
            with self.subTest(options=options), self.assertRaisesRegex(dquant.InvalidError, words):
                dquant.Stream(source, seq_len=16, **options)
        for options in ({"narrow": "u16", "overflow": 0}, {"bitpack": 17}, {"narrow": "u16", "overflow": "escape", "widen": "u32"}):
            dquant.Stream(source, seq_len=16, **options).close()


class Keywords(World):
    """Every pair of keywords works, or says in its own words what excludes what."""

    VALUES = {
        "batch_size": 4,
        "shuffle": False,
        "pack": "best",
        "dedup": True,
        "filter": "listed",
        "keep": "listed",
        "remap": "ids",
        "narrow": "u16",
        "overflow": "escape",
        "bitpack": 17,
        "compress": "lz4",
        "compress_level": 1,
        "compress_when": "always",
        "quantize": "int8",
        "deliver": "f16",
        "widen": "i64",
        "pairs": True,
        "ignore": 7,
        "labels": "all",
        "positions": True,
        "loss_weights": True,
        "missing_weight": 0.5,
        "pad": 3,
        "split": "9,1",
        "part": "valid",
        "split_seed": 3,
        "tokenizers": "any",
        "seed": 3,
        "epochs": 1,
        "epoch": 1,
        "evaluate": True,
        "batches": 6,
        "cp": 2,
        "leave_out": [(0, 2)],
    }

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        lengths = [20 + at * 7 % 300 for at in range(400)]
        count = sum(lengths)
        numpy.random.default_rng(1).integers(0, 50_000, count, dtype=numpy.int32).tofile(os.path.join(cls.root, "docs.bin"))
        with open(os.path.join(cls.root, "docs.idx"), "wb") as index:
            index.write(index_of(lengths, "i32"))
        subprocess.run([cls.binary, "documents", os.path.join(cls.root, "docs.bin"), "--hash"], check=True, capture_output=True)
        said = subprocess.run(
            [cls.binary, "documents", os.path.join(cls.root, "docs.bin"), "--hashes"], check=True, capture_output=True, text=True
        )
        hashes = [line.split()[-1] for line in said.stdout.splitlines() if not line.startswith("#")]
        with open(os.path.join(cls.root, "listed"), "w") as listed:
            listed.write("\n".join(hashes[:150]))
        numpy.save(os.path.join(cls.root, "ids.npy"), numpy.arange(1 << 16, dtype="<u4")[::-1])
        numpy.save(os.path.join(cls.root, "docs.loss_weights.npy"), numpy.ones(count, dtype="<f4"))

    def attempt(self, options):
        """The shape of the first batch, or the refusal."""
        ranks = {"rank": 1, "world_size": 2} if "cp" in options else {}
        options = {"dtype": None, "slot_size": 1 << 20, **options, **ranks}
        options = {name: self.path(value) if name in ("filter", "keep", "remap") else value for name, value in options.items()}
        if "remap" in options:
            options["remap"] = self.path("ids")
        stream = self.opened(self.path("docs.bin"), None, seq_len=64, **options)
        batch = next(stream)
        shape = batch.shape
        if "loss_weights" in options:
            weights = batch.loss_weights
            self.assertEqual(weights.shape, shape[len(shape) - weights.ndim :])
            self.assertTrue(numpy.isin(weights, (0, 1)).all() and weights.any())
            del weights
        del batch
        return shape

    def expected(self, options):
        rows = 1 + ("pairs" in options) + 2 * ("positions" in options)
        tokens = (2, 16) if "cp" in options else (64,)
        return ((rows,) if rows > 1 else ()) + (options.get("batch_size", 32), *tokens)

    def test_all_pairs(self):
        plan_words = ("overlap=", "window(", "pack(", "pairs(", "filter(keep", "split(", "blend(")
        for one, other in itertools.combinations(self.VALUES, 2):
            options = {name: self.VALUES[name] for name in (one, other)}
            # What a keyword cannot do without.
            for needed, by in (
                ("narrow", ("overflow",)),
                ("widen", ("overflow",)),
                ("compress", ("compress_level", "compress_when")),
                ("quantize", ("deliver",)),
                ("pack", ("filter", "keep", "dedup", "pad")),
                ("pairs", ("ignore", "labels")),
                ("split", ("part", "split_seed")),
                ("part", ("split", "split_seed")),
                ("loss_weights", ("missing_weight",)),
                ("epochs", ("epoch",)),
            ):
                if any(name in options for name in by) and not (needed == "epochs" and "batches" in options):
                    options.setdefault(needed, self.VALUES[needed])
            if "compress_level" in options:
                options["compress"] = "zstd"
            with self.subTest(options=options):
                try:
                    shape = self.attempt(options)
                except dquant.InvalidError as error:
                    text = str(error)
                    named = [name for name in options if name in text]
                    self.assertTrue(named or "docs.bin" in text, text)
                    self.assertIsNotNone(error.hint, text)
                    for word in plan_words:
                        self.assertNotIn(word, text)
                else:
                    self.assertEqual(shape, self.expected(options))

    def test_packed_pairs_are_windows_of_a_token_more(self):
        with self.opened(self.path("docs.bin"), seq_len=128, pack="best", pairs=True, dtype=None, batches=2) as stream:
            self.assertIn("window(129) | pack(best, pad=0)", stream.opened.plan)
            self.assertEqual(next(stream).shape, (2, 32, 128))


class Writing(World):
    SCRIPT = """
import sys
import numpy
import dquant
stream = dquant.Stream(sys.argv[1], "window(64) | batch(4)", dtype="u32")
for _ in range(3):
    batch = next(stream)
array = batch.numpy()
pointer = array.__array_interface__["data"][0]
import ctypes
print("writes", flush=True)
ctypes.memset(pointer + 100, 1, 1)
print("goes on", flush=True)
"""

    def test_a_write_to_a_batch_says_what_it_was(self):
        for handler in ([], ["-X", "faulthandler"]):
            with self.subTest(handler=handler):
                line = [sys.executable, *handler, "-c", self.SCRIPT, self.path("web.bin")]
                ran = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual((ran.returncode, ran.stdout), (-signal.SIGSEGV, "writes\n"), ran.stderr)
                self.assertIn("batch 2 was written to", ran.stderr)
                self.assertIn("batch.torch(copy=True)", ran.stderr)
                self.assertEqual("Fatal Python error" in ran.stderr, bool(handler))

    def test_a_signal_that_was_sent_is_not_swallowed(self):
        script = "import dquant, sys, os, signal; s = dquant.Stream(sys.argv[1], 'window(64)', dtype='u32'); os.kill(os.getpid(), signal.SIGSEGV)"
        ran = subprocess.run([sys.executable, "-c", script, self.path("web.bin")], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((ran.returncode, "dquant" in ran.stderr), (-signal.SIGSEGV, False))

    def test_another_fault_is_not_ours(self):
        script = "import dquant, sys, ctypes; s = dquant.Stream(sys.argv[1], 'window(64)', dtype='u32'); b = next(s); ctypes.memset(8, 1, 1)"
        ran = subprocess.run([sys.executable, "-c", script, self.path("web.bin")], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((ran.returncode, "dquant" in ran.stderr), (-signal.SIGSEGV, False))

    def test_a_copy_may_be_written(self):
        with self.stream(batches=1) as stream:
            batch = next(stream)
            copy = batch.numpy(copy=True)
            copy[:] = 0
            self.assertGreater(batch.numpy().max(), 0)
            del batch


if __name__ == "__main__":
    unittest.main()
