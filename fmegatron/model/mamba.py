"""Mamba-2: a state of fixed size for each head in place of keys and values.

Legend: B batch, S sequence, D width, I width inside (heads times head_dim), H heads, P head width, G groups, N state
width, W width of the convolution. H and G are those of this rank in names of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import Axes, all_gather, enter, ops
from fmegatron.layout import Mesh
from fmegatron.model.arrays import Array, TokenContext
from fmegatron.model.mixer import Mixer, Slots
from fmegatron.nn import state_space, weight
from fmegatron.tree import Uniform, structure


class _Projected(NamedTuple):
    """Of the full sequence: gate[B, S, I], steps[B, S, H], and what the convolution gets: [B, S, I], [B, S, 2 G N]."""

    gate: Tensor
    dt: Tensor
    x: Tensor
    groups: Tensor


@dataclass(frozen=True)
class Mamba(Mixer):
    """Mamba-2: u -> (gate, x, b, c, dt); x, b, c through a short convolution and silu; the scan; a gated norm; out.

    heads, head_dim: of the scan. state: numbers of it for each of head_dim. groups: parts of the heads that share b and
    c; 1, or a multiple of tp. conv: width of the convolution. conv_bias: whether it has a bias. dt_range: steps are
    clamped to it. chunk: tokens of a chunk of the scan (`nn.ssd`); it does not change what is computed. norm_eps: of
    the gated norm, which each group has for itself.

    Tokens follow each other as they lie in the row, over cp from rank to rank; where documents are given the state and
    the convolution begin anew with each. ValueError for heads that are no multiple of groups.
    Source: Dao and Gu 2024, arXiv 2405.21060, sections 6 to 8.
    """

    heads: int
    head_dim: int
    state: int
    groups: int = 1
    conv: int = 4
    conv_bias: bool = True
    dt_range: tuple[float, float] = (0.0, math.inf)
    chunk: int = 64
    norm_eps: float = 1e-5

    def __post_init__(self):
        for name in ("heads", "head_dim", "state", "groups", "conv", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Mamba.{name}: got {value!r}, wanted a whole number of at least 1")
        if self.heads % self.groups:
            raise ValueError(f"Mamba.groups: got {self.groups}, wanted a divisor of heads={self.heads}; choose one")

    def arrays(self, dim: int) -> dict[str, Array]:
        """{"w_in": [D, 2I + H], "w_groups": [D, 2GN], "conv": [W, I], "conv_groups": [W, 2GN], biases of both,
        "a_log", "dt_bias", "skip": [H], "norm": [I], "w_out": [I, D]}."""
        inner, GN, H, W = self.heads * self.head_dim, self.groups * self.state, self.heads, self.conv
        tp = None if self.groups == 1 else "tp"  # one group: every rank of tp has it
        of_head, near, zero, one = ("tp",), Uniform(-(W**-0.5), W**-0.5), 0.0, 1.0
        out = {
            "w_in": Array((dim, 2 * inner + H), ("fsdp", "tp"), (inner, inner, H)),
            "w_groups": Array((dim, 2 * GN), ("fsdp", tp), (GN, GN)),
            "conv": Array((W, inner), (None, "tp"), init=near),
            "conv_groups": Array((W, 2 * GN), (None, tp), (GN, GN), near),
        }
        if self.conv_bias:
            out["bias_conv"] = Array((inner,), of_head, init=zero)
            out["bias_conv_groups"] = Array((2 * GN,), (tp,), (GN, GN), zero)
        # decays of 1 to 16, steps of 0.001 to 0.1, their logarithms uniform
        out["a_log"] = Array((H,), of_head, init=Uniform(0.0, math.log(16.0)))
        out["dt_bias"] = Array((H,), of_head, init=Uniform(*(math.log(math.expm1(dt)) for dt in (1e-3, 1e-1))))
        out["skip"] = Array((H,), of_head, init=one)
        out["norm"] = Array((inner,), of_head, init=one)
        return out | {"w_out": Array((inner, dim), (("tp", "fsdp"),), residual=True)}

    def check_mesh(self, mesh: Mesh) -> None:
        """ValueError where heads or groups do not divide by tp, ."""
        tp = mesh["tp"]
        for name, value in (("heads", self.heads), ("groups", self.groups)):
            if value % tp and not (name == "groups" and value == 1):
                raise ValueError(
                    f"Mamba.{name}: got {value}, wanted a multiple of tp={tp} on the mesh {mesh}; choose tp as a "
                    "divisor of heads and groups"
                )

    def __call__(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> Tensor:
        """`u[B, S, D]@R(tp) -> y[B, S, D]@R(tp)`, S_tp at both ends with sequence parallelism.

        Over tp one reduction forward and its pair backward as attention has them, and with one group psums of its norm.
        """
        if at.axes.sequence.size == 1:
            return self._scanned(u_BSD, w, at, None)[0]
        split = at.splits(u_BSD)
        return self._over(self._project(u_BSD, w, at.axes, split), w, at, split)

    def read(
        self, u_BSD: Tensor, w: structure.Tree, at: TokenContext, cache: dict[str, Tensor] | None, slots: Slots | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`Mixer.read`: the cache is a state of fixed size, that of `_scanned`."""
        if cache is not None and u_BSD.shape[1] == 1:
            return self._advance(u_BSD, w, cache, at)
        return self._scanned(u_BSD, w, at, cache)

    @property
    def cache_width(self) -> int | None:
        """Nothing for each token: a state for all."""
        return 0

    def _scanned(
        self, u_BSD: Tensor, w: structure.Tree, at: TokenContext, state: dict[str, Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(y, the state behind the last token): {"conv": [B, W - 1, I + 2GN], "scan": [B, H, P, N], "document": int64
        [B], that of the last token}.

        Of tokens that cp does not split. state: behind the token before; its part in this one ends with its document.
        None: there is none.
        """
        axes = at.axes
        tp, split = axes["tp"], at.splits(u_BSD)
        given = self._project(u_BSD, w, axes, split)
        B, S = u_BSD.shape[0], given.x.shape[1]
        documents_BS = at.documents
        if documents_BS is None and state is not None:
            documents_BS = state["document"][:, None].expand(B, S)
        before_B, before_BWX = (None, None) if state is None else (state["document"], state["conv"])
        segments_BS = None if documents_BS is None else state_space.segments(documents_BS, before_B)
        both_BSX = torch.cat((given.x, given.groups), -1)
        widths = (given.x.shape[-1], given.groups.shape[-1])
        befores = (None, None) if before_BWX is None else before_BWX.split(widths, -1)
        of_x, of_groups = self._filters(w, axes)
        x_BSI = F.silu(state_space.causal_conv(given.x, *of_x, segments_BS, befores[0]))
        bc_BSX = F.silu(state_space.causal_conv(given.groups, *of_groups, segments_BS, befores[1]))
        x_BSHP, b_BSGN, c_BSGN = self._heads(x_BSI, bc_BSX)
        dt_BSH, a_H = self._steps(given.dt, w)
        how = {"chunk": self.chunk, "tp": tp, "grouped": self.groups > 1, "segments_BS": segments_BS}
        held = None if state is None else state["scan"]
        y_BSHP, state_BHPN = nn.ssd(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, **how, state_BHPN=held)
        y_BSD = self._finish(y_BSHP, x_BSHP, given.gate, w, axes, split)
        kept = self._kept(both_BSX, before_BWX, segments_BS)
        last_B = torch.zeros(B, dtype=torch.int64, device=u_BSD.device) if documents_BS is None else documents_BS[:, -1]
        return y_BSD, {"conv": kept, "scan": state_BHPN, "document": last_B}

    def _kept(self, x_BSX: Tensor, before_BWX: Tensor | None, segments_BS: Tensor | None) -> Tensor:
        """What the convolution needs of the last W - 1 tokens: zero for those of another document than the last."""
        reach = self.conv - 1
        known = F.pad(x_BSX, (0, 0, reach, 0)) if before_BWX is None else torch.cat((before_BWX, x_BSX), 1)
        known = known[:, known.shape[1] - reach :]
        if segments_BS is None:
            return known
        seen_BW = F.pad(segments_BS, (reach, 0))
        seen_BW = seen_BW[:, seen_BW.shape[1] - reach :]
        return torch.where((seen_BW == segments_BS[:, -1:])[..., None], known, 0.0)

    def _over(self, given: _Projected, w: structure.Tree, at: TokenContext, split: bool) -> Tensor:
        """y where cp splits the sequence, in order: the convolution needs the last tokens of the rank before, the scan
        the states of all of them. Between the declarations values are each rank's own, and what is the same on every
        rank gets a gradient that is a sum over them."""
        axes = at.axes
        cp, tp, reach = axes.sequence, axes["tp"], max(self.conv - 1, 1)
        segments_BS = of_scan = None
        if at.documents is not None:
            known_BS = torch.cat(
                (state_space.from_before(at.documents, cp, reach), ops.declare(at.documents, cp, "own", 1)), 1
            )
            segments_BS = state_space.segments(known_BS)[:, reach - self.conv + 1 :]
            of_scan = state_space.segments(known_BS[:, reach:], known_BS[:, reach - 1])

        def convolved(x_BSC: Tensor, w_WC: Tensor, bias_C: Tensor | None) -> Tensor:
            before = state_space.from_before(x_BSC, cp, self.conv - 1)
            of = ops.declare(w_WC, cp, backward="partial"), bias_C
            if bias_C is not None:
                of = of[0], ops.declare(bias_C, cp, backward="partial")
            y_BSC = state_space.causal_conv(ops.declare(x_BSC, cp, "own", 1), *of, segments_BS, before)
            return ops.declare(F.silu(y_BSC), cp, ("sharded", 1), "own")

        of_x, of_groups = self._filters(w, axes)
        both = convolved(given.x, *of_x), convolved(given.groups, *of_groups)
        x_BSHP, b_BSGN, c_BSGN = self._heads(*both)
        dt_BSH, a_H = self._steps(given.dt, w)
        x, dt, b, c = (ops.declare(y, cp, "own", 1) for y in (x_BSHP, dt_BSH, b_BSGN, c_BSGN))
        how = {"chunk": self.chunk, "tp": tp, "grouped": self.groups > 1, "segments_BS": of_scan, "cp": cp}
        y_BSHP, _ = nn.ssd(x, dt, ops.declare(a_H, cp, backward="partial"), b, c, **how)
        return self._finish(ops.declare(y_BSHP, cp, ("sharded", 1), "own"), x_BSHP, given.gate, w, axes, split)

    def _advance(
        self, u_B1D: Tensor, w: structure.Tree, state: dict, at: TokenContext
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One token more: (y[B, 1, D], the state behind it). Of another document than the one before it begins anew, as
        the first token of a text does behind padding."""
        axes, document_B, conv_BWX, scan_BHPN = at.axes, state["document"], state["conv"], state["scan"]
        if at.documents is not None:
            same_B, document_B = at.documents[:, 0] == document_B, at.documents[:, 0].expand_as(document_B)
            conv_BWX = torch.where(same_B[:, None, None], conv_BWX, 0.0)
            scan_BHPN = torch.where(same_B[:, None, None, None], scan_BHPN, 0.0)
        given = self._project(u_B1D, w, axes, False)
        seen_BWX = torch.cat((conv_BWX, torch.cat((given.x, given.groups), -1)), 1)
        conv_WX = torch.cat((nn.dense(w["conv"]), nn.dense(w["conv_groups"])), -1)
        bias_X = torch.cat((w["bias_conv"], w["bias_conv_groups"])) if self.conv_bias else None
        now_B1X = F.silu(state_space.causal_conv(seen_BWX[:, -1:], conv_WX, bias_X, before_BWC=seen_BWX[:, :-1]))
        x_B1HP, b_B1GN, c_B1GN = self._heads(*now_B1X.split((given.x.shape[-1], given.groups.shape[-1]), -1))
        dt_B1H, a_H = self._steps(given.dt, w)
        one = (x_B1HP[:, 0], dt_B1H[:, 0], a_H, b_B1GN[:, 0], c_B1GN[:, 0])
        y_BHP, scan_BHPN = state_space.ssd_step(*one, scan_BHPN)
        y_B1D = self._finish(y_BHP[:, None], x_B1HP, given.gate, w, axes, False)
        return y_B1D, {"conv": seen_BWX[:, 1:], "scan": scan_BHPN, "document": document_B}

    def _project(self, u_BSD: Tensor, w: structure.Tree, axes: Axes, split: bool) -> _Projected:
        tp, u = axes["tp"], u_BSD
        u = all_gather(u, tp, 1) if split else enter(u, tp)
        heads = self.heads // tp.size
        gate, x, dt = nn.matmul(u, w["w_in"]).split((heads * self.head_dim, heads * self.head_dim, heads), -1)
        return _Projected(gate, dt, x, nn.matmul(u, self._own(w["w_groups"], axes)))

    def _own(self, w: weight.Weight, axes: Axes) -> weight.Weight:
        """Weights of the groups: of one that every rank has, whose heads are others on each, the gradient is a sum."""
        return w if self.groups > 1 else nn.entered(w, axes["tp"])

    def _filters(
        self, w: structure.Tree, axes: Axes
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """(weights[W, I] and bias of x, weights[W, 2GN] and bias of the groups)."""
        of_x, of_groups = nn.dense(w["conv"]), nn.dense(self._own(w["conv_groups"], axes))
        if not self.conv_bias:
            return (of_x, None), (of_groups, None)
        return (of_x, w["bias_conv"]), (of_groups, nn.dense(self._own(w["bias_conv_groups"], axes)))

    def _heads(self, x_BSI: Tensor, bc_BSX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x[B, S, H, P], b[B, S, G, N], c[B, S, G, N])."""
        b_BSX, c_BSX = bc_BSX.chunk(2, -1)
        b_BSGN, c_BSGN = b_BSX.unflatten(-1, (-1, self.state)), c_BSX.unflatten(-1, (-1, self.state))
        return x_BSI.unflatten(-1, (-1, self.head_dim)), b_BSGN, c_BSGN

    def _steps(self, dt_BSH: Tensor, w: structure.Tree) -> tuple[Tensor, Tensor]:
        """(steps[B, S, H], decays[H]), fp32 or wider."""
        wide = torch.promote_types(dt_BSH.dtype, torch.float32)
        dt_BSH = F.softplus(dt_BSH.to(wide) + w["dt_bias"].to(wide))
        if self.dt_range != (0.0, math.inf):
            dt_BSH = dt_BSH.clamp(*self.dt_range)
        return dt_BSH, -w["a_log"].to(wide).exp()

    def _finish(
        self, y_BSHP: Tensor, x_BSHP: Tensor, gate_BSI: Tensor, w: structure.Tree, axes: Axes, split: bool
    ) -> Tensor:
        """The skip, the gated norm and the output's projection; split: over tp on the sequence."""
        y_BSHP = y_BSHP + x_BSHP * w["skip"].to(x_BSHP.dtype)[:, None]
        y_BSI = state_space.gated_rms_norm(
            y_BSHP.flatten(2), gate_BSI, w["norm"], self.groups, axes["tp"], self.norm_eps
        )
        return nn.row_parallel(y_BSI, w["w_out"], axes["tp"], split)

    def products(self, seq_len: int, causal: bool) -> float:
        """Multiply-adds times 2 of the scan that a token needs: inside its chunk, and of the state."""
        length = min(self.chunk, seq_len)
        seen, width = (length + 1) / 2 if causal else length, self.heads * self.head_dim
        return 2 * seen * (self.groups * self.state + width) + 2 * 2 * width * self.state
