//! The shared library exports the symbols of rdma-core, with the same versions, and none by
//! accident.

#[path = "../../../testing/skip.rs"]
mod skip;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// Functions of libc that the library interposes: see `exports/interpose.rs`.
const INTERPOSED: &[&str] = &[
    "__fxstatat",
    "__fxstatat64",
    "__lxstat",
    "__lxstat64",
    "__open64_2",
    "__open_2",
    "__openat64_2",
    "__openat_2",
    "__readlink_chk",
    "__readlinkat_chk",
    "__realpath_chk",
    "__xstat",
    "__xstat64",
    "access",
    "canonicalize_file_name",
    "chdir",
    "eaccess",
    "euidaccess",
    "faccessat",
    "fopen",
    "fopen64",
    "freopen",
    "freopen64",
    "fstatat",
    "fstatat64",
    "ftw",
    "ftw64",
    "getxattr",
    "inotify_add_watch",
    "lgetxattr",
    "listxattr",
    "llistxattr",
    "lstat",
    "lstat64",
    "nftw",
    "nftw64",
    "open",
    "open64",
    "openat",
    "openat64",
    "opendir",
    "pathconf",
    "readlink",
    "readlinkat",
    "realpath",
    "scandir",
    "scandir64",
    "scandirat",
    "scandirat64",
    "stat",
    "stat64",
    "statfs",
    "statfs64",
    "statvfs",
    "statvfs64",
    "statx",
];

/// Cargo puts the library beside the tests that it builds with it.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    test.with_file_name("libibverbs.so")
}

/// Exported names with their versions; `None` where there is no `nm`.
fn exported() -> Option<BTreeMap<String, String>> {
    let mut nm = Command::new("nm");
    let output =
        nm.args(["-D", "--defined-only", "--with-symbol-versions"]).arg(library()).output();
    let output = output.ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("names are text");
    let names = text.lines().filter_map(|line| line.split_ascii_whitespace().nth(2));
    // The names of the version nodes are listed, too: as absolute symbols.
    let symbols = names.filter(|name| !name.starts_with("IBVERBS_"));
    Some(symbols.map(|name| name.split_once("@@").unwrap_or((name, ""))).map(own).collect())
}

fn own((name, version): (&str, &str)) -> (String, String) {
    (name.to_owned(), version.to_owned())
}

/// The symbols in the version script.
fn wanted() -> BTreeMap<String, String> {
    let script = include_str!("../libibverbs.map");
    let mut version = "";
    let mut found = BTreeMap::new();
    for line in script.lines().map(str::trim) {
        if let Some(node) = line.strip_suffix(" {") {
            version = node;
        } else if let Some(name) = line.strip_suffix(';').filter(|name| !name.contains(['*', '}']))
        {
            found.insert(name.to_owned(), version.to_owned());
        }
    }
    found.extend(INTERPOSED.iter().map(|name| own((name, ""))));
    found
}

#[test]
fn exported_symbols_are_those_of_the_version_script() {
    let Some(exported) = exported() else {
        skip::note("exported_symbols", "no nm (binutils)");
        return;
    };
    if exported.values().all(String::is_empty) {
        skip::note("exported_symbols", "built without GNU ld, so without versions");
        return;
    }
    assert_eq!(exported, wanted());
}
