"""Refusals, dead daemons, signals, forks: exceptions with the message of the command line, never a hang."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import dquant
from world import PATIENCE_S, TOKEN, World, eventually


class Messages(World):
    def assert_same_as_cat(self, error, cat, exit_code):
        self.assertEqual(cat.returncode, exit_code, cat.stderr)
        self.assertEqual(f"error: {error}", cat.stderr.decode().strip())

    def test_refusals_have_the_message_and_hint_of_the_command_line(self):
        wide = "window(64) | narrow(u16) | batch(100000)"
        cases = (
            ({"url": "http://x/y"}, {}, [], dquant.InvalidError, 2),
            ({"plan": "window(100) | narrow(u17)"}, {}, [], dquant.InvalidError, 2),
            ({"plan": "narrow(u16)"}, {}, [], dquant.InvalidError, 2),
            ({"plan": wide}, {}, ["--slot-size", "64KiB", "--slots", "4"], dquant.InvalidError, 2),
            ({"url": f"dq://{self.control}/absent"}, {}, [], dquant.InvalidError, 2),
            ({"url": f"dq://{self.control}/"}, {}, [], dquant.InvalidError, 2),
            ({}, {"dtype": "u17"}, ["--dtype", "u17"], dquant.InvalidError, 2),
            ({}, {"slots": 0}, ["--slots", "0"], dquant.InvalidError, 2),
            ({"dpu": "/nonexistent/dpu.sock"}, {}, [], dquant.UnreachableError, 3),
        )
        for where, options, args, kind, exit_code in cases:
            with self.subTest(where=where, options=options):
                with self.assertRaises(kind) as raised:
                    self.stream(**where, **options)
                self.assert_same_as_cat(raised.exception, self.cat(*args, **where), exit_code)
                self.assertIsNotNone(raised.exception.hint)

    def test_a_wrong_token_is_refused(self):
        self.env = {**self.env, "DQUANT_TOKEN": "wrong-" + TOKEN}
        with self.assertRaises(dquant.InvalidError) as raised:
            self.stream(token="wrong-" + TOKEN)
        self.assert_same_as_cat(raised.exception, self.cat(), 2)

    def test_a_target_that_is_not_there(self):
        for offload in (True, False):
            with self.subTest(offload=offload), self.assertRaises(dquant.UnreachableError):
                self.stream(url="dq://127.0.0.1:1/web", offload=offload)

    def test_a_token_that_does_not_fit_ends_the_stream_with_its_place(self):
        url = f"dq://{self.control}/big"
        cat = self.cat("--batches", "400", url=url, plan="window(64) | narrow(u16)")
        for offload in (True, False):
            stream = self.stream(url=url, plan="window(64) | narrow(u16)", offload=offload, batches=400)
            with self.subTest(offload=offload):
                with self.assertRaises(dquant.StreamError) as raised:
                    for _ in stream:
                        pass
                self.assertIn("500000", raised.exception.message)
                self.assert_same_as_cat(raised.exception, cat, 1)
                with self.assertRaises(dquant.StreamError):
                    next(stream)

    def test_a_file_delivers_what_came_before_the_fault(self):
        url, plan = f"dq://{self.control}/big", "window(64) | narrow(u16) | batch(32)"
        with dquant.open(url, plan, **self.options(batches=400)) as file:
            got = 0
            with self.assertRaises(dquant.StreamError):
                while read := len(file.read(1 << 20)):
                    got += read
            self.assertEqual(got, file.next_batch * file.batch_bytes)

    def test_arguments_that_are_no_options(self):
        with self.assertRaisesRegex(TypeError, "slot_size"):
            self.stream(slot_bytes=3)
        for wrong in ({"batches": 0}, {"reconnect": -1.0}, {"reconnect": float("nan")}):
            with self.subTest(wrong=wrong), self.assertRaises(dquant.InvalidError):
                self.stream(**wrong)
        with self.assertRaises(dquant.InvalidError):
            dquant.Stream(self.url, self.PLAN, False, roce="nowhere")
        with self.assertRaises(dquant.InvalidError):
            self.stream(first_batch=2**64 - 1, batches=5)

    def test_arguments_of_another_kind_say_what_is_taken(self):
        for options in (
            {"seed": -1}, {"seed": 2**64}, {"seed": "7"}, {"slots": -1}, {"slots": 1.5}, {"first_batch": -1},
            {"vocab": -5}, {"memory": -1}, {"reconnect": "long"}, {"dtype": 16}, {"batches": "all"}, {"roce": 5},
        ):
            (name, value), = options.items()
            with self.subTest(options=options):
                with self.assertRaises(dquant.InvalidError) as raised:
                    self.stream(**options)
                self.assertIsInstance(raised.exception, ValueError)
                self.assertEqual(raised.exception.message, f"{name} is {value!r}")
                self.assertIn("give ", raised.exception.hint)
        for options in ({"seq_len": -1}, {"seq_len": "long"}, {"seq_len": 8, "shuffle": "yes"}, {"seq_len": 8, "narrow": 16}):
            with self.subTest(options=options), self.assertRaises(dquant.InvalidError) as raised:
                self.opened(self.url, **options)
            self.assertIn("give ", raised.exception.hint)
        for weight in ("much", "1/0", "-1/3", "nan", None, -1, float("nan"), float("inf")):
            with self.subTest(weight=weight), self.assertRaises(dquant.InvalidError) as raised:
                self.opened({self.path("web"): weight, self.path("code"): 1}, self.PLAN)
            self.assertIn("the weight of ", raised.exception.message)
        with self.assertRaises(dquant.InvalidError) as raised:
            self.stream(token=b"a secret")
        self.assertNotIn("secret", str(raised.exception))

    def test_the_hierarchy(self):
        for kind in (dquant.InvalidError, dquant.UnreachableError, dquant.StreamError, dquant.SlotsHeldError):
            self.assertTrue(issubclass(kind, dquant.Error))
        self.assertTrue(issubclass(dquant.InvalidError, ValueError))


class Death(World):
    def test_a_killed_dpu_ends_the_stream_after_its_last_slot(self):
        dpu = self.start_dpu()
        stream = self.stream(dpu=dpu.ready["socket"])
        # The first slot carries one batch; the DPU may be killed before the second.
        number = next(stream).number
        dpu.kill()
        with self.assertRaises(dquant.StreamError) as raised:
            for batch in stream:
                number = batch.number
        self.assertEqual(raised.exception.message, "the DPU daemon died")
        self.assertEqual(stream.next_batch, number + 1)
        with self.assertRaises(dquant.Error):
            stream.status()


class Waiting(World):
    """A stream whose next batch does not come: its DPU is stopped."""

    def setUp(self):
        # A program that a shell started in the background ignores the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        self.stopped = self.start_dpu()
        self.waiting = self.stream(dpu=self.stopped.ready["socket"])
        next(self.waiting)
        self.stopped.process.send_signal(signal.SIGSTOP)
        self.addCleanup(self.stopped.kill)

    def drain(self):
        for _ in self.waiting:
            pass

    def test_ctrl_c_ends_a_wait_and_the_stream_goes_on(self):
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            self.drain()
        # The aim is 0.1 s; the bound only tells it from a wait that ends by other means.
        self.assertLess(time.monotonic() - started, 1.0 + PATIENCE_S / 2)
        reached = self.waiting.next_batch
        self.stopped.process.send_signal(signal.SIGCONT)
        self.assertEqual(next(self.waiting).number, reached)

    def test_ctrl_c_ends_the_opening_of_a_stream(self):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with self.assertRaises(KeyboardInterrupt):
            self.stream(dpu=self.stopped.ready["socket"])

    def test_other_threads_run_meanwhile(self):
        failed = []

        def wait():
            try:
                self.drain()
            except dquant.Error as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        last = -1

        def stands_still():
            nonlocal last
            time.sleep(0.2)
            before, last = last, self.waiting.next_batch
            return before == last

        eventually("the thread to wait", stands_still)
        self.assertTrue(thread.is_alive())
        self.waiting.close()
        thread.join(PATIENCE_S)
        self.assertFalse(thread.is_alive())
        self.assertIn("closed", failed[0].message)


CHILD = """
import os, sys, dquant
with dquant.Stream(sys.argv[1], sys.argv[2], sys.argv[3] == "True", **eval(sys.argv[4])) as stream:
    whole = [bytes(batch) for batch in stream]
stream = dquant.Stream(sys.argv[1], sys.argv[2], sys.argv[3] == "True", **eval(sys.argv[4]))
batch = next(stream)
view = memoryview(batch)
want = bytes(view)
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: next(stream), stream.status, lambda: stream.load_state_dict(stream.state_dict())):
        try:
            call()
        except dquant.ForkError as error:
            assert str(os.getpid()) in error.message
            refused += 1
    assert bytes(view) == want
    view.release()
    stream.close()
    del stream, batch
    os._exit(10 + refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
rest = [bytes(batch) for batch in stream]
assert [want, *rest] == whole, "the child changed what the parent gets"
print("good")
"""

EXIT = """
import sys, dquant
stream = dquant.Stream(sys.argv[1], sys.argv[2], sys.argv[3] == "True", **eval(sys.argv[4]))
kept = [memoryview(next(stream)) for _ in range(3)]
print("good")
"""


HOLD = """
import sys, time, dquant
stream = dquant.Stream(sys.argv[1], sys.argv[2], sys.argv[3] == "True", **eval(sys.argv[4]))
kept = [memoryview(next(stream)) for _ in range(3)]
print("holding", flush=True)
time.sleep(600)
"""


class Processes(World):
    def run_python(self, text, offload, url=None):
        options = self.options(offload, batches=50)
        line = [sys.executable, "-c", text, url or self.url, self.PLAN, str(offload), repr(options)]
        ran = subprocess.run(line, capture_output=True, timeout=PATIENCE_S, check=False)
        self.assertEqual((ran.stdout, ran.returncode), (b"good\n", 0), ran.stderr.decode())
        self.assertEqual(ran.stderr, b"")

    def test_a_forked_child_gets_an_error_and_the_parent_goes_on(self):
        for offload in (True, False):
            with self.subTest(offload=offload):
                self.run_python(CHILD, offload)
        self.run_python(CHILD, False, self.path("web"))

    def test_a_program_may_end_with_slots_held(self):
        for offload in (True, False):
            with self.subTest(offload=offload):
                self.run_python(EXIT, offload)
        self.run_python(EXIT, False, self.path("web"))
        eventually("the daemon to free what the program held", lambda: self.streams_of_dpu() == 0)

    def test_a_killed_program_is_cleaned_up_after(self):
        options = self.options(True)
        line = [sys.executable, "-c", HOLD, self.url, self.PLAN, "True", repr(options)]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as program:
            self.assertEqual(program.stdout.readline(), b"holding\n")
            self.assertEqual(self.streams_of_dpu(), 1)
            program.kill()
        eventually("the daemon to free what the program held", lambda: self.streams_of_dpu() == 0)

    def streams_of_dpu(self):
        line = [self.binary, "status", "--json", "--control", self.dpu.ready["control"]]
        ran = subprocess.run(line, env=self.env, capture_output=True, timeout=PATIENCE_S, check=True)
        return json.loads(ran.stdout)["counters"]["dpu.streams"]

    def test_numpy_is_not_imported(self):
        text = "import sys, dquant; assert 'numpy' not in sys.modules; print('good')"
        self.run_python(text, True)


if __name__ == "__main__":
    unittest.main()
