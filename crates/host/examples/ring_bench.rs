//! What the host ring costs the trainer: CPU time per gigabyte and per 10^9 tokens of two bytes.
//!
//! Starts this program as the consumer, too. The producer copies a prepared megabyte into each slot
//! at a steady pace; the consumer only waits, takes each slot and returns it, like a trainer whose
//! GPU reads the batches. CPU time is user + system of the whole consumer process while it runs.
//!
//! ```text
//! cargo run --release -p host --example ring_bench            # 1 GB/s, 5 s for each setting
//! cargo run --release -p host --example ring_bench 2.0 10     # 2 GB/s, 10 s
//! ```

use std::error::Error;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use host::attach::{Connection, Listener};
use host::ring::{Consumer, Producer, RingConfig, RingFds, SlotMeta};

const SLOT_BYTES: u64 = 1 << 20;
const ROLE: &str = "DQUANT_RING_BENCH_SOCKET";
const LONG: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    if let Ok(socket) = std::env::var(ROLE) {
        return consume(&socket);
    }
    let mut arguments = std::env::args().skip(1);
    let gigabytes_per_s: f64 = arguments.next().map_or(Ok(1.0), |a| a.parse())?;
    let seconds: u64 = arguments.next().map_or(Ok(5), |a| a.parse())?;
    println!("ring   min_ready    GB/s  sleeps/slot  us/slot  CPU s/GB  CPU s/10^9 u16 tokens");
    for min_ready in [1, 2, 4, 8] {
        run(min_ready, gigabytes_per_s, Duration::from_secs(seconds))?;
    }
    Ok(())
}

fn run(min_ready: u32, gigabytes_per_s: f64, span: Duration) -> Result<(), Box<dyn Error>> {
    let socket = std::env::temp_dir().join(format!("dquant-pace-{}.sock", std::process::id()));
    let listener = Listener::bind(&socket)?;
    let mut child = Command::new(std::env::current_exe()?)
        .env(ROLE, &socket)
        .stdout(Stdio::inherit())
        .spawn()?;
    let client = listener.accept(LONG)?.ok_or("the consumer did not come")?;
    let (mut producer, fds) = Producer::create(RingConfig { slots: 32, slot_bytes: SLOT_BYTES })?;
    client.send(&min_ready.to_le_bytes(), &fds.to_pass())?;
    client.recv(8)?;
    produce(&mut producer, min_ready, gigabytes_per_s, span)?;
    child.wait()?;
    let _ = std::fs::remove_file(socket.with_extension("sock.lock"));
    Ok(())
}

fn produce(
    producer: &mut Producer,
    min_ready: u32,
    gigabytes_per_s: f64,
    span: Duration,
) -> Result<(), Box<dyn Error>> {
    let source = vec![7; SLOT_BYTES as usize];
    let pace = Duration::from_secs_f64(SLOT_BYTES as f64 / 1e9 / gigabytes_per_s);
    let start = Instant::now();
    let mut due = start;
    while start.elapsed() < span {
        let slot = producer.free_slot().ok_or("the consumer is slower than the pace")?;
        producer.write(slot, 0, &source)?;
        let meta = SlotMeta {
            bytes: SLOT_BYTES,
            first_batch: producer.produced() * 8,
            batch_count: 8,
            batch_bytes: SLOT_BYTES / 8,
            crc32c: None,
        };
        producer.publish(slot, meta)?;
        producer.doorbell_if_needed(min_ready);
        due += pace;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    producer.finish();
    Ok(())
}

fn consume(socket: &str) -> Result<(), Box<dyn Error>> {
    let connection = Connection::connect(socket)?;
    let (bytes, fds) = connection.recv(8)?.with_fds::<{ RingFds::COUNT }>()?;
    let mut consumer = Consumer::attach(RingFds::from(fds), connection.liveness()?)?;
    let (start, cpu) = (Instant::now(), cpu_seconds());
    connection.send(b"go", &[])?;
    let mut batches = 0;
    while let Some(view) = consumer.next(LONG)? {
        batches += view.batches().len();
    }
    let (span, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let done = consumer.counters();
    let (slots, bytes_read) = (done.slots as f64, done.bytes as f64);
    println!(
        "ring {:>11} {:>7.2} {:>12.3} {:>8.1} {:>9.4} {:>22.4}   ({batches} batches)",
        bytes[0],
        bytes_read / 1e9 / span,
        done.sleeps as f64 / slots,
        cpu * 1e6 / slots,
        cpu / (bytes_read / 1e9),
        cpu / (bytes_read / 2.0 / 1e9),
    );
    Ok(())
}

/// User and system time of this process.
fn cpu_seconds() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}
