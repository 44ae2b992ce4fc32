//! The view of `/sys/class/infiniband` for programs that read it instead of calling verbs.
//!
//! It is a tree of ordinary files with the contents that the kernel would have for these devices.
//! It is below `$DQUANT_SYSFS`, `$XDG_RUNTIME_DIR`, the temporary directory or `/dev/shm`, in a
//! private directory of the user ([`nic::private`]), under a name derived from its contents:
//! processes that see the same interfaces share one, and it is created atomically.
//! `exports/interpose.rs` redirects programs there.

use std::ffi::{CStr, CString, OsStr};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{fs, io};

use nic::private;
use rustix::io::Errno;

use super::gid;
use super::query;
use crate::abi::DEFAULT_PKEY;
use crate::engine::netdev::{self, Interface};
use crate::process::errors::{Outcome, errno_of_io, say};
use crate::process::fork::ForkLock;
use crate::process::settings;

/// Where programs look for devices.
pub(crate) const CLASS: &str = "/sys/class/infiniband";

/// Prefix of device nodes.
const NODE: &str = "/dev/infiniband/uverbs";

/// The file, below a device, from which programs learn where it is. Some abort without it.
const NUMA_NODE: &[u8] = b"/device/numa_node";

/// What stands in for it. A directory `device` of our own would look like a place in the PCI tree.
const OUR_NUMA_NODE: &[u8] = b"/numa_node";

/// The tree's counterpart of `/sys/class`; null until it has been created, or if it cannot be.
static ROOT: AtomicPtr<CString> = AtomicPtr::new(std::ptr::null_mut());

/// The contents that [`ROOT`] was created for.
static MADE_FOR: ForkLock<Option<u64>> = ForkLock::new(None);

/// In a child: the tree is the same.
///
/// # Safety
/// As [`ForkLock::renew`].
pub(crate) unsafe fn renew() {
    // SAFETY: as the caller promises.
    unsafe { MADE_FOR.renew(None, |_| ()) };
}

/// Creates the tree for these interfaces, unless it exists.
pub(crate) fn prepare(interfaces: &[Interface]) {
    let mut files: Vec<(String, Entry)> = interfaces.iter().flat_map(device_files).collect();
    files.push(("infiniband_verbs/abi_version".to_owned(), Entry::File("6\n".to_owned())));
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let contents = hasher.finish();
    let mut made_for = MADE_FOR.lock();
    if *made_for == Some(contents) && is_there() {
        return;
    }
    let made =
        make(&files, contents).and_then(|root| Ok(CString::new(root.into_os_string().into_vec())?));
    match made {
        Ok(root) => {
            // The previous name, if any, stays: another thread may be reading it.
            ROOT.store(Box::into_raw(Box::new(root)), Ordering::Release);
            *made_for = Some(contents);
        }
        // Without a tree programs find no view, as before this call.
        Err(error) => complain(&error),
    }
}

/// Whether the tree still exists: `dquant run` removes old ones.
fn is_there() -> bool {
    // SAFETY: null, or a name that was leaked for good.
    let root = unsafe { ROOT.load(Ordering::Acquire).as_ref() };
    root.is_some_and(|root| Path::new(OsStr::from_bytes(root.as_bytes())).is_dir())
}

/// Reports once per process why there is no tree.
fn complain(error: &io::Error) {
    static SAID: Once = Once::new();
    let hint = format!("name a directory of your own in {}", settings::SYSFS);
    SAID.call_once(|| say(format_args!("no view of {CLASS}: {error}"), Some(&hint)));
}

/// The real location of `path`, which belongs to the view.
pub(crate) fn redirect(path: &[u8]) -> Option<CString> {
    if !is_there() {
        prepare(&netdev::interfaces());
    }
    let root = ROOT.load(Ordering::Acquire);
    // SAFETY: null, or a name that was leaked for good.
    let root = unsafe { root.as_ref() }?;
    let below = below(path)?;
    let plain = [root.as_bytes(), b"/", below].concat();
    // Virtual interfaces have no parent device, and some parents, as virtio's, have no such file.
    let missing = below.ends_with(NUMA_NODE) && !Path::new(OsStr::from_bytes(&plain)).exists();
    let ours = || plain.strip_suffix(NUMA_NODE).map(|device| [device, OUR_NUMA_NODE].concat());
    CString::new(if missing { ours()? } else { plain }).ok()
}

#[derive(Hash)]
enum Entry {
    File(String),
    Link(PathBuf),
}

/// The files of one device, by path below `class`.
fn device_files(interface: &Interface) -> Vec<(String, Entry)> {
    let name = interface.device_name();
    let mut files = Vec::new();
    let mut file = |path: String, text: String| {
        files.push((format!("infiniband/{name}/{path}"), Entry::File(text + "\n")));
    };
    file("node_type".to_owned(), "1: CA".to_owned());
    file("node_desc".to_owned(), name.clone());
    file("fw_ver".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    file("hca_type".to_owned(), "dquant".to_owned());
    file("board_id".to_owned(), "dquant".to_owned());
    file("hw_rev".to_owned(), "0x0".to_owned());
    file("parent".to_owned(), interface.name.clone());
    file("uevent".to_owned(), format!("NAME={name}"));
    for path in ["node_guid", "sys_image_guid"] {
        file(path.to_owned(), groups(&interface.guid().to_be_bytes()));
    }
    port_files(interface, &mut file);
    let uverbs = format!("infiniband_verbs/uverbs{}", interface.index);
    files.push((format!("{uverbs}/ibdev"), Entry::File(format!("{name}\n"))));
    files.push((format!("{uverbs}/abi_version"), Entry::File("1\n".to_owned())));
    // Programs expect a character device that they may open. Nothing is read from it or written to
    // it.
    let node = Entry::Link(PathBuf::from("/dev/null"));
    files.push((format!("uverbs{}", interface.index), node));
    let parent = PathBuf::from(format!("/sys/class/net/{}/device", interface.name));
    let node = Entry::File(format!("{}\n", numa_node(&parent)));
    files.push((format!("infiniband/{name}/numa_node"), node));
    if parent.exists() {
        files.push((format!("infiniband/{name}/device"), Entry::Link(parent)));
    }
    files
}

/// The NUMA node of a device or of the nearest one above it that says so; -1 as the kernel says for
/// none.
fn numa_node(device: &Path) -> i32 {
    let whole = device.canonicalize().unwrap_or_default();
    let said = |dir: &Path| fs::read_to_string(dir.join("numa_node")).ok()?.trim().parse().ok();
    whole.ancestors().take_while(|dir| dir.starts_with("/sys/")).find_map(said).unwrap_or(-1)
}

fn port_files(interface: &Interface, file: &mut impl FnMut(String, String)) {
    let (width, speed) = query::width_and_speed(interface);
    let fixed = [
        ("state", "4: ACTIVE"),
        ("phys_state", "5: LinkUp"),
        ("link_layer", "Ethernet"),
        ("lid", "0x0"),
        ("sm_lid", "0x0"),
        ("sm_sl", "0"),
        ("lid_mask_count", "0"),
        ("cap_mask", "0x04010000"),
    ];
    for (path, text) in fixed {
        file(format!("ports/1/{path}"), text.to_owned());
    }
    file("ports/1/rate".to_owned(), rate(width, speed));
    file("ports/1/pkeys/0".to_owned(), format!("{DEFAULT_PKEY:#06x}"));
    for (index, &address) in interface.addresses.iter().enumerate() {
        // SAFETY: every bit pattern is 16 bytes.
        let raw = unsafe { gid::of_ip(address).raw };
        file(format!("ports/1/gids/{index}"), groups(&raw));
        file(format!("ports/1/gid_attrs/types/{index}"), "RoCE v2".to_owned());
        file(format!("ports/1/gid_attrs/ndevs/{index}"), interface.name.clone());
    }
}

fn rate(width: u8, speed: u8) -> String {
    let (lanes, name) = (if width == 2 { 4 } else { 1 }, ["SDR", "QDR", "EDR"]);
    let (tenths, name) = match speed {
        1 => (25, name[0]),
        4 => (100, name[1]),
        _ => (250, name[2]),
    };
    let total = tenths * lanes;
    match total % 10 {
        0 => format!("{} Gb/sec ({lanes}X {name})", total / 10),
        part => format!("{}.{part} Gb/sec ({lanes}X {name})", total / 10),
    }
}

/// Groups of four hexadecimal digits, as sysfs writes GUIDs and GIDs.
fn groups(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (index, pair) in bytes.chunks_exact(2).enumerate() {
        let separator = if index == 0 { "" } else { ":" };
        // Writing to a string does not fail.
        let _ = write!(text, "{separator}{:02x}{:02x}", pair[0], pair[1]);
    }
    text
}

fn make(files: &[(String, Entry)], contents: u64) -> io::Result<PathBuf> {
    let own = own_directory()?;
    let tree = own.join(format!("sys-{contents:016x}"));
    if tree.is_dir() {
        return Ok(tree);
    }
    let draft = own.join(format!("draft-{}-{contents:016x}", std::process::id()));
    fs::create_dir_all(draft.join("infiniband"))?;
    fs::create_dir_all(draft.join("infiniband_verbs"))?;
    for (path, entry) in files {
        let path = draft.join(path);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        match entry {
            Entry::File(text) => fs::write(&path, text)?,
            Entry::Link(target) => symlink(target, &path)?,
        }
    }
    if let Err(error) = fs::rename(&draft, &tree) {
        let _ = fs::remove_dir_all(&draft);
        // Another process may have been faster.
        return if tree.is_dir() { Ok(tree) } else { Err(error) };
    }
    Ok(tree)
}

/// The parents that the user's private directory may have.
fn bases() -> Vec<PathBuf> {
    std::env::var_os(settings::SYSFS).map_or_else(private::bases, |base| vec![base.into()])
}

/// The user's private directory, below the first parent that allows one.
fn own_directory() -> io::Result<PathBuf> {
    let mut why = io::Error::from(io::ErrorKind::NotFound);
    for base in bases() {
        match private::directory(&base) {
            Ok(own) => return Ok(own),
            Err(error) => {
                why = io::Error::new(error.kind(), format!("{}: {error}", base.display()));
            }
        }
    }
    Err(why)
}

/// The contents of a file below a sysfs directory, without the final line break.
pub(crate) fn read(dir: &CStr, file: &CStr) -> Outcome<Vec<u8>> {
    let mut path = [dir.to_bytes(), b"/", file.to_bytes()].concat();
    if is_ours(&path) {
        path = redirect(&path).ok_or(Errno::NOENT)?.into_bytes();
    }
    let bytes = fs::read(Path::new(OsStr::from_bytes(&path)));
    let bytes = bytes.map_err(|error| errno_of_io(&error))?;
    Ok(bytes.strip_suffix(b"\n").map_or(bytes.clone(), <[u8]>::to_vec))
}

/// Whether a path belongs to the view.
pub(crate) fn is_ours(path: &[u8]) -> bool {
    below(path).is_some()
}

/// The location in the tree of a path of the view: the classes themselves, the files below them,
/// and the nodes that programs look for before they open a device.
fn below(path: &[u8]) -> Option<&[u8]> {
    if path.starts_with(NODE.as_bytes()) {
        return Some(&path["/dev/infiniband/".len()..]);
    }
    let rest = path.strip_prefix(CLASS.as_bytes())?;
    let rest = rest.strip_prefix(b"_verbs").unwrap_or(rest);
    (rest.is_empty() || rest[0] == b'/').then(|| &path["/sys/class/".len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_class_and_what_is_below_is_ours() {
        for ours in [
            "/sys/class/infiniband",
            "/sys/class/infiniband/dq_lo/ports",
            "/sys/class/infiniband_verbs/x",
            "/dev/infiniband/uverbs3",
        ] {
            assert!(is_ours(ours.as_bytes()), "{ours}");
        }
        for other in
            ["/sys/class/infiniband_mad/x", "/sys/class/infinibandx", "/sys/class/net", "sys"]
        {
            assert!(!is_ours(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn rates_are_written_as_the_kernel_does() {
        assert_eq!(rate(1, 1), "2.5 Gb/sec (1X SDR)");
        assert_eq!(rate(2, 32), "100 Gb/sec (4X EDR)");
    }

    #[test]
    fn the_tree_is_made_once_and_read_through_the_library() {
        let interface = netdev::interface("lo").unwrap().unwrap();
        prepare(&[interface]);
        let dir = CString::new(format!("{CLASS}/dq_lo")).unwrap();
        assert_eq!(read(&dir, c"ports/1/gid_attrs/types/0").unwrap(), b"RoCE v2");
        assert_eq!(read(&dir, c"ports/1/gids/99"), Err(Errno::NOENT));
        // It has no parent, and nothing else of one.
        assert_eq!(read(&dir, c"device/numa_node").unwrap(), b"-1");
        assert_eq!(read(&dir, c"device/vendor"), Err(Errno::NOENT));
    }
}
