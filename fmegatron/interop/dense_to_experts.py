"""Upcycling: the MLPs of a dense checkpoint as experts, by rules of a restore (arXiv 2212.05055)."""

from __future__ import annotations

from fmegatron.checkpoint import copy, drop, fresh, stack
from fmegatron.checkpoint.reading import mapping


def upcycle(experts: int, mlp: str = "mlp") -> list[mapping.Rule]:
    """Rules by which a dense model's checkpoint restores as one whose blocks have `MoE` for their gated `MLP`.

    Each of the experts is a copy of the block's MLP, moments of the optimizer too; routers are those of `initial`. With
    gates that sum to 1 (`nn.Router(normalised=True)`) the model computes what the dense one did; experts part as their
    gradients differ.

        state = restore(path, layouts, rules=interop.upcycle(8), initial=state, strict="warn")

    experts: how many there are. mlp: the name of the part in its block (`model.Part`). Leaves that a dense model lacks
    besides (shared experts, biases) need a rule of their own: `fresh(...)` from `initial`.
    Raises ValueError for less than one expert.
    """
    if experts < 1:
        raise ValueError(f"upcycle: got {experts} experts, wanted at least 1")
    rules: list[mapping.Rule] = []
    for dense, ours in (("w_gate_up", "up"), ("w_down", "down")):
        each = rf"\1/{ours}_of_expert"
        rules += [copy(rf"(.*/{mlp})/{dense}", f"{each}{e}") for e in range(experts)]
        rules += [drop(rf".*/{mlp}/{dense}"), stack(rf"(.*/{mlp})/{ours}_of_expert{{e}}", rf"\1/{ours}", dim=1)]
    return [*rules, fresh(rf".*/{mlp}/router")]
