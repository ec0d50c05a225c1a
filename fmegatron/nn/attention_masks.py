"""Who sees whom in attention, made of data: positions, documents, a window; and caps of scores and logits.

Legend: B batch, S queries, T keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Causal", "Sight", "over_heads", "sight", "soft_cap", "visible"]


class Causal(NamedTuple):
    """What causal attention over a sequence that is split over ranks is told of this rank's tokens: data, as they are.

    positions: int64 [B, S_cp] or [S_cp], of each token in its document (or in the sequence).
    documents: int64 [B, S_cp], the number of its document; None: a row is one.
    window: how many positions a query sees, itself included; None: all before it.
    zigzag: whether the ranks have the parts of the sequence in the order of `zigzag`, for an equal share of the work.
    """

    positions: Tensor
    documents: Tensor | None = None
    window: int | None = None
    zigzag: bool = False


class Sight(NamedTuple):
    """What a mask is made of, where kernels make it: a query sees keys at its own position or before, of its document.

    at_queries: int64 [1 or 2, 1 or B, S], positions, then documents if there are any. at_keys: the same [.., T].
    window: of positions; None: all before.
    """

    at_queries: Tensor
    at_keys: Tensor
    window: int | None = None


def sight(queries: Causal, keys: Causal | None = None) -> Sight:
    """What queries of these tokens see of these keys, of None the same tokens, within the window of the queries."""
    at = _stacked(queries)
    return Sight(at, at if keys is None else _stacked(keys), queries.window)


def _stacked(of: Causal) -> Tensor:
    positions = of.positions if of.positions.dim() == 2 else of.positions[None]
    if of.documents is None:
        return positions[None]
    # Not `stack`, which traces as a view: of as many rows as kinds, a check could not tell which of both is sharded.
    return torch.cat((positions.expand_as(of.documents)[None], of.documents[None]))


def visible(
    positions_S: Tensor,
    positions_T: Tensor,
    window: int | None = None,
    documents_S: Tensor | None = None,
    documents_T: Tensor | None = None,
) -> Tensor:
    """The mask of causal attention, made of data alone: bool [S, T], or [B, S, T] where anything is given per row.

    A query sees keys at its own position or before, of its own document, with a window only the last `window` of them,
    its own position included.

    Args:
        positions_S: int64 [S] or [B, S], of the queries.
        positions_T: of the keys.
        window: number of positions; None: all.
        documents_S: int64 [B, S], of the queries; None: all tokens are of one document.
        documents_T: of the keys.
    """
    gap_ST = positions_S[..., :, None] - positions_T[..., None, :]
    mask_ST = gap_ST >= 0
    if window is not None:
        mask_ST = mask_ST & (gap_ST < window)
    if documents_S is not None and documents_T is not None:
        mask_ST = mask_ST & (documents_S[..., :, None] == documents_T[..., None, :])
    return mask_ST


def over_heads(mask: Tensor | None) -> Tensor | None:
    """A mask [B, S, T] as [B, 1, S, T], so that it holds for every head; one of other dims as it is."""
    return mask if mask is None or mask.dim() != 3 else mask[:, None]


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): nearly x where it is small, never beyond the cap. Any shape, no communication."""
    return cap * torch.tanh(x / cap)
