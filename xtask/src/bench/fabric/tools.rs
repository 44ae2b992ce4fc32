//! The programs that measure: how each is started on both sides, and where its figure is in what it
//! prints.
//!
//! Every program gets one core on each side, ours included.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::obstacle::Obstacle;
use super::place::Place;
use super::program::{Line, Running};

/// Programs and files that the measurements use.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    /// The program `dquant`, with its verbs library beside it.
    pub(super) dquant: PathBuf,
    /// The folder of the examples of crate nic.
    pub(super) examples: PathBuf,
    /// `mpi_bench.c`, compiled; or why not.
    pub(super) mpi_bench: Result<PathBuf, Obstacle>,
    /// Cores of client and server.
    pub(super) cores: [usize; 2],
}

/// Longest run of one program.
const LIMIT: Duration = Duration::from_secs(60);

/// A program that measures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Tool {
    /// A program of perftest on our library.
    Perftest { command: &'static str, env: &'static [(&'static str, &'static str)], column: Column },
    /// `dquant perf` over its own device and its pool: operation and options.
    Perf { arguments: &'static str, field: PerfField },
    /// `ucx_perftest` over these transports.
    Ucx { transports: &'static str, arguments: &'static str, column: UcxColumn },
    /// Our MPI program, with these options of `mpirun`.
    Mpi { options: &'static str, arguments: &'static str },
    /// TCP with both sides spinning: half a round trip.
    SockperfTcp { bytes: u32 },
    /// One TCP stream.
    Iperf3,
    /// `fi_pingpong` over a provider: half a round trip.
    FiPingpong { provider: &'static str, bytes: u32 },
    /// A test of qperf that prints microseconds.
    Qperf { test: &'static str, bytes: u32 },
    /// Datagrams of this size as fast as they are received, segmented and joined by the kernel.
    RawUdp { bytes: u32 },
    /// A ping-pong of frames with so many bytes behind UDP, over bare AF_XDP sockets.
    RawXdp { bytes: u32 },
}

impl Tool {
    /// The program that must be installed.
    pub(super) fn program(self) -> &'static str {
        match self {
            Tool::Perftest { .. } => "ib_write_bw",
            Tool::Perf { .. } | Tool::RawUdp { .. } | Tool::RawXdp { .. } => "taskset",
            Tool::Ucx { .. } => "ucx_perftest",
            Tool::Mpi { .. } => "mpirun",
            Tool::SockperfTcp { .. } => "sockperf",
            Tool::Iperf3 => "iperf3",
            Tool::FiPingpong { .. } => "fi_pingpong",
            Tool::Qperf { .. } => "qperf",
        }
    }

    /// Whether it runs on our code: then it must not fail.
    pub(super) fn is_ours(self) -> bool {
        matches!(self, Tool::Perftest { .. } | Tool::Perf { .. } | Tool::RawUdp { .. })
    }
}

/// A column of perftest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    /// Median half round trip, microseconds.
    Typical,
    /// The same of a one-way transfer, as gigabytes per second of messages of this size.
    OneWayGBps { bytes: u64 },
    /// Gbit/s.
    Gbps,
    /// Gigabytes per second.
    GBps,
    /// Millions of messages per second.
    Mps,
    /// Round trips per second of a run of fixed length.
    Tps,
}

/// A field of what `dquant perf` reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PerfField {
    /// Median latency, microseconds.
    P50,
    /// Gbit/s, and the same as gigabytes per second.
    Gbps,
    GBps,
}

/// A column of `ucx_perftest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UcxColumn {
    /// Median half round trip, microseconds.
    Typical,
    OneWayGBps {
        bytes: u64,
    },
    GBps,
    Mps,
}

impl Tools {
    /// A line behind `dquant run` on the device of an interface.
    fn on_library(&self, line: Line, interface: &str) -> Line {
        let dquant = self.dquant.display().to_string();
        line.behind([&dquant, "run", "--devices", interface, "--"].map(str::to_owned).to_vec())
    }

    /// The command lines of both sides: the client's first.
    pub(super) fn lines(
        &self,
        tool: Tool,
        place: &Place,
        port: u16,
    ) -> Result<[Line; 2], Obstacle> {
        let [client, server] = &place.sides;
        let (here, there) = (&client.address, &server.address);
        let lines = match tool {
            Tool::Perftest { command, env, .. } => {
                return Ok(self.perftest(command, env, place, port));
            }
            Tool::Perf { arguments, .. } => {
                let program = self.dquant.display();
                let client =
                    format!("{program} perf {there}:{port} {arguments} --seconds 1s --json");
                [Line::new(&client), Line::new(&format!("{program} perf serve {there}:{port}"))]
            }
            Tool::Ucx { transports, arguments, .. } => {
                let device = if transports == "tcp" { server.interface } else { "memory" };
                let env = [
                    ("UCX_TLS", transports),
                    ("UCX_NET_DEVICES", device),
                    ("UCX_WARN_UNUSED_ENV_VARS", "n"),
                ];
                let line = |peer: &str| {
                    Line::new(&format!("ucx_perftest {peer} -p {port} {arguments}")).env(&env)
                };
                [line(there), line("")]
            }
            Tool::SockperfTcp { bytes } => [
                Line::new(&format!(
                    "sockperf pp --tcp -i {there} -p {port} -m {bytes} --nonblocked -t 1"
                )),
                Line::new(&format!("sockperf sr --tcp -i {there} -p {port} --nonblocked")),
            ],
            Tool::Iperf3 => [
                Line::new(&format!("iperf3 -c {there} -p {port} -t 1 -l 1M -J")),
                Line::new(&format!("iperf3 -s -1 -p {port}")),
            ],
            Tool::FiPingpong { provider, bytes } => {
                let line = format!("fi_pingpong -e rdm -S {bytes} -I 20000 -p {provider}");
                [
                    Line::new(&format!("{line} -P {port} {there}")),
                    Line::new(&format!("{line} -B {port}")),
                ]
            }
            Tool::Qperf { test, bytes } => [
                Line::new(&format!("qperf {there} -lp {port} -t 1 -m {bytes} {test}")),
                Line::new(&format!("qperf -lp {port}")),
            ],
            Tool::RawUdp { bytes } => {
                let program = self.examples.join("raw_udp");
                let program = program.display();
                [
                    Line::new(&format!("{program} send {here} {there}:{port} {bytes} 1")),
                    Line::new(&format!("{program} receive {there}:{port} {bytes}")),
                ]
            }
            Tool::RawXdp { bytes } => {
                let program = self.examples.join("raw_xdp");
                let program = program.display();
                [
                    Line::new(&format!("{program} ping {here} {there} {bytes} 1")),
                    Line::new(&format!("{program} serve {there}")),
                ]
            }
            Tool::Mpi { options, arguments } => return self.mpi(options, arguments),
        };
        Ok(self.pinned(lines))
    }

    fn pinned(&self, [client, server]: [Line; 2]) -> [Line; 2] {
        [client.on_core(self.cores[0]), server.on_core(self.cores[1])]
    }

    fn perftest(&self, command: &str, env: &[(&str, &str)], place: &Place, port: u16) -> [Line; 2] {
        let line = |side: usize| {
            let interface = place.sides[side].interface;
            let line = Line::new(&format!("{command} -F -x 0 -d dq_{interface} -p {port}"));
            self.on_library(line.env(env), interface)
        };
        self.pinned([line(0).arg(&place.sides[1].address), line(1)])
    }

    /// One line: `mpirun` starts both sides.
    fn mpi(&self, options: &str, arguments: &str) -> Result<[Line; 2], Obstacle> {
        let program = self.mpi_bench.clone()?;
        let line = format!(
            "mpirun --allow-run-as-root --bind-to core -np 2 {options} {} {arguments}",
            program.display()
        );
        let env = [("OMPI_MCA_btl_base_warn_component_unused", "0")];
        Ok([Line::new(&line).env(&env), Line::new("true")])
    }

    /// Runs a tool once.
    ///
    /// # Errors
    /// When it fails or prints no figure.
    pub(super) fn run(&self, tool: Tool, place: &Place, port: u16) -> Result<f64, Obstacle> {
        let [client, server] = self.lines(tool, place, port)?;
        if let Tool::Mpi { .. } = tool {
            return parse(tool, &client.run(&place.sides[0], LIMIT)?);
        }
        let mut serving = server.start(&place.sides[1], LIMIT)?;
        match tool {
            // Datagrams have no listener to wait for: the client waits.
            Tool::RawUdp { .. } | Tool::RawXdp { .. } => {
                std::thread::sleep(Duration::from_millis(300));
            }
            _ => serving.wait_listening(&place.sides[1], port)?,
        }
        let said = client.run(&place.sides[0], LIMIT)?;
        match tool {
            // Only the receiver knows what arrived.
            Tool::RawUdp { .. } => parse(tool, &serving.finish()?),
            _ => {
                serving.check()?;
                parse(tool, &said)
            }
        }
    }
}

impl Tools {
    /// Runs several pairs of a tool at once, on every core, and returns the sum of their figures.
    ///
    /// # Errors
    /// When one of them fails.
    pub(super) fn run_pairs(
        &self,
        tool: Tool,
        place: &Place,
        port: u16,
        pairs: usize,
    ) -> Result<f64, Obstacle> {
        let ports = (port..).take(pairs);
        let lines: Vec<(u16, [Line; 2])> = ports
            .map(|port| Ok((port, self.lines(tool, place, port)?.map(Line::on_every_core))))
            .collect::<Result<_, Obstacle>>()?;
        let mut servers = Vec::new();
        for (port, [_, server]) in &lines {
            let mut serving = server.start(&place.sides[1], LIMIT)?;
            serving.wait_listening(&place.sides[1], *port)?;
            servers.push(serving);
        }
        let start = |(_, [client, _]): &(u16, [Line; 2])| client.start(&place.sides[0], LIMIT);
        let clients = lines.iter().map(start).collect::<Result<Vec<_>, Obstacle>>()?;
        let said =
            clients.into_iter().map(Running::finish).collect::<Result<Vec<_>, Obstacle>>()?;
        servers.iter().try_for_each(Running::check)?;
        said.iter().map(|said| parse(tool, said)).sum()
    }
}

/// The figure in what a tool printed.
///
/// # Errors
/// When there is none, with the last line.
pub(super) fn parse(tool: Tool, text: &str) -> Result<f64, Obstacle> {
    let found = match tool {
        Tool::Perftest { column, .. } => perftest_column(text, column),
        // A side that fell back measures something else.
        Tool::Perf { arguments, .. } if arguments.contains("--wire xdp") && !used_xdp(text) => None,
        Tool::Perf { field, .. } => perf_field(text, field),
        Tool::Ucx { column, .. } => ucx_column(text, column),
        Tool::Mpi { .. } | Tool::RawUdp { .. } | Tool::RawXdp { .. } => {
            text.trim().lines().last().and_then(number)
        }
        Tool::SockperfTcp { .. } => number_after(text, "percentile 50.000 ="),
        Tool::Iperf3 => iperf3_gbps(text),
        Tool::FiPingpong { .. } => fi_pingpong_us(text),
        Tool::Qperf { .. } => number_after(text, "latency  =").or(number_after(text, "latency =")),
    };
    let last = text.trim().lines().last().unwrap_or("nothing");
    found.ok_or_else(|| Obstacle(format!("no figure in what it printed; last: {last}")))
}

fn number(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok()
}

fn number_after(text: &str, mark: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains(mark))?;
    number(line.split_once(mark)?.1)
}

/// Numbers of the last line that consists of them.
fn last_numbers(text: &str) -> Option<Vec<f64>> {
    let numbers = |line: &str| -> Option<Vec<f64>> {
        let found: Option<Vec<f64>> =
            line.split_whitespace().map(|word| word.parse().ok()).collect();
        found.filter(|found| found.len() >= 4)
    };
    text.lines().rev().find_map(numbers)
}

/// Columns: bytes, iterations, then min, max, typical, … or peak, average (Gbit/s), million
/// messages/s.
fn perftest_column(text: &str, column: Column) -> Option<f64> {
    let row = last_numbers(text)?;
    match column {
        Column::Typical => row.get(4).copied(),
        Column::OneWayGBps { bytes } => Some(bytes as f64 / row.get(4)? / 1e3),
        Column::Gbps => row.get(3).copied(),
        Column::GBps => Some(row.get(3)? / 8.0),
        Column::Mps => row.get(4).copied(),
        Column::Tps => row.get(3).copied(),
    }
}

/// The only result of a run. Bytes that are wrong are no figure.
fn perf_field(text: &str, field: PerfField) -> Option<f64> {
    let object: Value =
        serde_json::from_str(text.lines().find(|line| line.starts_with('{'))?).ok()?;
    let number = |pointer: &str| object.pointer(pointer)?.as_f64();
    let is_right = number("/mismatches") == Some(0.0) && number("/verified_bytes") > Some(0.0);
    let found = match field {
        PerfField::P50 => number("/latency_us/p50"),
        PerfField::Gbps => number("/gbps"),
        PerfField::GBps => number("/gbps").map(|gbps| gbps / 8.0),
    };
    found.filter(|_| is_right)
}

fn used_xdp(text: &str) -> bool {
    text.contains("\"path\":\"xdp\"") && text.contains("\"fallbacks\":[]")
}

/// Columns behind "Final:": iterations, median, average and overall microseconds, average and
/// overall MB/s (of 2^20), average and overall messages/s.
fn ucx_column(text: &str, column: UcxColumn) -> Option<f64> {
    let line = text.lines().find_map(|line| line.trim().strip_prefix("Final:"))?;
    let row: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match column {
        UcxColumn::Typical => row.get(1).copied(),
        UcxColumn::OneWayGBps { bytes } => Some(bytes as f64 / row.get(1)? / 1e3),
        UcxColumn::GBps => Some(row.get(5)? * f64::from(1 << 20) / 1e9),
        UcxColumn::Mps => Some(row.get(7)? / 1e6),
    }
}

fn iperf3_gbps(text: &str) -> Option<f64> {
    let object: Value = serde_json::from_str(text).ok()?;
    Some(object.pointer("/end/sum_received/bits_per_second")?.as_f64()? / 1e9)
}

/// The column "usec/xfer", last but one.
fn fi_pingpong_us(text: &str) -> Option<f64> {
    let line = text.lines().rfind(|line| line.split_whitespace().count() >= 8)?;
    line.split_whitespace().rev().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = "\
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 8       10000          4.10           88.90        5.70     \t       5.92        \t1.30   \t\t10.20   \t\t20.10  
---------------------------------------------------------------------------------------
";

    #[test]
    fn rows_of_perftest_are_read() {
        let of = |column| perftest_column(LATENCY, column);
        assert_eq!(of(Column::Typical), Some(5.7));
        let bandwidth = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n \
                         64         1000000          0.21               0.15       \t\t     0.290000\n";
        assert_eq!(perftest_column(bandwidth, Column::Gbps), Some(0.15));
        assert_eq!(perftest_column(bandwidth, Column::Mps), Some(0.29));
        assert_eq!(perftest_column("no table", Column::Mps), None);
        let one_way = perftest_column(LATENCY, Column::OneWayGBps { bytes: 5_700_000 });
        assert_eq!(one_way, Some(1000.0));
    }

    #[test]
    fn the_last_row_of_ucx_is_read() {
        let text = "[thread 0]  10  0.3 0.3 0.3 1 1 1 1\nFinal:     10000  0.226  0.227  0.230  33.6  1000.0  4400000  4300000\n";
        assert_eq!(ucx_column(text, UcxColumn::Typical), Some(0.226));
        assert_eq!(ucx_column(text, UcxColumn::GBps), Some(1.048576));
        assert_eq!(ucx_column(text, UcxColumn::Mps), Some(4.3));
        assert_eq!(ucx_column("nothing", UcxColumn::Mps), None);
    }

    #[test]
    fn results_of_our_own_count_only_with_the_right_bytes() {
        let text = "{\"gbps\":8.0,\"messages_per_s\":2e6,\"mismatches\":0,\"verified_bytes\":64}\n";
        assert_eq!(perf_field(text, PerfField::GBps), Some(1.0));
        assert_eq!(perf_field(text, PerfField::P50), None);
        let wrong = text.replace("\"mismatches\":0", "\"mismatches\":1");
        assert_eq!(perf_field(&wrong, PerfField::Gbps), None);
    }

    #[test]
    fn other_tools_are_read() {
        let sockperf = "sockperf: ---> percentile 50.000 =    2.750\nsockperf: ---> percentile 25.000 =    2.7";
        assert_eq!(parse(Tool::SockperfTcp { bytes: 64 }, sockperf), Ok(2.75));
        let iperf3 = r#"{"end":{"sum_received":{"bits_per_second":5e10}}}"#;
        assert_eq!(parse(Tool::Iperf3, iperf3), Ok(50.0));
        let fabric = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                      64      20k     =20k     2.4m        0.19s     13.00       5.30       0.19\n";
        let tool = Tool::FiPingpong { provider: "udp", bytes: 64 };
        assert_eq!(parse(tool, fabric), Ok(5.3));
        let qperf = Tool::Qperf { test: "tcp_lat", bytes: 8 };
        assert_eq!(parse(qperf, "tcp_lat:\n    latency  =  35.4 us\n"), Ok(35.4));
        let none = parse(Tool::Iperf3, "error - unable to connect").expect_err("no figure");
        assert!(none.0.contains("unable"), "{none:?}");
    }
}
