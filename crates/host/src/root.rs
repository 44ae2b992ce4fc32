//! Files that a target serves: those below one directory, and nothing else on the machine.
//!
//! Names come from the network (C7). The kernel resolves them with `openat2` beneath the directory,
//! so `..`, absolute names and symbolic links that lead outside are refused in any form, even
//! during concurrent renames; no path is checked as text first and opened later. Only regular files
//! are opened. The file type is checked before a file is opened for reading, because opening a
//! device or a pipe can have effects.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, StatxFlags, fstat, open, openat, openat2,
    statat, statx,
};
use rustix::io::Errno;
use thiserror::Error;
use xio::disk::{Change, DIRECT_ALIGN};
pub use xio::opener::{Entry, IoChoice, Listing};

/// Longest name that is accepted.
pub const MAX_NAME_BYTES: usize = 4095;

/// Deepest directory that a listing enters.
pub const MAX_LIST_DEPTH: usize = 16;

/// Most directory entries that a listing examines, however many it returns.
pub const MAX_LIST_VISITS: usize = 1 << 20;

/// How often a lookup is retried that a concurrent rename has disturbed.
const MAX_RACES: u32 = 32;

/// Whether reads of a file go through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// From the device straight into registered memory (O_DIRECT).
    Direct,
    /// Through the page cache, with one more copy by the CPU.
    Buffered,
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoMode::Direct => "direct",
            IoMode::Buffered => "buffered",
        })
    }
}

/// Why a root could not be used, or one of its names not opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The directory itself.
    #[error("cannot serve directory {}: {source}", .path.display())]
    Root {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Empty, too long, absolute, or with a zero byte.
    #[error("file name {name:?} {why}")]
    BadName {
        /// The name, cut to a printable length.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The name leads out of the directory.
    #[error("file {name:?} is outside the served directory: {how}")]
    Outside {
        /// The name.
        name: String,
        /// How it leads outside.
        how: &'static str,
    },
    /// Nothing there.
    #[error("file {name:?} does not exist")]
    NotFound {
        /// The name.
        name: String,
    },
    /// A directory, device, pipe or socket.
    #[error("{name:?} is {kind}, not a regular file")]
    NotRegular {
        /// The name.
        name: String,
        /// What it is.
        kind: &'static str,
    },
    /// Permissions.
    #[error("file {name:?}: permission denied")]
    Denied {
        /// The name.
        name: String,
    },
    /// Direct I/O was demanded.
    #[error("file {name:?} cannot be read directly: {why}; hint: allow buffered reads")]
    NoDirect {
        /// The name.
        name: String,
        /// Why.
        why: String,
    },
    /// Any other error.
    #[error("file {name:?}: {source}")]
    System {
        /// The name.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The system's record of a file's last change. Two that are equal do not prove that the file is
/// the same: a program that has mapped it may write without a new one, and times have a resolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Device of the file system: major and minor number.
    pub device: (u32, u32),
    /// Inode.
    pub inode: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Time of the last change of contents or attributes: seconds and nanoseconds. No program can
    /// set it back.
    pub changed: (i64, u64),
    /// Time of the last change of contents.
    pub modified: (i64, u64),
    /// Names of the file; 0 after it was removed or another took its place.
    pub names: u64,
}

impl Stamp {
    /// The record of an open file, as this machine knows it: a file system of the network is not
    /// asked.
    ///
    /// # Errors
    /// When the file is lost.
    pub fn of(fd: impl AsFd) -> io::Result<Stamp> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = statx(fd, c"", flags, StatxFlags::BASIC_STATS)?;
        Ok(Stamp {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            bytes: stat.stx_size,
            changed: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec.into()),
            modified: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec.into()),
            names: stat.stx_nlink.into(),
        })
    }

    /// How a file with this record has changed, if its record is `now` another one.
    pub fn change(&self, now: &Stamp) -> Option<Change> {
        let same = |stamp: &Stamp| (stamp.inode, stamp.bytes, stamp.changed, stamp.modified);
        match now.names {
            _ if same(self) == same(now) => None,
            0 => Some(Change::Removed),
            _ => Some(Change::Written { len: now.bytes }),
        }
    }
}

/// A file opened for reading.
#[derive(Debug)]
pub struct OpenFile {
    /// To be passed to [`UringDisk::add_file`](crate::disk::UringDisk::add_file).
    pub fd: OwnedFd,
    /// Length in bytes.
    pub size: u64,
    /// Its record when it was opened.
    pub stamp: Stamp,
    /// How it was opened.
    pub mode: IoMode,
    /// Why not directly, if direct reads were preferred.
    pub why_buffered: Option<String>,
}

/// A directory whose files are served.
#[derive(Debug)]
pub struct Root {
    dir: OwnedFd,
    path: PathBuf,
}

impl Root {
    /// Opens the directory. It stays the same one even when its name changes.
    pub fn new(path: impl AsRef<Path>) -> Result<Root, OpenError> {
        let path = path.as_ref().to_owned();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Looking up `.` needs the right to enter the folder, which opening it by its path does
        // not.
        let opened = open(&path, flags, Mode::empty());
        match opened.and_then(|dir| openat(&dir, ".", flags, Mode::empty())) {
            Ok(dir) => Ok(Root { dir, path }),
            Err(errno) => Err(OpenError::Root { path, source: errno.into() }),
        }
    }

    /// The directory's name when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a regular file below the root for reading.
    pub fn open(&self, name: &str, choice: IoChoice) -> Result<OpenFile, OpenError> {
        check_name(name)?;
        let found = self.beneath(name, OFlags::PATH)?;
        require_regular(name, &found)?;
        match choice {
            IoChoice::Buffered => self.buffered(name, None),
            IoChoice::Direct => {
                self.direct(name)?.map_err(|why| OpenError::NoDirect { name: shown(name), why })
            }
            IoChoice::Auto => match self.direct(name)? {
                Ok(file) => Ok(file),
                Err(why) => self.buffered(name, Some(why)),
            },
        }
    }

    /// At most `limit` of the regular files below the root, no deeper than [`MAX_LIST_DEPTH`] and
    /// after at most [`MAX_LIST_VISITS`] entries. Symbolic links are not followed.
    pub fn list(&self, limit: usize) -> Result<Listing, OpenError> {
        let mut listing = Listing::default();
        let mut visits = 0;
        let mut pending = vec![(String::new(), 0)];
        while let Some((directory, depth)) = pending.pop() {
            let dir = match self.open_dir(&directory) {
                Ok(dir) => dir,
                Err(error) if depth == 0 => return Err(error),
                Err(_) => {
                    listing.skipped += 1;
                    continue;
                }
            };
            for entry in dir.flatten().filter(|entry| !is_dots(entry.file_name())) {
                visits += 1;
                if listing.entries.len() >= limit || visits > MAX_LIST_VISITS {
                    listing.truncated = true;
                    pending.clear();
                    break;
                }
                self.visit(&directory, entry.file_name(), depth, &mut listing, &mut pending);
            }
        }
        listing.entries.sort();
        Ok(listing)
    }

    /// Classifies one directory entry: served, entered later, or skipped.
    fn visit(
        &self,
        directory: &str,
        entry: &CStr,
        depth: usize,
        listing: &mut Listing,
        pending: &mut Vec<(String, usize)>,
    ) {
        let name = entry.to_str().ok().map(|name| format!("{directory}{name}"));
        let stat = name
            .as_deref()
            .and_then(|name| statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).ok());
        let (Some(name), Some(stat)) = (name, stat) else {
            listing.skipped += 1;
            return;
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                listing.entries.push(Entry { name, size: stat.st_size.max(0) as u64 });
            }
            FileType::Directory if depth < MAX_LIST_DEPTH => {
                pending.push((format!("{name}/"), depth + 1));
            }
            FileType::Directory => listing.truncated = true,
            _ => listing.skipped += 1,
        }
    }

    fn open_dir(&self, directory: &str) -> Result<Dir, OpenError> {
        let name = if directory.is_empty() { "." } else { directory };
        let fd = self.beneath(name, OFlags::RDONLY | OFlags::DIRECTORY)?;
        Dir::new(fd).map_err(|errno| refusal(name, errno))
    }

    fn buffered(&self, name: &str, why_buffered: Option<String>) -> Result<OpenFile, OpenError> {
        let fd = self.beneath(name, OFlags::RDONLY)?;
        let stamp = require_regular(name, &fd)?;
        Ok(OpenFile { fd, size: stamp.bytes, stamp, mode: IoMode::Buffered, why_buffered })
    }

    /// The file, which was opened with O_DIRECT, or why the file system does not support that.
    /// Until a disk takes it over it is read through the page cache: what describes a dataset is
    /// read again and again, in pieces smaller than a block.
    fn direct(&self, name: &str) -> Result<Result<OpenFile, String>, OpenError> {
        let fd = match self.resolve(name, OFlags::RDONLY | OFlags::DIRECT) {
            Ok(fd) => fd,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                return Ok(Err(String::from("the file system does not support O_DIRECT")));
            }
            Err(errno) => return Err(refusal(name, errno)),
        };
        let stamp = require_regular(name, &fd)?;
        let (size, mode, why_buffered) = (stamp.bytes, IoMode::Direct, None);
        let usable = direct_alignment(&fd)
            .and_then(|()| set_direct(&fd, false).map_err(|source| source.to_string()));
        Ok(usable.map(|()| OpenFile { fd, size, stamp, mode, why_buffered }))
    }

    fn beneath(&self, name: &str, flags: OFlags) -> Result<OwnedFd, OpenError> {
        self.resolve(name, flags).map_err(|errno| refusal(name, errno))
    }

    fn resolve(&self, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        // Does not block on a pipe or acquire a controlling terminal, should the name change its
        // meaning between check and open. O_PATH takes neither flag.
        let careful = OFlags::NOCTTY | OFlags::NONBLOCK;
        let careful = if flags.contains(OFlags::PATH) { OFlags::empty() } else { careful };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut races = 0;
        loop {
            let flags = flags | careful | OFlags::CLOEXEC;
            match openat2(&self.dir, name, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) if races < MAX_RACES => races += 1,
                opened => return opened.inspect(make_blocking),
            }
        }
    }
}

/// An io_uring would fail on a non-blocking file instead of waiting for the device.
fn make_blocking(fd: &OwnedFd) {
    if let Ok(flags) = rustix::fs::fcntl_getfl(fd)
        && flags.contains(OFlags::NONBLOCK)
    {
        // A regular file accepts this; on anything else it fails and the file is refused next.
        let _ = rustix::fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK);
    }
}

/// Whether further reads of a file bypass the page cache.
pub(crate) fn set_direct(fd: &OwnedFd, direct: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(fd)?;
    flags.set(OFlags::DIRECT, direct);
    Ok(rustix::fs::fcntl_setfl(fd, flags)?)
}

fn check_name(name: &str) -> Result<(), OpenError> {
    let why = if name.is_empty() {
        "is empty"
    } else if name.len() > MAX_NAME_BYTES {
        "is too long"
    } else if name.contains('\0') {
        "contains a zero byte"
    } else if name.starts_with('/') {
        "is absolute; names are relative to the served directory"
    } else {
        return Ok(());
    };
    Err(OpenError::BadName { name: shown(name), why })
}

/// The name for an error message: the peer that sent it determines neither its length nor its
/// characters.
fn shown(name: &str) -> String {
    const SHOWN_CHARS: usize = 200;
    name.chars().take(SHOWN_CHARS).collect()
}

fn refusal(name: &str, errno: Errno) -> OpenError {
    let name_shown = shown(name);
    match errno {
        Errno::XDEV => OpenError::Outside { name: name_shown, how: way_out(name) },
        Errno::LOOP => {
            let how = "symbolic links form a loop, or lead through /proc";
            OpenError::Outside { name: name_shown, how }
        }
        Errno::NOENT | Errno::NOTDIR => OpenError::NotFound { name: name_shown },
        Errno::NAMETOOLONG => OpenError::BadName { name: name_shown, why: "is too long" },
        Errno::ACCESS | Errno::PERM => OpenError::Denied { name: name_shown },
        errno => OpenError::System { name: name_shown, source: errno.into() },
    }
}

/// The kind of escape that the kernel has refused: by `..` in the name, or else by a link.
fn way_out(name: &str) -> &'static str {
    let mut depth = 0i32;
    for part in name.split('/').filter(|part| !part.is_empty() && *part != ".") {
        depth += if part == ".." { -1 } else { 1 };
        if depth < 0 {
            return "\"..\" climbs above it";
        }
    }
    "a symbolic link leads out of it"
}

/// The record of a regular file; anything else is refused.
fn require_regular(name: &str, fd: &OwnedFd) -> Result<Stamp, OpenError> {
    let stat = fstat(fd).map_err(|errno| refusal(name, errno))?;
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let system = |source| OpenError::System { name: shown(name), source };
            return Stamp::of(fd).map_err(system);
        }
        FileType::Directory => "a directory",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "something else",
    };
    Err(OpenError::NotRegular { name: shown(name), kind })
}

/// Whether our alignment of direct reads suits the file system. Kernels before 6.1 do not report
/// it; then the first read shows.
fn direct_alignment(fd: &OwnedFd) -> Result<(), String> {
    let Ok(stat) = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(());
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(());
    }
    let needed = u64::from(stat.stx_dio_mem_align.max(stat.stx_dio_offset_align));
    match needed {
        0 => Err(String::from("the file system says that this file cannot be read directly")),
        n if n > DIRECT_ALIGN => Err(format!("the device wants blocks of {n} bytes")),
        _ => Ok(()),
    }
}

fn is_dots(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::scratch::Scratch;

    /// `root/` with files and links, and a secret beside it.
    fn tree() -> (Scratch, Root) {
        let scratch = Scratch::new("root");
        let at = |name: &str| scratch.path().join(name);
        fs::create_dir_all(at("root/sub/deep")).expect("mkdir");
        fs::create_dir(at("outside")).expect("mkdir");
        fs::write(at("secret"), "secret").expect("write");
        fs::write(at("root/a"), "aaaa").expect("write");
        fs::write(at("root/sub/b"), "bb").expect("write");
        fs::write(at("root/sub/deep/c"), "c").expect("write");
        symlink("a", at("root/inside")).expect("symlink");
        symlink("../a", at("root/sub/up")).expect("symlink");
        symlink("../secret", at("root/escape")).expect("symlink");
        symlink(at("secret"), at("root/absolute")).expect("symlink");
        symlink(at("outside"), at("root/dir")).expect("symlink");
        symlink("/proc/self/root", at("root/magic")).expect("symlink");
        symlink("circle", at("root/circle")).expect("symlink");
        let root = Root::new(at("root")).expect("root");
        (scratch, root)
    }

    fn text(file: &OpenFile) -> Vec<u8> {
        let mut bytes = vec![0; file.size as usize];
        rustix::io::pread(&file.fd, &mut bytes[..], 0).expect("pread");
        bytes
    }

    fn refused(root: &Root, name: &str) -> OpenError {
        root.open(name, IoChoice::Auto).expect_err(name)
    }

    #[test]
    fn files_below_the_root_open() {
        let (_scratch, root) = tree();
        for (name, content) in [
            ("a", "aaaa"),
            ("./a", "aaaa"),
            ("sub/b", "bb"),
            ("sub//deep/c", "c"),
            ("sub/../a", "aaaa"),
            ("inside", "aaaa"),
            ("sub/up", "aaaa"),
        ] {
            let file = root.open(name, IoChoice::Buffered).expect(name);
            assert_eq!((file.mode, text(&file)), (IoMode::Buffered, content.into()), "{name}");
            let flags = rustix::fs::fcntl_getfl(&file.fd).expect("flags");
            assert!(!flags.contains(OFlags::NONBLOCK), "{name}");
        }
    }

    #[test]
    fn every_way_out_is_refused_with_its_reason() {
        let (_scratch, root) = tree();
        for name in ["../secret", "..", "sub/../../secret", "a/../../secret"] {
            let error = refused(&root, name);
            let climbs = |how: &str| how.contains("..");
            let named = matches!(error, OpenError::Outside { how, .. } if climbs(how));
            // "a" is a file, so a path through it does not exist.
            assert!(named || name.starts_with("a/"), "{name}: {error}");
        }
        for name in ["escape", "absolute", "dir/x", "magic/etc/passwd"] {
            let error = refused(&root, name);
            let by_link = |how: &str| how.contains("symbolic link");
            assert!(matches!(error, OpenError::Outside { how, .. } if by_link(how)), "{name}");
        }
        assert!(matches!(refused(&root, "circle"), OpenError::Outside { .. }));
        assert!(matches!(refused(&root, "/etc/passwd"), OpenError::BadName { .. }));
    }

    #[test]
    fn bad_names_are_refused() {
        let (_scratch, root) = tree();
        let long = "x".repeat(5000);
        for name in ["", "a\0b", long.as_str()] {
            let error = refused(&root, name);
            assert!(matches!(error, OpenError::BadName { .. }), "{error}");
            assert!(error.to_string().len() < 400);
        }
        let component = "y".repeat(300);
        assert!(matches!(refused(&root, &component), OpenError::BadName { .. }));
        assert!(matches!(refused(&root, "nothing"), OpenError::NotFound { .. }));
        assert!(matches!(refused(&root, "a/b"), OpenError::NotFound { .. }));
    }

    #[test]
    fn only_regular_files_open() {
        let (scratch, root) = tree();
        let fifo = scratch.path().join("root/fifo");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, mode, 0).expect("mkfifo");
        let _listener = std::os::unix::net::UnixListener::bind(scratch.path().join("root/sock"));
        for (name, kind) in [("sub", "a directory"), ("fifo", "a pipe"), ("sock", "a socket")] {
            match refused(&root, name) {
                OpenError::NotRegular { kind: found, .. } => assert_eq!(found, kind),
                other => panic!("{name}: {other}"),
            }
        }
    }

    #[test]
    fn direct_files_say_so_and_buffered_ones_say_why() {
        let (_scratch, root) = tree();
        let file = root.open("a", IoChoice::Auto).expect("open");
        assert_eq!(file.mode == IoMode::Buffered, file.why_buffered.is_some());
        match root.open("a", IoChoice::Direct) {
            Ok(direct) => assert_eq!((direct.mode, file.mode), (IoMode::Direct, IoMode::Direct)),
            Err(error) => assert!(matches!(error, OpenError::NoDirect { .. }), "{error}"),
        }
        // /proc does not support O_DIRECT.
        let proc = Root::new("/proc/self").expect("/proc");
        let stat = proc.open("status", IoChoice::Auto).expect("open");
        assert!(stat.mode == IoMode::Buffered && stat.why_buffered.is_some());
        let error = proc.open("status", IoChoice::Direct).expect_err("no O_DIRECT");
        assert!(matches!(error, OpenError::NoDirect { .. }), "{error}");
    }

    #[test]
    fn listing_is_sorted_bounded_and_follows_nothing() {
        let (_scratch, root) = tree();
        let listing = root.list(100).expect("list");
        let names: Vec<_> = listing.entries.iter().map(|e| (e.name.as_str(), e.size)).collect();
        assert_eq!(names, [("a", 4), ("sub/b", 2), ("sub/deep/c", 1)]);
        assert_eq!((listing.truncated, listing.skipped), (false, 7));
        let few = root.list(2).expect("list");
        assert!(few.truncated && few.entries.len() == 2);
    }

    #[test]
    fn deep_trees_are_cut() {
        let scratch = Scratch::new("deep");
        let mut path = scratch.path().to_owned();
        for _ in 0..MAX_LIST_DEPTH + 2 {
            path.push("d");
            fs::create_dir(&path).expect("mkdir");
            fs::write(path.join("f"), "").expect("write");
        }
        let listing = Root::new(scratch.path()).expect("root").list(100).expect("list");
        assert!(listing.truncated);
        assert_eq!(listing.entries.len(), MAX_LIST_DEPTH);
    }

    #[test]
    fn a_root_that_is_no_directory_is_refused() {
        let (scratch, _root) = tree();
        for name in ["secret", "nowhere"] {
            let error = Root::new(scratch.path().join(name)).expect_err(name);
            assert!(error.to_string().contains(name));
        }
    }
}
