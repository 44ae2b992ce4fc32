//! The one binary of Dquant: its commands and their text.
//!
//! The daemons are in [`engine`], the library for training programs is [`client`], what is tried
//! out in the simulator, on paper or on a device is [`lab`]; commands and exit codes do not belong
//! in any of them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`demo`] | the main job in one command, verified and measured |
//! | [`cli`] | the verbs of the command line: what a person types and reads |
//! | [`exit`] | exit codes and errors with hints |

pub mod cli;
pub mod demo;
pub mod exit;
