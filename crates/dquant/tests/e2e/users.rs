//! Daemons and trainers of different users: who may connect, who gets the token, and who meets
//! whom. Root runs these tests, as users that need no account.

use std::fs;
use std::os::unix::fs::MetadataExt;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, User, World, eventually, path};

const PLAN: &str = "window(100) | narrow(u16)";

/// The group of those who may connect.
const GROUP: u32 = 64_790;

/// The daemon's user.
const SERVICE: User = User { uid: 64_791, gid: GROUP };
const TRAINER: User = User { uid: 64_792, gid: GROUP };
const COLLEAGUE: User = User { uid: 64_793, gid: GROUP };
const STRANGER: User = User { uid: 64_794, gid: 64_794 };

fn cat(world: &World, user: User, dpu: &Daemon, url: &str, args: &[&str]) -> Ran {
    let cat = ["cat", url, "--dpu", path(dpu.socket()), "--plan", PLAN, "--batches", "3"];
    Cat::start(world, world.program_of(user, &[&cat, args].concat())).finish()
}

fn mode_and_group(dpu: &Daemon) -> (u32, u32) {
    let file = fs::metadata(dpu.socket()).expect("it serves");
    (file.mode() & 0o7777, file.gid())
}

#[test]
fn a_group_uses_the_dpu_of_a_user_whom_its_members_trust() {
    const NAME: &str = "a_group_uses_the_dpu_of_a_user";
    let Some(world) = World::new(NAME).filter(|world| world.is_home_of(SERVICE, NAME)) else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let (target, group) = (world.target(&[]), GROUP.to_string());
    let dpu = world.dpu_of(SERVICE, &["--socket-group", &group]);
    let url = target.url("web");
    assert_eq!(mode_and_group(&dpu), (0o660, GROUP));
    let note = format!("members of group {GROUP} may connect");
    assert!(dpu.status(&world).0["notes"].to_string().contains(&note));

    let service = SERVICE.uid.to_string();
    let want = expected(PLAN, &[&corpus], 0..3);
    assert_same(&cat(&world, TRAINER, &dpu, &url, &["--dpu-user", &service]).good().stdout, &want);
    let mut by_variable = world.program_of(
        TRAINER,
        &["cat", &url, "--dpu", path(dpu.socket()), "--plan", PLAN, "--batches", "3"],
    );
    by_variable.env("DQUANT_DPU_USER", &service);
    assert_same(&Cat::start(&world, by_variable).finish().good().stdout, &want);
    // The daemon's own user, and root, have to name nobody.
    assert_same(&cat(&world, SERVICE, &dpu, &url, &[]).good().stdout, &want);

    let streams = || dpu.stderr().matches(" begins: ").count();
    let before = streams();
    let foreign = format!("belongs to user {service}");
    let other = COLLEAGUE.uid.to_string();
    for trusted in [&[][..], &["--dpu-user", &other], &["--dpu-user", "root"]] {
        cat(&world, TRAINER, &dpu, &url, trusted).failed(2, &[&foreign], "DQUANT_DPU_USER");
    }
    let unknown = cat(&world, TRAINER, &dpu, &url, &["--dpu-user", "no-such-user"]);
    unknown.failed(2, &["has no user 'no-such-user'"], "id -u");
    let denied = cat(&world, STRANGER, &dpu, &url, &["--dpu-user", &service]);
    denied.failed(2, &["permission denied", path(dpu.socket())], "--socket-group");
    assert_eq!(streams(), before, "nothing was sent");
}

#[test]
fn everyone_may_connect_where_the_daemon_says_so() {
    const NAME: &str = "everyone_may_connect";
    let Some(world) = World::new(NAME).filter(|world| world.is_home_of(SERVICE, NAME)) else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let target = world.target(&[]);
    let dpu = world.dpu_of(SERVICE, &["--socket-mode", "0666"]);
    assert_eq!(mode_and_group(&dpu).0, 0o666);
    assert!(dpu.status(&world).0["notes"].to_string().contains("every user of this machine may"));
    let service = SERVICE.uid.to_string();
    let ran = cat(&world, STRANGER, &dpu, &target.url("web"), &["--dpu-user", &service]).good();
    assert_same(&ran.stdout, &expected(PLAN, &[&corpus], 0..3));
    // Connecting gives no right to data: that needs the target's token.
    let mut without = world.program_of(
        STRANGER,
        &["cat", &target.url("web"), "--dpu", path(dpu.socket()), "--dpu-user", &service],
    );
    without.env_remove("DQUANT_TOKEN");
    Cat::start(&world, without).finish().failed(2, &["no token"], "DQUANT_TOKEN");
}

/// Users who give the same name to a group do not share a stream.
#[test]
fn groups_of_two_users_do_not_meet() {
    const NAME: &str = "groups_of_two_users";
    let Some(world) = World::new(NAME).filter(|world| world.is_home_of(SERVICE, NAME)) else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let target = world.target(&[]);
    let dpu = world.dpu_of(SERVICE, &["--socket-mode", "0660"]);
    let (url, service) = (target.url("web"), SERVICE.uid.to_string());
    let rank = |user: User, rank: &str| {
        let cat = ["cat", &url, "--dpu", path(dpu.socket()), "--dpu-user", &service];
        let args = ["--plan", PLAN, "--group", "job", "--rank", rank];
        let mut cat = Cat::start(&world, world.program_of(user, &[&cat[..], &args].concat()));
        cat.read(200);
        cat
    };
    let running = [rank(TRAINER, "0/2"), rank(COLLEAGUE, "1/2")];
    assert_eq!(dpu.status(&world).counter("dpu.streams"), 2, "{}", dpu.stderr());
    running.into_iter().for_each(Cat::kill);
    eventually("the streams are closed", || {
        (dpu.status(&world).counter("dpu.streams") == 0).then_some(())
    });
    let running = [rank(TRAINER, "0/2"), rank(TRAINER, "1/2")];
    assert_eq!(dpu.status(&world).counter("dpu.streams"), 1, "{}", dpu.stderr());
    running.into_iter().for_each(Cat::kill);
}

#[test]
fn a_socket_that_cannot_be_given_to_a_group_is_not_left_behind() {
    const NAME: &str = "a_socket_that_cannot_be_given";
    let Some(world) = World::new(NAME).filter(|world| world.is_home_of(SERVICE, NAME)) else {
        return;
    };
    let socket = world.socket("given.sock");
    let dpu =
        ["dpu", "--socket", path(&socket), "--control", "127.0.0.1:0", "--roce", "127.0.0.1:0"];
    let args = [&dpu[..], &["--socket-group", "64999"]].concat();
    let ran = Cat::start(&world, world.program_of(SERVICE, &args)).finish();
    ran.failed(2, &[path(&socket), "group 64999", "not permitted"], "SupplementaryGroups=");
    assert!(!socket.exists() && !socket.with_extension("sock.lock").exists());
}
