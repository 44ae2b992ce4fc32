//! What a module costs to compile, counted before it is compiled.
//!
//! The compiler is not linear in the bytes of a module: few bytes can keep thousands of values
//! alive at thousands of places, or send a value round thousands of loops, and some modules of 256
//! KiB took minutes and gigabytes. These are refused here; what compilers make of programs weighs
//! far less. Nothing is compiled or run here.
//!
//! The weight of a function is the sum of what makes the compiler work:
//!
//! - each operator, by the machine code that it becomes;
//! - each *place*: an edge of the control flow or a call that the machine code has, times the
//!   values alive there, because registers are allocated for each value at each place. Most places
//!   cannot be seen in the module. The sandbox has no signal handler, so whatever may trap is a
//!   branch around a call;
//! - each operator, times the values alive there, because values that live long are split where
//!   they are used;
//! - the square of the number of values that are needed for a moment, times the values alive, as
//!   measured: they take registers from what lives long, again and again;
//! - each value that is merged where branches meet, times the values that are merged at the heads
//!   of loops, because the search for merges of one value repeats as often as values pass through
//!   them; and the squares of the numbers of loops and of merges, as measured.
//!
//! The values alive are at most the locals and the operands on the stack, if the compiler does not
//! optimise. An optimiser also keeps what it has computed for later: at most the result of each
//! operator of the function. It compares the ways to compute each value, all of them again for
//! every step of a chain of operators, and it writes sums of sums in hundreds of ways ([`sums`]).
//! So a module has two weights, and one that is light with both is optimised.
//! `examples/compile_bench.rs` measures what a weight costs, for every operator and for the worst
//! arrangements known.
//!
//! The constants were found with it for wasmtime 36.0.20, on one core of an AMD EPYC with AVX-512
//! in a virtual machine, so that no arrangement takes much more than a second; docs/limits.md has
//! the worst ones. Another version needs it again.

mod sums;

use std::collections::BTreeSet;
use std::mem::take;

use sums::Sums;
use wasmparser::{
    FuncValidator, FuncValidatorAllocations, FunctionBody, Operator, Parser, Payload, ValidPayload,
    Validator, ValidatorResources, WasmFeatures,
};

/// Most weight of a module.
pub(super) const MAX_WEIGHT: u64 = 100_000_000;

/// Of a function, beside its body: its entry, its exit, and an entry for callers from outside.
const FUNCTION: u64 = 6_000;

/// Of a byte outside the functions: types, exports, entries of tables.
const BYTE: u64 = 20;

/// Of a local.
const LOCAL: u64 = 40;

/// Of an operator that computes something.
const OPERATOR: u64 = 800;

/// Of an operator that only says where a value is.
const NAME: u64 = 100;

/// Of a value that is alive at a place.
const ALIVE: u64 = 7;

/// How many triples of two values that are needed for a moment and one that is alive weigh as much
/// as one unit.
const MOMENTS_ALIVE: u64 = 10_000;

/// Of a loop, for each loop of its function.
const LOOPS: u64 = 10;

/// How many pairs of merges weigh as much as one unit.
const PAIRS: u64 = 8;

/// Of a value that may be merged, for each that is merged at the head of a loop.
const MERGE: u64 = 1;

/// Values that are alive beside those of the module: its context, limits of stack and fuel, bases
/// of memory and tables.
const HIDDEN_VALUES: u64 = 8;

/// The features of the sandbox, which `super::config` gives to the compiler.
const FEATURES: WasmFeatures =
    WasmFeatures::WASM2.union(WasmFeatures::EXTENDED_CONST).difference(WasmFeatures::MULTI_VALUE);

/// What a module costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Weight {
    /// To compile as it is.
    pub(super) plain: u64,
    /// To compile with optimisations.
    pub(super) optimised: u64,
}

impl Weight {
    fn add(&mut self, other: Weight) {
        self.plain = self.plain.saturating_add(other.plain);
        self.optimised = self.optimised.saturating_add(other.optimised);
    }

    /// The weight to compile with optimisations where that is allowed, otherwise the plain one,
    /// which is never higher; and whether the module is optimised.
    pub(super) fn chosen(self) -> (u64, bool) {
        let optimises = self.optimised <= MAX_WEIGHT;
        (if optimises { self.optimised } else { self.plain }, optimises)
    }
}

/// The weight of a module, or of its first parts if the plain one is above [`MAX_WEIGHT`] already.
///
/// # Errors
/// When it is invalid, with what WebAssembly says of it.
pub(super) fn of(module: &[u8]) -> Result<Weight, String> {
    let invalid = |error: wasmparser::BinaryReaderError| error.to_string();
    let mut validator = Validator::new_with_features(FEATURES);
    let (mut weight, mut allocations) = (Weight::default(), FuncValidatorAllocations::default());
    for payload in Parser::new(0).parse_all(module) {
        let payload = payload.map_err(invalid)?;
        weight.add(Weight { plain: outside(&payload), optimised: outside(&payload) });
        let ValidPayload::Func(function, body) = validator.payload(&payload).map_err(invalid)?
        else {
            continue;
        };
        let mut function = function.into_validator(take(&mut allocations));
        weight.add(Body::default().weigh(&mut function, &body).map_err(invalid)?);
        if weight.plain > MAX_WEIGHT {
            break;
        }
        allocations = function.into_allocations();
    }
    Ok(weight)
}

/// The weight of a section, but for the bodies of functions.
fn outside(payload: &Payload<'_>) -> u64 {
    match payload {
        // Copied as they are, or passed over.
        Payload::DataSection(_) | Payload::CustomSection(_) => 0,
        payload => match payload.as_section() {
            Some((id, range)) if id != CODE_SECTION => BYTE * range.len() as u64,
            _ => 0,
        },
    }
}

/// The number of the section with the bodies of functions.
const CODE_SECTION: u8 = 10;

/// A block, `loop`, `if`, or the whole function.
#[derive(Default)]
struct Frame {
    is_loop: bool,
    /// Branches that lead to its end, or to its head if it is a loop.
    branches: u64,
    /// Locals that are set in it: what may have to be merged where it ends, or where it begins
    /// again.
    set: BTreeSet<u32>,
}

/// What has been seen of a function.
#[derive(Default)]
struct Body {
    frames: Vec<Frame>,
    loops: u64,
    /// Values that are merged, each where it is.
    merges: u64,
    /// Values passed along edges to where they are merged.
    merged: u64,
    /// Values that are merged at the heads of loops.
    around: u64,
}

impl Body {
    fn weigh(
        mut self,
        function: &mut FuncValidator<ValidatorResources>,
        body: &FunctionBody<'_>,
    ) -> Result<Weight, wasmparser::BinaryReaderError> {
        // Callers from outside pass them one by one, which takes the square of their number.
        let parameters = u64::from(function.len_locals());
        function.read_locals(&mut body.get_binary_reader())?;
        let locals = u64::from(function.len_locals());
        let (mut weight, mut operators) =
            (FUNCTION + LOCAL * locals + parameters * parameters, body.get_operators_reader()?);
        let (mut results, mut all_places, mut moments, mut widest) = (0_u64, 0_u64, 0_u64, locals);
        let mut sums = Sums::of_locals(locals as usize);
        self.frames.push(Frame::default());
        while !operators.eof() && weight <= MAX_WEIGHT {
            let before = function.operand_stack_height();
            let (operator, offset) = operators.read_with_offset()?;
            function.op(offset, &operator)?;
            self.follow(&operator);
            let after = function.operand_stack_height();
            sums.follow(&operator, after as usize);
            let alive = locals + u64::from(before.max(after));
            let (own, places) = cost(&operator);
            weight += own + ALIVE * places * (HIDDEN_VALUES + alive) + alive;
            (results, all_places) = (results + u64::from(own >= OPERATOR), all_places + places);
            (moments, widest) = (moments + moments_of(own, places), widest.max(alive));
        }
        if operators.eof() {
            operators.finish()?;
        }
        let squares = LOOPS * self.loops.saturating_mul(self.loops)
            + self.merges.saturating_mul(self.merges) / PAIRS;
        let rounds = self.merged.saturating_mul(self.around).saturating_mul(MERGE);
        let pairs = moments.saturating_mul(moments).saturating_mul(widest) / MOMENTS_ALIVE;
        let plain = weight.saturating_add(squares).saturating_add(rounds).saturating_add(pairs);
        let kept = all_places.saturating_mul(results).saturating_mul(ALIVE);
        let more = kept.saturating_add(sums.weight(results));
        Ok(Weight { plain, optimised: plain.saturating_add(more) })
    }

    /// Follows the control flow.
    fn follow(&mut self, operator: &Operator<'_>) {
        match operator {
            Operator::Block { .. } | Operator::If { .. } => self.frames.push(Frame::default()),
            Operator::Loop { .. } => {
                self.loops += 1;
                self.frames.push(Frame { is_loop: true, ..Frame::default() });
            }
            Operator::Else => self.branch(0),
            Operator::Br { relative_depth } | Operator::BrIf { relative_depth } => {
                self.branch(*relative_depth);
            }
            Operator::BrTable { targets } => {
                let named = targets.targets().flatten();
                named.chain([targets.default()]).for_each(|depth| self.branch(depth));
            }
            Operator::LocalSet { local_index } | Operator::LocalTee { local_index } => {
                if let Some(frame) = self.frames.last_mut() {
                    frame.set.insert(*local_index);
                }
            }
            Operator::End => self.end(),
            _ => {}
        }
    }

    fn branch(&mut self, depth: u32) {
        let at = self.frames.len().checked_sub(1 + depth as usize);
        if let Some(frame) = at.and_then(|at| self.frames.get_mut(at)) {
            frame.branches += 1;
        }
    }

    fn end(&mut self) {
        let Some(Frame { is_loop, branches, mut set }) = self.frames.pop() else {
            return;
        };
        let values = set.len() as u64;
        // The way in from above counts as well.
        self.merges += values;
        self.merged += (branches + 1) * values;
        if is_loop {
            self.around += values;
        }
        if let Some(outer) = self.frames.last_mut() {
            if outer.set.len() < set.len() {
                std::mem::swap(&mut outer.set, &mut set);
            }
            outer.set.extend(set);
        }
    }
}

/// How many values an operator of this work and with so many edges and calls needs for a moment.
fn moments_of(own: u64, places: u64) -> u64 {
    let computes = own >= OPERATOR;
    places + if computes { 1 + own / OPERATOR } else { 0 }
}

/// The work of an operator itself, and the edges and calls that it becomes.
fn cost(operator: &Operator<'_>) -> (u64, u64) {
    use Operator as O;
    match operator {
        O::LocalGet { .. }
        | O::LocalSet { .. }
        | O::LocalTee { .. }
        | O::I32Const { .. }
        | O::I64Const { .. }
        | O::Drop
        | O::Nop => (NAME, 0),
        O::BrTable { targets } => {
            let targets = 1 + u64::from(targets.len());
            (OPERATOR * targets, 2 * targets)
        }
        O::Block { .. } | O::Else | O::End | O::Br { .. } | O::Return => (NAME, 1),
        O::If { .. } | O::BrIf { .. } => (OPERATOR, 2),
        O::Call { .. } | O::Unreachable => (2 * OPERATOR, 2),
        // It looks at the time.
        O::Loop { .. } => (3 * OPERATOR, 5),
        // The table's bounds, an entry that is not made yet, one that is none, and its type.
        O::CallIndirect { .. } => (12 * OPERATOR, 10),
        O::I32DivU | O::I32RemU | O::I64DivU | O::I64RemU => (3 * OPERATOR, 2),
        O::I32DivS | O::I32RemS | O::I64DivS | O::I64RemS => (5 * OPERATOR, 4),
        O::I32TruncF32S
        | O::I32TruncF32U
        | O::I32TruncF64S
        | O::I32TruncF64U
        | O::I64TruncF32S
        | O::I64TruncF32U
        | O::I64TruncF64S
        | O::I64TruncF64U => (10 * OPERATOR, 6),
        O::MemoryGrow { .. }
        | O::MemoryFill { .. }
        | O::MemoryCopy { .. }
        | O::MemoryInit { .. }
        | O::DataDrop { .. }
        | O::TableGet { .. }
        | O::TableSet { .. }
        | O::TableGrow { .. }
        | O::TableFill { .. }
        | O::TableCopy { .. }
        | O::TableInit { .. }
        | O::ElemDrop { .. }
        | O::RefFunc { .. } => (5 * OPERATOR, 8),
        operator if accesses_memory(operator) => (2 * OPERATOR, 3),
        O::I32x4TruncSatF32x4S
        | O::I32x4TruncSatF32x4U
        | O::I32x4TruncSatF64x2SZero
        | O::I32x4TruncSatF64x2UZero => (6 * OPERATOR, 0),
        operator if makes_nan(operator) => (4 * OPERATOR, 0),
        operator if is_vector(operator) => (3 * OPERATOR, 0),
        _ => (OPERATOR, 0),
    }
}

// Of all operators on vectors, which wasmparser lists.
macro_rules! define_is_vector {
    ($(@$proposal:ident $operator:ident $({ $($name:ident: $type:ty),* })? => $visit:ident ($($arity:tt)*))*) => {
        fn is_vector(operator: &Operator<'_>) -> bool {
            matches!(operator, $(Operator::$operator { .. })|*)
        }
    };
}
wasmparser::for_each_visit_simd_operator!(define_is_vector);

/// Operators whose result may be a NaN: a comparison and a choice replace it by the one NaN of the
/// sandbox.
fn makes_nan(operator: &Operator<'_>) -> bool {
    use Operator as O;
    matches!(
        operator,
        O::F32Add
            | O::F32Sub
            | O::F32Mul
            | O::F32Div
            | O::F32Min
            | O::F32Max
            | O::F32Sqrt
            | O::F32Ceil
            | O::F32Floor
            | O::F32Trunc
            | O::F32Nearest
            | O::F32DemoteF64
            | O::F64Add
            | O::F64Sub
            | O::F64Mul
            | O::F64Div
            | O::F64Min
            | O::F64Max
            | O::F64Sqrt
            | O::F64Ceil
            | O::F64Floor
            | O::F64Trunc
            | O::F64Nearest
            | O::F64PromoteF32
            | O::F32x4Add
            | O::F32x4Sub
            | O::F32x4Mul
            | O::F32x4Div
            | O::F32x4Min
            | O::F32x4Max
            | O::F32x4Sqrt
            | O::F32x4Ceil
            | O::F32x4Floor
            | O::F32x4Trunc
            | O::F32x4Nearest
            | O::F32x4DemoteF64x2Zero
            | O::F64x2Add
            | O::F64x2Sub
            | O::F64x2Mul
            | O::F64x2Div
            | O::F64x2Min
            | O::F64x2Max
            | O::F64x2Sqrt
            | O::F64x2Ceil
            | O::F64x2Floor
            | O::F64x2Trunc
            | O::F64x2Nearest
            | O::F64x2PromoteLowF32x4
    )
}

/// Loads and stores, whose bounds are checked.
fn accesses_memory(operator: &Operator<'_>) -> bool {
    use Operator as O;
    matches!(
        operator,
        O::I32Load { .. }
            | O::I64Load { .. }
            | O::F32Load { .. }
            | O::F64Load { .. }
            | O::I32Load8S { .. }
            | O::I32Load8U { .. }
            | O::I32Load16S { .. }
            | O::I32Load16U { .. }
            | O::I64Load8S { .. }
            | O::I64Load8U { .. }
            | O::I64Load16S { .. }
            | O::I64Load16U { .. }
            | O::I64Load32S { .. }
            | O::I64Load32U { .. }
            | O::I32Store { .. }
            | O::I64Store { .. }
            | O::F32Store { .. }
            | O::F64Store { .. }
            | O::I32Store8 { .. }
            | O::I32Store16 { .. }
            | O::I64Store8 { .. }
            | O::I64Store16 { .. }
            | O::I64Store32 { .. }
            | O::V128Load { .. }
            | O::V128Load8x8S { .. }
            | O::V128Load8x8U { .. }
            | O::V128Load16x4S { .. }
            | O::V128Load16x4U { .. }
            | O::V128Load32x2S { .. }
            | O::V128Load32x2U { .. }
            | O::V128Load8Splat { .. }
            | O::V128Load16Splat { .. }
            | O::V128Load32Splat { .. }
            | O::V128Load64Splat { .. }
            | O::V128Load32Zero { .. }
            | O::V128Load64Zero { .. }
            | O::V128Store { .. }
            | O::V128Load8Lane { .. }
            | O::V128Load16Lane { .. }
            | O::V128Load32Lane { .. }
            | O::V128Load64Lane { .. }
            | O::V128Store8Lane { .. }
            | O::V128Store16Lane { .. }
            | O::V128Store32Lane { .. }
            | O::V128Store64Lane { .. }
    )
}
