//! User actions: WebAssembly modules in a sandbox of wasmtime.
//!
//! A module sees a block of tokens and the number of its first token, and nothing else: it may
//! import nothing, so it has no clock, no files and no randomness. Every block gets a fresh
//! instance, so nothing is carried from one block to the next. Numbers that are not a number have
//! one bit pattern, and threads and relaxed SIMD are off: the result is a function of the module's
//! bytes and its input, on every processor.
//!
//! What it costs others is bounded: [`MAX_WEIGHT`] bounds what it takes to compile it, which does
//! not follow from its bytes, [`MAX_MEMORY_BYTES`] its memory, and [`TIME_LIMIT_MS`] its CPU time
//! for a block of 1 MiB. The CPU time of the thread counts, not the time of day, so other processes
//! end no honest module. A virtual machine may still count time in which its processor was taken
//! away, so a block that exceeds its time is mapped once more; after the second time the module is
//! not run again. No signal handler is installed: the trainer's process has its own.
//!
//! A module has to map each token by itself ([`xio::kernel::TokenMap`]). One block of
//! [`CHECK_EVERY`] is mapped again in two pieces, the later one first, and a result that differs is
//! refused. The compiler runs where a module is loaded, never on an engine's thread.

mod weight;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use sha2::{Digest, Sha256};
use thiserror::Error;
use wasmtime::{
    Config, Engine, ExternType, Instance, InstancePre, Linker, Module, OptLevel,
    PoolingAllocationConfig, ResourceLimiter, Store, Trap as WasmTrap, UpdateDeadline, ValType,
};
use xio::dataset::Dtype;
use xio::kernel::{MapFault, TokenMap, Trap};

/// Bytes of a module.
pub const MAX_MODULE_BYTES: u64 = 256 << 10;

/// Memory of an instance, in bytes.
pub const MAX_MEMORY_BYTES: usize = 32 << 20;

/// CPU time for a block of 1 MiB, in milliseconds; a block that is checked is mapped twice, and one
/// that exceeds it is begun once more.
pub const TIME_LIMIT_MS: u64 = 50;

/// The part of it that every block has, however small it is.
const TIME_BASE_MS: u64 = 10;

/// Of so many blocks one is checked to be mapped token by token, beside the first.
pub const CHECK_EVERY: u64 = 32;

/// How often the time of a running module is looked at.
const TICK: Duration = Duration::from_millis(5);

/// Ticks without a block after which the ticker sleeps until the next.
const IDLE_TICKS: u32 = 100;

/// Entries of a module's tables.
const MAX_TABLE_ENTRIES: usize = 65_536;

/// Instances at once, of which an engine's thread needs one.
const INSTANCES: u32 = 4;

/// Bytes of an instance's memory that stay mapped between blocks: a block and what a small module
/// has.
const KEPT_BYTES: usize = 2 << 20;

/// Stack of a module, in bytes: threads of engines have 2 MiB.
const MAX_STACK_BYTES: usize = 256 << 10;

const MEMORY: &str = "memory";
const BUFFER: &str = "dquant_buffer";

/// Most weight of a module.
pub const MAX_WEIGHT: u64 = weight::MAX_WEIGHT;

/// Alignment of the buffer for tokens.
const BUFFER_ALIGN: usize = 16;

/// The export that maps tokens of a type.
fn export_for(dtype: Dtype) -> String {
    format!("dquant_map_{dtype}")
}

/// Why a module is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModuleError {
    /// It is too large to be compiled.
    #[error("a module has at most {MAX_MODULE_BYTES} bytes, this has {bytes}")]
    TooLarge {
        /// Its bytes.
        bytes: u64,
    },
    /// It is another module than the plan names.
    #[error("its SHA-256 is {found}, the plan says {wanted}")]
    Hash {
        /// That of its bytes.
        found: String,
        /// That of the plan.
        wanted: String,
    },
    /// It is no module, or uses what is switched off.
    #[error("it is no WebAssembly module for this sandbox: {why}")]
    Invalid {
        /// What the compiler says.
        why: String,
    },
    /// Compiling it may take too much time and memory.
    #[error(
        "it has too much code, or too many values alive at its branches, calls and loops: its weight is above {most}, so compiling it may take too long"
    )]
    TooHeavy {
        /// Most weight.
        most: u64,
    },
    /// All places for heavy modules were taken for as long as one waits.
    #[error(
        "{HEAVY_AT_ONCE} other large modules were still being compiled after a wait of {} seconds",
        PLACE_WAIT.as_secs()
    )]
    Busy,
    /// It imports something.
    #[error("it imports {module}.{name}, but a module may import nothing")]
    Imports {
        /// Name of the other module.
        module: String,
        /// Name of what it imports.
        name: String,
    },
    /// It lacks an export, or has it with another type.
    #[error("it has no export {export}")]
    Export {
        /// The export, with its type.
        export: String,
    },
    /// The sandbox cannot be set up.
    #[error("the sandbox cannot be set up: {why}")]
    Sandbox {
        /// Why.
        why: String,
    },
}

/// A compiled module.
pub struct UserAction {
    instances: InstancePre<State>,
    ticker: Ticker,
    /// It has run out of its time once: every further block would take as long.
    spent: AtomicBool,
    /// A block has been checked.
    checked: AtomicBool,
}

impl fmt::Debug for UserAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserAction").field("spent", &self.spent).finish_non_exhaustive()
    }
}

/// What belongs to an instance, beside its memory.
struct State {
    /// CPU time of the thread at which it is stopped, in nanoseconds.
    deadline_ns: u64,
    stopped: Option<MapFault>,
}

impl ResourceLimiter for State {
    fn memory_growing(
        &mut self,
        _: usize,
        desired: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        self.allow(desired <= MAX_MEMORY_BYTES)
    }

    fn table_growing(
        &mut self,
        _: usize,
        desired: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        self.allow(desired <= MAX_TABLE_ENTRIES)
    }

    fn memory_grow_failed(&mut self, error: wasmtime::Error) -> wasmtime::Result<()> {
        self.stopped = Some(MapFault::Memory);
        Err(error)
    }

    fn instances(&self) -> usize {
        1
    }

    fn memories(&self) -> usize {
        1
    }
}

impl State {
    /// A module is stopped where it asks for too much: one that goes on without it fails less
    /// clearly.
    fn allow(&mut self, fits: bool) -> wasmtime::Result<bool> {
        if !fits {
            self.stopped = Some(MapFault::Memory);
            return Err(wasmtime::Error::msg("more memory than is allowed"));
        }
        Ok(true)
    }
}

/// Modules up to this weight compile without waiting for a place: each takes little, and many
/// sessions may begin at the same time.
const LIGHT_WEIGHT: u64 = MAX_WEIGHT / 64;

/// Heavier modules that may compile at the same time, because each takes much memory.
const HEAVY_AT_ONCE: usize = 2;

/// How long one waits for a place, several times what the worst modules take: a session that waits
/// holds what it has.
const PLACE_WAIT: Duration = Duration::from_secs(10);

/// The places of heavy modules. Nothing is locked while a module is compiled, and light ones never
/// wait.
static HEAVY: Places = Places { taken: Mutex::new(0), freed: Condvar::new() };

struct Places {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// A place, until it is dropped.
struct Place(&'static Places);

impl Places {
    /// Waits for a place, but not longer than this.
    fn take(&'static self, wait: Duration) -> Result<Place, ModuleError> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |taken: &mut usize| *taken >= HEAVY_AT_ONCE;
        let waited = self.freed.wait_timeout_while(taken, wait, full);
        let (mut taken, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(ModuleError::Busy);
        }
        *taken += 1;
        Ok(Place(self))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

/// What a module costs to compile, and whether it would be optimised. Above [`MAX_WEIGHT`] it is
/// not counted to the end.
///
/// # Errors
/// When it is no module for this sandbox.
pub fn weight(module: &[u8]) -> Result<(u64, bool), ModuleError> {
    let found = weight::of(module).map_err(|why| ModuleError::Invalid { why })?;
    Ok(found.chosen())
}

/// CPU time for a block of so many bytes, in nanoseconds.
const fn time_limit_ns(bytes: u64) -> u64 {
    (TIME_BASE_MS * 1_000_000) + (TIME_LIMIT_MS - TIME_BASE_MS) * bytes * 1_000_000 / (1 << 20)
}

/// CPU time of this thread, in nanoseconds.
fn thread_cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn config(optimises: bool) -> Config {
    // Pages that blocks touch stay mapped and are cleared: their faults would cost more than most
    // modules.
    let mut pool = PoolingAllocationConfig::new();
    pool.total_core_instances(INSTANCES)
        .total_memories(INSTANCES)
        .total_tables(INSTANCES)
        .max_memory_size(MAX_MEMORY_BYTES)
        .table_elements(MAX_TABLE_ENTRIES)
        .linear_memory_keep_resident(KEPT_BYTES);
    let mut config = Config::new();
    config
        .allocation_strategy(pool)
        .epoch_interruption(true)
        .signals_based_traps(false)
        .memory_guard_size(0)
        .memory_reservation(MAX_MEMORY_BYTES as u64)
        .max_wasm_stack(MAX_STACK_BYTES)
        .cranelift_nan_canonicalization(true)
        .cranelift_opt_level(if optimises { OptLevel::Speed } else { OptLevel::None })
        .wasm_relaxed_simd(false)
        .wasm_memory64(false)
        .wasm_multi_memory(false)
        // Values that blocks take are what compilers of programs do not make, and take long to
        // compile.
        .wasm_multi_value(false)
        .wasm_tail_call(false)
        .wasm_backtrace(false);
    config
}

impl UserAction {
    /// Compiles a module whose bytes have this SHA-256.
    ///
    /// # Errors
    /// When it is another module, or none that may run here.
    pub fn load(bytes: &[u8], sha256: &[u8; 32]) -> Result<UserAction, ModuleError> {
        if bytes.len() as u64 > MAX_MODULE_BYTES {
            return Err(ModuleError::TooLarge { bytes: bytes.len() as u64 });
        }
        let found: [u8; 32] = Sha256::digest(bytes).into();
        if found != *sha256 {
            return Err(ModuleError::Hash { found: hex(&found), wanted: hex(sha256) });
        }
        let (weight, optimises) = weight(bytes)?;
        if weight > MAX_WEIGHT {
            return Err(ModuleError::TooHeavy { most: MAX_WEIGHT });
        }
        let sandbox = |why: &dyn fmt::Display| ModuleError::Sandbox { why: why.to_string() };
        let _place = (weight > LIGHT_WEIGHT).then(|| HEAVY.take(PLACE_WAIT)).transpose()?;
        let engine = Engine::new(&config(optimises)).map_err(|error| sandbox(&error))?;
        // The text format is not accepted: the feature is off.
        let module = Module::from_binary(&engine, bytes)
            .map_err(|error| ModuleError::Invalid { why: in_one_line(&error) })?;
        check(&module)?;
        let instances = Linker::new(&engine).instantiate_pre(&module);
        let instances = instances.map_err(|error| sandbox(&error))?;
        let ticker = Ticker::start(engine).map_err(|error| sandbox(&error))?;
        let (spent, checked) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(UserAction { instances, ticker, spent, checked })
    }

    /// Checks that it maps tokens of this type.
    ///
    /// # Errors
    /// When it does not.
    pub fn check_type(&self, dtype: Dtype) -> Result<(), ModuleError> {
        let (name, module) = (export_for(dtype), self.instances.module());
        let is_map = matches!(module.get_export(&name), Some(ExternType::Func(function))
            if is_function(&function, &[ValType::I32, ValType::I32, ValType::I64]));
        let export = format!("{name}(i32, i32, i64) -> i32");
        if is_map { Ok(()) } else { Err(ModuleError::Export { export }) }
    }

    /// Maps tokens in a fresh instance, and in another one if the time of the first was over.
    /// Tokens are replaced after a success only.
    fn run(&self, tokens: &mut [u8], dtype: Dtype, first_token: u64) -> Result<(), MapFault> {
        again_if_late(|| self.run_once(tokens, dtype, first_token))
    }

    fn run_once(&self, tokens: &mut [u8], dtype: Dtype, first_token: u64) -> Result<(), MapFault> {
        let deadline_ns = thread_cpu_ns() + time_limit_ns(tokens.len() as u64);
        let engine = self.instances.module().engine();
        let mut store = Store::new(engine, State { deadline_ns, stopped: None });
        store.limiter(|state| state);
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut context| {
            let state = context.data_mut();
            if thread_cpu_ns() < state.deadline_ns {
                return Ok(UpdateDeadline::Continue(1));
            }
            state.stopped = Some(MapFault::Time);
            Err(wasmtime::Error::msg("the time is over"))
        });
        let _ticking = self.ticker.tick();
        let done = self.call(&mut store, tokens, dtype, first_token);
        done.map_err(|failure| match (store.data().stopped, failure) {
            (Some(fault), _) | (None, Failure::Fault(fault)) => fault,
            (None, Failure::Wasm(error)) => MapFault::Trap(trap_of(&error)),
        })
    }

    fn call(
        &self,
        store: &mut Store<State>,
        tokens: &mut [u8],
        dtype: Dtype,
        first_token: u64,
    ) -> Result<(), Failure> {
        let instance: Instance = self.instances.instantiate(&mut *store)?;
        let buffer = instance.get_typed_func::<u32, u32>(&mut *store, BUFFER)?;
        let map =
            instance.get_typed_func::<(u32, u32, u64), i32>(&mut *store, &export_for(dtype))?;
        let bad = Failure::Fault(MapFault::Buffer);
        let memory = instance.get_memory(&mut *store, MEMORY).ok_or(bad)?;
        // A block is at most 1 MiB.
        let (bytes, count) = (tokens.len() as u32, tokens.len() as u32 / dtype.bytes());
        let at = buffer.call(&mut *store, bytes)?;
        let range = at as usize..at as usize + tokens.len();
        let place = memory.data_mut(&mut *store).get_mut(range.clone());
        let is_placed = at > 0 && (at as usize).is_multiple_of(BUFFER_ALIGN);
        let place = place.filter(|_| is_placed).ok_or(Failure::Fault(MapFault::Buffer))?;
        place.copy_from_slice(tokens);
        match map.call(&mut *store, (at, count, first_token))? {
            0 => {}
            code => return Err(Failure::Fault(MapFault::Code(code))),
        }
        // A memory never becomes smaller.
        tokens.copy_from_slice(&memory.data(&*store)[range]);
        Ok(())
    }

    /// Maps the tokens again in two pieces, the later one first, and compares the result with
    /// `mapped`.
    fn check_pieces(
        &self,
        mut again: Vec<u8>,
        mapped: &[u8],
        dtype: Dtype,
        first_token: u64,
    ) -> Result<(), MapFault> {
        let (width, count) = (dtype.bytes() as usize, again.len() / dtype.bytes() as usize);
        let cut = 1 + mixed(first_token) as usize % (count - 1);
        let (front, back) = again.split_at_mut(cut * width);
        self.run(back, dtype, first_token + cut as u64)?;
        self.run(front, dtype, first_token)?;
        if again == mapped { Ok(()) } else { Err(MapFault::NotByItself) }
    }

    fn map_and_check(
        &self,
        tokens: &mut [u8],
        dtype: Dtype,
        first_token: u64,
    ) -> Result<(), MapFault> {
        let is_due = !self.checked.swap(true, Ordering::Relaxed)
            || mixed(first_token).is_multiple_of(CHECK_EVERY);
        let original = (is_due && tokens.len() > dtype.bytes() as usize).then(|| tokens.to_vec());
        self.run(tokens, dtype, first_token)?;
        match original {
            Some(original) => self.check_pieces(original, tokens, dtype, first_token),
            None => Ok(()),
        }
    }
}

impl TokenMap for UserAction {
    fn map(&self, tokens: &mut [u8], dtype: Dtype, first_token: u64) -> Result<(), MapFault> {
        if self.spent.load(Ordering::Relaxed) {
            return Err(MapFault::Time);
        }
        let mapped = self.map_and_check(tokens, dtype, first_token);
        if mapped == Err(MapFault::Time) {
            self.spent.store(true, Ordering::Relaxed);
        }
        mapped
    }
}

/// Tries once more what exceeded its time.
fn again_if_late(mut run: impl FnMut() -> Result<(), MapFault>) -> Result<(), MapFault> {
    match run() {
        Err(MapFault::Time) => run(),
        done => done,
    }
}

/// Why a call into an instance failed.
enum Failure {
    Fault(MapFault),
    Wasm(wasmtime::Error),
}

impl From<wasmtime::Error> for Failure {
    fn from(error: wasmtime::Error) -> Failure {
        Failure::Wasm(error)
    }
}

fn trap_of(error: &wasmtime::Error) -> Trap {
    match error.downcast_ref::<WasmTrap>() {
        Some(WasmTrap::UnreachableCodeReached) => Trap::Unreachable,
        Some(
            WasmTrap::MemoryOutOfBounds | WasmTrap::TableOutOfBounds | WasmTrap::HeapMisaligned,
        ) => Trap::OutOfBounds,
        Some(
            WasmTrap::IntegerDivisionByZero
            | WasmTrap::IntegerOverflow
            | WasmTrap::BadConversionToInteger,
        ) => Trap::Arithmetic,
        Some(WasmTrap::StackOverflow) => Trap::StackOverflow,
        _ => Trap::Other,
    }
}

/// Checks what a module imports and exports.
fn check(module: &Module) -> Result<(), ModuleError> {
    if let Some(import) = module.imports().next() {
        let (module, name) = (import.module().to_owned(), import.name().to_owned());
        return Err(ModuleError::Imports { module, name });
    }
    // That it begins no larger than it may become is checked where it is compiled.
    if !matches!(module.get_export(MEMORY), Some(ExternType::Memory(_))) {
        return Err(ModuleError::Export { export: format!("{MEMORY}, its memory") });
    }
    match module.get_export(BUFFER) {
        Some(ExternType::Func(function)) if is_function(&function, &[ValType::I32]) => Ok(()),
        _ => Err(ModuleError::Export { export: format!("{BUFFER}(i32) -> i32") }),
    }
}

/// Whether a function takes these values and returns an `i32`.
fn is_function(function: &wasmtime::FuncType, takes: &[ValType]) -> bool {
    let same = |given: &ValType, wanted: &ValType| given.matches(wanted);
    let mut returned = function.results();
    function.params().len() == takes.len()
        && function.params().zip(takes).all(|(given, wanted)| same(&given, wanted))
        && returned.len() == 1
        && returned.all(|value| value.is_i32())
}

/// An error and its causes without line breaks.
fn in_one_line(error: &wasmtime::Error) -> String {
    format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Spreads the number of a token over 64 bits (SplitMix64).
fn mixed(value: u64) -> u64 {
    let x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Advances the epoch of an engine while a module runs; a thread that sleeps when none has run for
/// a while.
struct Ticker {
    shared: Arc<Ticking>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Ticking {
    /// Calls begun so far.
    begun: AtomicU64,
    /// Calls under way.
    running: AtomicU64,
    asleep: AtomicBool,
    over: AtomicBool,
}

/// A call under way.
struct Running<'a>(&'a Ticking);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Ticker {
    fn start(engine: Engine) -> std::io::Result<Ticker> {
        let shared = Arc::new(Ticking::default());
        let ticking = Arc::clone(&shared);
        let thread = thread::Builder::new().name("dquant-wasm".into());
        let thread = thread.spawn(move || ticking.run(&engine))?;
        Ok(Ticker { shared, thread: Some(thread) })
    }

    /// Ticks until the result is dropped.
    fn tick(&self) -> Running<'_> {
        self.shared.begun.fetch_add(1, Ordering::Relaxed);
        // Before `asleep` is read; the ticker sets that before it reads this.
        self.shared.running.fetch_add(1, Ordering::SeqCst);
        if self.shared.asleep.load(Ordering::SeqCst) {
            self.wake();
        }
        Running(&self.shared)
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Ticking {
    fn run(&self, engine: &Engine) {
        let (mut begun, mut idle) = (0, 0);
        while !self.over.load(Ordering::SeqCst) {
            if idle < IDLE_TICKS {
                thread::park_timeout(TICK);
            } else {
                self.asleep.store(true, Ordering::SeqCst);
                // A call that begins now wakes us, even before we sleep.
                if self.running.load(Ordering::SeqCst) == 0 && !self.over.load(Ordering::SeqCst) {
                    thread::park();
                }
                self.asleep.store(false, Ordering::SeqCst);
            }
            let now = self.begun.load(Ordering::Relaxed);
            let is_idle = now == begun && self.running.load(Ordering::SeqCst) == 0;
            idle = if is_idle { idle + 1 } else { 0 };
            begun = now;
            engine.increment_epoch();
        }
    }
}

#[cfg(test)]
mod tests;
