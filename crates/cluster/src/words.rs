//! Counts with their nouns and rates with their units, for people.

use std::fmt::Display;

/// A count of something with a regular plural: "1 job", "2 jobs", "0 switches".
pub fn counted(count: impl TryInto<u64> + Display + Copy, noun: &str) -> String {
    let is_one = count.try_into().is_ok_and(|count| count == 1);
    let ending = match noun.ends_with("ch") {
        _ if is_one => "",
        true => "es",
        false => "s",
    };
    format!("{count} {noun}{ending}")
}

/// A rate for people.
pub fn rate(bps: u64) -> String {
    match bps {
        0..1_000_000 => format!("{} kbit/s", bps / 1000),
        1_000_000..1_000_000_000 => format!("{:.1} Mbit/s", bps as f64 / 1e6),
        _ => format!("{:.2} Gbit/s", bps as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn only_one_is_singular() {
        let words = [counted(0, "job"), counted(1_u32, "job"), counted(21_usize, "switch")];
        assert_eq!(words, ["0 jobs", "1 job", "21 switches"]);
        assert_eq!(counted(1_u64, "switch"), "1 switch");
    }
}
