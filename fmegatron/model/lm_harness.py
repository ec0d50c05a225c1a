"""A model for lm-evaluation-harness: its tasks over our scores and texts (package `lm_eval`, extra `eval`).

import lm_eval
decoder, params, _, tokenizer = model.opened("runs/mine")
reader = model.inference(params, decoder, Axes(Mesh()))
lm_eval.simple_evaluate(model=model.harness(reader, tokenizer), tasks=["hellaswag"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmegatron.model.sample import ENDED, Inference, generate
from fmegatron.model.scoring import perplexity, score
from fmegatron.model.text import Tokenizer, pieces


def harness(
    of: Inference, tokenizer: Tokenizer, *, prefix: int | None = None, batch_size: int = 8, count: int = 256
) -> object:
    """An `lm_eval.api.model.LM` of a model: `loglikelihood`, `loglikelihood_rolling` and `generate_until`.

    Texts that are too long lose their beginning, as the harness has it. All ranks of a mesh run it together.

    Args:
        of: the model.
        tokenizer: of it.
        prefix: id before a text without a context; None: the tokenizer's bos, else its eos, else 0.
        batch_size: texts that are read at once.
        count: the most new tokens, where a task does not state it.

    Raises ImportError without the package.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise ImportError("harness: the package lm_eval is not there; pip install 'fmegatron[eval]'") from error
    found = [prefix, *(getattr(tokenizer, name, None) for name in ("bos", "eos")), 0]
    answer = _Answers(of, tokenizer, next(id for id in found if id is not None), batch_size, count)

    class Adapter(LM):
        """Each request's arguments in, what the task counts out."""

        def loglikelihood(self, requests, disable_tqdm: bool = False):
            return answer.loglikelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
            return [answer.rolling(*request.args) for request in requests]

        def generate_until(self, requests, disable_tqdm: bool = False):
            return answer.texts([request.args for request in requests])

    return Adapter()


class _Answers:
    """What the harness asks for, of plain values."""

    def __init__(self, of: Inference, tokenizer: Tokenizer, prefix: int, batch_size: int, count: int):
        self.of, self.tokenizer, self.prefix, self.batch_size, self.count = of, tokenizer, prefix, batch_size, count
        eos = getattr(tokenizer, "eos", None)
        self.ends = frozenset() if eos is None else frozenset({int(eos)})

    def ids(self, text: str) -> list[int]:
        return [int(id) for id in self.tokenizer.encode(text)]

    def pair(self, context: str, behind: str) -> tuple[list[int], list[int]]:
        """(ids of the context, ids of what follows): both are tokens of one text, cut where the context ends without
        its last spaces, which belong to the first token behind."""
        context, spaces = context.rstrip(), context[len(context.rstrip()) :]
        before = self.ids(context) if context else []
        both = self.ids(context + spaces + behind)
        before, rest = both[: len(before)] or [self.prefix], both[len(before) :]
        room = self.of.decoder.max_seq + 1
        return before[-max(1, room - len(rest)) :], rest[-(room - 1) :]

    def loglikelihoods(self, asked: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        if not asked:
            return []
        before, behind = zip(*(self.pair(*one) for one in asked), strict=True)
        return [(one.total, one.greedy) for one in score(self.of, before, behind, batch_size=self.batch_size)]

    def rolling(self, text: str) -> float:
        """log p of a text behind the prefix, each token predicted once."""
        ids = [self.prefix, *self.ids(text)]
        if len(ids) == 1:
            return 0.0
        found = perplexity(self.of, ids, batch_size=self.batch_size)
        return -found.loss * found.tokens

    def texts(self, asked: Sequence[tuple[str, dict]]) -> list[str]:
        """Continuations of contexts; those with one way to be generated go together."""
        out: list[str] = [""] * len(asked)
        groups: dict[tuple, list[int]] = {}
        for i, (_, how) in enumerate(asked):
            groups.setdefault(self._how(how), []).append(i)
        for (stops, count, choice), members in groups.items():
            for at in range(0, len(members), self.batch_size):
                some = members[at : at + self.batch_size]
                kept = self.of.decoder.max_seq - count
                prompts = [(self.ids(asked[i][0]) or [self.prefix])[-kept:] for i in some]
                options: dict[str, Any] = {**dict(choice), "stop_ids": self.ends, "rows": some}
                stopping = {"stop_texts": stops, "tokenizer": self.tokenizer}
                found = generate(self.of, prompts, count, **options, **stopping)
                for i, row in zip(some, found.tolist(), strict=True):
                    new = (id for id in row if id != ENDED and id not in self.ends)
                    out[i] = "".join(pieces(new, self.tokenizer, stops))
        return out

    def _how(self, given: dict) -> tuple[tuple[str, ...], int, tuple[tuple[str, Any], ...]]:
        """(stop texts, most new tokens, choice) of the arguments of a task."""
        until = given.get("until") or ()
        stops = (until,) if isinstance(until, str) else tuple(until)
        count = given.get("max_gen_toks") or given.get("max_new_tokens") or self.count
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        choice = {name: given[name] for name in names if given.get(name) is not None}
        if choice.get("top_k") == 0:  # none, as transformers has it
            del choice["top_k"]
        if not given.get("do_sample", choice.get("temperature", 0) > 0):
            choice = {"temperature": 0.0}
        return (
            tuple(stop for stop in stops if stop),
            min(int(count), self.of.decoder.max_seq - 1),
            tuple(choice.items()),
        )
