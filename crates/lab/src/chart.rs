//! Results as pictures: curves in diagrams, as SVG.

use std::fmt::Write;

/// How values are placed on an axis, and written beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Sizes in bytes, in powers of 8.
    Sizes,
    /// Numbers, in powers of 10.
    Powers,
    /// Numbers from 0 on.
    Linear,
}

/// One curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Its colour: curves that belong together share one.
    pub colour: usize,
    /// Whether it is drawn dashed.
    pub dashed: bool,
    /// The points, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// A span of the axis to the right that is to stand out: something happened then.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    /// Where it begins.
    pub from: f64,
    /// Where it ends; at the end of the axis if nowhere.
    pub until: Option<f64>,
    /// What it is.
    pub name: String,
}

/// One diagram.
#[derive(Clone, Debug, PartialEq)]
pub struct Diagram {
    /// What the values are.
    pub title: String,
    /// The axis to the right, and that upwards.
    pub scales: [Scale; 2],
    /// Its curves.
    pub curves: Vec<Curve>,
    /// Spans behind them; the first few are numbered and named.
    pub marks: Vec<Mark>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;

/// Distances of the axes from the edges: left, right, top, bottom.
const MARGINS: [f64; 4] = [64.0, 180.0, 32.0, 40.0];

/// Colours that differ for people who do not see all of them.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999933"];

/// The diagrams with points, one below the other.
pub fn svg(title: &str, diagrams: &[Diagram]) -> String {
    let has_points = |one: &&Diagram| one.curves.iter().any(|curve| !curve.points.is_empty());
    let rows: Vec<&[Diagram]> =
        diagrams.iter().filter(has_points).map(std::slice::from_ref).collect();
    grid(title, &rows)
}

/// Rows of diagrams, one below the other. Those of a row are side by side and have the same axes.
pub fn grid(title: &str, rows: &[&[Diagram]]) -> String {
    let curves = rows.iter().copied().flatten().map(|one| one.curves.len()).max().unwrap_or(0);
    let columns = rows.iter().map(|row| row.len()).max().unwrap_or(0).max(1);
    // The legend may be longer than the diagram is high.
    let each = HEIGHT.max(MARGINS[2] + 16.0 * (curves as f64 + 1.0));
    let (width, height) = (WIDTH * columns as f64, each * rows.len().max(1) as f64 + 24.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<title>{}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        escaped(title)
    );
    for (at, row) in rows.iter().enumerate() {
        let axes = axes(row);
        for (column, diagram) in row.iter().enumerate() {
            let (x, y) = (WIDTH * column as f64, each * at as f64);
            let _ = writeln!(text, "<g transform=\"translate({x} {y})\">");
            text += &drawn(diagram, &axes);
            text += "</g>\n";
        }
    }
    let _ =
        writeln!(text, "<text x=\"8\" y=\"{}\">{}</text>\n</svg>", height - 8.0, escaped(title));
    text
}

/// An axis with its lines.
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    /// Where both are on the page.
    place: (f64, f64),
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, scale: Scale, place: (f64, f64)) -> Axis {
        let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
        for value in values.filter(|value| *value > 0.0 && value.is_finite()) {
            (low, high) = (low.min(value), high.max(value));
        }
        let base = scale.base();
        let (low, high) = if high > 0.0 { (low, high) } else { (1.0, base) };
        if scale == Scale::Linear {
            return Axis { scale, low: 0.0, high: high.max(1e-9), place };
        }
        let low = base.powf(low.log(base).floor());
        let high = base.powf(high.log(base).ceil()).max(low * base);
        Axis { scale, low, high, place }
    }

    fn at(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => value / self.high,
            Scale::Sizes | Scale::Powers => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        self.place.0 + share * (self.place.1 - self.place.0)
    }

    /// Whether a value has a place.
    fn shows(&self, value: f64) -> bool {
        value.is_finite() && (value > 0.0 || self.scale == Scale::Linear)
    }

    /// Values for lines: powers of the base, or five to ten round numbers.
    fn steps(&self) -> Vec<f64> {
        let (low, high) = (self.low, self.high * 1.001);
        if self.scale == Scale::Linear {
            let power = 10_f64.powf(self.high.log10().floor() - 1.0);
            let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
            let step = steps.into_iter().find(|step| high / step <= 10.0).unwrap_or(power * 10.0);
            return (0..=(high / step) as u32).map(|count| f64::from(count) * step).collect();
        }
        let base = self.scale.base();
        std::iter::successors(Some(low), |value| Some(value * base))
            .take_while(|value| *value <= high)
            .collect()
    }
}

impl Scale {
    fn base(self) -> f64 {
        if self == Scale::Sizes { 8.0 } else { 10.0 }
    }

    /// A value beside its line.
    fn text(self, value: f64) -> String {
        match self {
            Scale::Sizes => size_text(value),
            Scale::Powers => format!("{value}"),
            // Without the noise of a sum of steps.
            Scale::Linear => format!("{}", (value * 1e6).round() / 1e6),
        }
    }
}

/// The axis to the right and that upwards, for all diagrams of a row.
fn axes(row: &[Diagram]) -> [Axis; 2] {
    let [left, right, top, bottom] = MARGINS;
    let points = || row.iter().flat_map(|one| &one.curves).flat_map(|curve| &curve.points);
    let [scale, upwards] = row.first().map_or([Scale::Linear; 2], |first| first.scales);
    [
        Axis::new(points().map(|point| point.0), scale, (left, WIDTH - right)),
        Axis::new(points().map(|point| point.1), upwards, (HEIGHT - bottom, top)),
    ]
}

fn drawn(diagram: &Diagram, [x, y]: &[Axis; 2]) -> String {
    let [left, right, top, bottom] = MARGINS;
    let mut text = format!(
        "<text x=\"{left}\" y=\"20\" font-weight=\"bold\">{}</text>\n",
        escaped(&diagram.title)
    );
    for size in x.steps() {
        let at = x.at(size);
        let _ = writeln!(
            text,
            "<path d=\"M{at:.1} {top} V{:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - bottom,
            HEIGHT - bottom + 16.0,
            x.scale.text(size)
        );
    }
    for value in y.steps() {
        let at = y.at(value);
        let _ = writeln!(
            text,
            "<path d=\"M{left} {at:.1} H{:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - right,
            left - 6.0,
            at + 4.0,
            y.scale.text(value)
        );
    }
    text += &marked(&diagram.marks, x, diagram.curves.len());
    for (number, curve) in diagram.curves.iter().enumerate() {
        let colour = COLOURS[curve.colour % COLOURS.len()];
        let dashes = if curve.dashed { " stroke-dasharray=\"5 4\"" } else { "" };
        let places = curve.points.iter().filter(|point| x.shows(point.0) && y.shows(point.1));
        let places: Vec<String> =
            places.map(|point| format!("{:.1},{:.1}", x.at(point.0), y.at(point.1))).collect();
        for place in places.iter().filter(|_| curve.points.len() == 1) {
            let (x, y) = place.split_once(',').unwrap_or(("0", "0"));
            let _ = writeln!(text, "<circle cx=\"{x}\" cy=\"{y}\" r=\"3\" fill=\"{colour}\"/>");
        }
        let legend = top + 16.0 * number as f64;
        let _ = writeln!(
            text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dashes}/>\
             <path d=\"M{:.1} {legend:.1} h24\" stroke=\"{colour}\" stroke-width=\"2\"{dashes}/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            places.join(" "),
            WIDTH - right + 12.0,
            WIDTH - right + 42.0,
            legend + 4.0,
            escaped(&curve.name)
        );
    }
    text
}

/// Marks with a number and a name; more would not fit beside a diagram.
const NAMED_MARKS: usize = 8;

/// Spans behind the curves, and their names below those of so many curves.
fn marked(marks: &[Mark], x: &Axis, curves: usize) -> String {
    let [_, right, top, bottom] = MARGINS;
    let mut text = String::new();
    let legend = top + 16.0 * curves as f64 + 8.0;
    let shown = marks.iter().filter(|mark| x.shows(mark.from) && mark.from <= x.high);
    for (number, mark) in (0..).zip(shown) {
        let from = x.at(mark.from);
        let until = mark.until.map_or(x.place.1, |until| x.at(until.min(x.high)));
        let name = escaped(&mark.name);
        let _ = writeln!(
            text,
            "<rect x=\"{from:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#d55e00\" \
             fill-opacity=\"0.15\"><title>{name}</title></rect>",
            (until - from).max(1.0),
            HEIGHT - bottom - top
        );
        let line = match number {
            0..NAMED_MARKS => format!("{} {name}", number + 1),
            NAMED_MARKS => format!("and {} more", marks.len() - NAMED_MARKS),
            _ => continue,
        };
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"9\">{line}</text>",
            WIDTH - right + 12.0,
            legend + 12.0 * number as f64
        );
        if number < NAMED_MARKS {
            let _ = writeln!(
                text,
                "<text x=\"{from:.1}\" y=\"{:.1}\" font-size=\"9\">{}</text>",
                top - 2.0,
                number + 1
            );
        }
    }
    text
}

fn size_text(bytes: f64) -> String {
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let found = units.iter().find(|(_, unit)| bytes >= f64::from(*unit));
    found.map_or(format!("{bytes}"), |(name, unit)| format!("{} {name}", bytes / f64::from(*unit)))
}

/// Text between tags.
pub fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    // What XML does not have.
    text.replace(
        |letter: char| letter.is_control() || matches!(letter, '\u{fffe}' | '\u{ffff}'),
        "?",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, f64)]) -> Curve {
        Curve { name: "write <p50>".to_owned(), colour: 0, dashed: true, points: points.to_vec() }
    }

    fn mark(from: f64, until: Option<f64>) -> Mark {
        Mark { from, until, name: "down <a>".to_owned() }
    }

    #[test]
    fn marks_are_spans_of_the_axis_and_the_first_ones_have_names() {
        let marks = (1..=12).map(|at| mark(f64::from(at), (at > 1).then(|| f64::from(at) + 0.5)));
        let diagram = Diagram {
            title: String::new(),
            scales: [Scale::Linear, Scale::Linear],
            curves: vec![curve(&[(0.0, 0.0), (10.0, 1.0)])],
            marks: marks.collect(),
        };
        let text = svg("", &[diagram]);
        // Two of the twelve begin behind the end of the axis, which has 476 pixels.
        assert_eq!(text.matches("fill-opacity").count(), 10, "{text}");
        assert!(text.contains("<rect x=\"111.6\" y=\"32\" width=\"428.4\""), "to the end: {text}");
        assert!(text.contains("<rect x=\"159.2\" y=\"32\" width=\"23.8\""), "{text}");
        assert!(text.contains(">8 down &lt;a&gt;</text>") && !text.contains(">9 down"), "{text}");
        assert!(text.contains(">and 4 more</text>"), "{text}");
    }

    #[test]
    fn every_opened_element_is_closed_and_text_is_escaped() {
        let curves = vec![curve(&[(8.0, 5.5), (65536.0, 700.0)]), curve(&[(8.0, 0.0)]), curve(&[])];
        let diagram = |scale, upwards| Diagram {
            title: "us".to_owned(),
            scales: [scale, upwards],
            curves: curves.clone(),
            marks: vec![mark(3.0, Some(9.0)), mark(0.0, None), mark(f64::NAN, None)],
        };
        let both = [diagram(Scale::Sizes, Scale::Powers), diagram(Scale::Linear, Scale::Linear)];
        let text = svg("a & b", &both);
        let mut open = Vec::new();
        for tag in text.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').expect("a tag ends");
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name), "{text}"),
                None if tag.ends_with('/') => {}
                None => open.push(tag.split(' ').next().expect("a name")),
            }
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(text.contains("a &amp; b") && text.contains("&lt;p50&gt;"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn points_are_inside_their_axes() {
        let values = || [3.0, 250.0].into_iter();
        let axis = Axis::new(values(), Scale::Powers, (100.0, 200.0));
        assert_eq!((axis.low, axis.high), (1.0, 1000.0));
        assert!((axis.at(1.0) - 100.0).abs() < 1e-9 && (axis.at(1000.0) - 200.0).abs() < 1e-9);
        assert_eq!(axis.steps().len(), 4);
        let axis = Axis::new(values(), Scale::Linear, (100.0, 200.0));
        assert_eq!(axis.steps(), [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]);
        assert!((axis.at(125.0) - 150.0).abs() < 1e-9 && axis.shows(0.0));
        assert!(svg("nothing", &[]).ends_with("</svg>\n"));
    }
}
