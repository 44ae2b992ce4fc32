//! Compares every structure and constant with the installed C headers: a C program is generated that
//! prints them in the order of our own tables.

use std::fmt::Write as _;
use std::process::Command;

use super::*;

/// Paths that are not plain fields on our side.
fn nested() -> Vec<(&'static str, usize)> {
    let args = core::mem::offset_of!(ibv_send_wr, wr);
    let bind = core::mem::offset_of!(ibv_send_wr, bind_mw);
    vec![
        ("wr.rdma.rkey", args + core::mem::offset_of!(wr_rdma, rkey)),
        ("wr.atomic.swap", args + core::mem::offset_of!(wr_atomic, swap)),
        ("wr.atomic.rkey", args + core::mem::offset_of!(wr_atomic, rkey)),
        ("wr.ud.remote_qpn", args + core::mem::offset_of!(wr_ud, remote_qpn)),
        ("wr.ud.remote_qkey", args + core::mem::offset_of!(wr_ud, remote_qkey)),
        ("bind_mw.rkey", bind + core::mem::offset_of!(ibv_send_wr_bind, rkey)),
        ("bind_mw.bind_info", bind + core::mem::offset_of!(ibv_send_wr_bind, bind_info)),
    ]
}

/// What C has to print, line by line: its expression and our value.
fn expectations() -> Vec<(String, u64)> {
    let mut lines = Vec::new();
    for (c_name, size, fields) in structures() {
        lines.push((format!("sizeof({c_name})"), size as u64));
        for (field, offset) in fields {
            let field = field.trim_start_matches("r#");
            lines.push((format!("offsetof({c_name}, {field})"), offset as u64));
        }
    }
    for (path, offset) in nested() {
        lines.push((format!("offsetof(struct ibv_send_wr, {path})"), offset as u64));
    }
    lines.extend(CONSTANTS.iter().map(|&(name, value)| (name.to_owned(), u64::from(value))));
    lines
}

#[test]
fn structures_and_constants_are_those_of_the_headers() {
    const TEST: &str = "loaded::structures_and_constants_are_those_of_the_headers";
    if !std::path::Path::new("/usr/include/infiniband/verbs.h").exists() {
        return crate::skip::note(TEST, "libibverbs-dev is not installed");
    }
    let lines = expectations();
    let includes = "#include <infiniband/verbs.h>\n#include <stdio.h>\n#include <stddef.h>\n";
    let mut text = format!("{includes}int main(void) {{\n");
    for (expression, _) in &lines {
        writeln!(text, "printf(\"%llu\\n\", (unsigned long long)({expression}));").expect("text");
    }
    text.push_str("return 0; }\n");
    let dir = std::env::temp_dir().join(format!("nic-abi-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let (source, program) = (dir.join("layout.c"), dir.join("layout"));
    std::fs::write(&source, text).expect("a file");
    let Ok(compiled) = Command::new("cc").arg("-o").arg(&program).arg(&source).status() else {
        return crate::skip::note(TEST, "no C compiler");
    };
    assert!(compiled.success(), "the generated program does not compile");
    let output = Command::new(&program).output().expect("it runs");
    std::fs::remove_dir_all(&dir).expect("it is ours");
    let text = String::from_utf8(output.stdout).expect("numbers");
    let theirs: Vec<u64> = text.lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(theirs.len(), lines.len());
    let differing = lines.iter().zip(&theirs).filter(|((_, ours), theirs)| ours != *theirs);
    let differing: Vec<_> = differing.collect();
    assert!(differing.is_empty(), "ours, theirs: {differing:#?}");
}
