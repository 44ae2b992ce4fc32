//! Whether an interface is there and switched on: asked when an agent starts, so that a name that
//! is wrong does not wait for the first plan.

use nic::netlink::{Failure, Request, Socket, u32_at};
use rustix::io::Errno;

use super::EnforceError;

/// The kernel's numbers: linux/rtnetlink.h, linux/if_link.h, linux/if.h.
const RTM_GETLINK: u16 = 18;
const IFLA_IFNAME: u16 = 3;
const IFF_UP: u32 = 1;

/// `struct ifinfomsg`, and where its flags are.
const LINK_BYTES: usize = 16;
const FLAGS_AT: usize = 8;

/// Longest name of an interface: IFNAMSIZ without the final zero.
const NAME_BYTES: usize = 15;

/// Whether an interface of this network namespace is switched on.
///
/// # Errors
/// When there is none of that name, or the kernel cannot be asked.
pub fn is_up(interface: &str) -> Result<bool, EnforceError> {
    let missing = || EnforceError::NoInterface(interface.to_owned());
    if interface.is_empty() || interface.len() > NAME_BYTES || interface.contains('\0') {
        return Err(missing());
    }
    let unreachable = |failure: Failure| EnforceError::Unreachable(failure.into());
    let request = Request::new(RTM_GETLINK, 0, &[0; LINK_BYTES]).text(IFLA_IFNAME, interface);
    let answers = match Socket::open().map_err(unreachable)?.request(request) {
        Ok(answers) => answers,
        Err(failure) if failure.errno() == Some(Errno::NODEV) => return Err(missing()),
        Err(failure) => return Err(unreachable(failure)),
    };
    let flags = answers.first().and_then(|answer| u32_at(answer, FLAGS_AT));
    Ok(flags.ok_or_else(missing)? & IFF_UP != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_there_and_other_names_are_not() {
        assert!(is_up("lo").is_ok());
        for name in ["none-such", "", "a-name-too-long-for-linux", "l\0o"] {
            let error = is_up(name).expect_err("there is none");
            assert!(matches!(error, EnforceError::NoInterface(_)), "{name}: {error}");
        }
    }
}
