//! The mappings of this process, as the kernel lists them in `/proc/self/maps`.

use std::fs;
use std::io;

/// The list at one moment, sorted by address.
#[derive(Debug)]
pub struct Mappings(String);

/// A line of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    /// First byte.
    pub first: u64,
    /// Behind the last byte.
    pub end: u64,
    /// `r`, `w` and `x` or `-`, then `p` for private or `s` for shared.
    pub permissions: &'a str,
    /// Where the first byte is in the file.
    pub offset: u64,
    /// Of the file, shared memory or huge pages; 0 for anonymous memory.
    pub inode: u64,
    /// A path or a name like `[heap]`, or nothing.
    pub name: &'a str,
}

impl Mappings {
    /// The list as it is now.
    ///
    /// # Errors
    /// When it cannot be read: no `/proc`, no descriptor left.
    pub fn now() -> io::Result<Mappings> {
        // A path may be in any encoding.
        Ok(Mappings(String::from_utf8_lossy(&fs::read("/proc/self/maps")?).into_owned()))
    }

    /// Lines that cannot be understood are left out.
    pub fn iter(&self) -> impl Iterator<Item = Mapping<'_>> {
        self.0.lines().filter_map(Mapping::parse)
    }
}

impl Mapping<'_> {
    /// `first-end permissions offset device inode name`.
    fn parse(line: &str) -> Option<Mapping<'_>> {
        let hex = |word| u64::from_str_radix(word, 16).ok();
        let mut words = line.splitn(6, ' ');
        let (first, end) = words.next()?.split_once('-')?;
        let permissions = words.next().filter(|permissions| permissions.len() == 4)?;
        Some(Mapping {
            first: hex(first)?,
            end: hex(end)?,
            permissions,
            offset: hex(words.next()?)?,
            inode: words.nth(1)?.parse().ok()?,
            name: words.next().unwrap_or_default().trim_start(),
        })
    }

    /// Whether it is private and of no file.
    pub fn is_private_anonymous(&self) -> bool {
        self.permissions.ends_with('p') && self.inode == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_others_left_out() {
        let text = "7f00-7fff rw-s 0001000 00:01 77                  /memfd:a b (deleted)\n\
                    55aa000-55ab000 r-xp 00000000 00:00 0 \n\
                    nonsense\n\
                    8000-9000 rw 0 00:00 0\n\
                    ffff0000-ffff1000 r-xp 00000000 00:00 0 [vdso]\n";
        let list = Mappings(text.to_owned());
        let [file, plain, named] = list.iter().collect::<Vec<_>>()[..] else {
            panic!("{list:?}");
        };
        let offset = 0x1000;
        let name = "/memfd:a b (deleted)";
        let expected =
            Mapping { first: 0x7f00, end: 0x7fff, permissions: "rw-s", offset, inode: 77, name };
        assert_eq!(file, expected);
        assert!(plain.is_private_anonymous() && !file.is_private_anonymous());
        assert_eq!((plain.name, named.name), ("", "[vdso]"));
    }

    #[test]
    fn the_list_has_the_memory_of_this_test() {
        let bytes = Box::new([0_u8; 100]);
        let addr = bytes.as_ptr().expose_provenance() as u64;
        let list = Mappings::now().expect("/proc");
        let found = list.iter().find(|mapping| (mapping.first..mapping.end).contains(&addr));
        assert_eq!(found.expect("it is mapped").permissions, "rw-p");
    }
}
