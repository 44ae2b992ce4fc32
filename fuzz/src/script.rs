//! The input as a script: fixed-size records, so that a fuzzer's edits of one leave the others
//! alone.

/// Bytes of one record.
pub(crate) const RECORD_BYTES: usize = 6;

/// One step: an action, and five bytes of parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// The action.
    pub(crate) verb: u8,
    /// First parameter; by convention the acting side.
    pub(crate) a: u8,
    /// Second parameter.
    pub(crate) b: u8,
    /// Third parameter.
    pub(crate) c: u8,
    /// Fourth parameter.
    pub(crate) d: u8,
    /// Fifth parameter.
    pub(crate) e: u8,
}

impl Record {
    /// The last two parameters as one number.
    pub(crate) fn de(self) -> u16 {
        u16::from_le_bytes([self.d, self.e])
    }

    /// Every parameter as one number, for values that may be anything.
    pub(crate) fn word(self) -> u64 {
        let Record { a, b, c, d, e, .. } = self;
        u64::from_le_bytes([e, d, c, b, a, d, c, e])
    }
}

/// The records of `input`; missing bytes of the last one are zero.
pub(crate) fn records(input: &[u8]) -> impl Iterator<Item = Record> + '_ {
    input.chunks(RECORD_BYTES).map(|chunk| {
        let at = |index: usize| chunk.get(index).copied().unwrap_or(0);
        Record { verb: at(0), a: at(1), b: at(2), c: at(3), d: at(4), e: at(5) }
    })
}

/// The element selected by `byte`.
pub(crate) fn pick<T: Copy, const N: usize>(byte: u8, from: &[T; N]) -> T {
    from[usize::from(byte) % N]
}

/// Splits `n` bytes off the front, fewer at the end.
pub(crate) fn take<'a>(input: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, rest) = input.split_at(n.min(input.len()));
    *input = rest;
    head
}
