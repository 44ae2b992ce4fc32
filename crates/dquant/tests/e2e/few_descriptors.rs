//! Programs that may open few descriptors: whichever one is missing, the error reports it.

use xio::dataset::Dtype;

use super::corpus::{Corpus, tokens};
use super::harness::{Cat, Ran, World, fresh_ip, path};

/// Standard streams and the loader need four; the program with everything open stays below thirty.
const LIMITS: std::ops::Range<u32> = 5..30;

#[track_caller]
fn assert_names_the_limit(ran: &Ran, limit: u32) {
    assert_eq!(ran.exit, Some(2), "{limit}: {}", ran.stderr);
    assert!(!ran.stderr.contains("panicked"), "{limit}: {}", ran.stderr);
    assert!(ran.stderr.contains("hint: raise the open-file limit"), "{limit}: {}", ran.stderr);
}

#[test]
fn daemons_name_the_limit_that_they_start_at() {
    let Some(world) = World::new("daemons_name_the_limit") else {
        return;
    };
    let (root, roce) = (world.root(), format!("{}:4791", fresh_ip()));
    let serve = ["serve", "--root", path(&root), "--roce", &roce, "--control", "127.0.0.1:0"];
    let dpu = ["dpu", "--roce", &roce, "--control", "127.0.0.1:0"];
    for args in [&serve[..], &dpu] {
        let mut started = false;
        for limit in LIMITS {
            let mut daemon = Cat::start(&world, world.limited(args, limit));
            if daemon.read_some(&mut [0; 64]) > 0 {
                started = true;
                daemon.kill();
                break;
            }
            assert_names_the_limit(&daemon.finish(), limit);
        }
        assert!(started, "{args:?} needs more descriptors");
    }
}

#[test]
fn clients_name_the_limit_and_blame_no_daemon() {
    let Some(world) = World::new("clients_name_the_limit") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let (url, roce) = (target.url("web"), format!("{}:4791", fresh_ip()));
    let plan = ["--plan", "window(100)", "--batches", "1"];
    let cat = ["cat", &url, "--dpu", path(dpu.socket())];
    let alone = ["cat", &url, "--offload", "false", "--roce", &roce];
    for args in [[&cat[..], &plan].concat(), [&alone[..], &plan].concat()] {
        let mut worked = false;
        for limit in LIMITS.start..48 {
            let ran = Cat::start(&world, world.limited(&args, limit)).finish();
            if ran.exit == Some(0) {
                worked = true;
                break;
            }
            assert_names_the_limit(&ran, limit);
            // The replying side is not at fault.
            for blame in ["went away", "closed", "more than", "no DPU daemon"] {
                assert!(!ran.stderr.contains(blame), "{limit}: {}", ran.stderr);
            }
        }
        assert!(worked, "{args:?} needs more descriptors");
    }
}
