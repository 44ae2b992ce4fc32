#!/usr/bin/env python3
"""The shuffle quality of MosaicML Streaming and LitData, in the terms of docs/plan.md.

    shuffle_quality.py [--samples N]

Asks the libraries themselves for the order of an epoch of N samples of 8 KiB (a million: 7.6 GiB) in shards or chunks
of 64 MiB, their defaults, for one process without workers, and prints rows for the table of docs/plan.md. The
environment is that of formats.py.

Exit status: 0 done; 77 the libraries cannot be installed (the reason is printed).
"""

import argparse
import types

import formats

PER_MIB = 128
BATCH = 32
SHARD = 64 * PER_MIB
SEED = 7


def quality(order):
    """Share of pairs of a batch from one MiB, autocorrelation, displacement, file neighbours in a row."""
    import numpy
    count = len(order)
    assert numpy.array_equal(numpy.sort(order), numpy.arange(count)), "an epoch has every sample once"
    batches = order[: count // BATCH * BATCH].reshape(-1, BATCH) // PER_MIB
    same = sum(int((batches[:, :-lag] == batches[:, lag:]).sum()) for lag in range(1, BATCH))
    pairs = len(batches) * BATCH * (BATCH - 1) // 2
    here, following = order[:-1].astype(float), order[1:].astype(float)
    correlation = numpy.corrcoef(here, following)[0, 1]
    displacement = numpy.abs(order - numpy.arange(count)).mean() / count
    return same / pairs, correlation, displacement, (numpy.abs(here - following) == 1).mean()


def mosaic(count):
    """MosaicML's default, py1e: shards of 64 MiB, one node, blocks of 4 million samples."""
    import numpy
    from streaming.base.shuffle.py1e import get_shuffle_py1e
    shards = numpy.full(-(-count // SHARD), SHARD, numpy.int64)
    shards[-1] -= shards.sum() - count
    return numpy.asarray(get_shuffle_py1e(shards, 1, SEED, 0, 4_000_000))


def litdata(count):
    """LitData's default, FullShuffle: chunks permuted, samples permuted in windows of their chunk."""
    import numpy
    from litdata.streaming.shuffle import FullShuffle
    from litdata.utilities.env import _DistributedEnv
    chunks = [(first, first, min(first + SHARD, count), min(first + SHARD, count)) for first in range(0, count, SHARD)]
    cache = types.SimpleNamespace(get_chunk_intervals=lambda: chunks, _reader=types.SimpleNamespace())
    shuffle = FullShuffle(cache, SEED, drop_last=False)
    order = []
    plans = shuffle.get_chunks_and_intervals_per_workers(_DistributedEnv(1, 0, 1), 1, BATCH, 1)
    for chunk, interval in zip(plans[0][0], plans[1][0], strict=True):
        order.extend(shuffle(numpy.arange(interval[1], interval[2]), len(chunks), 1, int(chunk)))
    return numpy.asarray(order)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--samples", type=int, default=1_000_000, help="samples of the epoch")
    count = arguments.parse_args().samples
    formats.enter_environment()
    from importlib.metadata import version
    import torch_stub
    torch_stub.install()
    print(f"mosaicml-streaming {version('mosaicml-streaming')}, litdata {version('litdata')}")
    for name, make in (("MosaicML py1e", mosaic), ("LitData FullShuffle", litdata)):
        same, correlation, displacement, neighbours = quality(make(count))
        print(f"| {name} | {100 * same:.2f} % | {correlation + 0:.3f} | {displacement:.3f} | {neighbours:.4f} |")


if __name__ == "__main__":
    main()
