"""Draws docs/event.svg: one decision event of three members, its one ratio, and the event after it.

python docs/draw_event.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, SOFT, STATE, OUTPUT, RATIO = "#1f2933", "#5b6773", "#e3eefb", "#fff3d6", "#dff3e4"
WIDTH, HEIGHT = 960, 330


def text(x: float, y: float, words: str, size: int = 15, color: str = INK, **style: str) -> str:
    """A line of text, centred at (x, y)."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="middle"{more}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, w: float, h: float, fill: str, *lines: str, size: int = 15) -> str:
    """A rounded box whose lines stand in its middle; the first is bold."""
    step = size + 5
    top = y + h / 2 - step * (len(lines) - 1) / 2 + size / 3
    weights = ("600", *["400"] * len(lines))
    rows = [
        text(x + w / 2, top + i * step, line, size, font_weight=weights[i])
        for i, line in enumerate(lines)
    ]
    frame = f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="9" fill="{fill}" stroke="{INK}"/>'
    return frame + "".join(rows)


def arrow(*points: tuple[float, float]) -> str:
    """A line through the points with a head at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4" '
        'marker-end="url(#head)"/>'
    )


def drawing() -> str:
    """The whole picture as SVG text."""
    rows = (40, 105, 170)
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>',
        box(20, 95, 110, 70, STATE, "state s", "the problem"),
        box(485, 95, 110, 70, STATE, "state s′", "with 3 drafts"),
        box(660, 105, 120, 50, OUTPUT, "verifier", "“approve”"),
        box(840, 95, 100, 70, STATE, "state s″"),
    ]
    for i, y in enumerate(rows, 1):
        parts += [
            box(215, y, 175, 50, OUTPUT, f"solver_{i}", "sampled output"),
            arrow((130, 130), (170, 130), (170, y + 25), (213, y + 25)),
            arrow((390, y + 25), (437, y + 25), (437, 130), (483, 130)),
            arrow((302, 232), (302, 243)) if i == 3 else "",
        ]
    parts += [
        arrow((595, 130), (658, 130)),
        arrow((780, 130), (838, 130)),
        f'<rect x="190" y="14" width="225" height="218" rx="12" fill="none" stroke="{SOFT}" '
        'stroke-dasharray="5 4"/>',
        f'<rect x="640" y="14" width="160" height="218" rx="12" fill="none" stroke="{SOFT}" '
        'stroke-dasharray="5 4"/>',
        text(302, 31, "event 1 · active set of K = 3", 13, SOFT),
        text(720, 31, "event 2 · K = 1", 13, SOFT),
        box(
            110, 245, 385, 70, RATIO,
            "ρ = exp( (ℓ₁ + ℓ₂ + ℓ₃) / √3 )",
            "one ratio, one clip, one advantage A for the set",
        ),
        box(600, 245, 240, 70, RATIO, "ρ = exp( ℓ )", "its own ratio and advantage"),
        arrow((720, 155), (720, 243)),
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" role="img" '
        'aria-label="A decision event: three outputs, one ratio">'
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{INK}"/>'
        "</marker></defs>" + "\n".join(part for part in parts if part) + "</svg>\n"
    )


if __name__ == "__main__":
    target = Path(__file__).with_name("event.svg")
    target.write_text(drawing(), encoding="utf-8")
    print(target)
