//! Recording packets of unmodified programs, for tshark and `dquant capture`.
//!
//! The wire writes the file; this module starts it and completes it, also when the program exits
//! without closing its devices.

use std::sync::Once;

use nic::device::DeviceWire;

use super::netdev::Interface;
use crate::process::settings;

/// Starts recording, if the environment requests it.
pub(crate) fn begin(wire: &mut DeviceWire, interface: &Interface) {
    let Some(capture) = settings::capture(&interface.name) else {
        return;
    };
    wire.capture_to(Some(capture));
    static AT_EXIT: Once = Once::new();
    // SAFETY: the function has no arguments, and what it touches lives as long as the process.
    AT_EXIT.call_once(|| unsafe {
        libc::atexit(end);
    });
}

/// Completes the files.
extern "C" fn end() {
    // A child does not see its parent's engines, so it does not write their buffers a second time.
    for engine in super::all() {
        if let Ok(wire) = engine.lock().wire() {
            wire.capture_to(None);
        }
    }
}
