"""The decoder's maths: its blocks, logits and loss, on local shards.

Legend: B batch, S sequence, D width, V padded vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fmegatron import nn, step, tree
from fmegatron.collectives import Axes, all_gather, enter, ops
from fmegatron.collectives.known_ranks import require_one_rank
from fmegatron.layout import Layout, Mesh
from fmegatron.model.arrays import TokenContext
from fmegatron.model.context import positions_of
from fmegatron.model.decoder import MTP, Block, Decoder
from fmegatron.model.determinism import require_samples
from fmegatron.model.draws import draws_of, dropped
from fmegatron.model.mtp import predict, with_ahead
from fmegatron.model.post_updates import loads
from fmegatron.model.statistics import counted, learned, losses_of, padding_of, without_labels_of_padding
from fmegatron.model.weights import Weights, adapted_named, embedded
from fmegatron.nn import weight
from fmegatron.nn.loss import real_columns
from fmegatron.step import partition
from fmegatron.step.pipeline import marks


# ---- blocks ----------------------------------------------------------------------------------------------------------
def block(
    x_BSD: Tensor, w: dict, at: TokenContext, *, parts: Block, mix: Callable | None = None
) -> Tensor | tuple[Tensor, dict]:
    """x + mixer(norm(x)), part after part: a pure function of tensors, compiled once for all blocks with these parts.

    `x[B, S, D]@R(tp) -> y[B, S, D]@R(tp)`, or S_tp at both ends with sequence parallelism. Where mixers give statistics
    (y, {part: statistics}).

    Args:
        x_BSD: activations in the compute dtype.
        w: one block's weights, gathered over the data axes and split over the others: by the names of the parts those
            of the mixer, and of the norms `name`_norm and `name`_after.
        at: of the tokens.
        parts: of the block.
        mix: mix(part, u, w, at) in place of the mixer, for generation; None: the mixer itself.
    """
    statistics = {}
    for part in parts:
        u_BSD = x_BSD if part.norm is None else part.norm(x_BSD, w[f"{part.name}_norm"], at)
        given = (u_BSD, w[part.name], at.of(part.name))
        with adapted_named(part.name, w[part.name]):
            y_BSD = part.mixer(*given) if mix is None else mix(part, *given)
        if isinstance(y_BSD, tuple):
            y_BSD, statistics[part.name] = y_BSD
        if not isinstance(y_BSD, Tensor) or y_BSD.shape != u_BSD.shape:
            got = tuple(y_BSD.shape) if isinstance(y_BSD, Tensor) else y_BSD
            raise ValueError(
                f"{type(part.mixer).__name__} of the part {part.name!r}: got {got} from it, wanted the shape of its "
                f"argument, {tuple(u_BSD.shape)}; return what is added to the stream, or (it, statistics)"
            )
        y_BSD = y_BSD if part.after is None else part.after(y_BSD, w[f"{part.name}_after"], at)
        x_BSD = x_BSD + dropped(y_BSD, part.dropout, part.name, at)
    return (x_BSD, statistics) if statistics else x_BSD


# ---- the three parts of a forward pass -------------------------------------------------------------------------------
def contexts(
    batch: dict, decoder: Decoder, axes: Axes, samples: Tensor | None = None, key: int = 0
) -> list[TokenContext]:
    """What the embedding, then each block, then each depth of `Decoder.mtp` is told of the tokens; needs no weights.

    Args:
        batch: as for `loss`; of it "tokens", "positions", "documents" and "padding".
        decoder: the model.
        axes: Axes(mesh).
        samples: the numbers of the rows in the run, of which random numbers are made (`loss`); None: none are.
        key: of these.

    Raises ValueError for sequences longer than `Decoder.max_seq`, or that tp does not divide (sequence parallelism).
    """
    tokens_BS, tp = batch["tokens"], axes["tp"]
    length = tokens_BS.shape[1] * axes.sequence.size
    if length > decoder.max_seq:
        raise ValueError(
            f"tokens: got sequences of {length}, wanted at most Decoder.max_seq={decoder.max_seq}; raise "
            "max_seq (RoPE needs no new parameters) or cut the batch"
        )
    if decoder.sequence_parallel and tokens_BS.shape[1] % tp.size:
        raise ValueError(
            f"tokens: got sequences of {tokens_BS.shape[1]}, wanted a multiple of tp={tp.size} (sequence "
            "parallelism); change the length, or set Decoder.sequence_parallel=False"
        )
    positions = batch.get("positions")
    if positions is None:
        positions = positions_of(tokens_BS, axes.sequence)
    documents, padding = batch.get("documents"), padding_of(batch)
    behind = 0 if decoder.mtp is None else decoder.mtp.depths
    draws = draws_of(samples, positions, documents, key, decoder.max_seq, 1 + decoder.layers + behind)
    found = decoder.at(positions, documents, decoder.blocks, padding)
    if decoder.mtp is not None:
        found += decoder.at(positions, documents, (decoder.mtp.block,), padding) * behind
    first = TokenContext(positions, draws=draws(0), padding=padding, axes=axes)
    return [first, *(at._replace(draws=draws(depth), axes=axes) for depth, at in enumerate(found, 1))]


def embed(ids_BS: Tensor, w: dict, at: TokenContext, decoder: Decoder, n: int = 0) -> Tensor:
    """`ids[B, S] -> x[B, S, D]@R(tp)`, S_tp with sequence parallelism, in the compute dtype.

    w: weights of the embedding, whole over the data axes (`gather_weights`). at: the first of `contexts`. n: which of
    the tokens it is, for dropout: 0 the token, 1 and more those behind it, for `Decoder.mtp`.
    """
    x_BSD = embedded(ids_BS, w, at.positions, decoder, at.axes, decoder.sequence_parallel)
    return dropped(x_BSD, decoder.embed_dropout, f"embed {n}", at)


def blocks(
    x_BSD: Tensor, at: Sequence[TokenContext], layers: Iterable[tuple[Callable, dict]], behind: bool = False
) -> tuple[Tensor, list[dict[str, dict]]]:
    """(what comes from the last block, for each block the statistics of its parts by their names).

    at: of each block. layers: (run, weights) of each block: `run(x, weights, at)`, such as those of `Weights.layers`.
    behind: whether they are no blocks of the trunk, at which a stage of a pipeline may begin.
    """
    statistics = []
    for n, ((run, weights), here) in enumerate(zip(layers, at, strict=True)):
        x_BSD = run(x_BSD if behind else marks.stage(x_BSD, n), weights, here)
        x_BSD, found = x_BSD if isinstance(x_BSD, tuple) else (x_BSD, {})
        statistics.append(found)
    return x_BSD, statistics


def read_out(x_BSD: Tensor, w: dict, at: TokenContext, decoder: Decoder) -> Tensor:
    """Final norm and head: `x[B, S, D]@R(tp)` (S_tp with sequence parallelism) `-> logits[B, S, V_tp]`.

    Columns with which the vocabulary is padded (`Decoder.vocab_multiple`) count in no loss: they are left out where a
    rank has all columns, [B, S, vocab_size], and are minus infinity where tp splits them. Their gradient is 0.
    """
    tp, logits_BSV = at.axes["tp"], _scores(decoder.norm(x_BSD, w["final_norm"], at), w, at, decoder)
    if tp.size == 1:
        return logits_BSV[..., : decoder.vocab_size]
    real_V = real_columns(logits_BSV, tp, decoder.vocab_size)
    if real_V is None:
        return logits_BSV
    return logits_BSV.masked_fill(~ops.declare(real_V, tp, ("sharded", 0)), -torch.inf)


def _scores(x_BSD: Tensor, w: dict, at: TokenContext, decoder: Decoder) -> Tensor:
    """The head, of what has been through its norm."""
    return decoder.capped(nn.column_parallel(x_BSD, _head(w, decoder), at.axes["tp"], at.splits(x_BSD)))


def _head(w: dict, decoder: Decoder) -> weight.Weight:
    return nn.dense(w["embed"]["table"]).t() if decoder.tied else w["head"]["w"]


def _token_losses(x_BSD: Tensor, w: dict, at: TokenContext, labels_BS: Tensor, decoder: Decoder):
    """(nll[B, S], lse[B, S]) of what has been through the norm of the head."""
    tp, split = at.axes["tp"], at.splits(x_BSD)
    if decoder.loss_chunks == 1:
        return nn.cross_entropy(_scores(x_BSD, w, at, decoder), labels_BS, tp, decoder.vocab_size)
    x_BSD = all_gather(x_BSD, tp, 1) if split else enter(x_BSD, tp)
    how = {"chunks": decoder.loss_chunks, "softcap": decoder.logit_softcap}
    return nn.chunked_cross_entropy(x_BSD, _head(w, decoder), labels_BS, tp, decoder.vocab_size, **how)


# ---- forward and loss ------------------------------------------------------------------------------------------------
def logits(
    params: dict,
    tokens_BS: Tensor,
    decoder: Decoder,
    axes: Axes | None = None,
    save: partition.Policy | None = None,
    offload: int | None = None,
    reshard_after_forward: tuple[str, ...] | None = None,
) -> Tensor:
    """Next-token scores: `tokens[B, S] -> logits[B, S, V_tp]` in the compute dtype, as `read_out` gives them: without
    the columns of a padded vocabulary, or minus infinity there where tp splits it.

    The arguments are those of `hidden`, of a batch of tokens alone.
    """
    batch = {"tokens": tokens_BS}
    found = hidden(params, batch, decoder, axes, save, offload, reshard_after_forward)
    return read_out(*found[:3], decoder)


def hidden(
    params: dict,
    batch: dict,
    decoder: Decoder,
    axes: Axes | None = None,
    save: partition.Policy | None = None,
    offload: int | None = None,
    reshard_after_forward: tuple[str, ...] | None = None,
) -> tuple[Tensor, dict, TokenContext, list[dict]]:
    """(x[B, S, D] behind the last block, the weights of the head, what the blocks were given, for each block the
    statistics of its parts): `read_out` makes logits of it.

    Args:
        params: this rank's shards, which know their layouts; one process's full arrays need not.
        batch: {"tokens": int64 [B, S]; optional "positions": int64 [S] or [B, S], "documents": int64 [B, S]
            (`TokenContext`)}, B split over the data axes, S over cp: in order, unless positions are given.
        decoder: the model.
        axes: of the mesh of the parameters; None: Axes(mesh).
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
    layouts, axes = known(params, axes)
    weights = Weights(params, layouts, decoder, axes, save, offload, reshard_after_forward)
    at = contexts(batch, decoder, axes)
    x_BSD = embed(batch["tokens"], weights["embed"]["embed"], at[0], decoder)
    x_BSD, statistics = blocks(x_BSD, at[1 : 1 + decoder.layers], weights.layers(_blocks_of(decoder)))
    return x_BSD, weights["head"], at[1], statistics


def _blocks_of(decoder: Decoder) -> list[tuple[int, Callable]]:
    """(depth, f(x, weights, at)) of the blocks; equal blocks are one function."""
    run_of = {parts: functools.partial(block, parts=parts) for parts in decoder.blocks}
    return [(depth, run_of[parts]) for depth, parts in enumerate(decoder.blocks)]


def _depths_of(mtp: MTP, decoder: Decoder) -> list[tuple[int, Callable]]:
    """The same of the depths of multi-token prediction: they take the embedding and the stream beside each other."""
    run = functools.partial(predict, block=block, mtp=mtp)
    return [(decoder.layers + n, run) for n in range(mtp.depths)]


def known(params: dict, axes: Axes | None) -> tuple[dict, Axes]:
    """The layouts of the parameters, and the axes of their mesh where these are not given; on one rank what does not
    know its layout is full. Raises ValueError, naming the path, where it is not known on several."""
    stated = next(filter(None, map(tree.layout_of, tree.leaves(params))), None)
    if stated is None and axes is None:
        require_one_rank("model", tree.paths(params)[0], "parameter")
    mesh = stated.mesh if stated is not None else Mesh() if axes is None else axes.mesh
    axes = axes or Axes(mesh)
    if mesh.size > 1 or axes.mesh.size > 1:
        return tree.layouts(params), axes

    def one(leaf: Tensor) -> Layout:
        return tree.layout_of(leaf) or Layout(tuple(leaf.shape), leaf.dtype, mesh)

    return tree.map(one, params), axes


_ENTRIES = frozenset(
    ("tokens", "labels", "mask", "positions", "documents", "padding", "ahead", "ahead_mask", "ahead_tokens")
)


def _require_known(batch: Mapping[str, Tensor]) -> None:
    """ValueError for an entry for each token that the mean of their losses leaves out of account."""
    for name in sorted(map(str, batch.keys() - _ENTRIES)):
        if isinstance(batch[name], Tensor) and batch[name].shape == batch["tokens"].shape:
            raise ValueError(
                f"batch[{name!r}]: got an entry for each token that a decoder's loss does not read, wanted some of "
                f"{', '.join(sorted(_ENTRIES))}; call what weighs tokens 'mask', what is none 'padding' (bool), and "
                "give what is for something else to that alone (`token_losses` takes any)"
            )


class Beside(NamedTuple):
    """What `token_losses` gives beside the losses of the tokens.

    lse: [B, S] fp32, log-sum-exp of the logits, for a z-loss; the log-probability of a token is its logit minus it.
    parts: of the loss, by name: the depths of `Decoder.mtp` and what mixers add. metrics: as those of `loss`.
    """

    lse: Tensor
    parts: dict[str, step.Part]
    metrics: dict


def token_losses(
    params: dict,
    batch: dict,
    decoder: Decoder,
    axes: Axes | None = None,
    save: partition.Policy | None = None,
    offload: int | None = None,
    reshard_after_forward: tuple[str, ...] | None = None,
    *,
    samples: Tensor | None = None,
    key: int = 0,
) -> tuple[Tensor, Beside]:
    """(nll[B, S], what is beside it): minus the log-probability of each label, of which any loss can be made.

    Of this rank's rows and tokens, equal on all ranks of tp, without a mask: 0 of a label below 0 and of padding, NaN
    of an id that the vocabulary does not have. The logits of all tokens are never in memory at once
    (`Decoder.loss_chunks`). `-nll` is the log-probability of a given token: a preference loss is made of two calls.

    The arguments are those of `loss`.
    """
    require_samples(decoder, params, samples)
    for name in ("labels", "mask", "documents", "padding"):
        if name in batch and batch[name].shape != batch["tokens"].shape:
            raise ValueError(
                f"batch[{name!r}]: got shape {tuple(batch[name].shape)}, wanted that of the tokens, "
                f"{tuple(batch['tokens'].shape)}; give one entry for each token"
            )
    layouts, axes = known(params, axes)
    mtp = decoder.mtp
    batch = with_ahead(without_labels_of_padding(batch), mtp, axes)
    labels_BS, ids = batch["labels"], (batch["tokens"],)
    if mtp is not None:
        ids += batch["ahead_tokens"].unbind(-1)
    weights = Weights(params, layouts, decoder, axes, save, offload, reshard_after_forward)
    at, w = contexts(batch, decoder, axes, samples, key), weights["embed"]["embed"]
    x_BSD, *further = (embed(one, w, at[0], decoder, n) for n, one in enumerate(ids))
    x_BSD, statistics = blocks(x_BSD, at[1 : 1 + decoder.layers], weights.layers(_blocks_of(decoder)))
    w, here, of_blocks = weights["head"], at[1], list(decoder.blocks)
    x_BSD = decoder.norm(x_BSD, w["final_norm"], here)
    nll_BS, lse_BS = _token_losses(x_BSD, w, here, labels_BS, decoder)
    parts: dict[str, step.Part] = {}
    if mtp is not None:
        of_blocks += [mtp.block] * mtp.depths
        ahead_BSN = batch["ahead"]
        learned_BSN = learned(ahead_BSN, batch.get("ahead_mask")).to(nll_BS.dtype)
        behind = []
        each = zip(weights.layers(_depths_of(mtp, decoder)), at[1 + decoder.layers :], further, strict=True)
        for layer, one, e_BSD in each:
            x_BSD, found = blocks(torch.cat((e_BSD, x_BSD), -1), [one], [layer], behind=True)
            behind.append(x_BSD)
            statistics += found
        for n, x_n in enumerate(behind):
            nll_n, mask_n = _token_losses(x_n, w, here, ahead_BSN[..., n], decoder)[0], learned_BSN[..., n]
            parts[f"mtp_{n + 1}"] = mtp.weight / mtp.depths * step.mean((nll_n * mask_n).sum(), mask_n.sum())
    tokens = batch["tokens"].numel() if here.padding is None else (~here.padding).sum()
    parts |= losses_of(of_blocks, statistics, tokens)
    return nll_BS, Beside(lse_BS, parts, {**counted(statistics, tokens), **loads(statistics, decoder)})


def loss(
    params: dict,
    batch: dict,
    decoder: Decoder,
    axes: Axes | None = None,
    save: partition.Policy | None = None,
    offload: int | None = None,
    reshard_after_forward: tuple[str, ...] | None = None,
    *,
    samples: Tensor | None = None,
    key: int = 0,
) -> tuple[dict[str, step.Part], dict]:
    """(the parts of the loss by name, metrics), of this rank's rows, as `step.build_train_step` takes them.

    "lm", the mean over the tokens that are learned from, of the cross-entropy; where they are configured "z"; "mtp_1",
    "mtp_2", ..., of each depth of `Decoder.mtp`; and what mixers add, `Mixer.losses`: of experts "balance",
    "sequence_balance", "router_z", means over all tokens, summed over the blocks. Every tp rank has the same totals.
    Metrics: "imbalance", "router_entropy", "overflow", "dropped" of experts, and what `model.post_update` needs.

    A token is learned from where its label is not below 0 and its mask is not 0. Padding ("padding", or documents below
    0) is another thing, no token at all: nothing is learned from it, and no expert takes it or counts it.

    Args:
        params: as of `hidden`.
        batch: {"tokens", "labels": int64 [B, S]; optional "mask" [B, S]: weight of each token; "positions" int64
            [S] or [B, S], "documents" int64 [B, S]: `TokenContext`; "padding" bool [B, S]: what is no token, beside
            where documents are below 0; "ahead", "ahead_mask", "ahead_tokens" [B, S, depths], for `Decoder.mtp`:
            `ahead`, which is called where they are not given; without a mask those below 0 do not count}, B and S split
            over `axes.data`. ValueError for other entries of the tokens' shape: a mask under another name would not
            count.
        decoder: the model.
        axes: of the mesh of the parameters; None: Axes(mesh).
        save: what a block keeps for its backward (`logits`).
        offload: what of it waits in host memory (`logits`).
        reshard_after_forward: which weights are gathered for each use (`logits`).
        samples: int64 [B], the number of each row among all rows of the run, which
            build_train_step(with_sample_ids=True) gives: then dropout and router noise of the model are applied, the
            same on every mesh. None: they are not, as in evaluation; a gradient of a model that has some is an error
            (`model.deterministic`).
        key: of these random numbers, such as the run's seed.
    """
    _require_known(batch)
    how = (axes, save, offload, reshard_after_forward)
    nll_BS, beside = token_losses(params, batch, decoder, *how, samples=samples, key=key)
    mask_BS = batch.get("mask")
    mask_BS = mask_BS.to(nll_BS.dtype) if mask_BS is not None and mask_BS.is_floating_point() else mask_BS
    learned_BS = learned(without_labels_of_padding(batch)["labels"], mask_BS)
    count, weight_BS = learned_BS.sum(), learned_BS.to(nll_BS.dtype)
    parts = {"lm": step.mean((nll_BS * weight_BS).sum(), count)}
    if decoder.z_loss:
        parts["z"] = decoder.z_loss * step.mean((beside.lse.square() * weight_BS).sum(), count)
    return {**parts, **beside.parts}, beside.metrics
