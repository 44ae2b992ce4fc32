//! Which modules of a crate may use which of its other modules.
//!
//! The table [`FLOORS`] lists every module at the top of a crate's `src`, or of a large folder
//! below it, lowest floor first. The code of a floor may name itself and what its line allows;
//! everything else is refused, so a module can neither use one above it nor take part in a circle.
//! Paths that begin with `crate`, `self` or `super` are resolved, also those in braces; what the
//! root of a crate declares or exports again is above all floors. In a folder, items of its
//! `mod.rs` may be used. Names are found in the tokens that [`scan`] leaves: comments and text do
//! not count, and no macro is expanded.

use std::fs;
use std::path::{Path, PathBuf};

use crate::scan;
use crate::shell::Failure;
use crate::workspace::{self, root};

/// The floors of each folder: on each line a module, and the names beside it that it may use; `*`
/// is every module of a line above.
const FLOORS: &[(&str, &str)] = &[
    (
        "crates/roce/src",
        "time
         counters
         rng
         slab: rng
         deadlines: rng time
         wire
         seeded: wire
         congestion: time wire
         shaping: time
         verbs: rng time wire congestion
         memory: seeded rng slab verbs
         io: time wire verbs memory
         multicast: verbs
         events: verbs
         srq: rng slab verbs memory events
         cq: seeded rng slab verbs srq
         report: counters time wire congestion verbs
         direct: wire verbs memory io
         qp: counters seeded rng time wire congestion verbs memory io events srq cq report direct
         outbox: wire verbs io qp
         endpoint: *
         world: time wire verbs io direct endpoint",
    ),
    (
        "crates/sim/src",
        "chance
         events: chance
         faults: chance
         credits: chance
         queues
         link: chance credits queues
         buffer: link
         paths: link
         graph: link paths
         topology: graph link
         memory: chance
         packet: faults
         pressure: chance faults
         rates
         port: faults packet pressure rates
         network: *
         chaos: buffer chance credits network faults graph link memory pressure topology
         streams: buffer network faults graph link memory queues
         tenants: network graph link memory packet streams
         cycles: network graph link streams tenants
         goodput: network faults graph link memory streams
         incast: buffer network goodput graph link memory streams topology
         traffic: buffer chance network graph link memory packet topology
         circle: buffer chance network graph link memory streams topology
         noisy_neighbour: network faults goodput graph link memory streams",
    ),
    (
        "crates/topology/src",
        "graph
         shape: graph
         text: graph shape
         htsim: graph shape
         lingjun: graph
         drawing: graph shape
         channels: graph shape
         dependencies
         routes: graph channels dependencies
         lanes: channels dependencies routes
         validator: channels dependencies routes lanes",
    ),
    (
        "crates/subnet/src",
        "mad
         exchange: mad
         discovery: mad exchange
         lids: mad discovery
         levels: mad exchange discovery lids
         partitions: mad exchange discovery lids
         forwarding: mad lids
         dump: lids forwarding
         transition: mad levels forwarding
         setup: mad exchange discovery lids levels partitions forwarding transition
         sm_info: mad
         administration: mad discovery lids levels partitions sm_info
         manager: mad exchange discovery lids levels partitions setup sm_info administration",
    ),
    (
        "crates/subnet/src/manager",
        "config
         work
         look
         event: work look
         election: event
         outbox: event
         schedule
         fabric: work
         remembered: fabric
         task: work look event election
         installed: fabric task
         multicast: schedule fabric task
         service: fabric outbox",
    ),
    (
        "crates/parfait/src",
        "runs
         family: runs
         pattern
         separation
         shifts
         job: pattern separation shifts
         demand: runs family pattern
         groups
         spread
         outage
         network: groups spread outage
         site: spread outage network
         loads: runs demand spread network
         ledger: runs demand spread network loads
         placement: runs pattern job demand network loads ledger
         repair: network loads ledger placement
         profile: family pattern job demand
         queues: job loads ledger
         seeded
         log: runs separation job demand outage network site loads ledger placement repair queues
         repair_log: ledger placement repair log
         agent: seeded job ledger queues shifts
         staggering: seeded job demand outage loads ledger log shifts agent
         brain: *",
    ),
    (
        "crates/parfait/src/log",
        "entry
         error
         codec: entry error
         jobs: entry
         trunks
         clients: entry
         book: *",
    ),
    (
        "crates/cluster/src",
        "words
         proto
         keys
         convert: proto keys
         handshake: proto keys
         tls
         store: keys
         enforce
         kubernetes
         slurm
         local
         view
         explain: words view
         web: view
         brain: words proto convert keys handshake tls store kubernetes view web
         client: proto keys convert handshake tls view brain
         agent: words proto convert keys enforce client local",
    ),
    (
        "crates/cluster/src/brain",
        "cluster
         placing
         inputs: placing
         events: inputs
         agents: cluster events inputs
         carriers
         requests: inputs
         lookups: cluster inputs
         picture: inputs
         views
         storage: placing inputs
         actor: *
         calls: cluster placing inputs
         core: cluster inputs events actor calls
         extender: inputs",
    ),
    (
        "crates/cluster/src/store",
        "signed
         file: signed
         etcd: signed",
    ),
    (
        "crates/cluster/src/enforce",
        "link
         dcb
         rate_limits
         htb",
    ),
    (
        "crates/cluster/src/enforce/dcb",
        "fake
         table: fake
         messages: table
         oracle: table messages fake",
    ),
    (
        "crates/cluster/src/enforce/htb",
        "tree
         classifier: tree
         messages: tree classifier",
    ),
    (
        "crates/xio/src",
        "dataset
         documents
         kernel: dataset
         disk
         opener: disk
         capsule: dataset disk kernel
         sums: disk kernel
         order: dataset documents
         plan: dataset documents kernel order
         stage: dataset kernel order plan
         target: capsule disk kernel stage sums
         reader: capsule dataset disk kernel order stage sums target
         reference: dataset order plan stage",
    ),
    (
        "crates/nic/src",
        "abi: skip
         clock
         peer
         private
         ready
         sockaddr
         waiter
         fault
         capture: clock
         local_files
         netlink
         rates: clock local_files
         interfaces: netlink sockaddr
         pool: clock
         driver: clock ready waiter
         udp: capture clock interfaces netlink rates sockaddr waiter
         packet: udp
         link: interfaces netlink
         xdp: clock interfaces link rates udp
         roce_v1: capture clock interfaces link rates udp
         mappings
         userfault
         movable: clock mappings skip userfault
         local_peers: clock fault interfaces movable peer pool udp
         device: capture clock interfaces local_peers netlink rates packet ready skip udp waiter
         doctor: device interfaces local_peers packet udp
         loaded: abi clock
         umad",
    ),
    (
        "crates/nic/src/loaded",
        "library
         translate
         context: library translate
         objects: translate context
         posting
         reports
         wakeups
         events: reports",
    ),
    (
        "crates/host/src",
        "scratch
         codecs
         kernels: codecs
         wasm
         accounts
         attach
         process
         ring: attach process
         root: scratch
         stored: root scratch
         disk: root scratch
         memory: disk",
    ),
    (
        "crates/comm/src",
        "address
         bootstrap
         mesh",
    ),
    (
        "crates/adapter/src",
        "registrations: seeds skip
         congestion
         software
         owned: congestion software
         drive: owned
         connect: congestion owned software
         shared: software",
    ),
    (
        "bindings/ibverbs/src",
        "process
         engine: process
         explain: process engine
         objects: abi process engine
         exports: abi process engine explain objects",
    ),
    (
        "crates/service/src",
        "descriptors
         text
         event
         grpc
         json: text
         control: json
         error: descriptors text
         address: error
         seed: error
         runtime: error
         log: event text
         signals: error runtime
         metrics
         tls: error
         places: error log
         rates
         admission: error event log places
         auth: admission event log
         http: auth places rates",
    ),
    (
        "crates/engine/src",
        "proto
         status
         budget
         action
         catalog: action proto
         layout: proto
         data: action budget status
         control: action budget catalog data proto status
         selection: control proto status
         path: data
         handle: data path
         group: handle proto
         stream: budget catalog control data group handle layout path proto selection status
         local: budget control data group path stream
         files: action catalog control data layout proto selection stream
         daemon: budget catalog control data group path proto selection status stream",
    ),
    (
        "crates/formats/src",
        "cores
         error
         kind
         value
         digest: value
         read_at
         documents: error read_at
         whole: error
         dochash: cores error read_at value whole
         manifest: cores error read_at whole
         settle: dochash kind manifest read_at
         source: error kind manifest settle value
         reading: error source value
         writer: error kind source
         convert: *",
    ),
    (
        "crates/client/src",
        "proto
         error: proto
         url: error
         rank: proto
         stream: error proto rank
         opening: error proto rank stream url
         file: error opening stream",
    ),
    (
        "bindings/python/src",
        "errors
         fault
         ranks: errors
         options: errors ranks
         spares
         source: errors fault options spares
         dlpack
         batch: dlpack errors fault ranks source
         records: batch
         file: batch errors options ranks records source
         stream: batch errors options records source",
    ),
    (
        "crates/lab/src",
        "units
         input
         workers
         chart
         topology: input units
         routing
         trace: chart
         scenario: chart input topology trace units workers
         chaos: workers
         proof: workers
         profiling
         planning
         devices
         perf: devices trace
         replay: devices",
    ),
    (
        "crates/lab/src/trace",
        "file
         compare",
    ),
    (
        "crates/lab/src/proof",
        "set
         admit: set
         summary: admit
         picture
         violations: set
         interleave",
    ),
    ("crates/lab/src/planning", "costs"),
    (
        "crates/dquant/src",
        "exit
         demo: exit
         cli: *",
    ),
    (
        "crates/lab/src/replay",
        "schedule
         content
         wire
         rendezvous: wire
         exchange: content schedule
         rank: exchange rendezvous schedule wire",
    ),
];

/// One module and all below it.
struct Floor {
    name: &'static str,
    /// Names beside it that it may use.
    may_use: Vec<&'static str>,
}

/// The modules of one folder.
struct Folder {
    path: &'static str,
    /// The folder as a module; empty for a crate.
    module: Vec<&'static str>,
    floors: Vec<Floor>,
}

impl Folder {
    fn new(folder: &'static str, lines: &'static str) -> Folder {
        let inner = folder.split_once("src/").map_or("", |(_, inner)| inner);
        let mut floors: Vec<Floor> = Vec::new();
        for line in lines.lines() {
            let (name, may_use) = line.split_once(':').unwrap_or((line, ""));
            let may_use = match may_use.trim() {
                "*" => floors.iter().map(|floor| floor.name).collect(),
                names => names.split_whitespace().collect(),
            };
            floors.push(Floor { name: name.trim(), may_use });
        }
        Folder {
            path: folder,
            module: inner.split('/').filter(|part| !part.is_empty()).collect(),
            floors,
        }
    }

    fn floor(&self, name: &str) -> Option<&Floor> {
        self.floors.iter().find(|floor| floor.name == name)
    }

    fn complaints(&self, files: &[PathBuf]) -> Vec<String> {
        let mut found = Vec::new();
        let mut seen = Vec::new();
        for path in files {
            let Some(module) = self.module_of(path) else { continue };
            // A file that git lists but that does not exist was deleted in the work tree.
            let Ok(text) = fs::read_to_string(root().join(path)) else { continue };
            let name = module[self.module.len()].clone();
            match self.floor(&name) {
                Some(floor) => {
                    found.extend(self.violations(floor, path, &module, &scan::code_only(&text)));
                }
                None if seen.contains(&name) => {}
                None => found.push(format!("{}: no floor for {name}; {CORRECT}", self.path)),
            }
            seen.push(name);
        }
        let gone = self.floors.iter().filter(|floor| !seen.iter().any(|name| name == floor.name));
        found.extend(
            gone.map(|floor| format!("{}: no module {}; {CORRECT}", self.path, floor.name)),
        );
        found
    }

    /// The path of a file's module from the crate's root; none for files that are on no floor.
    fn module_of(&self, path: &Path) -> Option<Vec<String>> {
        let below = path.strip_prefix(self.path).ok()?;
        if below.extension().is_none_or(|extension| extension != "rs") {
            return None;
        }
        let module = below.with_extension("");
        let mut parts: Vec<_> =
            module.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        // The root uses everything, and so do tests of the whole.
        if matches!(parts.first()?.as_str(), "lib" | "main" | "mod" | "tests") {
            return None;
        }
        parts.pop_if(|last| last == "mod");
        Some(self.module.iter().map(|&part| part.to_owned()).chain(parts).collect())
    }

    fn violations(&self, floor: &Floor, path: &Path, module: &[String], code: &str) -> Vec<String> {
        let mut found = Vec::new();
        for (at, segments) in paths(code) {
            let Some(used) = self.used_by(module, code, at, &segments) else { continue };
            let is_item = !self.module.is_empty() && used != "*" && self.floor(used).is_none();
            if used != floor.name && !floor.may_use.contains(&used) && !is_item {
                let line = code[..at].matches('\n').count() + 1;
                found.push(format!(
                    "{}:{line}: {} must not use {used}",
                    path.display(),
                    floor.name
                ));
            }
        }
        found
    }

    /// The first name below this folder of the path at `at`; none if the path ends or leads
    /// elsewhere.
    fn used_by<'c>(
        &self,
        module: &'c [String],
        code: &str,
        at: usize,
        segments: &[&'c str],
    ) -> Option<&'c str> {
        let mut place: Vec<&str> = module.iter().map(String::as_str).collect();
        place.extend(std::iter::repeat_n("{}", inline_modules_around(code, at)));
        for &segment in segments {
            match segment {
                "crate" => place.clear(),
                "self" => {}
                "super" => drop(place.pop()),
                name => place.push(name),
            }
        }
        place.starts_with(&self.module).then(|| place.get(self.module.len()).copied()).flatten()
    }
}

const CORRECT: &str = "correct xtask/src/floors.rs";

/// Everything that violates the table, with file and line.
///
/// # Errors
/// When git does not list the files.
pub(crate) fn complaints() -> Result<Vec<String>, Failure> {
    let files = workspace::files()?;
    let folders = FLOORS.iter().map(|(folder, lines)| Folder::new(folder, lines));
    Ok(folders.flat_map(|folder| folder.complaints(&files)).collect())
}

/// Every path that begins with `crate`, `self` or `super`, and where it begins; one for each name
/// in braces.
fn paths(code: &str) -> Vec<(usize, Vec<&str>)> {
    let mut found = Vec::new();
    for first in ["crate", "self", "super"] {
        for (at, _) in code.match_indices(first) {
            let before = code[..at].trim_end();
            let begins = !before.ends_with("::") && !code[..at].ends_with(is_name_char);
            if begins && code[at + first.len()..].starts_with("::") {
                expand(&code[at..], Vec::new(), &mut |path| found.push((at, path)));
            }
        }
    }
    found
}

/// The modules and items that a file names by their place, from the crate's root; not those of its
/// inline modules, which are tests.
pub(crate) fn places_used(module: &[String], code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, segments) in paths(code) {
        if inline_modules_around(code, at) > 0 {
            continue;
        }
        let mut place = module.to_vec();
        for segment in segments {
            match segment {
                "crate" => place.clear(),
                "self" => {}
                "super" => drop(place.pop()),
                name => place.push(name.to_owned()),
            }
        }
        found.push(place);
    }
    found
}

/// Reads a path, or a tree of them, and returns the text behind it.
fn expand<'a>(
    text: &'a str,
    mut path: Vec<&'a str>,
    found: &mut dyn FnMut(Vec<&'a str>),
) -> &'a str {
    let text = text.trim_start();
    if let Some(mut group) = text.strip_prefix('{') {
        while let Some(next) = group.chars().next() {
            match next {
                '}' => return &group[1..],
                ',' => group = &group[1..],
                _ if next.is_whitespace() => group = group.trim_start(),
                _ => {
                    let rest = expand(group, path.clone(), found);
                    // Behind the path there may be `as name`.
                    let end = rest.find([',', '}']).unwrap_or(rest.len());
                    group = &rest[end..];
                }
            }
        }
        return group;
    }
    let name_len = text.find(|c| !is_name_char(c)).unwrap_or(text.len());
    let len = if text.starts_with('*') { 1 } else { name_len };
    let (name, rest) = text.split_at(len);
    path.extend((!name.is_empty()).then_some(name));
    match rest.trim_start().strip_prefix("::") {
        Some(behind) if !name.is_empty() => expand(behind, path, found),
        _ => {
            found(path);
            rest
        }
    }
}

fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Modules with a body in this file that `at` lies in.
fn inline_modules_around(code: &str, at: usize) -> usize {
    let mut blocks = Vec::new();
    let mut statement = 0;
    for (place, c) in code[..at].char_indices() {
        match c {
            '{' => blocks.push(opens_module(&code[statement..place])),
            '}' => drop(blocks.pop()),
            ';' | ']' => {}
            _ => continue,
        }
        statement = place + 1;
    }
    blocks.into_iter().filter(|&is_module| is_module).count()
}

fn opens_module(statement: &str) -> bool {
    let mut words = statement.split_whitespace().rev();
    words.next().is_some() && words.next() == Some("mod")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRATE: (&str, &str) = ("c/src", "low\nmiddle: low\nhigh: *");
    const FOLDER: (&str, &str) = ("c/src/middle", "a\nb: a");

    fn violations_of(
        (folder, lines): (&'static str, &'static str),
        file: &str,
        code: &str,
    ) -> Vec<String> {
        let folder = Folder::new(folder, lines);
        let path = Path::new(file);
        let module = folder.module_of(path).expect("a file of a floor");
        let floor = folder.floor(&module[folder.module.len()]).expect("a floor");
        folder.violations(floor, path, &module, &scan::code_only(code))
    }

    #[test]
    fn a_floor_uses_itself_and_what_its_line_allows() {
        let source = "use crate::low::{a, b};\nuse crate::middle::c;\n// crate::high\nlet d = \"crate::high\";";
        assert!(violations_of(CRATE, "c/src/middle/x.rs", source).is_empty());
        let found =
            violations_of(CRATE, "c/src/middle.rs", "use crate::low;\nfn f() { crate::high::g() }");
        assert_eq!(found, ["c/src/middle.rs:2: middle must not use high"]);
        assert!(violations_of(CRATE, "c/src/high.rs", "use crate::{low, middle::x};").is_empty());
    }

    #[test]
    fn what_the_root_exports_is_above_all_floors() {
        for code in ["use crate::Error;", "use super::Error;", "use crate::*;", "use super::*;"] {
            assert_eq!(violations_of(CRATE, "c/src/high.rs", code).len(), 1, "{code}");
        }
    }

    #[test]
    fn names_in_braces_are_seen() {
        let code =
            "use crate::{low::{self as l, high}, high::{b, c as d}, top};\nuse crate::{high};";
        let found = violations_of(CRATE, "c/src/middle/x.rs", code);
        let used: Vec<_> =
            found.iter().map(|one| one.rsplit(' ').next().expect("a name")).collect();
        assert_eq!(used, ["high", "high", "top", "high"]);
    }

    #[test]
    fn super_is_resolved() {
        for (file, code, wrong) in [
            ("c/src/middle/x.rs", "use super::y;\nmod tests { use super::super::z; }", 0),
            ("c/src/middle/mod.rs", "#[cfg(test)]\nmod tests { use super::*; }", 0),
            ("c/src/middle/x.rs", "use super::super::{low, high};", 1),
            ("c/src/middle/mod.rs", "use super::high;", 1),
            ("c/src/middle/x.rs", "mod m { fn f() { super::super::super::high::g() } }", 1),
            ("c/src/middle/x.rs", "fn f() { self::high::g(super::high) }", 0),
        ] {
            assert_eq!(violations_of(CRATE, file, code).len(), wrong, "{code}");
        }
    }

    #[test]
    fn a_folder_has_floors_of_its_own() {
        for (code, wrong) in [
            ("use super::{Item, b::c};", 1),
            ("use crate::{high, middle::b};", 1),
            ("use super::*;", 1),
            ("use super::Item;\nuse crate::high;", 0),
        ] {
            assert_eq!(violations_of(FOLDER, "c/src/middle/a.rs", code).len(), wrong, "{code}");
        }
        assert!(violations_of(FOLDER, "c/src/middle/b/x.rs", "use super::super::a;").is_empty());
    }

    #[test]
    fn the_table_lists_a_floor_above_all_that_it_may_use() {
        for (folder, lines) in FLOORS {
            let floors = Folder::new(folder, lines).floors;
            for (height, floor) in floors.iter().enumerate() {
                let higher = floors[height..].iter().find(|one| floor.may_use.contains(&one.name));
                let higher = higher.map(|higher| higher.name);
                assert_eq!(higher, None, "{folder}: used by {}", floor.name);
            }
        }
    }

    #[test]
    fn modules_without_a_floor_and_floors_without_a_module_are_named() {
        let folder = Folder::new("xtask/src", "scan\nattic");
        let files =
            ["xtask/src/main.rs", "xtask/src/scan.rs", "xtask/src/tidy.rs"].map(PathBuf::from);
        let found = folder.complaints(&files);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("no floor for tidy") && found[1].contains("no module attic"));
    }

    #[test]
    fn roots_tests_and_other_files_are_on_no_floor() {
        let folder = Folder::new(CRATE.0, CRATE.1);
        for path in ["c/src/lib.rs", "c/src/tests/x.rs", "c/src/x.json", "d/src/low.rs"] {
            assert_eq!(folder.module_of(Path::new(path)), None, "{path}");
        }
        let module = folder.module_of(Path::new("c/src/middle/x/mod.rs"));
        assert_eq!(module, Some(["middle", "x"].map(str::to_owned).to_vec()));
    }
}
