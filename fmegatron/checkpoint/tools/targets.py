"""Target layouts of a reshard: the stored layouts on other meshes, or by rules, or as another checkpoint has them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmegatron import tree
from fmegatron.checkpoint.files.format import CheckpointError, Leaf, dtype_of
from fmegatron.checkpoint.files.manifest import layout_from_json
from fmegatron.checkpoint.tools.source import Source
from fmegatron.checkpoint.writing.plan import LeafPlan, cut_unit, plan
from fmegatron.layout import Layout, Mesh, Rules, Split

_MOST_RANKS = 1 << 20  # the ranks that write a leaf are listed one by one


@dataclass(frozen=True)
class LayoutRule:
    """How leaves whose path matches are split: per dim what a layout's JSON has (see FORMAT.md), and flat axes."""

    pattern: str
    spec: tuple[Any, ...]
    flat: tuple[str, ...] = ()


def parse_mesh(text: str) -> Mesh:
    """`dp=2,fsdp=4` as a Mesh; "1" or an empty text is a mesh of one rank. Raises ValueError."""
    if text in ("", "1"):
        return Mesh()
    axes: dict[str, int] = {}
    for part in text.split(","):
        m = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,9})\s*", part)
        if m is None or m[1] in axes:
            raise ValueError(f"got the mesh {text!r}, wanted axes with sizes, each once, e.g. fsdp=4,tp=2")
        axes[m[1]] = int(m[2])
    return Mesh(**axes)


def parse_rules(text: str, where: str) -> tuple[LayoutRule, ...]:
    """Rules of a JSON list of [pattern, spec] or [pattern, spec, flat] rows. Raises ValueError.

    >>> parse_rules('[["wo", [null, ["fsdp", "dp"]]], [".*", []]]', "rules.json")[0]
    LayoutRule(pattern='wo', spec=(None, ['fsdp', 'dp']), flat=())
    """
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: got no JSON ({error}), wanted a list of [pattern, spec] rows") from None
    rules = []
    for row in rows if isinstance(rows, list) else [rows]:
        fits = isinstance(row, list) and len(row) in (2, 3) and isinstance(row[0], str)
        if not fits or not all(isinstance(part, list) for part in row[1:]):
            raise ValueError(f'{where}: got {row!r:.80}, wanted [pattern, spec] such as ["attention/wo", ["tp", null]]')
        rules.append(LayoutRule(row[0], tuple(row[1]), tuple(row[2]) if len(row) == 3 else ()))
    return tuple(rules)


def parse_chunks(texts: Sequence[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """`PATTERN=256x1024` as (pattern, chunk shape). Raises ValueError."""
    rows = []
    for text in texts:
        pattern, _, shape = text.rpartition("=")
        if not pattern or not re.fullmatch(r"\d{1,15}(x\d{1,15})*", shape) or "0" in shape.split("x"):
            raise ValueError(f"got the chunks {text!r}, wanted PATTERN=SHAPE, e.g. blocks/.*=1x256x1024")
        rows.append((pattern, tuple(map(int, shape.split("x")))))
    return tuple(rows)


def target_layouts(
    source: Source,
    meshes: Sequence[Mesh] = (),
    rules: Sequence[LayoutRule] = (),
    like: Source | None = None,
) -> dict[str, Layout]:
    """By path the layout to rewrite to. Raises ValueError naming the path that does not fit.

    meshes: views of the same ranks; a leaf goes to the first that has all axes which split it, else to the first one,
    where it is no longer split over the axes that the mesh lacks.  rules: the first that matches decides instead of the
    stored layout.  like: a checkpoint of the same leaves, whose layouts are taken.
    """
    stored = {p: layout_from_json(leaf, source.manifest.meshes) for p, leaf in source.manifest.leaves.items()}
    if len({mesh.size for mesh in meshes}) > 1:
        raise ValueError(
            f"got the meshes {', '.join(map(str, meshes))} of different sizes, wanted views of the same ranks"
        )
    if like is not None:
        if meshes or rules:
            raise ValueError("got the layouts of another checkpoint and a mesh or rules, wanted one of them")
        layouts = {path: _like(like, source.manifest.leaves[path]) for path in stored}
    elif rules:
        meshes = tuple(meshes) or tuple(dict.fromkeys(layout.mesh for layout in stored.values()))
        table = Rules([(rule.pattern, ()) for rule in rules])
        layouts = {p: _ruled(source.manifest.leaves[p], rules[table.row(p)], meshes) for p in stored}
    else:
        layouts = {path: _moved(layout, meshes) if meshes else layout for path, layout in stored.items()}
    sizes = {layout.mesh.size for layout in layouts.values()}
    if len(sizes) > 1:
        raise ValueError(f"got target layouts on meshes of {sorted(sizes)} ranks, wanted the same ranks for all leaves")
    if max(sizes, default=1) > _MOST_RANKS:
        raise ValueError(f"got a mesh of {max(sizes)} ranks, wanted at most {_MOST_RANKS}; give --mesh")
    return layouts


def plan_of(layouts: dict[str, Layout], chunks: Sequence[tuple[str, tuple[int, ...]]] = ()) -> tuple[LeafPlan, ...]:
    """The plan of a save under these layouts; `chunks` rules over the chunk shapes that it would choose itself.

    Raises ValueError for a chunk shape that does not fit the leaf, or crosses a cut between two ranks.
    """
    plans = plan(list(layouts), list(layouts.values()))
    if not chunks:
        return plans
    table, used = Rules([*((pattern, ()) for pattern, _ in chunks), (".*", ())]), set()
    found = []
    for p in plans:
        row = table.row(p.path)
        if row < len(chunks) and p.home == "grid":
            used.add(row)
            p = replace(p, chunk=_chunk(p, chunks[row][1]))
        found.append(p)
    if unused := [pattern for i, (pattern, _) in enumerate(chunks) if i not in used]:
        raise ValueError(f"got chunks for {unused[0]!r}, which matches no leaf that has an array of its own")
    return tuple(found)


def _chunk(p: LeafPlan, wanted: tuple[int, ...]) -> tuple[int, ...]:
    shape, unit = p.layout.shape, cut_unit(p.layout)
    if len(wanted) != len(shape):
        raise ValueError(f"{p.path}: got chunks of shape {wanted}, wanted {len(shape)} dims, as its shape {shape} has")
    fitted = tuple(min(c, n) for c, n in zip(wanted, shape, strict=True))
    for dim, (c, u, n) in enumerate(zip(fitted, unit, shape, strict=True)):
        if u < n and u % c:
            raise ValueError(
                f"{p.path}: got chunks of {c} in dim {dim}, wanted a divisor of {u}: no chunk may lie on two ranks of"
                f" {p.layout}"
            )
    return fitted


def _like(other: Source, leaf: Leaf) -> Layout:
    found = other.manifest.leaves.get(leaf.path)
    if found is None:
        near = tree.did_you_mean(leaf.path, list(other.manifest.leaves))
        raise ValueError(f"{leaf.path}: not in {other.text}{near}; give --mesh and --rules instead")
    if found.shape != leaf.shape:
        raise ValueError(f"{leaf.path}: has shape {leaf.shape}, but {found.shape} in {other.text}; wanted the same")
    return layout_from_json(found, other.manifest.meshes).replace(dtype=dtype_of(leaf.dtype))


def _ruled(leaf: Leaf, rule: LayoutRule, meshes: Sequence[Mesh]) -> Layout:
    errors = []
    for i in range(len(meshes)):
        row = {"mesh": i, "spec": list(rule.spec), "flat": list(rule.flat)}
        try:
            return layout_from_json(replace(leaf, layout=row), tuple(mesh.to_json() for mesh in meshes))
        except CheckpointError as error:
            errors.append(str(error.__context__))
    raise ValueError(f"{leaf.path} (by the rule {rule.pattern!r}): {errors[0]}")


def _moved(layout: Layout, meshes: Sequence[Mesh]) -> Layout:
    """A layout on the mesh that suits it best; axes that the mesh lacks split nothing any more."""
    used = {name for dim in range(len(layout.shape)) for name in layout.axes(dim)}.union(layout.flat)
    needed = {name for name in used if layout.mesh[name] > 1}
    mesh = next((m for m in meshes if all(name in m for name in needed)), meshes[0])

    def kept(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in axes if name in mesh)

    spec = []
    for dim, entry in enumerate(layout.spec):
        axes = kept(layout.axes(dim))
        spec.append(Split(axes, entry.parts) if isinstance(entry, Split) else axes)
    return Layout(layout.shape, layout.dtype, mesh, tuple(spec), flat=kept(layout.flat))
