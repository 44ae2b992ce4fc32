//! Modules as their users may write them, written as text.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use sha2::{Digest, Sha256};
use xio::dataset::Dtype;
use xio::kernel::{MapFault, TokenMap, Trap};

use super::weight::{self, Weight};
use super::{
    HEAVY, HEAVY_AT_ONCE, MAX_MODULE_BYTES, MAX_WEIGHT, ModuleError, PLACE_WAIT, Places,
    UserAction, again_if_late,
};

/// A module around the body of a function from a token of `u32` and its number to a token.
fn each(body: &str) -> String {
    whole(
        "(local $i i32) (local $at i32)
         (loop $next
           (local.set $at (i32.add (local.get $buffer) (i32.shl (local.get $i) (i32.const 2))))
           (i32.store (local.get $at) (call $one
             (i32.load (local.get $at))
             (i64.add (local.get $first) (i64.extend_i32_u (local.get $i)))))
           (local.set $i (i32.add (local.get $i) (i32.const 1)))
           (br_if $next (i32.lt_u (local.get $i) (local.get $count))))
         (i32.const 0)",
    ) + &format!("(func $one (param $token i32) (param $number i64) (result i32) {body}))")
}

/// A module around the body of its export for `u32`, without the last parenthesis.
fn whole(body: &str) -> String {
    format!(
        "(module
           (memory (export \"memory\") 20)
           (global $state (mut i32) (i32.const 0))
           (func (export \"dquant_buffer\") (param i32) (result i32) (i32.const 65536))
           (func (export \"dquant_map_u32\")
             (param $buffer i32) (param $count i32) (param $first i64) (result i32) {body})"
    )
}

fn load(text: &str) -> Result<UserAction, ModuleError> {
    let bytes = wat::parse_str(text).expect("the text is a module");
    UserAction::load(&bytes, &Sha256::digest(&bytes).into())
}

fn map(text: &str, tokens: &[u32], first_token: u64) -> Result<Vec<u32>, MapFault> {
    let action = load(text).expect("the module is allowed");
    action.check_type(Dtype::U32).expect("it maps u32");
    map_with(&action, tokens, first_token)
}

fn map_with(action: &UserAction, tokens: &[u32], first_token: u64) -> Result<Vec<u32>, MapFault> {
    let mut bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    action.map(&mut bytes, Dtype::U32, first_token)?;
    Ok(bytes.as_chunks().0.iter().map(|raw| u32::from_le_bytes(*raw)).collect())
}

#[test]
fn a_module_maps_tokens_by_value_and_number() {
    let text = each("(i32.add (local.get $token) (i32.wrap_i64 (local.get $number)))");
    let tokens: Vec<u32> = (0..262_144).map(|i| i * 31).collect();
    let first = 1_000_000_u64;
    let want: Vec<u32> = (0..).zip(&tokens).map(|(i, token)| token + first as u32 + i).collect();
    assert!(map(&text, &tokens, first) == Ok(want));
    assert_eq!(map(&text, &[7], 3), Ok(vec![10]));
}

#[test]
fn a_module_that_misbehaves_is_stopped_and_named_by_what_it_did() {
    let spin = "(loop $for_ever (br $for_ever)) (i32.const 0)";
    let grow = "(drop (memory.grow (i32.const 1000))) (i32.const 0)";
    let far = "(i32.store (i32.const -4) (i32.const 1)) (i32.const 0)";
    let deep = "(call $deep (i32.const 0)) (i32.const 0)) (func $deep (param i32)
                (call $deep (i32.add (local.get 0) (i32.const 1)))";
    let divide = "(i32.div_u (i32.const 1) (i32.wrap_i64 (local.get $first)))";
    for (body, fault) in [
        (spin, MapFault::Time),
        (grow, MapFault::Memory),
        ("unreachable", MapFault::Trap(Trap::Unreachable)),
        (far, MapFault::Trap(Trap::OutOfBounds)),
        (deep, MapFault::Trap(Trap::StackOverflow)),
        (divide, MapFault::Trap(Trap::Arithmetic)),
        ("(i32.const -7)", MapFault::Code(-7)),
    ] {
        let text = whole(body) + ")";
        let action = load(&text).expect("the module is allowed");
        assert_eq!(map_with(&action, &[1, 2, 3], 0), Err(fault), "{body}");
        // A module that needs too much time is not run again; the others answer as before.
        assert_eq!(map_with(&action, &[1, 2, 3], 0), Err(fault), "{body}");
        assert_eq!(action.spent.into_inner(), fault == MapFault::Time);
    }
    // A loop that fills memory in few long instructions.
    let fill = "(loop $for_ever (memory.fill (i32.const 0) (i32.const 1) (i32.const 1310720)) (br $for_ever)) (i32.const 0)";
    assert_eq!(map(&(whole(fill) + ")"), &[1], 0), Err(MapFault::Time));
}

#[test]
fn only_a_block_that_exceeded_its_time_is_tried_once_more() {
    let outcome = |outcomes: &[Result<(), MapFault>]| {
        let mut left = outcomes.iter();
        let last = again_if_late(|| *left.next().expect("it is tried at most twice"));
        (last, left.len())
    };
    let (late, trap) = (Err(MapFault::Time), Err(MapFault::Trap(Trap::Unreachable)));
    assert_eq!(outcome(&[Ok(()), late]), (Ok(()), 1));
    assert_eq!(outcome(&[late, Ok(())]), (Ok(()), 0));
    assert_eq!(outcome(&[late, late]), (late, 0));
    assert_eq!(outcome(&[trap, Ok(())]), (trap, 1));
}

#[test]
fn what_a_start_function_does_counts_as_well() {
    let start =
        |body: &str| whole("(i32.const 0)") + &format!("(start $start) (func $start {body}))");
    let spin = start("(loop $for_ever (br $for_ever))");
    assert_eq!(map(&spin, &[1], 0), Err(MapFault::Time));
    let grow = start("(drop (memory.grow (i32.const 1000)))");
    assert_eq!(map(&grow, &[1], 0), Err(MapFault::Memory));
    assert_eq!(map(&start("nop"), &[1], 0), Ok(vec![1]));
}

/// A result that depends on where the block was cut, or on blocks before it.
#[test]
fn tokens_have_to_be_mapped_each_by_itself() {
    let before =
        "(i32.add (i32.load (local.get $at)) (i32.load (i32.sub (local.get $at) (i32.const 4))))";
    let sum = whole(&format!(
        "(local $i i32) (local $at i32)
         (loop $next
           (local.set $at (i32.add (local.get $buffer) (i32.shl (local.get $i) (i32.const 2))))
           (i32.store (local.get $at) {before})
           (local.set $i (i32.add (local.get $i) (i32.const 1)))
           (br_if $next (i32.lt_u (local.get $i) (local.get $count))))
         (i32.const 0)"
    )) + ")";
    let tokens: Vec<u32> = (1..5_000).collect();
    let length = whole("(i32.store (local.get $buffer) (local.get $count)) (i32.const 0)") + ")";
    let counter = each(
        "(global.set $state (i32.add (global.get $state) (i32.const 1)))
         (i32.add (local.get $token) (global.get $state))",
    );
    for text in [&sum, &length, &counter] {
        assert_eq!(map(text, &tokens, 7), Err(MapFault::NotByItself), "{text}");
    }
    // Nothing is carried over: with one token for a block this module maps each by itself.
    let action = load(&counter).expect("the module is allowed");
    for token in 0..100 {
        assert_eq!(map_with(&action, &[token], 0), Ok(vec![token + 1]));
    }
}

#[test]
fn a_buffer_that_cannot_hold_the_block_is_refused() {
    for place in ["0", "65540", "1310720", "1310704", "-16"] {
        let text = (whole("(i32.const 0)") + ")")
            .replace("i32.const 65536", &format!("i32.const {place}"));
        let tokens = [0; 1_000];
        assert_eq!(map(&text, &tokens, 0), Err(MapFault::Buffer), "{place}");
    }
}

#[test]
fn a_module_that_may_not_run_is_refused_with_the_reason() {
    let good = whole("(i32.const 0)") + ")";
    assert!(load(&good).is_ok());
    let without = |part: &str, other: &str| good.replace(part, other);
    let import = good.replace("(memory", "(import \"env\" \"now\" (func (result i64))) (memory");
    for (text, part) in [
        (import.as_str(), "it imports env.now"),
        ("(module)", "no export memory"),
        (&without("dquant_buffer", "buffer"), "no export dquant_buffer(i32) -> i32"),
        (&without(") 20)", ") 2000)"), "131072000 which exceeds the limit"),
        ("(module (memory 1) (memory 1))", "multi"),
        (
            "(module (func (param i32) (result i32) (local.get 0)) (memory (export \"memory\") i64 1))",
            "memory64",
        ),
        (
            "(module (func (drop (i32x4.relaxed_trunc_f32x4_s (v128.const i32x4 0 0 0 0)))))",
            "relaxed",
        ),
        ("(module (memory 1 1 shared))", "threads"),
    ] {
        let error = load(text).map(drop).expect_err(part).to_string();
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
    let action = load(&good).expect("it is allowed");
    let error = action.check_type(Dtype::U16).expect_err("it maps u32 only").to_string();
    assert!(error.contains("no export dquant_map_u16(i32, i32, i64) -> i32"), "{error}");
    // Text is no module, nor is anything that was damaged or is another.
    let bytes = wat::parse_str(&good).expect("the text is a module");
    let refused = |bytes: &[u8]| {
        UserAction::load(bytes, &Sha256::digest(bytes).into()).map(drop).expect_err("refused")
    };
    assert!(matches!(refused(good.as_bytes()), ModuleError::Invalid { .. }));
    assert!(matches!(refused(&bytes[..bytes.len() - 3]), ModuleError::Invalid { .. }));
    assert!(matches!(refused(&[]), ModuleError::Invalid { .. }));
    let large = vec![0; MAX_MODULE_BYTES as usize + 1];
    assert!(matches!(refused(&large), ModuleError::TooLarge { .. }));
    let other = UserAction::load(&bytes, &[7; 32]).map(drop).expect_err("another module");
    assert!(other.to_string().ends_with(&format!("the plan says {}", "07".repeat(32))), "{other}");
}

/// Results have to be equal on every processor.
#[test]
fn what_is_no_number_has_one_bit_pattern() {
    let text = each(
        "(i32.reinterpret_f32 (f32.add (f32.const nan:0x7) (f32.reinterpret_i32 (local.get $token))))",
    );
    assert_eq!(map(&text, &[1, 0xffc0_1234], 0), Ok(vec![0x7fc0_0000; 2]));
}

/// A number in LEB128.
fn leb(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

fn counted(items: &[Vec<u8>]) -> Vec<u8> {
    [leb(items.len()), items.concat()].concat()
}

/// A module that maps nothing, and has functions `() -> ()` of these bodies, with their locals.
fn with_functions(bodies: &[Vec<u8>]) -> Vec<u8> {
    const I32: u8 = 0x7f;
    let function = |takes: &[u8], returns: &[u8]| {
        [&[0x60][..], &leb(takes.len()), takes, &leb(returns.len()), returns].concat()
    };
    let types = [function(&[I32], &[I32]), function(&[I32, I32, 0x7e], &[I32]), function(&[], &[])];
    let mut functions = vec![vec![0], vec![1]];
    functions.resize(2 + bodies.len(), vec![2]);
    let export = |name: &str, kind: u8, index: u8| {
        [leb(name.len()), name.as_bytes().to_vec(), vec![kind, index]].concat()
    };
    let exports =
        [export("memory", 2, 0), export("dquant_buffer", 0, 0), export("dquant_map_u32", 0, 1)];
    let ours = [vec![0, 0x41, 0x10, 0x0b], vec![0, 0x41, 0, 0x0b]];
    let sized = |body: &Vec<u8>| [leb(body.len()), body.clone()].concat();
    let code: Vec<Vec<u8>> = ours.iter().chain(bodies).map(sized).collect();
    let section = |id: u8, body: Vec<u8>| [vec![id], leb(body.len()), body].concat();
    let sections = [
        section(1, counted(&types)),
        section(3, counted(&functions)),
        section(5, counted(&[vec![0, 1]])),
        section(7, counted(&exports)),
        section(10, counted(&code)),
    ];
    [&b"\0asm\x01\0\0\0"[..], &sections.concat()].concat()
}

/// A function with values that live from its beginning to its end, beside steps of straight code on
/// the first and another.
fn long_lived(kind: u8, own: &[u8], step: &[u8], width: usize, count: usize) -> Vec<u8> {
    let set = |at| [&[0x20][..], &leb(at - 1), own, &[0x21], &leb(at)].concat();
    let with = |at: usize| [&[0x20, 1, 0x20][..], &leb(1 + at % width), step, &[0x21, 1]].concat();
    let setup: Vec<u8> = (2..=width).flat_map(set).collect();
    let steps: Vec<u8> = (0..count).flat_map(with).collect();
    let uses: Vec<u8> = (0..width).flat_map(with).collect();
    let locals = [vec![2, 1, 0x7f], leb(width), vec![kind]].concat();
    with_functions(&[[locals, setup, steps, uses, vec![0x20, 1, 0x1a, 0x0b]].concat()])
}

/// Compiling any of these took minutes, or gigabytes.
#[test]
fn a_module_that_would_take_too_much_to_compile_is_refused() {
    let locals = |count: usize, functions: usize| {
        let body = [vec![1], leb(count), vec![0x7e, 0x0b]].concat();
        with_functions(&vec![body; functions])
    };
    // Operators between `width` numbers that are pushed and dropped.
    let alive = |width: usize, operators: &[u8], count: usize| {
        let body = [
            vec![0],
            [0x41, 0].repeat(width),
            operators.repeat(count),
            [0x1a].repeat(width),
            vec![0x0b],
        ];
        with_functions(&[body.concat()])
    };
    let (blocks, loops, calls) = (&[0x02, 0x40, 0x0b], &[0x03, 0x40, 0x0b], &[0x10, 0x02]);
    // What may trap is a branch, too, and so is what the sandbox does in a function of its own.
    let loads = &[0x41, 0, 0x28, 2, 0, 0x1a];
    let vector_loads = &[0x41, 0, 0xfd, 0, 4, 0, 0x1a];
    let divisions = &[0x41, 1, 0x41, 1, 0x6d, 0x1a];
    let truncations = &[0x43, 0, 0, 0, 0, 0xa8, 0x1a];
    let fills = &[0x41, 0, 0x41, 0, 0x41, 0, 0xfc, 0x0b, 0];
    let grows = &[0x41, 0, 0x40, 0, 0x1a];
    // `if` over one of many locals, each of which changes somewhere.
    let changes = |locals: usize, count: usize| {
        let change = |at: usize| {
            let (one, other) = (leb(at % locals), leb(at * 7 % locals));
            [&[0x20][..], &one, &[0xa7, 0x04, 0x40, 0x20], &other, &[0x21], &one, &[0x0b]].concat()
        };
        let all: Vec<u8> = (0..count).flat_map(change).collect();
        with_functions(&[[vec![1], leb(locals), vec![0x7e], all, vec![0x0b]].concat()])
    };
    // A loop with many ways back, in which each local takes the value of the one before.
    let go_round = |locals: usize, count: usize| {
        let from = |at: usize| [&[0x20][..], &leb(at - 1), &[0x21], &leb(at)].concat();
        let shift: Vec<u8> = (1..locals).rev().flat_map(from).collect();
        let back = [0x20, 0, 0x0d, 0].repeat(count);
        let code = [&[0x03, 0x40][..], &shift, &back, &[0x0b, 0x0b]].concat();
        with_functions(&[[vec![1], leb(locals), vec![0x7f], code].concat()])
    };
    let floats = |width, count| long_lived(0x7d, &[0x8c], &[0x92], width, count);
    let vectors = |width, count| long_lived(0x7b, &[0xfd, 0x4d], &[0xfd, 0xdf, 1], width, count);
    let load = |bytes: &[u8]| UserAction::load(bytes, &Sha256::digest(bytes).into());
    let heavy = [
        ("numbers that live long", long_lived(0x7f, &[0x67], &[0x73], 8_000, 15_000)),
        ("floats that live long", floats(300, 28_000)),
        ("more floats that live long", floats(1_000, 10_000)),
        ("vectors that live long", vectors(300, 20_000)),
        ("locals", locals(49_000, 30_000)),
        ("blocks", alive(1_000, blocks, 80_000)),
        ("loops", alive(1_000, loops, 80_000)),
        ("calls", alive(1_000, calls, 60_000)),
        ("changes", changes(800, 20_000)),
        ("loads", alive(4_000, loads, 12_000)),
        ("vector loads", alive(4_000, vector_loads, 12_000)),
        ("divisions", alive(4_000, divisions, 12_000)),
        ("truncations", alive(4_000, truncations, 12_000)),
        ("fills", alive(4_000, fills, 12_000)),
        ("grows", alive(4_000, grows, 15_000)),
        ("values go round", go_round(1_000, 2_000)),
        ("small functions", with_functions(&vec![vec![0, 0x0b]; 60_000])),
    ];
    for (name, module) in heavy {
        assert!(module.len() as u64 <= MAX_MODULE_BYTES, "{name}: {}", module.len());
        let refused = load(&module).map(drop).expect_err(name);
        assert!(matches!(refused, ModuleError::TooHeavy { .. }), "{name}: {refused}");
    }
    let light = [locals(1_000, 100), changes(50, 2_000), floats(30, 5_000), vectors(30, 5_000)];
    for module in light {
        load(&module).map(drop).expect("it is an ordinary program");
    }
}

/// Sessions with ordinary modules do not wait for those with heavy ones.
#[test]
fn a_light_module_is_compiled_while_heavy_ones_are() {
    let _heavy = [(); HEAVY_AT_ONCE].map(|()| HEAVY.take(PLACE_WAIT).expect("a place"));
    let text = each("(local.get $token)");
    load(&text).map(drop).expect("it does not wait");
}

#[test]
fn a_heavy_module_waits_for_others_but_not_for_ever() {
    static FEW: Places = Places { taken: Mutex::new(0), freed: Condvar::new() };
    let take = || FEW.take(Duration::from_millis(1));
    let mut taken = [(); HEAVY_AT_ONCE].map(|()| Some(take().expect("it is free")));
    let busy = take().map(drop).expect_err("all are taken");
    assert_eq!(busy, ModuleError::Busy);
    assert_eq!(
        busy.to_string(),
        "2 other large modules were still being compiled after a wait of 10 seconds"
    );
    taken[0] = None;
    let _one = take().expect("one is free again");
    assert!(take().is_err());
}

/// The weight of a function of ten `i32` locals and two `i64` with this code.
fn weight_of(code: &[u8]) -> Weight {
    let setup = (1..10).flat_map(|at| [0x20, 0, 0x41, at, 0x6a, 0x21, at]).collect();
    let locals = vec![2, 10, 0x7f, 2, 0x7e];
    let module = with_functions(&[[locals, setup, code.to_vec(), vec![0x0b]].concat()]);
    assert!(module.len() as u64 <= MAX_MODULE_BYTES, "{}", module.len());
    weight::of(&module).expect("it is valid")
}

/// `count` operators, each of which takes two of ten locals and sets one.
fn mixed_locals(operators: &[u8], count: usize) -> Vec<u8> {
    let step = |at: usize| {
        let mixed = super::mixed(at as u64);
        let [one, other, to] = [0, 8, 16].map(|by| ((mixed >> by) % 10) as u8);
        [0x20, one, 0x20, other, operators[at % operators.len()], 0x21, to]
    };
    (0..count).flat_map(step).collect()
}

/// Optimising any of these took seconds to minutes, and up to gigabytes.
#[test]
fn a_module_that_would_take_too_much_to_optimise_is_compiled_as_it_is() {
    let chain =
        |step: &[u8], count: usize| [&[0x20, 0][..], &step.repeat(count), &[0x21, 0]].concat();
    let rotations = [0x41, 7, 0x77, 0x41, 13, 0x78, 0x20, 1, 0x73];
    let shifts = [0x41, 3, 0x74, 0x41, 3, 0x76, 0x41, 31, 0x71, 0x20, 1, 0x72];
    let through_memory: Vec<u8> = mixed_locals(&[0x6a, 0x6b], 2_000)
        .chunks(7)
        .flat_map(|step| {
            [&[0x41, 0][..], &step[..5], &[0x36, 2, 0, 0x41, 0, 0x28, 2, 0], &step[5..]].concat()
        })
        .collect();
    // An operator that does nothing after each.
    let beside_zero: Vec<u8> = mixed_locals(&[0x6a, 0x6b], 2_000)
        .chunks(7)
        .flat_map(|step| [&step[..5], &[0x41, 0, 0x73], &step[5..]].concat())
        .collect();
    let slow = [
        ("rotations by constants", chain(&rotations, 9_000)),
        ("rotations by a local", chain(&[0x20, 1, 0x77], 3_000)),
        ("shifts", chain(&shifts, 9_000)),
        ("comparisons", chain(&[0x20, 1, 0x4e], 9_000)),
        ("sums", mixed_locals(&[0x6a, 0x6b], 2_000)),
        ("products", mixed_locals(&[0x6c], 2_000)),
        ("conjunctions", mixed_locals(&[0x71], 2_000)),
        ("differences through memory", through_memory),
        ("sums beside nothing", beside_zero),
        ("a chain and few sums", [chain(&rotations, 2_000), mixed_locals(&[0x6a], 500)].concat()),
    ];
    for (name, code) in slow {
        let weight = weight_of(&code);
        assert!(weight.optimised > MAX_WEIGHT, "{name}: {weight:?}");
        assert!(weight.plain <= MAX_WEIGHT, "{name}: {weight:?}");
    }
    // Fewer operators, and some that are never put into another order.
    for code in [chain(&rotations, 700), mixed_locals(&[0x6a], 200), mixed_locals(&[0x72], 1_000)] {
        let weight = weight_of(&code);
        assert!(weight.optimised <= MAX_WEIGHT / 2, "{weight:?}");
    }
}
