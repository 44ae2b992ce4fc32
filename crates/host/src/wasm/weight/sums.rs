//! What makes an optimiser slow in code without branches: long chains of operators, and sums of
//! sums.
//!
//! It compares the ways to compute each value until nothing changes. A value that was rewritten has
//! its costs only a round after the values that it comes from, so there are up to as many rounds as
//! the longest chain has steps, and each of them looks at all values.
//!
//! `(a + b + c) + (d + e)` may be added up in any order, and it tries many: a sum of two sums
//! becomes up to a thousand values, a sum with a constant or with what was loaded few. Products,
//! `and` and `xor` are alike, and so are rotations, whose amounts are added up. An operator may do
//! nothing, as `x ^ 0`, so its result may be what it took.
//!
//! What a value may be is found in one pass over the function, without its control flow. A local
//! may be whatever was put into it before, in code that is never reached as well; a load may be
//! what the last store stored. Values that are merged where branches meet come from nothing before
//! them, so later code does not matter.

use wasmparser::Operator;

/// Of a result, for each step of the longest chain of its function.
const ROUND: u64 = 4;

/// Of a sum of sums in a small function.
const SUM: u64 = 10_000;

/// More of it, for each other one of its function, because there are more ways.
const SUM_MORE: u64 = 25;

/// Most of it.
const SUM_MOST: u64 = 45_000;

/// Steps of the longest chain that cost as much again, because all ways have part in all rounds.
const SUM_STEPS: u64 = 300;

/// How deep a sum is; deeper ones count as this.
const DEEP: u8 = 2;

/// Kinds of operators that may be put into another order, each among its own.
const KINDS: usize = 5;

/// The kind whose amounts are added up.
const ROTATION: usize = 4;

/// What a value may be.
#[derive(Clone, Copy, Default)]
struct Value {
    /// How deep it is as a sum of each kind.
    depths: [u8; KINDS],
    /// The longest chain of operators that it comes from.
    steps: u64,
}

impl Value {
    fn or(self, other: Value) -> Value {
        let deeper = |kind: usize| self.depths[kind].max(other.depths[kind]);
        Value { depths: std::array::from_fn(deeper), steps: self.steps.max(other.steps) }
    }
}

/// What may be a sum in a function.
pub(super) struct Sums {
    /// Of the operands on the stack.
    stack: Vec<Value>,
    /// The deepest that were put into each local.
    locals: Vec<Value>,
    /// The same for all globals.
    globals: Value,
    /// The same for memory, and of the last store alone, which a load may become.
    memory: Value,
    last_store: Value,
    /// The last operator was a constant.
    after_constant: bool,
    /// The longest chain of operators.
    longest: u64,
    /// Sums of two sums of which one is deep, and rotations of rotations.
    nested: u64,
}

impl Sums {
    pub(super) fn of_locals(locals: usize) -> Sums {
        let (none, stack) = (Value::default(), Vec::new());
        let locals = vec![none; locals];
        Sums {
            stack,
            locals,
            globals: none,
            memory: none,
            last_store: none,
            after_constant: false,
            longest: 0,
            nested: 0,
        }
    }

    /// What optimising the function costs for these reasons, with so many results.
    pub(super) fn weight(&self, results: u64) -> u64 {
        let sums = self.nested.saturating_mul(SUM_MOST.min(SUM + SUM_MORE * self.nested));
        let in_rounds = sums.saturating_mul(self.longest) / SUM_STEPS;
        let rounds = self.longest.saturating_mul(results).saturating_mul(ROUND);
        sums.saturating_add(in_rounds).saturating_add(rounds)
    }

    /// Follows an operator after which the stack has `height` operands. At most one of them is its
    /// result.
    pub(super) fn follow(&mut self, operator: &Operator<'_>, height: usize) {
        use Operator as O;
        let is_constant = matches!(operator, O::I32Const { .. } | O::I64Const { .. });
        let after_constant = std::mem::replace(&mut self.after_constant, is_constant);
        let top = self.stack.last().copied().unwrap_or_default();
        match operator {
            O::I32Const { .. } | O::I64Const { .. } => self.stack.push(Value::default()),
            O::LocalGet { local_index } => {
                let local = self.locals.get(*local_index as usize);
                self.replace(height, local.copied().unwrap_or_default());
            }
            O::LocalSet { local_index } | O::LocalTee { local_index } => {
                if let Some(local) = self.locals.get_mut(*local_index as usize) {
                    *local = local.or(top);
                }
                self.stack.truncate(height);
            }
            O::Drop | O::Nop => self.stack.truncate(height),
            O::GlobalSet { .. } => {
                self.globals = self.globals.or(top);
                self.stack.truncate(height);
            }
            O::GlobalGet { .. } => self.replace(height, self.globals),
            // Loads take one operand and leave one, and stores leave none of two.
            operator if super::accesses_memory(operator) => {
                if height + 2 <= self.stack.len() {
                    (self.last_store, self.memory) = (top, self.memory.or(top));
                    self.stack.truncate(height);
                } else {
                    self.replace(height, self.last_store);
                }
            }
            O::Else => {
                self.last_store = self.memory;
                self.widen(height);
            }
            O::End => {
                self.last_store = self.memory;
                self.widen(height);
                // A result that comes from a branch elsewhere may be any value.
                let any = Value { depths: [DEEP; KINDS], steps: self.longest };
                self.stack.resize(height, any);
            }
            operator => match kind(operator) {
                Some(kind) => self.sum(kind, height, after_constant),
                None => self.widen(height),
            },
        }
    }

    fn sum(&mut self, kind: usize, height: usize, after_constant: bool) {
        let mut operands = self.stack.iter().rev().copied();
        let (one, other) =
            (operands.next().unwrap_or_default(), operands.next().unwrap_or_default());
        let depths = (one.depths[kind], other.depths[kind]);
        let (less, more) = (depths.0.min(depths.1), depths.0.max(depths.1));
        let is_nested =
            if kind == ROTATION { more > 0 && !after_constant } else { less > 0 && more == DEEP };
        self.nested += u64::from(is_nested);
        let mut result = one.or(other);
        result.depths[kind] = DEEP.min(1 + more);
        result.steps += 1;
        self.longest = self.longest.max(result.steps);
        self.replace(height, result);
    }

    /// The operand at the top is this, and what was above is gone.
    fn replace(&mut self, height: usize, value: Value) {
        self.stack.truncate(height.saturating_sub(1));
        self.stack.resize(height, value);
    }

    /// The operand at the top is one of those that were there or above: an operator may return what
    /// it took.
    fn widen(&mut self, height: usize) {
        let taken = self.stack.get(height.saturating_sub(1)..).unwrap_or_default();
        if !taken.is_empty() {
            let mut value = taken.iter().copied().fold(Value::default(), Value::or);
            value.steps += 1;
            self.longest = self.longest.max(value.steps);
            self.replace(height, value);
        }
    }
}

/// The kind of an operator that an optimiser may put into another order. Vectors of lanes other
/// than bytes are none: they are bytes in locals, and what changes the type is never looked
/// through.
fn kind(operator: &Operator<'_>) -> Option<usize> {
    use Operator as O;
    match operator {
        O::I32Add | O::I32Sub | O::I64Add | O::I64Sub | O::I8x16Add | O::I8x16Sub => Some(0),
        O::I32Mul | O::I64Mul => Some(1),
        O::I32And | O::I64And | O::V128And | O::V128AndNot => Some(2),
        O::I32Xor | O::I64Xor | O::V128Xor => Some(3),
        O::I32Rotl | O::I32Rotr | O::I64Rotl | O::I64Rotr => Some(ROTATION),
        _ => None,
    }
}
