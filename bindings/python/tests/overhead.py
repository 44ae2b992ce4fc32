"""Processor time of a loop over batches, in microseconds per batch, without the time spent waiting.

    DQUANT=target/debug/dquant python bindings/python/tests/overhead.py

The ring is filled first, then drained in a tight loop; the time is that of this thread.
"""

import statistics
import time
import unittest

import numpy

from world import World, eventually

ROUNDS = 21
PLAN = "window(2048) | shuffle(7) | narrow(u16) | batch(32)"
SLOT_BYTES = 4 << 20
SLOTS = 8
READY = (SLOTS - 2) * SLOT_BYTES // (32 * 2048 * 2)
"""Batches to drain: the slot in use and one that is being filled are left out."""


class Overhead(World):
    def drain(self, stream, use):
        eventually("a full ring", lambda: stream.status()["batches"] >= stream.next_batch + READY)
        started = time.thread_time_ns()
        for _ in range(READY):
            use(next(stream))
        return (time.thread_time_ns() - started) / READY / 1e3

    def test_overhead(self):
        uses = {
            "batch alone": lambda batch: None,
            "memoryview(batch)": memoryview,
            "numpy.asarray(batch)": numpy.asarray,
            "batch.numpy()": lambda batch: batch.numpy(),
        }
        for offload in (True, False):
            stream = self.stream(plan=PLAN, offload=offload, slots=SLOTS, slot_size=SLOT_BYTES)
            for name, use in uses.items():
                rounds = [self.drain(stream, use) for _ in range(ROUNDS)]
                low, middle, high = min(rounds), statistics.median(rounds), max(rounds)
                print(f"offload={offload!s:5} {name:21} {middle:5.2f} us per batch ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    unittest.main()
