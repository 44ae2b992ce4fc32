//! The host process: `errno` and stderr, descriptors that programs close, forks, signal masks,
//! settings from the environment. Nothing of devices, engines and verbs objects may enter.

pub(crate) mod counter;
pub(crate) mod descriptor;
pub(crate) mod errors;
pub(crate) mod fork;
pub(crate) mod settings;
