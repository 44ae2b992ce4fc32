#!/usr/bin/env python3
"""The shuffle quality of MosaicML Streaming and LitData, in the terms of docs/plan.md.

    shuffle_quality.py [--samples N]

Asks the libraries themselves for the order of an epoch of N samples of 8 KiB (a million: 7.6 GiB) in shards or chunks
of 64 MiB, their defaults, for one process without workers, and prints rows for the table of docs/plan.md. The
environment is that of formats.py.

Exit status: 0 done; 77 the libraries cannot be installed (the reason is printed).
"""

import argparse
import sys
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


def package(name):
    """Makes modules of a package importable without running the package, which would import torch."""
    import importlib.util
    where = importlib.util.find_spec(name.split(".")[0]).submodule_search_locations[0]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:depth]))
        module.__path__ = ["/".join([where, *parts[1:depth]])]
        sys.modules[module.__name__] = module


def mosaic(count):
    """The orders of MosaicML's algorithms: shards of 64 MiB, one node, blocks as by default."""
    import importlib
    import numpy
    package("streaming.base.shuffle")
    shards = numpy.full(-(-count // SHARD), SHARD, numpy.int64)
    shards[-1] -= shards.sum() - count
    for name in ("py1e", "py1s", "py2s"):
        module = importlib.import_module(f"streaming.base.shuffle.{name}")
        shuffle = getattr(module, f"get_shuffle_{name}")
        # StreamingDataset: num_canonical_nodes is 64 per node for py1s and py2s, else the number of nodes.
        nodes = 64 if name in ("py1s", "py2s") else 1
        block = max(4_000_000 // nodes, 1 << 18)
        ids = numpy.asarray(shuffle(shards, nodes, SEED, 0, block))
        yield f"MosaicML {name}", ids


def litdata(count):
    """The order of LitData's loader: chunks permuted, samples permuted within their chunk."""
    import numpy
    package("litdata.streaming")
    import importlib
    module = importlib.import_module("litdata.streaming.shuffle")
    intervals = [(first, first, min(first + SHARD, count), min(first + SHARD, count)) for first in range(0, count, SHARD)]
    cache = types.SimpleNamespace(get_chunk_intervals=lambda: intervals)
    shuffle = module.FullShuffle(cache, SEED, False)
    distributed = types.SimpleNamespace(world_size=1, global_rank=0, num_nodes=1)
    chunks, workers = shuffle.get_chunks_and_intervals_per_workers(distributed, 1, BATCH, 1)
    order = []
    for position, (chunk, interval) in enumerate(zip(chunks[0], workers[0], strict=True)):
        inside = numpy.arange(interval[1], interval[2])
        order.extend(shuffle(inside, len(chunks[0]), 1, position))
    yield "LitData FullShuffle", numpy.asarray(order)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--samples", type=int, default=1_000_000, help="samples of the epoch")
    count = arguments.parse_args().samples
    formats.enter_environment()
    from importlib.metadata import version
    print(f"mosaicml-streaming {version('mosaicml-streaming')}, litdata {version('litdata')}")
    for make in (mosaic, litdata):
        for name, order in make(count):
            same, correlation, displacement, neighbours = quality(order)
            print(f"| {name} | {100 * same:.2f} % | {correlation + 0:.3f} | {displacement:.3f} | {neighbours:.4f} |")


if __name__ == "__main__":
    main()
