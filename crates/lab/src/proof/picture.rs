//! The map of links of a proof: what is promised on each, and what it carried.

use ::topology::drawing;
use ::topology::graph::{LinkId, Topology};

use super::{LinkProof, Proof};

/// A picture with links coloured by what they carried, and one by what is promised on them, one
/// below the other (SVG). Of a cable's two directions the one that has more counts.
pub fn svg(topology: &Topology, proof: &Proof) -> String {
    let part = |of: fn(&LinkProof) -> u64| {
        move |id: LinkId| {
            let own = proof.links.iter().filter(|link| link.link as usize / 2 == id.index());
            own.map(|link| of(link) as f64 / link.capacity_bps.max(1) as f64).fold(0.0, f64::max)
        }
    };
    let used = drawing::write_heat(topology, part(|link| link.used_bps));
    let promised = drawing::write_heat(topology, part(|link| link.promised_bps));
    let (width, height) = size(&used);
    let below = height + LINE;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"8\" y=\"16\">promised</text>\n{}\n<text x=\"8\" y=\"{}\">used</text>\n{}\n</svg>\n",
        2 * below,
        placed(&promised, LINE, width, height),
        below + 16,
        placed(&used, below + LINE, width, height),
    )
}

/// Height of a line of text.
const LINE: u32 = 24;

/// Width and height of a picture of [`drawing`].
fn size(svg: &str) -> (u32, u32) {
    let number = |name: &str| {
        let rest = svg.split_once(name)?.1;
        rest.split_once('"')?.0.parse().ok()
    };
    (number(" width=\"").unwrap_or(640), number(" height=\"").unwrap_or(480))
}

/// A picture as a part of another one, so far from its top.
fn placed(svg: &str, y: u32, width: u32, height: u32) -> String {
    let tag = format!("<svg y=\"{y}\" width=\"{width}\" height=\"{height}\" ");
    svg.replacen("<svg ", &tag, 1)
}
