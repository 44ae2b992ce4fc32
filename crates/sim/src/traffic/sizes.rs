//! Published distributions of flow sizes.
//!
//! A distribution is a table of sizes and of the share of flows that are not larger, with straight
//! lines between its rows, as the traffic generator published with HPCC (Li et al., SIGCOMM 2019)
//! reads them.

use crate::chance::Chance;

/// Rows of size in bytes, and share of flows up to it in 1/10,000. The first share is 0, the last
/// 10,000.
type Table = &'static [(u64, u64)];

const WHOLE: u64 = 10_000;

/// Web search (Alizadeh et al., SIGCOMM 2010), as published with HPCC.
const WEB_SEARCH: Table = &[
    (1, 0),
    (10_000, 1_500),
    (20_000, 2_000),
    (30_000, 3_000),
    (50_000, 4_000),
    (80_000, 5_300),
    (200_000, 6_000),
    (1_000_000, 7_000),
    (2_000_000, 8_000),
    (5_000_000, 9_000),
    (10_000_000, 9_700),
    (30_000_000, WHOLE),
];

/// Hadoop at Facebook (Roy et al., SIGCOMM 2015), as published with HPCC.
const HADOOP: Table = &[
    (1, 0),
    (100, 100),
    (200, 200),
    (300, 500),
    (350, 1_500),
    (400, 2_000),
    (500, 3_000),
    (600, 4_000),
    (700, 5_000),
    (1_000, 6_000),
    (2_000, 6_700),
    (7_000, 7_000),
    (30_000, 7_200),
    (50_000, 8_200),
    (80_000, 8_700),
    (120_000, 9_000),
    (300_000, 9_500),
    (1_000_000, 9_750),
    (2_000_000, 9_900),
    (10_000_000, WHOLE),
];

/// Storage at Alibaba in 2019, published with HPCC.
const STORAGE: Table = &[
    (1, 0),
    (4_000, 2_293),
    (8_000, 6_921),
    (16_000, 8_061),
    (32_000, 9_047),
    (64_000, 9_353),
    (128_000, 9_677),
    (256_000, 9_753),
    (2_000_000, WHOLE),
];

/// How large flows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowSizes {
    /// All the same, in bytes.
    Fixed(u64),
    /// Web search: half of the flows are below 80 kB, and almost all bytes are in the others.
    WebSearch,
    /// Hadoop: half of the flows are below 700 bytes.
    Hadoop,
    /// Storage: most flows are 4 to 16 kB, none is above 2 MB.
    Storage,
}

impl FlowSizes {
    /// The names of [`named`](FlowSizes::named).
    pub const NAMES: [&str; 3] = ["web-search", "hadoop", "storage"];

    /// The published distribution with this name.
    pub fn named(name: &str) -> Option<FlowSizes> {
        match name {
            "web-search" => Some(FlowSizes::WebSearch),
            "hadoop" => Some(FlowSizes::Hadoop),
            "storage" => Some(FlowSizes::Storage),
            _ => None,
        }
    }

    fn table(self) -> Result<Table, u64> {
        match self {
            FlowSizes::Fixed(bytes) => Err(bytes),
            FlowSizes::WebSearch => Ok(WEB_SEARCH),
            FlowSizes::Hadoop => Ok(HADOOP),
            FlowSizes::Storage => Ok(STORAGE),
        }
    }

    /// A size at random, in bytes.
    pub fn draw(self, chance: &mut Chance) -> u64 {
        // Fine enough that every byte count of the widest row can be drawn.
        const FINE: u64 = 1 << 20;
        let table = match self.table() {
            Ok(table) => table,
            Err(fixed) => return fixed,
        };
        let point = chance.below(WHOLE * FINE);
        let row = table.windows(2).find(|row| point < row[1].1 * FINE);
        let Some(&[(low, from), (high, to)]) = row else {
            return table[table.len() - 1].0;
        };
        let within = u128::from(point - from * FINE) * u128::from(high - low);
        low + (within / u128::from((to - from) * FINE)) as u64
    }

    /// The mean size in bytes.
    pub fn mean_bytes(self) -> u64 {
        let table = match self.table() {
            Ok(table) => table,
            Err(fixed) => return fixed,
        };
        let twice = table.windows(2).map(|row| (row[1].1 - row[0].1) * (row[0].0 + row[1].0));
        twice.sum::<u64>() / (2 * WHOLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_tables() {
        let mut chance = Chance::new(3);
        for name in FlowSizes::NAMES {
            let sizes = FlowSizes::named(name).unwrap();
            let table = sizes.table().unwrap();
            let draws: std::vec::Vec<u64> = (0..200_000).map(|_| sizes.draw(&mut chance)).collect();
            for &(size, share) in table {
                let below = draws.iter().filter(|&&draw| draw <= size).count() as u64;
                let share = share * draws.len() as u64 / WHOLE;
                assert!(below.abs_diff(share) < 1_000, "{name}: {size}: {below} {share}");
            }
            let mean = draws.iter().sum::<u64>() / draws.len() as u64;
            let off = mean.abs_diff(sizes.mean_bytes()) * 100 / mean;
            assert!(off <= 2, "{name}: {mean} {}", sizes.mean_bytes());
        }
    }

    #[test]
    fn the_mean_of_web_search_is_known() {
        // Sum of the areas of its rows by hand.
        assert_eq!(FlowSizes::WebSearch.mean_bytes(), 1_711_250);
    }
}
