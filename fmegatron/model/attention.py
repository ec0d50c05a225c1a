"""Attention with grouped key/value heads: projections, rotation, what a token sees, output.

Legend: B batch, S queries, T keys, D width, H/G query/kv heads of this rank, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import Axes, all_gather, axes, enter, ops, shard
from fmegatron.layout import Mesh
from fmegatron.model.arrays import Array, TokenContext
from fmegatron.model.context import Context, attention_of, joined, longer, order_of, remembered, require_form
from fmegatron.model.draws import require_rate
from fmegatron.model.mixer import Mixer, Order, Slots, Widths
from fmegatron.model.norm import RMSNorm
from fmegatron.model.rope import Rope
from fmegatron.tree import structure


@dataclass(frozen=True)
class Attention(Mixer):
    """softmax(q·k) v with causal masks. ValueError for heads that are no multiple of kv_heads.

    rope: None: positions are not rotated. scale: of q·k; None: 1 / sqrt(head_dim). window: a token sees so many
    positions, its own included; None: all before it. softcap: of the scores. sinks: a learned logit of each head that
    takes its share of the softmax. bias: of the q, k and v projections. out_bias: of the output's. qk_norm: of each
    head's query and key, before they are rotated. kv_copies: keys and values are arrays of their own, which every rank
    of tp has; a rank uses the heads that its queries read. For more ranks of tp than kv_heads. context: how it attends
    over a sequence that cp splits (`attention_of`); None: by a ring. dropout: in training, of the softmax, where the
    loss is given samples (`model.loss`); not over cp.
    Source: Vaswani et al. 2017, arXiv 1706.03762; grouped heads: arXiv 2305.13245.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    out_bias: bool = False
    qk_norm: RMSNorm | None = None
    kv_copies: bool = False
    context: Context | None = None
    dropout: float = 0.0

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Attention.{name}: got {value!r}, wanted a whole number of at least 1")
        for name in ("window", "softcap"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"Attention.{name}: got {value}, wanted a number above 0; or None for none")
        require_form(self.context, "Attention")
        require_rate(self.dropout, "Attention.dropout")
        if self.heads % self.kv_heads:
            fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"Attention.kv_heads: got {self.kv_heads}, wanted a divisor of heads={self.heads}; choose one of {fits}"
            )

    def arrays(self, dim: int) -> dict[str, Any]:
        """{"wqkv": [D, q + 2kv], "wo": [q, D]}, or "wq", "wkv"; "bias_qkv", "bias_o"; "q_norm", "k_norm"; "sinks"."""
        q, kv, nothing = self.heads * self.head_dim, self.kv_heads * self.head_dim, 0.0
        if self.kv_copies:
            out: dict[str, Any] = {
                "wq": Array((dim, q), ("fsdp", "tp")),
                "wkv": Array((dim, 2 * kv), ("fsdp",), (kv, kv)),
            }
            biases = {"bias_q": Array((q,), ("tp",), init=nothing), "bias_kv": Array((2 * kv,), (), (kv, kv), nothing)}
        else:
            out = {"wqkv": Array((dim, q + 2 * kv), ("fsdp", "tp"), (q, kv, kv))}
            biases = {"bias_qkv": Array((q + 2 * kv,), ("tp",), (q, kv, kv), nothing)}
        out["wo"] = Array((q, dim), (("tp", "fsdp"),), residual=True)
        out |= biases if self.bias else {}
        out |= {"bias_o": Array((dim,), init=nothing)} if self.out_bias else {}
        out |= {"sinks": Array((self.heads,), ("tp",), init=nothing)} if self.sinks else {}
        return out | ({k: self.qk_norm.arrays(self.head_dim) for k in ("q_norm", "k_norm")} if self.qk_norm else {})

    def check_mesh(self, mesh: Mesh) -> None:
        """ValueError where heads do not divide by tp."""
        tp = mesh["tp"]
        fits = self.kv_heads % tp == 0 or (self.kv_copies and tp % self.kv_heads == 0)
        for name, wrong, fix in (
            ("heads", self.heads % tp, "choose tp as a divisor of heads"),
            ("kv_heads", not fits, "choose tp as a divisor of kv_heads, or more kv_heads, or kv_copies=True"),
        ):
            if wrong:
                got = getattr(self, name)
                raise ValueError(f"Attention.{name}: got {got}, wanted a multiple of tp={tp} on the mesh {mesh}; {fix}")

    def __call__(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> Tensor:
        """`u[B, S, D]@R(tp) -> y[B, S, D]@R(tp)`, S_tp at both ends with sequence parallelism.

        One reduction over tp forward (psum, or reduce_scatter) and its pair backward.
        """
        q_BSHK, k_BSGK, v_BSGK = self._project(u_BSD, w, at)
        o_BSHK = self.attend(q_BSHK, k_BSGK, v_BSGK, w, at)
        return self._finish(o_BSHK, w, at.splits(u_BSD), at.axes)

    def _project(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> tuple[Tensor, Tensor, Tensor]:
        """(q[B, S, H, K], k[B, S, G, K], v[B, S, G, K]), rotated, of the full sequence."""
        tp, split, K = at.axes["tp"], at.splits(u_BSD), self.head_dim
        heads, kv_heads = self.heads // tp.size, max(1, self.kv_heads // tp.size)
        if not self.kv_copies:
            qkv_BSF = nn.column_parallel(u_BSD, w["wqkv"], tp, split)
            qkv_BSF = qkv_BSF + w["bias_qkv"].to(qkv_BSF.dtype) if self.bias else qkv_BSF
        else:
            u_BSD = all_gather(u_BSD, tp, 1) if split else enter(u_BSD, tp)
            kv_BSF = nn.matmul(u_BSD, self._of_heads(nn.dense(w["wkv"]), tp))
            qkv_BSF = torch.cat((nn.matmul(u_BSD, w["wq"]), kv_BSF), -1)
            if self.bias:
                bias_F = torch.cat((w["bias_q"], self._of_heads(w["bias_kv"], tp)))
                qkv_BSF = qkv_BSF + bias_F.to(qkv_BSF.dtype)
        q, k, v = qkv_BSF.unflatten(-1, (heads + 2 * kv_heads, K)).split((heads, kv_heads, kv_heads), -2)
        if self.qk_norm is not None:  # each rank normalises other heads, so the weights' gradients are sums over tp
            q, k = (
                nn.rms_norm(x, enter(w[name], tp), self.qk_norm.eps, self.qk_norm.offset)
                for x, name in ((q, "q_norm"), (k, "k_norm"))
            )
        if self.rope is not None:
            angles = at.rotation("Attention")
            q, k = self.rope(q, angles), self.rope(k, angles)
        if kv_heads == 1 and (self.softcap is not None or self.sinks):  # several queries of one head: no trace in sizes
            k, v = (ops.declare(x, tp, backward=("sharded", 2)) for x in (k, v))
        return q, k, v

    def _of_heads(self, w_DF: Tensor, tp: axes.Axis) -> Tensor:
        """Of weights or biases of all keys and values those that this rank's queries read."""
        heads = w_DF.unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(-3)
        if tp.size > self.kv_heads:  # copies, whose gradients the transpose adds up
            heads = [x.repeat_interleave(tp.size // self.kv_heads, -2) for x in heads]
        return torch.cat([self._own(x, tp) for x in heads], -1)

    def _own(self, w_DGK: Tensor, tp: axes.Axis) -> Tensor:
        """[D, G·K] of this rank's heads. A part that is one head leaves no trace in sizes, so it is declared."""
        dim = w_DGK.dim() - 2
        own = ops.declare(shard(w_DGK, tp, dim), tp, backward=("sharded", dim))
        return ops.declare(own.flatten(-2), tp, forward=("sharded", dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: dict, at: TokenContext, mask: Tensor | None = None) -> Tensor:
        """What the heads of this rank read: o[B, S, H, K].

        Args:
            q: queries.
            k: keys.
            v: values.
            w: the arrays.
            at: of the tokens; its axes say what splits the sequence.
            mask: who sees whom, where that is not as `at` states.
        """
        attention = attention_of(
            at, form=self.context, mask=mask, window=self.window, scale=self.scale, softcap=self.softcap,
            sinks_H=w["sinks"] if self.sinks else None, dropout=self.dropout,
        )  # fmt: skip
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
        held, mask = remembered(k_BSGK, v_BSGK, cache, slots, self.window)
        o_BSHK = self.attend(q_BSHK, held["k"], held["v"], w, at.unsplit(), mask)
        return self._finish(joined(o_BSHK, cache), w, False, at.axes), held

    def new_cache(self, one: dict, rows: int, slots: int) -> dict[str, Tensor]:
        """A slot for each token."""
        return longer(one, rows, slots)

    def sends(self, mesh: Mesh) -> tuple[str, ...]:
        """Nothing that plans do not count."""
        return ()

    def _finish(self, o_BSHK: Tensor, w: dict, split: bool, axes: Axes) -> Tensor:
        """The output's projection; split: over tp on the sequence."""
        y_BSD = nn.row_parallel(o_BSHK.flatten(2), w["wo"], axes["tp"], split)
        if not self.out_bias:
            return y_BSD
        return y_BSD + (enter(w["bias_o"], axes["tp"]) if split else w["bias_o"]).to(y_BSD.dtype)

    @property
    def rates(self) -> dict[str, float]:
        """Of the softmax."""
        return {"dropout": self.dropout}

    def widths(self, dim: float, tp: int, number: int) -> Widths | None:
        """Queries, keys, values, what rotates them, what the heads read, and what the norm keeps."""
        q, stat = self.heads * self.head_dim / tp, 4 / number  # one fp32 number of the norm
        k = max(1, self.kv_heads / tp) * self.head_dim
        lse = self.heads / tp * 4 / number
        turned = q + k if self.rope is not None else 0.0
        mincut = (q + 2 * k) + turned + q + lse + dim + stat
        backward, late = 2 * (q + 2 * k) + k + 2 * dim, self.heads != self.kv_heads
        uncounted = tuple(
            f"the scores of attention with {what}, a tile at a time, on the CPU"
            for what, on in (("dropout", self.dropout), ("softcap", self.softcap is not None))
            if on
        )
        return Widths(mincut, mincut + 2 * dim, q + 2 * k + dim, backward, dim, 0.0, late, uncounted)

    def products(self, seq_len: int, causal: bool) -> float:
        """Multiply-adds times 2 of q·k and p·v that a token needs, on average over its positions."""
        seen = min(self.window or seq_len, seq_len)
        keys = (seen + 1) / 2 * (seen / seq_len) + seen * (1 - seen / seq_len) if causal else seen
        return 2 * 2 * keys * self.heads * self.head_dim

    @property
    def cache_width(self) -> int:
        """Numbers of a token that generation keeps."""
        return 2 * self.kv_heads * self.head_dim
