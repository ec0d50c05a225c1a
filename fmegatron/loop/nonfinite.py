"""Numbers that are not finite: seen in a step's metrics, then looked for in the state, leaf by leaf, on all ranks."""

import math
import warnings
from collections.abc import Mapping, Sequence

import torch

from fmegatron import tree
from fmegatron.loop.losses import RollBack, RunAgain
from fmegatron.tree import structure

WATCHED = ("loss", "grad_norm")
_SHOWN = 6  # leaves that an error lists


class NonFiniteError(RuntimeError):
    """Training stopped because numbers are not finite. step: the log point that showed it; paths: of the leaves.

    first: an update that is the first that was bad, as far as this is known.
    """

    def __init__(self, message: str, step: int, paths: Sequence[str], first: int | None = None):
        super().__init__(message)
        self.step, self.paths, self.first = step, tuple(paths), step if first is None else first


def broken(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of `loss` and `grad_norm` that are not finite; of all metrics where neither of the two is there.

    With them, where there is one, "overflow": rows for which experts had no room (`nn.dropless`), which made them so.

    >>> broken({"loss": float("nan"), "grad_norm": 1.0, "margin": float("inf")})
    {'loss': nan}
    """
    watched = [name for name in WATCHED if name in metrics] or list(metrics)
    found = {name: metrics[name] for name in watched if not math.isfinite(metrics[name])}
    return found | ({"overflow": metrics["overflow"]} if found and metrics.get("overflow") else {})


def look(state: structure.Tree, world=None) -> list[tuple[str, int]]:
    """(path, first rank) of the leaves of a state that hold a number that is not finite, in the order of the tree.

    Leaves of one number are left out where there are larger ones: a state may note a loss or a norm as it was
    (`optim.skip_nonfinite`). One host synchronisation per device; with a world (`collectives.World`) all ranks call it.
    """
    named = [(p, x) for p, x in zip(tree.paths(state), tree.leaves(state), strict=True) if isinstance(x, torch.Tensor)]
    named = [(path, x) for path, x in named if x.is_floating_point() or x.is_complex()]
    if any(x.dim() for _, x in named):
        named = [(path, x) for path, x in named if x.dim()]
    devices = sorted({x.device for _, x in named}, key=str)
    bad = {}
    for device in devices:  # a state may be in host memory in part
        here = [(path, x) for path, x in named if x.device == device]
        bad.update(zip([path for path, _ in here], torch.stack([_is_bad(x) for _, x in here]).tolist(), strict=True))
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    firsts = torch.tensor([rank if bad[path] else size for path, _ in named], dtype=torch.int64)
    if world is not None:
        firsts = world.minimum(firsts)
    return [(path, first) for (path, _), first in zip(named, firsts.tolist(), strict=True) if first < size]


def judge(
    state: structure.Tree,
    step: int,
    shown: Mapping[str, float],
    finite_at: int | None,
    world=None,
    nonfinite: str = "raise",
    first_bad: int | None = None,
) -> None:
    """What the loop does after a log point whose loss or norm is not finite on some rank. All ranks call it.

    state: as it is now. step, shown: the log point and its broken metrics (empty where only another rank saw one).
    finite_at: the log point before, where all was finite. nonfinite: one of `losses.ACTIONS`. first_bad: the
    first bad update. Where the state is finite, or with "warn", rank 0 warns and training goes on; with "roll back" and
    "rerun" it raises `RollBack` and `RunAgain`, else NonFiniteError.
    """
    found = look(state, world)
    what = ", ".join(f"{name} is {value}" for name, value in shown.items()) or "a metric of another rank is not finite"
    if shown.get("overflow"):
        what += " (experts had too few rows for the tokens that chose them: raise MoE.rows, or give chunks)"
    since = "" if finite_at is None else f" (finite at step {finite_at})"
    if not found:
        text = f"step {step}: {what}{since}, but every leaf of the state is finite; training goes on"
        _warn(text, world)
        return
    first = found[0][1]
    where = f" (first seen on rank {first})" if world is not None and world.size > 1 else ""
    listed = ", ".join(path for path, _ in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    count = f"{len(found)} of {len(tree.leaves(state))} leaves"
    text = f"step {step}: {what}{since}; not finite in the state: {listed}{more}, {count}{where}"
    if nonfinite in ("roll back", "rerun"):
        kind = RollBack if nonfinite == "roll back" else RunAgain
        raise kind(
            f"{text}; `Run` goes back, a loop by hand does it itself", step if first_bad is None else first_bad, step
        )
    if nonfinite != "warn":
        fix = (
            "go back to a checkpoint from before (Manager.restore_latest prefers those whose loss and norm were "
            "finite), with a lower rate, clipping, other data or optim.skip_nonfinite; nonfinite='warn' trains on "
            "regardless"
        )
        raise NonFiniteError(f"{text}; {fix}", step, [path for path, _ in found], first_bad)
    _warn(f"{text}; training goes on, as nonfinite='warn' says", world)


def _is_bad(x: torch.Tensor) -> torch.Tensor:
    """0-d bool on the tensor's device, without a temporary of the tensor's size where its dtype allows that."""
    x = x.detach()
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=x.device)
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.float() if x.element_size() == 1 else x
    low, high = torch.aminmax(x)  # NaN wins
    return (low.isfinite() & high.isfinite()).logical_not()


def _warn(text: str, world) -> None:
    if world is None or world.rank == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=5)
