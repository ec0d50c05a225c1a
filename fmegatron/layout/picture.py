"""Pictures of a layout: which ranks hold which boxes, as text and as SVG."""

from __future__ import annotations


def picture_text(layout) -> str:
    """One line for each different local block: the ranks that hold it, its local shape and its global boxes."""
    holders: dict[tuple, list[int]] = {}
    for rank in range(layout.mesh.size):
        holders.setdefault(layout.boxes(rank), []).append(rank)
    lines = [repr(layout)]
    for boxes, ranks in holders.items():
        pieces = " + ".join("[" + ", ".join(f"{s.start}:{s.stop}" for s in box.slices) + "]" for box in boxes)
        lines.append(f"  rank {','.join(map(str, ranks))}: {layout.local_shape(ranks[0])} = {pieces or 'nothing'}")
    return "\n".join(lines)


def picture_svg(layout) -> str:
    """The text picture inside an SVG."""
    lines = picture_text(layout).splitlines()
    text = "".join(
        f'<text x="4" y="{16 * i + 16}" font-family="monospace" font-size="12">{t}</text>' for i, t in enumerate(lines)
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{16 * len(lines) + 8}">{text}</svg>'
