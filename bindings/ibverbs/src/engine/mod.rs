//! One engine for each open device of this process: the interface, and the device that
//! [`adapter::shared`] drives. No verbs object and no C function may enter.

mod capture;
pub(crate) mod dmabuf;
pub(crate) mod limits;
pub(crate) mod netdev;
pub(crate) mod shared;

use std::ops::Deref;
use std::sync::{Arc, Once};

use adapter::shared::{self as device, Lacking, Opening, SharedDevice};
pub(crate) use adapter::shared::{Notice, populate};
use nic::device::{DeviceConfig, DeviceWire};
use nic::driver::RESCUED;
use nic::udp::UdpError;
use roce::endpoint::EndpointConfig;
use rustix::io::Errno;

use crate::process::counter::Signal;
use crate::process::errors::{Failure, Outcome, errno_of_io, say};
use crate::process::fork::{self, ForkLock};
use crate::process::settings::{PATH, PathChoice, Settings};

use netdev::Interface;

/// The state behind an engine's lock.
pub(crate) type Core = device::Core<&'static dyn Listener>;

/// An open device.
pub(crate) struct Engine {
    /// The interface when the device was opened: its addresses are the GID table.
    pub(crate) interface: Interface,
    pub(crate) settings: Settings,
    sharing: shared::Sharing,
    device: Arc<SharedDevice<&'static dyn Listener>>,
}

impl Deref for Engine {
    type Target = SharedDevice<&'static dyn Listener>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.device
    }
}

/// An object of the layer above, which learns of what happens to it.
pub(crate) trait Listener: Sync {
    /// Called on any thread, with the core locked: must only queue the notice. The signal wakes
    /// whoever waits for it.
    fn notify(&'static self, notice: Notice) -> Option<Signal>;
}

impl device::Listener for &'static dyn Listener {
    type Signal = Signal;

    fn notify(self, notice: Notice) -> Option<Signal> {
        Listener::notify(self, notice)
    }
}

struct Open {
    engine: Arc<Engine>,
    users: usize,
}

static ENGINES: ForkLock<Vec<Open>> = ForkLock::new(Vec::new());

/// In a child: it has no engine yet. The parent's engines stay untouched in memory.
///
/// # Safety
/// As [`ForkLock::renew`].
pub(crate) unsafe fn renew() {
    let leave = |engines: &mut Vec<Open>| std::mem::forget(std::mem::take(engines));
    // SAFETY: as the caller promises.
    unsafe {
        ENGINES.renew(Vec::new(), leave);
        shared::renew();
    }
}

/// Every engine that is running.
pub(crate) fn all() -> Vec<Arc<Engine>> {
    let engines = ENGINES.lock();
    engines.iter().map(|open| Arc::clone(&open.engine)).collect()
}

/// Sends what waits for the program's next call: there will be none.
extern "C" fn send_waiting() {
    device::note_exit();
    all().iter().for_each(|engine| engine.send_waiting());
}

impl Engine {
    /// The engine of an interface: the one that is running, or a new one.
    ///
    /// # Errors
    /// When the machine lacks a resource for a new one.
    pub(crate) fn open(interface: Interface) -> Result<Arc<Engine>, Failure> {
        let mut engines = ENGINES.lock();
        if let Some(open) = engines.iter_mut().find(|open| open.engine.interface == interface) {
            open.users += 1;
            return Ok(Arc::clone(&open.engine));
        }
        let engine = Engine::start(interface)?;
        engines.push(Open { engine: Arc::clone(&engine), users: 1 });
        Ok(engine)
    }

    /// Drops one reference; the last one stops the engine.
    pub(crate) fn release(self: &Arc<Engine>) {
        let mut engines = ENGINES.lock();
        let Some(at) = engines.iter().position(|open| Arc::ptr_eq(&open.engine, self)) else {
            return;
        };
        engines[at].users -= 1;
        if engines[at].users == 0 {
            let open = engines.swap_remove(at);
            open.engine.close(fork::closed);
            open.engine.close_shared();
        }
    }

    fn start(interface: Interface) -> Result<Arc<Engine>, Failure> {
        let config = DeviceConfig::new(interface.addresses.clone(), interface.index);
        let name = interface.device_name();
        let refused =
            |what: &str, errno| Failure::new(errno, format_args!("{name}: {what}: {errno}"));
        let mut wire = DeviceWire::open(&config).map_err(|error| no_wire(&name, &error))?;
        let seed = seed().map_err(|errno| refused("no random numbers", errno))?;
        capture::begin(&mut wire, &interface);
        let settings = Settings::from_env();
        let opening = Opening {
            wire,
            endpoint: EndpointConfig { seed, ..limits::ENDPOINT },
            no_local: (settings.path == PathChoice::Udp).then(|| format!("{PATH}=udp")),
            on_rescue: || say(format_args!("{RESCUED}"), None),
        };
        let device = SharedDevice::open(opening);
        let device = device.map_err(|Lacking { what, errno }| refused(what, errno))?;
        fork::close_in_children(&device.descriptors());
        let sharing = shared::open(&settings, device.lock().device().local());
        static AT_EXIT: Once = Once::new();
        // SAFETY: the function has no arguments, and what it touches lives as long as the process.
        AT_EXIT.call_once(|| unsafe {
            libc::atexit(send_waiting);
        });
        Ok(Arc::new(Engine { interface, settings, sharing, device }))
    }
}

/// Why there is no wire. Some errors have a hint of their own; the one for exhausted descriptors
/// does not depend on their use.
fn no_wire(device: &str, error: &UdpError) -> Failure {
    let errno = error.os_error().map_or(Errno::IO, errno_of_io);
    let own = error.hint().filter(|_| errno != Errno::MFILE);
    Failure::new(errno, format_args!("{device}: {error}")).with_hint(own)
}

/// The seed of keys and initial queue pair numbers, which must not be predictable.
fn seed() -> Outcome<u64> {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
        8 => Ok(u64::from_ne_bytes(bytes)),
        _ => Err(Errno::IO),
    }
}
