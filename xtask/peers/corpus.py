"""The corpus of `cargo xtask bench data --peers`, and what each peer reads: the same tokens in its own format.

    corpus.py make FOLDER TOKENS     flat files of u32 and u16
    corpus.py write FOLDER FORMAT    litdata, mds or webdataset, by the writer of that library
    corpus.py many FOLDER COUNT      many small flat files
    corpus.py heat FOLDER NAME…      reads files twice and touches memory

Ids follow a Zipf law (s = 1.05) over 50,257, noisily ordered by rank as a byte-pair encoding leaves them; documents end
with the last id. Three corpora have the sizes 5 : 3 : 2, so that a blend with these weights reads all of them alike.
"""

import mmap
import pathlib
import shutil
import sys

import numpy

VOCABULARY = 50_257
EOS = VOCABULARY - 1
LENGTH = 2048
WEIGHTS = {"web": 5, "code": 3, "books": 2}
CHUNK = 1 << 22
"""Tokens that are made at a time."""

HEAT_BYTES = 3 << 30
"""On many virtual machines the first touch of memory that was idle costs ten times as much."""


def distribution(random):
    """Ids such that a uniform choice among them follows the law."""
    ranks = numpy.arange(1, VOCABULARY, dtype="float64")
    chance = numpy.cumsum(ranks**-1.05)
    places = (numpy.arange(1 << 20) + 0.5) / (1 << 20) * chance[-1]
    noise = numpy.exp(random.normal(0, 0.5, VOCABULARY - 1))
    return numpy.argsort(ranks * noise).astype("uint32")[numpy.searchsorted(chance, places)]


def make(folder, tokens):
    """`u32/NAME.bin` and `u16/NAME.bin` for each corpus, and all of them as `all32.bin` and `all16.bin`."""
    random = numpy.random.default_rng(7)
    ids = distribution(random)
    for kind in ("u32", "u16"):
        (folder / kind).mkdir(parents=True)
    with open(folder / "all32.bin", "wb") as all32, open(folder / "all16.bin", "wb") as all16:
        for name, weight in WEIGHTS.items():
            left = tokens * weight // sum(WEIGHTS.values())
            with open(folder / "u32" / f"{name}.bin", "wb") as wide, open(folder / "u16" / f"{name}.bin", "wb") as narrow:
                while left:
                    part = ids[random.integers(0, len(ids), min(CHUNK, left))]
                    ends = numpy.cumsum(random.lognormal(6.5, 1.0, 2 * len(part) // 1000 + 1).astype("int64") + 1)
                    part[ends[ends < len(part)]] = EOS
                    for file in (wide, all32):
                        part.tofile(file)
                    for file in (narrow, all16):
                        part.astype("uint16").tofile(file)
                    left -= len(part)


def samples(folder):
    """The corpus as samples of one length."""
    data = numpy.fromfile(folder / "all16.bin", "uint16")
    return data[: len(data) // LENGTH * LENGTH].reshape(-1, LENGTH)


def import_libraries():
    """Modules that the libraries import and do not use here (clients of object stores, torchvision) may be missing."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "interop"))
    import torch_stub

    torch_stub.install(real={"torch"})


def write_mds(folder, path):
    import_libraries()
    from streaming.base.format.mds.writer import MDSWriter

    with MDSWriter(out=str(path), columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
        for sample in samples(folder):
            writer.write({"tokens": sample})


def write_litdata(folder, path):
    import_libraries()
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    # Documents of 64 Ki tokens.
    writer = BinaryWriter(str(path), chunk_bytes=64 << 20, item_loader=TokensLoader(LENGTH))
    data = samples(folder).reshape(-1)
    for at in range(0, len(data), 1 << 16):
        writer[at >> 16] = data[at : at + (1 << 16)]
    writer.done()
    writer.merge()


def write_webdataset(folder, path):
    import_libraries()
    import webdataset

    path.mkdir()
    with webdataset.ShardWriter(str(path / "%05d.tar"), maxcount=16_384, verbose=0) as writer:
        for at, sample in enumerate(samples(folder)):
            writer.write({"__key__": f"{at:08}", "bin": sample.tobytes()})


def many(folder, path, count):
    """`count` corpora of 64 Ki tokens each."""
    data = numpy.fromfile(folder / "all16.bin", "uint16", 1 << 16)
    path.mkdir()
    for at in range(count):
        data.tofile(path / f"c{at}.bin")


def heat(folder, names):
    paths = [path for name in names for path in (folder / name, *(folder / name).rglob("*"))]
    buffer = bytearray(1 << 20)
    for _ in range(2):
        for path in filter(pathlib.Path.is_file, paths):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    mmap.mmap(-1, HEAT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def finished(path, write):
    """Writes to a name of its own first: what bears the name is whole."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    write(part)
    part.rename(path)


def main(what, folder, *rest):
    folder = pathlib.Path(folder)
    match what:
        case "make":
            finished(folder, lambda part: make(part, int(rest[0])))
        case "write":
            finished(folder / rest[0], lambda part: globals()[f"write_{rest[0]}"](folder, part))
        case "many":
            finished(folder / f"many-{rest[0]}", lambda part: many(folder, part, int(rest[0])))
        case "heat":
            heat(folder, rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
