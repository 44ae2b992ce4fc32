//! User actions: from the module that a plan names to one that may run.
//!
//! A module is compiled where a session or a stream begins, on the thread that opens it. Without
//! the feature `wasm` every module is refused. How modules run is `host::wasm`'s concern.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use service::error::Error;
use xio::dataset::Dtype;
use xio::kernel::TokenMap;
use xio::plan::UserModule;

/// A module that may run.
pub type Action = Arc<dyn TokenMap>;

/// Ending that a module's name may lack.
pub(crate) const ENDING: &str = ".wasm";

/// Bytes of a module that are read: more than any may have.
pub(crate) const READ_BYTES: u64 = 1 << 20;

/// Compiles a module for files of these types. `name` is where its bytes were found.
///
/// # Errors
/// When it is not the module of the plan, or may not run.
pub(crate) fn load(
    name: &str,
    bytes: &[u8],
    sha256: &[u8; 32],
    dtypes: impl IntoIterator<Item = Dtype>,
) -> Result<Action, Error> {
    compile(bytes, sha256, dtypes)
        .map_err(|(why, hint)| Error::invalid(format!("{name}: {why}")).hint(hint))
}

#[cfg(feature = "wasm")]
fn compile(
    bytes: &[u8],
    sha256: &[u8; 32],
    dtypes: impl IntoIterator<Item = Dtype>,
) -> Result<Action, (String, &'static str)> {
    use host::wasm::{ModuleError, UserAction};

    let refused = |error: ModuleError| {
        let hint = match error {
            ModuleError::Hash { .. } => {
                "the plan names another version of the module; `sha256sum FILE` prints the hash of this one"
            }
            ModuleError::TooLarge { .. } => "build it for size and without debug sections",
            ModuleError::TooHeavy { .. } => {
                "split its largest functions: fewer locals, or fewer branches among many"
            }
            ModuleError::Busy => "try again in a few seconds",
            ModuleError::Sandbox { .. } => "this machine lacks what the sandbox needs",
            _ => "docs/plan.md says what a module has to export; it may import nothing",
        };
        (error.to_string(), hint)
    };
    let action = UserAction::load(bytes, sha256).map_err(refused)?;
    for dtype in dtypes {
        action.check_type(dtype).map_err(refused)?;
    }
    Ok(Arc::new(action))
}

#[cfg(not(feature = "wasm"))]
fn compile(
    _: &[u8],
    _: &[u8; 32],
    _: impl IntoIterator<Item = Dtype>,
) -> Result<Action, (String, &'static str)> {
    let why = "a module: that needs the feature `wasm`, which this build does not have".to_owned();
    let hint = "packages have it; build with `cargo build --release --features full` where the module lies, the Python package with \
                -C build-args=\"--features full\"";
    Err((why, hint))
}

/// Compiles the module of a plan over local files of these types.
///
/// # Errors
/// As [`load`], and when its file cannot be read.
pub fn read_local(
    module: &UserModule,
    dtypes: impl IntoIterator<Item = Dtype>,
) -> Result<Action, Error> {
    let given = Path::new(&module.name);
    let full = PathBuf::from(format!("{}{ENDING}", module.name));
    let path = if given.is_file() || !full.is_file() { given } else { &full };
    let (name, mut bytes) = (path.display().to_string(), Vec::new());
    let read = File::open(path).and_then(|file| file.take(READ_BYTES).read_to_end(&mut bytes));
    read.map_err(|error| {
        Error::invalid(format!("{name}: {error}"))
            .hint("wasm names a module by its path if the files are local, with or without .wasm")
    })?;
    load(&name, &bytes, &module.sha256, dtypes)
}

#[cfg(all(test, not(feature = "wasm")))]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_the_feature_refuses_modules() {
        let error = load("mask.wasm", b"\0asm\x01\0\0\0", &[0; 32], []).map(drop).expect_err("off");
        let (message, hint) = error.parts();
        assert!(
            message.starts_with("mask.wasm: a module: that needs the feature `wasm`"),
            "{message}"
        );
        assert!(hint.expect("a hint").contains("--features full"));
    }
}
