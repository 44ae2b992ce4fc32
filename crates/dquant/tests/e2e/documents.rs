//! The documents of datasets: from the index on the disk to whoever asks, at this machine and
//! through a target.

use std::fs;
use std::ops::Range;
use std::path::Path;

use engine::proto::{DatasetInfo, DocumentsReply};
use serde_json::{Value, json};
use xio::dataset::{Dtype, Format, TokenFile};
use xio::plan::Plan;
use xio::reference::Reference;

use super::corpus::{Corpus, assert_same, tokens};
use super::harness::{Cat, Daemon, Ran, World, path};
use super::hostile_packets::runtime;
use super::hostile_target::{FakeTarget, Lies};

/// Writes the index of documents of these lengths, each of one sequence, for tokens of this code
/// and width.
pub(crate) fn write_index(path: &Path, lengths: &[u32], (code, width): (u8, i64)) {
    let mut index = b"MMIDIDX\x00\x00".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(code);
    index.extend((lengths.len() as u64).to_le_bytes());
    index.extend((lengths.len() as u64 + 1).to_le_bytes());
    index.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    let mut at = 0_i64;
    for length in lengths {
        index.extend(at.to_le_bytes());
        at += i64::from(*length) * width;
    }
    index.extend((0..=lengths.len() as i64).flat_map(i64::to_le_bytes));
    fs::write(path, index).expect("the folder is writable");
}

pub(crate) const U16: (u8, i64) = (8, 2);
const I64: (u8, i64) = (5, 8);

/// More documents than fit one piece on the wire, a few of them empty or long.
fn many() -> Vec<u32> {
    (0..300_000_u32).map(|i| if i % 1_000 == 7 { i } else { i % 5 }).collect()
}

fn listing(ran: Ran) -> Value {
    serde_json::from_slice(&ran.good().stdout).expect("one JSON object")
}

/// What a listing has to say of these documents.
fn check(listing: &Value, lengths: &[u32]) {
    let mut end = 0;
    let mut starts = Vec::new();
    for length in lengths {
        starts.push(end);
        end += u64::from(*length);
    }
    assert_eq!(listing["schema"], "dquant.documents/1");
    assert_eq!((&listing["documents"], &listing["tokens"]), (&json!(lengths.len()), &json!(end)));
    assert!(listing["lengths"] == json!(lengths), "other lengths");
    assert!(listing["starts"] == json!(starts), "other starts");
}

fn ask(world: &World, target: &Daemon, name: &str) -> Ran {
    world.run(&["documents", &target.url(name), "--json"])
}

fn ask_local(world: &World, name: &str) -> Ran {
    world.run(&["documents", path(&world.data(name)), "--json"])
}

#[test]
fn both_ends_see_the_documents_of_the_index() {
    let Some(world) = World::new("both_ends_see_the_documents") else { return };
    let target = world.target(&[]);
    let lengths = many();
    let total: u32 = lengths.iter().sum();
    Corpus::flat(&world.data("many.bin"), Dtype::U16, tokens(total as usize, 1));
    write_index(&world.data("many.idx"), &lengths, U16);
    Corpus::npy(&world.data("array.npy"), tokens(10, 1));
    write_index(&world.data("array.idx"), &[3, 0, 7], I64);
    Corpus::flat(&world.data("empty.bin"), Dtype::U16, tokens(0, 1));
    write_index(&world.data("empty.idx"), &[], U16);
    for (name, lengths) in [("many", &lengths[..]), ("array", &[3, 0, 7]), ("empty", &[])] {
        let (local, remote) =
            (listing(ask_local(&world, name)), listing(ask(&world, &target, name)));
        check(&local, lengths);
        check(&remote, lengths);
        assert_eq!(local["fingerprint"], remote["fingerprint"]);
    }
    // Text: a line for each.
    let text = world.run(&["documents", path(&world.data("array.npy"))]).good().stdout;
    assert_eq!(
        String::from_utf8_lossy(&text),
        format!(
            "# {}: 3 documents, 10 tokens\n# document first-token tokens\n0 0 3\n1 3 0\n2 3 7\n",
            path(&world.data("array.npy"))
        )
    );
    // More callers than the target answers at once.
    let ask = |_| {
        let url = target.url("many");
        Cat::start(&world, world.program(&["documents", &url, "--json"]))
    };
    let callers: Vec<Cat> = (0..12).map(ask).collect();
    for caller in callers {
        check(&listing(caller.finish()), &lengths);
    }
    assert_eq!(target.status(&world).counter("control.refused_calls"), 0);
}

#[test]
fn datasets_without_a_fitting_index_are_refused() {
    let Some(world) = World::new("datasets_without_a_fitting_index") else { return };
    let target = world.target(&[]);
    let fails = |name: &str, parts: &[&str], hint: &str| {
        ask(&world, &target, name).failed(2, parts, hint);
        ask_local(&world, name).failed(2, parts, hint);
    };
    Corpus::flat(&world.data("flat.bin"), Dtype::U32, tokens(5_000, 1));
    Corpus::npy(&world.data("array.npy"), tokens(10, 1));
    let none = "no index beside it";
    fails("flat", &["flat.bin", none], "dquant convert FILE NAME.idx --eos ID");
    fails("array", &["array.npy", none], "dquant tokenize");
    fails("nothing", &["nothing"], "");
    // The index of another file: too few tokens, too many, tokens of another width.
    write_index(&world.data("array.idx"), &[3, 6], I64);
    fails("array", &["array.npy", "80 bytes, 72 described"], "dquant inspect");
    write_index(&world.data("array.idx"), &[3, 8], I64);
    fails("array", &["array.npy", "sequence_lengths[1] is 8"], "dquant inspect");
    write_index(&world.data("array.idx"), &[3, 7], U16);
    fails("array", &["array.idx", "u16 tokens, the file holds i64"], "dquant convert");
    // Cut off, and nothing at all.
    write_index(&world.data("array.idx"), &[3, 7], I64);
    let whole = fs::read(world.data("array.idx")).expect("it is there");
    for cut in [0, 9, 33, 40, whole.len() - 1] {
        fs::write(world.data("array.idx"), &whole[..cut]).expect("writable");
        fails("array", &["array.npy", "ends early"], "dquant inspect");
    }
    // A document that is too long for anyone, of an index that is valid.
    fs::File::create(world.data("long.bin"))
        .and_then(|file| file.set_len(12 << 30))
        .expect("sparse");
    write_index(&world.data("long.idx"), &[1 << 30; 6], U16);
    let mut index = fs::read(world.data("long.idx")).expect("it is there");
    // All six sequences are one document.
    let documents = index.len() - 7 * 8;
    index[26..34].copy_from_slice(&2_u64.to_le_bytes());
    index.truncate(documents + 8);
    index.extend(6_u64.to_le_bytes());
    fs::write(world.data("long.idx"), index).expect("writable");
    fails("long", &["long", "6442450944 tokens"], "");
}

#[test]
fn a_caller_without_the_token_gets_no_documents() {
    let Some(world) = World::new("a_caller_without_the_token_gets_no_documents") else { return };
    let target = world.target(&[]);
    Corpus::megatron(&world.data("web.bin"), tokens(1_000, 1));
    let mut call = world.program(&["documents", &target.url("web")]);
    call.env("DQUANT_TOKEN", "wrong-token");
    Cat::start(&world, call).finish().failed(2, &["token"], "--token");
    assert_eq!(target.status(&world).counter("control.auth_failures"), 1);
}

/// What a target describes is not what it sends: the index changed in between, or the target lies.
#[test]
fn tables_that_are_not_as_described_are_refused() {
    let Some(world) = World::new("tables_that_are_not_as_described") else { return };
    let runtime = runtime();
    let target = world.target(&[]);
    Corpus::megatron(&world.data("web.bin"), tokens(7, 1));
    write_index(&world.data("web.idx"), &[3, 4], U16);
    let fingerprint = listing(ask(&world, &target, "web"))["fingerprint"].to_string();
    let fingerprint = u64::from_str_radix(fingerprint.trim_matches('"'), 16).expect("16 digits");
    let info = DatasetInfo {
        name: "web.bin".into(),
        dtype: "u16".into(),
        tokens: 7,
        documents: fingerprint,
        document_count: 2,
        ..DatasetInfo::default()
    };
    let piece = |dataset, lengths: &[u8]| DocumentsReply {
        dataset,
        lengths: lengths.to_vec(),
        ..DocumentsReply::default()
    };
    let sends = |info: &DatasetInfo, documents: Vec<DocumentsReply>| {
        let fake = FakeTarget::start(&runtime, Lies::with_documents(info, documents));
        world.run(&["documents", &fake.url("web"), "--json"])
    };
    check(&listing(sends(&info, vec![piece(0, &[3, 4])])), &[3, 4]);
    let again = "open the stream again";
    for (pieces, part, hint) in [
        (vec![], "fewer documents", again),
        (vec![piece(0, &[3])], "fewer documents", again),
        (vec![piece(0, &[3, 3])], "another number of tokens", again),
        (vec![piece(0, &[4, 3])], "documents of other lengths", again),
        (vec![piece(0, &[3]), piece(0, &[4, 0])], "more documents", again),
        (vec![piece(0, &[3, 0x84])], "cut off", "same version"),
        (vec![piece(2, &[3, 4])], "out of order", "same version"),
    ] {
        sends(&info, pieces).failed(2, &[part], hint);
    }
    let old = DatasetInfo { documents: 0, document_count: 0, ..info.clone() };
    sends(&old, vec![]).failed(2, &["web.bin", "does not tell its documents"], "same version");
    let huge = DatasetInfo { document_count: u64::MAX, ..info };
    sends(&huge, vec![]).failed(2, &["at most 200000000"], "split");
}

/// Documents of these ids, `u16` and `i64`: the second is the first again, in part.
fn two_datasets(world: &World) {
    let ids = |documents: &[&[i128]]| documents.concat();
    let lengths = |documents: &[&[i128]]| -> Vec<u32> {
        documents.iter().map(|document| document.len() as u32).collect()
    };
    let a: &[&[i128]] = &[&[1, 2, 3], &[4], &[1, 2, 3], &[], &[5, 6]];
    let b: &[&[i128]] = &[&[4], &[7, 8], &[1, 2], &[5, 6], &[5, 6]];
    Corpus::flat(&world.data("a.bin"), Dtype::U16, ids(a));
    write_index(&world.data("a.idx"), &lengths(a), U16);
    Corpus::npy(&world.data("b.npy"), ids(b));
    write_index(&world.data("b.idx"), &lengths(b), I64);
}

fn hash(world: &World, name: &str) {
    let ran = world.run(&["documents", path(&world.data(name)), "--hash", "--json"]).good();
    let written: Value = serde_json::from_slice(&ran.stdout).expect("one JSON object");
    assert_eq!(
        (&written["schema"], &written["documents"]),
        (&"dquant.dochash/1".into(), &5.into())
    );
}

/// Runs `dquant documents` over `a` and `b` with these options, locally and through the target, and
/// returns the tokens of the documents that each keeps, and what was dropped of each: filtered,
/// duplicates.
fn selected(world: &World, target: &Daemon, options: &[&str]) -> [(Value, [u64; 4]); 2] {
    let run = |names: [&str; 2], options: &[&str]| {
        let ran =
            world.run(&[&["documents", names[0], names[1], "--json"], options].concat()).good();
        let text = String::from_utf8(ran.stdout).expect("text");
        let listings: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let counts = |listing: &Value| {
            ["filtered_documents", "filtered_tokens", "duplicate_documents", "duplicate_tokens"]
                .map(|name| listing[name].as_u64().expect("a number"))
        };
        let [a, b] = &listings[..] else { panic!("two datasets: {text}") };
        [a, b].map(|listing| (json!([listing["starts"], listing["lengths"]]), counts(listing)))
    };
    let urls = [target.url("a"), target.url("b")];
    let remote = run([&urls[0], &urls[1]], options);
    let files = [world.data("a.bin"), world.data("b.npy")];
    let list = world.data("list.txt");
    let local: Vec<&str> =
        options.iter().map(|arg| if *arg == "list.txt" { path(&list) } else { *arg }).collect();
    assert_eq!(run([path(&files[0]), path(&files[1])], &local), remote);
    remote
}

#[test]
fn documents_are_filtered_and_deduplicated_by_their_hashes() {
    let Some(world) = World::new("documents_are_filtered") else { return };
    let target = world.target(&[]);
    two_datasets(&world);
    hash(&world, "a");
    hash(&world, "b.npy");
    let shown = |name: &str| -> Vec<String> {
        let ran = world.run(&["documents", &target.url(name), "--hashes", "--json"]).good();
        let listing: Value = serde_json::from_slice(&ran.stdout).expect("one JSON object");
        serde_json::from_value(listing["hashes"].clone()).expect("hashes")
    };
    let (a, b) = (shown("a"), shown("b"));
    // xxhash.xxh3_64_hexdigest(numpy.array([1, 2, 3], "<i8").tobytes()), and of nothing.
    assert_eq!((a[0].as_str(), a[3].as_str()), (HASH_OF_123, "2d06800538d394c2"));
    assert_eq!((&a[0], &a[1], &a[4]), (&a[2], &b[0], &b[3]), "whatever the type of the file");
    let within = selected(&world, &target, &["--dedup", "within"]);
    assert_eq!(within[0], (json!([[0, 3, 7, 7], [3, 1, 0, 2]]), [0, 0, 1, 3]));
    assert_eq!(within[1], (json!([[0, 1, 3, 5], [1, 2, 2, 2]]), [0, 0, 1, 2]));
    let across = selected(&world, &target, &["--dedup", "across"]);
    assert_eq!(across[0], within[0]);
    assert_eq!(across[1], (json!([[1, 3], [2, 2]]), [0, 0, 3, 5]));
    fs::write(world.data("list.txt"), format!("# known\n{}\n{}\n", a[0], b[1])).expect("writable");
    let dropped = selected(&world, &target, &["--filter", "list.txt"]);
    assert_eq!(dropped[0], (json!([[3, 7, 7], [1, 0, 2]]), [2, 6, 0, 0]));
    assert_eq!(dropped[1], (json!([[0, 3, 5, 7], [1, 2, 2, 2]]), [1, 2, 0, 0]));
    let kept = selected(&world, &target, &["--keep", "list.txt", "--dedup", "within"]);
    assert_eq!(kept[0], (json!([[0], [3]]), [3, 3, 1, 3]));
    assert_eq!(kept[1], (json!([[1], [2]]), [4, 7, 0, 0]));
}

/// As Python computes it.
const HASH_OF_123: &str = "7c68b4906e7ea780";

#[test]
fn hashes_and_lists_that_do_not_fit_are_refused() {
    let Some(world) = World::new("hashes_and_lists_that_do_not_fit") else { return };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    two_datasets(&world);
    let fails = |options: &[&str], parts: &[&str], hint: &str| {
        let (url, file) = (target.url("a"), world.data("a"));
        world.run(&[&["documents", &url], options].concat()).failed(2, parts, hint);
        let list = world.data("list.txt");
        let local: Vec<&str> =
            options.iter().map(|arg| if *arg == "list.txt" { path(&list) } else { *arg }).collect();
        world.run(&[&["documents", path(&file)], &local[..]].concat()).failed(2, parts, hint);
    };
    let write = "dquant documents FILE --hash";
    fails(&["--hashes"], &["a.bin", "no hashes"], write);
    hash(&world, "a");
    fails(&["--filter", "list.txt"], &["list.txt"], "");
    for (list, part) in [
        (&b""[..], "the list of hashes is empty"),
        (b"\n# nothing\n", "the list of hashes is empty"),
        (b"00000000000000ff\nxyz\n", "line 2 is not a hash"),
        (b"\x93NUMPY\x01\x00", "ends early"),
    ] {
        fs::write(world.data("list.txt"), list).expect("writable");
        fails(&["--keep", "list.txt"], &["list.txt", part], "");
    }
    fs::write(world.data("list.txt"), "00000000000000ff\n").expect("writable");
    fails(&["--keep", "list.txt"], &["a.bin", "leave no token"], "check the list");
    // Damage that leaves the length as it is, of a hash and of the header; a part of it; another
    // file's.
    let sidecar = world.data("a.bin.dochash");
    let whole = fs::read(&sidecar).expect("it is there");
    let damage = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&sidecar, bytes).expect("writable");
    };
    damage(70);
    fails(&["--hashes"], &["a.bin", "damaged"], write);
    damage(0);
    fails(&["--hashes"], &["a.bin.dochash", "holds no hashes"], write);
    damage(32);
    fails(&["--hashes"], &["a.bin", "stale", "other documents"], write);
    fs::write(&sidecar, &whole[..80]).expect("writable");
    fails(&["--hashes"], &["a.bin.dochash", "80 bytes"], write);
    fs::write(&sidecar, &whole).expect("writable");
    world.run(&["documents", &target.url("a"), "--hashes"]).good();
    // The file is written again, with the same documents.
    two_datasets(&world);
    fails(&["--hashes"], &["a.bin", "stale", "written or replaced"], write);
    // Windows of whole files would hold what was dropped.
    hash(&world, "a");
    let plan = ["--plan", "window(2) | dedup", "--batches", "1"];
    let refused = "windows of whole files";
    Cat::through(&world, &dpu, &target.url("a"), &plan).finish().failed(
        2,
        &[refused],
        "dquant convert FILE NEW.idx",
    );
    Cat::local(&world, "a", &plan).finish().failed(2, &[refused], "dquant convert FILE NEW.idx");
    world.run(&["documents", &target.url("a"), "--hash"]).failed(
        2,
        &["where the file is"],
        "at the target",
    );
    let mixed = ["documents", &target.url("a"), "a.bin"];
    world.run(&mixed).failed(2, &["not at one place"], "");
}

type Documents = Vec<Vec<i128>>;

/// A document of this number.
fn document(number: u64) -> Vec<i128> {
    tokens((number * 7 % 50) as usize, number)
}

/// Two hashed files in which every document comes several times, some in both.
fn repeated(world: &World) -> [(Corpus, Documents); 2] {
    [("a", 400, 0), ("b", 300, 60)].map(|(name, count, first)| {
        let documents: Documents = (0..count).map(|i| document(first + i * 5 % 97)).collect();
        let lengths: Vec<u32> = documents.iter().map(|ids| ids.len() as u32).collect();
        write_index(&world.data(&format!("{name}.idx")), &lengths, U16);
        let file = world.data(&format!("{name}.bin"));
        let corpus = Corpus::flat(&file, Dtype::U16, documents.concat());
        world.run(&["documents", path(&file), "--hash"]).good();
        (corpus, documents)
    })
}

/// Writes a list of the hash of one of these documents.
fn list_of(world: &World, (corpus, documents): &(Corpus, Documents), listed: &[i128]) {
    let shown = world.run(&["documents", path(&corpus.path), "--hashes", "--json"]).good();
    let shown: Value = serde_json::from_slice(&shown.stdout).expect("one JSON object");
    let at = documents.iter().position(|ids| ids == listed).expect("it is there");
    let hash = shown["hashes"][at].as_str().expect("a hash");
    fs::write(world.data("bad.txt"), format!("{hash}\n")).expect("writable");
}

/// Where the documents are that are left of both files.
fn left(corpora: &[(Corpus, Documents); 2], dropped: &[i128]) -> Vec<Vec<Range<u64>>> {
    let mut seen = Vec::new();
    let of_file = |(_, documents): &(Corpus, Documents)| {
        let (mut left, mut end) = (Vec::new(), 0);
        for ids in documents {
            let start = end;
            end += ids.len() as u64;
            if ids != dropped && !seen.contains(ids) {
                seen.push(ids.clone());
                left.push(start..end);
            }
        }
        left
    };
    corpora.iter().map(of_file).collect()
}

fn plan(list: &str) -> String {
    let samples = "window(64) | pack(best) | shuffle(3) | blend(a=2, b=1) | batch(4)";
    format!("{samples} | filter(\"{list}\") | dedup(across)")
}

/// The first batches over what is left.
fn batches(corpora: &[(Corpus, Documents); 2], left: Vec<Vec<Range<u64>>>, count: u64) -> Vec<u8> {
    let files = corpora.each_ref().map(|(corpus, _)| {
        let ids = corpus.tokens.clone();
        let tokens = ids.len() as u64;
        let file = TokenFile { dtype: Dtype::U16, data_offset: 0, tokens, format: Format::Flat };
        (file, move |index: u64| ids.get(index as usize).copied())
    });
    let plan = Plan::parse(&plan("bad.txt"), None).expect("a plan");
    let reference = Reference::new(&plan, files.into()).expect("the files go with the plan");
    let mut reference = reference.with_documents(left).expect("documents are left");
    (0..count).flat_map(|batch| reference.batch(batch).expect("it fits")).collect()
}

/// Streams of packed documents hold what the selection keeps and nothing else, on every way.
#[test]
fn streams_draw_from_the_documents_that_are_kept() {
    let Some(world) = World::new("streams_draw_from_the_documents") else { return };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let (corpora, dropped) = (repeated(&world), document(15));
    list_of(&world, &corpora[0], &dropped);
    let left = left(&corpora, &dropped);
    let kept: u64 = left.iter().map(|left| left.len() as u64).sum();
    let want = batches(&corpora, left, 40);
    let remote = plan("bad.txt");
    let args = ["--plan", &remote, "--batches", "40"];
    let local = plan(path(&world.data("bad.txt")));
    for cat in [
        Cat::through(&world, &dpu, &target.url(""), &args),
        Cat::alone(&world, &target.url(""), &args),
        Cat::local(&world, "", &["--plan", &local, "--batches", "40"]),
    ] {
        let ran = cat.finish().good();
        assert_same(&ran.stdout, &want);
        for action in ["filter dropped", "dedup dropped"] {
            assert!(ran.stderr.contains(action), "{}", ran.stderr);
        }
    }
    let status = dpu.status(&world);
    let all: u64 = corpora.iter().map(|(_, documents)| documents.len() as u64).sum();
    let filtered = status.counter("dpu.filtered_documents");
    assert_eq!(filtered + status.counter("dpu.duplicate_documents") + kept, all);
    assert!(filtered > 0);
}

/// Megatron-core's order over what is left is its order over files of nothing else, split and all.
#[test]
fn the_order_of_megatron_draws_from_the_documents_that_are_kept() {
    let Some(world) = World::new("the_order_of_megatron_draws") else { return };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let (corpora, dropped) = (repeated(&world), document(15));
    list_of(&world, &corpora[0], &dropped);
    fs::create_dir(world.data("kept")).expect("the folder is writable");
    for ((name, (corpus, documents)), left) in
        ["a", "b"].iter().zip(&corpora).zip(left(&corpora, &dropped))
    {
        assert!(left.len() < documents.len() && left.len() > 20);
        let lengths: Vec<u32> = left.iter().map(|range| (range.end - range.start) as u32).collect();
        let ids = |range: &Range<u64>| &corpus.tokens[range.start as usize..range.end as usize];
        let ids = left.iter().map(ids).collect::<Vec<_>>().concat();
        write_index(&world.data(&format!("kept/{name}.idx")), &lengths, U16);
        Corpus::flat(&world.data(&format!("kept/{name}.bin")), Dtype::U16, ids);
    }
    let plan = "window(33, overlap=1) | order(megatron, seed=9, samples=400, split=\"3,1\") \
                | blend(a=0.6, b=0.4) | batch(4)";
    let want = Cat::local(&world, "kept/", &["--plan", plan]).finish().good().stdout;
    assert_eq!(want.len(), 400 * 33 * 2);
    let selecting = |list: &str| format!("{plan} | filter(\"{list}\") | dedup(across)");
    let (remote, local) = (selecting("bad.txt"), selecting(path(&world.data("bad.txt"))));
    for cat in [
        Cat::through(&world, &dpu, &target.url(""), &["--plan", &remote]),
        Cat::alone(&world, &target.url(""), &["--plan", &remote]),
        Cat::local(&world, "", &["--plan", &local]),
    ] {
        assert_same(&cat.finish().good().stdout, &want);
    }
    let all = Cat::local(&world, "", &["--plan", plan]).finish().good().stdout;
    assert!(all != want, "the selection makes no difference");
}

#[test]
fn an_index_that_changes_while_the_target_is_away_ends_the_stream() {
    let Some(world) = World::new("an_index_that_changes") else { return };
    let (mut target, dpu) = (world.target(&[]), world.dpu(&[]));
    let (corpora, dropped) = (repeated(&world), document(15));
    list_of(&world, &corpora[0], &dropped);
    let plan = plan("bad.txt");
    let endless = ["--plan", &plan, "--slots", "2", "--slot-size", "64KiB"];
    let mut cat = Cat::through(&world, &dpu, &target.url(""), &endless);
    cat.read(1 << 10);
    target.kill();
    // Neither list nor hashes matter any more, and the same index is the same.
    fs::remove_file(world.data("bad.txt")).expect("it is there");
    fs::remove_file(world.data("b.bin.dochash")).expect("it is there");
    let mut lengths: Vec<u32> = corpora[0].1.iter().map(|ids| ids.len() as u32).collect();
    write_index(&world.data("a.idx"), &lengths, U16);
    target.restart(&world);
    cat.read(8 << 20);
    target.kill();
    let longer = lengths.iter().position(|tokens| *tokens > 1).expect("there is one");
    lengths[longer] -= 1;
    lengths[longer + 1] += 1;
    write_index(&world.data("a.idx"), &lengths, U16);
    target.restart(&world);
    let ran = cat.finish();
    ran.failed(3, &["a.bin has changed since", "other documents"], "open the stream again");
}
