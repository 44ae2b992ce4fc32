"""examples/python/train_gpt.py: one loss curve from every source, through kill -9, and on eight trainers of a DPU."""

import os
import random
import shutil
import socket
import subprocess
import sys
import unittest
from pathlib import Path

from test_targets import Conversations
from world import TOKEN, World

try:
    import torch
except ImportError:
    torch = None

ROOT = Path(__file__).resolve().parents[3]
STEPS, EVERY = 48, 7
"""Some epochs of the text below, and checkpoints that fall on no end of them."""


@unittest.skipIf(torch is None, "torch is not installed")
class Training(World):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tokens = os.path.join(cls.root, "text.bin")
        texts = [str(ROOT / "docs" / name) for name in ("plan.md", "python.md")]
        tokenize = [cls.binary, "tokenize", *texts, "--encoding", "r50k_base", "-o", cls.tokens]
        subprocess.run(tokenize, check=True, capture_output=True)
        cls.whole = cls.lines(cls.start("--source", "stream"))

    @classmethod
    def start(cls, *args):
        """The example as a process."""
        script = str(ROOT / "examples/python/train_gpt.py")
        line = [sys.executable, "-B", script, cls.tokens, "--batch", "4", "--steps", str(STEPS), *args]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @classmethod
    def start_all(cls, trainers, *args, source=None):
        """The example as a job of several trainers, as torchrun starts it; the first one's process prints."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = str(ROOT / "examples/python/train_gpt.py")
        line = [sys.executable, "-B", script, source or cls.tokens, "--batch", "4", "--steps", str(STEPS), *args]
        job = {"WORLD_SIZE": str(trainers), "LOCAL_WORLD_SIZE": str(trainers)}
        job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DQUANT_TOKEN": TOKEN, "DQUANT_DPU": cls.socket}
        processes = []
        for rank in map(str, range(trainers)):
            env = {**os.environ, **job, "RANK": rank, "LOCAL_RANK": rank}
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=env))
        return processes

    def lines_of_job(self, trainers, *args, source=None):
        processes = self.start_all(trainers, *args, source=source)
        found = [self.lines(process) for process in processes]
        self.assertEqual(found[1:], [[] for _ in processes[1:]])
        return found[0]

    def assert_close(self, lines, want):
        """The same tokens, and the same losses but for the order in which gradients are added up."""
        for line, wanted in zip(lines, want, strict=True):
            (step, _, loss, digest), (step_wanted, _, loss_wanted, digest_wanted) = line.split(), wanted.split()
            self.assertEqual((step, digest), (step_wanted, digest_wanted))
            loss, loss_wanted = float.fromhex(loss), float.fromhex(loss_wanted)
            self.assertAlmostEqual(loss / loss_wanted, 1, delta=1e-5, msg=f"step {step}")

    @classmethod
    def lines(cls, process):
        """What it printed for each step, when it has ended well."""
        out, errors = process.communicate()
        if process.returncode != 0:
            raise AssertionError(errors)
        return out.splitlines()

    def test_it_learns_from_every_batch_once(self):
        rows = [line.split() for line in self.whole]
        self.assertEqual([int(step) for step, *_ in rows], list(range(1, STEPS + 1)))
        losses = [float.fromhex(exact) for _, _, exact, _ in rows]
        self.assertLess(sum(losses[-5:]), 0.9 * sum(losses[:5]))
        self.assertEqual(len({digest for *_, digest in rows}), STEPS, "no batch comes twice")

    def test_losses_equal_those_of_numpy_and_of_the_dataset(self):
        for source in ("numpy", "dataset"):
            with self.subTest(source=source):
                self.assertEqual(self.lines(self.start("--source", source)), self.whole)

    def test_evaluation_is_that_of_numpy_also_where_the_run_goes_on_with_data_that_moved(self):
        evaluate = ("--evaluate", "8", "--split", "9,1")
        whole = self.lines(self.start(*evaluate))
        self.assertEqual(sum(line.startswith("valid") for line in whole), STEPS // 8)
        for source in ("numpy", "dataset"):
            self.assertEqual(self.lines(self.start("--source", source, *evaluate)), whole, source)
        # Training on nine tenths is another run, and evaluating changes nothing of it.
        digests = [line.split()[-1] for line in whole if not line.startswith("valid")]
        self.assertNotEqual(digests, [line.split()[-1] for line in self.whole])
        checkpoint = self.path("evaluated.pt")
        args = ("--checkpoint", checkpoint, "--every", "8", *evaluate)
        self.lines(self.start(*args, "--steps", "20"))
        moved = os.path.join(self.folder, "moved")
        os.mkdir(moved)
        for path in (self.tokens, self.tokens.replace(".bin", ".idx"), self.tokens + ".dquant.json"):
            shutil.copy(path, moved)
        script = str(ROOT / "examples/python/train_gpt.py")
        line = [sys.executable, "-B", script, os.path.join(moved, "text.bin"), "--batch", "4", "--steps", str(STEPS), *args]
        pipe = subprocess.PIPE
        resumed = self.lines(subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True))
        self.assertEqual(resumed, whole[len(whole) - len(resumed) :])
        self.assertEqual(len(resumed), STEPS - 16 + 4)

    def test_answers_are_learnt_as_by_numpy_and_on_several_trainers(self):
        chat = os.path.join(self.root, "answers.bin")
        Conversations(chat, 900, 11)
        args = ("--answers", "--evaluate", "16", "--split", "9,1", "--source")
        script = str(ROOT / "examples/python/train_gpt.py")
        line = [sys.executable, "-B", script, chat, "--batch", "4", "--steps", str(STEPS), *args]
        pipe = subprocess.PIPE
        start = lambda source: subprocess.Popen([*line, source], stdout=pipe, stderr=pipe, text=True)
        whole = self.lines(start("stream"))
        self.assertEqual(len(whole), STEPS + STEPS // 16)
        for source in ("numpy", "dataset"):
            self.assertEqual(self.lines(start(source)), whole, source)
        for trainers in (2, 4):
            found = self.lines_of_job(trainers, *args, "stream", source=f"dq://{self.control}/answers")
            digests = lambda lines: [line.split()[-1] for line in lines if not line.startswith("valid")]
            self.assertEqual(digests(found), digests(whole))

    def test_several_trainers_evaluate_together(self):
        evaluate = ("--evaluate", "16", "--split", "9,1")
        whole = self.lines(self.start(*evaluate))
        url = f"dq://{self.control}/text"
        for trainers in (2, 4):
            found = self.lines_of_job(trainers, *evaluate, source=url)
            # A trainer's epoch ends with its last whole batch, so means differ by a few samples.
            for line, want in zip(found, whole, strict=True):
                kind, loss, *_ = line.split()
                if kind == "valid":
                    self.assertAlmostEqual(float(loss), float(want.split()[1]), delta=0.02)
                else:
                    self.assertEqual(line.split()[-1], want.split()[-1])

    def test_a_killed_run_goes_on_to_the_bit(self):
        for source in ("stream", "dataset"):
            last = random.randrange(EVERY + 1, STEPS - 10)
            with self.subTest(source=source, killed_behind=last):
                args = ("--source", source, "--every", str(EVERY))
                args += ("--checkpoint", os.path.join(self.folder, f"{source}.pt"))
                killed = self.start(*args, "--steps", "1000000")
                seen = [killed.stdout.readline() for _ in range(last)]
                killed.kill()
                rest, errors = killed.communicate()
                self.assertEqual(killed.returncode, -9, errors)
                seen = ("".join(seen) + rest).splitlines()
                steps = len(seen) + 10
                whole = self.whole if steps <= STEPS else self.lines(self.start("--steps", str(steps)))
                self.assertEqual(seen, whole[: len(seen)])
                resumed = self.lines(self.start(*args, "--steps", str(steps)))
                # The kill may have come before the newest checkpoint was complete.
                saved = steps - len(resumed)
                self.assertEqual(saved % EVERY, 0)
                self.assertIn(saved, range(max(EVERY, len(seen) - EVERY), len(seen) + 1))
                self.assertEqual(resumed, whole[saved:steps])

    def test_several_trainers_share_every_batch(self):
        for trainers, source in ((2, "stream"), (4, "stream"), (2, "dataset"), (2, "numpy")):
            with self.subTest(source=source, trainers=trainers):
                self.assert_close(self.lines_of_job(trainers, "--source", source), self.whole)

    def test_a_killed_job_goes_on_with_any_number_of_trainers(self):
        pair = self.lines_of_job(2)
        checkpoint = os.path.join(self.folder, "job.pt")
        args = ("--every", str(EVERY), "--checkpoint", checkpoint)
        last = random.randrange(EVERY + 1, STEPS - 10)
        job = self.start_all(2, *args, "--steps", "1000000")
        for _ in range(last):
            job[0].stdout.readline()
        for process in job:
            process.kill()
        for process in job:
            process.communicate()
        for trainers in (2, 4, 1):
            with self.subTest(killed_behind=last, trainers=trainers):
                copy = shutil.copy(checkpoint, f"{checkpoint}.{trainers}")
                resumed = self.lines_of_job(trainers, "--every", str(STEPS), "--checkpoint", copy)
                self.assertIn(STEPS - len(resumed), range(EVERY, STEPS, EVERY))
                want = pair[STEPS - len(resumed) :]
                if trainers == 2:
                    self.assertEqual(resumed, want)
                else:
                    self.assert_close(resumed, want)

    def test_eight_trainers_of_a_dpu_are_killed_and_four_go_on(self):
        size = ("--batch", "8", "--every", str(EVERY))
        whole = self.lines(self.start(*size))
        url = f"dq://{self.control}/text"
        args = (*size, "--checkpoint", os.path.join(self.folder, "eight.pt"))
        job = self.start_all(8, *args, "--steps", "1000000", source=url)
        seen = [job[0].stdout.readline().rstrip("\n") for _ in range(2 * EVERY)]
        job[3].kill()
        ends = [process.communicate() for process in job]
        self.assertEqual([process.returncode == 0 for process in job], [False] * 8)
        self.assert_close(seen, whole[: 2 * EVERY])
        # The processes of gloo may be the first to notice.
        said = "".join(errors for _, errors in ends)
        self.assertRegex(said, "rank 3 of group|Connection closed by peer|Connection reset")
        resumed = self.lines_of_job(4, *args, source=url)
        self.assertIn(STEPS - len(resumed), range(EVERY, STEPS, EVERY))
        self.assert_close(resumed, whole[STEPS - len(resumed) :])


if __name__ == "__main__":
    unittest.main()
