//! Results as a picture: latency and bandwidth over message size, as SVG.

use std::fmt::Write;

/// One curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Whether it is drawn dashed.
    pub dashed: bool,
    /// Size in bytes and value, by size.
    pub points: Vec<(f64, f64)>,
}

/// One diagram, both axes logarithmic.
#[derive(Clone, Debug, PartialEq)]
pub struct Diagram {
    /// What the values are.
    pub title: String,
    /// Its curves.
    pub curves: Vec<Curve>,
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
    let shown: Vec<&Diagram> = diagrams
        .iter()
        .filter(|one| one.curves.iter().any(|curve| !curve.points.is_empty()))
        .collect();
    let height = HEIGHT * shown.len().max(1) as f64 + 24.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<title>{}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        escaped(title)
    );
    for (at, diagram) in shown.iter().enumerate() {
        let _ = writeln!(text, "<g transform=\"translate(0 {})\">", HEIGHT * at as f64);
        text += &drawn(diagram);
        text += "</g>\n";
    }
    let _ =
        writeln!(text, "<text x=\"8\" y=\"{}\">{}</text>\n</svg>", height - 8.0, escaped(title));
    text
}

/// A logarithmic axis.
struct Axis {
    low: f64,
    high: f64,
    /// Where both are on the page.
    place: (f64, f64),
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, base: f64, place: (f64, f64)) -> Axis {
        let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
        for value in values.filter(|value| *value > 0.0 && value.is_finite()) {
            (low, high) = (low.min(value), high.max(value));
        }
        let (low, high) = if high > 0.0 { (low, high) } else { (1.0, base) };
        let low = base.powf(low.log(base).floor());
        let high = base.powf(high.log(base).ceil()).max(low * base);
        Axis { low, high, place }
    }

    fn at(&self, value: f64) -> f64 {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        self.place.0 + share * (self.place.1 - self.place.0)
    }

    /// Values for lines: powers of the base.
    fn steps(&self, base: f64) -> impl Iterator<Item = f64> {
        let (low, high) = (self.low, self.high * 1.001);
        std::iter::successors(Some(low), move |value| Some(value * base))
            .take_while(move |value| *value <= high)
    }
}

fn drawn(diagram: &Diagram) -> String {
    let [left, right, top, bottom] = MARGINS;
    let points = || diagram.curves.iter().flat_map(|curve| &curve.points);
    let x = Axis::new(points().map(|point| point.0), 8.0, (left, WIDTH - right));
    let y = Axis::new(points().map(|point| point.1), 10.0, (HEIGHT - bottom, top));
    let mut text = format!(
        "<text x=\"{left}\" y=\"20\" font-weight=\"bold\">{}</text>\n",
        escaped(&diagram.title)
    );
    for size in x.steps(8.0) {
        let at = x.at(size);
        let _ = writeln!(
            text,
            "<path d=\"M{at:.1} {top} V{:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - bottom,
            HEIGHT - bottom + 16.0,
            size_text(size)
        );
    }
    for value in y.steps(10.0) {
        let at = y.at(value);
        let _ = writeln!(
            text,
            "<path d=\"M{left} {at:.1} H{:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
            WIDTH - right,
            left - 6.0,
            at + 4.0
        );
    }
    for (number, curve) in diagram.curves.iter().enumerate() {
        let colour = COLOURS[number / 2 % COLOURS.len()];
        let dashes = if curve.dashed { " stroke-dasharray=\"5 4\"" } else { "" };
        let places = curve.points.iter().filter(|point| point.1 > 0.0);
        let places: Vec<String> =
            places.map(|point| format!("{:.1},{:.1}", x.at(point.0), y.at(point.1))).collect();
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

fn size_text(bytes: f64) -> String {
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let found = units.iter().find(|(_, unit)| bytes >= f64::from(*unit));
    found.map_or(format!("{bytes}"), |(name, unit)| format!("{} {name}", bytes / f64::from(*unit)))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, f64)]) -> Curve {
        Curve { name: "write <p50>".to_owned(), dashed: true, points: points.to_vec() }
    }

    #[test]
    fn every_opened_element_is_closed_and_text_is_escaped() {
        let curves = vec![curve(&[(8.0, 5.5), (65536.0, 700.0)]), curve(&[(8.0, 0.0)]), curve(&[])];
        let text = svg("a & b", &[Diagram { title: "us".to_owned(), curves }]);
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
        let axis = Axis::new([3.0, 250.0].into_iter(), 10.0, (100.0, 200.0));
        assert_eq!((axis.low, axis.high), (1.0, 1000.0));
        assert!((axis.at(1.0) - 100.0).abs() < 1e-9 && (axis.at(1000.0) - 200.0).abs() < 1e-9);
        assert_eq!(axis.steps(10.0).count(), 4);
        assert!(svg("nothing", &[]).ends_with("</svg>\n"));
    }
}
