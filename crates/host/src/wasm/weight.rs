//! What a module costs to compile, counted before it is compiled.
//!
//! Time and memory of the compiler grow with the values that are alive wherever a function branches, and few bytes can
//! keep thousands of them alive at thousands of places: some modules of 256 KiB took minutes and gigabytes. These are
//! refused here; what compilers make of programs weighs far less. Nothing is compiled or run here.

use wasmparser::{
    FuncValidator, FuncValidatorAllocations, FunctionBody, Operator, Parser, ValidPayload,
    Validator, ValidatorResources, WasmFeatures,
};

/// Most weight of a module. The heaviest ones below it take a second and 0.3 GB to compile.
pub(super) const MAX_WEIGHT: u64 = 4 << 20;

/// The weight of a module, or of its first functions if that is above [`MAX_WEIGHT`] already.
///
/// # Errors
/// When it is invalid, with what WebAssembly says of it.
pub(super) fn of(module: &[u8]) -> Result<u64, String> {
    let invalid = |error: wasmparser::BinaryReaderError| error.to_string();
    // What the sandbox does not support is refused by its compiler.
    let mut validator = Validator::new_with_features(WasmFeatures::all());
    let (mut weight, mut allocations) = (0_u64, FuncValidatorAllocations::default());
    for payload in Parser::new(0).parse_all(module) {
        let payload = payload.map_err(invalid)?;
        let ValidPayload::Func(function, body) = validator.payload(&payload).map_err(invalid)?
        else {
            continue;
        };
        let mut function = function.into_validator(std::mem::take(&mut allocations));
        weight += weigh(&mut function, &body, MAX_WEIGHT).map_err(invalid)?;
        if weight > MAX_WEIGHT {
            break;
        }
        allocations = function.into_allocations();
    }
    Ok(weight)
}

/// The weight of a function: its locals, its operators, and the values alive at each that may branch.
fn weigh(
    function: &mut FuncValidator<ValidatorResources>,
    body: &FunctionBody<'_>,
    most: u64,
) -> Result<u64, wasmparser::BinaryReaderError> {
    function.read_locals(&mut body.get_binary_reader())?;
    let locals = u64::from(function.len_locals());
    let (mut weight, mut operators) = (locals, body.get_operators_reader()?);
    while !operators.eof() && weight <= most {
        let before = function.operand_stack_height();
        let (operator, offset) = operators.read_with_offset()?;
        function.op(offset, &operator)?;
        let alive = locals + u64::from(before.max(function.operand_stack_height()));
        weight += 1 + alive * branches(&operator);
    }
    Ok(weight)
}

/// The places that an operator may go on at, beside the next.
fn branches(operator: &Operator<'_>) -> u64 {
    match operator {
        Operator::BrTable { targets } => 1 + u64::from(targets.len()),
        Operator::Block { .. }
        | Operator::Loop { .. }
        | Operator::If { .. }
        | Operator::Else
        | Operator::End
        | Operator::Br { .. }
        | Operator::BrIf { .. }
        | Operator::Return
        | Operator::Call { .. }
        | Operator::CallIndirect { .. } => 1,
        _ => 0,
    }
}
