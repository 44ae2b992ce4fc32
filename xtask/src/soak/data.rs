//! Token files, and for each plan the batches that must come out.
//!
//! A batch is a pure function of files, plan and number, so a local reader without daemons makes
//! them once, and every stream is compared with its file.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use super::ground::Ground;
use super::process::End;
use crate::shell::Failure;

/// Ids of the usual vocabularies lie below this.
const VOCABULARY: u64 = 50_257;

/// Bytes of each file: several blocks of the largest kind.
const FILE_BYTES: u64 = 8 << 20;

/// A plan, what it reads, and as what type.
#[derive(Debug)]
struct Plan {
    dataset: &'static str,
    dtype: &'static str,
    plan: &'static str,
    batches: u64,
}

/// Small and large batches, every way in which blocks cross the wire. Each makes some tens of MiB.
const PLANS: &[Plan] = &[
    Plan {
        dataset: "a.bin",
        dtype: "u32",
        plan: "window(2048) | shuffle(7) | narrow(u16) | batch(32)",
        batches: 384,
    },
    Plan {
        dataset: "a.bin",
        dtype: "u32",
        plan: "window(512) | shuffle(3, blocks=2) | batch(8)",
        batches: 2_048,
    },
    Plan {
        dataset: "mix",
        dtype: "u32",
        plan: "window(1024) | shuffle(5) | blend(x=0.7,y=0.3) | narrow(u16) | batch(16)",
        batches: 1_024,
    },
    Plan {
        dataset: "a.bin",
        dtype: "u32",
        plan: "window(2048) | shuffle(11) | bitpack(16) | batch(32)",
        batches: 192,
    },
    Plan {
        dataset: "a.bin",
        dtype: "u32",
        plan: "window(2048) | shuffle(13) | compress(lz4) | batch(4)",
        batches: 1_024,
    },
    Plan {
        dataset: "b.bin",
        dtype: "u16",
        plan: "window(4096) | shuffle(2) | widen(i64) | batch(32)",
        batches: 48,
    },
];

/// What a plan delivers.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) dataset: &'static str,
    pub(super) dtype: &'static str,
    pub(super) plan: &'static str,
    pub(super) batches: u64,
    pub(super) batch_bytes: usize,
    file: File,
}

impl Expected {
    /// # Errors
    /// Names the first byte that differs.
    pub(super) fn compare(&self, batch: u64, got: &[u8]) -> Result<(), String> {
        let mut want = vec![0; self.batch_bytes];
        let at = batch * self.batch_bytes as u64;
        self.file.read_exact_at(&mut want, at).map_err(|error| error.to_string())?;
        match got.iter().zip(&want).position(|(got, want)| got != want) {
            None => Ok(()),
            Some(at) => {
                let (got, want) = (got[at], want[at]);
                Err(format!("batch {batch}: byte {at} is {got:#04x}, not {want:#04x}"))
            }
        }
    }
}

/// Makes the files and, with the program itself, the batches.
///
/// # Errors
/// When the folder cannot be written or the program fails.
pub(super) fn make(ground: &Ground) -> Result<Vec<Expected>, Failure> {
    let root = ground.root();
    let write = |name: &str, salt: u64, width: usize| {
        let tokens = (0..FILE_BYTES / width as u64).map(|at| token(at, salt));
        let bytes = tokens.flat_map(|token| token.to_le_bytes().into_iter().take(width));
        fs::write(root.join(name), bytes.collect::<Vec<u8>>())
    };
    let made = fs::create_dir_all(root.join("mix"))
        .and_then(|()| write("a.bin", 1, 4))
        .and_then(|()| write("b.bin", 2, 2))
        .and_then(|()| write("mix/x.bin", 3, 4))
        .and_then(|()| write("mix/y.bin", 4, 4));
    made.map_err(|error| Failure::usage(format!("cannot write {}: {error}", root.display())))?;
    PLANS.iter().map(|plan| expect(ground, plan)).collect()
}

/// Encodes its place, so that any mix-up is found.
fn token(at: u64, salt: u64) -> u64 {
    ((at + salt * 1_000_003).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % VOCABULARY
}

fn expect(ground: &Ground, plan: &Plan) -> Result<Expected, Failure> {
    let path = ground.fresh("expected");
    let source = ground.root().join(plan.dataset);
    let batches = plan.batches.to_string();
    let mut command = ground.dquant(&["cat", "--plan", plan.plan, "--batches", &batches]);
    command.args(["--dtype", plan.dtype, "-o"]).arg(&path).arg(source);
    command.stdout(std::process::Stdio::null());
    let process = ground.spawn("a local reader", command).map_err(Failure::usage)?;
    let end = process.wait(std::time::Duration::from_secs(120));
    if end != Some(End::Code(0)) {
        let said = process.last_lines(4);
        return Err(Failure::usage(format!("no batches of {}: {end:?}: {said}", plan.plan)));
    }
    let file = File::open(&path).map_err(|error| Failure::usage(error.to_string()))?;
    let bytes = file.metadata().map_err(|error| Failure::usage(error.to_string()))?.len();
    let Plan { dataset, dtype, plan, batches } = *plan;
    let batch_bytes = (bytes / batches) as usize;
    Ok(Expected { dataset, dtype, plan, batches, batch_bytes, file })
}
