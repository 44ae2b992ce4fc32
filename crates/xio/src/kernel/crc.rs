//! CRC32C (Castagnoli) without special instructions: eight tables, eight bytes a step.
//!
//! The checksum of iSCSI, NVMe/TCP and ext4: reflected polynomial 0x82F63B78, all ones in and out.
//! A CRC instruction is ten times faster; a driver for a processor with one passes it in
//! [`Kernels::crc32c`](super::Kernels). This one is the default and the reference for the tests.

/// The polynomial 0x1EDC6F41 with its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `TABLES[k][b]` is the effect of byte `b` when `k` more bytes follow it in the step.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut k = 1;
    while k < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[k - 1][byte];
            tables[k][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        k += 1;
    }
    tables
}

/// Continues a CRC32C: `crc` is the checksum of the bytes so far, 0 for none, and the result that
/// of those followed by `bytes`.
pub fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    let mut state = !crc;
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let mixed = u64::from_le_bytes(*word) ^ u64::from(state);
        state = mixed
            .to_le_bytes()
            .into_iter()
            .zip(TABLES.iter().rev())
            .fold(0, |sum, (byte, table)| sum ^ table[usize::from(byte)]);
    }
    for byte in rest {
        state = state >> 8 ^ TABLES[0][usize::from(state as u8 ^ byte)];
    }
    !state
}
