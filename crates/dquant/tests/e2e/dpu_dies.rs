//! `kill -9` of the DPU while a stream runs.

use std::fs;
use std::os::unix::fs::FileTypeExt;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, World, eventually, path};

const PLAN: &str = "window(1024) | narrow(u16) | batch(16)";
const BATCH_BYTES: u64 = 32 << 10;

#[test]
fn a_client_hears_of_it_and_a_new_dpu_serves_the_next() {
    let Some(world) = World::new("a_client_hears_of_it_and_a_new_dpu_serves_the_next") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 6));
    let (target, mut dpu) = (world.target(&[]), world.dpu(&[]));
    let args = ["--plan", PLAN, "--batches", "400", "--slots", "4", "--slot-size", "64KiB"];
    let want = expected(PLAN, &[&corpus], 0..400);

    let mut cat = Cat::through(&world, &dpu, &target.url("web"), &args);
    let head = cat.read(1 << 20);
    dpu.kill();
    let ran = cat.finish();
    ran.failed(3, &["DPU daemon died"], "batch");
    // Slots in the ring were delivered: whole batches, in order.
    let got = [head, ran.stdout].concat();
    assert_eq!(got.len() as u64 % BATCH_BYTES, 0);
    assert_same(&got, &want[..got.len()]);

    // The target noticed, too.
    eventually("the end of the session", || {
        let status = target.status(&world);
        let free = status.counter("target.free_staging_buffers");
        let idle = free == status.counter("target.staging_buffers");
        (status.counter("target.sessions") == 0 && idle).then_some(())
    });

    // The socket file is a leftover now: clients get an error that says so, a new DPU replaces it.
    assert!(fs::metadata(dpu.socket()).expect("left behind").file_type().is_socket());
    let early = Cat::through(&world, &dpu, &target.url("web"), &args).finish();
    early.failed(3, &["no DPU daemon at", path(dpu.socket())], "dquant dpu");
    dpu.restart(&world);
    let from = (got.len() as u64 / BATCH_BYTES).to_string();
    let left = (400 - got.len() as u64 / BATCH_BYTES).to_string();
    let args = ["--plan", PLAN, "--first-batch", &from, "--batches", &left];
    let rest = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    assert_same(&rest.stdout, &want[got.len()..]);
}
