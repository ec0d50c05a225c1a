"""What a decoder is made of: sizes, switches and dtypes, checked where a person can still change them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fmegatron.collectives import Precision
from fmegatron.layout import Mesh


@dataclass(frozen=True)
class Config:
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases. ValueError for wrong sizes.

    vocab_size: ids that exist. dim: model width. layers. heads, kv_heads: query and key/value heads (heads a multiple
    of kv_heads). ffn_dim: hidden width of the MLP. max_seq: longest sequence, in tokens. tied: the head is the
    embedding. z_loss: coefficient of lse^2 in the loss, 0 for none. param_dtype: of the stored weights. compute_dtype:
    of matrices and activations in a step (norm weights and statistics, RoPE and the loss are fp32 or wider). precision:
    the whole policy of dtypes; where it is given it decides param_dtype and compute_dtype.
    sequence_parallel: between the matrix products of a block, activations are split over tp on the sequence.
    vocab_multiple: the vocabulary is padded to a multiple of this, whatever the mesh; padded columns get no
    probability and no gradient.

    >>> config = Config(vocab_size=65, dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, max_seq=32)
    >>> config.head_dim, config.padded_vocab
    (16, 128)
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    max_seq: int
    tied: bool = False
    z_loss: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    vocab_multiple: int = 64
    precision: Precision | None = None

    def __post_init__(self):
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "max_seq", "vocab_multiple"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Config.{name}: got {value!r}, wanted a whole number of at least 1")
        if self.dim % self.heads:
            raise ValueError(
                f"Config.dim: got {self.dim}, wanted a multiple of heads={self.heads}; "
                f"try dim={_round_up(self.dim, 2 * self.heads)}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"Config.dim / heads: got a head width of {self.head_dim}, wanted an even one (RoPE rotates pairs); "
                f"try dim={_round_up(self.dim, 2 * self.heads)}"
            )
        if self.heads % self.kv_heads:
            fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"Config.kv_heads: got {self.kv_heads}, wanted a divisor of heads={self.heads}; choose one of {fits}"
            )
        if self.precision is not None:
            object.__setattr__(self, "param_dtype", self.precision.param)
            object.__setattr__(self, "compute_dtype", self.precision.compute)
        for name in ("param_dtype", "compute_dtype"):
            value = getattr(self, name)
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise ValueError(f"Config.{name}: got {value!r}, wanted a floating dtype such as torch.bfloat16")

    @property
    def policy(self) -> Precision:
        """`precision`, or what the two dtypes say where it is not given: gradients are reduced as they are computed."""
        return self.precision or Precision(self.param_dtype, self.compute_dtype)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to vocab_multiple, the same on every mesh."""
        return _round_up(self.vocab_size, self.vocab_multiple)

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise ValueError if this model cannot be split over the mesh's tp axis, naming the number and a fix."""
        tp = mesh["tp"]
        for name, value, fix in (
            ("heads", self.heads, "choose tp as a divisor of heads"),
            ("kv_heads", self.kv_heads, "choose tp as a divisor of kv_heads, or more kv_heads"),
            ("ffn_dim", self.ffn_dim, f"try ffn_dim={_round_up(self.ffn_dim, tp)}"),
            ("padded_vocab", self.padded_vocab, f"set vocab_multiple={_round_up(self.vocab_multiple, tp)}"),
        ):
            if value % tp:
                raise ValueError(f"Config.{name}: got {value}, wanted a multiple of tp={tp} on the mesh {mesh}; {fix}")


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
