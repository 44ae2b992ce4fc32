//! Several trainers of one job: which batches each gets, what they share, and what happens when one
//! leaves.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::thread;

use client::{Error, Fault, Group, Options, Rank, Stream, open};
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, TOKEN, World, eventually, path};

const PLAN: &str =
    "window(256) | shuffle(3, blocks=2) | blend(web=2, code=1) | narrow(u16) | batch(6)";

fn corpora(world: &World) -> [Corpus; 2] {
    [
        Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(500_000, 1)),
        Corpus::flat(&world.data("code.bin"), Dtype::U32, tokens(300_000, 2)),
    ]
}

fn options(dpu: &Daemon, rank: Rank) -> Options {
    Options {
        dpu: dpu.socket().to_owned(),
        token: TOKEN.to_owned(),
        slot_bytes: 64 << 10,
        slots: 4,
        rank,
        ..Options::from_env()
    }
}

/// A trainer of a machine with all trainers: `readers` in each of `ranks` data-parallel ranks.
fn trainer(name: &str, ranks: u32, rank: u32, readers: u32, reader: u32) -> Rank {
    let group = Group { name: name.into(), first: 0, count: ranks, readers, reader };
    Rank { ranks, rank, group: Some(group) }
}

/// The next `steps` batches, by number.
fn take(stream: &mut Stream, steps: usize) -> BTreeMap<u64, Vec<u8>> {
    let batches = stream.batches().take(steps);
    batches
        .map(|batch| batch.expect("good data"))
        .map(|b| (b.number(), b.bytes().to_vec()))
        .collect()
}

#[test]
fn trainers_of_a_machine_read_one_stream() {
    let Some(world) = World::new("trainers_of_a_machine_read_one_stream") else {
        return;
    };
    let corpora = corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let (first, steps) = (11, 40);
    for (ranks, readers) in [(8, 1), (4, 2), (1, 8), (2, 3)] {
        let all = first..first + steps as u64 * u64::from(ranks);
        let want = expected(PLAN, &corpora.each_ref(), all.clone());
        let want: Vec<&[u8]> = want.chunks(6 * 256 * 2).collect();
        let before = target.status(&world).counter("target.requests_done");
        let together = Barrier::new((ranks * readers) as usize);
        let trainer = |rank: u32, reader: u32| {
            let place = trainer("job", ranks, rank, readers, reader);
            let options =
                Options { first_batch: first, batches: Some(steps as u64), ..options(&dpu, place) };
            let mut stream = open(&target.url(""), PLAN, true, &options).expect("it opens");
            let batches = take(&mut stream, steps + 1);
            let next = stream.next_batch();
            together.wait();
            assert_eq!(dpu.status(&world).counter("dpu.streams"), 1, "one stream for all");
            together.wait();
            (rank, batches, next)
        };
        let ran: Vec<_> = thread::scope(|scope| {
            let places = (0..ranks).flat_map(|rank| (0..readers).map(move |reader| (rank, reader)));
            let trainer = &trainer;
            let running: Vec<_> =
                places.map(|(rank, reader)| scope.spawn(move || trainer(rank, reader))).collect();
            running.into_iter().map(|running| running.join().expect("no failure")).collect()
        });
        for (rank, batches, next) in &ran {
            assert_eq!((batches.len(), *next), (steps, all.end), "rank {rank}");
            for (step, (number, bytes)) in (0..).zip(batches) {
                assert_eq!(*number, first + step * u64::from(ranks) + u64::from(*rank));
                assert_same(bytes, want[(number - first) as usize]);
            }
        }
        eventually("the stream is closed", || {
            (dpu.status(&world).counter("dpu.streams") == 0).then_some(())
        });
        // Every block once, for however many trainers: the files have 4 blocks.
        let read = target.status(&world).counter("target.requests_done") - before;
        let alone = Options {
            first_batch: first,
            batches: Some(all.end - first),
            ..options(&dpu, Rank::default())
        };
        let mut stream = open(&target.url(""), PLAN, true, &alone).expect("it opens");
        take(&mut stream, usize::MAX);
        drop(stream);
        let read_alone = target.status(&world).counter("target.requests_done") - before - read;
        assert_eq!(read, read_alone, "{ranks} ranks with {readers} readers");
    }
}

/// With rings, slots and memory as they are by default, and while a job that starts again opens its
/// first streams.
#[test]
fn eight_ranks_train_and_evaluate_on_a_dpu_with_defaults() {
    let Some(world) = World::new("eight_ranks_train_and_evaluate") else {
        return;
    };
    let corpora = corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let want = expected(PLAN, &corpora.each_ref(), 0..8);
    let want: Vec<&[u8]> = want.chunks(6 * 256 * 2).collect();
    let open_all = |name: &str| -> Vec<Stream> {
        let rank = |rank| {
            let place = trainer(name, 8, rank, 1, 0);
            let Options { slots, slot_bytes, .. } = Options::from_env();
            let options = Options { slots, slot_bytes, ..options(&dpu, place) };
            open(&target.url(""), PLAN, true, &options).expect("there is room")
        };
        (0..8).map(rank).collect()
    };
    let mut streams = [open_all("train"), open_all("evaluate"), open_all("train, again")];
    assert_eq!(dpu.status(&world).counter("dpu.streams"), 3);
    for ranks in &mut streams {
        for (rank, stream) in (0..).zip(ranks) {
            let batches = take(stream, 1);
            assert_same(&batches[&rank], want[rank as usize]);
        }
    }
}

/// With and without offload, over local files, and whatever the number of ranks: the same batches.
#[test]
fn ranks_get_the_same_batches_everywhere() {
    let Some(world) = World::new("ranks_get_the_same_batches_everywhere") else {
        return;
    };
    let corpora = corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let want = expected(PLAN, &corpora.each_ref(), 0..24);
    let want: Vec<&[u8]> = want.chunks(6 * 256 * 2).collect();
    for ranks in [2, 3, 8] {
        for rank in 0..ranks {
            let (share, batches) = (format!("{rank}/{ranks}"), (24 / ranks).to_string());
            let args = ["--plan", PLAN, "--batches", &batches, "--rank", &share];
            let mine: Vec<u8> =
                want.iter().skip(rank).step_by(ranks).copied().collect::<Vec<_>>().concat();
            let url = target.url("");
            let ran = [
                Cat::through(&world, &dpu, &url, &args),
                Cat::alone(&world, &url, &args),
                Cat::local(&world, "", &args),
            ];
            for cat in ran {
                assert_same(&cat.finish().good().stdout, &mine);
            }
        }
    }
}

/// A job goes on with another number of ranks and another size of batches, at any sample.
#[test]
fn a_job_resumes_on_other_ranks() {
    let Some(world) = World::new("a_job_resumes_on_other_ranks") else {
        return;
    };
    let corpora = corpora(&world);
    let single = PLAN.replace("batch(6)", "batch(1)");
    let samples = expected(&single, &corpora.each_ref(), 0..400);
    let samples: Vec<&[u8]> = samples.chunks(256 * 2).collect();
    let folder = world.root();
    let folder = path(&folder);
    let mut begin = 0;
    for (ranks, size, steps) in [(4, 6, 3), (2, 7, 4), (3, 5, 5), (1, 17, 2)] {
        let plan = PLAN.replace("batch(6)", &format!("batch({size})"));
        for rank in 0..ranks {
            let options = Options {
                first_batch: begin / size,
                shift: (begin % size) as u32,
                batches: Some(steps),
                rank: Rank { ranks, rank, group: None },
                ..Options::from_env()
            };
            let mut stream = open(folder, &plan, true, &options).expect("it opens");
            let batches = take(&mut stream, usize::MAX);
            assert_eq!(batches.len() as u64, steps);
            for (step, bytes) in (0..).zip(batches.values()) {
                let at = begin + (step * u64::from(ranks) + u64::from(rank)) * size;
                let want = samples[at as usize..(at + size) as usize].concat();
                assert_same(bytes, &want);
            }
        }
        begin += steps * u64::from(ranks) * size;
    }
}

/// The others get what is ready, and then an error that names the rank.
#[test]
fn a_rank_that_is_killed_ends_the_stream_of_the_others() {
    let Some(world) = World::new("a_rank_that_is_killed") else {
        return;
    };
    corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let small = ["--slots", "4", "--slot-size", "64KiB", "--plan", PLAN, "--group", "run 7"];
    let args = [&small[..], &["--rank", "1/2"]].concat();
    let mut killed = Cat::through(&world, &dpu, &target.url(""), &args);
    let options = options(&dpu, trainer("run 7", 2, 0, 1, 0));
    let mut stream = open(&target.url(""), PLAN, true, &options).expect("it opens");
    killed.read(100_000);
    take(&mut stream, 10);
    killed.kill();
    let end = stream.batches().find_map(Result::err).expect("a stream without end fails");
    let Error::Stream { fault: Fault::Rank, message, .. } = &end else {
        panic!("{end:?}");
    };
    assert!(message.contains("rank 1 of group run 7, process "), "{message}");
    assert!(end.hint().is_some_and(|hint| hint.contains("checkpoint")), "{:?}", end.hint());
    drop(stream);
    eventually("the stream is closed", || {
        (dpu.status(&world).counter("dpu.streams") == 0).then_some(())
    });
    assert!(dpu.stderr().contains("rank 1 of group run 7"), "{}", dpu.stderr());
}

/// Who asks for something else under the same name does not get the batches of the others.
#[test]
fn requests_that_differ_are_streams_of_their_own() {
    let Some(world) = World::new("requests_that_differ") else {
        return;
    };
    let corpora = corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let begin = |first_batch, rank| {
        let options = Options { first_batch, ..options(&dpu, trainer("job", 2, rank, 1, 0)) };
        open(&target.url(""), PLAN, true, &options).expect("it opens")
    };
    // Rank 0 has resumed, rank 1 not yet; and then it has.
    let (mut zero, mut behind) = (begin(4, 0), begin(0, 1));
    assert_eq!(dpu.status(&world).counter("dpu.streams"), 2);
    let mut one = begin(4, 1);
    assert_eq!(dpu.status(&world).counter("dpu.streams"), 2);
    for (stream, number) in [(&mut zero, 4), (&mut one, 5), (&mut behind, 1)] {
        let got = take(stream, 1);
        assert_same(&got[&number], &expected(PLAN, &corpora.each_ref(), number..number + 1));
    }
    // A seat is taken once: the same again is a new stream.
    let again = begin(4, 0);
    assert_eq!(dpu.status(&world).counter("dpu.streams"), 3);
    drop((zero, one, behind, again));
    eventually("the streams are closed", || {
        (dpu.status(&world).counter("dpu.streams") == 0).then_some(())
    });
}

#[test]
fn ranks_that_cannot_be_are_refused() {
    let Some(world) = World::new("ranks_that_cannot_be_are_refused") else {
        return;
    };
    corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let group = |first, count, readers, reader| {
        let name = "job".to_owned();
        Some(Group { name, first, count, readers, reader })
    };
    for (ranks, rank, group, says) in [
        (2, 2, None, "rank 2 of 2"),
        (0, 0, None, "rank 0 of 0"),
        (4, 1, group(2, 2, 1, 0), "rank 1 is not one of those"),
        (4, 3, group(2, 3, 1, 0), "ranks 2 to 5 of 4"),
        (200, 3, group(0, 100, 1, 0), "ranks 0 to 100 of 200"),
        (4, 2, group(2, 2, 2, 2), "reader 2 of 2"),
        (4, 2, group(2, 2, u32::MAX, 2), "more than 64 trainers"),
        (64, 2, group(0, 64, 2, 1), "more than 64 trainers"),
        (u32::MAX, 2, None, "of 4294967295"),
    ] {
        let options = options(&dpu, Rank { ranks, rank, group });
        let refused = open(&target.url(""), PLAN, true, &options).expect_err("no such rank");
        assert!(refused.to_string().contains(says), "{refused}");
        assert!(refused.hint().is_some());
    }
    let unnamed = Rank {
        ranks: 2,
        rank: 0,
        group: Some(Group { name: String::new(), first: 0, count: 2, readers: 1, reader: 0 }),
    };
    let refused = open(&target.url(""), PLAN, true, &options(&dpu, unnamed)).expect_err("no name");
    assert!(refused.to_string().contains("no name"), "{refused}");
    let ran = Cat::through(&world, &dpu, &target.url(""), &["--rank", "3/3"]).finish();
    assert_eq!(ran.exit, Some(2));
    assert!(ran.stderr.contains("write it as R/N"), "{}", ran.stderr);
}

/// Trainers that never come hold descriptors of the DPU: there is a limit to them, and they go with
/// the others.
#[test]
fn seats_of_trainers_are_bounded_and_come_back() {
    let Some(world) = World::new("seats_of_trainers_are_bounded") else {
        return;
    };
    corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let begin = |name: &str, readers| {
        open(&target.url(""), PLAN, true, &options(&dpu, trainer(name, 1, 0, readers, 0)))
    };
    drop(begin("warm", 1).expect("it opens"));
    let rest = eventually("rest", || {
        let now = dpu.descriptors();
        (dpu.status(&world).counter("dpu.streams") == 0 && now == dpu.descriptors()).then_some(now)
    });
    let whole = begin("all", 64).expect("it opens");
    let refused = begin("more", 1).expect_err("no seat is left");
    assert!(refused.to_string().contains("64 of 64 seats"), "{refused}");
    drop(whole);
    eventually("every descriptor came back", || (dpu.descriptors() <= rest).then_some(()));
    drop(begin("more", 64).expect("there are seats again"));
}
