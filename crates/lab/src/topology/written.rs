//! Topologies as text, in the format that the name of a file says.

use std::path::Path;

use ::topology::drawing;
use ::topology::graph::Topology;
use ::topology::htsim;
use ::topology::text;
use service::Error;

use super::own;

/// What a topology can be written as, by the end of the file's name.
fn writer(path: &Path) -> Result<Writer, Error> {
    Ok(match path.extension().and_then(|extension| extension.to_str()) {
        Some("net") => Writer::Any(text::write_net),
        Some("dot") => Writer::Any(text::write_dot),
        Some("ns3") => Writer::Any(text::write_ns3),
        Some("svg") => Writer::Any(drawing::write_svg),
        Some("toml") => Writer::Any(own::write),
        Some("topo") => Writer::Htsim,
        _ => {
            return Err(Error::invalid(format_args!(
                "{}: the name ends with .net, .toml, .dot, .ns3, .topo or .svg",
                path.display()
            )));
        }
    })
}

/// A format of topologies.
enum Writer {
    /// It takes any.
    Any(fn(&Topology) -> String),
    /// It takes fat trees.
    Htsim,
}

/// Refuses names that say no format.
///
/// # Errors
/// With the ends that names can have.
pub fn check_name(path: &Path) -> Result<(), Error> {
    writer(path).map(drop)
}

/// The topology in the format that the name says.
///
/// # Errors
/// When the name says none, or the format cannot hold this topology.
pub fn text_for(path: &Path, topology: &Topology) -> Result<String, Error> {
    match writer(path)? {
        Writer::Any(write) => Ok(write(topology)),
        Writer::Htsim => htsim::write(topology).map(|htsim| htsim.text).map_err(|error| {
            Error::because("csg-htsim cannot build this topology", &error)
                .hint("it has fat trees of two or three tiers; .ns3 and .net take any topology")
        }),
    }
}
