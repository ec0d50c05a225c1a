"""How probable texts are: log-likelihoods of given continuations, and perplexity of long texts.

Texts are scored in batches of one of a few lengths, so a few compiled forms serve all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fmegatron.model.sample import Inference
from fmegatron.model.text import texts_of


class Score(NamedTuple):
    """Of a continuation. log_likelihoods: of each of its tokens, natural logarithms, fp64 [N]. greedy: whether each is
    the best token behind those before it."""

    log_likelihoods: Tensor
    greedy: bool

    @property
    def total(self) -> float:
        """log p(continuation | prompt)."""
        return float(self.log_likelihoods.sum())


class Perplexity(NamedTuple):
    """Of a text. loss: mean of -log p over its tokens, in nats. tokens: how many were predicted."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return math.exp(self.loss)

    def bits_per_byte(self, nbytes: int) -> float:
        """Of a text of so many bytes: a measure that does not depend on the tokenizer."""
        return self.loss * self.tokens / math.log(2) / nbytes


def score(
    of: Inference,
    prompts: Sequence[Sequence[int] | Tensor] | Tensor,
    continuations: Sequence[Sequence[int] | Tensor] | Tensor,
    *,
    batch_size: int = 8,
) -> list[Score]:
    """log p of the tokens of each continuation behind its prompt; all ranks of a mesh call it and get the same.

    Args:
        of: the model.
        prompts: of each row 1 token or more; the same on all ranks.
        continuations: of each row; may be empty.
        batch_size: texts that are read at once.

    Raises ValueError for other numbers of prompts and continuations, a prompt of no token, and for texts that do not
    fit into decoder.max_seq.
    """
    before, behind = (texts_of(rows, of.decoder.vocab_size) for rows in (prompts, continuations))
    if len(before) != len(behind):
        raise ValueError(f"continuations: got {len(behind)} rows, wanted one for each of the {len(before)} prompts")
    rows = [torch.cat(pair) for pair in zip(before, behind, strict=True)]
    for i, (prompt, row) in enumerate(zip(before, rows, strict=True)):
        if not len(prompt) or len(row) - 1 > of.decoder.max_seq:
            raise ValueError(
                f"prompts[{i}]: got {len(prompt)} tokens, and {len(row)} with the continuation, wanted 1 or more, and "
                f"together at most Decoder.max_seq + 1 = {of.decoder.max_seq + 1}; cut the prompt (prompt[-n:])"
            )
    out: list[Score | None] = [None] * len(rows)
    for i, nll, best in _losses(of, rows, batch_size):
        first = len(before[i]) - 1
        out[i] = Score(-nll[first:], bool(best[first:].all()))
    return [one for one in out if one is not None]


def perplexity(
    of: Inference,
    text: Sequence[int] | Tensor,
    *,
    stride: int | None = None,
    batch_size: int = 8,
) -> Perplexity:
    """Perplexity of a text of any length, each of its tokens but the first predicted once.

    Windows of decoder.max_seq tokens begin every `stride` tokens, and of each the tokens count that no window before
    has counted, so every one sees at least max_seq - stride tokens before it.

    Args:
        of: the model.
        text: ids, 2 or more.
        stride: 1 to max_seq; None: max_seq, each token is read once.
        batch_size: windows that are read at once.

    Raises ValueError for a text or a stride that is too short or too long.
    """
    [ids], most = texts_of([text], of.decoder.vocab_size), of.decoder.max_seq
    stride = most if stride is None else stride
    if len(ids) < 2 or not 1 <= stride <= most:
        raise ValueError(
            f"perplexity: got {len(ids)} tokens and stride={stride}, wanted 2 tokens or more and a stride of 1 to "
            f"Decoder.max_seq={most}"
        )
    starts = [0, *range(stride, max(stride, len(ids) - 1 - most + stride), stride)]
    ends = [min(start + most, len(ids) - 1) for start in starts]
    total, counted = 0.0, 0
    for i, nll, _ in _losses(of, [ids[a : b + 1] for a, b in zip(starts, ends, strict=True)], batch_size):
        new = ends[i] - (ends[i - 1] if i else 0)
        total, counted = total + float(nll[len(nll) - new :].sum()), counted + new
    return Perplexity(total / counted, counted)


def _losses(of: Inference, rows: list[Tensor], batch_size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(number of a row, -log p of its tokens but the first, fp64, whether each is the best), the longest rows first."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    device = of.weights["embed"]["table"].device
    for at in range(0, len(order), batch_size):
        numbers = order[at : at + batch_size]
        length = min(n for n in of.losses if n >= len(rows[numbers[0]]) - 1)
        both = torch.zeros(batch_size, length + 1, dtype=torch.int64)
        for row, i in zip(both, numbers, strict=False):
            row[: len(rows[i])] = rows[i]
        both = both.to(device)
        with torch.no_grad():
            found = of.losses[length](of.weights, both[:, :-1].contiguous(), both[:, 1:].contiguous())
        nll, best = found[0].double().cpu(), found[1].cpu()
        for row, i in enumerate(numbers):
            yield i, nll[row, : len(rows[i]) - 1], best[row, : len(rows[i]) - 1]
