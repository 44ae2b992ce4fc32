//! Plans that print back, and mistakes reported with their position.

use proptest::prelude::*;
use std::{format, string::ToString, vec, vec::Vec};

use super::*;
use crate::documents::Documents;
use crate::kernel::Codec;
use crate::order::SplitPart;
use crate::order::megatron::{MegatronOrder, Settings, Source, split};

const FULL: &str =
    "window(2048) | shuffle(seed, blocks=8) | blend(a=0.5,b=0.3,c=0.2) | narrow(u16)";

fn plan(text: &str) -> Plan {
    Plan::parse(text, Some(7)).unwrap_or_else(|error| panic!("{}", error.render(text)))
}

#[test]
fn a_full_plan_is_read_and_printed() {
    let full = plan(FULL);
    let narrow = Some(Narrow { to: Dtype::U16, overflow: Overflow::Refuse });
    assert_eq!((full.window(), full.batch(), full.narrow()), (2_048, 32, narrow));
    let groups = Some(Groups { blocks: 8, block_bytes: BLOCK_BYTES });
    assert_eq!(full.shuffle(), Some(Shuffle { seed: 7, groups }));
    let weights: Vec<_> = full.blend().iter().map(|p| (p.name.as_str(), p.weights[0])).collect();
    assert_eq!(weights, [("a", 5), ("b", 3), ("c", 2)]);
    let canonical =
        "window(2048) | shuffle(7, blocks=8) | blend(a=5, b=3, c=2) | narrow(u16) | batch(32)";
    assert_eq!(full.to_string(), canonical);
}

#[test]
fn the_same_plan_in_other_words() {
    for (text, same) in [
        ("narrow(u16)|blend(a=.5 ,b=0.30, c=0.2)|shuffle(blocks=8,seed=seed)|window(2_048)", FULL),
        (
            "batch(samples=32,) | narrow(to=uint16)\n| blend(a=5,b=3.0,c=2)|shuffle(7, block=1MiB, blocks=8)|window(tokens=2048)",
            FULL,
        ),
        ("window(1)", "window(1) | batch(32)"),
        ("window(1)|narrow(u16,overflow=error)", "window(1) | narrow(u16)"),
        ("window(1)|compress(zstd)", "window(1) | compress(zstd, level=1, when=faster)"),
        (
            "dedup(across)|filter(keep=bad)|window(1)",
            "window(1) | filter(keep=\"bad\") | dedup(across) | batch(32)",
        ),
        ("filter(a.npy)|dedup|window(1)", "window(1) | filter(\"a.npy\") | dedup | batch(32)"),
        (
            "window(1)|compress(codec=lz4)|remap(table='a b')",
            "window(1) | remap(\"a b\") | compress(lz4)",
        ),
        (
            "wasm(sha256=00112233445566778899AABBCCDDEEFF00112233445566778899aabbccddeeff, module=a/b.wasm)|window(1)",
            "window(1) | wasm(\"a/b.wasm\", sha256=00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff)",
        ),
        ("window(1)|bitpack(bits=17)", "bitpack(17) | window(1)"),
        ("window(1)|quantize(to=e4m3,deliver=float16)", "quantize(e4m3, deliver=f16) | window(1)"),
        ("window(9) | blend('a'=1)", "window(9) | blend(\"a\"=250000)"),
        ("window(9) | blend(a=0, b=000.000001)", "window(9) | blend(a=0, b=1)"),
        ("window(9) | blend(a=1000000, b=0)", "window(9) | blend(a=7., b=0)"),
    ] {
        assert_eq!(plan(text), plan(same), "{text}");
    }
    let blocks = |block| format!("window(9) | shuffle(1, blocks=3, block={block})");
    assert_eq!(plan(&blocks("1024KiB")), plan("window(9) | shuffle(1, blocks=3)"));
    assert_eq!(plan(&blocks("0256KiB")), plan(&blocks("256KiB")));
    let phased = "window(9) | blend(a=1, b=0.5:0:2) | phases(1_000, 2000)";
    assert_eq!(
        plan(phased).to_string(),
        "window(9) | blend(a=2:1:1, b=1:0:2) | phases(1000, 2000) | batch(32)"
    );
    assert_eq!(plan("window(9)").shuffle(), None);
    assert!(plan("window(9)").blend().is_empty());
}

#[test]
fn names_with_and_without_quotes() {
    let text = r#"window(4) | blend(s3://bucket/a-b_c.bin=1, "my \"file\", \\ (2)=|.bin"=2, '日本 x'=3, "2048"=4, 日本=5)"#;
    let names: Vec<String> = plan(text).blend().iter().map(|part| part.name.clone()).collect();
    let expected = ["s3://bucket/a-b_c.bin", r#"my "file", \ (2)=|.bin"#, "日本 x", "2048", "日本"];
    assert_eq!(names, expected);
    assert_eq!(plan(&plan(text).to_string()), plan(text));
}

/// The text that `render` marks, and the whole message.
fn mistake(text: &str) -> (String, String) {
    let error = Plan::parse(text, None).expect_err(text);
    (String::from(&text[error.span.clone()]), error.render(text))
}

/// Mistakes of form: the text, the part that is marked, and words of the message.
const SHAPE: &[(&str, &str, &str)] = &[
    ("", "", "the plan is empty"),
    ("  \t", "", "the plan is empty"),
    ("windw(2048)", "windw", "did you mean `window`"),
    ("window(4) | Shufle(1)", "Shufle", "did you mean `shuffle`"),
    ("window(4) | encrypt(rot13)", "encrypt", "actions are window"),
    ("window(4) | blend(overflow=1(2))", "(", "expected `,` or `)`"),
    ("window(4) | narrow(u16, overflow=saturate(1)", "", "expected `,` or `)`"),
    ("window(4) | narrow(u16, overflow=saturate(1, 2))", ",", "expected `)`"),
    ("window(4", "", "expected `,` or `)`, found the end of the plan"),
    ("window 4", "4", "expected `|` or the end of the plan"),
    ("window(4) |", "", "expected an action"),
    ("window(4) || narrow(u16)", "|", "expected an action, found `|`"),
    ("window(4) | blend(a=)", ")", "expected a value"),
    ("window(4) | blend(,)", ",", "expected an argument"),
    ("window(4))", ")", "expected `|`"),
    ("window(4) ; narrow(u16)", ";", "unexpected character `;`"),
    ("window(4) | blend(\"a=1)", "\"a=1)", "without an end"),
    ("window(4) | blend(\"a\\n\"=1)", "\\", "unknown escape"),
];

/// Mistakes in arguments.
const ARGUMENTS: &[(&str, &str, &str)] = &[
    ("window(4) | window(5)", "window", "a second time"),
    ("window(4) | narrow(u16) | narrow(u32)", "narrow", "a second time"),
    ("window", "window", "needs its argument `tokens`"),
    ("window()", "window()", "needs its argument `tokens`"),
    ("window(0)", "0", "outside 1 to 1048576"),
    ("window(1048577)", "1048577", "nearest allowed value is 1048576"),
    ("window(two)", "two", "must be a whole number, found `two`"),
    ("window(-1)", "-1", "must be a whole number"),
    ("window(+1)", "+1", "must be a whole number"),
    ("window(2.5)", "2.5", "must be a whole number"),
    ("window(\"4\")", "\"4\"", "must be a whole number, found \"4\""),
    ("window(99999999999999999999999)", "99999999999999999999999", "must be a whole number"),
    ("window(4, 5)", "5", "takes no further argument"),
    ("window(size=4)", "size", "has no argument `size`"),
    ("window(4) | shuffle", "shuffle", "needs its argument `seed`"),
    ("window(4) | shuffle(blocks=4)", "shuffle(blocks=4)", "needs its argument `seed`"),
    ("window(4) | shuffle(seed)", "seed", "hint: give a seed beside the plan"),
    ("window(4) | shuffle(1, 8)", "8", "takes no further argument"),
    ("window(4) | shuffle(1, blocks=0)", "0", "outside 1 to 1024"),
    ("window(4) | shuffle(1, seed=2)", "seed", "a second time"),
    ("window(4) | shuffle(1, bloks=2)", "bloks", "has no argument `bloks`"),
    (
        "window(4) | shuffle(1, block=256KiB)",
        "shuffle(1, block=256KiB)",
        "needs its argument `blocks`",
    ),
    ("window(4) | shuffle(1, blocks=2, block=256)", "256", "must be a size such as 256KiB"),
    ("window(4) | shuffle(1, blocks=2, block=-1KiB)", "-1KiB", "must be a size such as 256KiB"),
    ("window(4) | shuffle(1, blocks=2, block=\"4KiB\")", "\"4KiB\"", "found \"4KiB\""),
    ("window(4) | shuffle(1, blocks=2, block=3KiB)", "3KiB", "outside 4 KiB to 1024 KiB"),
    ("window(4) | shuffle(1, blocks=2, block=2MiB)", "2MiB", "outside 4 KiB to 1024 KiB"),
    (
        "window(4) | shuffle(1, blocks=2, block=99999999999999999999KiB)",
        "99999999999999999999KiB",
        "must be a size",
    ),
    (
        "window(4) | shuffle(1, blocks=2, block=18014398509481985KiB)",
        "18014398509481985KiB",
        "outside 4 KiB",
    ),
    ("window(4) | blend(a=1) | phases", "phases", "needs its argument `N`"),
    ("window(4) | blend(a=1) | phases(0)", "0", "outside 1 to 9007199254740992"),
    ("window(4) | blend(a=1) | phases(5, 5)", "5", "does not begin earlier"),
    ("window(4) | blend(a=1) | phases(at=5)", "at", "has no argument `at`"),
    ("window(4) | phases(5)", "phases(5)", "no blend"),
    ("window(4) | narrow(u8)", "u8", "narrow(u16) holds ids below 65536"),
    ("window(4) | narrow(f16)", "f16", "cannot deliver `f16`"),
    ("window(4) | narrow(u16, u32)", "u32", "takes no further argument"),
    (
        "window(4) | narrow(u16, overflow=wrap)",
        "wrap",
        "policies are error, saturate(ID) and escape",
    ),
    ("window(4) | narrow(u16, overflow=saturate)", "saturate", "has no policy `saturate`"),
    ("window(4) | narrow(u16, overflow=error(1))", "error", "has no policy `error`"),
    ("window(4) | narrow(u16, overflow=saturate(65536))", "65536", "does not fit u16"),
    ("window(4) | narrow(u16, overflow=saturate(x))", "x", "must be a whole number"),
    (
        "window(4) | narrow(u16, overflow=escape)",
        "narrow(u16, overflow=escape)",
        "widen(u32), or widen(i64)",
    ),
    (
        "window(4) | narrow(u16, overflow=escape) | widen(i32)",
        "narrow(u16, overflow=escape)",
        "larger type",
    ),
    ("window(4) | narrow(u32, overflow=escape) | widen(i64)", "escape", "needs narrow(u16)"),
    (
        "window(4) | narrow(u16, overflow=escape) | widen(u32) | bitpack(17)",
        "bitpack(17)",
        "exclude each other",
    ),
    ("window(4) | bitpack", "bitpack", "needs its argument `bits`"),
    ("window(4) | bitpack(8)", "8", "outside 9 to 31"),
    ("window(4) | bitpack(32)", "32", "outside 9 to 31"),
    ("window(4) | narrow(u16) | bitpack(16)", "bitpack(16)", "not fewer than u16 has"),
    ("window(4) | bitpack(17) | compress(lz4)", "bitpack(17)", "exclude each other"),
    (
        "window(4) | narrow(u16, overflow=saturate(4096)) | bitpack(12)",
        "bitpack(12)",
        "does not fit 12 bits",
    ),
    ("window(4) | compress", "compress", "needs its argument `codec`"),
    ("window(4) | compress(gzip)", "gzip", "codecs are lz4 and zstd"),
    ("window(4) | compress(zstd, level=10)", "10", "levels of zstd are -7 to 3"),
    ("window(4) | compress(zstd, level=two)", "two", "no level `two` of zstd"),
    ("window(4) | compress(lz4, level=1)", "1", "lz4 has no levels"),
    ("window(4) | compress(lz4, when=never)", "never", "when=faster"),
    ("window(4) | compress(lz4, fast=1)", "fast", "has no argument `fast`"),
    ("window(4) | quantize", "quantize", "needs its argument `to`"),
    ("window(4) | quantize(int4)", "int4", "types are int8, e4m3 and e5m2"),
    ("window(4) | quantize(int8, deliver=u8)", "u8", "deliver=quantized for codes and scales"),
    ("window(4) | quantize(int8, f16)", "f16", "takes no further argument"),
    ("window(4, overlap=1) | quantize(int8)", "quantize(int8)", "quantize and overlap exclude"),
    ("window(4) | quantize(int8) | narrow(u16)", "quantize(int8)", "quantize and narrow exclude"),
    ("window(4) | widen(i64) | quantize(e4m3)", "quantize(e4m3)", "quantize and widen exclude"),
    ("window(4) | bitpack(17) | quantize(e5m2)", "quantize(e5m2)", "quantize and bitpack exclude"),
    ("window(4) | quantize(e5m2) | remap(t)", "quantize(e5m2)", "quantize and remap exclude"),
    (
        "window(4) | quantize(e5m2) | wasm(m, sha256=00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff)",
        "quantize(e5m2)",
        "quantize and wasm exclude",
    ),
    (
        "window(4) | quantize(e5m2, deliver=quantized) | pairs",
        "quantize(e5m2, deliver=quantized)",
        "quantize and pairs exclude",
    ),
    (
        "window(4) | quantize(int8) | order(megatron, seed=1)",
        "quantize(int8)",
        "quantize and order(megatron) exclude",
    ),
    ("window(4) | filter", "filter", "needs its argument `drop`"),
    ("window(4) | filter(\"\")", "\"\"", "needs its argument `drop`"),
    ("window(4) | filter(a, keep=b)", "b", "takes no further argument"),
    ("window(4) | filter(list=a)", "list", "has no argument `list`"),
    ("window(4) | dedup | dedup", "dedup", "appears a second time"),
    ("window(4) | dedup(all)", "all", "takes no further argument"),
    ("window(4) | remap", "remap", "needs its argument `table`"),
    ("window(4) | remap(\"\")", "\"\"", "needs the name of a table"),
    ("window(4) | remap(a, b)", "b", "takes no further argument"),
    ("window(4) | wasm", "wasm", "needs its argument `module`"),
    ("window(4) | wasm(m)", "wasm(m)", "needs its argument `sha256`"),
    ("window(4) | wasm(\"\", sha256=0)", "\"\"", "needs the name of a module"),
    ("window(4) | wasm(m, sha256=0123)", "0123", "64 hexadecimal digits"),
    (
        "window(4) | wasm(m, sha256=x0112233445566778899aabbccddeeff00112233445566778899aabbccddeeff)",
        "x0112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
        "is no SHA-256",
    ),
    ("window(4) | wasm(m, hash=1)", "hash", "has no argument `hash`"),
    ("window(4) | pack", "pack", "needs its argument `fit`"),
    ("window(4) | pack(worst)", "worst", "best and first fill samples"),
    ("window(4) | pack(best, pad=-1)", "-1", "must be a whole number"),
    ("window(4) | pack(best, 0)", "0", "takes no further argument"),
    ("window(4, overlap=1) | pack(best)", "pack(best)", "cannot overlap"),
    ("window(4) | pairs(1)", "1", "no arguments but ignore=ID"),
    ("window(4) | pairs(ignore=x)", "x", "no whole number"),
    ("window(4) | pairs(ignore=1, ignore=2)", "ignore=2", "no arguments but"),
    ("window(4) | pairs(ignore=1, labels=some)", "some", "knows no labels"),
    (
        "window(4) | pairs(labels=targets)",
        "pairs(labels=targets)",
        "does not say what labels become",
    ),
    ("window(4) | positions(1)", "1", "takes no further argument"),
    ("window(4) | positions | positions", "positions", "a second time"),
    ("window(4) | loss_weights(missing=-1)", "-1", "no number from 0 on"),
    ("window(4) | loss_weights(missing=nan)", "nan", "no number from 0 on"),
    ("window(4) | loss_weights(missing=1e300)", "1e300", "no number from 0 on"),
    ("window(4) | loss_weights(1, 2)", "2", "takes no further argument"),
    ("window(4) | loss_weights | loss_weights", "loss_weights", "a second time"),
    ("window(4) | quantize(int8) | loss_weights", "quantize(int8)", "exclude each other"),
    (
        "window(4) | order(megatron, seed=1, samples=9) | loss_weights",
        "order(megatron, seed=1, samples=9)",
        "exclude each other",
    ),
    ("narrow(u16)", "", "does not say how long a sample is"),
    ("window(131072) | batch(65536)", "batch(65536)", "exceeds 268435456 tokens"),
];

/// Mistakes in the weights of a blend.
const WEIGHTS: &[(&str, &str, &str)] = &[
    ("window(4) | blend()", "blend()", "needs its argument `NAME=WEIGHT`"),
    ("window(4) | blend(0.5, 0.5)", "0.5", "needs NAME=WEIGHT"),
    ("window(4) | blend(a=1, a=2)", "a", "a second time"),
    ("window(4) | blend(a=-0.5)", "-0.5", "cannot be negative"),
    ("window(4) | blend(a=NaN)", "NaN", "not a number"),
    ("window(4) | blend(a=-inf)", "-inf", "not a number"),
    ("window(4) | blend(a=1e)", "1e", "not a number"),
    ("window(4) | blend(a=.)", ".", "not a number"),
    ("window(4) | blend(a=1.2.3)", "1.2.3", "not a number"),
    ("window(4) | blend(a=1/0)", "1/0", "not a number"),
    ("window(4) | blend(a=1e-25)", "1e-25", "more than 18 digits"),
    ("window(4) | blend(a=1e13)", "1e13", "more than 18 digits"),
    (
        "window(4) | blend(a=123456789012345678e12, b=1e-24)",
        "blend(a=123456789012345678e12, b=1e-24)",
        "too far apart",
    ),
    ("window(4) | blend(a=0, b=0.0)", "blend(a=0, b=0.0)", "all weights are zero"),
    ("window(4) | blend(a=1:2, b=1)", "1:2", "weights for 2 phases, the plan has 1"),
    ("window(4) | blend(a=1:2:3, b=1) | phases(7)", "1:2:3", "give one weight for all phases"),
    ("window(4) | blend(a=1:, b=1) | phases(7)", "1:", "not a number"),
    ("window(4) | blend(a=1:-1, b=1) | phases(7)", "1:-1", "cannot be negative"),
    ("window(4) | blend(a=1:0, b=1:0) | phases(7)", "blend(a=1:0, b=1:0)", "all weights are zero"),
];

/// Mistakes in a split.
const SPLIT: &[(&str, &str, &str)] = &[
    ("window(4) | split", "split", "needs its argument `shares`"),
    ("window(4) | split('9,1')", "split('9,1')", "needs its argument `part`"),
    ("window(4) | split('9,1', part=eval)", "eval", "has no part `eval`"),
    ("window(4) | split('9,1', part=test)", "test", "its share is 0"),
    ("window(4) | split('9,x', part=train)", "'9,x'", "cannot divide datasets"),
    ("window(4) | split('0,0', part=train)", "'0,0'", "cannot divide datasets"),
    ("window(4) | split('1,1,1,1', part=train)", "'1,1,1,1'", "cannot divide datasets"),
    ("window(4) | split('99/1', part=train)", "'99/1'", "cannot divide datasets"),
    ("window(4) | split('0.99', part=train)", "'0.99'", "cannot divide datasets"),
    ("window(4) | split('9,1', part=train) | split('9,1', part=valid)", "split", "a second time"),
    (
        "window(4) | order(megatron, seed=1) | split('9,1', part=train)",
        "order(megatron, seed=1)",
        "order(megatron) and split exclude each other",
    ),
    ("window(4) | order(megatron, seed=1, part=valid)", "valid", "has no part `valid`"),
    ("window(4) | tokenizers", "tokenizers", "needs its argument `any`"),
    ("window(4) | tokenizers(two)", "two", "takes no further argument"),
];

/// Mistakes in a plan with the order of Megatron-core.
const MEGATRON: &[(&str, &str, &str)] = &[
    ("window(4) | order", "order", "needs its argument `name`"),
    ("window(4) | ordre(megatron, seed=1)", "ordre", "did you mean `order`"),
    ("window(4) | order(megatrn, seed=1)", "megatrn", "there is no order `megatrn`"),
    ("window(4) | order(megatron)", "order(megatron)", "needs its argument `seed`"),
    ("window(4) | order(megatron, 1)", "1", "takes no further argument"),
    ("window(4) | order(megatron, seed=seed)", "seed", "hint: give a seed beside the plan"),
    ("window(4) | order(megatron, seed=4294967296)", "4294967296", "outside 0 to 4294967295"),
    ("window(4) | order(megatron, seed=1, samples=0)", "0", "outside 1 to 4294967293"),
    ("window(4) | order(megatron, seed=1, steps=9)", "steps", "has no argument `steps`"),
    ("window(4) | order(megatron, seed=1, split=\"9,x\")", "\"9,x\"", "split=\"969,30,1\""),
    ("window(4) | order(megatron, seed=1, split=\"0,1\")", "\"0,1\"", "cannot divide documents"),
    ("window(4) | order(megatron, seed=1, split=\"1,1,1,1\")", "\"1,1,1,1\"", "cannot divide"),
    ("window(4) | order(megatron, seed=1, split=\"\")", "\"\"", "cannot divide documents"),
    ("window(4) | order(megatron, seed=1) | order(megatron, seed=1)", "order", "a second time"),
    (
        "window(4) | order(megatron, seed=1) | shuffle(1)",
        "order(megatron, seed=1)",
        "order(megatron) and shuffle exclude each other",
    ),
    (
        "window(4) | order(megatron, seed=1) | pack(best, pad=0)",
        "order(megatron, seed=1)",
        "order(megatron) and pack exclude each other",
    ),
    (
        "window(4) | order(megatron, seed=1, samples=9) | blend(a=1:2) | phases(5)",
        "order(megatron, seed=1, samples=9)",
        "order(megatron) and phases exclude each other",
    ),
    (
        "window(4, overlap=2) | order(megatron, seed=1)",
        "order(megatron, seed=1)",
        "window(2049, overlap=1)",
    ),
    (
        "window(4) | order(megatron, seed=1) | blend(a=1, b=1)",
        "order(megatron, seed=1)",
        "needs its argument `samples`",
    ),
    ("window(4) | order(megatron, seed=1, samples=9) | blend(a=1, b=0.0)", "0.0", "above zero"),
    ("window(4) | order(megatron, seed=1, samples=9) | blend(a=1e)", "1e", "not a number"),
    ("window(4) | order(megatron, seed=1, samples=9) | blend(a=1, b)", "b", "needs NAME=WEIGHT"),
    ("window(4) | order(megatron, seed=1) | blend(a, b, a)", "a", "a second time"),
];

#[test]
fn mistakes_point_at_their_place() {
    let many = (0..4_097).map(|i| format!("d{i}=1")).collect::<Vec<_>>().join(",");
    let many = format!("window(4) | blend({many})");
    let too_many = [(many.as_str(), "d4096", "more than 4096 datasets")];
    for (text, place, message) in [SHAPE, ARGUMENTS, WEIGHTS, SPLIT, MEGATRON, &too_many].concat() {
        let (marked, rendered) = mistake(text);
        assert_eq!(marked, place, "{rendered}");
        assert!(rendered.contains(message), "{message:?} is not in:\n{rendered}");
    }
}

#[test]
fn a_message_shows_line_carets_and_hint() {
    let (_, text) = mistake("window(2048)\n| blend(日本=1, b=x)\n| narrow(u16)");
    let expected = "the weight of `b` is `x`: not a number\n    | blend(日本=1, b=x)\n                    ^\n\
                    hint: weights look like 3, 0.5, 6972290 or 1/3";
    assert_eq!(text, expected);
    let (_, text) = mistake("windw(2048) | narrow(u16)");
    let expected = "unknown action `windw`\n    windw(2048) | narrow(u16)\n    ^^^^^\n\
                    hint: did you mean `window`?";
    assert_eq!(text, expected);
    let (_, text) = mistake("window(4");
    assert!(text.ends_with("\n    window(4\n            ^"), "{text}");
}

#[test]
fn a_long_plan_is_shown_in_part() {
    let blend = (0..200).map(|i| format!("dataset{i}=1")).collect::<Vec<_>>().join(", ");
    let text = format!("window(4) | blend({blend}, bad=-1, {blend})");
    let (marked, rendered) = mistake(&text);
    assert_eq!(marked, "-1");
    let lines: Vec<&str> = rendered.lines().collect();
    assert!(lines[1].chars().count() < 120, "{rendered}");
    let caret = lines[2].chars().position(|c| c == '^').unwrap();
    assert_eq!(lines[1].chars().skip(caret).take(2).collect::<String>(), "-1", "{rendered}");
    let error = PlanError { problem: Problem::Empty, span: 3..900 };
    assert!(error.render("日").contains('^'), "a span from elsewhere is no crash");
    assert!(Plan::parse(&" ".repeat(MAX_PLAN_BYTES + 1), None).is_err());
}

#[test]
fn datasets_are_found_by_name() {
    let blended = plan(FULL);
    assert_eq!(blended.bind(&["c", "a", "b"]), Ok(vec![1, 2, 0]));
    let name = |name: &str| String::from(name);
    assert_eq!(blended.bind(&["a", "b"]), Err(BindError::Unknown { name: name("c") }));
    assert_eq!(blended.bind(&["a", "b", "c", "d"]), Err(BindError::Unused { name: name("d") }));
    assert_eq!(blended.bind(&["a", "a", "b", "c"]), Err(BindError::Repeated { name: name("a") }));
    let single = plan("window(4)");
    assert_eq!(single.bind(&["anything"]), Ok(vec![0]));
    assert_eq!(single.bind(&["a", "b"]), Err(BindError::NeedsBlend { datasets: 2 }));
    assert_eq!(single.bind(&[]), Err(BindError::NoDataset));
}

/// A change of this value reorders every run that resumes across it: the default groups and the
/// phases.
#[test]
fn the_order_of_a_plan_is_frozen() {
    let plan = plan("window(2048) | shuffle(7) | blend(a=5:1, b=3:1, c=2:6) | phases(9000)");
    let file = |tokens: u64| crate::dataset::flat(Dtype::U32, 4 * tokens).unwrap();
    let layouts = [40_000_000, 3_000_001, 70_000].map(file);
    let layouts = [0, 1, 2].map(|dataset| plan.layout(dataset, layouts[dataset]).unwrap());
    let order = plan.order(&layouts).unwrap();
    let digest = order.cursor_at(0).take(20_000).fold(0u64, |digest, sample| {
        let place = sample.place;
        let parts = [sample.dataset as u64, place.epoch, place.block, place.sample.into()];
        parts.iter().fold(digest, |digest, part| (digest ^ part).wrapping_mul(0x100_0000_01b3))
    });
    assert_eq!(digest, 12_849_016_044_387_688_526);
}

/// A text of slashes is no number, and costs no more than its length.
#[test]
fn a_plan_of_slashes_is_refused() {
    let slashes = format!("1{}", "/1".repeat(400_000));
    for text in [
        format!("window(8) | order(megatron, seed=1, samples=9, split=\"{slashes}\")"),
        format!("window(8) | order(megatron, seed=1, samples=9) | blend(a={slashes})"),
        format!("window(8) | blend(a={slashes})"),
        format!("window(8) | split(\"{slashes}\", part=train)"),
    ] {
        assert!(Plan::parse(&text, None).is_err());
    }
}

/// Every way to write weights, and the weights that are printed back, which are kept from then on.
#[test]
fn weights_are_any_numbers() {
    for (written, printed) in [
        ("blend(a=1/3, b=2/3)", "blend(a=1, b=2)"),
        ("blend(a=0.3333333333333333, b=0.6666666666666666)", "blend(a=1, b=2)"),
        ("blend(a=6972290, b=3291033)", "blend(a=282573, b=133379)"),
        ("blend(a=6972290, b=3291033, c=77)", "blend(a=679333, b=320656, c=7)"),
        ("blend(a=2.5e3, b=1E-1)", "blend(a=25000, b=1)"),
        ("blend(a=0.123457, b=1)", "blend(a=109890, b=890107)"),
        ("blend(a=1/3:1, b=2/3:1) | phases(7)", "blend(a=1:1, b=2:1) | phases(7)"),
        (
            "blend(a=0.6:0.4, b=0.399999:0.600001) | phases(7)",
            "blend(a=200000:199999, b=133333:299998) | phases(7)",
        ),
    ] {
        let plan = plan(&format!("window(8) | {written}"));
        assert_eq!(plan.to_string(), format!("window(8) | {printed} | batch(32)"), "{written}");
        assert_eq!(Plan::parse(&plan.to_string(), None), Ok(plan), "{written}");
    }
}

#[test]
fn a_split_prints_its_shares_without_a_common_divisor() {
    for (written, printed) in [
        ("split('98,1,1', part=train)", "split(\"98,1,1\", part=train, seed=0)"),
        ("split(\"0.9, 0.1\", seed=seed, part=valid)", "split(\"9,1,0\", part=valid, seed=7)"),
        ("split(shares='4,4,2', part=test, seed=3)", "split(\"2,2,1\", part=test, seed=3)"),
    ] {
        let plan = plan(&format!("window(8) | {written}"));
        assert_eq!(plan.to_string(), format!("window(8) | {printed} | batch(32)"));
        assert_eq!(Plan::parse(&plan.to_string(), None), Ok(plan), "{written}");
    }
    let megatron = plan("window(8) | order(megatron, seed=1, split='9,1', part=valid)");
    let printed = "window(8) | order(megatron, seed=1, split=\"9,1\", part=valid) | batch(32)";
    assert_eq!(megatron.to_string(), printed);
}

/// What a saved position may be loaded into: the same samples, whatever the files are called.
#[test]
fn plans_order_alike_whatever_the_names() {
    let one =
        plan("window(8) | shuffle(7) | blend(a=1, b=2) | pack(best) | filter('x') | remap('t')");
    let other = "window(8) | shuffle(7) | blend(c=1, '/d/e.bin'=2) | pack(best) | filter('y') | remap('u') | batch(5)";
    assert!(one.orders_as(&plan(other)));
    for changed in [
        "window(8) | shuffle(8) | blend(a=1, b=2) | pack(best) | filter('x') | remap('t')",
        "window(8) | shuffle(7) | blend(b=2, a=1) | pack(best) | filter('x') | remap('t')",
        "window(8) | shuffle(7) | blend(a=1, b=2) | pack(best) | filter(keep='x') | remap('t')",
        "window(8) | shuffle(7) | blend(a=1, b=2) | pack(best) | filter('x')",
    ] {
        assert!(!one.orders_as(&plan(changed)), "{changed}");
    }
}

#[test]
fn samples_drawn_are_those_of_the_blend() {
    let blend = plan("window(8) | blend(a=3, b=1:2, c=0) | phases(8)");
    assert_eq!(blend.drawn(0), Some(vec![0, 0, 0]));
    assert_eq!(blend.drawn(8), Some(vec![6, 2, 0]));
    assert_eq!(blend.drawn(8 + 50), Some(vec![6 + 30, 2 + 20, 0]));
    assert_eq!(plan("window(8)").drawn(11), Some(vec![11]));
}

#[test]
fn the_order_of_megatron_keeps_weights_as_written() {
    for (text, canonical) in [
        (
            "order(megatron,seed=seed)|window(9,overlap=1)",
            "window(9, overlap=1) | order(megatron, seed=7) | batch(32)",
        ),
        (
            "window(8) | order(name=megatron, samples=1_000, seed=0, split=' 969, 30.50,1')",
            "window(8) | order(megatron, seed=0, samples=1000, split=\"969,30.5,1\") | batch(32)",
        ),
        (
            "window(8) | blend(a=0.50, 'b c'=.3, d=0.0123456789012345) | order(megatron, seed=1, samples=5)",
            "window(8) | order(megatron, seed=1, samples=5) | blend(a=0.5, \"b c\"=0.3, d=0.0123456789012345) | batch(32)",
        ),
        (
            "window(8) | order(megatron, seed=1) | blend(a, 'b c')",
            "window(8) | order(megatron, seed=1) | blend(a, \"b c\") | batch(32)",
        ),
    ] {
        assert_eq!(plan(text).to_string(), canonical);
        assert_eq!(plan(canonical), plan(text));
    }
    let blend = plan("window(8) | blend(a=0.5, b=0.3, c=0.2) | order(megatron, seed=1, samples=5)");
    let parts: Vec<u32> = blend.blend().iter().map(|part| part.weights[0]).collect();
    assert_eq!(parts, [5, 3, 2]);
    let shares = [("a", 3), ("b", 6)].map(|(name, weight)| (String::from(name), weight));
    let several = plan("window(8) | order(megatron, seed=1)").blended(shares);
    assert_eq!(several, plan("window(8) | order(megatron, seed=1) | blend(a, b)"));
}

#[test]
fn the_order_of_megatron_is_made_from_documents() {
    let documents = |count| Documents::contiguous((0..count).map(|at| at % 90)).unwrap();
    let datasets = vec![documents(400), documents(90)];
    let settings = Settings {
        seed: 3,
        sequence_tokens: 64,
        extra_token: true,
        samples: Some(50),
        max_table_bytes: u64::MAX,
    };
    let text = "window(65, overlap=1) | order(megatron, seed=3, samples=50, split=\"3,1\") | blend(a=2, b=1)";
    let plan_of = |part: &str| plan(&text.replace("\"3,1\"", &format!("\"3,1\"{part}")));
    for (own, part) in ["", ", part=valid"].into_iter().enumerate() {
        let order = plan_of(part).megatron_order(datasets.clone(), u64::MAX).unwrap().unwrap();
        let source = |documents: &Documents| Source {
            documents: documents.clone(),
            part: split(&[3.0, 1.0], documents.len()).unwrap()[own].clone().unwrap(),
        };
        let sources = datasets.iter().map(source).collect();
        let same = MegatronOrder::new(sources, Some(&[2.0, 1.0]), &settings).unwrap();
        assert_eq!(order.samples(), 50);
        for ((dataset, k), expected) in order.cursor_at(0).zip(same.cursor_at(0)) {
            assert_eq!((dataset, k), expected);
            let pieces: Vec<_> = order.pieces(dataset, k).collect();
            assert_eq!(pieces, same.pieces(dataset, k).collect::<Vec<_>>());
        }
    }
    let plan = plan_of("");
    // Without documents there is no order, and no other one in its place.
    let file = crate::dataset::flat(Dtype::U32, 40_000).unwrap();
    let layouts = [0, 1].map(|dataset| plan.layout(dataset, file).unwrap());
    assert_eq!(plan.order(&layouts).unwrap_err(), OrderError::NeedsDocuments);
    assert!(Plan::parse("window(8)", None).unwrap().megatron_order(Vec::new(), 0).is_none());
}

/// Weights of each phase without a common divisor; no dataset where all are zero.
fn reduced(names: Vec<(String, Vec<u32>)>, phases: usize) -> Vec<Part> {
    let part = |(name, weights): (String, Vec<u32>)| Part { name, weights };
    let mut parts: Vec<Part> = names.into_iter().map(part).collect();
    for phase in 0..phases {
        let divisor = parts.iter().fold(0, |a, part| gcd(a, part.weights[phase]));
        if divisor == 0 {
            return Vec::new();
        }
        parts.iter_mut().for_each(|part| part.weights[phase] /= divisor);
    }
    parts
}

#[expect(clippy::too_many_lines, reason = "a value for every field of a plan")]
pub(crate) fn any_plan() -> impl Strategy<Value = Plan> {
    let block_bytes = (MIN_BLOCK_BYTES >> 10..=BLOCK_BYTES >> 10).prop_map(|kib| kib << 10);
    let groups = (1..=crate::order::MAX_GROUP_BLOCKS, block_bytes);
    let groups = groups.prop_map(|(blocks, block_bytes)| Groups { blocks, block_bytes });
    let shuffle = (any::<u64>(), prop::option::of(groups));
    let shuffle = shuffle.prop_map(|(seed, groups)| Shuffle { seed, groups });
    let weights = prop::collection::vec(0u32..1_000, 3);
    let names = prop::collection::btree_map("[^\\p{C}]{0,12}|[a-z0-9./-]{1,20}", weights, 0..8);
    let starts = prop::collection::btree_set(1..=MAX_PHASE_START, 0..3);
    let blend = (names, starts).prop_map(|(names, starts)| {
        let phases = starts.len() + 1;
        let names = names.into_iter().map(|(name, weights)| (name, weights[..phases].to_vec()));
        let blend = reduced(names.collect(), phases);
        let starts = if blend.is_empty() { Vec::new() } else { starts.into_iter().collect() };
        (blend, starts)
    });
    let narrow = prop::option::of((prop::sample::select(vec![Dtype::U16, Dtype::U32]), 0..4u32));
    let remap = prop::option::of("[^\\p{C}]{1,12}");
    let bits = prop::option::of(9..=31u8);
    let codec = (prop::sample::select(Codec::ALL.to_vec()), -7..=3i32, any::<bool>());
    let codec = prop::option::of(codec.prop_map(|(codec, level, always)| {
        let level = if codec == Codec::Zstd { level } else { 0 };
        Compression::new(codec, level, always).unwrap()
    }));
    let widen = prop::option::of(prop::sample::select(vec![Dtype::U32, Dtype::I32, Dtype::I64]));
    let window = (1..=MAX_WINDOW, any::<prop::sample::Index>(), any::<bool>(), any::<bool>());
    let window = window.prop_map(|(window, overlap, overlaps, pairs)| {
        (
            window,
            if overlaps { overlap.index(window as usize) as u32 } else { 0 },
            pairs && window > 1,
        )
    });
    let wasm = prop::option::of(("[^\\p{C}]{1,12}", any::<[u8; 32]>()));
    let wasm = wasm.prop_map(|module| module.map(|(name, sha256)| UserModule { name, sha256 }));
    let quantize = prop::option::of(any_quantize());
    let list = ("[^\\p{C}]{1,12}", any::<bool>()).prop_map(|(list, keep)| Filter { list, keep });
    let dedup = prop::sample::select(vec![Dedup::Within, Dedup::Across]);
    let selection = (prop::option::of(list), prop::option::of(dedup));
    let selection = selection.prop_map(|(filter, dedup)| Selection { filter, dedup });
    let shares = vec![[99, 1, 0], [1, 1, 1], [0, 1, 0], [999_998, 1, 1]];
    let split = (prop::sample::select(shares), any::<u64>()).prop_map(|(shares, seed)| Split {
        shares,
        part: SplitPart::Valid,
        seed,
    });
    let split = (prop::option::of(split), any::<bool>());
    let fit = prop::sample::select(Fit::ALL.to_vec());
    let pack = prop::option::of((fit, any::<u32>()).prop_map(|(fit, pad)| Pack { fit, pad }));
    let labels = prop::option::of(prop::sample::select(vec![Labels::Targets, Labels::All]));
    let ignore = (prop::option::of(any::<i64>()), labels);
    let weight = prop::sample::select(vec!["0", "1", "0.25", "1/3", "1e30"]);
    let weight = prop::option::of(weight.prop_map(|text| Decimal::parse(text).unwrap()));
    let weights = prop::option::of(weight.prop_map(|missing| LossWeights { missing }));
    let rows = (pack, ignore, (any::<bool>(), weights), selection, split);
    let types = (narrow, widen, (remap, bits, codec, quantize, wasm));
    (window, prop::option::of(shuffle), blend, types, 1..=2_048u32, rows).prop_map(
        |(
            (window, overlap, pairs),
            shuffle,
            (blend, phases),
            (narrow, widen, forms),
            batch,
            (
                pack,
                (ignore, labels),
                (positions, loss_weights),
                selection,
                (split, mixes_tokenizers),
            ),
        )| {
            let (narrow, bitpack, compress) = legal_forms(narrow, widen, forms.1, forms.2);
            let batch = batch.min((MAX_BATCH_TOKENS / u64::from(window)) as u32);
            let plan = Plan {
                window,
                overlap: if pack.is_some() { 0 } else { overlap },
                pack,
                shuffle,
                megatron: None,
                shape: Shape::of(&blend),
                blend,
                phases,
                mixes_tokenizers,
                selection,
                split,
                remap: forms.0,
                wasm: forms.4,
                narrow,
                bitpack,
                compress,
                quantize: None,
                widen,
                pairs,
                ignore: ignore.filter(|_| pairs),
                labels: labels
                    .filter(|labels| pairs && (ignore.is_some() || *labels == Labels::All)),
                positions,
                loss_weights,
                batch,
            };
            with_quantize(plan, forms.3)
        },
    )
}

fn any_quantize() -> impl Strategy<Value = Quantize> {
    let deliver = vec![Deliver::Source, Deliver::As(Dtype::F16), Deliver::Quantized];
    let quantize = (prop::sample::select(Quant::ALL.to_vec()), prop::sample::select(deliver));
    quantize.prop_map(|(to, deliver)| Quantize { to, deliver })
}

/// The plan without what is for tokens, if it quantizes.
fn with_quantize(plan: Plan, quantize: Option<Quantize>) -> Plan {
    let Some(quantize) = quantize else {
        return plan;
    };
    Plan {
        overlap: 0,
        pack: None,
        ignore: None,
        labels: None,
        positions: false,
        loss_weights: None,
        remap: None,
        wasm: None,
        narrow: None,
        bitpack: None,
        widen: None,
        pairs: plan.pairs && quantize.deliver != Deliver::Quantized,
        quantize: Some(quantize),
        ..plan
    }
}

/// The nearest forms that go together.
fn legal_forms(
    narrow: Option<(Dtype, u32)>,
    widen: Option<Dtype>,
    bits: Option<u8>,
    compress: Option<Compression>,
) -> (Option<Narrow>, Option<u8>, Option<Compression>) {
    let widened = matches!(widen, Some(Dtype::U32 | Dtype::I64));
    let overflow = match narrow {
        Some((Dtype::U16, 1)) if widened => Overflow::Escape,
        Some((_, 2)) => Overflow::Saturate(300),
        _ => Overflow::Refuse,
    };
    let narrow = narrow.map(|(to, _)| Narrow { to, overflow });
    let packs = |bits: &u8| {
        let room = narrow.is_none_or(|narrow| u32::from(*bits) < 8 * narrow.to.bytes());
        room && overflow != Overflow::Escape && compress.is_none()
    };
    (narrow, bits.filter(packs), compress)
}

proptest! {
    #[test]
    fn a_printed_plan_reads_back(plan in any_plan()) {
        let text = plan.to_string();
        prop_assert_eq!(Plan::parse(&text, None).map_err(|e| e.render(&text)), Ok(plan));
    }

    #[test]
    fn no_text_panics(
        text in prop_oneof![
            any::<String>(),
            "((window|overlap|shuffle|order|megatron|split|samples|blocks|block|4KiB|blend|phases|filter|keep|dedup|across|1:2|pack|best|pad|ignore|-100|positions|loss_weights|missing|narrow|widen|pairs|batch|remap|wasm|sha256|bitpack|compress|quantize|int8|deliver|lz4|overflow|saturate|seed|u16|a|0\\.5|-1|2048|\"x|\"|'|\\\\|[(),=| \n])){0,25}",
        ],
    ) {
        if let Err(error) = Plan::parse(&text, None) {
            prop_assert!(!error.render(&text).is_empty());
            prop_assert!(text.get(error.span.clone()).is_some(), "{:?}", error);
        }
    }
}
