"""What a stream delivers, and how long its memory is held."""

import gc
import io
import itertools
import json
import pickle
import unittest

import numpy

import dquant
from world import World


class Delivery(World):
    def test_bytes_equal_those_of_the_command_line_with_and_without_offload(self):
        want = self.cat("--batches", "70").stdout
        self.assertEqual(len(want), 70 * 32 * 64 * 2)
        for offload in (True, False):
            with self.subTest(offload=offload), self.stream(offload=offload, batches=70) as stream:
                got = b"".join(bytes(batch) for batch in stream)
                self.assertEqual(got, want)
                self.assertIsNone(next(stream, None), "the end lasts")

    def test_a_batch_is_a_read_only_array_in_the_ring(self):
        cases = ((self.PLAN, "H", "uint16"), ("window(64) | narrow(u32) | batch(32)", "I", "uint32"))
        for plan, format, dtype in cases:
            with self.subTest(dtype=dtype):
                batch = next(self.stream(plan=plan))
                view = memoryview(batch)
                self.assertEqual((view.shape, view.format, view.readonly), ((32, 64), format, True))
                self.assertTrue(view.c_contiguous)
                self.assertEqual((batch.number, batch.shape, batch.dtype), (0, (32, 64), dtype))
                self.assertEqual((len(batch), batch.nbytes), (32, view.nbytes))
                array = numpy.asarray(batch)
                self.assertEqual((array.shape, array.dtype), ((32, 64), numpy.dtype(dtype)))
                self.assertFalse(array.flags.writeable or array.flags.owndata)
                again = batch.numpy()
                self.assertEqual(again.ctypes.data, array.ctypes.data, "no copy")
                flat = numpy.frombuffer(batch, dtype=dtype)
                self.assertEqual(flat.ctypes.data, array.ctypes.data, "no copy")
                with self.assertRaises(ValueError):
                    array[0, 0] = 1
                with self.assertRaises(TypeError):
                    io.BytesIO(bytes(4)).readinto(batch)

    def test_in_order_a_batch_is_the_file_itself(self):
        stream = self.stream(plan="window(64) | narrow(u16) | batch(32)", batches=3)
        numbers = []
        for number, batch in enumerate(stream):
            part = self.tokens[number * 2048 : (number + 1) * 2048].reshape(32, 64)
            numpy.testing.assert_array_equal(batch, part)
            numbers.append(batch.number)
        self.assertEqual(numbers, [0, 1, 2])
        self.assertEqual(stream.next_batch, 3)

    def test_what_was_opened_and_its_counters(self):
        plan = "window(64) | shuffle(seed) | blend(web=3, code=1) | narrow(u16) | batch(32)"
        stream = self.stream(url=f"dq://{self.control}/", plan=plan, seed=9)
        opened = stream.opened
        self.assertEqual((opened.shape, opened.dtype), ((32, 64), "uint16"))
        self.assertIn("shuffle(9", opened.plan)
        self.assertEqual([dataset.tokens for dataset in opened.datasets], [1_000_000, 1_000_000])
        self.assertEqual([dataset.dtype for dataset in opened.datasets], ["u32", "u32"])
        self.assertEqual(opened, pickle.loads(pickle.dumps(opened)))
        next(stream)
        status = stream.status()
        self.assertGreater(status["batches"], 0)
        self.assertGreater(status["wire_bytes"], 0)
        self.assertIn("web", repr(stream) + repr(opened))


class Slots(World):
    """Two slots of 64 KiB, with 16 batches of 4 KiB each; the first slot of a stream has one batch."""

    PLAN = "window(64) | narrow(u16) | batch(32)"
    PER_SLOT = (64 << 10) // (32 * 64 * 2)

    def test_a_caller_that_holds_all_slots_gets_an_error_and_goes_on(self):
        stream = self.stream(slots=2)
        kept = list(itertools.islice(stream, 1 + self.PER_SLOT))
        for _ in range(2):
            with self.assertRaises(dquant.SlotsHeldError) as raised:
                next(stream)
            self.assertIn("all 2 slots", str(raised.exception))
            self.assertIn(f"{len(kept)} batches", raised.exception.message)
            self.assertIn("copy what must stay", raised.exception.hint)
        del kept[0]
        self.assertEqual(next(stream).number, 1 + self.PER_SLOT)

    def test_a_stream_that_ends_in_held_slots_ends(self):
        kept = list(self.stream(slots=2, batches=1 + self.PER_SLOT))
        self.assertEqual(len(kept), 1 + self.PER_SLOT)

    def test_views_of_views_hold_the_slot(self):
        derive = (
            lambda batch: memoryview(batch),
            lambda batch: numpy.asarray(batch),
            lambda batch: numpy.asarray(batch)[3:9:2, ::-1].T,
            lambda batch: numpy.asarray(batch).view(numpy.int16).reshape(-1)[5:6],
            lambda batch: memoryview(numpy.asarray(batch)[0]).cast("B")[7:8],
        )
        for case, make in enumerate(derive):
            with self.subTest(case=case):
                stream = self.stream(slots=2)
                first = next(stream)
                view = make(first)
                before = bytes(view)
                del first
                # The first slot stays held by the view alone; the second is used over and over.
                second = [next(stream) for _ in range(self.PER_SLOT)]
                del second
                for _ in range(3 * self.PER_SLOT):
                    next(stream)
                self.assertEqual(bytes(view), before)
                kept = list(itertools.islice(stream, self.PER_SLOT))
                with self.assertRaises(dquant.SlotsHeldError):
                    while True:
                        kept.append(next(stream))
                del view
                gc.collect()
                self.assertIsNotNone(next(stream))

    def test_leaving_the_block_with_views_raises_and_closes(self):
        with self.assertRaises(BufferError) as raised:
            with self.stream() as stream:
                array = next(stream).numpy()
                part = array[1:2]
                del array
        self.assertIn("1 views", str(raised.exception))
        self.assertTrue(stream.closed)
        numpy.testing.assert_array_equal(part[0], self.tokens[64:128])
        stream.close()
        with self.assertRaises(dquant.InvalidError):
            next(stream)

    def test_batches_without_views_do_not_keep_a_block_open(self):
        with self.stream() as stream:
            batch = next(stream)
            numpy.asarray(batch).sum()
        self.assertTrue(stream.closed)
        self.assertEqual(batch.number, 0)

    def test_an_exception_of_the_block_is_not_replaced(self):
        with self.assertRaises(KeyError):
            with self.stream() as stream:
                array = next(stream).numpy()
                raise KeyError
        self.assertTrue(stream.closed)
        del array


class Position(World):
    def test_a_saved_position_goes_on_with_the_same_batches(self):
        want = [bytes(batch) for batch in self.stream(batches=40)]
        first = self.stream(batches=40)
        head = [bytes(next(first)) for _ in range(13)]
        state = json.loads(json.dumps(first.state_dict()))
        self.assertEqual(state["next_batch"], 13)
        for offload in (True, False):
            with self.subTest(offload=offload):
                second = self.stream(offload=offload, batches=40)
                second.load_state_dict(state)
                self.assertEqual(second.next_batch, 13)
                self.assertEqual(head + [bytes(batch) for batch in second], want)
                end = second.state_dict()
                third = self.stream(offload=offload, batches=40)
                third.load_state_dict(end)
                self.assertEqual((list(third), third.next_batch), ([], 40))
                third.load_state_dict(state)
                self.assertEqual(bytes(next(third)), want[13])

    def test_a_state_carries_what_is_left_out(self):
        want = [bytes(batch) for batch in self.stream(batches=20)]
        first = self.stream(batches=20, leave_out=[(4, 5), (1, 3)])
        self.assertEqual([next(first).number for _ in range(2)], [0, 3])
        state = json.loads(json.dumps(first.state_dict()))
        size = first.batch_samples
        in_samples = [[1 * size, 3 * size], [4 * size, 5 * size]]
        self.assertEqual((state["next_batch"], state["leave_out"]), (4, in_samples))
        # A range that is added does not move a position; those of the state still hold.
        second = self.stream(batches=20, leave_out=[(8, 18), (19, 40)])
        second.load_state_dict(state)
        more = [[8 * size, 18 * size], [19 * size, 40 * size]]
        self.assertEqual(second.state_dict()["leave_out"], in_samples + more)
        for batch, number in zip(second, (5, 6, 7, 18), strict=True):
            self.assertEqual((batch.number, bytes(batch)), (number, want[number]))
            del batch
        # Nothing is left of the stream, and that is no error.
        third = self.stream(batches=20)
        third.load_state_dict(second.state_dict())
        self.assertEqual(list(third), [])
        for wrong in ([(3, 3)], [(5, 2)], 7, [(1, 2, 3)], [(-1, 2)]):
            with self.subTest(leave_out=wrong), self.assertRaises(dquant.InvalidError):
                self.stream(leave_out=wrong)

    def test_a_state_of_another_stream_is_refused_and_says_what_differs(self):
        state = self.stream().state_dict()
        cases = (
            ({"plan": self.PLAN.replace("shuffle(7)", "shuffle(8)")}, {}, ["plan is", "shuffle(7", "shuffle(8"]),
            ({"seed": 5}, {}, ["seed is 0 in the state, 5 here"]),
            ({"url": f"dq://{self.control}/code"}, {}, ["dataset code.bin", "written or replaced", "was web.bin"]),
            ({}, {"version": 1}, ["version is 1 in the state, 2 here"]),
            ({}, {"datasets": []}, ["0 datasets in the state, 1 here"]),
            ({}, {"next_sample": None, "plan": 3}, ["plan is 3"]),
            ({}, {"next_batch": 7}, ["next_batch 7 of 32 samples is not where next_sample 0"]),
            ({}, {"table": state["datasets"][0]}, ["a table in the state, none here"]),
            ({}, {"datasets": [{**state["datasets"][0], "format": "npy"}]}, ["its format is 'npy' in the state"]),
        )
        for here, changes, parts in cases:
            with self.subTest(parts=parts):
                stream = self.stream(**here)
                with self.assertRaises(dquant.StateError) as raised:
                    stream.load_state_dict({**state, **changes})
                for part in parts:
                    self.assertIn(part, raised.exception.message)
                self.assertEqual(next(stream).number, 0, "the stream is as before")
        for name in ("version", "plan", "seed", "datasets", "next_sample"):
            with self.subTest(missing=name), self.assertRaises(dquant.StateError):
                self.stream().load_state_dict({key: value for key, value in state.items() if key != name})

    def test_a_damaged_state_is_refused_whatever_is_in_it(self):
        state = self.stream().state_dict()
        dataset = state["datasets"][0]
        junk = ("x", -1, 1.5, 2**70, [], {}, [1], [[1]], [[1, 2, 3]], [["a", "b"]], b"\0", object())
        places = [("datasets", lambda value: {"datasets": value}), ("next_sample", lambda value: {"next_sample": value})]
        places += [("leave_out", lambda value: {"leave_out": value}), ("next_batch", lambda value: {"next_batch": value})]
        places += [("table", lambda value: {"table": value})]
        places += [(name, lambda value, name=name: {"datasets": [{**dataset, name: value}]}) for name in dataset]
        stream = self.stream()
        for name, change in places:
            for value in junk:
                if (name, value) == ("leave_out", []):
                    continue
                with self.subTest(name=name, value=value):
                    try:
                        stream.load_state_dict({**state, **change(value)})
                    except dquant.StateError as error:
                        self.assertIsNotNone(error.hint)
                    else:
                        # What does not identify a file is not compared: its name, neither.
                        self.assertIn(name, dataset)
                        self.assertNotIn(name, ("format", "dtype", "tokens", "data_offset", "fingerprint", "content", "documents"))
        for wrong in ([[5, 3]], [[2 * at, 2 * at + 1] for at in range(65)]):
            with self.subTest(leave_out=wrong), self.assertRaises(dquant.StateError):
                stream.load_state_dict({**state, "leave_out": wrong})
        self.assertEqual(next(stream).number, 0, "the stream is as before")

    def test_a_position_that_could_not_be_loaded_leaves_the_old_one(self):
        dpu = self.start_dpu()
        stream = self.stream(dpu=dpu.ready["socket"])
        next(stream)
        state = stream.state_dict()
        dpu.kill()
        with self.assertRaises(dquant.Error):
            stream.load_state_dict({**state, "next_sample": 7 * 32 + 5, "next_batch": 7})
        self.assertEqual(stream.state_dict(), state)


class Files(World):
    def test_whole_batches_are_copied(self):
        want = self.cat("--batches", "10").stdout
        size = 32 * 64 * 2
        for offload in (True, False):
            options = self.options(offload, batches=10)
            with self.subTest(offload=offload), dquant.open(self.url, self.PLAN, offload, **options) as file:
                self.assertEqual((file.batch_bytes, file.opened.shape), (size, (32, 64)))
                array = numpy.zeros((3, 32, 64), numpy.uint16)
                self.assertEqual(file.readinto(array), 3 * size)
                room = bytearray(2 * size + 100)
                self.assertEqual(file.readinto(room), 2 * size)
                self.assertEqual(bytes(100), room[2 * size :])
                got = array.tobytes() + bytes(room[: 2 * size]) + file.read(size + 1)
                self.assertEqual(file.next_batch, 6)
                self.assertEqual(got + file.read(), want)
                self.assertEqual((file.read(), file.readinto(room)), (b"", 0))
            self.assertTrue(file.closed)
            with self.assertRaises(dquant.InvalidError):
                file.read(size)

    def test_buffers_that_cannot_be_filled_are_refused(self):
        with dquant.open(self.url, self.PLAN, **self.options()) as file:
            with self.assertRaises(dquant.InvalidError) as raised:
                file.readinto(bytearray(100))
            self.assertIn("a batch of 4096", raised.exception.message)
            with self.assertRaises(BufferError):
                file.readinto(bytes(8192))
            with self.assertRaises(BufferError):
                file.readinto(memoryview(bytearray(16384))[::2])
            with self.assertRaises(dquant.InvalidError):
                file.read()
            self.assertEqual(file.next_batch, 0)


if __name__ == "__main__":
    unittest.main()
