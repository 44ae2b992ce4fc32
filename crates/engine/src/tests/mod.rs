//! Tests of the whole: targets and readers of this crate, joined as daemons join them.

mod memory;
