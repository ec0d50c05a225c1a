"""The base class of mixers: two abstract methods, and defaults for all that a decoder, a plan or generation asks.

Legend: B batch, S sequence, T slots of a cache, D width.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.layout import Mesh, data_parallel
from fmegatron.model.arrays import Arrays, TokenContext
from fmegatron.model.rope import Rope
from fmegatron.nn import attention_masks
from fmegatron.step import Part
from fmegatron.tree import structure

Order = Literal["any", "row", "zigzag"]
Cache: TypeAlias = Any  # a tree of tensors, [rows, ...] each
_RANDOM = ("dropout", "jitter", "noise")  # names of fields that must be among the rates of a mixer


@dataclass(frozen=True)
class Widths:
    """What a block keeps of one part and of the norm before it, and works with: numbers per token (`plan.quick`).

    mincut: kept under "mincut". all: kept where everything is that the backward reads. forward: alive at work beside
    what is kept. backward: gradients of values, that are alive until the gradients of weights are made of them. remade:
    what "mincut" makes again. first: gradients of values where the backward of the part begins. late: whether the
    gradients of its weights are made at the end of the block's backward. uncounted: what is in none of them, in words.
    """

    mincut: float
    all: float
    forward: float
    backward: float
    remade: float
    first: float
    late: bool = False
    uncounted: tuple[str, ...] = ()


class Rule(NamedTuple):
    """By what `Mixer.post_update` goes. field: of the mixer, for errors. value: of it. statistics: which it needs."""

    field: str
    value: Hashable
    statistics: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Slots:
    """Where tokens that are read together go in a cache.

    slots: int64 [S], the slot of each. padding: int64 [B], how many slots each row has before its text.
    """

    slots: Tensor
    padding: Tensor
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict, repr=False)  # of one call: made once

    @property
    def positions(self) -> Tensor:
        """int64 [B, S]: of the tokens in their texts; below 0 for padding."""
        return self.slots - self.padding[:, None]

    def visible(self, length: int, window: int | None = None) -> Tensor:
        """Which slots each token looks at, bool [B, S, T]: at those up to its own, of its text (padding: of padding).

        length: T. window: only at the last so many; None: at all.
        """
        key = length, window
        if key not in self._masks:
            slots_T = torch.arange(length, device=self.slots.device)
            text_BS, text_BT = self.positions >= 0, slots_T >= self.padding[:, None]
            own_BST = text_BS.to(torch.int64)[:, :, None] == text_BT.to(torch.int64)[:, None]
            self._masks[key] = attention_masks.visible(self.slots, slots_T, window) & own_BST
        return self._masks[key]


class Mixer(abc.ABC):
    """What stands in a part of a block: a frozen dataclass of sizes, with its arrays and its maths.

        @dataclass(frozen=True)
        class Gate(model.PerToken):
            def arrays(self, dim):
                return {"gate": model.Array((dim,))}

            def __call__(self, u, w, at):
                return u * torch.sigmoid(w["gate"])

    `arrays` and `__call__` must be written. All others have defaults, which take nothing for granted: they refuse
    (`read`), or they say that something is not known, which plans then repeat. `PerToken` has those of a mixer whose
    tokens do not look at each other; `Wrapped` is a mixer around another. A subclass of a mixer that reads
    (`Attention`) with a call of its own, and no read, is a TypeError when it is defined: its texts would be those of
    another model.
    """

    rope: Rope | None = None  # whose angles `at.angles` has; None: positions are not rotated

    def __init_subclass__(cls, **options: object) -> None:
        """A field `rope` without a value is required, as in any dataclass: the None of this class is no default.

        TypeError for a subclass with a `__call__` of its own and the `read` of a class that computes something else.
        """
        super().__init_subclass__(**options)
        if "rope" in inspect.get_annotations(cls) and "rope" not in vars(cls):
            setattr(cls, "rope", field())  # noqa: B010  (a type checker knows no such field)
        call, read = (next(base for base in cls.__mro__ if name in vars(base)) for name in ("__call__", "read"))
        # That of Mixer refuses, and that of PerToken is the call.
        if cls.__mro__.index(call) < cls.__mro__.index(read) and read not in (Mixer, PerToken):
            raise TypeError(
                f"{cls.__name__}.__call__: got one of its own and the read of {read.__name__}, wanted read of its own "
                "too, as generation reads and does not call; write it, derive the class from model.Wrapped, which "
                f"needs hooks only, or write read = {read.__name__}.read in the class if that reads what is called"
            )

    @abc.abstractmethod
    def arrays(self, dim: int) -> Arrays:
        """The tree of its arrays, in a model of width `dim`: specs, layouts, counts and checkpoints follow from it."""

    @abc.abstractmethod
    def __call__(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """What is added to the stream, y[B, S, D], or (y, statistics): tensors by name, of which `losses` are made.

        Args:
            u_BSD: the normed stream, replicated over tp, or with sequence parallelism split over it on the sequence
                (`at.splits(u)`); y as u is.
            w: the arrays, gathered over the data axes and split over the others.
            at: of the tokens; `at.axes` are those of the mesh.
        """

    @property
    def order(self) -> Order:
        """In which order tokens that cp splits must be: "row", as in the text; "zigzag", as `nn.zigzag`; "any"."""
        return "row"

    def check_mesh(self, mesh: Mesh) -> None:  # noqa: B027  (a default, not a method to be written)
        """Raise ValueError where the mesh does not divide it; the default accepts every mesh."""

    def _require(self, where: str) -> None:
        """ValueError for a field of random numbers that is not among the rates."""
        require_rates(self, self.rates, where, "rates")

    # ---- counts and plans --------------------------------------------------------------------------------------------
    def products(self, seq_len: int, causal: bool) -> float | None:
        """Multiply-adds times 2 of a token besides those with its arrays, on average; None: not known."""
        return None

    def widths(self, dim: float, tp: int, number: int) -> Widths | None:
        """What a block keeps of it, in numbers per token; None: not known.

        Args:
            dim: width of the stream on a rank.
            tp: ranks that share a block.
            number: bytes of a number of the compute dtype.
        """
        return None

    def sends(self, mesh: Mesh) -> tuple[str, ...]:
        """What it sends and no plan counts, in words.

        Plans count one sum over tp in the forward and one in the backward, and say what attention sends over cp.
        """
        if mesh["tp"] == 1 and mesh.extent(data_parallel.SEQUENCE_AXES) == 1:
            return ()
        return (f"what {type(self).__name__} sends besides a sum over tp, forward and backward",)

    # ---- training ----------------------------------------------------------------------------------------------------
    @property
    def couples(self) -> tuple[str, ...]:
        """What of it depends on which rows are in a microbatch, in words: its meaning changes with their number."""
        return ()

    @property
    def rates(self) -> dict[str, float]:
        """Of all that is random in training, by name, such as {"dropout": 0.1}."""
        return {}

    def without_rates(self) -> Mixer:
        """The same with all of them 0. The default takes `rates` for fields of the dataclass."""
        zero = {name: 0.0 for name, rate in self.rates.items() if rate}
        made: Any = self
        return dataclasses.replace(made, **zero) if zero else self

    def losses(self, statistics: dict[str, Tensor], tokens: Tensor | int) -> dict[str, Part]:
        """{name: `step.mean(total, count)` with its weight}: what its statistics of one block add to the loss.

        Parts of equal names of several blocks are added up. A count comes from here or from the batch, and never from
        inside of the call: made in a compiled layer it would depend on the layer's weights.

        Args:
            statistics: of the call: a total over this rank's tokens, equal on all ranks of tp.
            tokens: how many these are, without padding.
        """
        return {}

    @property
    def rule(self) -> Rule | None:
        """By what `post_update` goes; None: a step sets nothing of it."""
        return None

    def post_update(self, w: dict, statistics: dict[str, Tensor]) -> dict:
        """The arrays after a step, where a rule and not a gradient sets some (`model.post_update`).

        Args:
            w: this rank's shards of a stack of blocks, with a leading dim [L] for layers.
            statistics: those that `rule` names, of the step, summed over microbatches, with a leading dim [L].
        """
        return w

    # ---- generation --------------------------------------------------------------------------------------------------
    @property
    def cache_width(self) -> int | None:
        """Numbers that generation keeps for each token, over all tp ranks together; None: not known."""
        return None

    def read(
        self, u_BSD: Tensor, w: structure.Tree, at: TokenContext, cache: Cache, slots: Slots | None
    ) -> tuple[Any, Cache]:
        """What `__call__` gives for tokens behind those of a cache, and the cache with these tokens too.

        Sequences are not split, neither over tp nor over cp. A cache is a tree of tensors [rows, ...], a value: what is
        given is not changed.

        Args:
            u_BSD: as of `__call__`.
            w: as of `__call__`.
            at: as of `__call__`; padding before a text is a document of its own.
            cache: what `new_cache` or `read` gave; None: nothing is before these tokens, and every row is a text.
            slots: where the tokens go in the cache; None with it.
        """
        raise ValueError(
            f"generate: got the mixer {self!r}, which has no way to read token by token, wanted one that does; write "
            "read and new_cache as Attention or Mamba have them, or derive it from model.PerToken if no token looks at "
            "another"
        )

    def new_cache(self, one: Cache, rows: int, slots: int) -> Cache:
        """A cache in which nothing was read. The default is for states, whose size does not depend on the slots.

        Args:
            one: what `read` made of one token of one row.
            rows: of the new cache.
            slots: for so many tokens.
        """
        return tree.map(lambda x: x.new_zeros((rows, *x.shape[1:])), one)


class PerToken(Mixer):
    """A mixer whose tokens do not look at each other: any order of them is right, and generation keeps nothing."""

    @property
    def order(self) -> Order:
        """Any."""
        return "any"

    def products(self, seq_len: int, causal: bool) -> float | None:
        """None besides those with its arrays."""
        return 0.0

    @property
    def cache_width(self) -> int | None:
        """Nothing is kept."""
        return 0

    def read(
        self, u_BSD: Tensor, w: structure.Tree, at: TokenContext, cache: Cache, slots: Slots | None
    ) -> tuple[Any, Cache]:
        """What the call gives, and an empty cache."""
        return self(u_BSD, w, at), {}


def require_mixer(mixer: Any, where: str) -> None:
    """ValueError for what is no `Mixer`, has no hash, or has fields of random numbers that are not among its rates."""
    kind = type(mixer).__name__
    if not isinstance(mixer, Mixer):  # the one question of its kind: whoever passes here is asked by methods
        raise ValueError(
            f"{where}: got a {kind}, wanted a model.Mixer; write class {kind}(model.Mixer), or (model.PerToken) if no "
            "token looks at another, or (model.Wrapped) around another mixer"
        )
    try:
        hash(mixer)
    except TypeError:
        raise ValueError(
            f"{where}: got a {kind} that has no hash, wanted a value, since equal mixers "
            "share what is compiled; write @dataclass(frozen=True), with tuples for lists"
        ) from None
    mixer._require(where)
    if mixer.order not in get_args(Order):
        raise ValueError(
            f"{where}: got the order {mixer.order!r} of a {kind}, wanted one of {', '.join(get_args(Order))}"
        )


def require_rates(mixer: Mixer, rates: dict[str, float], where: str, name_of_rates: str) -> None:
    """ValueError for a mixer with a field of random numbers, of its own, that is not among these rates of its own."""
    fields = {field.name for field in dataclasses.fields(mixer)} if dataclasses.is_dataclass(mixer) else set()
    for name in _RANDOM:
        if name in fields and name not in rates:
            raise ValueError(
                f"{where}: got {type(mixer).__name__}.{name}, which is not among its {name_of_rates}, wanted it there, "
                f"so that no random number is drawn unasked; write a property {name_of_rates} that gives "
                f'{{"{name}": self.{name}}}'
            )
