"""Memory over time as an SVG, written by hand: the picture is the only thing it is needed for."""

import math
import signal
from collections.abc import Iterable
from xml.sax.saxutils import escape

from tests.soak.run import Outcome

WIDTH, HEIGHT = 960, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 30, 45
# A sample for each pixel or two; of those between, the highest.
POINTS = 500
COLOURS = {"one": "#1f77b4", "two": "#ff7f0e", "store": "#2ca02c", "slabs": "#9467bd"}
NAMES = {"one": "engine one", "two": "engine two", "store": "cachestore", "slabs": "its slabs"}

# Seconds and MiB of one process from its beginning to its end.
Line = list[tuple[float, float]]


def svg(outcome: Outcome) -> str:
    lines = _lines(outcome)
    seconds = max(x for _, line in lines for x, _ in line)
    top = 20 * math.ceil(max(y for _, line in lines for _, y in line) / 20)

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value / seconds, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 18, "private memory of each process, and shared slabs, MiB"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "seconds", "middle"),
    ]
    for value in range(0, top + 1, 20):
        parts.append(_line(x(0), y(value), x(seconds), y(value), "#ddd"))
        parts.append(_text(LEFT - 6, y(value) + 4, str(value), "end"))
    for step in range(6):
        second = seconds * step / 5
        parts.append(_text(x(second), HEIGHT - BOTTOM + 16, f"{second:.0f}", "middle"))
    for when, restart in outcome.restarts:
        # Of whom, by colour; longer for SIGKILL.
        high = 14 if restart.number == signal.SIGKILL else 7
        colour = COLOURS[restart.place]
        parts.append(_line(x(when), y(0), x(when), y(0) - high, colour, 2))
    for name, line in lines:
        points = " ".join(f"{x(when)},{y(mib)}" for when, mib in line)
        parts.append(f'<polyline fill="none" stroke="{COLOURS[name]}" points="{points}"/>')
    for number, (name, colour) in enumerate(COLOURS.items()):
        across, down = WIDTH - RIGHT + 15, TOP + 20 * number
        parts.append(_line(across, down, across + 20, down, colour, 3))
        parts.append(_text(across + 26, down + 4, NAMES[name]))
    for number, note in enumerate(("marks: a death,", "long ones SIGKILL")):
        parts.append(_text(WIDTH - RIGHT + 15, HEIGHT - BOTTOM - 20 + 16 * number, note))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lines(outcome: Outcome) -> list[tuple[str, Line]]:
    """One for each process: a line that went on after a death would look like a leak mended."""
    lines: dict[tuple[str, int], Line] = {}
    for sample in outcome.watch.samples:
        mib = sample.usage.memory_bytes / (1 << 20)
        lines.setdefault((sample.place, sample.life), []).append((sample.seconds, mib))
    for found in outcome.watch.store_samples:
        mib = found.stats.bytes_slabs / (1 << 20)
        lines.setdefault(("slabs", found.life), []).append((found.seconds, mib))
    seconds = max(line[-1][0] for line in lines.values())
    return [(name, list(_thinned(line, seconds / POINTS))) for (name, _), line in lines.items()]


def _thinned(line: Line, width: float) -> Iterable[tuple[float, float]]:
    buckets: dict[int, tuple[float, float]] = {}
    for point in line:
        bucket = int(point[0] / width)
        buckets[bucket] = max(buckets.get(bucket, point), point, key=lambda p: p[1])
    return buckets.values()


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'
