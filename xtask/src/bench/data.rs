//! Runs the main job in all its configurations, and checks that results are equal where they must
//! be.

use std::path::Path;

use serde_json::{Value, json};

use super::configurations::{CONFIGURATIONS, Configuration, Series};
use super::figures::Figures;
use super::machine::Machine;
use super::process::Demo;
use super::{Options, table};
use crate::shell::Failure;

/// Runs all configurations in rounds and prints the table.
///
/// # Errors
/// When a run fails, bytes are wrong, or two configurations deliver different streams.
pub(super) fn run(program: &Path, options: &Options) -> Result<(), Failure> {
    let machine = Machine::look(options.binary.as_deref());
    let mut series: Vec<Series> = CONFIGURATIONS.iter().map(|_| Vec::new()).collect();
    let mut raw = Vec::new();
    for round in 1..=options.runs {
        for (configuration, series) in CONFIGURATIONS.iter().zip(&mut series) {
            eprintln!("==> round {round} of {}: {}", options.runs, configuration.name);
            let demo = Demo {
                program,
                seconds: options.seconds,
                io: &options.io,
                options: configuration.options,
            };
            let ran = demo.run()?;
            let figures = Figures::of(&ran)?;
            judge(configuration, &figures)?;
            raw.push(json!({
                "configuration": configuration.name, "round": round, "load_before": ran.load_before,
                "dpu_resident_kib": ran.dpu_resident_kib, "report": ran.report,
            }));
            series.push(figures);
        }
    }
    same_streams(&series)?;
    if options.json {
        print_json(&machine, options, &series, raw);
    } else {
        print_text(&machine, options, &series);
    }
    Ok(())
}

/// A single run must have verified something and found no mismatch.
fn judge(configuration: &Configuration, figures: &Figures) -> Result<(), Failure> {
    let name = configuration.name;
    match (figures.mismatches, figures.verified) {
        (0, 1..) => Ok(()),
        (0, 0) => Err(Failure::check(format!("{name}: no batch was verified"))),
        (wrong, _) => Err(Failure::check(format!("{name}: {wrong} batches are wrong"))),
    }
}

/// The same corpora give the same stream, with and without offload and losses.
fn same_streams(series: &[Series]) -> Result<(), Failure> {
    let runs = || {
        let named = CONFIGURATIONS.iter().zip(series);
        named.flat_map(|(configuration, series)| series.iter().map(move |run| (configuration, run)))
    };
    for (configuration, run) in runs() {
        let first = runs().find(|(other, _)| other.corpora == configuration.corpora);
        let Some((other, expected)) = first.filter(|(_, first)| first.stream != run.stream) else {
            continue;
        };
        let ((hash, batches), (wanted, wanted_batches)) = (&run.stream, &expected.stream);
        return Err(Failure::check(format!(
            "'{}' delivered another stream than '{}': {hash} over {batches} batches, {wanted} over {wanted_batches}",
            configuration.name, other.name
        )));
    }
    Ok(())
}

fn print_text(machine: &Machine, options: &Options, series: &[Series]) {
    let seconds = options.seconds.as_secs_f64();
    println!("{machine}");
    println!(
        "rounds: {}, of {seconds} s each, --io {}; medians (lowest–highest)\n",
        options.runs, options.io
    );
    print!("{}", table::text(series));
    let verified: u64 = series.iter().flatten().map(|run| run.verified).sum();
    println!(
        "\n{verified} batches verified, none wrong; the same stream in every run over the same corpora"
    );
}

fn print_json(machine: &Machine, options: &Options, series: &[Series], raw: Vec<Value>) {
    let object = json!({
        "schema": "dquant.bench.data/1",
        "machine": machine.to_json(),
        "runs": options.runs,
        "seconds": options.seconds.as_secs_f64(),
        "io": options.io,
        "summary": table::to_json(series),
        "raw": raw,
    });
    println!("{object}");
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::ran;
    use super::*;

    fn series() -> Vec<Series> {
        let figures = |configuration: &Configuration| {
            let offload = !configuration.options.contains(&"false");
            vec![Figures::of(&ran(500.0, offload)).expect("complete")]
        };
        CONFIGURATIONS.iter().map(figures).collect()
    }

    #[test]
    fn another_stream_over_the_same_corpora_fails() {
        let mut series = series();
        assert!(same_streams(&series).is_ok());
        series[3][0].stream.0 = "of one corpus".into();
        assert!(same_streams(&series).is_ok(), "other corpora, other stream");
        series[2][0].stream.0 = "cd".into();
        let failure = same_streams(&series).expect_err("the third differs");
        assert_eq!(failure.exit_code(), 1);
        assert!(failure.to_string().contains("1 % loss"), "{failure}");
    }

    #[test]
    fn wrong_or_unverified_batches_fail() {
        let mut figures = series().remove(0).remove(0);
        assert!(judge(&CONFIGURATIONS[0], &figures).is_ok());
        figures.verified = 0;
        assert!(judge(&CONFIGURATIONS[0], &figures).is_err());
        (figures.verified, figures.mismatches) = (9, 1);
        let failure = judge(&CONFIGURATIONS[0], &figures).expect_err("one is wrong");
        assert!(failure.to_string().contains("1 batches are wrong"), "{failure}");
    }
}
