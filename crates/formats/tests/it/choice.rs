//! Which column holds the tokens, and of which type: chosen where there is no doubt, else asked
//! for.

use std::fs;

use formats::ReadOptions;
use xio::dataset::Dtype;

use super::golden::{expected, golden};
use super::kit::{Folder, documents};

/// The golden MDS dataset with another index.
fn changed(folder: &Folder, changes: &[(&str, &str)]) -> std::path::PathBuf {
    let path = folder.path("mds");
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("writable");
    for entry in fs::read_dir(golden("mds")).expect("it is checked in") {
        let entry = entry.expect("readable");
        fs::copy(entry.path(), path.join(entry.file_name())).expect("writable");
    }
    let index = path.join("index.json");
    let mut text = fs::read_to_string(&index).expect("an index");
    for (from, to) in changes {
        assert!(text.contains(from), "{from} is not in the index");
        text = text.replace(from, to);
    }
    fs::write(index, text).expect("writable");
    path
}

#[test]
fn a_column_is_chosen_by_its_name_or_asked_for() {
    let folder = Folder::new("choice");
    let refused = |path: &std::path::Path, options: &ReadOptions, why: &str, hint: &str| {
        let error = formats::open(path, options).err().expect("refused");
        assert!(error.to_string().contains(why), "{error}");
        assert!(error.hint().contains(hint), "{}", error.hint());
    };
    let plain = ReadOptions::default();
    let named = |name: &str| ReadOptions { column: Some(name.into()), ..plain.clone() };
    let two = changed(&folder, &[("\"str\"", "\"ndarray:uint16\"")]);
    assert_eq!(documents(&two, &plain), expected());
    let two = changed(&folder, &[("\"str\"", "\"ndarray:uint16\""), ("\"tokens\"", "\"words\"")]);
    refused(&two, &plain, "0 of its columns", "words (ndarray:uint16)");
    assert_eq!(documents(&two, &named("words")), expected());
    refused(&two, &named("id"), "holds no integers", "its columns are id");
    let given = ReadOptions { dtype: Some(Dtype::I32), ..named("words") };
    refused(&two, &given, "holds u16, not i32", "--dtype");
}

#[test]
fn plain_bytes_need_a_type() {
    let folder = Folder::new("choice-bytes");
    let bytes = changed(&folder, &[("\"ndarray:uint16\"", "\"bytes\"")]);
    let error = formats::open(&bytes, &ReadOptions::default()).err().expect("refused");
    assert!(error.hint().contains("--dtype"), "{error}: {}", error.hint());
    let given = ReadOptions { dtype: Some(Dtype::U16), ..ReadOptions::default() };
    // The header of each array is two bytes, and now a token in front of the others.
    let found = documents(&bytes, &given);
    let rest: Vec<Vec<i64>> = found.iter().map(|tokens| tokens[1..].to_vec()).collect();
    assert_eq!(rest, expected());
}
