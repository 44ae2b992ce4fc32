//! The library as a program uses it: over the loopback device, through the C functions.
#![allow(clashing_extern_declarations, reason = "some tests leave the types of arguments open")]

mod bad_input;
mod data;
mod kit;
mod sleep;
