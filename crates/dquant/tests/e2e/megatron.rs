//! Streams in the order of Megatron-core: over the corpora of its goldens, at their ends, and what
//! is refused.

use std::collections::BTreeMap;
use std::fs;

use xio::documents::Documents;
use xio::order::megatron::MegatronOrder;
use xio::plan::Plan;

use super::corpus::{Corpus, assert_same, tokens};
use super::documents::{U16, write_index};
use super::harness::{Cat, World};

const GOLDEN: &str = include_str!("../../../xio/tests/data/megatron.txt");

const I32: (u8, i64) = (4, 4);

/// The corpora of the goldens, in which token `i` has the value `i`, below the folder that is
/// served.
fn write_corpora(world: &World) -> BTreeMap<&'static str, Documents> {
    let corpora = GOLDEN.lines().filter_map(|line| line.strip_prefix("corpus ")).map(|line| {
        let (name, lengths) = line.split_once(' ').expect("a name and lengths");
        let lengths: Vec<u32> =
            lengths.split(' ').map(|length| length.parse().expect("a number")).collect();
        let tokens: u32 = lengths.iter().sum();
        let bytes: Vec<u8> = (0..tokens).flat_map(u32::to_le_bytes).collect();
        fs::write(world.data(&format!("{name}.bin")), bytes).expect("the folder is writable");
        write_index(&world.data(&format!("{name}.idx")), &lengths, I32);
        (name, Documents::contiguous(lengths).expect("they fit"))
    });
    corpora.collect()
}

/// The samples of an order whose tokens are their places in the files.
fn samples(order: &MegatronOrder, first: u64, count: usize) -> Vec<u8> {
    let picks = order.cursor_at(first).take(count);
    let tokens = picks.flat_map(|(dataset, k)| order.pieces(dataset, k).flatten());
    tokens.flat_map(|token| (token as u32).to_le_bytes()).collect()
}

/// Short, long and empty documents, and one alone; the end of the run, and beyond it.
#[test]
fn a_run_of_megatron_core_is_streamed_to_its_end() {
    let Some(world) = World::new("a_run_of_megatron_core") else { return };
    let corpora = write_corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let text = "window(65, overlap=1) | order(megatron, seed=1234, samples=4000) \
                | blend(short=0.5, mixed=0.3, long=0.2, tiny=0.1, one=0.02) | batch(17)";
    let plan = Plan::parse(text, None).expect("it is a plan");
    let documents = plan.blend().iter().map(|part| corpora[part.name.as_str()].clone()).collect();
    let order = plan.megatron_order(documents, 1 << 30).expect("it has this order");
    let order = order.expect("the datasets are good");
    // 235 whole batches.
    for (more, first, count) in [(&[][..], 0, 3_995), (&["--first-batch", "101"], 1_717, 2_278)] {
        let want = samples(&order, first, count);
        let args = [&["--plan", text][..], more].concat();
        for cat in [
            Cat::through(&world, &dpu, &target.url(""), &args),
            Cat::alone(&world, &target.url(""), &args),
            Cat::local(&world, "", &args),
        ] {
            assert_same(&cat.finish().good().stdout, &want);
        }
    }
    let at_the_end = ["--plan", text, "--first-batch", "235"];
    let refused = Cat::local(&world, "", &at_the_end).finish();
    refused.failed(2, &["no batch for every rank from batch 235 on"], "samples=");
    let short = ["--plan", "window(64) | order(megatron, seed=1, samples=10) | batch(20)"];
    let refused = Cat::local(&world, "short.bin", &short).finish();
    refused.failed(2, &["no batch for every rank from batch 0 on"], "samples=");
    let few = ["--plan", "window(64) | order(megatron, seed=1, samples=99999) | blend(short, one)"];
    let refused = Cat::local(&world, "", &few).finish();
    refused.failed(2, &["99999 are asked for"], "blend(web=0.7");
}

/// Megatron-core shuffles sequences, and documents are known only as a whole.
#[test]
fn documents_of_several_sequences_have_no_order_of_megatron() {
    let Some(world) = World::new("documents_of_several_sequences") else { return };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    Corpus::flat(&world.data("web.bin"), xio::dataset::Dtype::U16, tokens(900, 1));
    write_index(&world.data("web.idx"), &[200, 300, 400], U16);
    let index = fs::read(world.data("web.idx")).expect("it is there");
    let plan = ["--plan", "window(64) | order(megatron, seed=1) | batch(2)"];
    Cat::local(&world, "web.bin", &plan).finish().good();
    // The last two are one document; as many documents as sequences, of which one is empty;
    // sequences of no document.
    for (ends, part, hint) in [
        (&[0_i64, 1, 3][..], "1 of its 2 documents", "dquant convert"),
        (&[0, 1, 1, 3], "2 of its 3 documents", "dquant convert"),
        (&[0, 1], "the last document of the index ends with sequence 1", "Megatron-core"),
    ] {
        let mut other = index[..index.len() - 4 * 8].to_vec();
        other[26..34].copy_from_slice(&(ends.len() as u64).to_le_bytes());
        other.extend(ends.iter().flat_map(|end| end.to_le_bytes()));
        fs::write(world.data("web.idx"), other).expect("writable");
        for cat in [
            Cat::through(&world, &dpu, &target.url("web"), &plan),
            Cat::local(&world, "web.bin", &plan),
        ] {
            cat.finish().failed(2, &["web.bin", part, "sequence"], hint);
        }
    }
}

/// What the order cannot be made of is named, not counted.
#[test]
fn a_dataset_without_a_sample_is_named() {
    let Some(world) = World::new("a_dataset_without_a_sample") else { return };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    Corpus::with_documents(&world.data("long.bin"), tokens(900, 1), vec![200, 700]);
    Corpus::with_documents(&world.data("short.bin"), tokens(20, 2), vec![9, 11]);
    let few = "the 20 tokens of dataset 1 do not fill one sample of 65";
    let (samples, hint) = ("window(65, overlap=1) | batch(2)", "dquant documents");
    let once = format!("{samples} | order(megatron, seed=1) | blend(long, short)");
    // The training split of two documents is none of them.
    let split = "order(megatron, seed=1, samples=10, split=\"1,9\") | blend(short=0.5, long=0.5)";
    let split = format!("{samples} | {split}");
    for (plan, part) in [(&once, few), (&split, "documents of dataset 0 in use have no tokens")] {
        for cat in [
            Cat::through(&world, &dpu, &target.url(""), &["--plan", plan]),
            Cat::alone(&world, &target.url(""), &["--plan", plan]),
            Cat::local(&world, "", &["--plan", plan]),
        ] {
            cat.finish().failed(2, &["short.bin: ", part], hint);
        }
    }
    // Files of a pattern are blended by their samples; a short one is used again where samples are
    // asked for.
    let plan = format!("{samples} | order(megatron, seed=1)");
    let refused = Cat::local(&world, "*.bin", &["--plan", &plan]).finish();
    refused.failed(2, &["short.bin: ", few], hint);
    let plan = plan.replace("seed=1", "seed=1, samples=4");
    let only = Cat::local(&world, "short.bin", &["--plan", &plan]).finish().good();
    assert_eq!(only.stdout.len(), 4 * 65 * 2);
}
