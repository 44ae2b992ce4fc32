//! Manifests: what they detect, and what is refused in them.

use proptest::prelude::*;

use super::*;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path =
            std::env::temp_dir().join(format!("dquant-manifest-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn manifest(&self, bytes: &[u8]) -> Manifest {
        fs::write(self.0.join("a.bin"), bytes).unwrap();
        let contents = Contents {
            tokens: bytes.len() as u64 / 2,
            min_id: Some(0),
            max_id: Some(50_256),
            tokenizer: Some("r50k_base".into()),
            documents: Some(3),
            eos: Some(50_256),
            targets: false,
        };
        let files = [PathBuf::from("a.bin")];
        Manifest::create(("flat", Dtype::U16), contents, &self.0, &files, &|_| ()).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_manifest_reads_back_and_finds_a_flipped_bit() {
    let folder = Folder::new("flip");
    let mut bytes: Vec<u8> = (0..2_500_000_u32).map(|i| (i * 7) as u8).collect();
    let manifest = folder.manifest(&bytes);
    let data = folder.0.join("a.bin");
    let stored = manifest.store(&data).unwrap();
    assert_eq!(stored.file_name().unwrap(), "a.bin.dquant.json");
    assert_eq!(Manifest::load(&data).unwrap().unwrap(), manifest);
    manifest.verify(&folder.0, &|_| ()).unwrap();
    bytes[2_100_000] ^= 1;
    fs::write(&data, &bytes).unwrap();
    let error = manifest.verify(&folder.0, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("a.bin: block 2 (from byte 2097152)"), "{error}");
    assert_ne!(folder.manifest(&bytes).fingerprint(), manifest.fingerprint());
    bytes.pop();
    fs::write(&data, &bytes).unwrap();
    let error = manifest.verify(&folder.0, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("has 2499999 bytes, the manifest describes 2500000"), "{error}");
    assert_eq!(Manifest::load(&folder.0.join("b.bin")).unwrap(), None);
}

#[test]
fn invalid_manifests_are_refused_with_the_field() {
    let folder = Folder::new("refused");
    let text = serde_json::to_string(&folder.manifest(&[1; 4_000])).unwrap();
    assert!(Manifest::parse(text.as_bytes()).is_ok());
    let cases = [
        ("dquant.manifest/1", "dquant.manifest/2", "version"),
        ("\"u16\"", "\"u17\"", "u17"),
        ("\"u16\"", "\"u32\"", "edited"),
        ("\"a.bin\"", "\"../a.bin\"", "outside"),
        ("\"a.bin\"", "\"/a.bin\"", "outside"),
        ("\"bytes\":4000", "\"bytes\":400000000", "do not cover"),
        ("\"bytes\":4000", "\"bytes\":18446744073709551615", "do not cover"),
        ("\"bytes\":4000", "\"bytes\":-1", "invalid"),
        ("\"block_bytes\":1048576", "\"block_bytes\":0", "blocks of 0"),
        ("\"tokens\":2000", "\"tokens\":2001", "edited"),
        ("{", "[", "invalid"),
    ];
    for (from, to, part) in cases {
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{from}");
        let why = Manifest::parse(changed.as_bytes()).unwrap_err();
        assert!(why.contains(part), "{from} to {to}: {why}");
    }
}

/// A split is said beside the fields that decide what is read, so a dataset is the same with and
/// without it.
#[test]
fn a_split_names_the_other_part_and_changes_no_fingerprint() {
    let folder = Folder::new("split");
    let plain = folder.manifest(&[1; 4_000]);
    let split = Split {
        part: Part::Validation,
        seed: u64::MAX,
        share: "0.5%".into(),
        other: "web.bin".into(),
        other_fingerprint: "00000000000000ff".into(),
    };
    let parted = Manifest { split: Some(split), ..plain.clone() };
    let text = serde_json::to_string(&parted).unwrap();
    assert_eq!(Manifest::parse(text.as_bytes()).unwrap(), parted);
    assert_eq!(parted.fingerprint(), plain.fingerprint());
    let old = serde_json::to_string(&plain).unwrap();
    assert!(!old.contains("split"), "{old}");
    assert_eq!(Manifest::parse(old.as_bytes()).unwrap().split, None);
    for (from, to, part) in [
        ("\"validation\"", "\"test\"", "unknown variant `test`"),
        ("00000000000000ff", "none", "\"none\" as the fingerprint of the other part"),
        ("18446744073709551615", "-1", "invalid"),
    ] {
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{from}");
        let why = Manifest::parse(changed.as_bytes()).unwrap_err();
        assert!(why.contains(part), "{from} to {to}: {why}");
    }
}

proptest! {
    #[test]
    fn no_mutation_of_a_manifest_panics(at in 0_usize..400, byte in any::<u8>()) {
        let folder = Folder::new("mutated");
        let mut text = serde_json::to_vec(&folder.manifest(&[1; 4_000])).unwrap();
        let at = at % text.len();
        text[at] = byte;
        if let Ok(manifest) = Manifest::parse(&text) {
            let _ = manifest.verify(&folder.0, &|_| ());
        }
    }
}
