"""ArraySpec: layout and initial values of one leaf, the single source for init, optimizer state and checkpoint."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.tree.labels import alike
from fmegatron.tree.structure import Tree, leaves, map_with_path, paths
from fmegatron.tree.structure import map as tree_map


@dataclass(frozen=True)
class Constant:
    """Every element is `value`: what a number is that is given as initial values (`initial`)."""

    value: float = 0.0


@dataclass(frozen=True)
class Normal:
    """Normal distribution of mean 0 and standard deviation `std`. Raises ValueError for one below 0."""

    std: float = 1.0

    def __post_init__(self):
        if not is_number(self.std) or not 0 <= self.std < math.inf:
            raise ValueError(f"Normal: std: got {self.std!r:.60}, wanted a finite number of 0 or more; Normal(0.02)")


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution on [lo, hi). Raises ValueError for bounds that are none."""

    lo: float = 0.0
    hi: float = 1.0

    def __post_init__(self):
        if not (is_number(self.lo) and is_number(self.hi) and -math.inf < self.lo <= self.hi < math.inf):
            raise ValueError(
                f"Uniform: got lo={self.lo!r:.60}, hi={self.hi!r:.60}, wanted finite numbers, the lower first; "
                "Uniform(-0.1, 0.1)"
            )


Init = Constant | Normal | Uniform
zeros = Constant(0.0)


def is_number(x: Any) -> bool:
    """Whether it is a real number, of Python or of numpy; what is true or false is none."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def initial(given: Any) -> Init:
    """Initial values as they were given: a number is that of every element. ValueError for what is none."""
    if is_number(given):
        return Constant(int(given) if isinstance(given, numbers.Integral) else float(given))
    if not isinstance(given, Init):
        raise ValueError(
            f"init: got {given!r:.60}, wanted a number, Normal(std) or Uniform(lo, hi); "
            "or, of several leaves, rows: [('norm', 1.0), ('.*', tree.Normal(0.02))]"
        )
    return given


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether arrays of the dtype have this number, to rounding of their own."""
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return value != value or abs(value) == math.inf or abs(value) <= torch.finfo(dtype).max
    whole = torch.iinfo(dtype)
    return whole.min <= value <= whole.max and value == int(value)


@dataclass(frozen=True)
class ArraySpec:
    """An array that does not exist yet: its layout and its initial values. A leaf in trees of specs.

    drawn_as: the name that, with the key, decides the random values; None: its path in the tree that `init` is given.
    Specs with one name have the values of one array, wherever they stand and however they are laid out: a parameter in
    a state, its master copy, an average of it. `named` and `copies` fill it in.
    rounded_to: dtypes to which the values are rounded before the array's own, in order: the float32 master of a
    bfloat16 parameter begins as the parameter, not as the number that was rounded to it. Empty but in copies.
    strategy: by which the array is sharded at rest, and by which its gradient, its optimizer's state and the rows of a
    batch follow (`strategy_of`); None: as the layout states, and all else likewise.
    stacked: whether dim 0 counts layers; its layout then knows it, too (`Layout.lead`).
    saved: whether checkpoints hold it. What they do not hold, buffers and caches, a restore makes anew of `init`, which
    then is a number.
    init: `Normal(std)`, `Uniform(lo, hi)`, or the number that every element is; 0 by default.

    Raises ValueError for other initial values, and for a number that the dtype does not have.
    """

    layout: Layout
    init: Any = zeros
    drawn_as: str | None = None
    rounded_to: tuple[torch.dtype, ...] = ()
    strategy: DataParallel | None = None
    stacked: bool = False
    saved: bool = True

    def __post_init__(self):
        object.__setattr__(self, "init", initial(self.init))
        if isinstance(self.init, Constant) and not _holds(self.dtype, self.init.value):
            raise ValueError(
                f"init: got {self.init.value} for {self.layout}, wanted a number that its dtype has; give another "
                "number, or dtype="
            )
        if not self.saved and not isinstance(self.init, Constant):
            raise ValueError(f"ArraySpec: got saved=False and {self.init}, wanted a number: a restore has no key")
        if self.stacked and self.shape and not self.layout.lead:
            object.__setattr__(self, "layout", self.layout.replace(lead=1))

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the array."""
        return self.layout.dtype

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout."""
        return self.layout.mesh

    def replace(self, init: Init | float | None = None, **changes) -> ArraySpec:
        """This spec with another init and/or with fields of its layout changed (`Layout.replace`).

        One that becomes constant, or of another shape, is another array: it loses `drawn_as` and `rounded_to`.
        """
        layout = self.layout.replace(**changes) if changes else self.layout
        init = self.init if init is None else initial(init)
        other = layout.shape != self.shape or (isinstance(init, Constant) and init != self.init)
        if not other:
            return replace(self, layout=layout, init=init)
        return ArraySpec(layout, init, strategy=self.strategy, stacked=self.stacked, saved=self.saved)

    @property
    def is_copy(self) -> bool:
        """Whether it begins as another array does (made by `copies`)."""
        return bool(self.rounded_to)


def strategy_of(specs: Tree) -> DataParallel | None:
    """The strategy that the specs of a tree state; None where none of them states one (or they are Layouts).

    Raises ValueError, naming two leaves, for two strategies in one tree.
    """
    found: dict[DataParallel, str] = {}
    for path, spec in zip(paths(specs), leaves(specs), strict=True):
        if isinstance(spec, ArraySpec) and spec.strategy is not None:
            found.setdefault(spec.strategy, path)
    if len(found) > 1:
        (one, at), (other, there) = list(found.items())[:2]
        raise ValueError(
            f"specs: got two strategies, {one} of {at!r} and {other} of {there!r}, wanted one: a step reduces all "
            "gradients alike; make both with the same strategy"
        )
    return next(iter(found), None)


def named(specs: Tree) -> Tree:
    """The specs of a tree, each drawn under its path in this tree (`drawn_as`), unless it has a name already.

    Specs that are named keep their values wherever the tree is put: `init({"params": named(specs)}, key, rank)` draws
    what `init(specs, key, rank)` draws.
    """
    return map_with_path(lambda path, spec: replace(spec, drawn_as=path) if spec.drawn_as is None else spec, specs)


def copies(x: Tree, dtype: Callable[[torch.dtype], torch.dtype] | torch.dtype | None = None) -> Tree:
    """Copies of every leaf of a tree, in memory of their own: tensors of tensors, ArraySpecs of ArraySpecs. Tensors
    keep their layouts, where these are known.

    The copy of a spec is drawn as its original is (by name: the path in this tree, if it has none), so that master
    weights and averages of parameters begin as the parameters, bit for bit. Where the originals stand deeper in the
    tree that is initialised, name them first (`named`); `init` raises ValueError where that was forgotten.

    dtype: of the copies, or a function from an original's dtype to its copy's; None: the same.

    >>> from fmegatron.layout import Mesh
    >>> specs = {"w": ArraySpec(Layout((2,), torch.bfloat16, Mesh()), Normal())}
    >>> copies(specs, torch.float32)["w"].drawn_as, copies(specs, torch.float32)["w"].rounded_to
    ('w', (torch.bfloat16,))
    """

    def one(path, leaf):
        wanted = leaf.dtype if dtype is None else dtype if isinstance(dtype, torch.dtype) else dtype(leaf.dtype)
        if isinstance(leaf, Layout):
            return leaf.replace(dtype=wanted)
        if not isinstance(leaf, ArraySpec):
            return alike(leaf.detach().to(wanted, copy=True), leaf)
        name = path if leaf.drawn_as is None else leaf.drawn_as
        return replace(leaf.replace(dtype=wanted), drawn_as=name, rounded_to=(*leaf.rounded_to, leaf.dtype))

    return map_with_path(one, x)


def zeros_like(x: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Zeros of the same kind, for every leaf of a tree: tensors for tensors, ArraySpecs of zeros for ArraySpecs.

    So `opt.init(specs)` runs the same code as `opt.init(params)` and gives the specs of the state.  dtype: another
    dtype for the zeros.
    """

    def one(leaf):
        if isinstance(leaf, ArraySpec):
            layout = leaf.layout if dtype is None else leaf.layout.replace(dtype=dtype)
            return ArraySpec(layout, strategy=leaf.strategy, stacked=leaf.stacked)
        if isinstance(leaf, Layout):
            return leaf if dtype is None else leaf.replace(dtype=dtype)
        return alike(torch.zeros_like(leaf, dtype=dtype), leaf)

    return tree_map(one, x)
