//! What a unit of a module's weight costs to compile (`host::wasm::weight`).
//!
//! ```text
//! cargo run --release -p host --features wasm --example compile_bench [-- PART [FILTER]]
//! ```
//!
//! Builds modules with `1/PART` of the weight that is allowed, an eighth without an argument: one
//! for every operator that the sandbox accepts, alone and between values that are alive, and the
//! worst arrangements known. Prints the CPU time, the growth of the peak of memory and the time for
//! 10^6 units of weight, the most expensive first. FILTER is part of a name, or the path of a
//! module, of which it prints the same.
//!
//! Operators are not listed: every opcode is tried with every form of operands that an operator
//! has.

use std::collections::BTreeSet;
use std::fmt;
use std::process::Command;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use sha2::{Digest, Sha256};

const I32: u8 = 0x7f;
const I64: u8 = 0x7e;
const F32: u8 = 0x7d;
const F64: u8 = 0x7c;
const V128: u8 = 0x7b;
const TYPES: [u8; 5] = [I32, I64, F32, F64, V128];

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

fn section(id: u8, body: &[u8]) -> Vec<u8> {
    [vec![id], leb(body.len()), body.to_vec()].concat()
}

fn function(takes: &[u8], returns: &[u8]) -> Vec<u8> {
    [&[0x60][..], &leb(takes.len()), takes, &leb(returns.len()), returns].concat()
}

/// What a module has beside the functions that are measured.
#[derive(Clone, Default)]
struct Around {
    types: Vec<Vec<u8>>,
    /// Functions of type 2, `() -> ()`, unless a type is given.
    of_type: Option<usize>,
    exported: bool,
    elements: usize,
}

/// A module with the exports of an action, a table, a passive element and data segment, a global of
/// each kind, and functions of these bodies: locals and code, without the last `end`. Function 0
/// takes and returns an `i32`.
fn module(around: &Around, bodies: &[Vec<u8>]) -> Vec<u8> {
    let mut types =
        vec![function(&[I32], &[I32]), function(&[I32, I32, I64], &[I32]), function(&[], &[])];
    types.extend_from_slice(&around.types);
    let mut functions = vec![leb(0), leb(1)];
    functions.resize(2 + bodies.len(), leb(around.of_type.unwrap_or(2)));
    let export = |name: &str, kind: u8, index: usize| {
        [leb(name.len()), name.as_bytes().to_vec(), vec![kind], leb(index)].concat()
    };
    let mut exports =
        vec![export("memory", 2, 0), export("dquant_buffer", 0, 0), export("dquant_map_u32", 0, 1)];
    if around.exported {
        exports.extend((0..bodies.len()).map(|at| export(&format!("{at:x}"), 0, 2 + at)));
    }
    let constant = |kind: u8| match kind {
        I32 => vec![0x41, 0],
        I64 => vec![0x42, 0],
        F32 => [&[0x43][..], &[0; 4]].concat(),
        F64 => [&[0x44][..], &[0; 8]].concat(),
        _ => [&[0xfd, 0x0c][..], &[0; 16]].concat(),
    };
    let globals: Vec<Vec<u8>> =
        TYPES.iter().map(|kind| [&[*kind, 1][..], &constant(*kind), &[0x0b]].concat()).collect();
    let segment = [vec![1, 0], counted(&vec![leb(0); around.elements.max(1)])].concat();
    let mut code = vec![vec![0, 0x41, 0x10, 0x0b], vec![0, 0x41, 0, 0x0b]];
    code.extend(bodies.iter().map(|body| [&body[..], &[0x0b]].concat()));
    let code: Vec<Vec<u8>> =
        code.iter().map(|body| [leb(body.len()), body.clone()].concat()).collect();
    let sections = [
        section(1, &counted(&types)),
        section(3, &counted(&functions)),
        section(4, &counted(&[vec![0x70, 0, 10]])),
        section(5, &counted(&[vec![0, 1]])),
        section(6, &counted(&globals)),
        section(7, &counted(&exports)),
        section(9, &counted(&[segment])),
        section(12, &leb(1)),
        section(10, &counted(&code)),
        section(11, &counted(&[vec![1, 1, 7]])),
    ];
    [&b"\0asm\x01\0\0\0"[..], &sections.concat()].concat()
}

fn load(bytes: &[u8]) -> Result<(), host::wasm::ModuleError> {
    host::wasm::UserAction::load(bytes, &Sha256::digest(bytes).into()).map(drop)
}

/// Locals 0 to 9: two of each type.
fn locals() -> Vec<u8> {
    counted(&TYPES.map(|kind| vec![2, kind]))
}

fn get(kind: u8) -> [u8; 2] {
    let at = TYPES.iter().position(|other| *other == kind).unwrap_or_default();
    [0x20, 2 * at as u8]
}

/// Uses a value: it is added to the `i32` in local 1.
fn used(kind: u8) -> Vec<u8> {
    let to_i32: &[u8] = match kind {
        I32 => &[],
        I64 => &[0xa7],
        F32 => &[0xbc],
        F64 => &[0xbd, 0xa7],
        _ => &[0xfd, 0x64],
    };
    [to_i32, &[0x20, 1, 0x6a, 0x21, 1]].concat()
}

/// One operator with the types of its operands and of its result.
#[derive(Clone)]
struct Form {
    name: String,
    operands: Vec<u8>,
    /// The operator itself.
    code: Vec<u8>,
    result: Option<u8>,
}

impl Form {
    /// With operands from [`locals`], and its result used.
    fn alone(&self) -> Vec<u8> {
        let gets: Vec<u8> = self.operands.iter().flat_map(|kind| get(*kind)).collect();
        [gets, self.code.clone(), self.result.map(used).unwrap_or_default()].concat()
    }

    /// `count` times with operands by chance from `width` values of each of its types, which are
    /// used again at the end. A result of the first operand's type takes the place of one of them.
    fn on_long_lived(&self, width: usize, count: usize) -> Vec<u8> {
        let kinds: BTreeSet<u8> = self.operands.iter().copied().collect();
        let first = |of: u8| 2 + width * kinds.iter().position(|kind| *kind == of).unwrap_or(0);
        let mut declared = vec![vec![2, I32]];
        declared.extend(kinds.iter().map(|kind| [leb(width), vec![*kind]].concat()));
        let mut code = counted(&declared);
        for kind in &kinds {
            for at in first(*kind) + 1..first(*kind) + width {
                code.extend(
                    [&[0x20], &leb(at - 1)[..], operators_of(*kind).0, &[0x21], &leb(at)].concat(),
                );
            }
        }
        let collects = self.result.is_some() && self.result == self.operands.first().copied();
        for step in 0..count {
            for (at, kind) in self.operands.iter().enumerate() {
                let by_chance = if collects && at == 0 { 0 } else { drawn(3 * step + at) % width };
                code.extend([&[0x20], &leb(first(*kind) + by_chance)[..]].concat());
            }
            code.extend(&self.code);
            match self.result {
                Some(kind) if collects => code.extend([&[0x21], &leb(first(kind))[..]].concat()),
                result => code.extend(result.map(used).unwrap_or_default()),
            }
        }
        for kind in &kinds {
            for at in first(*kind)..first(*kind) + width {
                code.extend([&[0x20], &leb(at)[..], &used(*kind)].concat());
            }
        }
        [code, kept(I32, 1)].concat()
    }
}

/// All operators of the sandbox, each with the first form of operands that is valid.
fn operators() -> Vec<Form> {
    let one_byte = (0..=0xff_u8).filter(|op| !(0xfb..=0xfe).contains(op)).map(|op| vec![op]);
    let misc = (0..32).map(|op| vec![0xfc, op]);
    let vector = (0..=0xff).map(|op| [vec![0xfd], leb(op)].concat());
    one_byte.chain(misc).chain(vector).filter_map(|op| form(&op)).collect()
}

/// Operators that change the control flow are measured by hand.
const CONTROL: std::ops::RangeInclusive<u8> = 0x00..=0x0f;

fn form(op: &[u8]) -> Option<Form> {
    // Nothing; a memory, a place in it, a lane, an index or two; a place and a lane; sixteen bytes.
    let immediates: [&[u8]; 7] = [&[], &[0], &[0, 0], &[1, 0, 0], &[0, 0, 0], &[1, 0], &[0; 16]];
    if op.len() == 1 && CONTROL.contains(&op[0]) {
        return None;
    }
    let mut operands: Vec<Vec<u8>> = vec![vec![]];
    for length in 1..=3 {
        let longer = (operands.clone().into_iter().filter(|list| list.len() == length - 1))
            .flat_map(|list| TYPES.map(|kind| [&list[..], &[kind]].concat()));
        operands.extend(longer.collect::<Vec<_>>());
    }
    for operands in &operands {
        for immediate in immediates {
            for result in TYPES.iter().map(Some).chain([None]) {
                let name = op.iter().map(|byte| format!("{byte:02x}")).collect();
                let (operands, code) = (operands.clone(), [op, immediate].concat());
                let form = Form { name, operands, code, result: result.copied() };
                let whole = module(&Around::default(), &[[locals(), form.alone()].concat()]);
                if host::wasm::weight(&whole).is_ok() {
                    return Some(form);
                }
            }
        }
    }
    None
}

/// Keeps a local: what nobody can see is not compiled.
fn kept(kind: u8, local: usize) -> Vec<u8> {
    let global = TYPES.iter().position(|other| *other == kind).unwrap_or_default();
    [&[0x20][..], &leb(local), &[0x24], &leb(global)].concat()
}

/// `count` times `code` between `width` values that are alive from its beginning to its end.
fn between(width: usize, code: &[u8], count: usize) -> Vec<u8> {
    // Each is another value: the number of leading zeros of the one before.
    let values = [0x20, 0, 0x67, 0x22, 0].repeat(width);
    let uses = [0x20, 1, 0x6a, 0x21, 1].repeat(width);
    [locals(), values, code.repeat(count), uses, kept(I32, 1)].concat()
}

type Family = (String, Box<dyn Fn(usize) -> Vec<u8>>);

fn families(filter: &str) -> Vec<Family> {
    let mut all: Vec<Family> = Vec::new();
    let mut add =
        |name: &str, make: Box<dyn Fn(usize) -> Vec<u8>>| all.push((name.to_owned(), make));
    let flow: [(&str, &[u8]); 12] = [
        ("block", &[0x02, 0x40, 0x0b]),
        ("loop", &[0x03, 0x40, 0x0b]),
        ("loop again", &[0x03, 0x40, 0x20, 0, 0x0d, 0, 0x0b]),
        ("if", &[0x20, 0, 0x04, 0x40, 0x0b]),
        ("if else", &[0x20, 0, 0x04, 0x40, 0x05, 0x0b]),
        ("if set else set", &[0x20, 0, 0x04, 0x40, 0x20, 1, 0x21, 0, 0x05, 0x41, 3, 0x21, 0, 0x0b]),
        ("br_if", &[0x02, 0x40, 0x20, 0, 0x0d, 0, 0x0b]),
        ("br_table", &[0x02, 0x40, 0x20, 0, 0x0e, 3, 0, 0, 0, 0, 0x0b]),
        ("unreachable", &[0x20, 0, 0x04, 0x40, 0x00, 0x0b]),
        ("return", &[0x20, 0, 0x04, 0x40, 0x0f, 0x0b]),
        ("call", &[0x20, 0, 0x10, 0, 0x21, 0]),
        ("call_indirect", &[0x20, 0, 0x20, 0, 0x11, 0, 0, 0x21, 0]),
    ];
    for width in [0, 60, 500, 4_000] {
        for (name, code) in flow {
            let make = move |count| module(&Around::default(), &[between(width, code, count)]);
            add(&format!("{name}, {width} alive"), Box::new(make));
        }
    }
    let wanted = filter.is_empty() || filter.starts_with("operator");
    for form in wanted.then(operators).unwrap_or_default() {
        for width in [0, 1_000] {
            let code = form.alone();
            let make = move |count| module(&Around::default(), &[between(width, &code, count)]);
            add(&format!("operator {}, {width} alive", form.name), Box::new(make));
        }
        for width in [30, 300, 1_000, 3_000] {
            let name = format!("operator {} on {width} long-lived", form.name);
            let form = form.clone();
            let make = move |count| module(&Around::default(), &[form.on_long_lived(width, count)]);
            add(&name, Box::new(make));
        }
    }
    arrangements(&mut add);
    code_arrangements(&mut add);
    chains(&mut add);
    if filter.starts_with("alternating") {
        alternating(&mut add);
    }
    mixtures(&mut add);
    long_lived(&mut add);
    all
}

/// Arrangements of types and functions that are known to make compilers slow.
fn arrangements(add: &mut impl FnMut(&str, Box<dyn Fn(usize) -> Vec<u8>>)) {
    let plain = Around::default;
    add("functions", Box::new(move |count| module(&plain(), &vec![vec![0]; count])));
    let exported = Around { exported: true, ..plain() };
    add("exported functions", Box::new(move |count| module(&exported, &vec![vec![0]; count])));
    add(
        "types",
        Box::new(|count| {
            let types = (0..count).map(|at| function(&vec![I32; at % 7], &[])).collect();
            module(&Around { types, ..Around::default() }, &[])
        }),
    );
    add(
        "elements",
        Box::new(|count| module(&Around { elements: count, ..Around::default() }, &[])),
    );
    for params in [10, 1_000] {
        let around = Around {
            types: vec![function(&vec![I64; params], &[])],
            of_type: Some(3),
            exported: true,
            ..Around::default()
        };
        add(
            &format!("functions of {params} parameters"),
            Box::new(move |count| module(&around, &vec![vec![0]; count])),
        );
        let around = Around { types: vec![function(&vec![I32; params], &[])], ..Around::default() };
        add(
            &format!("indirect calls with {params} arguments"),
            Box::new(move |count| {
                let call = [[0x20, 0].repeat(params + 1), vec![0x11, 3, 0]].concat();
                module(&around, &[[locals(), call.repeat(count)].concat()])
            }),
        );
    }
    for many in [160, 5_000, 49_000] {
        add(
            &format!("functions of {many} locals"),
            Box::new(move |count| {
                let body = [vec![1], leb(many), vec![I64]].concat();
                module(&Around::default(), &vec![body; count])
            }),
        );
    }
}

/// Arrangements of the code of one function.
fn code_arrangements(add: &mut impl FnMut(&str, Box<dyn Fn(usize) -> Vec<u8>>)) {
    for nested in [
        &[0x03, 0x40, 0x20, 0, 0x0d, 0][..],
        &[0x02, 0x40, 0x20, 0, 0x0d, 0],
        &[0x20, 0, 0x04, 0x40],
    ] {
        for width in [0, 1_000] {
            add(
                &format!("nested {:02x}, {width} alive", nested[0]),
                Box::new(move |count| {
                    let code = [nested.repeat(count), vec![0x0b; count]].concat();
                    module(&Around::default(), &[between(width, &code, 1)])
                }),
            );
        }
    }
    for locals in [30, 1_000] {
        add(&format!("{locals} locals go round"), Box::new(move |count| go_round(locals, count)));
        add(
            &format!("{locals} locals change"),
            Box::new(move |count| {
                let change = |at: usize| {
                    let (one, other) = (leb(at % locals), leb(at * 7 % locals));
                    [&[0x20][..], &one, &[0xa7, 0x04, 0x40, 0x20], &other, &[0x21], &one, &[0x0b]]
                        .concat()
                };
                let all: Vec<u8> = (0..count).flat_map(change).collect();
                let body = [vec![1], leb(locals), vec![I64], all, collected(I64, locals)].concat();
                module(&Around::default(), &[body])
            }),
        );
    }
    for again in [false, true] {
        add(
            &format!("values kept for later, {}", if again { "in a loop" } else { "after loads" }),
            Box::new(move |count| values_for_later(count, again)),
        );
    }
}

/// A loop with `count` ways back, in which each of many locals takes the value of the one before.
fn go_round(locals: usize, count: usize) -> Vec<u8> {
    let shift: Vec<u8> = (1..locals)
        .rev()
        .flat_map(|at| [&[0x20][..], &leb(at - 1), &[0x21], &leb(at)].concat())
        .collect();
    let back = [0x20, 0, 0x0d, 0].repeat(count);
    let code = [&[0x03, 0x40][..], &shift, &back, &[0x0b]].concat();
    let body = [vec![1], leb(locals), vec![I32], code, collected(I32, locals)].concat();
    module(&Around::default(), &[body])
}

/// Steps of straight code in one function, and in functions of several sizes. It begins with
/// `setup`, where the locals are, and ends with `uses`.
fn straight(
    add: &mut impl FnMut(&str, Box<dyn Fn(usize) -> Vec<u8>>),
    name: &str,
    setup: Vec<u8>,
    uses: Vec<u8>,
    steps: impl Fn(usize) -> Vec<u8> + Clone + 'static,
) {
    let all = move |count| [&setup[..], &steps(count), &uses].concat();
    let make = all.clone();
    let one = move |count| module(&Around::default(), &[make(count)]);
    add(&format!("straight {name}"), Box::new(one));
    for size in [50, 800] {
        let body = all(size);
        let many = move |count| module(&Around::default(), &vec![body.clone(); count]);
        add(&format!("straight {name}, functions of {size}"), Box::new(many));
    }
}

/// Ten locals of each of two types: numbers that have nothing to do with each other.
fn unlike() -> Vec<u8> {
    let set =
        |at: u8| [&[0x20, 0, 0x41, at, 0x6a, 0x67, 0x22, at][..], &[0xac, 0x21, 10 + at]].concat();
    [vec![2, 10, I32, 10, I64], (1..10).flat_map(set).collect()].concat()
}

/// The operators of one type that take one or two numbers and return one, each as a step of a
/// chain: the other operand is a constant, or another of the locals.
fn steps_of(kind: u8) -> Vec<(String, Vec<u8>)> {
    let (constant, first, widen, unary, binary): (_, _, &[u8], _, _) = match kind {
        I32 => (0x41, 1, &[], vec![0x45, 0x67, 0x68, 0x69, 0xc0, 0xc1], 0x6a..=0x78),
        _ => (0x42, 11, &[0xad], vec![0x79, 0x7a, 0x7b, 0xc2, 0xc3, 0xc4], 0x7c..=0x8a),
    };
    let compared = if kind == I32 { 0x46..=0x4f } else { 0x51..=0x5a };
    let mut steps: Vec<_> = unary.iter().map(|op| (format!("{op:02x}"), vec![*op])).collect();
    for op in binary.chain(compared.clone()) {
        let widen = if compared.contains(&op) { widen } else { &[] };
        steps.push((format!("{op:02x} constant"), [&[constant, 13, op], widen].concat()));
        steps.push((format!("{op:02x} local"), [&[0x20, first + 1, op], widen].concat()));
    }
    steps
}

/// What keeps the end of a chain.
fn chain_end(kind: u8) -> Vec<u8> {
    kept(kind, if kind == I32 { 1 } else { 11 })
}

/// A chain of steps from a local of this type to itself.
fn chain(kind: u8, steps: &[&[u8]], count: usize) -> Vec<u8> {
    let local = if kind == I32 { 1 } else { 11 };
    let all: Vec<u8> = steps.iter().cycle().take(count).flat_map(|step| step.to_vec()).collect();
    [&[0x20, local][..], &all, &[0x21, local]].concat()
}

/// Each operator after itself, and some programs of several.
fn chains(add: &mut impl FnMut(&str, Box<dyn Fn(usize) -> Vec<u8>>)) {
    for kind in [I32, I64] {
        for (name, step) in steps_of(kind) {
            straight(add, &name, unlike(), chain_end(kind), move |count| {
                chain(kind, &[&step], count)
            });
        }
    }
    let several: [(&str, &[&[u8]]); 8] = [
        ("rotations", &[&[0x41, 7, 0x77], &[0x41, 13, 0x78], &[0x20, 2, 0x73]]),
        ("rotations by locals", &[&[0x20, 2, 0x78], &[0x41, 7, 0x77]]),
        ("shifts", &[&[0x41, 3, 0x74], &[0x41, 3, 0x76], &[0x41, 31, 0x71], &[0x20, 2, 0x72]]),
        ("sums", &[&[0x41, 5, 0x6a], &[0x20, 2, 0x6a], &[0x41, 9, 0x6b], &[0x20, 3, 0x6b]]),
        ("zeros", &[&[0x45], &[0x45], &[0x20, 2, 0x47], &[0x20, 3, 0x49]]),
        ("nots", &[&[0x41, 0x7f, 0x73], &[0x20, 2, 0x71], &[0x41, 0x7f, 0x73], &[0x20, 3, 0x72]]),
        ("constants", &[&[0x41, 8, 0x6c], &[0x41, 6, 0x6c], &[0x41, 0, 0x6b]]),
        ("choices", &[&[0x20, 2, 0x20, 3, 0x48, 0x20, 4, 0x20, 1, 0x1b], &[0x20, 2, 0x4a]]),
    ];
    for (name, steps) in several {
        straight(add, name, unlike(), chain_end(I32), move |count| chain(I32, steps, count));
    }
}

/// Each operator after each other one.
fn alternating(add: &mut impl FnMut(&str, Box<dyn Fn(usize) -> Vec<u8>>)) {
    for kind in [I32, I64] {
        let steps = steps_of(kind);
        for (name, one) in &steps {
            for (other_name, other) in steps.iter().take_while(|(other, _)| other != name) {
                let (one, other) = (one.clone(), other.clone());
                let make = move |count| {
                    let code = chain(kind, &[&one, &other], count);
                    module(&Around::default(), &[[unlike(), code, chain_end(kind)].concat()])
                };
                add(&format!("alternating {name}, {other_name}"), Box::new(make));
            }
        }
    }
}

/// Numbers that look as if drawn by chance, and are the same each time.
fn drawn(at: usize) -> usize {
    let x = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) as usize >> 32
}

/// Operators between many locals, each with a result that goes into any of them; and deep
/// expressions.
fn mixtures(add: &mut impl FnMut(&str, Box<dyn Fn(usize) -> Vec<u8>>)) {
    let operators: [(&str, u8, &[u8]); 9] = [
        ("sums", I32, &[0x6a, 0x6b]),
        ("products", I32, &[0x6c]),
        ("ands", I32, &[0x71]),
        ("xors", I32, &[0x73]),
        ("rotations", I32, &[0x77, 0x78]),
        ("ors and shifts", I32, &[0x72, 0x74, 0x76]),
        ("all", I32, &[0x6a, 0x6b, 0x6c, 0x71, 0x72, 0x73, 0x77, 0x78]),
        ("sums of i64", I64, &[0x7c, 0x7d]),
        ("products of i64", I64, &[0x7e]),
    ];
    for (name, kind, ops) in operators {
        for locals in [3, 10, 100, 300, 3_000] {
            let grow: &[u8] = if kind == I32 { &[0x67] } else { &[0x79] };
            let set = |at| [&[0x20][..], &leb(at - 1), grow, &[0x21], &leb(at)].concat();
            let setup = [vec![1], leb(locals), vec![kind], (1..locals).flat_map(set).collect()];
            let name = format!("{name} of {locals} locals");
            straight(add, &name, setup.concat(), collected(kind, locals), move |count| {
                let step = |at: usize| {
                    let [one, other, to] = [0, 1, 2].map(|of| leb(drawn(3 * at + of) % locals));
                    let op = ops[drawn(at) % ops.len()];
                    [&[0x20][..], &one, &[0x20], &other, &[op, 0x22], &to, &[0x1a]].concat()
                };
                (0..count).flat_map(step).collect()
            });
        }
        straight(add, &format!("{name}, deep"), unlike(), chain_end(kind), move |count| {
            let first = if kind == I32 { 1 } else { 11 };
            let pushed = (0..=count).flat_map(|at| [0x20, first + (drawn(at) % 9) as u8]);
            let taken = (0..count).map(|at| ops[drawn(at) % ops.len()]);
            pushed.chain(taken).chain([0x21, first]).collect()
        });
    }
}

/// All locals of this type are put together into the first one, which is kept.
fn collected(kind: u8, locals: usize) -> Vec<u8> {
    let (_, xor) = operators_of(kind);
    let collect = |at: usize| [&[0x20, 0, 0x20][..], &leb(at), xor, &[0x21, 0]].concat();
    (1..locals).flat_map(collect).chain(kept(kind, 0)).collect()
}

/// An operator of this type that makes one value of one, and one that makes one of two.
fn operators_of(kind: u8) -> (&'static [u8], &'static [u8]) {
    match kind {
        I32 => (&[0x67], &[0x73]),
        I64 => (&[0x79], &[0x85]),
        F32 => (&[0x8c], &[0x92]),
        F64 => (&[0x9a], &[0xa0]),
        _ => (&[0xfd, 0x4d], &[0xfd, 0x51]),
    }
}

/// Straight code of one function with many values that are used again at its end, in locals or on
/// the stack, beside steps that take them by chance, in turn, or never.
fn long_lived(add: &mut impl FnMut(&str, Box<dyn Fn(usize) -> Vec<u8>>)) {
    for (kind, type_name) in TYPES.into_iter().zip(["i32", "i64", "f32", "f64", "v128"]) {
        let (one, two) = operators_of(kind);
        for locals in [30, 300, 1_000, 3_000, 8_000] {
            let set = move |at| [&[0x20][..], &leb(at - 1), one, &[0x21], &leb(at)].concat();
            let setup = [vec![1], leb(locals), vec![kind], (1..locals).flat_map(set).collect()];
            let setup = setup.concat();
            for order in ["by chance", "in turn", "never", "three by chance"] {
                let setup = setup.clone();
                let step = move |at: usize| match order {
                    "never" => [&[0x20, 0][..], one, &[0x21, 0]].concat(),
                    "three by chance" => {
                        let [one, other, to] = [0, 1, 2].map(|of| leb(drawn(3 * at + of) % locals));
                        [&[0x20][..], &one, &[0x20], &other, two, &[0x21], &to].concat()
                    }
                    _ => {
                        let next = if order == "in turn" { at } else { drawn(at) };
                        [&[0x20, 0, 0x20][..], &leb(next % locals), two, &[0x21, 0]].concat()
                    }
                };
                let make = move |count| {
                    let steps = (0..count).flat_map(step).collect();
                    let body = [setup.clone(), steps, collected(kind, locals)].concat();
                    module(&Around::default(), &[body])
                };
                add(&format!("{locals} long-lived {type_name} read {order}"), Box::new(make));
            }
            let make = move |count| {
                let mut body = [
                    &[1, 1, kind, 0x20, 0][..],
                    &[one, &[0x22, 0, 0x20, 0]].concat().repeat(locals),
                ]
                .concat();
                body.extend([one, &[0x22, 0, 0x1a, 0x20, 0]].concat().repeat(count));
                body.extend(two.repeat(locals));
                body.extend([&[0x21, 0][..], &kept(kind, 0)].concat());
                module(&Around::default(), &[body])
            };
            add(&format!("{locals} long-lived {type_name} on the stack"), Box::new(make));
        }
    }
}

/// Values that an optimiser would keep: the same ones before and after loads, or in a loop which
/// never changes them.
fn values_for_later(count: usize, again: bool) -> Vec<u8> {
    let values: Vec<u8> = (0..count)
        .flat_map(|at| {
            [&[0x20, 0, 0x41][..], &leb(64 + at)[..], &[0x6c, 0x20, 1, 0x73, 0x21, 1]].concat()
        })
        .collect();
    let loads = [0x20, 0, 0x28, 2, 0, 0x20, 1, 0x6a, 0x21, 1].repeat(count);
    let code = if again {
        [&[0x03, 0x40][..], &values, &loads, &[0x20, 1, 0x0d, 0, 0x0b]].concat()
    } else {
        [&values[..], &loads, &values].concat()
    };
    module(&Around::default(), &[[locals(), code, kept(I32, 1)].concat()])
}

fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A line of `/proc/self/status` in KiB.
fn status_kib(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

struct Measured {
    name: String,
    weight: u64,
    bytes: usize,
    seconds: f64,
    peak_mib: u64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Measured { name, weight, bytes, seconds, peak_mib } = self;
        let rate = seconds * 1e6 / *weight as f64;
        write!(
            f,
            "{rate:7.4} s/10^6 {seconds:7.3} s {peak_mib:5} MiB, weight {weight:9}, {bytes:6} bytes: {name}"
        )
    }
}

/// Compiles a module. Prints the time in seconds, the growth of the peak of memory in MiB, and why
/// it is refused.
fn compile(bytes: &[u8]) {
    let (before, begun) = (status_kib("VmRSS"), cpu());
    let loaded = load(bytes);
    let seconds = (cpu() - begun).as_secs_f64();
    let peak_mib = (status_kib("VmHWM").saturating_sub(before)) >> 10;
    let why = loaded.err().map(|error| format!(": {error}")).unwrap_or_default();
    println!("{seconds} {peak_mib} {why}");
}

/// Compiles a module in a process of its own: memory that was freed before would hide what this one
/// takes.
fn measure(name: &str, bytes: &[u8], weight: u64, optimised: bool) -> Measured {
    let path = std::env::temp_dir().join(format!("compile_bench-{}.wasm", std::process::id()));
    std::fs::write(&path, bytes).expect("a temporary file");
    let program = std::env::current_exe().expect("this program");
    let output = Command::new(program).arg(COMPILE).arg(&path).output().expect("it starts");
    let _ = std::fs::remove_file(&path);
    let said = String::from_utf8_lossy(&output.stdout);
    let mut words = said.trim_end().splitn(3, ' ');
    let seconds = words.next().and_then(|word| word.parse().ok()).unwrap_or(f64::INFINITY);
    let peak_mib = words.next().and_then(|word| word.parse().ok()).unwrap_or(u64::MAX);
    let why = words.next().unwrap_or_default();
    let how = if optimised { ", optimised" } else { "" };
    Measured { name: format!("{name}{how}{why}"), weight, bytes: bytes.len(), seconds, peak_mib }
}

/// The heaviest of a family up to a weight, or the heaviest that is optimised: the weight of a
/// larger one that is not is lower again.
fn heaviest(
    make: &dyn Fn(usize) -> Vec<u8>,
    most: u64,
    only_optimised: bool,
) -> Option<(Vec<u8>, u64, bool)> {
    let fits = |count: usize| {
        let bytes = make(count);
        if bytes.len() as u64 > host::wasm::MAX_MODULE_BYTES {
            return None;
        }
        let (weight, optimised) = host::wasm::weight(&bytes).ok()?;
        (weight <= most && optimised >= only_optimised).then_some((bytes, weight, optimised))
    };
    // From below: a module of this many large functions would not fit in memory.
    let (mut low, mut high) = (1, 2);
    while high < 1 << 18 && fits(high).is_some() {
        (low, high) = (high, 2 * high);
    }
    while high - low > low / 64 + 1 {
        let middle = (low + high) / 2;
        if fits(middle).is_some() { low = middle } else { high = middle }
    }
    fits(low)
}

/// In place of PART, before the path of a module: only what is measured.
const COMPILE: &str = "compile";

fn main() {
    let mut args = std::env::args().skip(1);
    let part = args.next().unwrap_or("8".to_owned());
    let filter = args.next().unwrap_or_default();
    if part == COMPILE {
        return compile(&std::fs::read(&filter).expect("a module"));
    }
    let part: u64 = part.parse().expect("a number");
    if let Ok(bytes) = std::fs::read(&filter) {
        let (weight, optimised) = host::wasm::weight(&bytes).unwrap_or_default();
        return println!("{}", measure(&filter, &bytes, weight, optimised));
    }
    let mut all = Vec::new();
    for (name, make) in families(&filter).into_iter().filter(|(name, _)| name.contains(&filter)) {
        let most = host::wasm::MAX_WEIGHT / part;
        let Some((bytes, weight, optimised)) = heaviest(&*make, most, false) else {
            println!("{name}: the lightest is too heavy, or it is invalid");
            continue;
        };
        all.push(measure(&name, &bytes, weight, optimised));
        eprintln!("{}", all[all.len() - 1]);
        if let Some((bytes, weight, _)) = heaviest(&*make, most, true).filter(|_| !optimised) {
            all.push(measure(&name, &bytes, weight, true));
            eprintln!("{}", all[all.len() - 1]);
        }
    }
    all.sort_by(|one, other| {
        let rate = |of: &Measured| of.seconds / of.weight as f64;
        rate(other).total_cmp(&rate(one))
    });
    for measured in &all {
        println!("{measured}");
    }
}
