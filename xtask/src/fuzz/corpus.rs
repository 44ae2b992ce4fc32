//! The committed corpora: one file each in the repository, a folder of files for libFuzzer.

use std::fs;
use std::path::Path;

use super::cannot;
use crate::shell::Failure;

#[path = "../../../testing/corpus.rs"]
mod form;

/// Writes every input of the file `packed` into `folder`, named by its place; removes what was in
/// the folder.
///
/// # Errors
/// When the corpus cannot be read or the folder cannot be written.
pub(super) fn unpack(packed: &Path, folder: &Path) -> Result<(), Failure> {
    let bytes = fs::read(packed).map_err(|error| cannot("read", packed, &error))?;
    let inputs = form::unpack(&bytes)
        .ok_or_else(|| Failure::usage(format!("{} is cut off", packed.display())))?;
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).map_err(|error| cannot("create", folder, &error))?;
    for (index, input) in inputs.iter().enumerate() {
        let path = folder.join(format!("{index:04}"));
        fs::write(&path, input).map_err(|error| cannot("write", &path, &error))?;
    }
    Ok(())
}

/// Writes the files of `folder` into the file `packed`; returns the number of inputs and of their
/// bytes.
///
/// # Errors
/// When the folder cannot be read or the file cannot be written.
pub(super) fn pack(folder: &Path, packed: &Path) -> Result<(usize, usize), Failure> {
    let entries = fs::read_dir(folder).map_err(|error| cannot("read", folder, &error))?;
    let inputs: Result<Vec<_>, _> = entries.flatten().map(|entry| fs::read(entry.path())).collect();
    let inputs = inputs.map_err(|error| cannot("read", folder, &error))?;
    let (inputs, bytes) = (inputs.len(), joined(inputs));
    fs::write(packed, &bytes).map_err(|error| cannot("write", packed, &error))?;
    Ok((inputs, bytes.len()))
}

/// Short ones first: the same inputs make the same file, and small ones are tried before large
/// ones.
fn joined(mut inputs: Vec<Vec<u8>>) -> Vec<u8> {
    inputs.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
    let framed =
        inputs.iter().map(|input| [&(input.len() as u32).to_le_bytes(), &input[..]].concat());
    framed.collect::<Vec<_>>().concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_come_back_short_ones_first() {
        let bytes = joined(vec![b"long".to_vec(), b"b".to_vec(), Vec::new(), b"a".to_vec()]);
        assert_eq!(form::unpack(&bytes), Some(vec![&b""[..], b"a", b"b", b"long"]));
        assert_eq!(form::unpack(&bytes[..bytes.len() - 1]), None);
    }
}
