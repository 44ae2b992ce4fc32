//! The bytes of a message, and their check.
//!
//! A message is cut into blocks of 4 KiB. Each begins with eight bytes that no other block of any
//! message between the two ranks has, as far as eight bytes can tell; the rest is a pattern of the
//! two ranks. So a block that is lost, repeated, misplaced, or of another message is noticed, at
//! the cost of one comparison of memory.

/// Bytes of a block.
const BLOCK: usize = 4096;

/// Of these, at its beginning, the stamp.
const STAMP: usize = 8;

/// Messages from one rank to another.
#[derive(Clone, Debug)]
pub(super) struct Content {
    block: [u8; BLOCK],
    seed: u64,
}

impl Content {
    pub(super) fn new(from: u32, to: u32) -> Content {
        let seed = mixed(u64::from(from) << 32 | u64::from(to));
        let mut block = [0; BLOCK];
        for (number, word) in (0..).zip(block.chunks_exact_mut(8)) {
            word.copy_from_slice(&mixed(seed.wrapping_add(number)).to_le_bytes());
        }
        Content { block, seed }
    }

    fn stamp(&self, message: u64, block: usize) -> [u8; STAMP] {
        mixed(self.seed ^ mixed(message).wrapping_add(block as u64)).to_le_bytes()
    }

    /// Fills a buffer with message 0.
    pub(super) fn fill(&self, buffer: &mut [u8]) {
        for part in buffer.chunks_mut(BLOCK) {
            part.copy_from_slice(&self.block[..part.len()]);
        }
        self.number(buffer, 0);
    }

    /// Makes a buffer that was filled once another message.
    pub(super) fn number(&self, buffer: &mut [u8], message: u64) {
        for (at, part) in buffer.chunks_mut(BLOCK).enumerate() {
            let len = part.len().min(STAMP);
            part[..len].copy_from_slice(&self.stamp(message, at)[..len]);
        }
    }

    /// Whether a buffer holds a message.
    pub(super) fn is_in(&self, buffer: &[u8], message: u64) -> bool {
        buffer.chunks(BLOCK).enumerate().all(|(at, part)| {
            let len = part.len().min(STAMP);
            part[..len] == self.stamp(message, at)[..len]
                && part[len..] == self.block[len..part.len()]
        })
    }
}

/// The finalizer of MurmurHash3: every bit of the result depends on every bit of the number.
const fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let number = (number ^ number >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    number ^ number >> 33
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_another_message_and_a_misplaced_block_are_noticed() {
        let content = Content::new(1, 2);
        for len in [1, 7, 8, 9, BLOCK, 3 * BLOCK + 5] {
            let mut buffer = vec![0; len];
            content.fill(&mut buffer);
            assert!(content.is_in(&buffer, 0), "{len}");
            content.number(&mut buffer, 7);
            assert!(content.is_in(&buffer, 7) && !content.is_in(&buffer, 8), "{len}");
            for at in [0, len / 2, len - 1] {
                buffer[at] ^= 1;
                assert!(!content.is_in(&buffer, 7), "{len}: byte {at}");
                buffer[at] ^= 1;
            }
            assert!(len < BLOCK || !Content::new(2, 1).is_in(&buffer, 7), "{len}: the other way");
        }
        let mut buffer = vec![0; 2 * BLOCK];
        content.fill(&mut buffer);
        let (first, second) = buffer.split_at_mut(BLOCK);
        first.swap_with_slice(second);
        assert!(!content.is_in(&buffer, 0));
    }
}
