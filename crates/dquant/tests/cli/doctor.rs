//! `dquant doctor`: findings with fixes, the same for people and programs.

use std::path::Path;

use super::{Folder, Ran};

#[test]
fn the_doctor_looks_at_everything_and_has_a_fix_for_each_complaint() {
    let folder = Folder::new("doctor");
    let ran = folder.run(&["doctor", "--json"]);
    let report = ran.json();
    assert_eq!(report["schema"], "dquant.doctor/1");
    let failing = report["verdict"] == "fail";
    assert_eq!(ran.exit, Some(i32::from(failing)), "{report}");
    let findings = report["findings"].as_array().expect("a list");
    for topic in ["kernel", "socket buffers", "interface lo", "port 4791 on lo", "ICRC", "ECN"] {
        assert!(findings.iter().any(|finding| finding["topic"] == topic), "{topic}: {report}");
    }
    for finding in findings {
        let good = finding["verdict"] == "ok";
        assert_eq!(finding["fix"].is_null(), good, "{finding}");
    }
}

#[test]
fn people_read_one_line_for_each_finding() {
    let folder = Folder::new("doctor-text");
    let text = folder.run(&["doctor"]).stdout;
    let (last, lines) = text
        .lines()
        .collect::<Vec<_>>()
        .split_last()
        .map(|(l, r)| (*l, r.to_vec()))
        .expect("lines");
    assert!(last.contains(" ok, ") && last.ends_with(" fail"), "{text}");
    let known = ["ok    ", "warn  ", "fail  ", "      fix: "];
    assert!(lines.iter().all(|line| known.iter().any(|start| line.starts_with(start))), "{text}");
}

#[test]
fn a_verbs_library_that_is_not_there_is_a_warning_with_a_fix() {
    let folder = Folder::new("doctor-library");
    let finding = |library: &str, tmp: &str| {
        let mut command = folder.command(&["doctor", "--json"]);
        command.env_remove("XDG_RUNTIME_DIR").env("TMPDIR", folder.0.join(tmp));
        let output = command.env("DQUANT_VERBS_LIBRARY", library).output().expect("it starts");
        let report = Ran::new(&output).json();
        let findings = report["findings"].as_array().expect("a list");
        let found = findings.iter().find(|finding| finding["topic"] == "verbs library");
        found.expect("it was looked at").clone()
    };
    let missing = finding("no/such/library.so", ".");
    assert_eq!(missing["verdict"], "warn", "{missing}");
    assert!(missing["text"].as_str().is_some_and(|text| text.contains("no/such/library.so")));
    assert!(missing["fix"].is_string(), "{missing}");
    folder.write("empty.so", "");
    assert_eq!(finding("empty.so", ".")["verdict"], "warn");
    folder.write("there.so", b"\x7fELF\x02");
    assert_eq!(finding("there.so", ".")["verdict"], "ok");
    // Without a private directory `dquant run` refuses, too. `/dev/shm` is one where there is no
    // other.
    let nowhere = finding("there.so", "no-such-directory");
    if Path::new("/dev/shm").is_dir() {
        assert_eq!(nowhere["verdict"], "ok", "{nowhere}");
    } else {
        assert_eq!(nowhere["verdict"], "warn", "{nowhere}");
        assert!(nowhere["fix"].as_str().is_some_and(|fix| fix.contains("TMPDIR")), "{nowhere}");
    }
}
