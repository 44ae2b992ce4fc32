//! Whether two descriptions of a dataset, made at different times, are of the same bytes.

use alloc::format;
use alloc::string::String;

/// What decides which bytes a dataset gives. Its name does not: the same file has several, and a
/// copy another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity<'a> {
    /// Type of its tokens.
    pub dtype: &'a str,
    /// Number of its tokens.
    pub tokens: u64,
    /// Offset of the first token in bytes.
    pub data_offset: u64,
    /// Derived from inode, length and time of change of the file.
    pub fingerprint: u64,
    /// Fingerprint of its manifest; 0 without one.
    pub content: u64,
    /// Fingerprint of its documents as the plan takes them; 0 where it does not need them.
    pub documents: u64,
    /// Fingerprint of which of their tokens are targets; 0 where it is not known, or not needed.
    pub targets: u64,
    /// Fingerprints of the file of its loss weights and of their manifest; 0 where it has none, or
    /// they are not needed.
    pub loss_weights: [u64; 2],
}

/// Whether two files, each of a fingerprint and one of its manifest, are the same as far as both
/// manifests tell, or else the same file.
fn are_same(then: [u64; 2], now: [u64; 2]) -> bool {
    let ([file, content], [file_now, content_now]) = (then, now);
    if content != 0 && content_now != 0 { content == content_now } else { file == file_now }
}

impl Identity<'_> {
    /// How the dataset that is there `now` differs from this one. Two manifests decide by their
    /// contents, because every block read is compared with them; without two the files must be the
    /// same. So a manifest may be added or removed, and a dataset with a manifest may be copied.
    pub fn difference(&self, now: &Identity<'_>) -> Option<String> {
        let Identity { dtype, tokens, data_offset, fingerprint, content, documents, .. } = *self;
        if dtype != now.dtype {
            Some(format!("it holds {} tokens now and held {dtype}", now.dtype))
        } else if tokens != now.tokens {
            Some(format!("it has {} tokens now and had {tokens}", now.tokens))
        } else if data_offset != now.data_offset {
            Some(format!("its tokens begin at byte {} now, not {data_offset}", now.data_offset))
        } else if documents != now.documents {
            Some("its index describes other documents now".into())
        } else if self.targets != now.targets {
            Some("its index describes other targets now".into())
        } else if !are_same(self.loss_weights, now.loss_weights) {
            Some("it has other loss weights now".into())
        } else if content != 0 && now.content != 0 {
            let differs = content != now.content;
            differs.then(|| "its manifest describes other contents now".into())
        } else if fingerprint != now.fingerprint {
            Some(match content != now.content {
                true => {
                    "it was written or replaced, and had a manifest at one of the two times only"
                        .into()
                }
                false => "it was written or replaced: inode or time of change differ".into(),
            })
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_decide_where_both_times_have_a_manifest_and_the_file_otherwise() {
        let then = Identity {
            dtype: "u16",
            tokens: 7,
            data_offset: 0,
            fingerprint: 5,
            content: 0,
            documents: 0,
            targets: 0,
            loss_weights: [0, 0],
        };
        let with = |fingerprint, content| Identity { fingerprint, content, ..then };
        assert_eq!(then.difference(&then), None);
        // A manifest was added; it was there and is gone; the dataset was copied with its manifest.
        assert_eq!(then.difference(&with(5, 9)), None);
        assert_eq!(with(5, 9).difference(&then), None);
        assert_eq!(with(5, 9).difference(&with(6, 9)), None);
        let says = |a: Identity<'_>, b: Identity<'_>, what: &str| {
            let difference = a.difference(&b).unwrap_or_default();
            assert!(difference.contains(what), "{what:?} is not in {difference:?}");
        };
        says(with(5, 9), with(5, 8), "manifest describes other contents");
        says(then, with(6, 0), "written or replaced: inode");
        says(then, with(6, 9), "at one of the two times only");
        says(then, Identity { tokens: 8, ..then }, "8 tokens now and had 7");
        says(then, Identity { dtype: "u32", ..then }, "u32 tokens now and held u16");
        says(then, Identity { data_offset: 8, ..then }, "byte 8 now");
        // Whatever the manifests say: the index is another file.
        let documents = |documents| Identity { documents, ..with(5, 9) };
        assert_eq!(documents(3).difference(&documents(3)), None);
        says(documents(3), documents(4), "other documents");
        says(documents(3), Identity { targets: 1, ..documents(3) }, "other targets");
        let weights = |loss_weights| Identity { loss_weights, ..documents(3) };
        for (then, now) in [([0, 0], [1, 0]), ([1, 0], [2, 7]), ([1, 7], [1, 8]), ([1, 7], [0, 0])]
        {
            says(weights(then), weights(now), "other loss weights");
        }
        for (then, now) in [([1, 7], [2, 7]), ([1, 0], [1, 7]), ([1, 7], [1, 0])] {
            assert_eq!(weights(then).difference(&weights(now)), None);
        }
    }
}
