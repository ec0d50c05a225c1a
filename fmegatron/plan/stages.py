"""The memory of a pipeline on one of its ranks: its row of the table on fake tensors, each part with its own peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fmegatron.plan.cuda.kernels import Kernel, added
from fmegatron.plan.torch_private import FakeTensorMode
from fmegatron.plan.wrapper import Counted, Held, made_by
from fmegatron.step.graph import nodes

__all__ = ["staged"]


def staged(bound: Any, count: Callable[[Any], Counted]) -> Counted:
    """The memory of one call of a pipeline above its arguments.

    bound: the `BoundPipeline`. count: of a compiled part, the memory of a call of it.

    Between F, B and W a rank holds what the table says, what it has received and not read, what it sent last, and the
    sums of its gradients. phases: the peak of the parts of each kind of action, and of the end.
    """
    plan = bound.plan
    counts = {part: count(of) for part, of in bound.parts.items()}
    with FakeTensorMode():
        inputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in plan.fakes]
        live = _Live(inputs, counts)
        brought = () if bound.begin is None else live.results(plan.first())
        live.rank = rank = bound.on_paper(inputs, brought, live.part)
        if bound.begin is not None:
            live.before("begin", [])
            live.see(count(bound.begin))
        bound.walk(rank, live.before)
        live.before("end", [x for xs in rank.shares() for x in xs])
        live.see(count(bound.end))
    outs = nodes.items_of(bound.graph_module.graph.output_node().args[0])
    returned = sum(node.meta["val"].nbytes for node in outs)
    held = tuple(sorted(live.held, key=lambda one: -one.nbytes))
    results = tuple(map(made_by, outs))
    return Counted(live.peak, held, live.phases, {}, returned, results, added(live.kernels))


class _Live:
    """What a rank holds while its parts run. kind: of the action that runs. beside: what is alive outside of `rank`."""

    def __init__(self, inputs: list[torch.Tensor], counts: dict[Any, Counted]):
        self.inputs, self.counts, self.kind = inputs, counts, ""
        self.rank: Any = None
        self.beside: Iterable[torch.Tensor] = ()
        self.peak, self.held, self.phases = 0, list[Held](), dict[str, int]()
        self.kernels: list[Kernel] = []
        self.made: dict[torch.UntypedStorage, tuple[str, str, str]] = {}  # storage -> (part, operator, line)

    def before(self, kind: str, beside: list[torch.Tensor]) -> None:
        """An action of this kind comes next, with this alive outside of `rank`."""
        self.kind, self.beside = kind, beside

    def part(self, part: Any, values: list) -> list[torch.Tensor]:
        """A part's results; its peak is seen beside what is alive."""
        del values
        self.see(self.counts[part])
        return self.results(part)

    def results(self, part: Any) -> list[torch.Tensor]:
        """Tensors like what a part gives."""
        outs = nodes.items_of(part.graph_module.graph.output_node().args[0])
        found = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in (n.meta["val"] for n in outs)]
        for x, node in zip(found, outs, strict=True):
            self.made[x.untyped_storage()] = part.name, *made_by(node)
        return found

    def see(self, inside: Counted) -> None:
        """What is alive while a part with this memory of its own runs."""
        self.kernels += inside.kernels
        alive = self._alive()
        total = sum(x.untyped_storage().nbytes() for x in alive.values()) + inside.peak
        self.phases[self.kind] = max(self.phases.get(self.kind, 0), total)
        if total > self.peak:
            self.peak, self.held = total, [*map(self._shown, alive.values()), *inside.held]

    def _alive(self) -> dict[torch.UntypedStorage, torch.Tensor]:
        """By storage: each counts once, and those of the node's inputs not at all."""
        assert self.rank is not None, "a part is run by it"
        of = self.rank
        given = {x.untyped_storage() for x in self.inputs}
        every = (
            *of.inputs.values(),
            *of.sums.values(),
            *of.held.values.values(),
            *of.held.sides.values(),
            *(x for each in (of.held.gathered, of.held.reduced) for found in each.values() for x in found.values()),
            *self.beside,
        )
        found = {x.untyped_storage(): x for x in every}
        return {key: x for key, x in found.items() if key not in given}

    def _shown(self, x: torch.Tensor) -> Held:
        nbytes = x.untyped_storage().nbytes()
        label, op, at = self.made.get(x.untyped_storage(), ("pipeline", "sum of gradients, or received", "?"))
        return Held("a value", nbytes, x.dtype, tuple(x.shape), at, op, label)
