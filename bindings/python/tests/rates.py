"""Tokens per second of eight trainers on one DPU, beside one trainer: data-parallel, and with shared samples.

    DQUANT=target/release/dquant python bindings/python/tests/rates.py

Rounds of the cases alternate. Each figure is the median of the rounds and the ratio to one trainer's, all tokens that
the DPU assembled counted once.
"""

import multiprocessing
import os
import statistics
import time
import unittest

import dquant
from world import PATIENCE_S, World

PLAN = "window(2048) | shuffle(7) | narrow(u16) | batch(32)"
TOKENS_PER_BATCH = 32 * 2048
ROUNDS = int(os.environ.get("ROUNDS", "5"))
SECONDS = 3.0
CASES = {"one trainer": (1, {}), "8 data-parallel": (8, {}), "4 x 2 tensor-parallel": (8, {"tp": 2}), "8 tensor-parallel": (8, {"tp": 8})}


def trainer(url, options, begin, results):
    with dquant.Stream(url, PLAN, **options) as stream:
        next(stream)
        begin.wait(PATIENCE_S)
        batches, started, used = 0, time.monotonic(), time.process_time()
        while time.monotonic() - started < SECONDS:
            next(stream)
            batches += 1
        # The others read on until the last has finished.
        seconds, used = time.monotonic() - started, time.process_time() - used
        results.put((batches / seconds, used / batches))
        begin.wait(PATIENCE_S)


class Rates(World):
    def rate(self, case, world_size, layout):
        context = multiprocessing.get_context("spawn")
        begin, results = context.Barrier(world_size), context.Queue()
        options = self.options(world_size=world_size, group=f"{case} {time.monotonic()}", **layout)
        options.update(slot_size=1 << 20, slots=16)
        running = [
            context.Process(target=trainer, args=(self.url, {**options, "rank": rank}, begin, results))
            for rank in range(world_size)
        ]
        for process in running:
            process.start()
        found = [results.get(timeout=PATIENCE_S) for _ in running]
        for process in running:
            process.join(PATIENCE_S)
        readers = layout.get("tp", 1)
        tokens = sum(rate for rate, _ in found) / readers * TOKENS_PER_BATCH
        cpu = statistics.mean(used for _, used in found) / TOKENS_PER_BATCH * 1e9
        return tokens / 1e6, cpu

    def test_rates(self):
        found = {case: [] for case in CASES}
        for _ in range(ROUNDS):
            for case, (world_size, layout) in CASES.items():
                found[case].append(self.rate(case, world_size, layout))
        one = statistics.median(rate for rate, _ in found["one trainer"])
        for case, rounds in found.items():
            rate, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"{case:24} {rate:7.0f} Mtokens/s {rate / one:6.2f} {cpu:7.3f} CPU s per 10^9 tokens of a trainer")


if __name__ == "__main__":
    unittest.main()
