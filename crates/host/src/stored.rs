//! Folders as places that hold datasets: [`Root`] behind the seam of [`xio::opener`].
//!
//! What is opened and what is refused is decided in [`root`](crate::root). Here is how that is said
//! to those who do not know that it is a folder, and how descriptions of datasets are read.

use xio::disk::Change;
use xio::opener::{self, Identity, IoChoice, Listing, Opener, ReadError, Reason, Stored};

use crate::root::{OpenError, OpenFile, Root, Stamp};

impl Opener for Root {
    fn open(&self, name: &str, io: IoChoice) -> Result<Box<dyn Stored>, opener::OpenError> {
        Ok(Box::new(Root::open(self, name, io)?))
    }

    fn list(&self, limit: usize) -> Result<Listing, opener::OpenError> {
        Ok(Root::list(self, limit)?)
    }
}

impl From<OpenError> for opener::OpenError {
    fn from(error: OpenError) -> opener::OpenError {
        let reason = match error {
            OpenError::NotFound { .. } => Reason::NotFound,
            OpenError::Outside { .. } => Reason::Outside,
            OpenError::BadName { .. } => Reason::BadName,
            OpenError::NotRegular { .. } => Reason::NotFile,
            OpenError::Denied { .. } => Reason::Denied,
            OpenError::Root { .. } | OpenError::NoDirect { .. } | OpenError::System { .. } => {
                Reason::Failed
            }
        };
        opener::OpenError { reason, source: Box::new(error) }
    }
}

impl Stored for OpenFile {
    fn bytes(&self) -> u64 {
        self.size
    }

    fn identity(&self) -> Identity {
        identity(&self.stamp)
    }

    fn change(&self) -> Option<Change> {
        // A server of the network that has lost the file says so.
        Stamp::of(&self.fd).map_or(Some(Change::Removed), |now| self.stamp.change(&now))
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<usize, ReadError> {
        loop {
            match rustix::io::pread(&self.fd, &mut *into, offset) {
                Err(rustix::io::Errno::INTR) => {}
                read => return Ok(read?),
            }
        }
    }
}

/// Distinguishes a file from another one of the same name and length, and from itself after a
/// write.
fn identity(stamp: &Stamp) -> Identity {
    let Stamp { device: (major, minor), inode, bytes, changed: (seconds, nanoseconds), .. } =
        *stamp;
    // Not the time of modification: `cp -p` and `rsync -t` set it back.
    let parts = [inode, seconds as u64, nanoseconds, bytes];
    // FNV-1a over words: it has to detect changes, not resist an attacker.
    let mix = |hash: u64, part: &u64| (hash ^ part).wrapping_mul(0x0000_0100_0000_01b3);
    Identity {
        place: u64::from(major) << 32 | u64::from(minor),
        version: parts.iter().fold(0xcbf2_9ce4_8422_2325, mix),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_folder_says_the_same_through_the_seam() {
        let scratch = Scratch::new("stored");
        let bytes: Vec<u8> = (0..700_001_u32).map(|at| (at % 251) as u8).collect();
        fs::write(scratch.path().join("a.bin"), &bytes).expect("write");
        let root = Root::new(scratch.path()).expect("root");
        let place: &dyn Opener = &root;
        for choice in [IoChoice::Buffered, IoChoice::Auto] {
            let file = place.open("a.bin", choice).expect("open");
            assert_eq!((file.bytes(), file.change()), (700_001, None));
            for (offset, len) in [(0, 10), (4095, 2), (5, 500_000), (699_999, 9), (700_001, 1)] {
                let mut into = vec![0; len];
                let mut have = 0;
                while have < len {
                    match file.read_at(&mut into[have..], (offset + have) as u64).expect("read") {
                        0 => break,
                        read => have += read,
                    }
                }
                let end = (offset + len).min(bytes.len());
                assert!(into[..have] == bytes[offset..end], "{choice:?}: {offset}, {len}");
            }
        }
        let reason = |name| place.open(name, IoChoice::Auto).expect_err("refused").reason;
        assert_eq!(reason("../a.bin"), Reason::Outside);
        assert_eq!(reason("b.bin"), Reason::NotFound);
        assert_eq!(reason("/a.bin"), Reason::BadName);
        assert_eq!(place.list(9).expect("list").entries.len(), 1);
    }

    #[test]
    fn an_identity_changes_with_the_contents() {
        let scratch = Scratch::new("identity");
        let path = scratch.path().join("a.bin");
        fs::write(&path, "old").expect("write");
        let root = Root::new(scratch.path()).expect("root");
        let open = || Opener::open(&root, "a.bin", IoChoice::Buffered).expect("open");
        let (first, same) = (open(), open());
        assert_eq!(first.identity(), same.identity());
        fs::write(&path, "newer").expect("write");
        assert_ne!(first.identity(), open().identity());
        assert_eq!(first.change(), Some(Change::Written { len: 5 }));
        fs::remove_file(&path).expect("remove");
        assert_eq!(first.change(), Some(Change::Removed));
    }
}
