//! Sets the shared library's name and its symbol versions.
//!
//! Programs and providers request `ibv_open_device@IBVERBS_1.1` and the like, so every exported
//! symbol must have the version node of rdma-core: `libibverbs.map`. rustc passes an anonymous
//! version script of its own, which linkers refuse to combine with named nodes; the wrapper
//! `linker/ld.bfd` drops that one. Without GNU ld the library is built unversioned, which the
//! dynamic linker accepts with a warning for each program.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    for file in ["build.rs", "libibverbs.map", "linker/ld.bfd"] {
        println!("cargo::rerun-if-changed={file}");
    }
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    // Threads of the library outlive the objects that started them, so it must stay loaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    if !has_bfd() {
        println!(
            "cargo::warning=no GNU ld (ld.bfd): libibverbs.so is built without symbol versions"
        );
        return;
    }
    let linker = root.join("linker");
    let map = root.join("libibverbs.map");
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=bfd");
    println!("cargo::rustc-cdylib-link-arg=-B{}", linker.display());
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={}", map.display());
}

fn has_bfd() -> bool {
    let known = ["/usr/bin/ld.bfd", "/usr/local/bin/ld.bfd", "/bin/ld.bfd"];
    known.iter().any(|path| Path::new(path).exists())
        || Command::new("ld.bfd").arg("--version").output().is_ok_and(|out| out.status.success())
}
