//! Random UC and UD programs under random faults: every message received was sent, whole and once.
//!
//! A seed draws a transport, a mix of faults and a list of messages. Messages may be lost; what is
//! checked:
//! - C2: every send completes once and in order; receives complete in the order in which they were
//!   posted, each with a message that was sent, of the right kind, length and bytes; in the order of
//!   sending and each once where the network neither repeats nor reorders; where it does no harm,
//!   all that found a receive;
//! - C3: nothing but receive buffers and targets of WRITEs changes;
//! - when the faults end, the next message arrives.
//!
//! One seed: `DQUANT_SEED=17 cargo test -p roce --test it unreliable_chaos -- --nocapture`.

use roce::Duration;
use roce::endpoint::{Mtu, QpState};
use roce::verbs::{
    Completion, GRH_BYTES, MemoryRegion, SendOp, SendWr, Transport, WcOpcode, WcStatus,
};

use crate::harness::{BASE, Chance, End, Fabric, FabricConfig, Fault, FaultMix};
use crate::kit::{REGION_BYTES, list, recv, registered, send};
use crate::rc_chaos::seeds;

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

type Checked<T> = Result<T, String>;

/// Receive buffers, from the start of the receiver's memory.
const SLOTS: u64 = 64;
const SLOT_BYTES: u64 = 4096;
/// Targets of WRITEs behind those, one for each message.
const TARGETS: u64 = SLOTS * SLOT_BYTES;
const TARGET_BYTES: u64 = 3000;
const MESSAGES: usize = 60;

/// A message as the sender's program sees it.
#[derive(Clone, Copy, Debug)]
struct Message {
    op: SendOp,
    /// Where its bytes are in the sender's memory.
    offset: u64,
    len: u32,
}

impl Message {
    fn takes_receive(&self) -> bool {
        !matches!(self.op, SendOp::Write { .. })
    }

    fn imm(&self) -> Option<u32> {
        match self.op {
            SendOp::SendImm(imm) | SendOp::WriteImm { imm, .. } => Some(imm),
            _ => None,
        }
    }

    fn is_write(&self) -> bool {
        matches!(self.op, SendOp::Write { .. } | SendOp::WriteImm { .. })
    }
}

/// Deliberate damage, to test that it is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sabotage {
    None,
    Payload,
    Completion,
    Guard,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stats {
    messages: u64,
    heard: u64,
    faults: u64,
}

struct Run {
    transport: Transport,
    mtu: Mtu,
    fabric: Fabric,
    regions: [MemoryRegion; 2],
    a: End,
    b: End,
    draw: Chance,
    sabotage: Sabotage,
    messages: Vec<Message>,
    receives_posted: u64,
    receives_heard: u64,
    /// The message received last, by its number.
    last: Option<usize>,
    before: Vec<u8>,
}

impl Run {
    fn new(seed: u64, sabotage: Sabotage) -> Run {
        let mut draw = Chance::new(seed ^ 0x00c0_ffee);
        let transport = draw.pick(&[Transport::Uc, Transport::Ud]);
        let config = FabricConfig { seed, ipv6: draw.per_mille(300), ..FabricConfig::default() };
        let mut fabric = Fabric::new(&config);
        let regions = [0, 1].map(|node: usize| registered(&mut fabric.nodes[node]));
        let mtu = draw.pick(&[Mtu::M256, Mtu::M1024]);
        let (a, b) = fabric.pair_of(transport, mtu);
        fabric.mix = FaultMix::draw(&mut draw, 2);
        if sabotage == Sabotage::Payload {
            fabric.nodes[1].corrupt_every(5);
        }
        let before = fabric.nodes[1].memory.all().to_vec();
        Run {
            transport,
            mtu,
            fabric,
            regions,
            a,
            b,
            draw,
            sabotage,
            messages: Vec::new(),
            receives_posted: 0,
            receives_heard: 0,
            last: None,
            before,
        }
    }

    fn go(mut self) -> Checked<Stats> {
        for _ in 0..MESSAGES {
            let receives = self.draw.below(3);
            for _ in 0..receives {
                let len = self.draw.between(u64::from(GRH_BYTES), SLOT_BYTES) as u32;
                self.post_receive(len);
            }
            self.say();
            let pause = Duration::from_nanos(self.draw.below(30_000));
            self.fabric.run_until(self.fabric.now() + pause);
            self.listen()?;
        }
        self.fabric.run(1_000_000);
        self.listen()?;
        self.check_harmless()?;
        self.say_farewell()?;
        self.check_sends()?;
        self.check_memory()?;
        let faults = self.fabric.injected();
        Ok(Stats { messages: MESSAGES as u64, heard: self.receives_heard, faults })
    }

    // ---- programs ------------------------------------------------------------------------------

    fn post_receive(&mut self, len: u32) {
        if self.receives_posted - self.receives_heard == SLOTS {
            return;
        }
        let slot = self.receives_posted % SLOTS;
        let wr = recv(self.receives_posted, list(self.regions[1], slot * SLOT_BYTES, len));
        self.fabric.post_recv(self.b, wr);
        self.receives_posted += 1;
    }

    fn say(&mut self) {
        let index = self.messages.len();
        let mtu = u64::from(self.mtu.bytes());
        let long = self.draw.below(2500);
        let len = self.draw.pick(&[0, 1, mtu - 1, mtu, mtu + 1, long, long, long]) as u32;
        let offset = self.draw.below(REGION_BYTES - 3000);
        let remote_addr = BASE + target_of(index);
        let (rkey, imm) = (self.regions[1].rkey, index as u32);
        let sends = [SendOp::Send, SendOp::SendImm(imm)];
        let writes =
            [SendOp::Write { remote_addr, rkey }, SendOp::WriteImm { remote_addr, rkey, imm }];
        let op = match self.transport {
            Transport::Ud => self.draw.pick(&sends),
            _ => self.draw.pick(&[sends, writes].concat()),
        };
        self.push(Message { op, offset, len });
    }

    fn push(&mut self, message: Message) {
        let wr_id = self.messages.len() as u64;
        let sges = list(self.regions[0], message.offset, message.len);
        let to = Some(self.fabric.address(self.b));
        self.fabric.post_send(self.a, SendWr { to, ..send(wr_id, message.op, sges) });
        self.messages.push(message);
    }

    /// Without faults and with a receive that is large enough, the message must arrive.
    fn say_farewell(&mut self) -> Checked<()> {
        self.fabric.mix = FaultMix::default();
        self.post_receive(GRH_BYTES);
        let heard = self.receives_heard;
        let op = SendOp::SendImm(self.messages.len() as u32);
        self.push(Message { op, offset: 0, len: 0 });
        self.fabric.run(1000);
        self.listen()?;
        ensure!(self.receives_heard == heard + 1, "the farewell was not heard");
        ensure!(self.last == Some(self.messages.len() - 1), "another message came instead");
        let (a, b) = (self.fabric.state(self.a), self.fabric.state(self.b));
        ensure!([a, b] == [QpState::Rts; 2], "states are {a:?} and {b:?}");
        Ok(())
    }

    // ---- checks --------------------------------------------------------------------------------

    fn listen(&mut self) -> Checked<()> {
        let mut heard = self.fabric.received_by(self.b);
        if self.sabotage == Sabotage::Completion && self.receives_heard > 3 {
            heard.pop();
        }
        heard.iter().try_for_each(|done| self.check_receive(done))
    }

    fn check_receive(&mut self, done: &Completion) -> Checked<()> {
        ensure!(done.status == WcStatus::Success, "{done:?}");
        ensure!(done.wr_id == self.receives_heard, "{done:?} instead of {}", self.receives_heard);
        let sender = (self.transport == Transport::Ud).then_some(self.a.qpn);
        ensure!(done.src_qp == sender, "{done:?} does not come from {sender:?}");
        let orderly = self.count(&[Fault::Duplicate, Fault::Reorder, Fault::Delay]) == 0;
        let first = self.last.filter(|_| orderly).map_or(0, |last| last + 1);
        let found = (first..self.messages.len()).find(|&index| self.is_message(done, index));
        ensure!(found.is_some(), "{done:?} is no message that was sent after {:?}", self.last);
        self.last = found;
        self.receives_heard += 1;
        Ok(())
    }

    /// Whether the message with this number matches a receive's completion and contents.
    fn is_message(&self, done: &Completion, index: usize) -> bool {
        let message = &self.messages[index];
        let header = if self.transport == Transport::Ud { GRH_BYTES } else { 0 };
        let (opcode, at) = match message.is_write() {
            true => (WcOpcode::RecvWriteImm, target_of(index)),
            false => {
                let slot = done.wr_id % SLOTS * SLOT_BYTES;
                (WcOpcode::Recv, slot + u64::from(header))
            }
        };
        let len = message.len as usize;
        message.takes_receive()
            && (done.opcode, done.imm) == (opcode, message.imm())
            && done.byte_len == message.len + header
            && self.bytes(1, at, len) == self.bytes(0, message.offset, len)
    }

    fn bytes(&self, node: usize, offset: u64, len: usize) -> &[u8] {
        self.fabric.nodes[node].memory.peek(BASE + offset, len)
    }

    fn count(&self, faults: &[Fault]) -> u64 {
        faults.iter().map(|&fault| self.fabric.fault_counts().injected[fault as usize]).sum()
    }

    /// Without faults, only missing and short receives lose messages.
    fn check_harmless(&self) -> Checked<()> {
        if self.fabric.injected() > 0 {
            return Ok(());
        }
        let counters = self.fabric.nodes[1].endpoint.counters();
        let dropped = counters.no_receive + counters.receive_too_small;
        let said = self.messages.iter().filter(|message| message.takes_receive()).count() as u64;
        ensure!(
            self.receives_heard + dropped == said,
            "{said} said, {} heard, {dropped} dropped",
            self.receives_heard
        );
        Ok(())
    }

    fn check_sends(&mut self) -> Checked<()> {
        let sent = self.fabric.sent_by(self.a);
        ensure!(sent.len() == self.messages.len(), "{} sends completed", sent.len());
        for (index, done) in sent.iter().enumerate() {
            let is_right = done.wr_id == index as u64 && done.status == WcStatus::Success;
            ensure!(is_right, "send {index}: {done:?}");
        }
        Ok(())
    }

    /// Bytes of targets are the old ones or those of their message, all others behind the receive
    /// buffers are the old ones.
    fn check_memory(&mut self) -> Checked<()> {
        if self.sabotage == Sabotage::Guard {
            let at = self.draw.between(TARGETS + MESSAGES as u64 * TARGET_BYTES, REGION_BYTES);
            let byte = self.bytes(1, at, 1)[0];
            self.fabric.nodes[1].memory.poke(BASE + at, &[!byte]);
        }
        let mut wanted = self.before.clone();
        for (index, message) in self.messages.iter().enumerate().filter(|(_, m)| m.is_write()) {
            let at = target_of(index) as usize;
            let source = self.bytes(0, message.offset, message.len as usize);
            let there = self.bytes(1, at as u64, message.len as usize);
            for (offset, (is, new)) in there.iter().zip(source).enumerate() {
                if is == new {
                    wanted[at + offset] = *new;
                }
            }
        }
        let behind = TARGETS as usize..;
        let after = &self.fabric.nodes[1].memory.all();
        let differs =
            after[behind.clone()].iter().zip(&wanted[behind]).position(|(is, was)| is != was);
        ensure!(differs.is_none(), "byte {differs:?} behind the receive buffers changed");
        Ok(())
    }
}

fn target_of(index: usize) -> u64 {
    TARGETS + index as u64 * TARGET_BYTES
}

#[test]
fn what_is_heard_was_said() {
    let mut sum = Stats::default();
    for seed in seeds(0..1_000) {
        match Run::new(seed, Sabotage::None).go() {
            Ok(stats) => {
                sum.messages += stats.messages;
                sum.heard += stats.heard;
                sum.faults += stats.faults;
            }
            Err(violation) => panic!(
                "seed {seed}: {violation}\nreplay: DQUANT_SEED={seed} cargo test -p roce --test it \
                 unreliable_chaos -- --nocapture"
            ),
        }
    }
    eprintln!("{sum:?}");
    assert!(sum.heard * 4 > sum.messages, "too little arrived to say much: {sum:?}");
}

#[test]
fn sabotage_is_noticed() {
    for sabotage in [Sabotage::Payload, Sabotage::Completion, Sabotage::Guard] {
        let noticed = (0..20).filter(|&seed| Run::new(seed, sabotage).go().is_err()).count();
        assert!(noticed >= 15, "{sabotage:?} was noticed on {noticed} of 20 seeds only");
    }
}
