"""Rules for products of matrices: plain, batched, of experts, in fp8. Findings are proofs (`contraction`)."""

from __future__ import annotations

from types import MappingProxyType

import torch

from fmegatron.step.check.arithmetic import contraction, elementwise
from fmegatron.step.check.atoms import over, plain
from fmegatron.step.check.scope import Rules, Scope
from fmegatron.step.check.values import Unknown, Value, Varying, Wrong


def matrices(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """self[m, k] @ mat2[k, n]."""
    return contraction(scope, node, given["self"], given["mat2"], 0)


def batches(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """self[b, m, k] @ mat2[b, k, n]."""
    return contraction(scope, node, given["self"], given["mat2"], 1)


def matrix_vector(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """self[m, k] @ vec[k]."""
    return contraction(scope, node, given["self"], given["vec"], 0)


def vectors(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """self[k] @ tensor[k]."""
    return contraction(scope, node, given["self"], given["tensor"], 0)


def add_matrices(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """self + mat1 @ mat2."""
    both = contraction(scope, node, given["mat1"], given["mat2"], 0)
    return elementwise(scope, node, "sum", [given["self"], both])


def add_batches(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """self + batch1 @ batch2."""
    both = contraction(scope, node, given["batch1"], given["batch2"], 1)
    return elementwise(scope, node, "sum", [given["self"], both])


def scaled(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """_scaled_mm: (self[m, k] scale_a) @ (mat2[k, n] scale_b) + bias, with scales of tensors, rows or columns.

    Scales must be alike on all ranks that hold parts of one row: taken from a local maximum they are a pending max.
    """
    out = contraction(scope, node, given["self"], given["mat2"], 0)
    for name in ("scale_a", "scale_b"):
        scale = given[name]
        if len(scale.dims) in (0, 2) and all(dim in ((), *out.dims) for dim in scale.dims):
            out = elementwise(scope, node, "product", [out, scale])
        elif not scale.settled or scale.sharded:  # blocks: alike on all ranks, or nothing is known
            return None
    bias = given["bias"]
    return out if bias is None else elementwise(scope, node, "sum", [out, bias])


# ---- experts ---------------------------------------------------------------------------------------------------------
def grouped(scope: Scope, node: torch.fx.Node, given: dict) -> Value | None:
    """_grouped_mm: rows of a group with the matrix of the group, and the forms of its gradients.

        self[M, K] @ mat2[G, K, N] -> [M, N]       offs[G]: where the rows of each group end
        self[K, M] @ mat2[M, N] -> [G, K, N]       gradient of the matrices: sums over the rows of each group
        self[G, M, K] @ mat2[K, N] -> [M, N]       columns in groups
        self[G, M, K] @ mat2[G, K, N] -> [G, M, N] the same as bmm

    Where the matrices are sharded (experts), so must be the rows: after an all_to_all, each rank has those of its own.
    """
    a, b, offs = given["self"], given["mat2"], given["offs"]
    forms = {(2, 3): _rows_by_groups, (2, 2): _groups_of_rows, (3, 3): lambda s, n, a, b, o: contraction(s, n, a, b, 1)}
    rule = forms.get((len(a.dims), len(b.dims)))
    return None if rule is None else rule(scope, node, a, b, offs)


def _rows_by_groups(scope, node, x, w, offs):
    experts = over(w.dims[0])
    for axis in sorted(experts):
        if not x.is_(axis, Varying, Wrong, Unknown) and 0 not in x.shards(axis):
            wrong = Wrong(node, f"multiplies rows that are {x.state(axis)} by matrices that are sharded",
                       "all_to_all the rows to the ranks of their experts first")  # fmt: skip
            x = x.marked({axis: wrong})
    w = w.without(experts)
    return contraction(scope, node, x, w.with_dims(w.dims[1:]), 0)


def _groups_of_rows(scope, node, a, b, offs):
    """Over axes whose ranks have groups of their own (offs is sharded) the groups are sharded; over others that shard
    the rows the result is pending; where offs depends on data that differs between ranks, only `declare` can tell."""
    out = contraction(scope, node, a, b, 0)
    groups = offs.sharded
    unknown = {axis: Varying() for axis in offs.marks if not offs.is_(axis, Unknown, Wrong)}
    marks = {axis: mark for axis, mark in out.marks.items() if axis not in groups and axis not in unknown}
    first = plain(node.meta["val"].shape[0], tuple(a for a in scope.mesh.names if a in groups))
    return Value((first, *out.dims), marks, out.excess).marked(
        unknown | {a: offs.marks[a] for a in offs.marks if a not in unknown}
    )


RULES: Rules = MappingProxyType(
    {
        "mm": matrices,
        "bmm": batches,
        "mv": matrix_vector,
        "dot": vectors,
        "addmm": add_matrices,
        "baddbmm": add_batches,
        "_int_mm": matrices,
        "_scaled_mm": scaled,
        "_grouped_mm": grouped,
    }
)
