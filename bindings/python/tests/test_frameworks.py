"""Tensors of frameworks over the ring, and streams as datasets of PyTorch. Skipped where torch or JAX is missing."""

import copy
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import unittest

import numpy

import dquant
from world import PATIENCE_S, World

try:
    import torch
    from torch.utils.data import DataLoader

    from dquant.torch import TokenDataset
except ImportError:
    torch = None
try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None
try:
    import jax
except ImportError:
    jax = None

PLAN = "window(65, overlap=1) | shuffle(3) | narrow(u16) | widen(i64) | pairs | batch(8)"


def resident():
    """Bytes of memory of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trainer_of_torch(rank, rendezvous, source, options, results):
    """A trainer that no launcher told its rank: `torch.distributed` knows it."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    dataset = TokenDataset(source, PLAN, **options)
    found = []
    for workers, context in ((0, None), (1, "fork"), (1, "spawn")):
        dataset.set_epoch(0)
        loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context)
        found.append([x.numpy().copy() for x, _ in loader])
    results.put((rank, found))
    # Nobody leaves before all are here.
    distributed.barrier()


class Forms(World):
    def test_larger_types_and_pairs_are_what_numpy_computes(self):
        plain = "window(65, overlap=1) | shuffle(3) | narrow(u16) | batch(8)"
        for offload in (True, False):
            with self.stream(plan=plain, offload=offload, batches=20) as stream:
                rows = [numpy.array(batch) for batch in stream]
            for dtype, name in (("i32", "int32"), ("i64", "int64"), ("u32", "uint32")):
                with self.stream(plan=PLAN.replace("i64", dtype), offload=offload, batches=20) as stream:
                    self.assertEqual((stream.opened.dtype, stream.opened.shape), (name, (2, 8, 64)))
                    for row, batch in zip(rows, stream, strict=True):
                        array = batch.numpy()
                        self.assertEqual((array.dtype, array.shape), (numpy.dtype(name), (2, 8, 64)))
                        numpy.testing.assert_array_equal(batch.x, row[:, :-1])
                        numpy.testing.assert_array_equal(batch.y, row[:, 1:])
                        del array, batch

    def test_a_batch_without_pairs_has_no_labels(self):
        with self.stream(batches=1) as stream, self.assertRaises(dquant.InvalidError) as caught:
            next(stream).y
        self.assertIn("pairs", str(caught.exception))

    def test_keyword_arguments_are_a_plan(self):
        with self.opened(self.url, seq_len=64, batch_size=4, seed=5, narrow="u16", batches=3) as stream:
            self.assertEqual(stream.opened.plan, "window(64) | shuffle(5) | narrow(u16) | batch(4)")
            first = b"".join(bytes(batch) for batch in stream)
        with self.stream(plan="window(64) | shuffle(5) | narrow(u16) | batch(4)", batches=3) as stream:
            self.assertEqual(first, b"".join(bytes(batch) for batch in stream))
        options = {"seq_len": 64, "shuffle": False, "pairs": True, "widen": "i64", "batches": 1}
        with self.opened(self.url, **options) as stream:
            self.assertEqual(stream.opened.plan, "window(65, overlap=1) | widen(i64) | pairs | batch(32)")
        for options, word in (({}, "seq_len"), ({"plan": "window(8)", "seq_len": 8}, "both a plan and seq_len")):
            with self.assertRaises(dquant.InvalidError) as caught:
                self.opened(self.url, **options)
            self.assertIn(word, str(caught.exception))

    def test_a_wrong_name_of_an_option(self):
        for name, says in (("narow", "did you mean narrow"), ("xyzzy", "there are seq_len, .*, reconnect")):
            with self.assertRaisesRegex(TypeError, f"no option '{name}'; {says}"):
                self.opened(self.url, seq_len=64, **{name: 1})

    def test_every_action_has_keyword_arguments(self):
        table = numpy.arange(1 << 16, dtype="<u4")[::-1]
        numpy.save(self.path("new ids.npy"), table)
        numpy.ones(4096, "<f4").tofile(self.path("ones.bin"))
        base = {"seq_len": 64, "shuffle": False, "batch_size": 4, "batches": 3}
        cases = (
            ({"narrow": "u16", "overflow": "error"}, "narrow(u16)"),
            ({"narrow": "u16", "overflow": 7}, "narrow(u16, overflow=saturate(7))"),
            ({"narrow": "u16", "overflow": "escape", "widen": "u32"}, "narrow(u16, overflow=escape) | widen(u32)"),
            ({"bitpack": 17}, "bitpack(17)"),
            ({"compress": "lz4"}, "compress(lz4)"),
            ({"narrow": "u16", "compress": "zstd", "compress_level": -3}, "narrow(u16) | compress(zstd, level=-3)"),
            ({"compress": "zstd", "compress_when": "always"}, "compress(zstd, level=1, when=always)"),
            ({"remap": "new ids", "narrow": "u16"}, 'remap("new ids") | narrow(u16)'),
            ({"quantize": "int8", "dtype": "f32"}, "quantize(int8)"),
            ({"quantize": "e4m3", "deliver": "f16", "dtype": "f32"}, "quantize(e4m3, deliver=f16)"),
            ({"quantize": "e5m2", "deliver": "quantized", "dtype": "f32"}, "quantize(e5m2, deliver=quantized)"),
        )
        for options, action in cases:
            url = f"dq://{self.control}/ones" if "quantize" in options else self.url
            plan = f"window(64) | {action} | batch(4)"
            for offload in (True, False):
                with self.subTest(plan=plan, offload=offload):
                    with self.opened(url, offload=offload, **base, **options) as stream:
                        self.assertEqual(stream.opened.plan, plan)
                        first = b"".join(bytes(batch) for batch in stream)
                    dtype = {"dtype": options["dtype"]} if "dtype" in options else {}
                    with self.stream(url=url, plan=plan, offload=offload, batches=3, **dtype) as stream:
                        self.assertEqual(first, b"".join(bytes(batch) for batch in stream))
        wrong = (
            ({"overflow": 7}, "overflow is given, but narrow is not"),
            ({"compress_level": 3}, "compress_level is given, but compress is not"),
            ({"compress_when": "always"}, "compress_when is given, but compress is not"),
            ({"deliver": "f16"}, "deliver is given, but quantize is not"),
            ({"narrow": "u16", "overflow": -1}, "overflow is -1"),
            ({"narrow": "u16", "overflow": 1.5}, "overflow is 1.5"),
            ({"narrow": "u16", "overflow": 1 << 16}, "does not fit u16"),
            ({"bitpack": "17"}, "bitpack is '17'"),
            ({"compress": 3}, "compress is 3"),
            ({"quantize": "int4"}, "no quantized type"),
            ({"plan": "window(8)", "bitpack": 17}, "both a plan and"),
        )
        for options, word in wrong:
            with self.subTest(options=options), self.assertRaisesRegex(dquant.InvalidError, word):
                self.opened(self.url, **{"seq_len": 64, **options} if "plan" not in options else options)

    def test_values_and_records_are_arrays_and_tensors(self):
        values = numpy.linspace(-4, 4, 64 * 64).astype("<f4")
        values.tofile(self.path("values.bin"))
        url, first = f"dq://{self.control}/values", values[: 4 * 64].reshape(4, 64)
        for plan, name in (("", "float32"), (" | quantize(int8, deliver=f16)", "float16")):
            with self.stream(url=url, plan=f"window(64){plan} | batch(4)", dtype="f32") as stream:
                batch = next(stream)
                self.assertEqual((batch.dtype, batch.shape, batch.nbytes), (name, (4, 64), 4 * 64 * numpy.dtype(name).itemsize))
                self.assertEqual(batch.numpy().dtype, numpy.dtype(name))
                numpy.testing.assert_allclose(batch.numpy(), first, atol=1 / 32 if plan else 0)
                numpy.testing.assert_array_equal(numpy.from_dlpack(batch), batch.numpy())
                if torch is not None:
                    self.assertEqual(str(batch.torch().dtype), f"torch.{name}")
                del batch
                gc.collect()
        with self.stream(url=url, plan="window(64) | quantize(e4m3, deliver=bf16) | batch(4)", dtype="f32") as stream:
            batch = next(stream)
            self.assertEqual(batch.dtype, "bfloat16")
            bits = numpy.frombuffer(batch, "<u2").astype("<u4") << 16
            numpy.testing.assert_allclose(bits.view("<f4").reshape(4, 64), first, rtol=1 / 8)
            if torch is not None:
                self.assertEqual(batch.torch().dtype, torch.bfloat16)
            try:
                self.assertEqual(str(batch.numpy().dtype), "bfloat16")
            except dquant.InvalidError as error:
                self.assertIn("ml_dtypes", error.hint)
            del batch
        # As docs/plan.md says.
        with self.stream(url=url, plan="window(64) | quantize(int8, deliver=quantized) | batch(4)", dtype="f32") as stream:
            batch = next(stream)
            array = batch.numpy()
            self.assertEqual((array.dtype, array.shape), (numpy.dtype("u1"), (4, 66)))
            codes, scales = array[:, :64].view("int8"), array[:, 64:].astype(int) - 127
            back = numpy.ldexp(codes.reshape(4, -1, 32) / 64, scales[..., None])
            numpy.testing.assert_allclose(back.reshape(4, 64), first, atol=1 / 32)
            del array, codes, scales, batch
        with self.stream(url=url, plan="window(1024) | batch(4)", dtype="bytes") as stream:
            batch = next(stream)
            self.assertEqual((batch.dtype, batch.shape), ("uint8", (4, 1024)))
            self.assertEqual(bytes(batch), values[:1024].tobytes())
            numpy.testing.assert_array_equal(numpy.from_dlpack(batch), batch.numpy())
            del batch
            gc.collect()

    def test_a_dictionary_of_weights_is_a_blend(self):
        text = "window(64) | shuffle(1) | blend(web=3, code=1) | narrow(u16) | batch(8)"
        with self.stream(url=f"dq://{self.control}/", plan=text, batches=9) as stream:
            want = b"".join(bytes(batch) for batch in stream)
        plan = "window(64) | shuffle(1) | narrow(u16) | batch(8)"
        remote = {f"dq://{self.control}/web": 0.75, f"dq://{self.control}/code": 0.25}
        local = {self.path("web"): 0.75, self.path("code"): 0.25}
        for source in (remote, local):
            with self.opened(source, plan, batches=9) as stream:
                self.assertEqual(want, b"".join(bytes(batch) for batch in stream))
        wrong = (({}, "no dataset"), ({**remote, **local}, "one stream"), ([self.path("web"), 3], "source is \\["))
        for source, word in wrong:
            with self.assertRaises(dquant.InvalidError) as caught:
                self.opened(source, plan)
            self.assertRegex(str(caught.exception), word)


class Local(World):
    def test_local_files_need_no_daemon(self):
        want = self.cat("--batches", "40").stdout
        for name in (self.path("web"), self.path("web.bin")):
            with dquant.Stream(name, self.PLAN, dpu="/nowhere", batches=40) as stream:
                self.assertEqual(want, b"".join(bytes(batch) for batch in stream))
                state = stream.state_dict()
        self.assertEqual(state["next_batch"], 40)
        with dquant.open(self.path("w*.bin"), self.PLAN, batches=40) as file:
            self.assertEqual(want, file.read())
        with self.assertRaises(dquant.InvalidError) as caught:
            dquant.Stream(self.path("nothing"), self.PLAN)
        self.assertIn("no such file", str(caught.exception))


    def test_headers_are_no_tokens_wherever_a_file_is_read(self):
        ids = numpy.random.default_rng(3).integers(0, 50_000, 20_000, dtype=numpy.uint16)
        for name, magic in (("llmc.bin", 20240520), ("unknown.bin", 1_987_654_321)):
            head = numpy.zeros(256, numpy.int32)
            head[:3] = magic, 1, len(ids)
            with open(os.path.join(self.root, name), "wb") as file:
                file.write(head.tobytes() + ids.tobytes())
        want = ids[: 40 * 256].tobytes()
        remote = f"dq://{self.control}"

        def local(name, **options):
            return dquant.Stream(self.path(name), plan, **options)

        def without_dpu(name, **options):
            return self.opened(f"{remote}/{name}", plan, False, **{"dtype": None, **options})

        def with_dpu(name, **options):
            return self.opened(f"{remote}/{name}", plan, **{"dtype": None, **options})

        plan = "window(64) | batch(4)"
        for opened in (local, without_dpu, with_dpu):
            with self.subTest(opened=opened.__name__):
                with opened("llmc", batches=40) as stream:
                    self.assertEqual(want, b"".join(bytes(batch) for batch in stream))
                for options in ({}, {"dtype": "u16"}):
                    with self.assertRaises(dquant.InvalidError) as caught:
                        opened("unknown", **options)
                    self.assertRegex(f"{caught.exception} {caught.exception.hint}", "header")


class Numpy(World):
    @unittest.skipUnless(hasattr(numpy, "from_dlpack"), "numpy is older than 1.22")
    def test_dlpack_is_the_same_memory(self):
        with self.stream(plan=PLAN, batches=2) as stream:
            batch = next(stream)
            self.assertEqual(batch.__dlpack_device__(), (1, 0))
            array = numpy.from_dlpack(batch)
            self.assertEqual(array.ctypes.data, batch.numpy().ctypes.data)
            numpy.testing.assert_array_equal(array, batch.numpy())
            if numpy.lib.NumpyVersion(numpy.__version__) >= "2.1.0":
                self.assertFalse(array.flags.writeable)
            for arguments in ({"copy": True}, {"dl_device": (2, 0)}, {"stream": 1}):
                with self.assertRaises(BufferError):
                    batch.__dlpack__(**arguments)
            # Capsules that nobody takes give the batch back.
            batch.__dlpack__()
            batch.__dlpack__(max_version=(1, 0))
            del array, batch
            gc.collect()

    def test_a_tensor_holds_its_slot(self):
        stream = self.stream(plan=PLAN, batches=2)
        array = numpy.from_dlpack(next(stream))
        want = array.copy()
        with self.assertRaises(BufferError):
            stream.close()
        numpy.testing.assert_array_equal(array, want)


@unittest.skipIf(torch is None, "torch is not installed")
class Torch(World):
    def test_tensors_share_the_memory_of_the_ring(self):
        with self.stream(plan=PLAN, batches=5) as stream:
            for batch in stream:
                rows = batch.torch()
                self.assertEqual(len(rows), 2)
                for at, (tensor, array) in enumerate(zip(rows, batch.numpy(), strict=True)):
                    self.assertEqual((tensor.dtype, tuple(tensor.shape)), (torch.int64, (8, 64)))
                    # Labels are a copy, which may be written.
                    self.assertEqual(tensor.data_ptr() == array.ctypes.data, at == 0)
                    numpy.testing.assert_array_equal(tensor.numpy(), array)
                del rows, tensor, array, batch

    def test_sixteen_bits(self):
        plan = "window(64) | shuffle(3) | narrow(u16) | batch(8)"
        stream = self.stream(plan=plan, batches=2)
        batch = next(stream)
        if not hasattr(torch, "uint16"):
            with self.assertRaisesRegex(dquant.InvalidError, "uint16") as refused:
                batch.torch()
            self.assertIn("widen", refused.exception.hint)
            return
        tensor = batch.torch()
        self.assertEqual((tensor.dtype, tensor.data_ptr()), (torch.uint16, batch.numpy().ctypes.data))
        numpy.testing.assert_array_equal(tensor.numpy(), batch.numpy())
        want = [batch.numpy().copy(), next(stream).numpy().copy()]
        for workers, copy in ((0, True), (0, False), (1, True), (1, False)):
            dataset = TokenDataset(self.url, plan, copy=copy, **self.options(batches=2))
            items = [item.numpy().copy() for item in DataLoader(dataset, batch_size=None, num_workers=workers)]
            numpy.testing.assert_array_equal(items, want)

    def dataset(self, **options):
        return TokenDataset(f"dq://{self.control}/web", PLAN, **self.options(**options))

    def items(self, loader):
        return [(x.numpy().copy(), y.numpy().copy()) for x, y in loader]

    def test_loaders_with_and_without_workers_deliver_the_same(self):
        with self.stream(plan=PLAN, batches=12) as stream:
            want = [numpy.array(batch) for batch in stream]
        for workers in (0, 1, 3):
            for copy in (True, False):
                with self.subTest(workers=workers, copy=copy):
                    dataset = self.dataset(batches=12, copy=copy)
                    for epoch in range(2):
                        dataset.set_epoch(0)
                        items = self.items(DataLoader(dataset, batch_size=None, num_workers=workers))
                        self.assertEqual(len(items), 12)
                        for (x, y), batch in zip(items, want, strict=True):
                            numpy.testing.assert_array_equal(x, batch[0])
                            numpy.testing.assert_array_equal(y, batch[1])

    def test_ranks_of_an_initialised_process_group(self):
        whole = [x for x, _ in self.items(self.dataset(batches=12))]
        self.assertEqual(len(self.dataset(batches=12)), 12)
        context = multiprocessing.get_context("spawn")
        results, rendezvous = context.Queue(), self.path("rendezvous")
        args = (rendezvous, self.url, self.options(batches=6), results)
        trainers = [context.Process(target=trainer_of_torch, args=(rank, *args)) for rank in range(2)]
        for trainer in trainers:
            trainer.start()
            self.addCleanup(trainer.kill)
        for rank, found in (results.get(timeout=PATIENCE_S) for _ in trainers):
            for items in found:
                numpy.testing.assert_array_equal(items, whole[rank::2], f"rank {rank}")
        for trainer in trainers:
            trainer.join(PATIENCE_S)
            self.assertEqual(trainer.exitcode, 0)

    def test_a_killed_worker_is_an_error_and_the_next_epoch_is_whole(self):
        dataset = self.dataset(batches=400)
        loader = DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=2)
        # Torch notices the death itself, or that the memory of a batch cannot be had from the dead.
        with self.assertRaises((RuntimeError, OSError, EOFError)):
            for number, _ in enumerate(loader):
                if number == 3:
                    workers = multiprocessing.active_children()
                    self.assertEqual(len(workers), 1)
                    os.kill(workers[0].pid, signal.SIGKILL)
        again = self.items(DataLoader(self.dataset(batches=12), batch_size=None, num_workers=1))
        want = self.items(self.dataset(batches=12))
        self.assertEqual(len(again), 12)
        for (x, _), (expected, _) in zip(again, want, strict=True):
            numpy.testing.assert_array_equal(x, expected)

    def test_a_saved_position_is_resumed(self):
        whole = self.items(self.dataset(batches=20))
        dataset = self.dataset(batches=20)
        self.assertEqual(dataset.state_dict(), {})
        iterator = iter(dataset)
        for _ in range(7):
            next(iterator)
        state = dataset.state_dict()
        self.assertEqual(state["next_batch"], 7)
        other = self.dataset(batches=20)
        other.load_state_dict(state)
        self.assertEqual(other.state_dict(), state)
        rest = self.items(other)
        self.assertEqual(len(rest), 13)
        for (x, _), (want, _) in zip(rest, whole[7:], strict=True):
            numpy.testing.assert_array_equal(x, want)
        self.assertEqual(len(self.items(other)), 20, "the next pass is whole")
        wrong = self.dataset(batches=20)
        wrong.load_state_dict({**state, "plan": "window(9)"})
        with self.assertRaises(dquant.StateError):
            next(iter(wrong))

    def test_the_state_behind_a_pass_is_the_beginning_of_the_next(self):
        whole = self.items(self.dataset(batches=10))
        dataset = self.dataset(batches=5)
        self.assertEqual(len(self.items(dataset)), 5)
        state = dataset.state_dict()
        self.assertEqual(state["next_batch"], 5)
        other = self.dataset(batches=5)
        other.load_state_dict(state)
        self.same(self.items(other), whole[5:])

    def same(self, items, want):
        self.assertEqual(len(items), len(want))
        for rows, expected in zip(items, want, strict=True):
            for row, other in zip(rows, expected, strict=True):
                numpy.testing.assert_array_equal(row, other)

    def test_every_pass_is_another(self):
        whole = self.items(self.dataset(batches=30))
        for workers in (0, 1, 2):
            with self.subTest(workers=workers):
                dataset = self.dataset(batches=10)
                loader = DataLoader(dataset, batch_size=None, num_workers=workers)
                self.assertEqual(len(loader), 10)
                for at in range(3):
                    self.same(self.items(loader), whole[10 * at : 10 * at + 10])
                dataset.set_epoch(1)
                self.same(self.items(loader), whole[10:20])
                # A pass that is broken off is over.
                next(iter(loader))
                self.same(self.items(loader), self.items(self.dataset(batches=10, epoch=3)))
        again = self.dataset(batches=10, repeat=True)
        for _ in range(2):
            self.same(self.items(again), whole[:10])
        endless = self.dataset()
        for at in range(3):
            iterator = iter(endless)
            self.same([tuple(row.numpy() for row in next(iterator)) for _ in range(10)], whole[10 * at : 10 * at + 10])
            iterator.close()
        with self.assertRaises(dquant.InvalidError):
            endless.set_epoch(2)

    def test_epochs_are_passes(self):
        # 1,000,000 tokens make 15,624 windows of 65 that share one: 1,953 batches of 8 are an epoch.
        dataset = self.dataset(epochs=1)
        self.assertEqual(len(dataset), 1953)
        with self.stream(plan=PLAN, epochs=2) as stream:
            self.assertEqual((len(stream), stream.batches_per_epoch, stream.epoch), (3906, 1953, 0))

    def test_workers_send_tickets_and_loaders_do_not_mix(self):
        whole = self.items(self.dataset(batches=40))
        left_out = self.items(self.dataset(batches=40, leave_out=[(3, 9), (30, 31)]))
        self.assertEqual(len(left_out), 33)
        dataset = self.dataset(batches=40, leave_out=[(3, 9), (30, 31)], repeat=True)
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        self.same(self.items(loader), left_out)
        # Three loaders of one dataset, in turns: more than it has streams for.
        dataset = self.dataset(batches=12, repeat=True)
        iterators = [iter(DataLoader(dataset, batch_size=None, num_workers=1)) for _ in range(3)]
        for want in whole[:12]:
            for iterator in iterators:
                self.same([[row.numpy() for row in next(iterator)]], [want])
        # What a `collate_fn` gets is the batch.
        loader = DataLoader(
            self.dataset(batches=5), batch_size=None, num_workers=1, collate_fn=lambda rows: {"input_ids": rows[0] + 1}
        )
        for item, (x, _) in zip(loader, whole, strict=False):
            numpy.testing.assert_array_equal(item["input_ids"], x + 1)

    def test_a_loaded_position_counts_once_with_workers_too(self):
        whole = self.items(self.dataset(batches=30))
        first = self.dataset(batches=10)
        iterator = iter(first)
        for _ in range(3):
            next(iterator)
        state = first.state_dict()
        iterator.close()
        for workers in (0, 1):
            dataset = self.dataset(batches=10)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            dataset.load_state_dict(state)
            self.same(self.items(loader), whole[3:10])
            self.same(self.items(loader), whole[10:20])
            # The position of the loop, though a worker iterates.
            iterator = iter(loader)
            for _ in range(4):
                next(iterator)
            self.assertEqual(dataset.state_dict()["next_batch"], 24)
            del iterator

    def test_copies_of_a_dataset_have_passes_of_their_own(self):
        whole = self.items(self.dataset(batches=20))
        dataset = self.dataset(batches=10)
        for copied in (copy.deepcopy(dataset), copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
            loader = DataLoader(copied, batch_size=None, num_workers=1)
            self.same(self.items(loader), whole[:10])
            self.same(self.items(loader), whole[10:])
        self.same(self.items(dataset), whole[:10])

    def test_a_loop_that_stops_early_goes_on_there(self):
        whole = self.items(self.dataset(batches=9))
        for workers in (0, 1):
            dataset = self.dataset()
            more = {"prefetch_factor": 8} if workers else {}
            loader = DataLoader(dataset, batch_size=None, num_workers=workers, **more)
            found = []
            for _ in range(3):
                iterator = iter(loader)
                found += [[row.numpy().copy() for row in next(iterator)] for _ in range(3)]
                del iterator
            self.same(found, whole)

    def test_an_evaluation_is_the_same_each_time(self):
        dataset = TokenDataset(
            self.url, **self.options(seq_len=64, batch_size=10, split="99,1", part="valid", evaluate=True)
        )
        self.assertEqual(len(dataset), 16)
        loader = DataLoader(dataset, batch_size=None)
        runs = [[item.numpy().copy() for item in loader] for _ in range(3)]
        for run in runs:
            numpy.testing.assert_array_equal(run, runs[0])
        with self.assertRaises(dquant.InvalidError):
            dataset.set_epoch(-1)

    def test_a_loader_that_stacks_batches_is_refused(self):
        for workers in (0, 1):
            with self.subTest(workers=workers), self.assertRaisesRegex(Exception, "batch_size=None"):
                next(iter(DataLoader(self.dataset(batches=10), batch_size=4, num_workers=workers)))

    def test_labels_may_be_written_and_inputs_not(self):
        with self.stream(plan=PLAN, batches=2) as stream:
            batch = next(stream)
            before = batch.numpy(copy=True)
            x, y = batch.torch()
            y[:, :3] = -100
            self.assertTrue((y[:, :3] == -100).all())
            numpy.testing.assert_array_equal(batch.numpy(), before)
            x, y = batch.torch(copy=True)
            x += 1
            numpy.testing.assert_array_equal(x, before[0] + 1)
            numpy.testing.assert_array_equal(y, before[1])
            x, y = batch.torch(copy=False)
            self.assertEqual(y.data_ptr(), batch.y.ctypes.data)
            del x, y, batch
        # Slices of context-parallel trainers are copied piece by piece.
        with self.stream(plan=PLAN, batches=1, cp=2, rank=1, world_size=2) as stream:
            batch = next(stream)
            x, y = batch.torch(copy=True)
            views = batch.torch(copy=False)
            numpy.testing.assert_array_equal(x, views[0])
            numpy.testing.assert_array_equal(y, views[1])
            del x, y, views, batch

    def test_copies_use_memory_again_and_never_what_is_held(self):
        with self.stream(plan=PLAN) as stream:
            x, y = next(stream).torch(copy=True)
            places = {x.data_ptr(), y.data_ptr()}
            # Neither is free: the next copies lie elsewhere, and these stay as they are.
            before = x.clone(), y.clone()
            others = next(stream).torch(copy=True)
            self.assertTrue(places.isdisjoint(tensor.data_ptr() for tensor in others))
            self.assertTrue(torch.equal(x, before[0]) and torch.equal(y, before[1]))
            del x, y
            want = next(stream)
            x, y = want.torch(copy=True)
            self.assertEqual(places, {x.data_ptr(), y.data_ptr()})
            self.assertTrue(numpy.array_equal(want.x, x) and numpy.array_equal(want.y, y))
            del want
        # It belongs to whoever holds it, also after the stream.
        x.fill_(7)
        self.assertTrue(bool((x == 7).all()))

    def test_copies_of_many_threads_are_right(self):
        right, wrong = [], []
        with self.stream(plan=PLAN, batches=400) as stream:
            batches = queue.Queue(4)

            def check():
                while (batch := batches.get()) is not None:
                    try:
                        x, y = batch.torch(copy=True)
                        same = numpy.array_equal(batch.x, x) and numpy.array_equal(batch.y, y)
                        (right if same else wrong).append(batch.number)
                    except Exception as error:
                        wrong.append(error)
                    batch = x = y = None

            threads = [threading.Thread(target=check, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            for batch in stream:
                batches.put(batch, timeout=PATIENCE_S)
                del batch
            for _ in threads:
                batches.put(None, timeout=PATIENCE_S)
            for thread in threads:
                thread.join(PATIENCE_S)
            self.assertFalse(any(thread.is_alive() for thread in threads))
        self.assertEqual((sorted(right), wrong), (list(range(400)), []))

    def test_a_kept_copy_keeps_no_other_memory(self):
        kept, rounds = [], 12
        options = {"plan": "window(32768) | narrow(u16) | widen(i64) | batch(16)", "slot_size": 8 << 20, "slots": 2}
        for number in range(rounds):
            with self.stream(**options) as stream:
                copies = [next(stream).torch(copy=True) for _ in range(4)]
                kept.append(copies[0])
                del copies
            if number == 1:
                before = resident()
        grown = (resident() - before) / (rounds - 2)
        # A copy has 4 MiB; four of them would be 16.
        self.assertLess(grown, 9 << 20)

    @unittest.skipIf(StatefulDataLoader is None, "torchdata is not installed")
    def test_the_loader_of_torchdata_saves_and_resumes(self):
        def loader(workers, copy=True):
            return StatefulDataLoader(self.dataset(batches=20, copy=copy), batch_size=None, num_workers=workers)

        whole = self.items(loader(0))
        for workers, copy in ((0, True), (0, False), (1, True), (3, False)):
            with self.subTest(workers=workers, copy=copy):
                first = loader(workers, copy)
                iterator = iter(first)
                for _ in range(7):
                    next(iterator)
                state = pickle.loads(pickle.dumps(first.state_dict()))
                del iterator
                resumed = loader(workers, copy)
                resumed.load_state_dict(state)
                for (x, y), want in zip(self.items(resumed), whole[7:], strict=True):
                    numpy.testing.assert_array_equal((x, y), want)
                self.assertEqual(len(self.items(resumed)), 20, "the next pass is whole")
                after = loader(workers, copy)
                after.load_state_dict(resumed.state_dict())
                self.assertEqual(len(self.items(after)), 20, "a pass that ended is not resumed")


@unittest.skipIf(jax is None, "jax is not installed")
class Jax(World):
    def test_jax_reads_the_same_bytes(self):
        with self.stream(plan=PLAN.replace("i64", "i32"), batches=3) as stream:
            for batch in stream:
                array = jax.dlpack.from_dlpack(batch)
                numpy.testing.assert_array_equal(numpy.asarray(array), batch.numpy())
                del array, batch
            gc.collect()


if __name__ == "__main__":
    unittest.main()
