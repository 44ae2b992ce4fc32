//! What the library must know as a guest in a process of somebody else: which `errno` and which line on
//! stderr an error becomes, which descriptors the program has closed, who has forked, which threads take
//! signals, what the environment asks for. Nothing of devices, engines and verbs objects may enter.

pub(crate) mod descriptor;
pub(crate) mod errors;
pub(crate) mod fork;
pub(crate) mod settings;
pub(crate) mod signals;
