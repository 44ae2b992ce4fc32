//! The virtual environment of the peers: made once below the target folder, from PyPI.
//!
//! A peer that cannot be installed is skipped, and the reason is part of the result. Libraries are
//! installed without their dependencies, most of which they do not use here; PyTorch is the
//! machine's own, if there is one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{self, Failure};

/// A peer from PyPI.
struct Library {
    name: &'static str,
    module: &'static str,
    packages: &'static [&'static str],
}

const LIBRARIES: &[Library] = &[
    Library {
        name: "litdata",
        module: "litdata",
        packages: &[
            "litdata==0.2.76",
            "lightning-utilities",
            "packaging",
            "tifffile",
            "obstore",
            "filelock",
            "requests",
            "typing-extensions",
        ],
    },
    Library {
        name: "mds",
        module: "streaming",
        packages: &[
            "mosaicml-streaming==0.13.0",
            "zstd",
            "brotli",
            "python-snappy",
            "cramjam",
            "pyyaml",
            "xxhash",
            "tqdm",
            "requests",
            "catalogue",
            "pillow",
            "urllib3",
            "idna",
            "charset-normalizer",
            "certifi",
            "filelock",
            "packaging",
        ],
    },
    Library {
        name: "webdataset",
        module: "webdataset",
        packages: &["webdataset==1.0.2", "braceexpand", "pyyaml"],
    },
];

/// PyTorch before 2.3 is built for numpy 1, so that is what all cases use.
const NUMPY: &str = "numpy>=1.26,<2";

/// What was installed, and what was not.
#[derive(Debug)]
pub(super) struct Environment {
    pub(super) python: PathBuf,
    /// Why a library is missing, by its name.
    missing: BTreeMap<&'static str, String>,
}

impl Environment {
    /// Installs what can be installed.
    ///
    /// # Errors
    /// When there is no Python 3.11 with `venv`, or neither numpy nor maturin can be had.
    pub(super) fn make(folder: &Path) -> Result<Environment, Failure> {
        let (base, has_torch) = interpreter()?;
        let python = folder.join("venv/bin/python");
        if !shell::answers(&python.to_string_lossy(), &["-m", "pip", "--version"]) {
            let mut venv = Command::new(base);
            venv.args(["-m", "venv", "--clear", "--system-site-packages"]).arg(folder.join("venv"));
            shell::run(&mut venv)?;
        }
        let mut made = Environment { python, missing: BTreeMap::new() };
        made.pip("basics", &[NUMPY, "maturin>=1.9,<2"])
            .map_err(|failure| Failure::usage(format!("PyPI cannot be used: {failure}")))?;
        if !has_torch {
            made.missing.insert("torch", "no PyTorch: install python3-torch of the system".into());
        }
        for library in LIBRARIES.iter().filter(|_| has_torch) {
            let ready = made.pip(library.name, library.packages);
            if let Err(why) = ready.and_then(|()| made.import(library)) {
                made.missing.insert(library.name, why.to_string());
            }
        }
        Ok(made)
    }

    /// Why something is missing; `None` if it is there.
    pub(super) fn lacks(&self, needs: &[&'static str]) -> Option<&str> {
        needs.iter().find_map(|need| self.missing.get(need)).map(String::as_str)
    }

    /// The name of each library that is there.
    pub(super) fn libraries(&self) -> impl Iterator<Item = &'static str> {
        let has_torch = !self.missing.contains_key("torch");
        let names = LIBRARIES.iter().map(|library| library.name).filter(move |_| has_torch);
        names.filter(|name| !self.missing.contains_key(name))
    }

    /// Declares a library unusable.
    pub(super) fn lose(&mut self, library: &'static str, why: String) {
        self.missing.insert(library, why);
    }

    /// Installs packages unless that has been done.
    fn pip(&self, name: &str, packages: &[&str]) -> Result<(), Failure> {
        // Beside the interpreter, so that a new environment has none.
        let mark = self.python.with_file_name(format!("installed-{name}"));
        let wanted = packages.join("\n");
        if fs::read_to_string(&mark).is_ok_and(|found| found == wanted) {
            return Ok(());
        }
        let mut pip = Command::new(&self.python);
        shell::run(pip.args(["-m", "pip", "install", "--quiet", "--no-deps"]).args(packages))?;
        fs::write(&mark, wanted)
            .map_err(|error| Failure::usage(format!("{}: {error}", mark.display())))
    }

    fn import(&self, library: &Library) -> Result<(), Failure> {
        let program =
            format!("import corpus; corpus.import_libraries(); import {}", library.module);
        let mut python = Command::new(&self.python);
        shell::run(python.args(["-c", &program]).env("PYTHONPATH", super::scripts()))
    }
}

/// A Python of version 3.11 or later, one with PyTorch if there is any, and whether it has PyTorch.
fn interpreter() -> Result<(&'static str, bool), Failure> {
    let answers = |python: &&str, code: &str| shell::answers(python, &["-c", code]);
    let recent = |python: &&str| answers(python, "import sys; assert sys.version_info >= (3, 11)");
    let found: Vec<&str> = ["python3", "/usr/bin/python3"].into_iter().filter(recent).collect();
    let with_torch = found.iter().find(|python| answers(python, "import torch"));
    match (with_torch, found.first()) {
        (Some(python), _) => Ok((python, true)),
        (None, Some(python)) => Ok((python, false)),
        (None, None) => Err(Failure::usage("no python3 of version 3.11 or later")),
    }
}
