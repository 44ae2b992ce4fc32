//! Kernel, processor and memory.

use std::fs;

use super::Finding;

/// UDP_SEGMENT came with 4.18, UDP_GRO with 5.0.
const OLDEST_KERNEL: (u32, u32) = (4, 18);
const GOOD_KERNEL: (u32, u32) = (5, 10);

pub(super) fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let fix = "use Linux 5.10 or newer";
    match version(&release) {
        None => Finding::warn("kernel", format!("Linux {release}: cannot tell how old it is"), fix),
        Some(version) if version < OLDEST_KERNEL => Finding::fail(
            "kernel",
            format!("Linux {release} is too old: no segmented sends, no coalesced receives"),
            fix,
        ),
        Some(version) if version < GOOD_KERNEL => {
            Finding::warn("kernel", format!("Linux {release} is older than what is tested"), fix)
        }
        Some(_) => Finding::ok("kernel", format!("Linux {release}")),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The checksums (ICRC, CRC-32C) and the conversion of tokens depend on these for speed.
#[cfg(target_arch = "x86_64")]
pub(super) fn processor() -> Finding {
    let features = [
        ("SSE 4.2", is_x86_feature_detected!("sse4.2")),
        ("PCLMULQDQ", is_x86_feature_detected!("pclmulqdq")),
        ("AVX2", is_x86_feature_detected!("avx2")),
        ("AVX-512 VPCLMULQDQ", is_x86_feature_detected!("vpclmulqdq")),
    ];
    let list = |wanted: bool| -> Vec<&str> {
        features.iter().filter(|(_, has)| *has == wanted).map(|(name, _)| *name).collect()
    };
    let text = format!("x86-64 with {}", list(true).join(", "));
    if features[..3].iter().all(|(_, has)| *has) {
        return Finding::ok("processor", text);
    }
    let missing = list(false).join(", ");
    let fix = "in a virtual machine, pass the host's processor through (QEMU: -cpu host)";
    Finding::warn("processor", format!("{text}; checksums are slow without {missing}"), fix)
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn processor() -> Finding {
    Finding::ok("processor", format!("{}: checksums as the crates choose", std::env::consts::ARCH))
}

pub(super) fn huge_pages() -> Finding {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match (meminfo(&text, "HugePages_Total"), meminfo(&text, "HugePages_Free")) {
        (Some(0) | None, _) => Finding::warn(
            "huge pages",
            "none reserved: large memory regions use ordinary pages, about 5 % slower",
            "sysctl -w vm.nr_hugepages=400",
        ),
        (Some(total), free) => {
            Finding::ok("huge pages", format!("{} of {total} free", free.unwrap_or(0)))
        }
    }
}

fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

pub(super) fn locked_memory() -> Finding {
    Finding::ok("locked memory", "no limit matters: regions are registered without pinning pages")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read() {
        assert_eq!(version("6.1.0-56-amd64"), Some((6, 1)));
        assert_eq!(version("4.4-rc1"), Some((4, 4)));
        assert_eq!(version("custom"), None);
        assert_eq!(version(""), None);
    }

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:   4028136 kB\nHugePages_Total:     400\nHugePages_Free:        7\n";
        assert_eq!(meminfo(text, "HugePages_Total"), Some(400));
        assert_eq!(meminfo(text, "MemTotal"), Some(4_028_136));
        assert_eq!(meminfo(text, "HugePages"), None);
    }
}
