//! The C ABI of rdma-core 44: structures and constants of `infiniband/verbs.h`, and nothing else.
//!
//! It has two users: devices behind a loaded library ([`crate::loaded`]), and the drop-in library
//! itself (`bindings/ibverbs`). Names are those of C, to match the man pages. Enumerations are
//! plain integers here: programs may pass any value. A test compiles a C program against the
//! installed headers and compares all sizes, offsets and values (`layout.rs`).
#![allow(missing_docs, reason = "the man pages describe them")]
#![allow(non_camel_case_types, reason = "the names of C")]

mod consts;
mod context;
mod device;
mod objects;
mod work;

#[cfg(test)]
mod layout;

pub use consts::*;
pub use context::*;
pub use device::*;
pub use objects::*;
pub use work::*;

/// A structure whose layout can be compared with C's.
#[cfg(test)]
pub trait Layout {
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
        pub $kind $name { $( pub $field: $ty, )* }

        #[cfg(test)]
        impl $crate::abi::Layout for $name {
            const C_NAME: &'static str = concat!(stringify!($kind), " ", stringify!($name));
            fn fields() -> Vec<(&'static str, usize)> {
                vec![ $( (stringify!($field), core::mem::offset_of!($name, $field)), )* ]
            }
        }
    )+ };
}
use c_struct;
