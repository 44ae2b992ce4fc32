//! The whole system as its users run it: `serve`, `dpu` and `cat` as processes of their own, on
//! loopback, over real files.
//!
//! Every stream is compared byte for byte with [`xio::reference`], whatever happens on the way:
//! losses, kills, restarts, hostile packets. Every refusal is provoked and its exit code, message
//! and hint are checked. No test measures time; every wait has a limit (`harness::PATIENCE`).
//!
//! | module | what it tries |
//! |---|---|
//! | [`same`] | the same bytes with and without offload, with losses, on a device of a library, from any batch on |
//! | [`target_dies`], [`dpu_dies`], [`trainer_dies`] | `kill -9` of each process while a stream runs |
//! | [`same_host`] | blocks that are written without packets: the same bytes, kills, stops, and what forbids it |
//! | [`at_once`] | streams that begin together, and readers that come and are killed: nobody stands still |
//! | [`never_mixed`] | files that change while they are read, and between connections |
//! | [`paths`] | networks that drop packets: each fault by its own message |
//! | [`ranks`] | several trainers of one job |
//! | `actions` | WebAssembly modules of users, and what they may do wrong |
//! | [`documents`] | tables of documents, and indices that do not fit |
//! | [`types`] | who says which type a flat file has |
//! | [`records`], [`quantized`] | records that are no tokens, values of floating point |
//! | [`bad_data`], [`bad_names`], [`bad_plans`], [`access`] | what a user can get wrong |
//! | [`hostile_sockets`], [`hostile_packets`], [`hostile_target`] | what an attacker can send |
//! | [`users`] | daemons and trainers of different users |
//! | [`stages`] | what a session agrees on, and that it is what both ends do |
//! | [`floods`] | connections that say nothing, and daemons without descriptors |
//! | [`lifecycle`] | several clients, status, the end of daemons |
//! | [`harness`], [`corpus`], [`wire_kit`], [`relay`] | processes, files, packets and eavesdroppers of a test |

mod access;
#[cfg(feature = "wasm")]
mod actions;
mod at_once;
mod bad_data;
mod bad_names;
mod bad_plans;
mod corpus;
mod documents;
mod dpu_dies;
mod few_descriptors;
mod floods;
mod forms;
#[path = "../../../../testing/h2.rs"]
mod h2;
mod harness;
mod hostile_packets;
mod hostile_sockets;
mod hostile_target;
mod lifecycle;
mod local;
mod many;
mod megatron;
mod never_mixed;
mod paths;
mod quantized;
mod ranks;
mod records;
mod relay;
mod same;
mod same_host;
#[path = "../../../../testing/skip.rs"]
mod skip;
mod stages;
mod target_dies;
mod trainer_dies;
mod types;
mod users;
mod wire_kit;
