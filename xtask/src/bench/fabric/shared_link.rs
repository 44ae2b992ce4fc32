//! Flows through a bottleneck: our stream alone, beside TCP, beside another of ours.
//!
//! All parts come from one run of both flows, which is kept until the next round.

use std::thread;
use std::time::{Duration, Instant};

use super::obstacle::Obstacle;
use super::place::{Place, Sent};
use super::program::Line;
use super::tools::{PerfField, Tool, Tools, parse};

/// How long flows run before anything counts.
const SETTLE: Duration = Duration::from_secs(1);

/// Who is beside our stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum With {
    Nobody,
    Tcp,
    Twin,
}

/// Flows through one bottleneck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Flows {
    pub(super) mbit: u32,
    pub(super) latency_ms: u32,
    pub(super) with: With,
}

/// What a run of flows tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Payload of our stream.
    Ours,
    /// Payload of the other flow.
    Others,
    /// Bytes that passed the bottleneck.
    Used,
    /// Packets that its queue dropped, of all that came.
    Dropped,
}

/// All parts of one run, in percent: of the link, and of the packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shares {
    ours: f64,
    others: f64,
    used: f64,
    dropped: f64,
}

impl Shares {
    pub(super) fn part(&self, part: Part) -> f64 {
        match part {
            Part::Ours => self.ours,
            Part::Others => self.others,
            Part::Used => self.used,
            Part::Dropped => self.dropped,
        }
    }
}

impl Flows {
    pub(super) fn key(&self, part: Part) -> String {
        let with = match self.with {
            With::Nobody => "alone",
            With::Tcp => "tcp",
            With::Twin => "twin",
        };
        let part = format!("{part:?}").to_lowercase();
        format!("link-{}-{}-{with}-{part}", self.mbit, self.latency_ms)
    }

    pub(super) fn name(&self, part: Part) -> String {
        let Flows { mbit, latency_ms, with } = self;
        let what = match (with, part) {
            (With::Nobody, Part::Dropped) => "stream alone, dropped",
            (With::Nobody, _) => "stream alone, used",
            (With::Tcp, Part::Ours) => "stream beside TCP",
            (With::Tcp, _) => "TCP beside the stream",
            (With::Twin, Part::Ours) => "first of two streams",
            (With::Twin, _) => "second of two streams",
        };
        format!("{mbit} Mbit/s, queue {latency_ms} ms: {what}")
    }

    /// Runs the flows for `seconds`.
    ///
    /// # Errors
    /// When one of them fails.
    pub(super) fn run(
        &self,
        tools: &Tools,
        place: &Place,
        port: u16,
        seconds: u64,
    ) -> Result<Shares, Obstacle> {
        let ours = Flow::stream(tools, place, port, seconds)?;
        let other = match self.with {
            With::Nobody => None,
            With::Tcp => Some(Flow::tcp(place, port + 1, seconds)?),
            With::Twin => Some(Flow::stream(tools, place, port + 1, seconds)?),
        };
        // The bucket is read while all flows run: neither their beginning nor their end counts.
        let bucket = place.router.as_ref().ok_or_else(|| Obstacle::new("no bottleneck here"))?;
        thread::sleep(SETTLE);
        let (before, began) = (Sent::of(bucket)?, Instant::now());
        thread::sleep(Duration::from_secs(seconds).saturating_sub(SETTLE));
        let (sent, took) = (Sent::of(bucket)?.since(before), began.elapsed());
        let ours = ours.finish()?;
        let others = other.map_or(Ok(0.0), Flow::finish)?;
        let link_gbps = f64::from(self.mbit) / 1e3;
        let percent = |gbps: f64| gbps / link_gbps * 100.0;
        let came = sent.packets + sent.dropped;
        Ok(Shares {
            ours: percent(ours),
            others: percent(others),
            used: percent(sent.bytes as f64 * 8.0 / 1e9 / took.as_secs_f64()),
            dropped: sent.dropped as f64 * 100.0 / came.max(1) as f64,
        })
    }
}

/// A flow that runs.
struct Flow {
    client: super::program::Running,
    _server: super::program::Running,
    tool: Tool,
}

impl Flow {
    fn stream(tools: &Tools, place: &Place, port: u16, seconds: u64) -> Result<Flow, Obstacle> {
        let arguments = "write --size 64KiB --mode bandwidth --cc auto";
        let tool = Tool::Perf { arguments, field: PerfField::Gbps };
        let (program, there) = (tools.dquant.display(), &place.sides[1].address);
        let client = Line::new(&format!(
            "{program} perf {there}:{port} {arguments} --seconds {seconds}s --json"
        ));
        let server = Line::new(&format!("{program} perf serve {there}:{port}"));
        Flow::start(tool, [client, server], place, port, seconds)
    }

    fn tcp(place: &Place, port: u16, seconds: u64) -> Result<Flow, Obstacle> {
        let there = &place.sides[1].address;
        let client =
            Line::new(&format!("iperf3 -c {there} -p {port} -t {seconds} -O 1 -C cubic -J"));
        let server = Line::new(&format!("iperf3 -s -1 -p {port}"));
        Flow::start(Tool::Iperf3, [client, server], place, port, seconds)
    }

    fn start(
        tool: Tool,
        [client, server]: [Line; 2],
        place: &Place,
        port: u16,
        seconds: u64,
    ) -> Result<Flow, Obstacle> {
        let limit = Duration::from_secs(seconds + 60);
        let mut serving = server.start(&place.sides[1], limit)?;
        serving.wait_listening(&place.sides[1], port)?;
        Ok(Flow { client: client.start(&place.sides[0], limit)?, _server: serving, tool })
    }

    /// Gbit/s of payload.
    fn finish(self) -> Result<f64, Obstacle> {
        parse(self.tool, &self.client.finish()?)
    }
}
