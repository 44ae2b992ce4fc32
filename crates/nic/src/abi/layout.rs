//! Compares every structure and constant with the installed C headers.
//!
//! A C program is generated that prints sizes, offsets and values in the order of our own tables.
//! Skipped, with the reason, where there is no compiler or no header.

use std::fmt::Write as _;
use std::process::Command;

use super::*;

struct Shape {
    c_name: &'static str,
    size: usize,
    fields: Vec<(&'static str, usize)>,
}

fn shape<T: Layout>() -> Shape {
    Shape { c_name: T::C_NAME, size: size_of::<T>(), fields: T::fields() }
}

macro_rules! shapes {
    ($($name:ident)+) => { vec![ $( shape::<$name>(), )+ ] };
}

fn all() -> Vec<Shape> {
    shapes! {
        ibv_gid ibv_gid_entry ibv_device_attr ibv_query_device_ex_input ibv_odp_caps ibv_tso_caps
        ibv_rss_caps ibv_packet_pacing_caps ibv_tm_caps ibv_cq_moderation_caps ibv_pci_atomic_caps
        ibv_device_attr_ex ibv_port_attr ibv_device ibv_global_route ibv_grh ibv_ah_attr
        ibv_values_ex ibv_ece ibv_pd ibv_mr ibv_mw ibv_ah ibv_comp_channel ibv_srq_attr
        ibv_srq_init_attr ibv_srq_init_attr_ex ibv_srq ibv_qp_cap ibv_qp_init_attr ibv_rx_hash_conf
        ibv_qp_init_attr_ex ibv_qp_attr ibv_qp ibv_qp_ex ibv_cq ibv_cq_ex ibv_poll_cq_attr
        ibv_cq_init_attr_ex ibv_modify_cq_attr ibv_qp_rate_limit_attr ibv_td_init_attr ibv_td
        ibv_parent_domain_init_attr ibv_async_event ibv_wc ibv_sge ibv_data_buf ibv_recv_wr
        ibv_send_wr ibv_mw_bind_info ibv_mw_bind ibv_context_ops ibv_context verbs_context
    }
}

/// Paths that are not plain fields on our side.
fn nested() -> Vec<(&'static str, &'static str, usize)> {
    let args = core::mem::offset_of!(ibv_send_wr, wr);
    let bind = core::mem::offset_of!(ibv_send_wr, bind_mw);
    vec![
        ("struct ibv_send_wr", "wr.rdma.rkey", args + core::mem::offset_of!(wr_rdma, rkey)),
        ("struct ibv_send_wr", "wr.atomic.swap", args + core::mem::offset_of!(wr_atomic, swap)),
        ("struct ibv_send_wr", "wr.atomic.rkey", args + core::mem::offset_of!(wr_atomic, rkey)),
        ("struct ibv_send_wr", "wr.ud.remote_qpn", args + core::mem::offset_of!(wr_ud, remote_qpn)),
        (
            "struct ibv_send_wr",
            "wr.ud.remote_qkey",
            args + core::mem::offset_of!(wr_ud, remote_qkey),
        ),
        (
            "struct ibv_send_wr",
            "bind_mw.rkey",
            bind + core::mem::offset_of!(ibv_send_wr_bind, rkey),
        ),
        (
            "struct ibv_send_wr",
            "bind_mw.bind_info",
            bind + core::mem::offset_of!(ibv_send_wr_bind, bind_info),
        ),
    ]
}

/// The lines that C has to print: its expression and our value.
fn expectations() -> Vec<(String, u64)> {
    let mut lines = Vec::new();
    for Shape { c_name, size, fields } in all() {
        lines.push((format!("sizeof({c_name})"), size as u64));
        for (field, offset) in fields {
            let field = field.trim_start_matches("r#");
            lines.push((format!("offsetof({c_name}, {field})"), offset as u64));
        }
    }
    for (c_name, path, offset) in nested() {
        lines.push((format!("offsetof({c_name}, {path})"), offset as u64));
    }
    let constants = CONSTANTS.iter().map(|&(name, value)| (name.to_owned(), u64::from(value)));
    lines.extend(constants);
    lines
}

fn c_program(lines: &[(String, u64)]) -> String {
    let mut text = String::from(
        "#include <infiniband/verbs.h>\n#include <stdio.h>\n#include <time.h>\nint main(void) {\n",
    );
    for (expression, _) in lines {
        writeln!(text, "printf(\"%llu\\n\", (unsigned long long)({expression}));")
            .expect("the compiler works");
    }
    text.push_str("return 0; }\n");
    text
}

#[test]
fn structures_and_constants_are_those_of_the_headers() {
    const TEST: &str = "structures_and_constants_are_those_of_the_headers";
    let header = std::path::Path::new("/usr/include/infiniband/verbs.h");
    if !header.exists() {
        crate::skip::note(TEST, "libibverbs-dev is not installed");
        return;
    }
    let dir = std::env::temp_dir().join(format!("ibverbs-layout-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("the compiler works");
    let (source, program) = (dir.join("layout.c"), dir.join("layout"));
    let lines = expectations();
    std::fs::write(&source, c_program(&lines)).expect("the compiler works");
    let Ok(compiled) = Command::new("cc").arg("-o").arg(&program).arg(&source).status() else {
        crate::skip::note(TEST, "no C compiler");
        return;
    };
    assert!(compiled.success(), "the generated program does not compile");
    let output = Command::new(&program).output().expect("the compiler works");
    std::fs::remove_dir_all(&dir).expect("the compiler works");
    let text = String::from_utf8(output.stdout).expect("the compiler works");
    let theirs: Vec<u64> =
        text.lines().map(|line| line.parse().expect("the compiler works")).collect();
    assert_eq!(theirs.len(), lines.len());
    let differing = lines.iter().zip(&theirs).filter(|((_, ours), theirs)| ours != *theirs);
    let differing: Vec<_> = differing.collect();
    assert!(differing.is_empty(), "ours, theirs: {differing:#?}");
}
