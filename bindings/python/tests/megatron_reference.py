"""A second implementation of the order of Megatron-core, written from docs/megatron.md alone.

Plain integers, floats and lists; no numpy and nothing of dquant. It is slow, and must not be made fast at the price of
being less like the page.
"""

import math


class Random:
    """MT19937, and what is drawn from it."""

    def __init__(self, seed):
        self.words, self.next = [seed], 0
        for i in range(1, 624):
            before = self.words[i - 1]
            self.words.append((1812433253 * (before ^ (before >> 30)) + i) % 2**32)

    def number(self):
        if self.next % 624 == 0:
            for i in range(624):
                y = (self.words[i] & 0x80000000) | (self.words[(i + 1) % 624] & 0x7FFFFFFF)
                self.words[i] = self.words[(i + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y % 2 else 0)
        v = self.words[self.next % 624]
        self.next += 1
        v ^= v >> 11
        v ^= (v << 7) & 0x9D2C5680
        v ^= (v << 15) & 0xEFC60000
        return v ^ (v >> 18)

    def below(self, m):
        mask = 2**m.bit_length() - 1
        while True:
            v = self.number() & mask
            if v <= m:
                return v

    def shuffle(self, values):
        for i in range(len(values) - 1, 0, -1):
            j = self.below(i)
            values[i], values[j] = values[j], values[i]


def from_left(values):
    total = 0.0
    for value in values:
        total += value
    return total


def summed(values):
    if len(values) < 8:
        return from_left(values)
    if len(values) <= 128:
        whole = len(values) // 8 * 8
        r = []
        for j in range(8):
            column = values[j]
            for value in values[j + 8:whole:8]:
                column += value
            r.append(column)
        total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
        for value in values[whole:]:
            total += value
        return total
    half = len(values) // 2 - (len(values) // 2) % 8
    return summed(values[:half]) + summed(values[half:])


def normal(values):
    total = summed(values)
    return [value / total for value in values]


def split(numbers, documents, part):
    """The documents of a part."""
    numbers = [float(number) for number in numbers] + [0.0] * (3 - len(numbers))
    total = from_left(numbers)
    ends = [0.0]
    for number in numbers:
        ends.append(ends[-1] + number / total)
    return range(round(ends[part] * documents), round(ends[part + 1] * documents))


class Dataset:
    """Samples of the documents in use; `lengths` are those of all documents."""

    def __init__(self, lengths, used, n, seed, L, x):
        T = sum(lengths[document] for document in used)
        count = lambda e: max(0, (e * T - x) // L)
        E = 1 if n is None else max(1, -(-(n * L + x) // T))
        before = count(E - 1)
        apart = E > 1 and n - before < math.floor(0.80 * count(1))
        random = Random(seed)
        order, last = list(used) * (E - apart), list(used) * apart
        random.shuffle(order)
        random.shuffle(last)
        self.order = order + last
        cut = before if apart else count(E)
        first, last = list(range(cut)), list(range(cut, count(E)))
        random.shuffle(first)
        random.shuffle(last)
        self.places = first + last
        self.L, self.x, self.starts, self.lengths = L, x, [], lengths
        start = 0
        for length in lengths:
            self.starts.append(start)
            start += length

    def __len__(self):
        return len(self.places)

    def tokens(self, k):
        """Which tokens of the file the k-th sample has."""
        skip, left = self.places[k] * self.L, self.L + self.x
        for document in self.order:
            length = self.lengths[document]
            if skip < length:
                first = self.starts[document] + skip
                taken = min(left, length - skip)
                yield from range(first, first + taken)
                left -= taken
            skip = max(0, skip - length)
            if left == 0:
                return


def samples(corpora, weights, N, seed, L, x):
    """Yields every sample as (dataset, number in it). `corpora` are pairs of lengths and of the documents in use;
    `weights` are None, or a number for each. The datasets come first, as a list."""
    build = lambda n: [Dataset(lengths, used, n_of, seed, L, x) for (lengths, used), n_of in zip(corpora, n)]
    if weights is None and len(corpora) == 1:
        datasets = build([N])
        yield datasets
        yield from ((0, i) for i in range(len(datasets[0]) if N is None else N))
        return
    left = [math.inf] * len(corpora)
    if weights is not None:
        w = normal([float(weight) for weight in weights])
        datasets = build([math.ceil(math.ceil(N * share) * (1.0 + 0.005)) for share in w])
        u = normal(w)
    else:
        datasets = build([None] * len(corpora))
        sizes = [len(dataset) for dataset in datasets]
        u = normal([float(size) for size in sizes])
        if N is None:
            N, left = sum(sizes), sizes
            u = [size / N for size in sizes]
    yield datasets
    c = [0] * len(u)
    for i in range(N):
        able = [d for d in range(len(u)) if c[d] < left[d]]
        d = max(able, key=lambda d: u[d] * max(i, 1) - c[d])
        yield d, c[d]
        c[d] += 1
