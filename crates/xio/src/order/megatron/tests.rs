//! What the goldens do not show: refusals, bounds, seeks and the ends of documents.

use super::*;

fn source(lengths: &[u32]) -> Source {
    let documents = Documents::contiguous(lengths.iter().copied()).unwrap();
    Source { documents, part: 0..lengths.len() }
}

fn settings(samples: Option<u64>) -> Settings {
    Settings {
        seed: 1234,
        sequence_tokens: 8,
        extra_token: true,
        samples,
        max_table_bytes: DEFAULT_MAX_TABLE_BYTES,
    }
}

/// Two datasets of many short documents and of few long ones.
fn sources() -> Vec<Source> {
    let short: Vec<u32> = (0..500).map(|document| document % 7).collect();
    Vec::from([source(&short), source(&[300, 1, 0, 77])])
}

#[test]
fn a_cursor_starts_anywhere() {
    let samples = 20_000;
    let order = MegatronOrder::new(sources(), Some(&[3.0, 1.5]), &settings(Some(samples))).unwrap();
    let all: Vec<_> = order.cursor_at(0).collect();
    assert_eq!(all.len() as u64, order.samples());
    for start in [0, 1, 4_095, 4_096, 4_097, 8_192, samples - 1, samples, samples + 1] {
        let rest = all.get(start as usize..).unwrap_or_default();
        assert_eq!(order.cursor_at(start).collect::<Vec<_>>(), rest, "from {start}");
        assert_eq!(order.at(start), rest.first().copied());
    }
}

#[test]
fn every_sample_of_an_epoch_comes_once() {
    let order = MegatronOrder::new(sources(), None, &settings(None)).unwrap();
    let mut drawn: Vec<_> = order.cursor_at(0).collect();
    drawn.sort_unstable();
    let each = (0..2).flat_map(|dataset| {
        (0..order.dataset_samples(dataset).unwrap()).map(move |k| (dataset, k))
    });
    assert_eq!(drawn, each.collect::<Vec<_>>());
    // 1,494 tokens hold 186 samples of 8 tokens and one more; the tokens between are delivered
    // twice.
    let pieces = (0..186).flat_map(|k| order.pieces(0, k));
    let mut tokens: Vec<u64> = pieces.flatten().collect();
    assert_eq!(tokens.len(), 186 * 9);
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 186 * 8 + 1);
    assert_eq!(order.pieces(0, 186).count() + order.pieces(2, 0).count(), 0);
}

#[test]
fn pieces_end_with_their_documents() {
    let order = MegatronOrder::new(sources(), None, &settings(None)).unwrap();
    let documents = &sources()[0].documents;
    for piece in (0..186).flat_map(|k| order.pieces(0, k)) {
        let inside = |document: Range<u64>| {
            document.start <= piece.start && piece.end <= document.end && !piece.is_empty()
        };
        assert!(documents.iter().any(inside), "{piece:?}");
    }
}

#[test]
fn what_megatron_refuses_is_refused() {
    let refusal = |sources: Vec<Source>, weights: Option<&[f64]>, samples| {
        MegatronOrder::new(sources, weights, &settings(samples)).unwrap_err()
    };
    assert_eq!(refusal(Vec::new(), None, None), MegatronError::NoDataset);
    let many = alloc::vec![source(&[100]); MAX_DATASETS + 1];
    assert_eq!(refusal(many, None, None), MegatronError::TooManyDatasets { datasets: 4_097 });
    let count = MegatronError::Count { weights: 1, datasets: 2 };
    assert_eq!(refusal(sources(), Some(&[1.0]), Some(5)), count);
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let refused = refusal(sources(), Some(&[1.0, weight]), Some(5));
        assert_eq!(refused, MegatronError::Weight { dataset: 1 });
    }
    assert_eq!(refusal(sources(), Some(&[1.0, 1.0]), None), MegatronError::NeedsSamples);
    for samples in [0, MAX_SAMPLES + 1] {
        assert_eq!(refusal(sources(), None, Some(samples)), MegatronError::Samples { samples });
    }
    // Nothing to repeat: megatron-core would never return.
    let empty = Vec::from([source(&[0, 0])]);
    assert_eq!(refusal(empty, None, Some(1)), MegatronError::NoTokens { dataset: 0 });
    let short = Vec::from([source(&[100]), source(&[8])]);
    let none = MegatronError::NoSample { dataset: 1, tokens: 8, window: 9 };
    assert_eq!(refusal(short, None, Some(1)), none);
    let few = MegatronError::TooFew { available: 233, samples: 234 };
    assert_eq!(refusal(sources(), None, Some(234)), few);
    let part = Vec::from([Source { part: 1..3, ..source(&[9, 9]) }]);
    let outside = MegatronError::Part { dataset: 0, start: 1, end: 3, documents: 2 };
    assert_eq!(refusal(part, None, None), outside);
    for tokens in [0, MAX_SEQUENCE_TOKENS + 1] {
        let settings = Settings { sequence_tokens: tokens, ..settings(None) };
        let refused = MegatronOrder::new(sources(), None, &settings).unwrap_err();
        assert_eq!(refused, MegatronError::Sequence { tokens });
    }
}

#[test]
fn tables_are_bounded() {
    let order = |samples, max_table_bytes| {
        let settings = Settings { max_table_bytes, ..settings(Some(samples)) };
        MegatronOrder::new(sources(), Some(&[1.0, 1.0]), &settings)
    };
    let needed = order(10_000, u64::MAX).unwrap().table_bytes();
    assert_eq!(order(10_000, needed).unwrap().table_bytes(), needed);
    let refused = MegatronError::Memory { samples: 10_000, limit: needed - 1 };
    assert_eq!(order(10_000, needed - 1).unwrap_err(), refused);
    // One document of one token: more epochs than documents are numbered, and no table is begun.
    let tiny = |tokens| {
        let settings = Settings { sequence_tokens: tokens, ..settings(Some(MAX_SAMPLES)) };
        MegatronOrder::new(Vec::from([source(&[1])]), None, &settings).unwrap_err()
    };
    let limit = DEFAULT_MAX_TABLE_BYTES;
    assert_eq!(tiny(8), MegatronError::Memory { samples: MAX_SAMPLES, limit });
    assert_eq!(tiny(1), MegatronError::Memory { samples: MAX_SAMPLES, limit });
}
