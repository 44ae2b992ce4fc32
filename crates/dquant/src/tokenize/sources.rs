//! Which files a run reads, and in which order.
//!
//! A folder stands for every file below it, sorted by path bytes, so the same tree gives the same dataset on any
//! machine. Below a folder, names that begin with a dot, manifests and symbolic links are left out: the first
//! two are rarely intended as input, the last can form loops. Paths named on the command line are always read.

use std::fs;
use std::path::{Path, PathBuf};

use formats::manifest::ENDING as MANIFEST_ENDING;

use super::TokenizeError;

/// Lists the files of all inputs, in the order of the inputs.
///
/// # Errors
/// When a folder cannot be read, an input is neither file nor folder, nothing is found, or `output` is among the
/// files.
pub fn list(inputs: &[PathBuf], output: &Path) -> Result<Vec<PathBuf>, TokenizeError> {
    let output = fs::canonicalize(output).ok();
    let mut files = Vec::new();
    for input in inputs {
        let metadata = fs::metadata(input).map_err(TokenizeError::io("open", input))?;
        if metadata.is_dir() {
            walk(input, output.as_deref(), &mut files)?;
        } else if !metadata.is_file() {
            return Err(TokenizeError::NotAFile { path: input.clone() });
        } else if is_same(input, output.as_deref()) {
            return Err(TokenizeError::OutputIsInput { path: input.clone() });
        } else {
            files.push(input.clone());
        }
    }
    if files.is_empty() {
        let inputs: Vec<String> = inputs.iter().map(|path| path.display().to_string()).collect();
        return Err(TokenizeError::NoFiles { inputs: inputs.join(", ") });
    }
    Ok(files)
}

/// Adds the files below `folder`, depth first in sorted order; an output of an earlier run is left out.
fn walk(
    folder: &Path,
    output: Option<&Path>,
    files: &mut Vec<PathBuf>,
) -> Result<(), TokenizeError> {
    let mut unread = vec![folder.to_owned()];
    while let Some(path) = unread.pop() {
        let metadata = fs::symlink_metadata(&path).map_err(TokenizeError::io("open", &path))?;
        // The folder itself was named by the user and may be a link.
        if metadata.is_dir() || path == folder {
            // Popped from the end, so the largest name goes in first.
            unread.extend(entries(&path)?.into_iter().rev());
        } else if metadata.is_file() && !is_same(&path, output) {
            files.push(path);
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, TokenizeError> {
    let unreadable = || TokenizeError::io("read", folder);
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable())? {
        let entry = entry.map_err(unreadable())?;
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        // The manifests of outputs are no text to tokenise.
        if !name.starts_with(b".") && !name.ends_with(MANIFEST_ENDING.as_bytes()) {
            entries.push(entry.path());
        }
    }
    entries.sort_by(|a, b| a.as_os_str().as_encoded_bytes().cmp(b.as_os_str().as_encoded_bytes()));
    Ok(entries)
}

fn is_same(path: &Path, output: Option<&Path>) -> bool {
    output.is_some() && fs::canonicalize(path).ok().as_deref() == output
}
