"""Relations between the ranks' values and the value of one rank: equal, concatenated, summed, maximum, by axis."""

from __future__ import annotations

from typing import Any

import torch

from fmegatron.layout import Mesh

__all__ = ["numbers", "relate", "relates"]


def numbers(x: torch.Tensor) -> torch.Tensor:
    """A value as numbers that torch compares: float8, for which it has few ops, as float64; complex [...] as its parts
    [..., 2]; all others as they are."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.double() if x.is_floating_point() and x.element_size() == 1 else x


def relate(
    values: list[torch.Tensor],
    reference: torch.Tensor,
    mesh: Mesh,
    parts: tuple[tuple[int, ...], ...] = (),
    tolerance: float = 1e-9,
) -> dict[str, Any] | None:
    """How one value per rank makes up `reference`, or None if it does not.

    -> per axis "equal", "sum", "max", ("concat", dim, stride) or ("concat", dim, sizes of interleaved parts). A stride
    s > 1 joins each of s consecutive pieces of the dim on its own: a view that merges a full dim with a split one
    makes such shards.

    Args:
        values: one per rank of the mesh.
        reference: the value of one rank.
        mesh: of the ranks.
        parts: sizes of the interleaved parts of global dims that are worth trying.
        tolerance: relative to the element and to the typical element.
    """
    if any(x.dtype != reference.dtype for x in values):
        return None
    kinds = (
        ("sum",) if reference.is_complex() else ("sum", "max")
    )  # of the parts of complex numbers there is no largest
    values, reference = [numbers(x) for x in values], numbers(reference)
    for kind in kinds:
        found = _Search(reference, mesh, parts, tolerance, kind)(values)
        if found is not None:
            return found
    return None


def relates(
    values: list[torch.Tensor], reference: torch.Tensor, mesh: Mesh, how: dict, tolerance: float = 1e-9
) -> bool:
    """Whether the ranks' values make up `reference` in just this way (a result of `relate`)."""
    if any(x.dtype != reference.dtype for x in values):
        return False
    values, reference = [numbers(x) for x in values], numbers(reference)
    fits = _Fit(reference, tolerance)
    for name, kind in how.items():  # as relate found them: minor axes first
        groups = _groups(values, mesh[name])
        if kind == "equal" and not all(fits.equal(other, group[0]) for group in groups for other in group[1:]):
            return False
        values = [group[0] if kind == "equal" else _join(group, kind) for group in groups]
    return fits(values[0])


class _Fit:
    """Comparison with one reference, relative to the element and to the typical element."""

    def __init__(self, reference, tolerance):
        self.reference, self.tolerance = reference, tolerance
        magnitude = reference.double().abs().nan_to_num(0.0, 0.0, 0.0)
        nonzero = magnitude[magnitude > 0]
        self.limit = tolerance * (magnitude + (float(nonzero.median()) if nonzero.numel() else 0.0))

    def __call__(self, value):
        return self._close(value, self.reference, self.limit)

    def equal(self, a, b):
        """Whether two ranks hold the same."""
        return a is b or self._close(a, b, self.tolerance * b.double().abs())

    def _close(self, a, b, limit):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # NaN must stand at the same places; where both are NaN or infinite the difference is NaN and counts as none
        if a.is_floating_point() and not torch.equal(a.isnan(), b.isnan()):
            return False
        return bool(((a.double() - b.double()).abs().nan_to_num(nan=0.0) <= limit).all())


class _Search:
    """The ways in which values may make up a reference by equality, concatenation and one of sum and max.

    One number of each value, the sum or the largest of its elements, makes up that of the reference in the same way:
    this excludes most ways before tensors are joined.
    """

    def __init__(self, reference, mesh, parts, tolerance, kind):
        self.reference, self.parts, self.kind = reference, parts, kind
        self.names = [name for name in mesh.names if mesh[name] > 1]
        self.sizes = [mesh[name] for name in self.names]
        self.fits = _Fit(reference, tolerance)

    def __call__(self, values):
        numbers = [self._number(x) for x in values]
        self.wanted = self._number(self.reference)
        rounding = 1e-9 * max(float(x.double().abs().sum()) for x in values) * len(values)
        self.limit = float(self.fits.limit.sum()) + rounding
        return self._ways(list(values), numbers, {})

    def _number(self, x):
        if self.kind == "sum":
            return float(x.double().sum())
        return float(x.double().amax()) if x.numel() else 0.0

    def _ways(self, values, numbers, found):
        count = len(self.names) - len(found)  # values over names[:count], the last of these minor
        if count == 0:
            return found if self.fits(values[0]) else None
        name, n = self.names[count - 1], self.sizes[count - 1]
        groups, numbers = _groups(values, n), _groups(numbers, n)
        same = all(self.fits.equal(other, group[0]) for group in groups for other in group[1:])
        if same:
            rest = [group[0] for group in groups], [group[0] for group in numbers]
            result = self._ways(*rest, {**found, name: "equal"})
            if result is not None:
                return result
        joined = [self._joined(group) for group in numbers]
        if self._may_fit(joined, count - 1):
            for how in _joins(values[0], self.reference, n, self.parts, self.kind):
                if not (same and how == "max"):
                    result = self._ways([_join(group, how) for group in groups], joined, {**found, name: how})
                    if result is not None:
                        return result
        return None

    def _may_fit(self, numbers, count):
        if count == 0:
            return not abs(numbers[0] - self.wanted) > self.limit  # also where one is NaN
        groups = _groups(numbers, self.sizes[count - 1])
        return self._may_fit([group[0] for group in groups], count - 1) or self._may_fit(
            [self._joined(group) for group in groups], count - 1
        )

    def _joined(self, numbers):
        return sum(numbers) if self.kind == "sum" else max(numbers)


def _groups(values, n):
    return [values[i : i + n] for i in range(0, len(values), n)]


def _joins(local, reference, n, parts, kind):
    """The ways in which the values of n ranks might be put together, likely ones first."""
    if local.dim() == reference.dim() and local.shape != reference.shape:
        for dim in range(reference.dim()):
            size, wanted = local.shape[dim], reference.shape[dim]
            if size == wanted or size * n > wanted:
                continue
            for stride in (s for s in range(1, size + 1) if size % s == 0):
                yield "concat", dim, stride
            for sizes in parts:
                if sum(sizes) == wanted and all(part * size % wanted == 0 for part in sizes):
                    yield "concat", dim, sizes
    if reference.dtype is not torch.bool:
        yield kind


def _join(group, how):
    if how == "sum":
        return torch.stack(group).sum(0, dtype=group[0].dtype)
    if how == "max":
        return torch.stack(group).amax(0)
    _, dim, pieces = how
    size = group[0].shape[dim]
    if isinstance(pieces, int):
        pieces = [size // pieces] * pieces
    else:
        pieces = [part * size // sum(pieces) for part in pieces]
    cut = [x.split(pieces, dim) for x in group]
    return torch.cat([one[i] for i in range(len(pieces)) for one in cut], dim)
