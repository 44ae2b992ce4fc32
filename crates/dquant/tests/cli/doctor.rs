//! `dquant doctor`: findings with fixes, the same for people and programs.

use super::Folder;

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
