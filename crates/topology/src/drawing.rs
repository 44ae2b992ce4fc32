//! A picture of a topology: hosts below, switches above them by their distance from the nearest
//! host.
//!
//! Links between switches of one row are arcs. Names are tooltips, and text where a row has few
//! nodes.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::graph::{Kind, LinkId, NodeId, Topology};

/// Pixels between rows, and around all of them.
const ROW: u32 = 130;
const MARGIN: u32 = 40;

/// The least width of a node, and of the picture.
const NODE: u32 = 14;
const LEAST_WIDTH: u32 = 640;

/// Rows with more nodes have no text.
const MOST_NAMES: usize = 24;

/// A scalable picture (SVG 1.1), for screens and paper alike.
pub fn write_svg(topology: &Topology) -> String {
    draw(topology, &|_| String::new())
}

/// Colours of use, from none to all of a link, in equal steps: readable in grey, and for people who
/// do not see all colours.
const HEAT: [&str; 5] = ["#d8dee9", "#fdbb63", "#f07f3c", "#c8442b", "#7a0f1f"];

/// The same with links coloured by their use, from 0 to 1.
pub fn write_heat(topology: &Topology, used: impl Fn(LinkId) -> f64) -> String {
    let svg = draw(topology, &|link| {
        let used = used(link).clamp(0.0, 1.0);
        let step = ((used * HEAT.len() as f64) as usize).min(HEAT.len() - 1);
        format!(" stroke=\"{}\" stroke-opacity=\"1\"", HEAT[step])
    });
    svg.replace("</svg>", &format!("{}</svg>", legend()))
}

/// What the colours mean, in the corner.
fn legend() -> String {
    let steps = (0_usize..).zip(HEAT);
    let step = |(number, colour): (usize, &str)| {
        let (x, percent) = (10 + 60 * number, 100 * number / HEAT.len());
        format!(
            "<rect x=\"{x}\" y=\"6\" width=\"14\" height=\"8\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"14\" text-anchor=\"start\" fill=\"#333\">{percent} % +</text>\n",
            x + 18
        )
    };
    steps.map(step).collect()
}

fn draw(topology: &Topology, style: &dyn Fn(LinkId) -> String) -> String {
    let rows = rows(topology);
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let width = (longest * NODE * 3 / 2).max(LEAST_WIDTH) + 2 * MARGIN;
    let height = ROW * (rows.len().max(1) as u32 - 1) + 2 * MARGIN;
    let places = places(topology, &rows, width);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"10\" text-anchor=\"middle\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <g fill=\"none\" stroke=\"#4a6fa5\" stroke-opacity=\"0.45\">\n"
    );
    for (id, link) in topology.links() {
        let [a, b] = link.ends.map(|end| places[end.node.index()]);
        svg += &edge(a, b, &style(id));
    }
    svg.push_str("</g>\n<g stroke=\"#333\" fill=\"#f4f4f4\">\n");
    for (id, place) in topology.nodes().map(|(id, _)| id).zip(&places) {
        svg += &node(topology, id, *place);
    }
    svg.push_str("</g>\n<g fill=\"#333\">\n");
    for row in rows.iter().filter(|row| row.len() <= MOST_NAMES) {
        for &id in row {
            let (x, y) = places[id.index()];
            svg += &format!("<text x=\"{x}\" y=\"{}\">{}</text>\n", y + 20, name(topology, id));
        }
    }
    svg.push_str("</g>\n</svg>\n");
    svg
}

/// The nodes by row, the highest first. A switch that no host reaches is in the highest.
fn rows(topology: &Topology) -> Vec<Vec<NodeId>> {
    let mut level = alloc::vec![None; topology.nodes().len()];
    let mut next: Vec<NodeId> = topology.hosts().collect();
    let mut rows: Vec<Vec<NodeId>> = Vec::new();
    while !next.is_empty() {
        next.iter().for_each(|id| level[id.index()] = Some(rows.len()));
        let beyond = next.iter().flat_map(|id| topology.neighbours(*id)).map(|(_, end)| end.node);
        let mut above: Vec<NodeId> = beyond.filter(|id| level[id.index()].is_none()).collect();
        above.sort_unstable();
        above.dedup();
        rows.push(core::mem::replace(&mut next, above));
    }
    let lonely = topology.nodes().map(|(id, _)| id).filter(|id| level[id.index()].is_none());
    let lonely: Vec<NodeId> = lonely.collect();
    rows.extend((!lonely.is_empty()).then_some(lonely));
    rows.reverse();
    rows
}

fn places(topology: &Topology, rows: &[Vec<NodeId>], width: u32) -> Vec<(u32, u32)> {
    let mut places = alloc::vec![(0, 0); topology.nodes().len()];
    let inner = width - 2 * MARGIN;
    for (y, row) in (0..).zip(rows) {
        for (x, id) in (0_u64..).zip(row) {
            let x = (2 * x + 1) * u64::from(inner) / (2 * row.len() as u64);
            let x = MARGIN + x as u32;
            places[id.index()] = (x, MARGIN + y * ROW);
        }
    }
    places
}

fn edge((x1, y1): (u32, u32), (x2, y2): (u32, u32), style: &str) -> String {
    if y1 != y2 {
        return format!("<path{style} d=\"M{x1} {y1}L{x2} {y2}\"/>\n");
    }
    // Higher the further apart they are, and within the row's own space.
    let lift = (8 + x1.abs_diff(x2) / 6).min(ROW - 20);
    let (x, y) = ((x1 + x2) / 2, y1.saturating_sub(lift));
    format!("<path{style} d=\"M{x1} {y1}Q{x} {y} {x2} {y2}\"/>\n")
}

fn node(topology: &Topology, id: NodeId, (x, y): (u32, u32)) -> String {
    let title = format!("<title>{}</title>", name(topology, id));
    let half = NODE / 2;
    match topology.node(id).kind() {
        Kind::Switch => {
            let (left, top) = (x - half, y - half / 2);
            format!(
                "<rect x=\"{left}\" y=\"{top}\" width=\"{NODE}\" height=\"{half}\">{title}</rect>\n"
            )
        }
        Kind::Host => format!("<circle cx=\"{x}\" cy=\"{y}\" r=\"3\">{title}</circle>\n"),
    }
}

/// A name as XML has it.
fn name(topology: &Topology, id: NodeId) -> String {
    let name = topology.node(id).name();
    name.chars().fold(String::new(), |mut text, letter| {
        match letter {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            // What XML does not have.
            letter if letter.is_control() => text.push('?'),
            '\u{fffe}' | '\u{ffff}' => text.push('?'),
            letter => text.push(letter),
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Capacity;
    use crate::shape::Shape;

    fn drawn(rule: &str) -> String {
        let shape: Shape = rule.parse().expect(rule);
        write_svg(&shape.build(Capacity::default()).expect(rule))
    }

    #[test]
    fn every_node_and_link_is_there() {
        for (rule, hosts, switches, links) in
            [("fat-tree:4", 16, 20, 48), ("torus:3x3:2", 18, 9, 36), ("leaf-spine:2x1x1", 2, 3, 4)]
        {
            let svg = drawn(rule);
            let count = |what: &str| svg.matches(what).count();
            assert_eq!(
                (count("<circle"), count("<rect x"), count("<path")),
                (hosts, switches, links)
            );
            assert_eq!(count("<title>"), hosts + switches, "{rule}");
        }
    }

    #[test]
    fn rows_follow_the_distance_from_hosts() {
        let svg = drawn("leaf-spine:2x1x1");
        let y = |name: &str| {
            let text =
                svg.lines().find(|line| line.ends_with(&format!(">{name}</text>"))).expect(name);
            text.split("y=\"")
                .nth(1)
                .and_then(|rest| rest.split('"').next())
                .expect(name)
                .parse::<u32>()
        };
        let (spine, leaf) = (y("spine0").expect("a number"), y("leaf1").expect("a number"));
        assert!(spine < leaf, "{spine} {leaf}");
    }

    #[test]
    fn heat_is_a_colour_for_each_link() {
        let shape: Shape = "leaf-spine:2x2x3".parse().expect("a rule");
        let topology = shape.build(Capacity::default()).expect("a topology");
        let svg = write_heat(&topology, |link| link.index() as f64 / 5.0);
        let count = |colour: &str| svg.matches(&format!("stroke=\"{colour}\"")).count();
        assert_eq!(HEAT.map(count), [1, 1, 1, 1, 6], "{svg}");
        assert!(svg.ends_with("</svg>\n") && svg.matches("</svg>").count() == 1);
    }

    #[test]
    fn names_are_escaped() {
        let mut topology = Topology::new();
        topology.add(Kind::Host, "a<b>&\u{7}", 1).expect("a host");
        let svg = write_svg(&topology);
        assert!(svg.contains("<title>a&lt;b&gt;&amp;?</title>"), "{svg}");
    }
}
