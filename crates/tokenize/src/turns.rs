//! The turns of a conversation in tokens. How text is rendered and encoded does not belong here.

use formats::manifest::MAX_TURNS;

use super::index::LONGEST;

/// How the tokens of a conversation are divided: tokens that are no targets, of which there may be
/// none, then targets, and so on.
#[derive(Debug, PartialEq)]
pub(super) struct Turns {
    /// Bytes of the rendered text.
    pub(super) text_bytes: u64,
    /// Tokens of each turn.
    pub(super) lengths: Vec<u32>,
    /// How much each token weighs in the loss; empty where that is not kept.
    pub(super) weights: Vec<f32>,
}

impl Turns {
    /// The turns of tokens that are targets or not.
    ///
    /// # Errors
    /// When a turn is too long for a sequence, and when there are too many.
    #[cfg_attr(not(feature = "hugging-face"), expect(dead_code))]
    pub(super) fn new(text_bytes: u64, targets: &[bool]) -> Result<Turns, String> {
        let mut lengths = vec![0];
        if targets.first() == Some(&true) {
            lengths.push(0);
        }
        let mut turns = Turns { text_bytes, lengths, weights: Vec::new() };
        let mut last = targets.first();
        for target in targets {
            if last != Some(target) {
                turns.lengths.push(0);
            }
            if turns.lengths.len() as u64 > MAX_TURNS {
                return Err(format!("it takes turns more than {MAX_TURNS} times"));
            }
            last = Some(target);
            turns.extend()?;
        }
        Ok(turns)
    }

    /// Adds one token to the last turn.
    pub(super) fn extend(&mut self) -> Result<(), String> {
        let last = self.lengths.last_mut().filter(|last| u64::from(**last) < LONGEST);
        let last = last.ok_or("a turn is longer than 2^31 - 1 tokens")?;
        *last += 1;
        Ok(())
    }

    /// Whether there are no tokens.
    pub(super) fn is_empty(&self) -> bool {
        self.lengths == [0]
    }

    /// Tokens that a model is trained to say.
    pub(super) fn targets(&self) -> u64 {
        self.lengths.iter().skip(1).step_by(2).map(|length| u64::from(*length)).sum()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn turns_begin_with_tokens_that_are_no_targets() {
        for (targets, lengths, said) in [
            ("", &[0][..], 0),
            ("...", &[3], 0),
            ("xx", &[0, 2], 2),
            ("..x.xx", &[2, 1, 1, 2], 3),
            ("x..x.", &[0, 1, 2, 1, 1], 2),
        ] {
            let mask: Vec<bool> = targets.bytes().map(|c| c == b'x').collect();
            let turns = Turns::new(7, &mask).unwrap();
            assert_eq!((&turns.lengths[..], turns.targets()), (lengths, said), "{targets}");
        }
        let lengths = vec![5, LONGEST as u32];
        let mut full = Turns { text_bytes: 0, lengths, weights: Vec::new() };
        assert!(full.extend().is_err());
    }
}
