#!/usr/bin/env python3
"""Records the order of samples that megatron-core gives, and compares its versions.

    megatron_order.py check [VERSION...]     the recorded order against these versions, by default all of VERSIONS
    megatron_order.py golden                 writes crates/xio/tests/data/megatron.txt

megatron-core comes from PyPI into a folder per version below the target folder, once, without its dependencies. Its
own `IndexedDatasetBuilder` writes the corpora, its `BlendedMegatronDatasetBuilder` builds the datasets, and the tokens
are those that `GPTDataset` finds. All of that is plain Python, numpy and megatron-core's compiled helpers. torch,
which only wraps the results, is replaced by `torch_stub`; where a real torch can be imported, samples are also taken
through `__getitem__`.

Token `i` of a corpus has the value `i`, so tokens tell where they come from. The file has a line for each fact:

    corpus NAME LENGTH...                    the documents
    case NAME                                everything up to the next case
    data NAME[=WEIGHT]...                    the blend
    split A,B,C PART                         which documents: part 0 is for training
    seed N / sequence N / extra 0|1 / samples N|-
    sizes N...                               samples of each dataset
    length N                                 samples of the blend
    sample DATASET RUN...                    the first samples, as runs FIRST-LAST of tokens
    crc HEX...                               CRC-32 of every 256 samples: each as u32 dataset, then u32 tokens

Exit status: 0 all equal; 1 something differs; 77 megatron-core cannot be installed (the reason is printed).
"""

import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import types
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / "target" / "megatron-oracle"
GOLDEN = ROOT / "crates" / "xio" / "tests" / "data" / "megatron.txt"
NUMPY = "1.26.4"
# All of one order. Up to 0.10, the samples of a dataset were rounded in another way.
VERSIONS = ["0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1"]
SKIPPED = 77
BLOCK = 256
SHOWN = 6


def corpora():
    """Lengths of the documents of each corpus."""
    draw = random.Random(8)
    return {
        "short": [draw.randint(1, 40) for _ in range(6000)],
        "mixed": [min(600, int(draw.expovariate(0.01)) + 1) for _ in range(1500)],
        "long": [draw.randint(500, 9000) for _ in range(40)],
        "tiny": [0, 3, 1, 0, 0, 70, 2, 1, 200, 0],
        "one": [5000],
    }


def cases():
    """Settings of each case."""
    mixed = [("short", "0.5"), ("mixed", "0.3"), ("long", "0.2")]
    skewed = [("tiny", "0.05"), ("one", "3.15"), ("long", "2")]
    names = ["short", "mixed", "long", "tiny", "one"]
    # Chosen so that samples fall to other datasets if weights are added up or divided in another way.
    ties = [("short", "3.1"), ("mixed", "1.2"), ("long", "0.4")]
    draw = random.Random(2)
    many = [(names[at % 5], f"{draw.randint(1, 40) / 10}") for at in range(21)]
    draw = random.Random(0)
    many_more = [(names[at % 5], f"{draw.randint(1, 40) / 1000}") for at in range(150)]
    plain = [("short", None), ("long", None), ("one", None)]
    single = [("short", None)]
    table = [
        # name, data, sequence, samples, others
        ("part of an epoch", single, 64, 700, {}),
        ("last epoch apart", single, 64, 2300, {}),
        ("last epoch not apart", single, 64, 3700, {}),
        ("last epoch at the threshold", single, 64, 1916 + 1532, {}),
        ("last epoch below the threshold", single, 64, 1916 + 1531, {}),
        ("one epoch", single, 64, None, {}),
        ("documents longer than a sample", [("long", None)], 100, 5000, {}),
        ("one document, many epochs", [("one", None)], 96, 1000, {}),
        ("short documents, many epochs", [("tiny", None)], 64, 500, {}),
        ("windows longer than an epoch", [("tiny", None)], 1000, 50, {}),
        ("blend", mixed, 64, 4000, {}),
        ("blend of unequal datasets", skewed, 32, 3000, {}),
        ("blend in which rounding decides", ties, 64, 3000, {}),
        ("blend of many", many, 48, 3000, {}),
        ("blend of very many", many_more, 48, 4000, {}),
        ("blend in which the margin decides", [("short", "0.3"), ("long", "0.7")], 64, 6354, {}),
        ("blend of one", [("short", "1")], 64, 1915, {}),
        ("blend by length", plain, 64, 2500, {}),
        ("blend by length, all samples", plain, 64, None, {}),
        ("without an extra token", mixed, 64, 3000, {"extra": 0}),
        ("without an extra token, empty documents", [("tiny", None)], 7, 300, {"extra": 0}),
        # No part may be without documents: megatron-core then never returns.
        ("split for training", single, 64, 2000, {"split": "969, 30, 1"}),
        ("split for validation", single, 16, 300, {"split": "969, 30, 1", "part": 1}),
        ("split of a blend", mixed, 64, 3000, {"split": "80,15.5,4.5"}),
        ("split of a blend for validation", mixed, 64, 300, {"split": "80,15.5,4.5", "part": 1}),
        ("split in two", single, 64, 900, {"split": "2,1"}),
    ]
    for name, data, sequence, samples, others in table:
        for seed in (1234, 4294967295):
            settings = {"split": "1,0,0", "part": 0, "extra": 1, **others}
            yield {"name": name, "data": data, "sequence": sequence, "samples": samples, "seed": seed, **settings}


# --- one version of megatron-core, in a process of its own ---

def load(folder):
    """Makes the datasets of the megatron-core in `folder` importable, without the rest of it."""
    import torch_stub
    try:
        import torch  # noqa: F401
        real = {"torch", "megatron"}
    except ImportError:
        real = {"megatron"}
    torch_stub.install(real)
    for name in ("megatron", "megatron.core"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    for name in ("utils", "parallel_state", "tokenizers"):
        sys.modules[f"megatron.core.{name}"] = torch_stub.Module(f"megatron.core.{name}")
    return "torch" in real


class Tokenizer:
    eod = eos = -7
    pad = -1
    vocab_size = 1 << 30
    unique_identifiers = {}


def write_corpora(folder):
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    import torch
    import torch_stub
    real = isinstance(torch.Tensor, type) and torch.Tensor is not torch_stub.Array
    for name, lengths in corpora().items():
        builder, start = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=numpy.int32), 0
        for length in lengths:
            tokens = numpy.arange(start, start + length, dtype=numpy.int32)
            builder.add_item(torch.from_numpy(tokens) if real else tokens.view(torch_stub.Array))
            builder.end_document()
            start += length
        builder.finalize(f"{folder}/{name}.idx")


def build(case, folder):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    weights = [weight for _, weight in case["data"]]
    prefixes = [f"{folder}/{name}" for name, _ in case["data"]]
    blend = (prefixes, None if None in weights else [float(weight) for weight in weights])
    config = GPTDatasetConfig(
        random_seed=case["seed"], sequence_length=case["sequence"], blend=blend, split=case["split"],
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, add_extra_token_to_sequence=bool(case["extra"]))
    sizes = [case["samples"]] * 3
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[case["part"]]


def runs(tokens):
    """Tokens as runs of neighbours, FIRST-LAST."""
    found = []
    for token in map(int, tokens):
        if found and found[-1][1] + 1 == token:
            found[-1][1] = token
        else:
            found.append([token, token])
    return [f"{first}-{last}" for first, last in found]


def record(case, folder, real_torch):
    """The lines of a case."""
    import numpy
    dataset = build(case, folder)
    parts = getattr(dataset, "datasets", [dataset])
    yield f"sizes {' '.join(str(len(part)) for part in parts)}"
    yield f"length {len(dataset)}"
    total = len(dataset) if case["samples"] is None else case["samples"]
    crcs, crc = [], 0
    for at in range(total):
        which, sample = 0, at
        if parts[0] is not dataset:
            which, sample = int(dataset.dataset_index[at]), int(dataset.dataset_sample_index[at])
        tokens, _ = parts[which]._query_document_sample_shuffle_indices(sample)
        if real_torch and at % 97 == 0 and case["extra"]:
            item = dataset[at]
            assert numpy.array_equal(item["tokens"].numpy(), tokens[:-1]), "__getitem__ gives other tokens"
            assert numpy.array_equal(item["labels"].numpy(), tokens[1:]), "__getitem__ gives other labels"
        if at < SHOWN:
            yield f"sample {which} {' '.join(runs(tokens))}"
        crc = zlib.crc32(numpy.asarray([which, *tokens], "<u4").tobytes(), crc)
        if (at + 1) % BLOCK == 0 or at + 1 == total:
            crcs.append(f"{crc:08x}")
            crc = 0
    yield f"crc {' '.join(crcs)}"


def head(case):
    data = " ".join(name if weight is None else f"{name}={weight}" for name, weight in case["data"])
    samples = "-" if case["samples"] is None else case["samples"]
    return [f"data {data}", f"split {case['split'].replace(' ', '')} {case['part']}", f"seed {case['seed']}",
            f"sequence {case['sequence']}", f"extra {case['extra']}", f"samples {samples}"]


def run_version(version):
    """Prints the lines of every case as JSON."""
    import logging
    logging.disable(logging.CRITICAL)
    real_torch = load(ENVIRONMENT / version)
    with tempfile.TemporaryDirectory(prefix="megatron-order-") as folder:
        write_corpora(folder)
        found = [[case["name"], head(case) + list(record(case, folder, real_torch))] for case in cases()]
    json.dump(found, sys.stdout)


# --- all versions ---

def install(version):
    """Installs megatron-core below the target folder; ends the program where that fails."""
    folder = ENVIRONMENT / version
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        step = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "--only-binary=:all:",
                f"megatron-core=={version}", f"numpy=={NUMPY}"]
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"skipped: megatron-core {version}: {done.stderr.strip().splitlines()[-1:]}")
            sys.exit(SKIPPED)
        (folder / "complete").touch()


def recorded(version):
    install(version)
    path = os.pathsep.join([str(ENVIRONMENT / version), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__, "run", version], stdout=subprocess.PIPE, check=True,
                          env={**os.environ, "PYTHONPATH": path})
    return json.loads(done.stdout)


def text():
    """The lines of the golden file."""
    yield f"# By interop/megatron_order.py from megatron-core {VERSIONS[-1]} and numpy {NUMPY}."
    for name, lengths in corpora().items():
        yield f"corpus {name} {' '.join(map(str, lengths))}"
    for name, lines in recorded(VERSIONS[-1]):
        yield from [f"case {name}", *lines]


def expected():
    """The cases of the golden file."""
    lines = GOLDEN.read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("case ")]
    for first, end in itertools.zip_longest(starts, starts[1:]):
        yield [lines[first].removeprefix("case "), lines[first + 1:end]]


def main():
    match sys.argv[1:]:
        case ["run", version]:
            run_version(version)
        case ["golden"]:
            lines = list(text())
            GOLDEN.write_text("\n".join(lines) + "\n")
            print(f"{GOLDEN}: {len(lines)} lines")
        case ["check", *versions]:
            wrong = 0
            for version in versions or VERSIONS:
                found, known = recorded(version), list(expected())
                differ = [name for (name, facts), (_, other) in zip(known, found) if facts != other]
                wrong += len(differ) + abs(len(known) - len(found))
                print(f"megatron-core {version}: {len(found)} cases, {len(differ)} differ {differ or ''}")
            return 1 if wrong else 0
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
