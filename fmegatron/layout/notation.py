"""How a layout is written: the entries of a spec, the one-line form for people, the JSON form for files."""

from __future__ import annotations

from typing import Any

from fmegatron.layout.dtypes import dtype_name
from fmegatron.layout.mesh import STANDARD_AXES, Mesh
from fmegatron.layout.split import Split

Entry = None | str | tuple[str, ...] | Split


def names(axes: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    """Axes as a tuple: one name, several, or none."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def entry(value: Any) -> Entry:
    """One spelling for each meaning: None, an axis, a tuple of at least two axes, or a Split over at least one axis.

    Raises ValueError for anything else.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Split):
        if not value.names:
            return None
        axes = value.names if len(value.names) > 1 else next(iter(value.names))
        return value.over(axes) if value.assigned or value.parts != 1 else axes
    if isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value):
        names = tuple(value)
        return names if len(names) > 1 else next(iter(names), None)
    raise ValueError(
        f"got spec entry {value!r}, wanted None, an axis name, a tuple of axis names, or Split(axes, parts)"
    )


def on_mesh(value: Entry, mesh: Mesh) -> Entry:
    """An entry without the standard axes that the mesh lacks: they have size 1 and split nothing."""
    axes = tuple(name for name in entry_axes(value) if name in mesh or name not in STANDARD_AXES)
    if axes == entry_axes(value):
        return value
    return entry(value.over(axes) if isinstance(value, Split) and axes else axes)


def entry_axes(value: Entry) -> tuple[str, ...]:
    """The axes of an entry, major first."""
    return value.names if isinstance(value, Split) else names(value)


def entry_to_json(value: Entry) -> Any:
    """An entry of lists, strings and integers."""
    if isinstance(value, Split):
        if value.assigned:
            order = {"order": list(value.order)} if value.order else {}
            return {"axes": list(value.names), "sizes": list(value.sizes), **order}
        parts = value.parts if isinstance(value.parts, int) else list(value.parts)
        return {"axes": list(value.names), "parts": parts}
    return list(value) if isinstance(value, tuple) else value


def entry_from_json(value: Any) -> Entry:
    """The entry that `entry_to_json` wrote."""
    if not isinstance(value, dict):
        return entry(value)
    axes = tuple(value["axes"])
    if "parts" in value:
        return Split(axes, value["parts"])
    return Split(axes, sizes=tuple(value["sizes"]), order=tuple(value.get("order", ())))


def one_line(layout) -> str:
    """The one-line form of a layout: `bf16[8192@fsdp, (512+128+128)@tp] flat@dp unreduced@cp on dp2·cp2·fsdp4·tp2`.

    A padded one states it before the mesh, with the unit of ranges where that is not 1, and one in host memory:
    `f32[8192@fsdp] padded host on fsdp3`, `f32[8192, 96] flat@fsdp padded 32 on fsdp7`. Pieces of
    sizes of their own have bars between them, `f32[(3|4|4|1)@pp] on pp4`, and the ranks that hold them:
    `f32[(2|2|2|2)@pp order 0-1-1-0] on pp2`.
    """
    dims = ", ".join(_dim(size, value) for size, value in zip(layout.shape, layout.spec, strict=True))
    flat = f" flat@{'·'.join(layout.flat)}" if layout.flat else ""
    flat += f" from dim {layout.flat_from}" if layout.flat_from else ""
    unreduced = f" unreduced@{'·'.join(layout.unreduced)}" if layout.unreduced else ""
    rest = f"{' padded' if layout.padded else ''}{f' {layout.padded}' if layout.padded > 1 else ''}"
    rest += f" {layout.memory}" if layout.on_host else ""
    return f"{dtype_name(layout.dtype)}[{dims}]{flat}{unreduced}{rest} on {layout.mesh}"


def require_shares(layout, who: str) -> None:
    """ValueError where a dim is assigned in pieces of which ranks hold more or less, without padding: what has one
    graph for all ranks begins with this, so that the reason is not a shape."""
    if layout.assigned and not layout.is_even:
        raise ValueError(
            f"{who}: got {layout}, of whose dim {layout.assigned[0]} ranks hold more or less, wanted one shape on all "
            "ranks, as a step has one graph for all; pad it (layout.replace(padded=True)), restore the checkpoint with "
            "such a layout, or move the array to one with layout.plan_reshard"
        )


def _dim(size: int, value: Entry) -> str:
    if value is None:
        return str(size)
    extent, order = str(size), ""
    if isinstance(value, Split):
        if value.assigned:
            extent = f"({'|'.join(map(str, value.sizes))})"
            order = f" order {'-'.join(map(str, value.order))}" if value.order else ""
        elif isinstance(value.parts, int):
            extent = f"({value.parts}×{size // value.parts})"
        else:
            extent = f"({'+'.join(str(part) for part in value.parts)})"
    return f"{extent}@{'·'.join(entry_axes(value))}{order}"
