"""What a block of a decoder keeps for its backward, and works with, as formulas over widths: numbers per token.

Legend: T tokens of a microbatch on a rank; D width of the model; q, k widths of queries and of keys on this rank; h its
heads; F its hidden width. Source: Korthikanti et al. 2022 (arXiv 2205.05198, section 4), with grouped heads, gated MLPs
and the three policies of `step.layers` as Inductor carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmegatron import model
from fmegatron.model.decoder import Block

__all__ = ["BlockBytes", "block_bytes"]


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block on a rank.

    saved: kept from forward to backward, its input and weights apart. forward, backward: the most that a call takes
    above its arguments, results included. result: of the forward, T x D. unknown: what no formula counts, in words.
    """

    saved: int
    forward: int
    backward: int
    result: int
    unknown: tuple[str, ...] = ()


def block_bytes(
    parts: Block, decoder: model.Decoder, rows: int, length: int, tp: int, save: Any, grads: int
) -> BlockBytes:
    """Formulas of one block.

    Args:
        parts: of the block.
        decoder: whose widths and dtypes.
        rows: of a microbatch on this rank.
        length: positions of a sequence on this rank.
        tp: ranks that share a block.
        save: policy, as `step.layers` has it; None: as autograd keeps.
        grads: bytes of the block's whole gradients, as its backward returns them.
    """
    tokens, number = rows * length, decoder.compute_dtype.itemsize
    wide = decoder.sequence_parallel and tp > 1
    D = decoder.dim / (tp if wide else 1)
    found = [part.mixer.widths(D, tp, number) for part in parts]
    unknown = tuple(f"what {part.name!r} keeps" for part, widths in zip(parts, found, strict=True) if widths is None)
    known = [widths for widths in found if widths is not None]
    unknown += tuple(what for widths in known for what in widths.uncounted)
    mincut, every = sum(w.mincut for w in known), sum(w.all for w in known)
    if save == "inputs":
        saved = 0.0
    elif save == "mincut":
        saved = mincut
    elif isinstance(save, (int, float)) and not isinstance(save, bool):
        saved = mincut * float(save)
    else:  # a function picks among all; without a policy autograd keeps all
        saved = every
    share = min(saved / mincut, 1.0) if mincut else 1.0
    forward = saved + max(((1 - share) * w.mincut + w.forward for w in known), default=0.0)
    again = (1 - share) * (mincut + len(known) * D)  # what is made again, and is all there where the backward begins
    works = [w.backward + (w.remade if saved <= mincut else 0.0) for w in known]
    first = again + max((w.remade + w.first for w in known), default=0.0)
    per_token, result = tokens * number, round(tokens * D * number)
    # In which order Inductor makes the gradients of weights was read off its schedules: part by part, or, where fewer
    # heads have keys than queries, all of them at the end, and what they are made of waits for them.
    if not any(widths.late for widths in known):
        backward = max(round(max(works, default=0.0) * per_token) + grads, round(first * per_token))
    else:
        backward = max(round(max(sum(works), first) * per_token), result + grads)
    return BlockBytes(round(saved * per_token), round(forward * per_token), backward, result, unknown)
