//! For tests that cannot run on a machine: reports the reason to the user. Included by path,
//! because no crate is for tests only.

/// Appends a line to the file that `DQUANT_SKIP_LOG` names: a test that did not run has not passed,
/// and runners hide what passing tests print.
pub(crate) fn note(test: &str, reason: &str) {
    use std::io::Write;
    let reason = reason.lines().next().unwrap_or("no reason given");
    eprintln!("skipped {test}: {reason}");
    if let Some(path) = std::env::var_os("DQUANT_SKIP_LOG") {
        let log = std::fs::File::options().create(true).append(true).open(path);
        let noted = log.and_then(|mut log| writeln!(log, "{test}: {reason}"));
        noted.expect("the log of skipped tests is writable");
    }
}
