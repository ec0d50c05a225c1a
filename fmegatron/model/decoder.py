"""A decoder as a value: a list of blocks, what is before and after them, and its dtypes.

A block is a tuple of parts, a part a mixer between norms. Blocks with equal arrays share a stack, whatever they
compute.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from fmegatron.collectives import Precision
from fmegatron.layout import Mesh, data_parallel
from fmegatron.model.arrays import Array, Arrays, TokenContext
from fmegatron.model.draws import require_rate
from fmegatron.model.mixer import Mixer, require_mixer
from fmegatron.model.norm import Norm, RMSNorm
from fmegatron.model.rope import Rope
from fmegatron.nn import attention_masks


@dataclass(frozen=True)
class Part:
    """One residual part of a block: x + after(mixer(norm(x))). Its arrays: `name`_norm, `name` and `name`_after.

    dropout: in training, of what is added to x; where the loss is given samples (`model.loss`). ValueError for a rate
    that is no probability.
    """

    name: str
    mixer: Mixer
    norm: Norm | None = RMSNorm()
    after: Norm | None = None
    dropout: float = 0.0

    def __post_init__(self):
        require_rate(self.dropout, "Part.dropout")
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ValueError(f"Part.name: got {self.name!r}, wanted a name without '/'; it is a step of a path")
        require_mixer(self.mixer, "Part.mixer")

    def arrays(self, dim: int) -> dict[str, Arrays]:
        """Those of the mixer and of the norms around it."""
        norms = {f"{self.name}_norm": self.norm, f"{self.name}_after": self.after}
        found: dict[str, Arrays] = {name: norm.arrays(dim) for name, norm in norms.items() if norm is not None}
        return {**found, self.name: self.mixer.arrays(dim)}


Block: TypeAlias = tuple[Part, ...]


def _require_names(parts: Block, where: str, own: tuple[str, ...] = ()) -> None:
    """ValueError where two arrays of a block would have one name: they would be one array, in silence."""
    names = list(own)
    for part in parts:
        names += [part.name]
        names += [
            f"{part.name}_{kind}" for kind, norm in (("norm", part.norm), ("after", part.after)) if norm is not None
        ]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"{where}: got the name {twice[0]!r} twice in a block, wanted one for each part and norm; rename a Part"
        )


@dataclass(frozen=True)
class MTP:
    """Multi-token prediction: `depths` blocks behind the trunk, each predicts one token further (`mtp.predict`).

    block: of each depth. depths: how many. weight: of the mean of their losses in the loss. norm: of the embeddings,
    of what comes in, and before the head, each with weights of its own. ValueError for numbers that cannot be meant.
    Source: arXiv 2412.19437, section 2.2.
    """

    block: Block
    depths: int = 1
    weight: float = 0.1
    norm: Norm = RMSNorm()

    def __post_init__(self):
        if not isinstance(self.depths, int) or isinstance(self.depths, bool) or self.depths < 1:
            raise ValueError(f"MTP.depths: got {self.depths!r}, wanted a whole number of at least 1; or no MTP")
        if not self.weight >= 0:
            raise ValueError(f"MTP.weight: got {self.weight}, wanted 0 or more")
        _require_names(self.block, "MTP.block", ("embed_norm", "hidden_norm", "proj", "out_norm"))

    def arrays(self, dim: int) -> dict[str, Arrays]:
        """Of one depth: {"embed_norm", "hidden_norm", "proj": [2D, D], "out_norm"}, and those of the block."""
        norm = self.norm.arrays(dim)
        own: dict[str, Arrays] = {"embed_norm": norm, "hidden_norm": norm, "proj": Array((2 * dim, dim), ("fsdp",))}
        return {**own, **{k: array for part in self.block for k, array in part.arrays(dim).items()}, "out_norm": norm}


class Stack(NamedTuple):
    """Blocks with equal arrays: the tree of the arrays of one, and the depths of all in the decoder."""

    arrays: dict[str, Arrays]
    depths: tuple[int, ...]


@dataclass(frozen=True)
class Decoder:
    """A language model: embedding, blocks, norm, head. ValueError for sizes and dtypes that cannot be meant.

    vocab_size: ids that exist. dim: model width. blocks. max_seq: longest sequence, in tokens. norm: before the head.
    tied: the head is the embedding. embed_scale: factor of what the embedding gives. positions: whether positions have
    a learned table that is added to the embedding. logit_softcap: logits are capped to it. z_loss: coefficient of
    lse^2 in the loss, 0 for none. loss_chunks: the loss has the logits of one of so many parts of the tokens at a time,
    made again in the backward (`nn.chunked_cross_entropy`); 1: of all. param_dtype: of the stored weights.
    compute_dtype: of matrices and activations in a step (norm weights and statistics, RoPE and the loss are fp32 or
    wider). precision: the whole policy of dtypes; where it is given it decides param_dtype and compute_dtype.
    sequence_parallel: between the matrix products of a block, activations are split over tp on the sequence.
    vocab_multiple: the vocabulary is padded to a multiple of this, whatever the mesh; padded columns get no probability
    and no gradient. mtp: blocks that predict more tokens, in training only; they share embedding and head.
    embed_dropout: in training, of what the embedding gives, where the loss is given samples (`model.loss`).
    """

    vocab_size: int
    dim: int
    blocks: tuple[Block, ...]
    max_seq: int
    norm: Norm = RMSNorm()
    tied: bool = False
    embed_scale: float = 1.0
    positions: bool = False
    logit_softcap: float | None = None
    z_loss: float = 0.0
    loss_chunks: int = 1
    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    vocab_multiple: int = 64
    precision: Precision | None = None
    mtp: MTP | None = None
    embed_dropout: float = 0.0

    def __post_init__(self):
        require_rate(self.embed_dropout, "Decoder.embed_dropout")
        for name in ("vocab_size", "dim", "layers", "max_seq", "vocab_multiple", "loss_chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Decoder.{name}: got {value!r}, wanted a whole number of at least 1")
        for parts in dict.fromkeys(map(tuple, self.blocks)):
            _require_names(parts, "Decoder.blocks")
        if self.precision is not None:
            object.__setattr__(self, "param_dtype", self.precision.param)
            object.__setattr__(self, "compute_dtype", self.precision.compute)
        for name in ("param_dtype", "compute_dtype"):
            value = getattr(self, name)
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise ValueError(f"Decoder.{name}: got {value!r}, wanted a floating dtype such as torch.bfloat16")

    @property
    def policy(self) -> Precision:
        """`precision`, or what the two dtypes say where it is not given: gradients are reduced as they are computed."""
        return self.precision or Precision(self.param_dtype, self.compute_dtype)

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to vocab_multiple, the same on every mesh."""
        return round_up(self.vocab_size, self.vocab_multiple)

    @functools.cached_property
    def stacks(self) -> dict[str, Stack]:
        """By name the stacks of the blocks, in the order of their first blocks: "blocks", "blocks2", "blocks3", ...,
        and "mtp": of the depths of `mtp`, which are counted on from the blocks."""
        found: list[Stack] = []
        for depth, parts in enumerate(self.blocks):
            arrays = {name: array for part in parts for name, array in part.arrays(self.dim).items()}
            same = [i for i, stack in enumerate(found) if stack.arrays == arrays]
            if same:
                found[same[0]] = Stack(arrays, (*found[same[0]].depths, depth))
            else:
                found.append(Stack(arrays, (depth,)))
        stacks = {f"blocks{i + 1 if i else ''}": stack for i, stack in enumerate(found)}
        if self.mtp is not None:
            depths = tuple(range(self.layers, self.layers + self.mtp.depths))
            stacks["mtp"] = Stack(self.mtp.arrays(self.dim), depths)
        return stacks

    def block(self, depth: int) -> Block:
        """The block at a depth of `stacks`: of the trunk, or behind it that of `mtp`."""
        return self.blocks[depth] if self.mtp is None or depth < self.layers else self.mtp.block

    def at(
        self,
        positions: torch.Tensor,
        documents: torch.Tensor | None = None,
        blocks: tuple[Block, ...] | None = None,
        padding: torch.Tensor | None = None,
    ) -> list[TokenContext]:
        """For each block what it is given beside x and weights; the angles of equal ropes are computed once.

        Args:
            positions: of the tokens.
            documents: of the tokens.
            blocks: None: those of the model.
            padding: of the tokens.
        """
        tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        out = []
        for parts in self.blocks if blocks is None else blocks:
            angles = {}
            for part in parts:
                rope = part.mixer.rope
                if rope is not None:
                    if rope not in tables:
                        tables[rope] = rope.angles(positions, self.compute_dtype)
                    angles[part.name] = tables[rope]
            out.append(TokenContext(positions, documents, angles, padding=padding))
        return out

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits, capped where the model has a cap."""
        return logits if self.logit_softcap is None else attention_masks.soft_cap(logits, self.logit_softcap)

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise ValueError if this model cannot be split over the mesh's tp axis, naming the number and a fix."""
        more = () if self.mtp is None else (self.mtp.block,)
        mixers = list(dict.fromkeys(part.mixer for parts in (*self.blocks, *more) for part in parts))
        for mixer in mixers:
            mixer.check_mesh(mesh)
        orders = {mixer.order: type(mixer).__name__ for mixer in mixers}
        if mesh.extent(data_parallel.SEQUENCE_AXES) > 1 and {"row", "zigzag"} <= set(orders):
            raise ValueError(
                f"Decoder.blocks: got {orders['zigzag']} over sequences in the order of nn.zigzag beside "
                f"{orders['row']}, whose tokens must be in that of the text, wanted sequences in order; choose "
                "context='ring', 'gathered', 'ulysses' or 'two_level'"
            )
        tp = mesh["tp"]
        if self.padded_vocab % tp:
            raise ValueError(
                f"Decoder.padded_vocab: got {self.padded_vocab}, wanted a multiple of tp={tp} on the mesh {mesh}; "
                f"set vocab_multiple={round_up(self.vocab_multiple, tp)}"
            )


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below n."""
    return -(-n // multiple) * multiple
