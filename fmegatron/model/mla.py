"""Multi-head latent attention: keys and values of all heads are made of one narrow latent.

Legend: B batch, S sequence, D width, H heads of this rank, K width of a head's query and key, R width of a latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import Axes, all_gather, axes, enter
from fmegatron.layout import Mesh
from fmegatron.model.arrays import Array, TokenContext
from fmegatron.model.context import Context, attention_of, joined, longer, order_of, remembered, require_form
from fmegatron.model.mixer import Mixer, Order, Slots
from fmegatron.model.rope import Rope
from fmegatron.tree import structure


@dataclass(frozen=True)
class MLA(Mixer):
    """Attention whose keys and values are `latent @ up`; part of each key is rotated and one for all heads.

    q_rank: of the latent of queries; None: queries are made of u. kv_rank: of that of keys and values. nope, rope.dim:
    widths of the part of a key that is not rotated, and of that which is. v_dim: of a value. scale: of q·k; None: 1 /
    sqrt(nope + rope.dim). norm_eps: of the norms of the latents. context: as of `Attention`. ValueError for a context
    that there is not. Source: DeepSeek V2, arXiv 2405.04434, section 2.1.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    v_dim: int
    rope: Rope
    scale: float | None = None
    norm_eps: float = 1e-6
    context: Context | None = None

    def __post_init__(self):
        require_form(self.context, "MLA")

    def arrays(self, dim: int) -> dict[str, Array]:
        """{"kv_down", "kv_norm", "kv_up", "wo"}, and "q_down", "q_norm", "q_up" or "wq"."""
        K, one, up = self.nope + self.rope.dim, 1.0, ("fsdp", "tp")
        out = {"wq": Array((dim, self.heads * K), up)}
        if self.q_rank is not None:
            out = {"q_down": Array((dim, self.q_rank), ("fsdp",)), "q_norm": Array((self.q_rank,), init=one)}
            out["q_up"] = Array((self.q_rank, self.heads * K), up)
        return out | {
            "kv_down": Array((dim, self.kv_rank + self.rope.dim), ("fsdp",)),
            "kv_norm": Array((self.kv_rank,), init=one),
            "kv_up": Array((self.kv_rank, self.heads * (self.nope + self.v_dim)), up),
            "wo": Array((self.heads * self.v_dim, dim), (("tp", "fsdp"),), residual=True),
        }

    def check_mesh(self, mesh: Mesh) -> None:
        """ValueError where heads do not divide by tp."""
        if self.heads % mesh["tp"]:
            raise ValueError(
                f"MLA.heads: got {self.heads}, wanted a multiple of tp={mesh['tp']} on the mesh {mesh}; choose tp as a "
                "divisor of heads"
            )

    def __call__(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> Tensor:
        """`u[B, S, D]@R(tp) -> y[B, S, D]@R(tp)`, S_tp at both ends with sequence parallelism.

        Every rank of tp makes the latents of its tokens, and the heads of its own.
        """
        q_BSHK, k_BSHK, v_BSHK = self._project(u_BSD, w, at)
        o_BSHK = self.attend(q_BSHK, k_BSHK, v_BSHK, w, at)
        return self._finish(o_BSHK, w, at.splits(u_BSD), at.axes)

    def _project(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> tuple[Tensor, Tensor, Tensor]:
        """(q[B, S, H, K], k[B, S, H, K], v[B, S, H, v_dim]), rotated, of the full sequence."""
        tp, split, angles = at.axes["tp"], at.splits(u_BSD), at.rotation("MLA")
        heads = self.heads // tp.size

        def own(name: str) -> Any:  # every rank has it; with other tokens on each its gradient is a sum
            return nn.entered(w[name], tp) if split else w[name]

        if self.q_rank is None:
            q_BSF = nn.column_parallel(u_BSD, w["wq"], tp, split)
        else:
            q_BSR = nn.rms_norm(nn.matmul(u_BSD, own("q_down")), own("q_norm"), self.norm_eps)
            q_BSF = nn.column_parallel(q_BSR, w["q_up"], tp, split)
        q_nope, q_rope = q_BSF.unflatten(-1, (heads, -1)).split((self.nope, self.rope.dim), -1)
        kv_BSR, k_rope = nn.matmul(u_BSD, own("kv_down")).split((self.kv_rank, self.rope.dim), -1)
        kv_BSR = nn.rms_norm(kv_BSR, own("kv_norm"), self.norm_eps)
        kv_BSF = nn.column_parallel(kv_BSR, w["kv_up"], tp, split)
        k_nope, v = kv_BSF.unflatten(-1, (heads, -1)).split((self.nope, self.v_dim), -1)
        k_rope = self.rope(_of_all_heads(k_rope, tp, split).unsqueeze(2), angles).expand(-1, -1, heads, -1)
        return torch.cat((q_nope, self.rope(q_rope, angles)), -1), torch.cat((k_nope, k_rope), -1), v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: structure.Tree, at: TokenContext, mask: Tensor | None = None
    ) -> Tensor:
        """What the heads of this rank read: o[B, S, H, v_dim]. Arguments as of `Attention.attend`."""
        attention = attention_of(at, form=self.context, mask=mask, scale=self.scale)
        return attention(q, k, v)

    @property
    def order(self) -> Order:
        """Zigzag for the balanced forms, else any."""
        return order_of(self.context)

    def read(
        self, u_BSD: Tensor, w: structure.Tree, at: TokenContext, cache: dict | None, slots: Slots | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`Mixer.read`: the cache is {"k", "v": [B, T, G, K]} of this rank's heads."""
        q_BSHK, k_BSGK, v_BSGK = self._project(u_BSD, w, at)
        held, mask = remembered(k_BSGK, v_BSGK, cache, slots, None)
        o_BSHK = self.attend(q_BSHK, held["k"], held["v"], w, at.unsplit(), mask)
        return self._finish(joined(o_BSHK, cache), w, False, at.axes), held

    def new_cache(self, one: dict, rows: int, slots: int) -> dict[str, Tensor]:
        """A slot for each token."""
        return longer(one, rows, slots)

    def sends(self, mesh: Mesh) -> tuple[str, ...]:
        """The latents: with sequence parallelism they are gathered too."""
        return ("what MLA sends besides a sum over tp, forward and backward",) if mesh["tp"] > 1 else ()

    def _finish(self, o_BSHK: Tensor, w: structure.Tree, split: bool, axes: Axes) -> Tensor:
        """The output's projection; split: over tp on the sequence."""
        return nn.row_parallel(o_BSHK.flatten(2), w["wo"], axes["tp"], split)

    def products(self, seq_len: int, causal: bool) -> float:
        """Multiply-adds times 2 of q·k and p·v that a token needs, on average over its positions."""
        keys = (seq_len + 1) / 2 if causal else seq_len
        return 2 * keys * self.heads * (self.nope + self.rope.dim + self.v_dim)

    @property
    def cache_width(self) -> int:
        """Numbers of a token that generation keeps: keys and values of all heads."""
        return self.heads * (self.nope + self.rope.dim + self.v_dim)


def _of_all_heads(k_BSK: Tensor, tp: axes.Axis, split: bool) -> Tensor:
    """The part of the key that all heads share, of the full sequence; its gradient is a sum over the ranks' heads."""
    return all_gather(k_BSK, tp, 1) if split else enter(k_BSK, tp)
