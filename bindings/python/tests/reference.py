"""A second implementation of what a batch is, written from docs/plan.md alone.

It shares no code and no author's assumption with the engine: a plan's text and the files in, the bytes of batch b out.
Plain integers and lists compute the order; numpy reads files and holds rows. Nothing here may import
dquant, and nothing may be made fast at the price of being less like the page.

    batches = Reference("window(64) | shuffle(7) | batch(32)", [("u32", "tokens/web.bin")])
    batches.batch(1000).tobytes()
"""

import functools
import itertools
import json
import math
import os
import re
from bisect import bisect_right
from fractions import Fraction

import numpy

from documents import documents_of, hash_of, select, targets_of

BITS = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}
TYPES = {"u16": "<u2", "u32": "<u4", "i32": "<i4", "i64": "<i8", "f32": "<f4", "f16": "<f2"}
# What numpy has no type for is held as its bits.
TYPES |= {"bf16": "<u2", "bytes": "u1"}


# The text of a plan.

LEXEME = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|([\w\-./:@+~%]+)|([|(),=]))')


def lexemes(text):
    """The words and signs of a plan, each as (kind, text) where kind is "word" or the sign itself."""
    at, found = 0, []
    text = text.rstrip()
    while at < len(text):
        match = LEXEME.match(text, at)
        if match is None:
            raise ValueError(f"not a plan at {at}: {text[at:]!r}")
        quoted, word, sign = match.groups()
        if sign is not None:
            found.append((sign, sign))
        else:
            found.append(("word", word if word is not None else re.sub(r"\\(.)", r"\1", quoted)))
        at = match.end()
    return found


def parse(text):
    """The actions of a plan: name -> list of (name of the argument or None, value), in the order of the text."""
    rest = lexemes(text)

    def take(*kinds):
        kind, word = rest.pop(0) if rest else ("end", "end")
        if kind not in kinds:
            raise ValueError(f"{word!r} in place of {' or '.join(kinds)}")
        return word

    actions = {}
    while True:
        action, arguments = take("word"), []
        if action in actions:
            raise ValueError(f"{action} appears twice")
        if rest and rest[0][0] == "(":
            sign = take("(")
            while sign != ")":
                name, value = None, take("word")
                sign = take(",", ")", "=")
                if sign == "=":
                    name, value = value, take("word")
                    sign = take(",", ")", "(")
                    if sign == "(":
                        value, sign = (value, take("word")), take(")") and take(",", ")")
                arguments.append((name, value))
        actions[action] = arguments
        if not rest:
            return actions
        take("|")


def size(text):
    """Bytes of a size with its unit."""
    return int(text[:-3]) * UNITS[text[-3:]]


def integers(phases):
    """The weights of each phase, as they are written, as integers without a common divisor."""
    found = []
    for weights in phases:
        exact = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        found.append(without_common_divisor([int(weight * scale) for weight in exact]))
    if sum(map(sum, found)) <= 1_000_000:
        return found
    return [within(weights, 1_000_000 // len(found)) for weights in found]


def within(weights, limit):
    """The weights of a phase with a sum of at most `limit`."""
    if sum(weights) <= limit:
        return weights
    near = [fraction_near(Fraction(weight, sum(weights)), limit) for weight in weights]
    if None not in near and sum(near) == 1 and math.lcm(*(one.denominator for one in near)) <= limit:
        return without_common_divisor([int(one * math.lcm(*(one.denominator for one in near))) for one in near])
    parts = limit - sum(weight > 0 for weight in weights)
    rounded = [max(1, weight * parts // sum(weights)) if weight > 0 else 0 for weight in weights]
    return without_common_divisor(rounded)


def fraction_near(share, limit):
    """The first convergent of a share that is closer to it than a float's rounding, if its denominator is small."""
    n, d = share.numerator, share.denominator
    before, last = (0, 1), (1, 0)
    while d:
        before, last = last, tuple(n // d * now + old for now, old in zip(last, before, strict=True))
        n, d = d, n % d
        if last[1] > limit:
            return None
        if abs(Fraction(*last) - share) <= share / 2**40:
            return Fraction(*last)
    return Fraction(0)


def without_common_divisor(weights):
    """Weights in the same ratio, as small as they can be."""
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def proportional(samples):
    """Weights of files without a blend, in proportion to their samples."""
    exact = without_common_divisor(samples)
    parts = 1_000_000 - len(samples)
    if sum(exact) <= parts:
        return exact
    return without_common_divisor([max(1, one * parts // sum(samples)) if one else 0 for one in samples])


def floor_to_power(number):
    """The largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)


# Keys and permutations.


def mix(v):
    """64 bits, mixed."""
    x = (v + GAMMA) & BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def key(*parts):
    """A key of its parts."""
    k = 0
    for part in parts:
        k = mix(k ^ part)
    return k


def scale(v, n):
    """64 bits as a number below n."""
    return (v * n) >> 64


def permute(k, n, x):
    """The place of x in the permutation of 0 … n-1 by the key k."""
    a = math.isqrt(n - 1) + 1 if n > 0 else 0
    b = -(-n // a)
    keys = [key(k, r) for r in range(8)]
    while True:
        left, right = divmod(x, b)
        for t in range(3 if n <= 64 else 1):
            for r in (0, 2, 4, 6):
                left = (left + scale(mix(((keys[r] + t * GAMMA) & BITS) ^ right), a)) % a
                right = (right + scale(mix(((keys[r + 1] + t * GAMMA) & BITS) ^ left), b)) % b
        x = left * b + right
        if x < n:
            return x


# Split.


def units_of_part(split, units):
    """The units of a part, of so many, in the order of the permutation."""
    shares, part, seed = split
    total, before = sum(shares), sum(shares[:part])
    places = range(units * before // total, units * (before + shares[part]) // total)
    return [permute(key(seed, 0x53504C4954000000), units, place) for place in places]


# Blend.


class Blend:
    """Which dataset each global sample comes from."""

    def __init__(self, weights):
        self.weights = weights
        self.period = sum(weights)
        self._draws = []
        self._more = self._steps()

    def _steps(self):
        total = self.period
        s = max(2 * sum(weight > 0 for weight in self.weights) - 2, 1)

        def deadline(d, j):
            p = self.weights[d]
            return -(-(j * s + 1) * total // (p * s)) - 1, ((j + 1) * s - 1) * total // (p * s), d, j

        ahead = {d: deadline(d, 0) for d, weight in enumerate(self.weights) if weight > 0}
        for n in range(total):
            _, _, d, j = min((one for one in ahead.values() if one[0] <= n), key=lambda one: (one[1], one[2]))
            yield d, j
            if j + 1 < self.weights[d]:
                ahead[d] = deadline(d, j + 1)
            else:
                del ahead[d]

    def draw(self, n):
        """Global sample n as (dataset, number of the draw ever)."""
        period, step = divmod(n, self.period)
        missing = step + 1 - len(self._draws)
        if missing > 0:
            self._draws.extend(itertools.islice(self._more, missing))
        d, j = self._draws[step]
        return d, period * self.weights[d] + j


@functools.lru_cache(maxsize=8)
def blend_of(weights):
    """Blends of the same weights share their draws."""
    return Blend(weights)


class Phases:
    """Blends one after the other: `starts` are their first global samples, the first of them 0."""

    def __init__(self, starts, blends):
        self.starts, self.blends = starts, blends
        self.before = [[0] * len(blends[0].weights)]
        for i, blend in enumerate(blends[:-1]):
            # Whole periods, and the draws of the rest of the phase one by one.
            periods, rest = divmod(starts[i + 1] - starts[i], blend.period)
            drawn = [have + periods * weight for have, weight in zip(self.before[i], blend.weights, strict=True)]
            for n in range(rest):
                drawn[blend.draw(n)[0]] += 1
            self.before.append(drawn)

    def draw(self, n):
        """Global sample n as (dataset, number of the draw ever)."""
        i = max(i for i, start in enumerate(self.starts) if start <= n)
        d, k = self.blends[i].draw(n - self.starts[i])
        return d, self.before[i][d] + k

    def has_many(self):
        """Whether more than 128 datasets have a weight above 0 in some phase."""
        return sum(any(blend.weights[d] > 0 for blend in self.blends) for d in range(len(self.blends[0].weights))) > 128

    def block_bytes(self, d):
        """Bytes of a block of dataset d, one of many."""
        most = max(48 * 2**20 * blend.weights[d] // blend.period for blend in self.blends)
        return min(2**18, max(2**12, most))

    def group_blocks(self, d, block_bytes, sample_bytes, least):
        """Blocks of a group of dataset d, where the plan does not say."""
        unit = max(block_bytes, sample_bytes)
        return max(max(least, -(-(1 << 24) * blend.weights[d] // (unit * blend.period))) for blend in self.blends)


# Quantization.


def codes_of(quant):
    """Codes of a type as (code, value), without sign for floating point; even codes come first."""
    if quant == "int8":
        found = [(c % 256, c / 64) for c in range(-127, 128)]
    else:
        mantissa, bias, largest = {"e4m3": (3, 7, 448), "e5m2": (2, 15, 57_344)}[quant]
        found = []
        for code in range(128):
            exponent, rest = code >> mantissa, code & ((1 << mantissa) - 1)
            whole = rest if exponent == 0 else rest + (1 << mantissa)
            found.append((code, math.ldexp(whole, max(exponent, 1) - bias - mantissa)))
        found = [(code, value) for code, value in found if value <= largest]
    return sorted(found, key=lambda one: (one[0] % 2, one[0]))


CODES = {quant: codes_of(quant) for quant in ("int8", "e4m3", "e5m2")}


def code_of(v, quant):
    """The code of a value that was divided by its scale."""
    negative = 0x80 if math.copysign(1, v) < 0 else 0
    if not math.isfinite(v):
        if quant == "int8" or (quant == "e4m3" and math.isinf(v)):
            raise OverflowError(f"{quant} has no {v}")
        return negative | (0x7C if math.isinf(v) else 0x7F)
    if quant == "int8":
        return min(CODES[quant], key=lambda one: abs(one[1] - v))[0]
    return negative | min(CODES[quant], key=lambda one: abs(one[1] - abs(v)))[0]


def value_of(code, quant):
    """The value of a code."""
    if quant == "int8":
        return dict(CODES[quant])[code]
    sign = -1.0 if code & 0x80 else 1.0
    infinite = quant == "e5m2" and code & 0x7F == 0x7C
    return math.copysign(dict(CODES[quant]).get(code & 0x7F, math.inf if infinite else math.nan), sign)


def quantize(values, quant):
    """The codes and the scales of a sample."""
    codes, scales = [], []
    for first in range(0, len(values), 32):
        block = values[first : first + 32]
        m = max((abs(v) for v in block if math.isfinite(v)), default=0.0)
        # frexp gives a fraction from a half to one.
        s = max(-127, math.frexp(m)[1] - 1 - {"int8": 0, "e4m3": 8, "e5m2": 15}[quant]) if m > 0 else -127
        codes += [code_of(math.ldexp(v, -s), quant) for v in block]
        scales.append(s + 127)
    return codes, scales


def dequantize(codes, scales, quant):
    """The values that they stand for."""
    return [math.ldexp(value_of(code, quant), scales[i // 32] - 127) for i, code in enumerate(codes)]


def as_values(stored, dtype):
    """Numbers of a type of floating point, as Python has them."""
    if dtype == "bf16":
        stored = (stored.astype("<u4") << 16).view("<f4")
    return stored.astype(float).tolist()


def as_stored(values, dtype):
    """The nearest numbers of a type; ties go to the even one."""
    exact = numpy.array(values)
    with numpy.errstate(over="ignore"):
        near = exact.astype("<f2" if dtype == "f16" else "<f4")
    if (numpy.isinf(near) & numpy.isfinite(exact)).any():
        raise OverflowError(f"a value does not fit {dtype}")
    if dtype == "bf16":
        bits = near.view("<u4").astype("<u8")
        near = numpy.where(numpy.isnan(near), bits >> 16 | 0x40, bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")
    return near


# Documents.


def documents_beside(path):
    """The documents of a file, from the index beside it."""
    with open(os.path.splitext(path)[0] + ".idx", "rb") as index:
        return documents_of(index.read())


def targets_beside(path):
    """Whether each token of a file is a target; none if its manifest does not say that sequences take turns."""
    try:
        with open(path + ".dquant.json") as manifest:
            if not json.load(manifest).get("targets"):
                return None
    except FileNotFoundError:
        return None
    with open(os.path.splitext(path)[0] + ".idx", "rb") as index:
        return numpy.array(targets_of(index.read()), bool)


def hashes_in(path):
    """The hashes of a list."""
    if path.endswith(".npy"):
        return set(numpy.load(path).tolist())
    with open(path) as lines:
        stripped = [line.strip() for line in lines]
    return {int(line, 16) for line in stripped if line and not line.startswith("#")}


def lay_out(chunks, window, how):
    """Samples of chunks, in the order in which they are begun; a sample's chunks in the order in which it got them."""
    samples, room = [], []
    for chunk in chunks if how == "single" else sorted(chunks, key=lambda chunk: -chunk[1]):
        fitting = [] if how == "single" else [s for s, tokens in enumerate(room) if tokens >= chunk[1]]
        if not fitting:
            samples.append([])
            room.append(window)
            fitting = [len(samples) - 1]
        s = min(fitting, key=lambda s: room[s]) if how == "best" else fitting[0]
        samples[s].append(chunk)
        room[s] -= chunk[1]
    return samples


def packed_in_blocks(documents, window, per_block, itemsize, how):
    """The samples of a file, and how many of them a block has: fewer where documents are few."""
    while True:
        try:
            return packed(documents, window, per_block, itemsize, how), per_block
        except ValueError:
            if per_block == 1:
                raise
            per_block //= 2


@functools.lru_cache(maxsize=64)
def packed(documents, window, per_block, itemsize, how):
    """The samples of a file, each a list of chunks as (first token, tokens)."""
    chunks = [
        (first + at, min(window, tokens - at)) for first, tokens in documents for at in range(0, tokens, window)
    ]
    most = per_block if how == "single" else max(4096, per_block)
    samples, c = [], 0
    while c < len(chunks):
        n, tokens = 0, 0
        for first, length in chunks[c : c + most]:
            tokens += length
            too_many = how != "single" and tokens > per_block * window
            if too_many or first + length - chunks[c][0] > (1 << 20) // itemsize:
                break
            n += 1
        block = lay_out(chunks[c : c + n], window, how)
        while len(block) > per_block:
            n -= 1
            block = lay_out(chunks[c : c + n], window, how)
        c += n
        while c < len(chunks) and len(block) < per_block:
            fullest = max(block, key=len)
            if len(fullest) == 1:
                raise ValueError("too few documents are left")
            block.append([fullest.pop()])
        samples += [sorted(sample) for sample in block]
    return samples


# One dataset.


class Dataset:
    """A file as samples, and their order; blocks of `block_bytes`, or of one longer sample.

    `documents` are (first token, tokens) of each where a plan needs them, `how` is that of `pack`, and `split` is (shares,
    part, seed) where windows are divided.
    """

    def __init__(self, dtype, path, window, overlap, block_bytes, documents=None, how=None, split=None):
        if path.endswith(".npy") and dtype == "bytes":
            self.tokens = numpy.frombuffer(numpy.load(path).tobytes(), "u1")
        elif path.endswith(".npy"):
            self.tokens = numpy.load(path, mmap_mode="r")
            dtype = {"float32": "f32", "float16": "f16"}.get(self.tokens.dtype.name, self.tokens.dtype.name)
        else:
            self.tokens = numpy.memmap(path, TYPES[dtype], mode="r")
        self.dtype = dtype
        self.window = window
        self.stride = window - overlap
        count = len(self.tokens)
        self.samples = (count - overlap) // self.stride if count >= window else 0
        self.split, self.own, self.is_sparse = split, None, False
        self.in_blocks(block_bytes)
        self.documents = None if documents is None else [document for document in documents if document[1] > 0]
        self.packed = None
        if how is not None:
            asked, itemsize = self.per_block, self.tokens.itemsize
            self.packed, self.per_block = packed_in_blocks(tuple(self.documents), window, asked, itemsize, how)
            self.is_sparse = self.per_block < asked
            self.samples = len(self.packed)
        self._epoch = None

    def in_blocks(self, block_bytes):
        """The same windows in blocks of another size."""
        overlap = self.window - self.stride

        def fitting(size):
            return max(1, (size // self.tokens.itemsize - overlap) // self.stride)

        self.per_block = fitting(block_bytes)
        if self.split is None:
            return
        whole = (len(self.tokens) - overlap) // self.stride
        unit = floor_to_power(max(1, min(whole // 1024, fitting(1 << 18))))
        self.per_block = min(unit, floor_to_power(self.per_block))
        units = units_of_part(self.split, whole // unit)
        self.own = [first * unit + i for first in units for i in range(unit)]
        if self.split[1] == 0:
            self.own += range(whole // unit * unit, whole)
        self.samples = len(self.own)

    def parts(self, i):
        """Sample i of the file: its parts as (first token, tokens)."""
        if self.packed is not None:
            return self.packed[i]
        first, end = i * self.stride, i * self.stride + self.window
        if self.documents is None:
            return [(first, self.window)]
        at, found = bisect_right(self.documents, first, key=lambda document: document[0]) - 1, []
        while at < len(self.documents) and self.documents[at][0] < end:
            begin = max(first, self.documents[at][0])
            found.append((begin, min(end, sum(self.documents[at])) - begin))
            at += 1
        return found

    def place(self, own, k):
        """The sample of the file that is the k-th of the dataset, shuffled under the dataset's own key."""
        epoch, i = divmod(k, self.samples)
        if self._epoch is None or self._epoch[0] != (own, epoch):
            self._epoch = (own, epoch), self._groups(own, epoch)
        at = 0
        for g, blocks in enumerate(self._epoch[1]):
            size = sum(length for _, length in blocks)
            if i < at + size:
                j = permute(key(own, 3, epoch, g), size, i - at)
                for first, length in blocks:
                    if j < length:
                        return first + j
                    j -= length
            at += size
        raise AssertionError("an epoch has every sample")

    def _groups(self, own, epoch):
        """The blocks of an epoch in its order, as (first sample, samples), cut into groups."""
        full, short = divmod(self.samples, self.per_block)
        order = [permute(key(own, 1, epoch), full, x) for x in range(full)]
        if short > 0:
            order.insert(scale(mix(key(own, 2, epoch)), full + 1), full)
        blocks = [(block * self.per_block, short if block == full else self.per_block) for block in order]
        return [blocks[g : g + self.group_blocks] for g in range(0, len(blocks), self.group_blocks)]


class Reference:
    """The batches of a plan.

    `files` is a list of (dtype, path) in the order of the blend; without a blend several files are sorted by path. The
    dtype of a `.npy` file is its own. `seed` stands for the word in the plan, and `table` holds the ids of `remap`.
    `action` is what the module of `wasm` does, as a function of the numbers of tokens and of the tokens.
    """

    def __init__(self, plan, files, seed=0, table=None, action=None):
        actions = parse(plan)
        options = {name: dict(arguments) for name, arguments in actions.items()}

        def number(action, name, default):
            given = options.get(action, {})
            first = name in ("tokens", "samples", "seed", "bits")
            text = given.get(name, given.get(None, default) if first else default)
            return seed if text == "seed" else int(text)

        overlap = number("window", "overlap", 0)
        self.shuffle, blocks, block_bytes = None, None, 1 << 20
        if "shuffle" in actions:
            self.shuffle = number("shuffle", "seed", None)
            blocks, block = options["shuffle"].get("blocks"), options["shuffle"].get("block", "1MiB")
            block_bytes = 1 << 18 if blocks is None else size(block)
        self.window = number("window", "tokens", None)
        self.samples = number("batch", "samples", 32)
        starts = [0, *(int(start) for _, start in actions.get("phases", ()))]
        weights = None
        if "blend" in actions:
            given = [weights.split(":") for _, weights in actions["blend"]]
            given = [weights * len(starts) if len(weights) == 1 else weights for weights in given]
            weights = integers(list(zip(*given, strict=True)))
        self.ignore = options.get("pairs", {}).get("ignore")
        self.targets = [None] * len(files)
        if options.get("pairs", {}).get("labels") == "targets":
            self.targets = [targets_beside(path) for _, path in files]
        self.positions = "positions" in actions
        self.pad, how = options.get("pack", {}).get("pad", "0"), options.get("pack", {}).get(None)
        split, documents = None, [None] * len(files)
        if "split" in actions:
            given = options["split"]
            shares = (given.get("shares", given.get(None)).split(",") + ["0", "0"])[:3]
            part = ("train", "valid", "test").index(given["part"])
            split_seed = given.get("seed", "0")
            split = (integers([shares])[0], part, seed if split_seed == "seed" else int(split_seed))
        if self.ignore is not None or self.positions or how is not None:
            drawn = [weights is None or any(phase[d] for phase in weights) for d in range(len(files))]
            documents = self.documents(files, options, drawn)
        if how is not None and split is not None:
            documents = [self.of_part(split, path, left) for (_, path), left in zip(files, documents, strict=True)]
            split = None
        self.datasets = [
            Dataset(dtype, path, self.window, overlap, block_bytes, left, how, split)
            for (dtype, path), left in zip(files, documents, strict=True)
        ]
        if weights is None:
            weights = [proportional([dataset.samples for dataset in self.datasets])]
        if len(files) != len(weights[0]) or len(weights) != len(starts):
            raise ValueError(f"{len(files)} files for {len(weights[0])} datasets in {len(weights)} phases")
        self.blend = Phases(starts, [blend_of(phase) for phase in weights])
        many = how is None and self.blend.has_many()
        for d, dataset in enumerate(self.datasets):
            if blocks is not None:
                dataset.group_blocks = int(blocks)
                continue
            if many:
                block_bytes = self.blend.block_bytes(d)
                dataset.in_blocks(block_bytes)
            unit = 1 << 20 if dataset.is_sparse else block_bytes
            sample_bytes = self.window * dataset.tokens.itemsize
            dataset.group_blocks = self.blend.group_blocks(d, unit, sample_bytes, 1 if many else 2)
        self.table = None if table is None else numpy.asarray(table, "<u4")
        self.action = action
        self.narrow = options.get("narrow")
        self.bits = number("bitpack", "bits", None) if "bitpack" in actions else None
        self.widen = options["widen"][None] if "widen" in actions else None
        self.quantize = options.get("quantize")
        self.pairs = "pairs" in actions

    def documents(self, files, options, drawn):
        """The documents that are left of each file, those of datasets that are `drawn` from."""
        found = [documents_beside(path) if used else [] for (_, path), used in zip(files, drawn, strict=True)]
        keep, listed, dedup = None, (), None
        if "filter" in options:
            keep = "keep" in options["filter"]
            listed = hashes_in(options["filter"]["keep" if keep else None])
        if "dedup" in options:
            dedup = "across" if None in options["dedup"] else "within"
        if keep is None and dedup is None:
            return found
        hashed = []
        for (dtype, path), documents in zip(files, found, strict=True):
            ids = Dataset(dtype, path, 1, 0, 1).tokens
            hashed.append([((at, n), hash_of(ids[at : at + n].tolist())) for at, n in documents])
        return select(hashed, listed, keep, dedup)

    def of_part(self, split, path, left):
        """Of the documents that are left of a file, those of the part: by their numbers in the file."""
        found = documents_beside(path)
        own = {found[unit] for unit in units_of_part(split, len(found))}
        return [document for document in left if document in own]

    def place(self, n):
        """Global sample n as (dataset, sample of its file)."""
        d, k = self.blend.draw(n)
        dataset = self.datasets[d]
        if self.shuffle is None:
            i = k % dataset.samples
        else:
            i = dataset.place(key(self.shuffle, d), k)
        return d, i if dataset.own is None else dataset.own[i]

    def batch(self, b):
        """Batch b: an array [samples, tokens], or [rows, samples, tokens] where a sample has several."""
        samples = [self.rows(*self.place(n)) for n in range(b * self.samples, (b + 1) * self.samples)]
        rows = [numpy.stack(row) for row in zip(*samples, strict=True)]
        return numpy.stack(rows) if len(rows) > 1 else rows[0]

    def rows(self, d, i):
        """The rows of sample i of the file of dataset d."""
        dataset = self.datasets[d]
        parts = dataset.parts(i)
        pieces = [self.delivered(dataset.tokens[first : first + tokens], dataset.dtype, first) for first, tokens in parts]
        row = numpy.concatenate(pieces)
        padding = self.window - sum(tokens for _, tokens in parts)
        if padding > 0:
            row = numpy.concatenate([row, numpy.full(padding, int(self.pad), row.dtype)])
        places = [place for _, tokens in parts for place in range(tokens)] + [0] * padding
        numbers = [number for number, (_, tokens) in enumerate(parts, 1) for _ in range(tokens)] + [0] * padding
        rows = [row]
        if self.pairs:
            rows = [row[:-1], row[1:].copy()]
            if self.ignore is not None:
                before, own = numpy.array(numbers[:-1]), numpy.array(numbers[1:])
                rows[1][(own != before) | (own == 0)] = int(self.ignore)
            if self.targets[d] is not None:
                spoken = [self.targets[d][first : first + tokens] for first, tokens in parts]
                spoken = numpy.concatenate([*spoken, numpy.ones(max(padding, 0), bool)])
                rows[1][~spoken[1:]] = int(self.ignore)
        if self.positions:
            rows += [numpy.array(extra[: len(rows[0])], row.dtype) for extra in (places, numbers)]
        return rows

    @property
    def dtype(self):
        """Type of the delivered values, where they are no tokens."""
        return self.datasets[0].dtype if self.quantize is None else self.quantize.get("deliver", self.datasets[0].dtype)

    def delivered(self, row, dtype, start):
        """The tokens of a sample, from number `start` of a file of this type on, as they are delivered."""
        if self.quantize is not None:
            quant = self.quantize.get("to", self.quantize.get(None))
            codes, scales = quantize(as_values(row, dtype), quant)
            deliver = self.quantize.get("deliver", dtype)
            if deliver == "quantized":
                return numpy.array(codes + scales, "u1")
            return as_stored(dequantize(codes, scales, quant), deliver)
        if self.table is not None:
            if (row < 0).any() or (row >= len(self.table)).any():
                raise OverflowError("a token has no entry in the table")
            row = self.table[row].astype(row.dtype)
        if self.action is not None:
            row = self.action(start + numpy.arange(len(row)), row).astype(row.dtype)
        if self.narrow is not None:
            to, overflow = self.narrow.get("to", self.narrow.get(None)), self.narrow.get("overflow", "error")
            # A token that escapes is delivered in a larger type.
            limits = numpy.iinfo(TYPES["u32" if overflow == "escape" else to])
            if isinstance(overflow, tuple):
                fits = (row >= limits.min) & (row <= limits.max)
                row = numpy.where(fits, row, row.dtype.type(int(overflow[1])))
            row = exactly(row, limits.dtype)
        if self.bits is not None and ((row < 0) | (row >= 1 << self.bits)).any():
            raise OverflowError(f"a token does not fit {self.bits} bits")
        return row if self.widen is None else exactly(row, TYPES[self.widen])


def exactly(tokens, dtype):
    """Tokens in another type, which must have room for them."""
    converted = tokens.astype(dtype)
    if not numpy.array_equal(converted, tokens):
        raise OverflowError(f"a token does not fit {dtype}")
    return converted
