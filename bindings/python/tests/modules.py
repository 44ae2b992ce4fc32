"""WebAssembly modules for the tests, without a compiler."""


def assembled(step):
    """A WebAssembly module, byte by byte: adds 1 to every token whose number is a multiple of `step`, below 64."""

    def number(value):
        """LEB128; of one byte where that suffices for a signed value, too."""
        low, rest = value & 127, value >> 7
        return bytes([low | 128]) + number(rest) if rest or low & 64 else bytes([low])

    def block(*parts):
        content = b"".join(parts)
        return number(len(content)) + content

    def vector(*items):
        return number(len(items)) + b"".join(items)

    i32, i64, get, put, const = b"\x7f", b"\x7e", b"\x20", b"\x21", b"\x41"
    buffer, count, first, i, at = (bytes([local]) for local in range(5))
    add, shift = b"\x6a", b"\x74"
    body = (
        b"\x03\x40"  # loop
        + get + buffer + get + i + const + b"\x02" + shift + add + put + at
        + get + first + get + i + b"\xad\x7c\x42" + number(step) + b"\x82\x50"  # (first + i) % step == 0
        + b"\x04\x40"  # if
        + get + at + get + at + b"\x28\x02\x00" + const + b"\x01" + add + b"\x36\x02\x00"  # *at += 1
        + b"\x0b"
        + get + i + const + b"\x01" + add + b"\x22" + i + get + count + b"\x49\x0d\x00"  # ++i < count: again
        + b"\x0b" + const + b"\x00\x0b"
    )
    types = vector(b"\x60" + vector(i32) + vector(i32), b"\x60" + vector(i32, i32, i64) + vector(i32))
    names = [(b"memory", b"\x02\x00"), (b"dquant_buffer", b"\x00\x00"), (b"dquant_map_u32", b"\x00\x01")]
    exports = vector(*(block(name) + what for name, what in names))
    codes = vector(
        block(vector(), const, number(65536), b"\x0b"),
        block(vector(b"\x02" + i32), body),
    )
    sections = {1: types, 3: vector(b"\x00", b"\x01"), 5: vector(b"\x00" + number(20)), 7: exports, 10: codes}
    return b"\0asm\1\0\0\0" + b"".join(bytes([name]) + block(content) for name, content in sections.items())
