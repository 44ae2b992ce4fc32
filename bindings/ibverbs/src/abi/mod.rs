//! The C ABI of rdma-core 44: structures and constants of `infiniband/verbs.h`, and nothing else.
//!
//! Names are those of C, to match the man pages. Enumerations are plain integers here: programs may
//! pass any value. Every structure registers its layout with `Layout`; a test compiles a C program
//! against the installed headers and compares sizes and offsets (`tests/layout.rs` in spirit,
//! `layout.rs` here because it needs the types).
#![allow(non_camel_case_types, reason = "the names of C")]

mod consts;
mod context;
mod device;
mod objects;
mod work;

#[cfg(test)]
mod layout;

pub(crate) use consts::*;
pub(crate) use context::*;
pub(crate) use device::*;
pub(crate) use objects::*;
pub(crate) use work::*;

/// A structure whose layout can be compared with C's.
#[cfg(test)]
pub(crate) trait Layout {
    /// The type as written in C, `struct` included.
    const C_NAME: &'static str;
    /// Every field with its offset.
    fn fields() -> Vec<(&'static str, usize)>;
}

/// Defines a structure with C's layout.
macro_rules! c_struct {
    ($( $(#[$meta:meta])* $kind:ident $name:ident { $( $field:ident: $ty:ty, )* } )+) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[repr(C)]
        pub(crate) $kind $name { $( pub(crate) $field: $ty, )* }

        #[cfg(test)]
        impl $crate::abi::Layout for $name {
            const C_NAME: &'static str = concat!(stringify!($kind), " ", stringify!($name));
            fn fields() -> Vec<(&'static str, usize)> {
                vec![ $( (stringify!($field), core::mem::offset_of!($name, $field)), )* ]
            }
        }
    )+ };
}
pub(crate) use c_struct;
