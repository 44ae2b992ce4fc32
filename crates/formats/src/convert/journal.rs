//! The folder of an unfinished output, and the journal that says how far it is.

use std::fs::{self, DirBuilder, File, Permissions, TryLockError};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Job;
use super::copy::{Progress, Saved};
use crate::error::Error;
use crate::manifest;
use crate::source::Source;
use crate::whole;
use crate::writer::WriteOptions;

/// Everything that decides the bytes of the output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    version: String,
    source: PathBuf,
    column: Option<String>,
    targets: Option<String>,
    loss_weights: Option<String>,
    /// Whether sequences are kept.
    sequences: bool,
    from: String,
    to: Option<String>,
    write: WriteOptions,
    eos: Option<u64>,
    split: Option<u64>,
    drop_empty: bool,
    /// Which documents are written; none when all are.
    choice: Option<String>,
    /// Name, length, inode, and time of change of every file of the source.
    files: Vec<(PathBuf, u64, u64, i64, i64)>,
}

impl Identity {
    pub(super) fn new(
        job: &Job,
        source: &dyn Source,
        choice: Option<String>,
    ) -> Result<Identity, Error> {
        let layout = source.layout();
        let mut files = Vec::with_capacity(layout.files.len());
        for name in &layout.files {
            let path = layout.folder.join(name);
            let found = fs::metadata(&path).map_err(Error::read(&path))?;
            let (inode, seconds, nanos) = (found.ino(), found.ctime(), found.ctime_nsec());
            files.push((name.clone(), found.len(), inode, seconds, nanos));
        }
        Ok(Identity {
            version: env!("CARGO_PKG_VERSION").into(),
            source: fs::canonicalize(&job.source).map_err(Error::read(&job.source))?,
            column: job.read.column.clone(),
            targets: job.read.targets.clone(),
            loss_weights: job.read.loss_weights.clone(),
            sequences: layout.targets,
            from: layout.dtype.name().into(),
            to: job.dtype.map(|dtype| dtype.name().into()),
            write: job.write.clone(),
            eos: job.eos.or(layout.manifest.as_ref().and_then(|manifest| manifest.eos)),
            split: job.split,
            drop_empty: job.drop_empty,
            choice,
            files,
        })
    }
}

#[derive(Serialize, Deserialize)]
struct Journal {
    identity: Identity,
    progress: Progress,
    writers: Saved,
}

/// A file of the output that is about to get its name.
#[derive(Serialize, Deserialize)]
struct Named {
    /// In the folder of the unfinished output.
    staged: PathBuf,
    /// Beside it.
    name: PathBuf,
    /// Which file it is, whatever its name.
    inode: u64,
}

/// The mode of a folder that only this user can enter.
const PRIVATE: u32 = 0o700;

/// How the name of that folder ends, and that of the file in it which lists the names that are
/// given.
const ENDING: &str = ".dquant-convert";
const NAMES: &str = "names.json";

/// The folder beside an output in which it is written. Only one run at a time has it.
pub(super) struct Staging {
    path: PathBuf,
    _lock: File,
}

impl Staging {
    /// Creates the folder, or takes the one that an earlier run has left. Whoever can open a folder
    /// can lock it, so it is closed to other users.
    pub(super) fn open(output: &Path) -> Result<Staging, Error> {
        let path = whole::beside(output, ENDING);
        match DirBuilder::new().mode(PRIVATE).create(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::write(&path)(error));
            }
            _ => {}
        }
        let lock = File::open(&path).map_err(Error::read(&path))?;
        // An earlier version may have left it open to others.
        let _ = lock.set_permissions(Permissions::from_mode(PRIVATE));
        match lock.try_lock() {
            Ok(()) => Ok(Staging { path, _lock: lock }),
            Err(TryLockError::WouldBlock) => {
                let why = "is being written by another run";
                Err(Error::refused(output, why, "wait for it, or choose another name"))
            }
            Err(TryLockError::Error(error)) => Err(Error::write(&path)(error)),
        }
    }

    /// Gives files their names, one after the other: those in the folder, and those of the output.
    /// It is noted first, so that [`recall`](Staging::recall) takes them back of a run that ends in
    /// between.
    pub(super) fn name(&self, files: &[(PathBuf, PathBuf)]) -> Result<(), Error> {
        let named = |(staged, output): &(PathBuf, PathBuf)| {
            let found = fs::metadata(staged).map_err(Error::read(staged))?;
            let relative = staged.strip_prefix(&self.path).unwrap_or(staged);
            let name = output.file_name().unwrap_or_default();
            Ok(Named { staged: relative.into(), name: name.into(), inode: found.ino() })
        };
        let named = files.iter().map(named).collect::<Result<Vec<_>, _>>()?;
        let path = self.path.join(NAMES);
        let text = serde_json::to_vec(&named).map_err(|error| Error::write(&path)(error.into()))?;
        whole::write(&path, &text)?;
        files.iter().try_for_each(|(staged, output)| whole::rename(staged, output))
    }

    /// Takes back what a run that was killed while it named its files had named: the same command
    /// then goes on, where it would find an output that exists. Files that were put in their place
    /// since then stay.
    pub(super) fn recall(output: &Path) -> Result<(), Error> {
        let path = whole::beside(output, ENDING).join(NAMES);
        if !path.is_file() {
            return Ok(());
        }
        let staging = Staging::open(output)?;
        let text = fs::read(&path).map_err(Error::read(&path))?;
        let named: Vec<Named> = serde_json::from_slice(&text).unwrap_or_default();
        for Named { staged, name, inode } in named.iter().rev() {
            let (staged, name) = (staging.path.join(staged), output.with_file_name(name));
            let is_it = fs::symlink_metadata(&name).is_ok_and(|found| found.ino() == *inode);
            if is_it && !staged.exists() {
                whole::rename(&name, &staged)?;
            }
        }
        // That of a folder is written again.
        let _ = fs::remove_file(staging.data().join(manifest::IN_FOLDER));
        fs::remove_file(&path).map_err(Error::write(&path))
    }

    /// The files of the output.
    pub(super) fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    /// Files that are not part of it.
    pub(super) fn scratch(&self) -> PathBuf {
        self.path.join("scratch")
    }

    fn journal(&self) -> PathBuf {
        self.path.join("journal.json")
    }

    /// Whether a later run can go on from what is in the folder.
    pub(super) fn can_go_on(&self) -> bool {
        self.journal().is_file() || self.path.join(NAMES).is_file()
    }

    /// How far an earlier run of the same job is.
    pub(super) fn load(&self, identity: &Identity) -> Option<(Progress, Saved)> {
        let text = fs::read(self.journal()).ok()?;
        let journal: Journal = serde_json::from_slice(&text).ok()?;
        (journal.identity == *identity).then_some((journal.progress, journal.writers))
    }

    /// Notes how far this run is, when the files are on the disk.
    pub(super) fn store(
        &self,
        identity: &Identity,
        progress: &Progress,
        writers: Saved,
    ) -> Result<(), Error> {
        let path = self.journal();
        let journal = Journal { identity: identity.clone(), progress: *progress, writers };
        let text =
            serde_json::to_vec(&journal).map_err(|error| Error::write(&path)(error.into()))?;
        // New files of the output have to be found again, too.
        whole::sync_folder_of(&self.data().join("any"))?;
        whole::write(&path, &text)
    }

    /// Removes what an earlier run has left.
    pub(super) fn clear(&self) -> Result<(), Error> {
        let journal = self.journal();
        if journal.exists() {
            fs::remove_file(&journal).map_err(Error::write(&journal))?;
        }
        for folder in [self.data(), self.scratch()] {
            if folder.exists() {
                fs::remove_dir_all(&folder).map_err(Error::write(&folder))?;
            }
            fs::create_dir(&folder).map_err(Error::write(&folder))?;
        }
        Ok(())
    }

    /// Removes the folder.
    pub(super) fn remove(&self) {
        // The name says that it is unfinished; the next run clears it.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").mode() & 0o777
    }

    #[test]
    fn other_users_cannot_lock_what_is_being_written() {
        let folder = std::env::temp_dir().join(format!("dquant-staging-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a temporary folder");
        let output = folder.join("out.npy");
        let path = whole::beside(&output, ENDING);
        drop(Staging::open(&output).expect("nobody has it"));
        assert_eq!(mode(&path), PRIVATE);
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("ours");
        let staging = Staging::open(&output).expect("nobody has it");
        assert_eq!(mode(&path), PRIVATE);
        assert!(Staging::open(&output).is_err());
        drop(staging);
        let _ = fs::remove_dir_all(&folder);
    }
}
