#!/usr/bin/env python3
"""Compares `dquant convert` with the libraries whose formats it reads and writes.

    formats.py check [--dquant PATH]     both directions, with datasets made now
    formats.py golden DIRECTORY          small datasets by the libraries, for crates/formats/tests/golden

`check` lets every library write the same documents and reads them with dquant, then lets dquant write them and reads
them with the library. The libraries come from PyPI into a virtual environment below the target folder, once, without
their dependencies: torch is replaced by `torch_stub`.

The build needs all formats: `cargo build --release --features full`. What another build lacks is skipped.

Exit status: 0 all equal; 1 something differs; 77 the libraries cannot be installed (the reason is printed), or formats
were skipped.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / "target" / "formats-oracle"
LIBRARIES = ["numpy==2.4.6", "pyarrow==26.0.1", "mosaicml-streaming==0.13.0", "litdata==0.2.76", "webdataset==1.0.2",
             "megatron-core==0.16.1"]
# What those import when they read and write files.
NEEDED = ["zstandard", "zstd", "braceexpand", "pyyaml", "xxhash", "tqdm", "requests", "filelock", "lightning-utilities",
          "packaging", "tifffile", "obstore", "brotli", "python-snappy", "cramjam", "typing-extensions", "pillow",
          "catalogue", "urllib3", "idna", "charset-normalizer", "certifi"]
SKIPPED = 77
EOS = 50_256


def enter_environment():
    """Runs this program again in the virtual environment, which is made first."""
    python = ENVIRONMENT / "bin" / "python"
    if pathlib.Path(sys.prefix) == ENVIRONMENT:
        return
    if not (ENVIRONMENT / "complete").exists():
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        steps = ([sys.executable, "-m", "venv", ENVIRONMENT],
                 [python, "-m", "pip", "install", "-q", "--no-deps", *LIBRARIES, *NEEDED])
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode != 0:
                print(f"skipped: {step[0]}: {done.stderr.strip().splitlines()[-1:]}")
                sys.exit(SKIPPED)
        (ENVIRONMENT / "complete").touch()
    os.execv(python, [python, *sys.argv])


def documents(dtype, count=40):
    """Documents of ids, each ended by EOS."""
    import numpy
    random = numpy.random.default_rng(5)
    made = [random.integers(0, EOS, 1 + at * 3) for at in range(count)]
    return [numpy.append(ids, EOS).astype(dtype) for ids in made]


# --- writers: a library writes `docs` to `path` ---

def write_npy(path, docs):
    import numpy
    numpy.save(path, numpy.concatenate(docs))


def indexed_dataset():
    folder = next(pathlib.Path(entry) for entry in sys.path if (pathlib.Path(entry) / "megatron/core").is_dir())
    source = folder / "megatron/core/datasets/indexed_dataset.py"
    spec = importlib.util.spec_from_file_location("indexed_dataset", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_megatron(path, docs):
    import torch_stub
    builder = indexed_dataset().IndexedDatasetBuilder(str(path.with_suffix(".bin")), dtype=docs[0].dtype.type)
    for at, doc in enumerate(docs):
        # Some documents of two sequences.
        cut = len(doc) // 2 if at % 3 == 0 else 0
        for part in (doc[:cut], doc[cut:]):
            if len(part):
                builder.add_item(part.view(torch_stub.Array))
        builder.end_document()
    builder.finalize(str(path.with_suffix(".idx")))


def write_mds(path, docs, compression=None, encoding=None):
    from streaming.base.format.mds.writer import MDSWriter
    columns = {"tokens": encoding or f"ndarray:{docs[0].dtype.name}", "id": "int", "text": "str"}
    with MDSWriter(out=str(path), columns=columns, compression=compression, size_limit=600) as writer:
        for at, doc in enumerate(docs):
            writer.write({"tokens": doc, "id": at, "text": "x" * (at % 5)})


def write_mds_zstd(path, docs):
    write_mds(path, docs, "zstd:3")


def write_mds_dynamic(path, docs):
    write_mds(path, docs, None, "ndarray")


def write_litdata(path, docs, loader=True, compression=None):
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter
    level = {"compression_level": "chunk"} if compression else {}
    writer = BinaryWriter(str(path), chunk_bytes=300, item_loader=TokensLoader() if loader else None,
                          compression=compression, **level)
    for at, doc in enumerate(docs):
        writer[at] = doc
    writer.done()
    writer.merge()


def write_litdata_tree(path, docs):
    write_litdata(path, docs, loader=False)


def write_litdata_zstd(path, docs):
    write_litdata(path, docs, compression="zstd")


def write_webdataset(path, docs):
    import webdataset
    path.mkdir()
    with webdataset.ShardWriter(str(path / "shard-%03d.tar"), maxcount=5, verbose=0) as writer:
        for at, doc in enumerate(docs):
            writer.write({"__key__": f"sample{at:06d}", "npy": doc, "json": {"id": at}})


def table(docs):
    import pyarrow
    lists = pyarrow.array([doc.tolist() for doc in docs], pyarrow.list_(pyarrow.from_numpy_dtype(docs[0].dtype)))
    return pyarrow.table({"id": list(range(len(docs))), "input_ids": lists})


def write_parquet(path, docs):
    import pyarrow.parquet
    pyarrow.parquet.write_table(table(docs), path, row_group_size=4)


def write_targets(path, docs):
    """Tokens of which every second run of three is a target, as each form of a column says it."""
    import pyarrow.parquet
    marks = [[(row + at) // 3 % 2 == 1 for at in range(len(doc))] for row, doc in enumerate(docs)]
    labels = [[int(token) if mark else -100 for token, mark in zip(*both)] for both in zip(docs, marks)]
    columns = {"input_ids": pyarrow.array([doc.tolist() for doc in docs], pyarrow.list_(pyarrow.uint16())),
               "labels": pyarrow.array(labels, pyarrow.list_(pyarrow.int64())),
               "flags": pyarrow.array(marks, pyarrow.large_list(pyarrow.bool_())),
               "mask": pyarrow.array([[int(mark) for mark in row] for row in marks], pyarrow.list_(pyarrow.int8()))}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=4)


def write_arrow_file(path, docs):
    import pyarrow.feather
    pyarrow.feather.write_feather(table(docs), str(path), compression="uncompressed", chunksize=4)


def write_arrow_stream(path, docs):
    import pyarrow
    with pyarrow.ipc.new_stream(str(path), table(docs).schema) as writer:
        writer.write_table(table(docs), max_chunksize=4)


# --- readers: a library reads the documents of `path` ---

def read_npy(path):
    import numpy
    return [numpy.load(path)]


def read_megatron(path):
    dataset = indexed_dataset()
    with_index = dataset._IndexReader(str(path.with_suffix(".idx")), False)
    import numpy
    data = numpy.memmap(path.with_suffix(".bin"), dtype=with_index.dtype, mode="r")
    starts = [int(pointer) // data.itemsize for pointer in with_index.sequence_pointers]
    ends = [start + int(length) for start, length in zip(starts, with_index.sequence_lengths)]
    bounds = [int(bound) for bound in with_index.document_indices]
    return [data[starts[first]:ends[last - 1]] for first, last in zip(bounds, bounds[1:])]


def read_mds(path):
    from streaming.base.compression import decompress
    from streaming.base.format.mds.reader import MDSReader
    found = []
    for shard in json.loads((path / "index.json").read_text())["shards"]:
        reader = MDSReader.from_json(str(path), "", shard)
        if reader.zip_data:
            packed = (path / reader.zip_data.basename).read_bytes()
            (path / reader.raw_data.basename).write_bytes(decompress(reader.compression, packed))
        found.extend(reader[at]["tokens"] for at in range(reader.samples))
    return found


def read_litdata(path):
    """Blocks of one token: the loader of tokens does not know documents."""
    import numpy
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.serializers import _get_serializers
    index = json.loads((path / "index.json").read_text())
    loader = TokensLoader(block_size=1)
    loader.setup(index["config"], index["chunks"], _get_serializers(None))
    tokens = []
    for number, interval in enumerate(loader.generate_intervals()):
        chunk = path / index["chunks"][number]["filename"]
        loader.pre_load_chunk(number, str(chunk))
        for at in range(interval[0], interval[3]):
            tokens.append(loader.load_item_from_chunk(at, number, str(chunk), interval[0], chunk.stat().st_size))
    return [numpy.concatenate(tokens)]


def read_webdataset(path):
    import webdataset
    shards = sorted(str(shard) for shard in path.iterdir()) if path.is_dir() else [str(path)]
    shards = [shard for shard in shards if shard.endswith(".tar")]
    return [sample["npy"] for sample in webdataset.WebDataset(shards, shardshuffle=False).decode()]


def read_parquet(path):
    import pyarrow.parquet
    return [row.values.to_numpy() for row in pyarrow.parquet.read_table(path)["tokens"]]


def read_arrow(path):
    import pyarrow
    return [row.values.to_numpy() for row in pyarrow.ipc.open_stream(str(path)).read_all()["tokens"]]


WRITERS = {"array.npy": write_npy, "megatron.idx": write_megatron, "mds": write_mds, "mds-zstd": write_mds_zstd,
           "mds-dynamic": write_mds_dynamic, "litdata": write_litdata, "litdata-tree": write_litdata_tree,
           "litdata-zstd": write_litdata_zstd, "webdataset": write_webdataset, "rows.parquet": write_parquet,
           "file.arrow": write_arrow_file, "stream.arrow": write_arrow_stream}
READERS = {"array.npy": ("npy", read_npy, []), "megatron.idx": ("megatron", read_megatron, []),
           "mds": ("mds", read_mds, []), "mds-zstd": ("mds", read_mds, ["--zstd", "3"]),
           "litdata": ("litdata", read_litdata, []), "web.tar": ("webdataset", read_webdataset, []),
           "web": ("webdataset", read_webdataset, []), "rows.parquet": ("parquet", read_parquet, []),
           "rows.arrow": ("arrow", read_arrow, [])}


def run(*args):
    done = subprocess.run([str(arg) for arg in args], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, args))}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def same(found, expected):
    """Equal documents, or equal tokens where the library knows no documents."""
    import numpy
    if len(found) == 1:
        expected = [numpy.concatenate(expected)]
    return len(found) == len(expected) and all(map(numpy.array_equal, found, expected))


def library_to_us(dquant, folder, name, dtype):
    import numpy
    docs = documents(dtype)
    WRITERS[name](folder / name, docs)
    run(dquant, "convert", "--json", folder / name, folder / "flat.bin")
    tokens = numpy.fromfile(folder / "flat.bin", dtype)
    # Through a format that keeps documents apart, by our own reader.
    report = run(dquant, "inspect", "--json", folder / name)
    apart = name == "array.npy" or report["documents"] == len(docs)
    return apart and numpy.array_equal(tokens, numpy.concatenate(docs))


def us_to_library(dquant, folder, name, dtype):
    import numpy
    kind, read, options = READERS[name]
    docs = documents(dtype)
    numpy.concatenate(docs).tofile(folder / "flat.bin")
    run(dquant, "convert", "--json", folder / "flat.bin", folder / name, "--to", kind, "--dtype", dtype,
        "--eos", EOS, "--shard-size", "2KiB", *options)
    return same([numpy.asarray(doc) for doc in read(folder / name)], docs)


def verdict_on(error):
    """Whatever a library or the program raises is reported; what a build lacks is not a failure."""
    if "which this build does not have" in str(error):
        return "skipped: build with `cargo build --release --features full`"
    return f"FAILED: {type(error).__name__}: {error}"


def check(dquant):
    verdicts = []
    for direction, names in ((library_to_us, WRITERS), (us_to_library, READERS)):
        for name in names:
            for dtype in ("uint16", "int32", "int64"):
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        verdict = "same" if direction(dquant, pathlib.Path(folder), name, dtype) else "DIFFERS"
                    except Exception as error:  # each cell is reported, whatever the library raises
                        verdict = verdict_on(error)
                verdicts.append(verdict)
                print(f"{direction.__name__:14} {name:14} {dtype:7} {verdict}")
    skipped = sum(verdict.startswith("skipped") for verdict in verdicts)
    if verdicts.count("same") + skipped < len(verdicts):
        return 1
    return 77 if skipped else 0


def golden(folder):
    folder.mkdir(parents=True, exist_ok=True)
    docs = documents("uint16", 12)
    for name, write in WRITERS.items():
        path = folder / name
        shutil.rmtree(path, ignore_errors=True)
        write(path, docs)
    write_targets(folder / "targets.parquet", docs)
    (folder / "documents.json").write_text(json.dumps([doc.tolist() for doc in docs]) + "\n")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    live = commands.add_parser("check")
    live.add_argument("--dquant", default=ROOT / "target/release/dquant", type=pathlib.Path)
    commands.add_parser("golden").add_argument("directory", type=pathlib.Path)
    options = parser.parse_args()
    enter_environment()
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import torch_stub
    torch_stub.install()
    if options.command == "golden":
        return golden(options.directory)
    return check(options.dquant.resolve())


if __name__ == "__main__":
    sys.exit(main())
