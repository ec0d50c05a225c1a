"""The decoder: its arrays, their layouts, and its loss.  Legend: B batch, S sequence, D width, V padded vocabulary."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fmegatron import nn, step, tree
from fmegatron.collectives import Axes, Axis, psum
from fmegatron.layout import DATA_AXES, DataParallel, Layout, Mesh, Rules, Split
from fmegatron.model.block import block, norm_weight
from fmegatron.model.config import Config
from fmegatron.tree import ArraySpec, Constant, Normal

GROUPS = ("blocks", "embed", "head")  # whose gathered weights can be freed after use: each block, the table, the head

# Where tp splits the rows of a matrix, data axes split them further: their pieces follow each other in memory, so that
# gathers and reduce-scatters copy nothing.
RULES = Rules(
    [
        (r"embed/table", (("tp", "fsdp"),)),
        (r"blocks/attention/wqkv", (None, "fsdp", "tp")),
        (r"blocks/attention/wo", (None, ("tp", "fsdp"))),
        (r"blocks/mlp/w_gate_up", (None, "fsdp", "tp")),
        (r"blocks/mlp/w_down", (None, ("tp", "fsdp"))),
        (r"head/w", ("fsdp", "tp")),
        (r"blocks/\w+_norm|final_norm", ()),
    ]
)


# ---- arrays and layouts ----------------------------------------------------------------------------------------------
def specs(config: Config, mesh: Mesh, rules: Rules = RULES, strategy: DataParallel | None = None) -> dict:
    """The tree of ArraySpecs of the model: shape, dtype, layout on `mesh`, initial values.

    strategy: over which data axes parameters are sharded at rest; every leaf is, vectors too, on the dim where the
    rules name a data axis, else on another one. Its axes may have other names than dp and fsdp, for which the rules'
    then stand. None: just as the rules say (fsdp shards matrices, dp nothing), except that a data axis that does not
    divide its dim goes to one that it divides.

    `rules` gives the axes of each leaf; dp, fsdp and tp count as size 1 where the mesh lacks them. Dims that hold
    several matrices side by side (q, k, v; gate, up) are interleaved here, so a rule only names the axis.
    Raises ValueError when a size does not divide by the axes that split it, naming leaf, size and fix, and when an axis
    of the mesh would do nothing.
    """
    config.check_mesh(mesh)
    D, L, F, V = config.dim, config.layers, config.ffn_dim, config.padded_vocab
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    meant = _meant(strategy)
    known = tuple(dict.fromkeys((*DATA_AXES, *meant.values(), "tp")))
    narrow, residual = Normal(0.02), Normal(0.02 / math.sqrt(2 * L))  # GPT-2's scaling of what is added to the stream

    def array(path, shape, init, parts=None):
        spec = tuple(_by_strategy(entry, meant) for entry in rules.match(path))
        if parts and len(spec) == len(shape) and (axes := spec[-1]) and not isinstance(axes, Split):
            spec = (*spec[:-1], Split(axes, parts))
        layout = Layout(shape, config.param_dtype, mesh, spec)
        stack = (0,) if path.startswith("blocks/") else ()
        if strategy is not None:  # the layer dim of a stack stays whole: a layer is gathered when it runs
            layout = strategy.params_layout(layout, whole=stack)
        elif not layout.is_even:
            layout = _moved_data_axes(layout, stack)
        for dim, (size, entry) in enumerate(zip(shape, layout.spec, strict=True)):
            pieces, ways = entry.sizes(size) if isinstance(entry, Split) else (size,), mesh.extent(layout.axes(dim))
            if any(piece % ways for piece in pieces):
                raise ValueError(
                    f"{path}: got dim {dim} of size {' + '.join(map(str, pieces))}, wanted a multiple of {ways} "
                    f"({'·'.join(layout.axes(dim))} of the mesh {mesh}); change size or mesh, or give a rule without it"
                )
        return ArraySpec(layout, init)

    blocks = {
        "attention_norm": array("blocks/attention_norm", (L, D), Constant(1.0)),
        "attention": {
            "wqkv": array("blocks/attention/wqkv", (L, D, q + 2 * kv), narrow, (q, kv, kv)),
            "wo": array("blocks/attention/wo", (L, q, D), residual),
        },
        "mlp_norm": array("blocks/mlp_norm", (L, D), Constant(1.0)),
        "mlp": {
            "w_gate_up": array("blocks/mlp/w_gate_up", (L, D, 2 * F), narrow, (F, F)),
            "w_down": array("blocks/mlp/w_down", (L, F, D), residual),
        },
    }
    out = {
        "embed": {"table": array("embed/table", (V, D), narrow)},
        "blocks": blocks,
        "final_norm": array("final_norm", (D,), Constant(1.0)),
    }
    out = out if config.tied else {**out, "head": {"w": array("head/w", (D, V), narrow)}}
    _check_every_axis_works(out, mesh, known)
    return out


def _meant(strategy: DataParallel | None) -> dict[str, str]:
    """For each data axis that rules may name the axis that the strategy has for it: of others the last for fsdp."""
    if strategy is None:
        return {name: name for name in DATA_AXES}
    free = [name for name in DATA_AXES if name not in strategy.axes]
    own = [name for name in strategy.axes if name not in DATA_AXES]
    return {name: name for name in strategy.axes} | dict(zip(reversed(free), reversed(own), strict=False))


def _moved_data_axes(layout: Layout, whole: tuple[int, ...]) -> Layout:
    """The layout with its data axes on a dim that they divide, where they do not divide that of the rule."""
    axes = tuple(name for name in DATA_AXES if name in layout.sharded)
    moved = DataParallel(axes, axes, axes, axes).params_layout(layout, whole) if axes else layout
    return moved if set(moved.sharded) == set(layout.sharded) and not moved.flat else layout


def _check_every_axis_works(specs: dict, mesh: Mesh, known: tuple[str, ...]) -> None:
    """ValueError for an axis that splits neither the model nor the batch: its ranks would all do the same work."""
    used = {*known, *(name for spec in tree.leaves(specs) for name in spec.layout.sharded)}
    if idle := [name for name in mesh.names if mesh[name] > 1 and name not in used]:
        raise ValueError(
            f"mesh {mesh}: got the axis {idle[0]!r}, which splits no array of the model and no batch, wanted each axis "
            f"to split one, or its {mesh[idle[0]]} ranks would repeat each other's work; name it {', '.join(known)}, "
            "give a strategy over it, or a rule that uses it"
        )


def layouts(config: Config, mesh: Mesh, rules: Rules = RULES, strategy: DataParallel | None = None) -> dict:
    """The tree of Layouts of the model on `mesh` (see `specs`)."""
    return tree.layouts(specs(config, mesh, rules, strategy))


def init(config: Config, mesh: Mesh, key: int, rank: int = 0, rules: Rules = RULES) -> dict:
    """This rank's shards of the initial parameters; the global arrays depend on `key` only, not on mesh or rank.

    Args:
        config: of the model.
        mesh: of all ranks.
        key: of the random values (`tree.fold_in`).
        rank: whose shards.
        rules: how the dims of each leaf are split.
    """
    return tree.init(specs(config, mesh, rules), key, rank)


def _by_strategy(entry, meant: dict[str, str]):
    """A rule's entry for one dim, by the names that the strategy has for the data axes."""
    axes = entry.names if isinstance(entry, Split) else (entry,) if isinstance(entry, str) else entry or ()
    axes = tuple(meant.get(name, name) for name in axes)
    return Split(axes, entry.parts) if isinstance(entry, Split) else axes


# ---- weights as a step uses them -------------------------------------------------------------------------------------
def gather_weights(shards, layouts, config: Config, axes: Axes):
    """Matrices in the compute dtype, whole over the data axes: `w[D_fsdp, F_tp] -> w[D, F_tp]`, one all_gather for all.

    They travel as `config.policy.wires` says. Vectors (norm weights) keep their dtype: they are small, their maths is
    fp32; they are in the same buffer nevertheless.
    Transpose: one reduce_scatter of all gradients, which arrive in the dtype of the shards.
    """
    return nn.gather_tree(shards, layouts, axes[axes.data], config.policy.wires(layouts))


def prepared(params: dict, layouts: dict, config: Config, axes: Axes) -> dict:
    """Parameters as `gather_weights` takes them: matrices that travel in 8 bits get their scales, by one pmax."""
    wire = config.policy.wire
    if not wire.scaled or wire.gather is None:
        return params
    stacked = {name: tree.map(lambda _, name=name: name == "blocks", leaf) for name, leaf in layouts.items()}
    return nn.with_scales(params, layouts, axes, wire.gather, stacked)


class _Outer:
    """The weights outside of the blocks, by name: some gathered together at once and kept, the others when asked for.

    freed: the groups of `GROUPS` that are gathered for each use.
    """

    def __init__(self, params: dict, layouts: dict, config: Config, axes: Axes, freed: tuple[str, ...]):
        if unknown := [name for name in freed if name not in GROUPS]:
            raise ValueError(f"reshard_after_forward: got {unknown[0]!r}, wanted names among {', '.join(GROUPS)}")
        self.params, self.layouts, self.config, self.axes = params, layouts, config, axes
        self.groups = {"embed": ("embed",), "head": ("final_norm", "embed" if config.tied else "head")}
        kept = [name for group, names in self.groups.items() if group not in freed for name in names]
        self.kept = self._gather(list(dict.fromkeys(kept)))

    def _gather(self, names: list[str]) -> dict:
        params, layouts = ({name: whole[name] for name in names} for whole in (self.params, self.layouts))
        return gather_weights(params, layouts, self.config, self.axes) if names else {}

    def __getitem__(self, group: str) -> dict:
        names = self.groups[group]
        missing = [name for name in names if name not in self.kept]
        return {**{name: self.kept[name] for name in names if name in self.kept}, **self._gather(missing)}


# ---- forward and loss ------------------------------------------------------------------------------------------------
def logits(
    params: dict,
    tokens_BS: Tensor,
    config: Config,
    layouts: dict,
    axes: Axes,
    save: step.Policy | None = None,
    offload: int | None = None,
    reshard_after_forward: tuple[str, ...] | None = None,
) -> Tensor:
    """Next-token scores: `tokens[B, S] -> logits[B, S, V_tp]` in the compute dtype; padded columns are not masked.

    Args:
        params: this rank's shards.
        tokens_BS: int64, B split over the data axes.
        config: of the model.
        layouts: of the parameters.
        axes: Axes(mesh).
        save: what a block, compiled once for all, keeps for its backward (`step.layers`); None: as autograd does.
        offload: bytes from which on it waits in host memory (`step.layers`).
        reshard_after_forward: the groups of weights that are gathered for a use and gone after it ("blocks": each block
            again for its backward, unless `save` is None; "embed": for the lookup, whose transpose needs no
            weights; "head": where the blocks end, which is where the backward begins). Groups that are left out are
            kept from their gather to the end of the backward; "embed" and "head" then travel in one collective.
            None: all of GROUPS, which needs the least memory (one group at a time) and no byte more on the wire; with a
            tied table all but "head": it is used at both ends, and freeing it in between costs one more gather and
            reduce-scatter.
    """
    if tokens_BS.shape[1] > config.max_seq:
        raise ValueError(
            f"tokens: got sequences of {tokens_BS.shape[1]}, wanted at most Config.max_seq={config.max_seq}; "
            "raise max_seq (RoPE needs no new parameters) or cut the batch"
        )
    tp = axes["tp"]
    if config.sequence_parallel and tokens_BS.shape[1] % tp.size:
        raise ValueError(
            f"tokens: got sequences of {tokens_BS.shape[1]}, wanted a multiple of tp={tp.size} (sequence parallelism); "
            "change the length, or set Config.sequence_parallel=False"
        )
    if reshard_after_forward is None:
        reshard_after_forward = tuple(name for name in GROUPS if name != "head" or not config.tied)
    params = prepared(params, layouts, config, axes)
    outer = _Outer(params, layouts, config, axes, reshard_after_forward)
    positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    cos_Sh, sin_Sh = nn.rope_angles(positions_S, config.head_dim, config.rope_theta, config.compute_dtype)

    x_BSD = nn.embed(tokens_BS, outer["embed"]["embed"]["table"], tp, config.sequence_parallel)
    run = step.layers(
        functools.partial(block, config=config, tp=tp),
        params["blocks"],
        layouts["blocks"],
        axes,
        save,
        precision=config.policy,
        offload=offload,
        reshard_after_forward="blocks" in reshard_after_forward,
    )
    return read_out(run(x_BSD, cos_Sh, sin_Sh), outer["head"], config, tp)


def read_out(x_BSD: Tensor, outer: dict, config: Config, tp: Axis) -> Tensor:
    """Final norm and head: `x[B, S, D]@R(tp)` (S_tp with sequence parallelism) `-> logits[B, S, V_tp]`."""
    x_BSD = nn.rms_norm(x_BSD, norm_weight(outer["final_norm"], config, tp), config.norm_eps)
    head_DV = outer["embed"]["table"].t() if config.tied else outer["head"]["w"]
    return nn.column_parallel(x_BSD, head_DV, tp, config.sequence_parallel)


def loss(
    params: dict,
    batch: dict,
    config: Config,
    layouts: dict,
    axes: Axes,
    save: step.Policy | None = None,
    offload: int | None = None,
    reshard_after_forward: tuple[str, ...] | None = None,
) -> tuple[Tensor, dict]:
    """(this rank's part of the loss, metrics): the parts of all data ranks add up to the mean over all tokens.

    The divisor is the global token count: a constant without a mask, else one psum of the masks' sums. Every tp rank
    has the same part. The metrics are 0-d and equal on all ranks: "loss" (with z-loss), "z_loss" (its share; only if
    configured), "tokens" (int64).

    Args:
        params: this rank's shards.
        batch: {"tokens", "labels": int64 [B, S]; optional "mask" [B, S]: weight of each token}, B split over
            `axes.data`.
        config: of the model.
        layouts: of the parameters.
        axes: Axes(mesh).
        save: what a block keeps for its backward (`logits`).
        offload: what of it waits in host memory (`logits`).
        reshard_after_forward: which weights are gathered for each use (`logits`).
    """
    for name in ("labels", "mask"):
        if name in batch and batch[name].shape != batch["tokens"].shape:
            raise ValueError(
                f"batch[{name!r}]: got shape {tuple(batch[name].shape)}, wanted that of the tokens, "
                f"{tuple(batch['tokens'].shape)}; give one entry for each token"
            )
    logits_BSV = logits(params, batch["tokens"], config, layouts, axes, save, offload, reshard_after_forward)
    data = axes[axes.data]
    nll_BS, lse_BS = nn.cross_entropy(logits_BSV, batch["labels"], axes["tp"], config.vocab_size)
    z_BS = config.z_loss * lse_BS.square()
    if "mask" in batch:
        mask_BS = batch["mask"].to(nll_BS.dtype)
        nll_BS, z_BS = nll_BS * mask_BS, z_BS * mask_BS
        tokens = psum(mask_BS.sum(), data)
        count = tokens.clamp(min=1.0)  # a batch without any token has loss 0, not 0/0
    else:
        count = nll_BS.numel() * data.size
        tokens = torch.full((), count, dtype=torch.int64, device=nll_BS.device)
    metrics = {"tokens": tokens.to(torch.int64)}
    if not config.z_loss:
        local = nll_BS.sum() / count
        return local, {"loss": psum(local.detach(), data), **metrics}
    z = z_BS.sum() / count
    local = nll_BS.sum() / count + z
    total, z = psum(torch.stack((local.detach(), z.detach())), data).unbind(0)
    return local, {"loss": total, "z_loss": z, **metrics}
