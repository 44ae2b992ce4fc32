//! What programs of this machine ask its agent: which DSCP a job has.
//!
//! The agent listens on a socket of the file system ([`socket_path`]). A connection carries one
//! question and one answer, a line of JSON each:
//!
//! ```text
//! {"job":"llm"}
//! {"job":7,"name":"llm","dscp":26,"pace_bps":null}
//! {"error":"there is no job 'lmm' on this machine","hint":"`dquant job list` shows them"}
//! ```
//!
//! Either side may be slow, silent or hostile. Lines are bounded by [`MAX_LINE_BYTES`], a whole
//! exchange by [`TIME_LIMIT`], and what the agent does at the same time by [`MAX_CONNECTIONS`], of
//! which one user has [`MAX_OF_USER`]; who comes on top is refused with the reason. Every user may
//! connect: whether one may join a job is the agent's decision, which gets the kernel's word on who
//! asks ([`Asker`]).

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{env, fs};

use nic::peer::{self, Peer};
use serde::{Deserialize, Serialize};
use service::text::one_line;
use thiserror::Error;

/// Where the agent listens, unless the environment names another place.
pub const SOCKET: &str = "/run/dquant/agent.sock";

/// Environment variable with the path of the agent's socket.
pub const SOCKET_VARIABLE: &str = "DQUANT_AGENT";

/// Longest line in either direction, its end included.
pub const MAX_LINE_BYTES: usize = 4096;

/// How long a question and its answer may take together.
pub const TIME_LIMIT: Duration = Duration::from_secs(2);

/// Connections that an agent serves at the same time.
pub const MAX_CONNECTIONS: usize = 64;

/// Those of them that one user may have.
pub const MAX_OF_USER: usize = 16;

/// Highest DSCP.
const MAX_DSCP: u8 = 63;

/// Where this process looks for its machine's agent.
pub fn socket_path() -> PathBuf {
    let named = env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty());
    named.map_or_else(|| PathBuf::from(SOCKET), PathBuf::from)
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    job: String,
}

/// A job as a program of this machine is to take part in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Membership {
    /// Its number.
    pub job: u64,
    /// Its name.
    pub name: String,
    /// The DSCP that its packets are to have, 0–63.
    pub dscp: u8,
    /// What it may send at most, in bits per second, if it is paced.
    pub pace_bps: Option<u64>,
}

/// Why a program is told nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// What is wrong.
    pub error: String,
    /// The next thing to try.
    pub hint: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Answer {
    Membership(Membership),
    Refusal(Refusal),
}

/// Who asks, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// Process; none if it is not visible in this PID namespace, as from a container.
    pub pid: Option<u32>,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Why the agent gave no membership.
#[derive(Debug, Error)]
pub enum AskError {
    /// Nobody listens.
    #[error("no agent answers at {path}: {cause}")]
    NoAgent {
        /// The socket.
        path: String,
        /// Why it cannot be reached.
        cause: io::Error,
    },
    /// The agent went away or took too long.
    #[error("the agent at {path} does not answer: {cause}")]
    Lost {
        /// The socket.
        path: String,
        /// What happened.
        cause: io::Error,
    },
    /// What it sent is no answer.
    #[error("the agent at {path} answers nonsense: {why}")]
    Nonsense {
        /// The socket.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// It refused.
    #[error("{}", .0.error)]
    Refused(Refusal),
}

impl AskError {
    /// The next thing to try.
    pub fn hint(&self) -> &str {
        match self {
            AskError::NoAgent { .. } => {
                "start `dquant agent` on this machine, or name its socket in DQUANT_AGENT"
            }
            AskError::Lost { .. } => "is the agent overloaded or stopped?",
            AskError::Nonsense { .. } => "use the same version of dquant for program and agent",
            AskError::Refused(refusal) => &refusal.hint,
        }
    }
}

// ---- asking -------------------------------------------------------------------------------------

/// Asks the agent at `path` about a job.
///
/// # Errors
/// When there is no agent, it does not answer in time, or it refuses.
pub fn ask(path: &Path, job: &str) -> Result<Membership, AskError> {
    let name = || path.display().to_string();
    let stream =
        UnixStream::connect(path).map_err(|cause| AskError::NoAgent { path: name(), cause })?;
    let until = Instant::now() + TIME_LIMIT;
    let question = Question { job: job.to_owned() };
    // A refusal may be there although the question could not be sent.
    let sent = send_line(&stream, &question, until);
    let line = match receive_line(&stream, until) {
        Ok(line) => line,
        Err(cause) => {
            return Err(AskError::Lost { path: name(), cause: sent.err().unwrap_or(cause) });
        }
    };
    let nonsense = |why: String| AskError::Nonsense { path: name(), why };
    match serde_json::from_slice(&line).map_err(|error| nonsense(error.to_string()))? {
        Answer::Membership(found) if found.dscp > MAX_DSCP => {
            Err(nonsense(format!("a DSCP of {}", found.dscp)))
        }
        Answer::Membership(found) if found.name != job => {
            Err(nonsense(format!("it was asked about '{job}', not '{}'", found.name)))
        }
        Answer::Membership(found) => Ok(found),
        Answer::Refusal(Refusal { error, hint }) => {
            let (error, hint) = (one_line(&error).into_owned(), one_line(&hint).into_owned());
            Err(AskError::Refused(Refusal { error, hint }))
        }
    }
}

// ---- answering ----------------------------------------------------------------------------------

/// What an agent has done for programs of its machine since it started.
#[derive(Debug, Default)]
pub struct Counters {
    /// Questions answered with a membership.
    pub answered: AtomicU64,
    /// Questions refused by the agent.
    pub refused: AtomicU64,
    /// Lines that are no question.
    pub malformed: AtomicU64,
    /// Connections that ended or were too slow before their question was there, or their answer
    /// taken.
    pub lost: AtomicU64,
    /// Connections above [`MAX_CONNECTIONS`] and [`MAX_OF_USER`].
    pub busy: AtomicU64,
}

/// Answers one program.
pub type Answerer = dyn Fn(&Asker, &str) -> Result<Membership, Refusal> + Send + Sync;

/// The agent's side: answers until it is dropped.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    /// Device and inode of the socket.
    identity: (u64, u64),
    stops: Arc<AtomicBool>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `path`, in a folder that exists, and answers on a thread of its own. A socket
    /// that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// When another agent listens there (`AddrInUse`), or the place cannot be written.
    pub fn start(path: &Path, answer: Arc<Answerer>) -> io::Result<Server> {
        let (listener, identity) = bind(path)?;
        let (stops, counters) = (Arc::new(AtomicBool::new(false)), Arc::new(Counters::default()));
        let thread = {
            let (stops, counters) = (Arc::clone(&stops), Arc::clone(&counters));
            let body = move || accept(&listener, &stops, &counters, &answer);
            std::thread::Builder::new().name("dquant-local".into()).spawn(body)?
        };
        Ok(Server { path: path.to_owned(), identity, stops, counters, thread: Some(thread) })
    }

    /// What it has done so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Release);
        // Wakes the thread; if that fails, the socket is gone and the thread stays behind
        // harmlessly.
        let is_ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == self.identity);
        if is_ours && UnixStream::connect(&self.path).is_ok() {
            let _ = self.thread.take().map(JoinHandle::join);
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds beside the path and moves the socket there, so that at every moment there is one that
/// answers or none.
fn bind(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    if UnixStream::connect(path).is_ok() {
        let why = format!("another agent listens at {}", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
    }
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}", std::process::id()));
    let draft = PathBuf::from(draft);
    let _ = fs::remove_file(&draft);
    let listener = UnixListener::bind(&draft)?;
    let moved = fs::set_permissions(&draft, fs::Permissions::from_mode(0o666))
        .and_then(|()| fs::symlink_metadata(&draft))
        .and_then(|found| fs::rename(&draft, path).map(|()| (found.dev(), found.ino())));
    if moved.is_err() {
        let _ = fs::remove_file(&draft);
    }
    Ok((listener, moved?))
}

fn accept(
    listener: &UnixListener,
    stops: &AtomicBool,
    counters: &Arc<Counters>,
    answer: &Arc<Answerer>,
) {
    let places = Arc::new(Places::default());
    while !stops.load(Ordering::Acquire) {
        let Ok((stream, _)) = listener.accept() else {
            // Out of descriptors, for example: trying at once would only burn the processor.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let user = asker(&stream).map_or(u32::MAX, |asker| asker.uid);
        let place = match places.take(user) {
            Ok(place) => place,
            Err(why) => {
                counters.busy.fetch_add(1, Ordering::Relaxed);
                refuse_busy(&stream, why);
                continue;
            }
        };
        let (told, answer) = (Arc::clone(counters), Arc::clone(answer));
        let work = move || {
            let _place = place;
            serve(&stream, &told, &*answer);
        };
        let spawned = std::thread::Builder::new().name("dquant-local-1".into()).spawn(work);
        if spawned.is_err() {
            counters.busy.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Connections by user.
#[derive(Debug, Default)]
struct Places(Mutex<BTreeMap<u32, usize>>);

/// The place of a connection; dropping it frees the place.
struct Place(Arc<Places>, u32);

impl Places {
    /// A place for a connection of that user.
    ///
    /// # Errors
    /// Says why there is none.
    fn take(self: &Arc<Places>, user: u32) -> Result<Place, String> {
        let mut taken = self.taken();
        let own = taken.get(&user).copied().unwrap_or(0);
        if own >= MAX_OF_USER {
            return Err(format!("the agent answers {own} programs of user {user} at the moment"));
        }
        if taken.values().sum::<usize>() >= MAX_CONNECTIONS {
            return Err(format!("the agent answers {MAX_CONNECTIONS} programs at the moment"));
        }
        taken.insert(user, own + 1);
        Ok(Place(Arc::clone(self), user))
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<u32, usize>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.0.taken();
        match taken.get_mut(&self.1) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(taken.remove(&self.1)),
        }
    }
}

/// The line fits the empty buffer of a new connection, so this does not wait.
fn refuse_busy(stream: &UnixStream, error: String) {
    let refusal = Refusal { error, hint: "try again".to_owned() };
    let _ = send_line(stream, &Answer::Refusal(refusal), Instant::now() + TIME_LIMIT);
}

fn serve(stream: &UnixStream, counters: &Counters, answer: &Answerer) {
    let until = Instant::now() + TIME_LIMIT;
    let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
    let (Ok(line), Ok(asker)) = (receive_line(stream, until), asker(stream)) else {
        count(&counters.lost);
        return;
    };
    let reply = match serde_json::from_slice::<Question>(&line) {
        Err(error) => {
            count(&counters.malformed);
            let hint = "ask with one line of JSON: {\"job\":\"NAME\"}".to_owned();
            Answer::Refusal(Refusal { error: format!("no question: {error}"), hint })
        }
        Ok(Question { job }) => match answer(&asker, &job) {
            Ok(membership) => {
                count(&counters.answered);
                Answer::Membership(membership)
            }
            Err(refusal) => {
                count(&counters.refused);
                Answer::Refusal(refusal)
            }
        },
    };
    if send_line(stream, &reply, until).is_err() {
        count(&counters.lost);
    }
}

fn asker(stream: &UnixStream) -> io::Result<Asker> {
    let Peer { pid, uid, gid } = peer::of(stream)?;
    Ok(Asker { pid, uid, gid })
}

// ---- lines --------------------------------------------------------------------------------------

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("nothing within {TIME_LIMIT:?}"))
}

/// What is left of the time, never 0: a socket takes that for no limit.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

fn send_line(mut stream: &UnixStream, message: &impl Serialize, until: Instant) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    if line.len() > MAX_LINE_BYTES {
        let why = format!("a line of {} bytes; {MAX_LINE_BYTES} are allowed", line.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    stream.set_write_timeout(Some(left(until)?))?;
    stream.write_all(&line)
}

/// The next line without its end. What comes behind it is ignored.
fn receive_line(mut stream: &UnixStream, until: Instant) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut piece = [0; 512];
    loop {
        stream.set_read_timeout(Some(left(until)?))?;
        let got = match stream.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(late()),
            got => got?,
        };
        if got == 0 {
            let why = "the connection was closed in the middle of a line";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
        }
        let end = piece[..got].iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&piece[..end.unwrap_or(got)]);
        if line.len() >= MAX_LINE_BYTES {
            let why = format!("a line above {MAX_LINE_BYTES} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        if end.is_some() {
            return Ok(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed with the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = env::temp_dir().join(format!("dquant-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).expect("a temporary folder");
            Folder(path)
        }

        fn socket(&self) -> PathBuf {
            self.0.join("agent.sock")
        }

        fn server(&self) -> Server {
            Server::start(&self.socket(), Arc::new(answer)).expect("it is ours")
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn llm() -> Membership {
        Membership { job: 7, name: "llm".to_owned(), dscp: 26, pace_bps: Some(5_000) }
    }

    fn answer(asker: &Asker, job: &str) -> Result<Membership, Refusal> {
        assert_eq!(asker.pid, Some(std::process::id()));
        match job {
            "llm" => Ok(llm()),
            "wide" => Ok(Membership { dscp: 64, name: job.to_owned(), ..llm() }),
            "other" => Ok(llm()),
            "long" => Err(Refusal { error: "x".repeat(MAX_LINE_BYTES), hint: String::new() }),
            _ => Err(Refusal { error: format!("no job '{job}'"), hint: "list them".to_owned() }),
        }
    }

    fn said(socket: &Path, bytes: &[u8]) -> String {
        let mut stream = UnixStream::connect(socket).expect("it listens");
        stream.write_all(bytes).expect("there is room");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    fn count(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }

    #[test]
    fn a_member_learns_its_dscp_and_a_stranger_why_not() {
        let folder = Folder::new("local-answers");
        let server = folder.server();
        assert_eq!(ask(&folder.socket(), "llm").expect("a member"), llm());
        let refused = ask(&folder.socket(), "lmm").expect_err("no such job");
        assert_eq!((refused.to_string().as_str(), refused.hint()), ("no job 'lmm'", "list them"));
        for (job, why) in [("wide", "a DSCP of 64"), ("other", "it was asked about 'other'")] {
            let error = ask(&folder.socket(), job).expect_err("nonsense").to_string();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(count(&server.counters().answered), 3);
        assert_eq!(count(&server.counters().refused), 1);
    }

    #[test]
    fn what_is_no_question_is_refused_and_counted() {
        let folder = Folder::new("local-nonsense");
        let server = folder.server();
        for bytes in
            [&b"\n"[..], b"job llm\n", b"{\"job\":7}\n", b"{\"job\":\"llm\",\"x\":1}\n", b"\xff\n"]
        {
            let answer = said(&folder.socket(), bytes);
            assert!(answer.starts_with("{\"error\":\"no question: "), "{answer}");
            assert_eq!(answer.matches('\n').count(), 1, "{answer}");
        }
        assert_eq!(count(&server.counters().malformed), 5);
        // Lines without an end, a question cut short, and an answer that is too long.
        assert_eq!(said(&folder.socket(), &[b'x'; 2 * MAX_LINE_BYTES]), "");
        drop(UnixStream::connect(folder.socket()).expect("it listens"));
        assert!(matches!(ask(&folder.socket(), "long"), Err(AskError::Lost { .. })));
        while count(&server.counters().lost) < 3 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn silent_programs_neither_block_others_for_long_nor_pile_up() {
        let folder = Folder::new("local-silent");
        let server = folder.server();
        let silent: Vec<UnixStream> = (0..MAX_OF_USER)
            .map(|_| UnixStream::connect(folder.socket()).expect("it listens"))
            .collect();
        let began = Instant::now();
        let refused = ask(&folder.socket(), "llm").expect_err("all places are taken").to_string();
        assert!(refused.contains("16 programs of user "), "{refused}");
        assert!(began.elapsed() < TIME_LIMIT / 2);
        assert_eq!(count(&server.counters().busy), 1);
        while ask(&folder.socket(), "llm").is_err() {
            assert!(began.elapsed() < 5 * TIME_LIMIT, "the silent ones are never left");
            std::thread::sleep(Duration::from_millis(20));
        }
        // One was left at least; the others follow within the time that all of them have.
        while count(&server.counters().lost) < MAX_OF_USER as u64 {
            assert!(began.elapsed() < 5 * TIME_LIMIT, "some silent ones are never left");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(silent);
    }

    #[test]
    fn a_user_has_a_share_of_the_places() {
        let places = Arc::new(Places::default());
        let of = |user: u32| (0..100).map_while(|_| places.take(user).ok()).collect::<Vec<_>>();
        let taken = [of(1), of(2), of(3)];
        assert_eq!(taken.each_ref().map(Vec::len), [MAX_OF_USER; 3]);
        let rest: Vec<_> = (4..100).filter_map(|user| places.take(user).ok()).collect();
        assert_eq!(rest.len(), MAX_CONNECTIONS - 3 * MAX_OF_USER);
        assert!(places.take(200).is_err_and(|why| why.contains("64 programs")));
        drop((taken, rest));
        assert!(places.taken().is_empty());
    }

    #[test]
    fn an_agent_that_is_silent_ends_the_question() {
        let folder = Folder::new("local-stuck");
        let _listener = UnixListener::bind(folder.socket()).expect("it is ours");
        let began = Instant::now();
        assert!(matches!(ask(&folder.socket(), "llm"), Err(AskError::Lost { .. })));
        assert!((TIME_LIMIT..2 * TIME_LIMIT).contains(&began.elapsed()));
        let absent = ask(&folder.0.join("none"), "llm").expect_err("nobody is there");
        assert!(matches!(absent, AskError::NoAgent { .. }), "{absent}");
    }

    #[test]
    fn one_agent_listens_and_a_dead_ones_socket_is_replaced() {
        let folder = Folder::new("local-bind");
        drop(UnixListener::bind(folder.socket()).expect("it is ours"));
        let server = folder.server();
        assert!(ask(&folder.socket(), "llm").is_ok());
        let second = Server::start(&folder.socket(), Arc::new(answer)).expect_err("one is there");
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
        let mode = fs::metadata(folder.socket()).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o666);
        drop(server);
        assert!(!folder.socket().exists());
        assert_eq!(fs::read_dir(&folder.0).expect("a folder").count(), 0);
    }
}
