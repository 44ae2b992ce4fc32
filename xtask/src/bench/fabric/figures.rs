//! What is measured: each figure, where, and with which program.

use super::place::{Impairment, Where};
use super::shared_link::{Flows, Part, With};
use super::tools::{Column, PerfField, Tool, UcxColumn};

/// How a figure is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum How {
    /// One program on each side.
    Tool(Tool),
    /// So many pairs of programs at once, none bound to a core; the sum of their figures.
    Pairs(usize, Tool),
    /// A part of what flows through a bottleneck get.
    SharedLink(Flows, Part),
    /// Two wake-ups of a sleeping thread, by the calibration of the round.
    TwoWakes,
    /// CPU seconds of DPU and target together for 10^9 tokens, by `dquant demo`.
    MainJob,
}

impl How {
    /// The program that must be installed.
    pub(super) fn program(self) -> &'static str {
        match self {
            How::Tool(tool) | How::Pairs(_, tool) => tool.program(),
            How::SharedLink(Flows { with: With::Tcp, .. }, _) => "iperf3",
            How::SharedLink(..) => "ib_write_bw",
            How::TwoWakes | How::MainJob => "taskset",
        }
    }

    /// Whether it runs on our code: then it must not fail.
    pub(super) fn is_ours(self) -> bool {
        match self {
            How::Tool(tool) | How::Pairs(_, tool) => tool.is_ours(),
            How::SharedLink(..) | How::MainJob => true,
            How::TwoWakes => false,
        }
    }
}

/// A series of measurements.
#[derive(Clone, Debug)]
pub(super) struct Figure {
    pub(super) key: String,
    pub(super) name: String,
    pub(super) unit: &'static str,
    pub(super) place: Where,
    pub(super) how: How,
}

/// The figures of one topic, under construction.
struct Topic {
    unit: &'static str,
    place: Where,
    figures: Vec<Figure>,
}

impl Topic {
    fn new(unit: &'static str, place: Where) -> Topic {
        Topic { unit, place, figures: Vec::new() }
    }

    fn add(&mut self, key: impl Into<String>, name: impl Into<String>, how: How) {
        let (key, name) = (key.into(), name.into());
        self.figures.push(Figure { key, name, unit: self.unit, place: self.place, how });
    }
}

type Env = &'static [(&'static str, &'static str)];

/// The path that the library chooses.
const CHOSEN: Env = &[];

/// Packets, even where a shorter path exists.
const PACKETS: Env = &[("DQUANT_PATH", "udp")];

/// The program's memory moves to where its peer can map it; the second setting takes small blocks
/// from no heap.
const SHARED: Env = &[("DQUANT_MEMORY", "shared"), ("MALLOC_MMAP_THRESHOLD_", "0")];

/// The same with selective repeat.
const SELECTIVE: Env = &[("DQUANT_PATH", "udp"), ("DQUANT_RELIABILITY", "selective")];

/// Open MPI over its own shared memory.
const VADER: &str = "--mca pml ob1 --mca btl vader,self";

const MTUS: [u32; 2] = [1500, 9000];

fn perftest(command: &'static str, env: Env, column: Column) -> How {
    How::Tool(Tool::Perftest { command, env, column })
}

fn perf(arguments: &'static str, field: PerfField) -> How {
    How::Tool(Tool::Perf { arguments, field })
}

fn ucx(transports: &'static str, arguments: &'static str, column: UcxColumn) -> How {
    How::Tool(Tool::Ucx { transports, arguments, column })
}

fn mpi(arguments: &'static str) -> How {
    How::Tool(Tool::Mpi { options: VADER, arguments })
}

/// Every figure. Those of one row are neighbours: they are taken within seconds of each other.
pub(super) fn all() -> Vec<Figure> {
    let topics = [
        same_host_latency(),
        same_host_bandwidth(),
        message_rate(),
        loopback_latency(),
        streams(Where::SameHost, "lo"),
        streams(Where::Cable { mtu: MTUS[0], impairment: Impairment::None }, "1500"),
        streams(Where::Cable { mtu: MTUS[1], impairment: Impairment::None }, "9000"),
        af_xdp(),
        sleeping(),
        sleeping_same_host_latency(),
        sleeping_same_host_bandwidth(),
        many_queue_pairs(),
        many_pairs(),
    ];
    let mut all: Vec<Figure> = topics.into_iter().flat_map(|topic| topic.figures).collect();
    all.extend(losses());
    all.extend(shared_links());
    let mut job = Topic::new("s/10^9 tokens", Where::SameHost);
    job.add("main-job", "dquant demo: CPU of DPU and target", How::MainJob);
    all.extend(job.figures);
    all
}

fn same_host_latency() -> Topic {
    let mut topic = Topic::new("us", Where::SameHost);
    let (typical, ucx_typical) = (Column::Typical, UcxColumn::Typical);
    topic.add("send-8", "ib_send_lat 8 B", perftest("ib_send_lat -s 8 -n 20000", CHOSEN, typical));
    topic.add(
        "write-8",
        "ib_write_lat 8 B",
        perftest("ib_write_lat -s 8 -n 10000", CHOSEN, typical),
    );
    topic.add(
        "shared-write-8",
        "ib_write_lat 8 B, DQUANT_MEMORY=shared",
        perftest("ib_write_lat -s 8 -n 100000", SHARED, typical),
    );
    let (send, write) = ("send --size 8 --mode latency", "write --size 8 --mode latency");
    topic.add("pool-send-8", "dquant perf send 8 B", perf(send, PerfField::P50));
    topic.add("pool-write-8", "dquant perf write 8 B", perf(write, PerfField::P50));
    let arguments = "-t tag_lat -s 8 -n 300000";
    topic.add("ucx-sysv-8", "UCX sysv tag_lat 8 B", ucx("sysv", arguments, ucx_typical));
    topic.add("ucx-cma-8", "UCX posix,cma tag_lat 8 B", ucx("posix,cma", arguments, ucx_typical));
    topic.add("vader-8", "Open MPI vader 8 B", mpi("latency 8 200000"));
    topic
}

fn same_host_bandwidth() -> Topic {
    let mut topic = Topic::new("GB/s", Where::SameHost);
    let large = 64 << 20;
    let write = "ib_write_bw --report_gbits -s 1048576 -n 3000";
    topic.add("write-1m", "ib_write_bw 1 MiB", perftest(write, CHOSEN, Column::GBps));
    topic.add(
        "shared-write-1m",
        "ib_write_bw 1 MiB, DQUANT_MEMORY=shared",
        perftest(write, SHARED, Column::GBps),
    );
    // The peers use one buffer over and over. With many, the figure is that of memory that is in no
    // cache.
    let write = "write --size 1MiB --depth 2 --mode bandwidth";
    topic.add("pool-write-1m", "dquant perf write 1 MiB", perf(write, PerfField::GBps));
    let arguments = "-t tag_bw -s 1048576 -n 10000 -w 200";
    topic.add(
        "ucx-cma-1m",
        "UCX posix,cma tag_bw 1 MiB",
        ucx("posix,cma", arguments, UcxColumn::GBps),
    );
    topic.add("vader-1m", "Open MPI vader, window of 1 MiB", mpi("bandwidth 1048576 10000"));
    let one_way = Column::OneWayGBps { bytes: large };
    let write = "ib_write_lat -s 67108864 -n 16";
    topic.add("write-64m", "ib_write_lat 64 MiB", perftest(write, CHOSEN, one_way));
    topic.add(
        "shared-write-64m",
        "ib_write_lat 64 MiB, DQUANT_MEMORY=shared",
        perftest(write, SHARED, one_way),
    );
    let one_way = UcxColumn::OneWayGBps { bytes: large };
    let arguments = "-t tag_lat -s 67108864 -n 20 -w 4";
    topic.add("ucx-sysv-64m", "UCX sysv tag_lat 64 MiB", ucx("sysv", arguments, one_way));
    topic
}

fn message_rate() -> Topic {
    let mut topic = Topic::new("M/s", Where::SameHost);
    let send = "ib_send_bw --report_gbits -s 64 -n 300000";
    topic.add("rate-64", "ib_send_bw 64 B", perftest(send, CHOSEN, Column::Mps));
    let arguments = "-t ucp_am_bw -s 64 -n 3000000";
    topic.add(
        "ucx-sysv-rate-64",
        "UCX sysv ucp_am_bw 64 B",
        ucx("sysv", arguments, UcxColumn::Mps),
    );
    topic.add("udp-rate-64", "ib_send_bw 64 B, packets", perftest(send, PACKETS, Column::Mps));
    let arguments = "-t ucp_am_bw -s 64 -n 1000000";
    topic.add("ucx-tcp-rate-64", "UCX tcp ucp_am_bw 64 B", ucx("tcp", arguments, UcxColumn::Mps));
    topic
}

fn loopback_latency() -> Topic {
    let mut topic = Topic::new("us", Where::SameHost);
    let (send, write) = ("ib_send_lat -s 64 -n 20000", "ib_write_lat -s 64 -n 10000");
    topic.add("udp-send-64", "ib_send_lat 64 B, packets", perftest(send, PACKETS, Column::Typical));
    topic.add(
        "udp-write-64",
        "ib_write_lat 64 B, packets",
        perftest(write, PACKETS, Column::Typical),
    );
    topic.add(
        "sockperf-64",
        "sockperf TCP spinning 64 B",
        How::Tool(Tool::SockperfTcp { bytes: 64 }),
    );
    let arguments = "-t tag_lat -s 64 -n 100000";
    topic.add("ucx-tcp-64", "UCX tcp tag_lat 64 B", ucx("tcp", arguments, UcxColumn::Typical));
    let rxd = Tool::FiPingpong { provider: "udp;ofi_rxd", bytes: 64 };
    topic.add("rxd-64", "libfabric udp;ofi_rxd 64 B", How::Tool(rxd));
    topic
}

/// `ib_write_bw`, `dquant perf`, TCP and raw datagrams.
fn streams(place: Where, suffix: &str) -> Topic {
    let mut topic = Topic::new("Gbit/s", place);
    let write = "ib_write_bw --report_gbits -s 1048576 -n 2000";
    let packets = perftest(write, PACKETS, Column::Gbps);
    topic.add(format!("stream-{suffix}"), format!("ib_write_bw 1 MiB, {suffix}"), packets);
    // A path without packets would not be this row's.
    if place != Where::SameHost {
        let write = perf("write --size 1MiB --mode bandwidth", PerfField::Gbps);
        topic.add(format!("perf-{suffix}"), format!("dquant perf write 1 MiB, {suffix}"), write);
    }
    topic.add(format!("tcp-{suffix}"), format!("iperf3 TCP, {suffix}"), How::Tool(Tool::Iperf3));
    // A packet of RoCE with BTH, RETH and ICRC: the path MTU is 1024 over 1500 bytes.
    let payload = if suffix == "1500" { 1056 } else { 4128 };
    let name = format!("raw UDP, GSO and GRO, {payload} B, {suffix}");
    topic.add(format!("raw-{suffix}"), name, How::Tool(Tool::RawUdp { bytes: payload }));
    topic
}

/// Past the kernel's sockets: a SEND with its acknowledgements, and frames without a protocol.
fn af_xdp() -> Topic {
    let mut topic = Topic::new("us", Where::Cable { mtu: MTUS[0], impairment: Impairment::None });
    let send = perf("send --size 64 --mode latency --wait spin --wire xdp", PerfField::P50);
    topic.add("af-xdp-64", "dquant perf send 64 B, AF_XDP", send);
    let raw = How::Tool(Tool::RawXdp { bytes: 64 });
    topic.add("af-xdp-raw-64", "bare AF_XDP sockets, 64 B", raw);
    topic
}

fn sleeping() -> Topic {
    let mut topic = Topic::new("us", Where::SameHost);
    let send = "ib_send_lat -e -s 8 -n 4000";
    topic.add("event-8", "ib_send_lat -e 8 B", perftest(send, PACKETS, Column::Typical));
    topic.add("two-wakes", "two futex wakes", How::TwoWakes);
    let blocking = Tool::Qperf { test: "tcp_lat", bytes: 8 };
    topic.add("qperf-8", "qperf tcp_lat 8 B, blocking", How::Tool(blocking));
    topic
}

/// Programs of both sides sleep until a completion comes, beside the same programs that poll.
fn sleeping_same_host_latency() -> Topic {
    let mut topic = Topic::new("us", Where::SameHost);
    let mut add = |size, polled, events| {
        let name = format!("ib_send_lat {size}");
        topic.add(format!("polled-{size}"), &name, perftest(polled, CHOSEN, Column::Typical));
        let name = format!("ib_send_lat -e {size}");
        topic.add(format!("event-{size}"), &name, perftest(events, CHOSEN, Column::Typical));
    };
    add("lat-64k", "ib_send_lat -s 65536 -n 20000", "ib_send_lat -e -s 65536 -n 20000");
    add("lat-1m", "ib_send_lat -s 1048576 -n 20000", "ib_send_lat -e -s 1048576 -n 20000");
    topic
}

fn sleeping_same_host_bandwidth() -> Topic {
    let mut topic = Topic::new("GB/s", Where::SameHost);
    let mut add = |size, polled, events| {
        let name = format!("ib_send_bw {size}");
        topic.add(format!("polled-{size}"), &name, perftest(polled, CHOSEN, Column::GBps));
        let name = format!("ib_send_bw -e {size}");
        topic.add(format!("event-{size}"), &name, perftest(events, CHOSEN, Column::GBps));
    };
    let (polled, events) = (
        "ib_send_bw --report_gbits -s 65536 -n 20000",
        "ib_send_bw -e --report_gbits -s 65536 -n 20000",
    );
    add("bw-64k", polled, events);
    let (polled, events) = (
        "ib_send_bw --report_gbits -s 1048576 -n 20000",
        "ib_send_bw -e --report_gbits -s 1048576 -n 20000",
    );
    add("bw-1m", polled, events);
    topic
}

fn many_queue_pairs() -> Topic {
    let mut topic = Topic::new("M/s", Where::SameHost);
    let one = "ib_write_bw --report_gbits -s 64 -n 300000";
    topic.add("qps-1", "ib_write_bw 64 B, 1 queue pair", perftest(one, PACKETS, Column::Mps));
    let thousand = "ib_write_bw --report_gbits -s 64 -n 500 -q 1000 -t 16";
    let name = "ib_write_bw 64 B, 1,000 queue pairs";
    topic.add("qps-1000", name, perftest(thousand, PACKETS, Column::Mps));
    topic
}

fn many_pairs() -> Topic {
    let mut topic = Topic::new("round trips/s", Where::SameHost);
    let pair =
        Tool::Perftest { command: "ib_send_lat -s 8 -D 2", env: PACKETS, column: Column::Tps };
    topic.add("pairs-1", "ib_send_lat 8 B, 1 pair", How::Pairs(1, pair));
    topic.add("pairs-8", "ib_send_lat 8 B, 8 pairs at once", How::Pairs(8, pair));
    topic
}

/// Rates of loss in parts per million; the first is the baseline, through the same filter.
pub(super) const LOSSES_PPM: [u32; 4] = [0, 1_000, 10_000, 30_000];

/// Operations under loss, and their commands. So many messages that the slowest takes seconds, not
/// minutes.
pub(super) const LOSSY_OPERATIONS: [(&str, &str); 3] = [
    ("write", "ib_write_bw --report_gbits -s 1048576 -D 3 -f 1"),
    ("send", "ib_send_bw --report_gbits -s 1048576 -D 3 -f 1"),
    ("read", "ib_read_bw --report_gbits -s 1048576 -D 3 -f 1"),
];

fn losses() -> Vec<Figure> {
    let mut figures = Vec::new();
    for (operation, command) in LOSSY_OPERATIONS {
        for ppm in LOSSES_PPM {
            let mut topic = Topic::new(
                "GB/s",
                Where::Cable { mtu: MTUS[0], impairment: Impairment::LossPpm(ppm) },
            );
            for (mode, env) in [("selective", SELECTIVE), ("go-back-n", PACKETS)] {
                let percent = f64::from(ppm) / 10_000.0;
                let name = format!(
                    "{command}: {percent} % loss, {mode}",
                    command = &command[..command.find(' ').unwrap_or(0)]
                );
                topic.add(
                    format!("{operation}-{ppm}-{mode}"),
                    name,
                    perftest(command, env, Column::GBps),
                );
            }
            figures.extend(topic.figures);
        }
    }
    figures
}

/// Rates of the bottleneck in Mbit/s, and how much its queue holds in milliseconds.
pub(super) const BOTTLENECKS: [(u32, u32); 4] = [(200, 5), (200, 50), (1000, 5), (1000, 50)];

fn shared_links() -> Vec<Figure> {
    let mut figures = Vec::new();
    for (mbit, latency_ms) in BOTTLENECKS {
        let place =
            Where::Cable { mtu: MTUS[0], impairment: Impairment::Bottleneck { mbit, latency_ms } };
        let mut topic = Topic::new("%", place);
        let mut add = |with, part: Part| {
            let flows = Flows { mbit, latency_ms, with };
            topic.add(flows.key(part), flows.name(part), How::SharedLink(flows, part));
        };
        add(With::Nobody, Part::Used);
        add(With::Nobody, Part::Dropped);
        add(With::Tcp, Part::Ours);
        add(With::Tcp, Part::Others);
        add(With::Twin, Part::Ours);
        add(With::Twin, Part::Others);
        figures.extend(topic.figures);
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique() {
        let mut keys: Vec<String> = all().into_iter().map(|figure| figure.key).collect();
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }
}
