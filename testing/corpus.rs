//! The format of a fuzzing corpus in the repository: one file in which each input follows its
//! length in bytes, a little-endian `u32`. Included by path, because the harnesses and `xtask` do
//! not depend on each other.

/// The inputs of a corpus; `None` when the file is truncated.
pub(crate) fn unpack(mut rest: &[u8]) -> Option<Vec<&[u8]>> {
    let mut inputs = Vec::new();
    while !rest.is_empty() {
        let (length, behind) = rest.split_first_chunk()?;
        let (input, behind) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        inputs.push(input);
        rest = behind;
    }
    Some(inputs)
}
