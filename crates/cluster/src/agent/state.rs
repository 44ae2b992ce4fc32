//! What an agent must not forget, in one file: its position, so that no command of a former leader
//! is ever accepted, and the plan in force.
//!
//! The file has a mark, the length and the CRC-32 of what follows, the message `AgentState`, and
//! the agent's signature of that. It is replaced as a whole: written beside, made durable, renamed.
//! So the lock that keeps a second agent away is that of another file, `PATH.lock`, which stays;
//! the kernel gives it back when the agent ends, however it ends.
//!
//! A position is believed only if it is signed with the token of now. Under another token, and in
//! files of versions that signed nothing, a stranger may have set it, so it is forgotten: the plan
//! stays in force until a brain that knows this token sends one. So an agent that was told an
//! impossible term recovers, and a change of the token lets terms begin anew.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use nic::local_files::{self, LockError, create_private};
use parfait::agent::Saved;
use prost::Message;
use service::error::Error;
use service::log;

use crate::convert;
use crate::keys::{Key, SIGNATURE_BYTES};
use crate::proto;

/// The first bytes of such a file; the last one is the version.
const MARK: [u8; 8] = *b"DQAGENT\x02";

/// Those of files without a signature.
const UNSIGNED_MARK: [u8; 8] = *b"DQAGENT\x01";

/// Bytes of mark, length and CRC.
const HEADER_BYTES: usize = 16;

/// Largest file that is read.
const MAX_BYTES: u64 = 16 << 20;

/// See the module's text.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    node: String,
    key: Key,
    /// Locked for as long as it is open.
    _lock: File,
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(suffix);
    name.into()
}

/// Takes the lock of a state file.
///
/// # Errors
/// When another process has it: two agents with one file would each forget what the other was told.
fn lock(path: &Path) -> Result<File, Error> {
    let name = with_suffix(path, ".lock");
    local_files::lock(&name).map_err(|error| match error {
        LockError::Held(holder) if holder.is_foreign() => {
            Error::invalid(format!("{}: {holder} has locked it", name.display()))
                .hint("end that process: no other user can open the file from now on")
        }
        LockError::Held(holder) => Error::invalid(format!("{}: {holder} uses it", path.display()))
            .hint("each agent has a file of its own: end that agent, or choose another --state"),
        LockError::Failed(error) => Error::because(name.display(), &error)
            .hint("--state needs a folder that exists and that this user may write to"),
    })
}

impl StateFile {
    /// The file of a node's agent, and what it has; nothing if there is none yet. With the state
    /// come names of jobs. What is not signed with `key` has a plan and no position.
    ///
    /// # Errors
    /// When another agent uses it, or it is damaged, or of another node: an agent that forgets its
    /// position could follow a former leader.
    pub(super) fn open(
        path: &Path,
        node: &str,
        key: Key,
    ) -> Result<(StateFile, proto::AgentState), Error> {
        let lock = lock(path)?;
        let file = StateFile { path: path.to_owned(), node: node.to_owned(), key, _lock: lock };
        let shown = path.display().to_string();
        let bytes = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let state = proto::AgentState { node: node.to_owned(), ..Default::default() };
                // An agent that cannot write must not begin.
                file.write(&state).map_err(|error| Error::because(&shown, &error))?;
                return Ok((file, state));
            }
            Ok(metadata) if metadata.len() > MAX_BYTES => {
                return Err(Error::invalid(format!("{shown}: too large for an agent's state")));
            }
            Ok(_) => fs::read(path),
            Err(error) => Err(error),
        };
        let bytes = bytes.map_err(|error| Error::because(&shown, &error))?;
        let (mut state, is_signed) = decode(&bytes, &file.key).ok_or_else(|| {
            Error::invalid(format!(
                "{shown}: no whole state of an agent, or one of another version"
            ))
            .hint("if no other brain can be running with an older term, remove the file")
        })?;
        if state.node != node {
            return Err(Error::invalid(format!(
                "{shown}: the state of '{}', not of '{node}'",
                state.node
            ))
            .hint("each agent has a file of its own: choose another --state"));
        }
        if !is_signed {
            let term = state.position.map_or(0, |position| position.term);
            log::line(format_args!(
                "{shown}: it is not signed with this token: its plan stays in force, and its term {term} is forgotten"
            ));
            (state.position, state.decided, state.objection) = (None, false, None);
        }
        Ok((file, state))
    }

    /// Replaces the state, durably.
    ///
    /// # Errors
    /// When the file cannot be written; what it had stays.
    pub(super) fn save(&self, saved: &Saved, name: impl Fn(u64) -> String) -> io::Result<()> {
        let share = |share: &parfait::agent::Share| convert::share_message(share, &name(share.job));
        self.write(&proto::AgentState {
            node: self.node.clone(),
            position: convert::position_message(saved.position),
            decided: saved.verdict.is_some(),
            objection: saved.verdict.and_then(Result::err).map(convert::objection_message),
            plan: saved.plan.iter().map(share).collect(),
        })
    }

    fn write(&self, state: &proto::AgentState) -> io::Result<()> {
        let body = state.encode_to_vec();
        let mut bytes = MARK.to_vec();
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(crc32fast::hash(&body).to_le_bytes());
        let signature = self.key.sign(&[&body]);
        bytes.extend(body);
        bytes.extend(signature);
        let folder = match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let beside = with_suffix(&self.path, ".new");
        let mut file = create_private(&beside)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&beside, &self.path)?;
        File::open(folder)?.sync_all()
    }
}

/// A whole state, and whether it is signed with that key.
fn decode(bytes: &[u8], key: &Key) -> Option<(proto::AgentState, bool)> {
    let (header, body) = bytes.split_at_checked(HEADER_BYTES)?;
    let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let (body, signature) = match *header.first_chunk::<8>()? {
        MARK => body.split_at_checked(body.len().checked_sub(SIGNATURE_BYTES)?)?,
        UNSIGNED_MARK => (body, &[][..]),
        _ => return None,
    };
    let is_whole = number(8) as usize == body.len() && number(12) == crc32fast::hash(body);
    let state = is_whole.then(|| proto::AgentState::decode(body).ok())??;
    Some((state, key.has_signed(&[body], signature)))
}

/// What the state machine saved.
///
/// # Errors
/// When the file says something impossible.
pub(super) fn saved(state: &proto::AgentState) -> Result<Saved, convert::Malformed> {
    let objection = state.objection.as_ref().map(convert::objection).transpose()?;
    Ok(Saved {
        position: convert::position(state.position),
        verdict: state.decided.then_some(objection.map_or(Ok(()), Err)),
        plan: state.plan.iter().map(convert::share).collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use parfait::agent::{Objection, Phase, Position, Share};
    use parfait::job::Latency;
    use parfait::queues::Dscp;

    use super::*;
    use crate::keys::Keys;

    fn folder(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("dquant-agent-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    fn key(token: &str) -> Key {
        Keys::of_token(token).state
    }

    fn open(path: &Path, node: &str) -> Result<(StateFile, proto::AgentState), Error> {
        StateFile::open(path, node, key("a-token-of-ours"))
    }

    fn example() -> Saved {
        let dscp = Dscp::new(26).expect("a code point");
        let share = |job| Share {
            port: 1,
            job,
            dscp,
            bps: 5_000_000_000,
            burst_bytes: 64_000,
            latency: Latency::Bulk,
            phase: Some(Phase { period_ns: 24_000_000, shift_ns: 8, exchange_ns: 7_000_000 }),
        };
        Saved {
            position: Position { term: 7, sequence: 9 },
            verdict: Some(Err(Objection::Overbooked { port: 1, planned_bps: 3, port_bps: 2 })),
            plan: vec![share(3), share(8)],
        }
    }

    #[test]
    fn what_was_saved_is_read_again_and_belongs_to_one_node() {
        let folder = folder("saved");
        let path = folder.join("state");
        let (file, empty) = open(&path, "host1").expect("a new file");
        assert_eq!(saved(&empty).expect("nothing"), Saved::default());
        file.save(&example(), |job| format!("job{job}")).expect("written");
        drop(file);
        let (again, state) = open(&path, "host1").expect("whole");
        assert_eq!(saved(&state).expect("as it was"), example());
        assert_eq!(state.plan[1].name, "job8");
        drop(again);
        let other = open(&path, "host2").expect_err("of another node").to_string();
        assert!(other.contains("the state of 'host1', not of 'host2'"), "{other}");
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn a_second_agent_is_refused_until_the_first_has_ended() {
        let folder = folder("locked");
        let path = folder.join("state");
        let (file, _) = open(&path, "host1").expect("a new file");
        // Saving replaces the file, and the lock stays.
        file.save(&example(), |_| String::new()).expect("written");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "others could try tokens against its signature");
        let (why, hint) = open(&path, "host1").expect_err("in use").parts();
        let own = format!("state: process {} (", std::process::id());
        assert!(why.contains(&own) && why.contains(") uses it"), "{why}");
        let mode = fs::metadata(folder.join("state.lock")).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "others cannot open it, so they cannot lock it");
        assert!(hint.is_some_and(|hint| hint.contains("another --state")));
        drop(file);
        let (_file, state) = open(&path, "host1").expect("free again");
        assert_eq!(saved(&state).expect("as it was"), example());
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn a_lock_that_cannot_be_written_to_is_a_lock() {
        let folder = folder("full");
        let path = folder.join("state");
        std::os::unix::fs::symlink("/dev/full", folder.join("state.lock")).expect("a new link");
        let (file, _) = open(&path, "host1").expect("nothing has to be written");
        let (why, _) = open(&path, "host1").expect_err("in use").parts();
        assert!(why.contains(" uses it"), "{why}");
        drop(file);
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn a_damaged_state_is_never_taken_for_none() {
        let folder = folder("damaged");
        let path = folder.join("state");
        let (file, _) = open(&path, "host1").expect("a new file");
        file.save(&example(), |_| String::new()).expect("written");
        drop(file);
        let whole = fs::read(&path).expect("there");
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).expect("written");
            assert!(open(&path, "host1").is_err(), "{length} bytes");
        }
        for bit in 0..(whole.len() - SIGNATURE_BYTES) * 8 {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &damaged).expect("written");
            assert!(open(&path, "host1").is_err(), "bit {bit}");
        }
        fs::remove_dir_all(folder).expect("removed");
    }

    /// The plan of a state and no position.
    fn without_position(state: &proto::AgentState) {
        let expected = Saved { plan: example().plan, ..Saved::default() };
        assert_eq!(saved(state).expect("it is whole"), expected);
    }

    #[test]
    fn a_position_that_is_not_signed_with_this_token_is_forgotten_and_the_plan_stays() {
        let folder = folder("unsigned");
        let path = folder.join("state");
        let (file, _) = open(&path, "host1").expect("a new file");
        file.save(&example(), |_| String::new()).expect("written");
        drop(file);
        let whole = fs::read(&path).expect("there");

        let (file, state) = StateFile::open(&path, "host1", key("another-token")).expect("whole");
        without_position(&state);
        drop(file);
        for bit in (whole.len() - SIGNATURE_BYTES) * 8..whole.len() * 8 {
            let mut wrong = whole.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &wrong).expect("written");
            without_position(&open(&path, "host1").expect("whole").1);
        }
        // As versions without signatures wrote it, after a stranger had given it the last of all
        // terms.
        let last = Position { term: u64::MAX, sequence: u64::MAX };
        let mut told = state_of(&whole);
        told.position = convert::position_message(last);
        let body = told.encode_to_vec();
        let length = (body.len() as u32).to_le_bytes();
        let crc = crc32fast::hash(&body).to_le_bytes();
        let old = [&UNSIGNED_MARK[..], &length, &crc, &body].concat();
        fs::write(&path, &old).expect("written");
        let (file, state) = open(&path, "host1").expect("whole");
        without_position(&state);
        file.save(&example(), |_| String::new()).expect("written");
        drop(file);
        assert_eq!(saved(&open(&path, "host1").expect("whole").1).expect("signed"), example());
        fs::remove_dir_all(folder).expect("removed");
    }

    fn state_of(bytes: &[u8]) -> proto::AgentState {
        decode(bytes, &key("a-token-of-ours")).expect("whole").0
    }
}
