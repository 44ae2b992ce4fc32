"""A second implementation of tables of documents, their hashes and their selection, written from docs/formats.md and
docs/plan.md: files and lists in, documents out. Nothing here may import dquant.
"""

import struct

BITS = (1 << 64) - 1


def words(data, at, count, size="Q"):
    """Numbers of a little-endian array."""
    return struct.unpack_from(f"<{count}{size}", data, at)


def documents_of(index):
    """First token and tokens of each document that the bytes of an index describe."""
    if index[:9] != b"MMIDIDX\0\0" or words(index, 9, 1) != (1,):
        raise ValueError("no index")
    sequences, entries = words(index, 18, 2)
    lengths = words(index, 34, sequences, "i")
    ends = list(words(index, 34 + 12 * sequences, entries))[1:]
    if (ends[-1] if ends else 0) != sequences:
        raise ValueError("sequences that belong to no document")
    found, sequence, token = [], 0, 0
    for end in ends:
        tokens = sum(lengths[sequence:end])
        found.append((token, tokens))
        sequence, token = end, token + tokens
    return found


def targets_of(index):
    """Whether each token is a target, of an index whose sequences take turns in each document."""
    sequences, entries = words(index, 18, 2)
    lengths = words(index, 34, sequences, "i")
    ends = words(index, 34 + 12 * sequences, entries)
    mask = []
    for start, end in zip(ends, ends[1:]):
        for turn, tokens in enumerate(lengths[start:end]):
            mask += [turn % 2 == 1] * tokens
    return mask


def fingerprint_of(documents):
    """Of the lengths of all documents of a file."""
    return xxh3(struct.pack(f"<{len(documents)}Q", *(tokens for _, tokens in documents))) or 1


def hash_of(ids):
    """Of a document with these ids."""
    return xxh3(struct.pack(f"<{len(ids)}q", *ids))


def select(datasets, listed=(), keep=None, dedup=None):
    """What is left of datasets, each a list of (document, hash): `keep` is whether a filter keeps what is `listed`, or
    None without a filter; `dedup` is None, "within" or "across"."""
    seen, left = set(), []
    for dataset in datasets:
        if dedup == "within":
            seen = set()
        kept = []
        for document, found in dataset:
            if keep is not None and (found in listed) != keep:
                continue
            if dedup and found in seen:
                continue
            seen.add(found)
            kept.append(document)
        left.append(kept)
    return left


# XXH3, 64 bits, without seed, as its specification has it.

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def secret(at):
    return int.from_bytes(SECRET[at : at + 8], "little")


def fold(a, b):
    product = a * b
    return (product & BITS) ^ (product >> 64)


def avalanche(h):
    h ^= h >> 37
    h = h * 0x165667919E3779F9 & BITS
    return h ^ h >> 32


def avalanche_short(h):
    h ^= h >> 33
    h = h * P64[1] & BITS
    h ^= h >> 29
    h = h * P64[2] & BITS
    return h ^ h >> 32


def xxh3(data):
    """The hash of bytes whose number is a multiple of 8, as those of ids are."""
    n = len(data)
    assert n % 8 == 0
    if n == 0:
        return avalanche_short(secret(56) ^ secret(64))
    if n == 8:
        first, last = words(data, 0, 2, "I")
        h = (last + (first << 32)) & BITS ^ secret(8) ^ secret(16)
        h ^= (h << 49 & BITS | h >> 15) ^ (h << 24 & BITS | h >> 40)
        h = h * 0x9FB21C651E98DF25 & BITS
        h ^= (h >> 35) + n
        h = h * 0x9FB21C651E98DF25 & BITS
        return h ^ h >> 28
    if n == 16:
        low, high = words(data, 0, 2)
        low ^= secret(24) ^ secret(32)
        high ^= secret(40) ^ secret(48)
        return avalanche((n + int.from_bytes(low.to_bytes(8, "big"), "little") + high + fold(low, high)) & BITS)
    if n <= 240:
        return middle(data, n)
    return long(data, n)


def mix16(data, at, secret_at):
    low, high = words(data, at, 2)
    return fold(low ^ secret(secret_at), high ^ secret(secret_at + 8))


def middle(data, n):
    total = n * P64[0]
    if n <= 128:
        for i in reversed(range((n - 1) // 32 + 1)):
            total += mix16(data, 16 * i, 32 * i) + mix16(data, n - 16 * (i + 1), 32 * i + 16)
        return avalanche(total & BITS)
    for i in range(8):
        total += mix16(data, 16 * i, 16 * i)
    total = avalanche(total & BITS)
    for i in range(8, n // 16):
        total += mix16(data, 16 * i, 16 * (i - 8) + 3)
    return avalanche((total + mix16(data, n - 16, 136 - 17)) & BITS)


def long(data, n):
    sums = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]]

    def add(at, secret_at):
        for i, value in enumerate(words(data, at, 8)):
            key = value ^ secret(secret_at + 8 * i)
            sums[i ^ 1] = (sums[i ^ 1] + value) & BITS
            sums[i] = (sums[i] + (key & 0xFFFFFFFF) * (key >> 32)) & BITS

    stripes = (len(SECRET) - 64) // 8
    blocks, at = (n - 1) // (64 * stripes), 0
    for _ in range(blocks):
        for stripe in range(stripes):
            add(at, 8 * stripe)
            at += 64
        for i in range(8):
            sums[i] = ((sums[i] ^ sums[i] >> 47) ^ secret(len(SECRET) - 64 + 8 * i)) * P32[0] & BITS
    for stripe in range((n - 1 - at) // 64):
        add(at + 64 * stripe, 8 * stripe)
    add(n - 64, len(SECRET) - 64 - 7)
    total = n * P64[0]
    for i in range(4):
        total += fold(sums[2 * i] ^ secret(11 + 16 * i), sums[2 * i + 1] ^ secret(11 + 16 * i + 8))
    return avalanche(total & BITS)
