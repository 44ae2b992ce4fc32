"""Ranks: which batches each trainer gets, what trainers of one machine share, slices, resuming on other ranks."""

import hashlib
import multiprocessing
import os
import signal
import unittest
import warnings
from unittest import mock

import numpy

import dquant
from world import PATIENCE_S, World, eventually

PLAN = "window(64) | shuffle(7) | blend(web=3, code=1) | narrow(u16) | batch(8)"
STEPS = 6


def trainer(url, options, steps, results, barrier):
    """A process of a job: its batches by number, and where it would resume."""
    try:
        with dquant.Stream(url, PLAN, **options) as stream:
            got = {}
            for _ in range(steps):
                batch = next(stream)
                got[batch.number] = bytes(memoryview(batch).tobytes())
                del batch
            state = stream.state_dict()
            barrier.wait(PATIENCE_S)
        results.put((options.get("rank", 0), got, state))
    except Exception as error:
        results.put((options.get("rank", 0), repr(error), None))
        raise


class Ranks(World):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder_url = f"dq://{cls.control}"

    def whole(self, batches, plan=PLAN, **more):
        """The first batches of the stream, as bytes."""
        stream = self.stream(self.folder_url, plan, batches=batches, **more)
        return [batch.numpy().tobytes() for batch in stream]

    def job(self, world_size, **layout):
        """Runs the trainers of a job in processes of their own, on one machine; what each got."""
        context = multiprocessing.get_context("spawn")
        results, barrier = context.Queue(), context.Barrier(world_size)
        options = self.options(world_size=world_size, group=f"{self.id()} {layout}", **layout)
        places = [{**options, "rank": rank} for rank in range(world_size)]
        running = [
            context.Process(target=trainer, args=(self.folder_url, place, STEPS, results, barrier)) for place in places
        ]
        for process in running:
            process.start()
            self.addCleanup(process.kill)
        got = sorted((results.get(timeout=PATIENCE_S) for _ in running), key=lambda found: found[0])
        for process in running:
            process.join(PATIENCE_S)
            self.assertEqual(process.exitcode, 0, got)
        return [(batches, state) for _, batches, state in got]

    def test_data_parallel_ranks_share_out_the_batches(self):
        for world_size in (1, 2, 4, 8):
            with self.subTest(world_size=world_size):
                want = dict(enumerate(self.whole(STEPS * world_size)))
                got = self.job(world_size)
                together = {number: data for batches, _ in got for number, data in batches.items()}
                self.assertEqual(together, want)
                for _, state in got:
                    self.assertEqual(state["next_batch"], STEPS * world_size)
                    self.assertEqual(state["next_sample"], STEPS * world_size * 8)

    def test_ranks_of_one_replica_get_the_same(self):
        want = dict(enumerate(self.whole(STEPS * 2)))
        got = self.job(8, tp=2, pp=2)
        for rank, (batches, _) in enumerate(got):
            data_parallel = rank // 2 % 2
            mine = {number: data for number, data in want.items() if number % 2 == data_parallel}
            self.assertEqual(batches, mine, f"rank {rank}")

    def test_slices_of_context_parallel_ranks_make_up_the_samples(self):
        whole = [numpy.frombuffer(data, "<u2").reshape(8, 64) for data in self.whole(2)]
        for split, rank in ((split, rank) for split in ("zigzag", "contiguous") for rank in range(4)):
            stream = self.stream(
                self.folder_url, PLAN, rank=rank, world_size=4, cp=4, cp_split=split, batches=2, offload=False, memory=64 << 20
            )
            for batch, want in zip(stream, whole, strict=True):
                got = batch.numpy()
                if split == "contiguous":
                    part = want[:, 16 * rank : 16 * rank + 16]
                else:
                    # Megatron-core: of twice as many pieces, those at `rank` and at the same place from the end.
                    part = want.reshape(8, 8, 8)[:, [rank, 7 - rank]]
                numpy.testing.assert_array_equal(got, part)
                self.assertEqual((batch.shape, batch.nbytes, got.nbytes), (got.shape, part.nbytes, part.nbytes))
                self.assertTrue(numpy.shares_memory(got, numpy.asarray(batch)), "no copy")
                with self.assertRaisesRegex(BufferError, "slices of samples"):
                    hashlib.sha256(batch)
                del got, batch
        with self.assertRaisesRegex(dquant.InvalidError, "64 tokens cannot be cut into 6"):
            self.stream(self.folder_url, PLAN, rank=0, world_size=3, cp=3)

    def test_slices_of_pairs(self):
        plan = "window(65, overlap=1) | narrow(u16) | widen(i64) | pairs | batch(4)"
        whole = next(self.stream(plan=plan)).numpy().copy()
        for rank in range(2):
            batch = next(self.stream(plan=plan, rank=rank, world_size=2, cp=2))
            want = whole.reshape(2, 4, 4, 16)[:, :, [rank, 3 - rank]]
            numpy.testing.assert_array_equal(batch.numpy(), want)
            numpy.testing.assert_array_equal(batch.x, want[0])
            numpy.testing.assert_array_equal(batch.y, want[1])

    def test_a_job_resumes_with_other_ranks_and_other_batches(self):
        samples = b"".join(self.whole(100))
        size = 64 * 2
        state, at = None, 0
        for world_size, batch, steps in ((4, 8, 3), (2, 7, 4), (3, 5, 5), (1, 17, 2)):
            plan = PLAN.replace("batch(8)", f"batch({batch})")
            states = []
            for rank in range(world_size):
                stream = self.stream(
                    self.folder_url,
                    plan,
                    rank=rank,
                    world_size=world_size,
                    batches=1000,
                    offload=rank % 2 == 0,
                    memory=64 << 20,
                )
                if state is not None:
                    stream.load_state_dict(state)
                for step in range(steps):
                    first = at + (step * world_size + rank) * batch
                    want = samples[first * size : (first + batch) * size]
                    self.assertEqual(next(stream).numpy().tobytes(), want, f"rank {rank} of {world_size}")
                states.append(stream.state_dict())
                stream.close()
            at += steps * world_size * batch
            self.assertEqual({found["next_sample"] for found in states}, {at})
            state = states[0]

    def test_all_ranks_leave_out_the_same_steps(self):
        want, plan = self.whole(40), {"batches": 10, "world_size": 4, "leave_out": [(8, 16), (20, 28)]}
        for rank in range(4):
            stream = self.stream(self.folder_url, PLAN, rank=rank, offload=rank % 2 == 0, memory=64 << 20, **plan)
            got = [(batch.number, batch.numpy().tobytes()) for batch in stream]
            numbers = [4 * step + rank for step in (0, 1, 4, 7, 8, 9)]
            self.assertEqual(got, [(number, want[number]) for number in numbers])
        with self.assertRaises(dquant.InvalidError) as raised:
            self.stream(self.folder_url, PLAN, rank=0, world_size=4, leave_out=[(8, 14)])
        self.assertIn("no whole steps of 4 ranks", raised.exception.message)

    def test_what_was_left_out_stays_so_with_other_ranks_and_other_batches(self):
        samples, size = b"".join(self.whole(100)), 64 * 2
        state, at = None, 0
        for world_size, batch in ((4, 8), (2, 16), (1, 32), (8, 4)):
            plan = PLAN.replace("batch(8)", f"batch({batch})")
            left_out = [(8, 16)] if state is None else []
            states = []
            for rank in range(world_size):
                options = {"rank": rank, "world_size": world_size, "batches": 1000, "leave_out": left_out}
                stream = self.stream(self.folder_url, plan, offload=False, memory=64 << 20, **options)
                if state is not None:
                    stream.load_state_dict(state)
                # Global batches of 32 samples, of which numbers 2 and 3 are left out.
                first = (at + (2 if at == 2 else 0)) * 32 + rank * batch
                got = next(stream).numpy().tobytes()
                self.assertEqual(got, samples[first * size : (first + batch) * size], f"{rank} of {world_size}")
                states.append(stream.state_dict())
                stream.close()
            at = states[0]["next_sample"] // 32
            state = states[0]

    def test_a_position_between_batches_ends_before_the_last_sample(self):
        state = self.stream(self.folder_url, PLAN.replace("batch(8)", "batch(4)")).state_dict()
        stream = self.stream(self.folder_url, PLAN, batches=3)
        stream.load_state_dict({**state, "next_sample": 4, "next_batch": 1})
        samples = b"".join(self.whole(3))
        size = 64 * 2
        got = [batch.numpy().tobytes() for batch in stream]
        self.assertEqual(got, [samples[4 * size : 12 * size], samples[12 * size : 20 * size]])

    def test_a_rank_that_is_killed_ends_the_others(self):
        context = multiprocessing.get_context("spawn")
        results, barrier = context.Queue(), context.Barrier(2)
        options = self.options(world_size=2, group=self.id())
        args = (self.folder_url, {**options, "rank": 1}, 3, results, barrier)
        other = context.Process(target=trainer, args=args)
        other.start()
        self.addCleanup(other.kill)
        stream = self.stream(self.folder_url, PLAN, rank=0, world_size=2, group=self.id())
        # It has its ring and waits for us at the barrier.
        eventually("the other rank has read", lambda: barrier.n_waiting == 1)
        os.kill(other.pid, signal.SIGKILL)
        with self.assertRaisesRegex(dquant.StreamError, f"rank 1 of group .*process {other.pid} ") as failed:
            for batch in stream:
                del batch
        self.assertIn("checkpoint", failed.exception.hint)

    def test_a_long_wait_is_reported(self):
        stream = self.stream(self.folder_url, PLAN, rank=0, world_size=2, group=self.id())
        with warnings.catch_warnings():
            # As an error it ends the wait.
            warnings.simplefilter("error", UserWarning)
            with self.assertRaisesRegex(UserWarning, "no batch for 10 s.*ranks of this job"):
                for batch in stream:
                    last = batch.number
                    del batch
        other = self.stream(self.folder_url, PLAN, rank=1, world_size=2, group=self.id())
        for batch in other:
            if batch.number > last:
                break
            del batch
        self.assertEqual(next(stream).number, last + 2, "the wait went on where it was")

    def test_torchrun_says_who_we_are(self):
        run = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": self.id()}
        here = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **run}
        with mock.patch.dict(os.environ, here):
            stream = self.stream(tp=2)
            self.assertEqual(stream.data_parallel, (2, 4))
            alone = self.stream(rank=0, world_size=1)
            self.assertEqual(alone.data_parallel, (0, 1))
        with mock.patch.dict(os.environ, {**here, "RANK": "4", "LOCAL_RANK": "0"}):
            other = self.stream(tp=2)
        self.assertEqual(next(other).numpy().tobytes(), next(stream).numpy().tobytes())
        other.close()
        with self.assertRaisesRegex(dquant.StreamError, f"rank 2 of group {self.id()} 10.0.0.1:29500"):
            for batch in stream:
                del batch
        for wrong in ({"WORLD_SIZE": "eight"}, {"RANK": "8"}, {"LOCAL_RANK": "2"}):
            with mock.patch.dict(os.environ, {**here, **wrong}), self.assertRaises(dquant.InvalidError):
                self.stream()

    def test_what_cannot_be_is_refused(self):
        for options, says in (
            ({"rank": 0}, "no world_size"),
            ({"world_size": 2}, "no rank"),
            ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
            ({"rank": 0, "world_size": 6, "tp": 4}, "6 trainers cannot be divided into 4"),
            ({"rank": 0, "world_size": 2, "tp": 0}, "cannot be divided into 0"),
            ({"rank": 0, "world_size": 2, "local_rank": 0}, "without the other"),
            ({"rank": 0, "world_size": 2, "local_rank": 1, "local_world_size": 2, "group": "x"}, "cannot be rank 0"),
            ({"rank": 0, "world_size": 2, "cp_split": "spiral"}, "spiral"),
        ):
            with self.subTest(options), self.assertRaisesRegex(dquant.InvalidError, says) as refused:
                self.stream(**options)
            self.assertTrue(refused.exception.hint)


if __name__ == "__main__":
    unittest.main()
