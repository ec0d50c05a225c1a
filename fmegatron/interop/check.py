"""Does what is wanted fit what is stored? All differences at once, by path, with what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fmegatron import tree
from fmegatron.layout import Layout

_SHOWN = 10


def check_request(
    source: str,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    wanted: Mapping[str, Layout],
    strict: str,
    cast: bool,
) -> None:
    """Raise ValueError unless every wanted tensor is stored with this shape and dtype (or one that `cast` allows).

    strict: "error": nothing else is stored either; "subset": it may be.
    """
    problems = _names("tensor", stored, wanted, strict)
    for name, layout in wanted.items():
        if name not in stored:
            continue
        shape, dtype = stored[name]
        if shape != layout.shape:
            problems.append(f"{name}: stored with global shape {shape}, wanted {layout.shape}; use the stored shape")
        elif layout.unreduced:
            problems.append(f"{name}: wanted as a pending sum over {layout.unreduced}; ask for a value")
        elif dtype is not layout.dtype and not (cast and torch.can_cast(dtype, layout.dtype)):
            fix = f"which cannot hold it; ask for {dtype}" if cast else f"pass cast=True to convert, or ask for {dtype}"
            problems.append(f"{name}: stored as {dtype}, wanted {layout.dtype}; {fix}")
    _raise(source, problems)


def check_names(source: str, kind: str, stored: Collection[str], wanted: Collection[str], strict: str) -> None:
    """Raise ValueError unless all that is wanted is stored, and under "error" nothing else."""
    _raise(source, _names(kind, stored, wanted, strict))


def _names(kind: str, stored: Collection[str], wanted: Collection[str], strict: str) -> list[str]:
    if strict not in ("error", "subset"):
        raise ValueError(f"strict: got {strict!r}, wanted 'error' or 'subset'")
    unused = [name for name in stored if name not in wanted]
    problems = [
        f"{name}: no such {kind} is stored{tree.did_you_mean(name, unused or list(stored))}; rename it, or leave it out"
        for name in wanted
        if name not in stored
    ]
    if strict == "error" and unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        problems.append(f"stored but not asked for: {', '.join(unused[:5])}{more}; ask for them, or strict='subset'")
    return problems


def _raise(source: str, problems: list[str]) -> None:
    if problems:
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        lines = "\n".join(f"  {p}" for p in problems[:_SHOWN])
        raise ValueError(f"{source} does not fit what is wanted:\n{lines}{more}")
