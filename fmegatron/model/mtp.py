"""Multi-token prediction: blocks behind the trunk that predict tokens further ahead, with its embedding and head.

Legend: B batch, S sequence, D width, N depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import Axes
from fmegatron.model.arrays import TokenContext
from fmegatron.model.statistics import learned, without_labels_of_padding

if TYPE_CHECKING:
    from fmegatron.model.decoder import MTP


def predict(both_BSX: Tensor, w: dict, at: TokenContext, *, block: Callable, mtp: MTP) -> Tensor | tuple[Tensor, dict]:
    """One depth: `norm(block(proj [norm(e); norm(h)]))`: `both[B, S, 2D]@R(tp) -> h[B, S, D]@R(tp)`, S_tp at both ends
    with sequence parallelism. Where the block gives statistics (h, {part: statistics}).

    Source: DeepSeek V3, arXiv 2412.19437, equations 21 to 23; the embedding is first in `proj`, and h has been through
    the norm of its head, as in its released weights.

    Args:
        both_BSX: beside each other the embeddings e of the next tokens, and h of the depth before.
        w: of this depth, gathered over the data axes.
        at: of the tokens.
        block: `model.block`.
        mtp: what it is.
    """
    e_BSD, h_BSD = both_BSX.chunk(2, -1)
    proj = nn.entered(w["proj"], at.axes["tp"]) if at.splits(both_BSX) else w["proj"]  # else all ranks do the same work
    normed = (mtp.norm(e_BSD, w["embed_norm"], at), mtp.norm(h_BSD, w["hidden_norm"], at))
    found = block(nn.matmul(torch.cat(normed, -1), proj), w, at, parts=mtp.block)
    x_BSD, statistics = found if isinstance(found, tuple) else (found, {})
    x_BSD = mtp.norm(x_BSD, w["out_norm"], at)
    return (x_BSD, statistics) if statistics else x_BSD


def ahead(batch: Mapping[str, Tensor], depths: int) -> dict[str, Tensor]:
    """The batch with "ahead" [B, S, N] int64, for depth n the label n tokens after the label, "ahead_mask" [B, S, N],
    the weight of each: 0 where the row, or the token's document, has ended, else that of the label there ("mask", or 1;
    of a label below 0, and of padding: 0), and "ahead_tokens" int64 [B, S, N], what depth n reads: the token n behind,
    which is the label of n - 1 further, and where nothing is learned from that (a prompt), the token of the row.

    Of whole rows: before they are dealt over cp. A loader that knows the tokens behind a row may give all itself.
    """
    batch = without_labels_of_padding(batch)
    labels_BS, documents_BS = batch["labels"], batch.get("documents")
    mask_BS = learned(labels_BS, batch.get("mask"))
    mask_BS = mask_BS if mask_BS.is_floating_point() else mask_BS.to(torch.float32)
    found, masks = [], []
    for n in range(1, depths + 1):
        found.append(F.pad(labels_BS, (0, n), value=-100)[:, n:])
        weight_BS = F.pad(mask_BS, (0, n))[:, n:]
        if documents_BS is not None:
            weight_BS = weight_BS * (F.pad(documents_BS, (0, n))[:, n:] == documents_BS)
        masks.append(weight_BS)
    ahead_BSN = torch.stack(found, -1)
    tokens_BSN = _tokens_behind(batch["tokens"], labels_BS, ahead_BSN)
    return {**batch, "ahead": ahead_BSN, "ahead_mask": torch.stack(masks, -1), "ahead_tokens": tokens_BSN}


def _tokens_behind(tokens_BS: Tensor, labels_BS: Tensor, ahead_BSN: Tensor) -> Tensor:
    """ "ahead_tokens" of whole rows. Behind the last token of a row of which no label is known, 0: no token that is
    learned from sees it."""
    known = (labels_BS, *ahead_BSN.unbind(-1)[:-1])
    rows = (F.pad(tokens_BS, (0, n))[:, n:] for n in range(1, len(known) + 1))
    return torch.stack([torch.where(ids >= 0, ids, row) for ids, row in zip(known, rows, strict=True)], -1)


def with_ahead(batch: dict, mtp: MTP | None, axes: Axes) -> dict:
    """The batch with what its multi-token prediction needs. ValueError where it cannot be made of this rank's part."""
    if mtp is None:
        return batch
    missing = [name for name in ("ahead", "ahead_tokens") if name not in batch]
    if missing and axes.sequence.size > 1:
        raise ValueError(
            f"batch: got no {missing[0]!r} on the mesh {axes.mesh}, which splits sequences, wanted the labels and "
            f"tokens that follow each label; give model.ahead(batch, {mtp.depths}) of whole rows before they are dealt"
        )
    if "ahead" not in batch:
        return ahead(batch, mtp.depths)
    wanted = (*batch["tokens"].shape, mtp.depths)
    for name in ("ahead", "ahead_mask", "ahead_tokens"):
        if name in batch and batch[name].shape != wanted:
            raise ValueError(
                f"batch[{name!r}]: got shape {tuple(batch[name].shape)}, wanted {wanted}, an entry for each token and "
                f"depth; give model.ahead(batch, {mtp.depths})"
            )
    if missing:
        batch = {**batch, "ahead_tokens": _tokens_behind(batch["tokens"], batch["labels"], batch["ahead"])}
    return batch
