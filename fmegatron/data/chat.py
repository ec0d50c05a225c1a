"""Chats for fine-tuning: messages as tokens and a mask of the loss, by the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fmegatron.data.sources import Row, Source

Messages = Sequence[Mapping[str, Any]]


class Templated(Protocol):
    """A tokenizer with a chat template: `transformers.PreTrainedTokenizerBase`."""

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...


def chat_row(tokenizer: Templated, messages: Messages, roles: Sequence[str] = ("assistant",)) -> Row:
    """{"tokens", "labels" int64 [n - 1], "mask" bool [n - 1]} of a chat of n tokens: True where the label is of a
    message of one of these roles, and of what the template puts behind it.

    The tokens of a message are those by which the template's output grows with it; the header of an answer (what the
    template writes before one, `add_generation_prompt`) is none of them. ValueError for a template whose output for the
    first messages is no beginning of its output for all, as then no token belongs to a message.
    """
    ids = _ids(tokenizer, messages)
    of_answers = np.zeros(len(ids), dtype=bool)
    for n, message in enumerate(messages):
        if message.get("role") not in roles:
            continue
        before = _ids(tokenizer, messages[:n], message["role"] == "assistant") if n else ids[:0]
        after = _ids(tokenizer, messages[: n + 1])
        if not np.array_equal(ids[: len(after)], after) or not np.array_equal(ids[: len(before)], before):
            raise ValueError(
                f"chat: message {n}: got a template whose text of the first {n + 1} messages is no beginning of its "
                "text of all of them, wanted one that only adds; use a template without a look at later messages"
            )
        of_answers[len(before) : len(after)] = True
    return {"tokens": ids[:-1], "labels": ids[1:], "mask": of_answers[1:]}


def _ids(tokenizer: Templated, messages: Messages, prompt: bool = False) -> np.ndarray:
    found = tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=prompt)
    found = found["input_ids"] if isinstance(found, Mapping) or hasattr(found, "input_ids") else found
    return np.asarray(found, dtype=np.int64).reshape(-1)


@dataclass(frozen=True)
class Chats:
    """A source of chats as one of rows, for `SourceBatches`: item i is `chat_row` of source[i], cut after seq_len.

    source: items are lists of messages, or mappings with them in `key`. roles: whose messages are learned.
    """

    source: Source
    tokenizer: Templated
    seq_len: int
    key: str = "messages"
    roles: tuple[str, ...] = ("assistant",)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Row:
        item = self.source[index]
        messages = item[self.key] if isinstance(item, Mapping) else item
        return {name: x[: self.seq_len] for name, x in chat_row(self.tokenizer, messages, self.roles).items()}
