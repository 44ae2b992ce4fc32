"""One case of `cargo xtask bench data --peers`, in a process of its own. Prints one JSON object.

    measure.py CASE FOLDER SECONDS [CONTROL SOCKET ROCE PID,PID]

A case delivers batches of 32 samples of 2,048 tokens until SECONDS have passed after its first batches. Processor time is
that of this process and its children (user and system, every thread), and beside it that of the daemons PID, read from
their own clocks at the same two instants. Nobody looks at the tokens: what a training loop does with them is the same for
all. The first batch is checked, and of Dquant the first batches are hashed.
"""

import hashlib
import json
import os
import pathlib
import statistics
import sys
import time

import numpy

from corpus import LENGTH, VOCABULARY, WEIGHTS, import_libraries

SAMPLES = 32
HASHED = 64
WARM_UP_S = 0.5
BLEND = "blend(web=5, code=3, books=2)"
TOKENS = f"window({LENGTH}) | shuffle(7) | narrow(u16) | batch({SAMPLES})"
PAIRS = f"window({LENGTH + 1}, overlap=1) | shuffle(7) | narrow(u16) | widen(i64) | pairs | batch({SAMPLES})"
TOKEN = os.environ.get("DQUANT_TOKEN")
REPEATS = 20
PATIENCE_S = 30


class World:
    """Where the corpora and, for some cases, the daemons are."""

    def __init__(self, folder, control=None, socket=None, roce=None, pids=""):
        self.folder = pathlib.Path(folder)
        self.control, self.socket, self.roce = control, socket, roce
        self.pids = [int(pid) for pid in pids.split(",") if pid]

    def others_ns(self):
        """Processor time of the daemons: the clock of a process, by its number (see clock_getcpuclockid)."""
        return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in self.pids)


# --- numpy and the plain loop ---


def memory_map(world, dtype):
    name = "all32.bin" if dtype == "uint32" else "all16.bin"
    # A plain array over the mapping: slices of numpy.memmap itself cost a microsecond more each.
    return numpy.asarray(numpy.memmap(world.folder / name, dtype, "r"))


def memmap_random(world, dtype):
    data, random = memory_map(world, dtype), numpy.random.default_rng(1)
    while True:
        batch = numpy.empty((SAMPLES, LENGTH), "uint16")
        for row, start in enumerate(random.integers(0, len(data) - LENGTH, SAMPLES).tolist()):
            batch[row] = data[start : start + LENGTH]
        yield batch


def memmap_sequential(world):
    data = memory_map(world, "uint32")
    data = data[: len(data) // (SAMPLES * LENGTH) * SAMPLES * LENGTH].reshape(-1, SAMPLES, LENGTH)
    while True:
        for tokens in data:
            yield tokens.astype("uint16")


def preadv_loop(world, dtype):
    """1 MiB at a time into a buffer, narrowed into another: no work less delivers u16 from a file."""
    file = os.open(world.folder / ("all32.bin" if dtype == "uint32" else "all16.bin"), os.O_RDONLY)
    tokens = numpy.empty((1 << 20) // numpy.dtype(dtype).itemsize, dtype)
    narrow = tokens if dtype == "uint16" else numpy.empty(len(tokens), "uint16")
    batches = narrow.reshape(-1, SAMPLES, LENGTH)
    while True:
        at = 0
        while os.preadv(file, [tokens], at) == tokens.nbytes:
            if narrow is not tokens:
                numpy.copyto(narrow, tokens, casting="unsafe")
            yield from batches
            at += tokens.nbytes


def disk_sequential(world):
    """O_DIRECT reads of 1 MiB by four threads; one item per read, so that its tokens can be counted."""
    import concurrent.futures
    import mmap

    files = [os.open(world.folder / "u32" / f"{name}.bin", os.O_RDONLY | os.O_DIRECT) for name in WEIGHTS]
    blocks = [(file, at) for file in files for at in range(0, os.fstat(file).st_size - (1 << 20), 1 << 20)]
    buffers = [mmap.mmap(-1, 1 << 20) for _ in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = []
        while True:
            for number, (file, at) in enumerate(blocks):
                if len(waiting) == 4:
                    waiting.pop(0).result()
                    yield 1 << 18
                waiting.append(pool.submit(os.preadv, file, [buffers[number % 8]], at))


# --- libraries ---


def nanogpt(world):
    """As nanoGPT makes a batch: random places of a file of u16, inputs and labels as int64 tensors."""
    import torch

    data = numpy.memmap(world.folder / "all16.bin", "uint16", "r")
    while True:
        starts = torch.randint(len(data) - LENGTH, (SAMPLES,))
        x = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(numpy.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(numpy.int64)) for i in starts])
        yield x, y


def stacked(rows):
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == SAMPLES:
            yield numpy.stack(batch)
            batch = []


def endless(dataset, field=None):
    while True:
        for sample in dataset:
            yield sample if field is None else sample[field]


def litdata(world):
    import_libraries()
    from litdata import StreamingDataset
    from litdata.streaming.item_loader import TokensLoader

    loader = TokensLoader(block_size=LENGTH)
    return stacked(endless(StreamingDataset(str(world.folder / "litdata"), item_loader=loader, shuffle=True, seed=7)))


def mds(world):
    import_libraries()
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(world.folder / "mds"), shuffle=True, shuffle_seed=7, batch_size=SAMPLES)
    return stacked(endless(dataset, "tokens"))


def webdataset(world):
    import_libraries()
    import webdataset as wds

    shards = sorted(str(path) for path in (world.folder / "webdataset").glob("*.tar"))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000)
    return stacked(numpy.frombuffer(data, "uint16") for data in endless(dataset, "bin"))


# --- Dquant ---


def local(world, kind, plan, **options):
    import dquant

    source = {world.folder / kind / f"{name}.bin": weight for name, weight in WEIGHTS.items()}
    return dquant.Stream(source, plan, dtype=kind, **options)


def remote(world, plan, offload=True, **options):
    import dquant

    where = {"dpu": world.socket} if offload else {"roce": world.roce}
    return dquant.Stream(f"dq://{world.control}/", f"{plan} | {BLEND}", offload, token=TOKEN, dtype="u32", **where, **options)


def arrays(stream):
    for batch in stream:
        yield batch.numpy()


def tensors(stream):
    for batch in stream:
        yield batch.torch()


CASES = {
    "memmap-random": lambda world: memmap_random(world, "uint32"),
    "memmap-random-u16": lambda world: memmap_random(world, "uint16"),
    "memmap-sequential": memmap_sequential,
    "preadv": lambda world: preadv_loop(world, "uint32"),
    "preadv-u16": lambda world: preadv_loop(world, "uint16"),
    "disk-sequential": disk_sequential,
    "nanogpt": nanogpt,
    "litdata": litdata,
    "mds": mds,
    "webdataset": webdataset,
    "offload": lambda world: arrays(remote(world, TOKENS)),
    "offload-disk": lambda world: arrays(remote(world, TOKENS)),
    "no-offload": lambda world: arrays(remote(world, TOKENS, False)),
    "local": lambda world: arrays(local(world, "u32", TOKENS)),
    "local-u16": lambda world: arrays(local(world, "u16", TOKENS)),
    "offload-pairs": lambda world: tensors(remote(world, PAIRS)),
    "local-pairs": lambda world: tensors(local(world, "u32", PAIRS)),
}


def check(batch):
    """Shape, type and range of a first batch."""
    parts = [numpy.asarray(part) for part in batch] if isinstance(batch, tuple) else [numpy.asarray(batch)]
    kind = "int64" if len(parts) == 2 else "uint16"
    for part in parts:
        assert part.shape == (SAMPLES, LENGTH) and part.dtype == kind, (part.shape, part.dtype)
        assert 0 <= part.min() and part.max() < VOCABULARY, (part.min(), part.max())
    assert len(parts) == 1 or (parts[0][:, 1:] == parts[1][:, :-1]).all(), "labels are not the inputs, shifted by one"


def cpu_ns():
    children = os.times()
    return time.process_time_ns() + int((children.children_user + children.children_system) * 1e9)


def run(case, world, seconds):
    started = time.perf_counter()
    batches = iter(CASES[case](world))
    first = next(batches)
    first_batch_s = time.perf_counter() - started
    tokens = SAMPLES * LENGTH
    if isinstance(first, int):
        tokens = first
    else:
        check(first)
    del first
    digest = hashlib.blake2b(digest_size=8) if "offload" in case or "local" in case else None
    for _ in range(HASHED if digest else 0):
        batch = next(batches)
        for part in batch if isinstance(batch, tuple) else (batch,):
            digest.update(numpy.ascontiguousarray(part))
        del batch, part
    warm = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm:
        next(batches)
    before, others, began = cpu_ns(), world.others_ns(), time.perf_counter()
    end, count = began + seconds, 0
    while (now := time.perf_counter()) < end:
        next(batches)
        count += 1
    others, host = world.others_ns() - others, cpu_ns() - before
    gtok = count * tokens / 1e9
    return {
        "mtokens_per_s": count * tokens / (now - began) / 1e6,
        "host_cpu_s_per_gtok": host / 1e9 / gtok,
        "all_cpu_s_per_gtok": (host + others) / 1e9 / gtok,
        "first_batch_s": first_batch_s,
        "digest": digest and digest.hexdigest(),
    }


# --- figures of Dquant alone ---


def overhead(world):
    """Microseconds of this thread per batch: a full ring, drained without a wait."""
    slots, slot_size = 8, 4 << 20
    ready = (slots - 2) * slot_size // (SAMPLES * LENGTH * 2)
    stream = remote(world, TOKENS, slots=slots, slot_size=slot_size)

    def drain(use):
        deadline = time.monotonic() + PATIENCE_S
        while stream.status()["batches"] < stream.next_batch + ready:
            assert time.monotonic() < deadline, "the ring does not fill"
            time.sleep(0.005)
        started = time.thread_time_ns()
        for _ in range(ready):
            use(next(stream))
        return (time.thread_time_ns() - started) / ready / 1e3

    signed = TOKENS.replace("narrow(u16)", "narrow(u16) | widen(i32)")
    figures = {"overhead_numpy_us": statistics.median(drain(lambda batch: batch.numpy()) for _ in range(REPEATS))}
    stream.close()
    try:
        import torch  # noqa: F401
    except ImportError:
        return figures
    # Torch has no u16 before 2.3: the same batches as i32, half as many of which fill the ring.
    ready //= 2
    stream = remote(world, signed, slots=slots, slot_size=slot_size)
    figures["overhead_torch_us"] = statistics.median(drain(lambda batch: batch.torch()) for _ in range(REPEATS))
    return figures


def opened_ms(make):
    """Median time from the call to the first batch, after a first stream that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        stream = make()
        next(stream)
        times.append((time.perf_counter() - started) * 1e3)
        stream.close()
    return statistics.median(times[1:])


def opening(world):
    import dquant

    figures = {}

    def take(name, make):
        try:
            figures[name] = opened_ms(make)
        except dquant.Error as error:
            figures[f"{name}_refused"] = str(error)

    one = f"dq://{world.control}/web"
    take("open_one_ms", lambda: dquant.Stream(one, TOKENS, token=TOKEN, dpu=world.socket, dtype="u32"))
    take("open_three_ms", lambda: remote(world, TOKENS))
    paths = sorted((world.folder / "many-3000").glob("*.bin"))
    figures["corpora"] = len(paths)
    plan = f"window({LENGTH}) | shuffle(7) | batch({SAMPLES})"
    source = {path: 1 for path in paths}
    take("open_many_ms", lambda: dquant.Stream(source, plan, dtype="u16", first_batch=123_456))
    return figures


def main(case, folder, seconds, *daemons):
    world = World(folder, *daemons)
    alone = {"overhead": overhead, "opening": opening}.get(case)
    print(json.dumps(alone(world) if alone else run(case, world, float(seconds))), flush=True)
    # Threads of a peer that still prefetch must not keep this process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
