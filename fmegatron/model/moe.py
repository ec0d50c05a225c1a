"""Mixture of experts as a mixer: a router, experts that axes of the mesh hold, and an MLP that all tokens share.

Legend: B batch, S sequence, D width, F hidden width of an expert, E experts, X experts of this rank, M rows of experts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fmegatron import nn, step, tree
from fmegatron.collectives import all_gather, axes, enter, psum, reduce_scatter, shard
from fmegatron.layout import Mesh
from fmegatron.model.arrays import Array, TokenContext
from fmegatron.model.draws import jittered, noisy
from fmegatron.model.mixer import PerToken, Rule
from fmegatron.model.mlp import MLP
from fmegatron.nn import mlp, moe
from fmegatron.nn.moe import dropless, with_capacity
from fmegatron.nn.routing import (
    Routing,
    balanced_bias,
    expert_load,
    expert_probs,
    router_entropy,
    router_z_loss,
    sequence_balance_loss,
)
from fmegatron.tree import structure


@dataclass(frozen=True)
class MoE(PerToken):
    """Σ of the chosen experts' gated MLPs, times their gates, and of the shared MLP.

    router: how experts are chosen. ffn_dim: of one expert. shared: an MLP for every token. choice_bias: the choice has
    a bias that no gradient reaches. bias_rate: by how much a step moves that bias towards equal loads (`post_update`,
    which `build_train_step(post_update=...)` applies), such as 0.001 (DeepSeek V3); 0: it stays. ep: axes of the data
    that hold experts, each rank E/n of them; their gathered weights stay split over them. With "tp" among them an
    expert is not split over tp, and the sequence is (Decoder.sequence_parallel). rows: for which a rank has room
    (`dropless`); None: for all. chunks: so many parts of a rank's tokens go one after the other, computed again in
    the backward (`dropless`). capacity: an expert takes at most so many times its equal share of a sequence's
    tokens, and drops others (`with_capacity`). sequence_balance, balance, z_loss: coefficients of losses of the router,
    0 for none: of the balance over each sequence by itself (`sequence_balance_loss`), which needs nothing else; of
    Switch's (`expert_probs`), by loads of the `balance_of` "batch", all of which must be known before the first
    backward, with several microbatches by `build_train_step(twice=True)`, or of the "step before", which `post_update`
    keeps as the array "shares"; of `router_z_loss`. biases: router and experts have
    biases. limit: gate and up are clamped to it and gated as gpt-oss does, gate and up in turns (arXiv 2508.10925);
    None: silu. jitter, noise: in training, where the loss is given samples (`model.loss`): the router's argument is
    multiplied by numbers from [1 - jitter, 1 + jitter) (`nn.jittered`), and its logits get normal numbers of standard
    deviation `noise` (`nn.noisy`). fp32_router: the router's weights, and their product with the tokens, are fp32 or
    wider, as DeepSeek has them; rounded to bf16, one token in a hundred takes other experts. pair_rows: how many rows a
    rank sends to each other one, always (`dropless`), so that on CUDA the host reads no counts and does not wait; None:
    as many as there are.
    """

    router: nn.Router
    ffn_dim: int
    shared: MLP | None = None
    choice_bias: bool = False
    bias_rate: float = 0.0
    ep: tuple[str, ...] = ("ep",)
    rows: int | None = None
    chunks: int = 1
    capacity: float | None = None
    balance: float = 0.0
    sequence_balance: float = 0.0
    z_loss: float = 0.0
    biases: bool = False
    limit: float | None = None
    jitter: float = 0.0
    noise: float = 0.0
    fp32_router: bool = False
    balance_of: Literal["batch", "step before"] = "batch"
    pair_rows: int | None = None

    def __post_init__(self):
        if not self.bias_rate >= 0 or self.bias_rate and not self.choice_bias:
            raise ValueError(
                f"MoE.bias_rate: got {self.bias_rate} with choice_bias={self.choice_bias}, wanted 0 or more, and a "
                "bias that it moves; set choice_bias=True"
            )
        if isinstance(self.ep, str) or len(set(self.ep)) != len(self.ep):
            raise ValueError(f"MoE.ep: got {self.ep!r}, wanted a tuple of axes; write ({self.ep!r:.20},)")
        room = {"rows": self.rows, "pair_rows": self.pair_rows}
        whole = {"ffn_dim": self.ffn_dim, "chunks": self.chunks} | {k: n for k, n in room.items() if n is not None}
        for name, value in whole.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"MoE.{name}: got {value!r}, wanted a whole number of at least 1")
        if self.capacity is not None and (not self.capacity > 0 or room.keys() & whole.keys()):
            raise ValueError(
                f"MoE.capacity: got {self.capacity} with rows={self.rows}, pair_rows={self.pair_rows}, wanted a number "
                "above 0, which is the room of an expert by itself; leave these out, or capacity"
            )
        for name in ("balance", "sequence_balance", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"MoE.{name}: got {getattr(self, name)}, wanted 0 or more")
        if self.balance_of not in ("batch", "step before"):
            raise ValueError(f"MoE.balance_of: got {self.balance_of!r}, wanted 'batch' or 'step before'")
        for name, value, most in (("jitter", self.jitter, 1), ("noise", self.noise, math.inf)):
            if not 0 <= value <= most:
                raise ValueError(f"MoE.{name}: got {value}, wanted a number from 0 to {most}")

    def arrays(self, dim: int) -> dict[str, Any]:
        """{"router": [D, E], "up": [E, D, 2F], "down": [E, F, D]}, "shared", and biases."""
        E, F, used, zero = self.router.experts, self.ffn_dim, self.router.top_k / self.router.experts, 0.0
        parts = (F, F) if self.limit is None else ()
        fixed = {"kept": self.ep, "used": used, "lead": 1}
        fsdp, tp = (None if name in self.ep else name for name in ("fsdp", "tp"))
        down = Array((E, F, dim), (self.ep, tp, fsdp), residual=True, **fixed)
        out: dict[str, Any] = {"up": Array((E, dim, 2 * F), (self.ep, fsdp, tp), parts, **fixed), "down": down}
        out["router"] = Array((dim, E), wide=self.fp32_router)
        if self.choice_bias:  # a step of 0.001 is lost in 16 bits
            out["choice_bias"] = Array((E,), init=zero, full=True, wide=True)
        if self._keeps_shares:
            out["shares"] = Array((E,), init=1 / E, full=True, wide=True)
        if self.biases:
            out["router_bias"] = Array((E,), init=zero)
            out["bias_up"] = Array((E, 2 * F), (self.ep, tp), parts, zero, kept=self.ep, lead=1)
            out["bias_down"] = Array((E, dim), (self.ep,), init=zero, kept=self.ep, lead=1)
        return out | ({} if self.shared is None else {"shared": self.shared.arrays(dim)})

    def check_mesh(self, mesh: Mesh) -> None:
        """ValueError where experts, or their hidden width, do not divide."""
        ways, tp = mesh.extent(mesh.axes(self.ep)), 1 if "tp" in self.ep else mesh["tp"]
        for name, value, n in (("router.experts", self.router.experts, ways), ("ffn_dim", self.ffn_dim, tp)):
            if value % n:
                raise ValueError(
                    f"MoE.{name}: got {value}, wanted a multiple of {n} on the mesh {mesh}; choose a divisor"
                )
        if self.shared is not None:
            self.shared.check_mesh(mesh)

    def sends(self, mesh: Mesh) -> tuple[str, ...]:
        """The exchange of tokens."""
        return ("what experts send over the axes that hold them",)

    @property
    def couples(self) -> tuple[str, ...]:
        """The room of a rank, which all tokens of a microbatch share."""
        room = {"rows": self.rows, "pair_rows": self.pair_rows}
        return tuple(f"MoE.{k}={n}, the room for the tokens of a microbatch" for k, n in room.items() if n is not None)

    @property
    def rates(self) -> dict[str, float]:
        """Of the router."""
        return {"jitter": self.jitter, "noise": self.noise}

    @property
    def rule(self) -> Rule | None:
        """The loads move the bias of the choice, with a `bias_rate`, and are the shares of the next step."""
        if not self.bias_rate and not self._keeps_shares:
            return None
        if not self._keeps_shares:
            return Rule("bias_rate", self.bias_rate, ("load",))
        return Rule("balance_of, bias_rate", (self.balance_of, self.bias_rate), ("load",))

    @property
    def _keeps_shares(self) -> bool:
        return bool(self.balance) and self.balance_of == "step before"

    def post_update(self, w: dict, statistics: dict[str, Tensor]) -> dict:
        """The bias of the choice by `balanced_bias` of the loads, and the shares, which stay where there is no load."""
        load_LE, w = statistics["load"], dict(w)
        if self.bias_rate:
            w["choice_bias"] = balanced_bias(w["choice_bias"], load_LE, self.bias_rate)
        if self._keeps_shares:
            of_all = load_LE.sum(-1, keepdim=True)
            new = load_LE.to(w["shares"].dtype) / of_all.clamp(min=1)
            w["shares"] = torch.where(of_all > 0, new, w["shares"])
        return w

    def __call__(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> tuple[Tensor, dict[str, Tensor]]:
        """`u[B, S, D]@R(tp) -> y[B, S, D]@R(tp)`, S_tp at both ends with sequence parallelism; and statistics:
        "load" [E], how often each expert was chosen on all ranks; of this rank's tokens the totals "entropy" of the
        router, and those that `losses` takes; with `rows` or `pair_rows` "overflow", with `capacity` "dropped".
        Padding goes to no chosen expert, takes no room of one and counts nowhere.

        Each token is routed once, by the rank that has it; the experts' products are split over tp as an MLP's are,
        unless tp holds experts. Raises ValueError for experts over tp without sequence parallelism.
        """
        axes = at.axes
        tp, split, data = axes["tp"], at.splits(u_BSD), axes[axes.data]
        everywhere = axes[(*axes.data, "tp")] if split else data
        padding_BS = shard(at.padding, tp, 1) if split and at.padding is not None else at.padding
        real_BS = None if padding_BS is None else ~padding_BS

        def own(name: str) -> Any:  # every rank has it; with other tokens on each its gradient is a sum
            return nn.entered(w[name], tp) if split else w[name]

        wide = torch.promote_types(u_BSD.dtype, torch.float32) if self.fp32_router else u_BSD.dtype
        router = tree.map(lambda x: x.to(wide), own("router")) if self.fp32_router else own("router")
        logits_BSE = nn.matmul(jittered(u_BSD, self.jitter, at).to(wide), router)
        if self.biases:
            logits_BSE = logits_BSE + own("router_bias").to(logits_BSE.dtype)
        logits_BSE = noisy(logits_BSE, self.noise, at)
        routing = self.router(logits_BSE, w["choice_bias"] if self.choice_bias else None).without(padding_BS)
        y_BSD, found = self._routed(u_BSD, routing, w, split, at)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(u_BSD, w["shared"], at)
        chosen_E = expert_load(routing.experts, self.router.experts)
        over = axes[(*axes.sequence.names, "tp")] if split else axes.sequence
        totals = {"entropy": router_entropy(routing.probs, real_BS)}
        if self._keeps_shares:
            probs_E = expert_probs(routing.probs, real_BS)
            totals["balance"] = self.router.experts * (probs_E * w["shares"].detach().to(probs_E.dtype)).sum()
        elif self.balance:
            totals |= {"probs": expert_probs(routing.probs, real_BS), "chosen": chosen_E.to(torch.float64)}
        if self.sequence_balance:
            of_sequences = (routing.probs, routing.experts, over, real_BS)
            totals["sequence_balance"] = sequence_balance_loss(*of_sequences)
        if self.z_loss:
            totals["z"] = router_z_loss(logits_BSE, real_BS)
        totals = {name: psum(value, tp) for name, value in totals.items()} if split else totals
        return y_BSD, {"load": psum(chosen_E, everywhere), **totals, **found}

    def losses(self, statistics: dict[str, Tensor], tokens: Tensor | int) -> dict[str, step.Part]:
        """Of the router: "balance", "sequence_balance", "router_z", those of which it has a coefficient."""
        E, K, parts = self.router.experts, self.router.top_k, {}
        if self._keeps_shares:
            parts["balance"] = self.balance * step.mean(statistics["balance"], tokens)
        elif self.balance:
            shares = step.mean(statistics["chosen"], K * tokens)
            parts["balance"] = self.balance * (step.mean(E * statistics["probs"], tokens) * shares)
        if self.sequence_balance:
            parts["sequence_balance"] = self.sequence_balance * step.mean(statistics["sequence_balance"], tokens)
        if self.z_loss:
            parts["router_z"] = self.z_loss * step.mean(statistics["z"], tokens)
        return parts

    def _routed(
        self, u_BSD: Tensor, routing: Routing, w: Any, split: bool, at: TokenContext
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(what the chosen experts make of the tokens, sums over all ranks of what did not fit)."""
        axes = at.axes
        tp, cp, ep = axes["tp"], axes.sequence, axes[self.ep]
        data = axes[tuple(name for name in axes.data if name not in cp.names)]
        v_BSD, sequence, token_axes = u_BSD, cp, axes[axes.data]
        if folded := "tp" in ep.names:
            if not split:
                raise ValueError(
                    f"MoE.ep: got {self.ep} on the mesh {axes.mesh} with full sequences on each rank of tp, wanted "
                    "other tokens on each; set Decoder.sequence_parallel=True, or leave tp out of ep"
                )
            sequence, token_axes = axes[(*cp.names, "tp")], axes[(*axes.data, "tp")]
        elif split:
            v_BSD, gates, experts = (all_gather(x, tp, 1) for x in (u_BSD, routing.gates, routing.experts))
            routing = routing._replace(gates=gates, experts=experts)
        else:
            v_BSD, routing = enter(u_BSD, tp), routing._replace(gates=enter(routing.gates, tp))
        own = {k: w[k] for k in ("up", "down", "bias_up", "bias_down") if k in w}
        own = moe.expert_weights(own, ep, token_axes)
        apply = functools.partial(self._experts, tp=axes[()] if folded else tp)
        if self.capacity is not None:
            if cp.size > 1:
                raise ValueError(
                    f"MoE.capacity: got {self.capacity} on the mesh {axes.mesh}, which splits sequences, wanted full "
                    "ones, of which a part is dropped; leave capacity out"
                )
            S, K, E, room_B = v_BSD.shape[1], self.router.top_k, self.router.experts, None
            most = min(S, math.ceil(self.capacity * S * K / E))
            if at.padding is not None:
                room_B = (self.capacity * (~at.padding).sum(1).double() * K / E).ceil().long()
            y_BSD, found = with_capacity(v_BSD, routing, own, apply, ep, data, most, room_B)
        else:
            again = step.remat if self.chunks > 1 else None
            given = (v_BSD, routing, own, apply, ep, data, sequence)
            y_BSD, found = dropless(*given, self.rows, self.chunks, again, self.pair_rows)
        if not folded:
            y_BSD = reduce_scatter(y_BSD, tp, 1) if split else psum(y_BSD, tp)
        bounded = self.rows is not None or self.pair_rows is not None
        wanted = ("dropped",) if self.capacity is not None else ("overflow",) if bounded else ()
        return y_BSD, {name: psum(found[name], token_axes) for name in wanted}

    def _experts(self, w: Any, x_MD: Tensor, ends_X: Tensor, expert_M: Tensor, *, tp: axes.Axis) -> Tensor:
        """This rank's experts (`nn.Apply`), of which tp splits the hidden units."""
        h_MF = nn.grouped_matmul(x_MD, w["up"], ends_X)
        if self.biases:
            h_MF = h_MF + w["bias_up"].to(h_MF.dtype).index_select(0, expert_M)
        if self.limit is None:
            gate_MF, up_MF = h_MF.chunk(2, -1)
            h_MF = mlp.ACTIVATIONS["silu"](gate_MF) * up_MF
        else:
            gate_MF, up_MF = h_MF.unflatten(-1, (-1, 2)).unbind(-1)
            gate_MF, up_MF = gate_MF.clamp(max=self.limit), up_MF.clamp(-self.limit, self.limit)
            h_MF = gate_MF * torch.sigmoid(1.702 * gate_MF) * (up_MF + 1)
        y_MD = nn.grouped_matmul(h_MF, w["down"], ends_X)
        if not self.biases:
            return y_MD
        # each rank of tp adds its share to what is summed over tp
        return y_MD + (enter(w["bias_down"], tp) / tp.size).to(y_MD.dtype).index_select(0, expert_M)
