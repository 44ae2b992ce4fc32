#!/usr/bin/env python3
"""Draws the table of admitted jobs in docs/parfait-placement.md as a picture: at 90 % load, for each topology and way, mean and interval.

    python3 interop/acceptance_picture.py [docs/parfait-placement.md] [-o docs/pictures/acceptance.svg]

The table is what `cargo run --release -p parfait --example acceptance` prints.
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOAD = "90 %"
WAYS = {
    "locality only": "#9aa0a6",
    "first fit, hose": "#c4b5a0",
    "Oktopus (greedy, hose)": "#e0a458",
    "CloudMirror (colocate, TAG)": "#c26d5c",
    "search, hose": "#b7c4e0",
    "greedy, Parfait": "#7fa3d8",
    "search, Parfait": "#2f5fa8",
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 960, 380, 46, 62, 40, 10


def rows(text):
    """(topology, way) -> (mean, interval) at the load."""
    found, column = {}, None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[:2] == ["topology", "way"]:
            column = cells.index(LOAD)
        elif column is not None and len(cells) > column:
            number = re.match(r"([\d.]+) ± ([\d.]+)", cells[column])
            if number and cells[1] in WAYS:
                found[cells[0], cells[1]] = float(number[1]), float(number[2])
        elif column is not None:
            break
    return found


def picture(found):
    topologies = list(dict.fromkeys(topology for topology, _ in found))
    height, width = HEIGHT - TOP - BOTTOM, WIDTH - LEFT - RIGHT
    y = lambda percent: TOP + height * (1 - percent / 100)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
             f'<text x="{LEFT}" y="18" font-size="14">Jobs admitted whose guarantee holds, of 100, at {LOAD} load (20 seeds, 95 % intervals)</text>']
    for number, (way, colour) in enumerate(WAYS.items()):
        x, line = LEFT + (number % 4) * 225, 36 + 16 * (number // 4)
        parts += [f'<rect x="{x}" y="{line - 9}" width="10" height="10" fill="{colour}"/>', f'<text x="{x + 15}" y="{line}">{way}</text>']
    for percent in range(0, 101, 20):
        parts += [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(percent):.1f}" y2="{y(percent):.1f}" stroke="#dddddd"/>',
                  f'<text x="{LEFT - 6}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent}</text>']
    group = width / len(topologies)
    bar = group * 0.84 / len(WAYS)
    for place, topology in enumerate(topologies):
        for number, (way, colour) in enumerate(WAYS.items()):
            mean, interval = found[topology, way]
            x = LEFT + place * group + 0.08 * group + number * bar
            middle = x + bar / 2 - 1
            parts += [f'<rect x="{x:.1f}" y="{y(mean):.1f}" width="{bar - 2:.1f}" height="{height * mean / 100:.1f}" fill="{colour}"/>',
                      f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y(mean - interval):.1f}" y2="{y(mean + interval):.1f}" stroke="#222222"/>']
        parts.append(f'<text x="{LEFT + (place + 0.5) * group:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{topology}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", default=ROOT / "docs" / "parfait-placement.md", type=pathlib.Path)
    parser.add_argument("-o", "--output", default=ROOT / "docs" / "pictures" / "acceptance.svg", type=pathlib.Path)
    options = parser.parse_args()
    found = rows(options.page.read_text())
    if not found:
        print(f"{options.page} has no table of admitted jobs", file=sys.stderr)
        return 2
    options.output.write_text(picture(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
