"""Chats for fine-tuning: messages as tokens and a mask of the loss, by the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fmegatron.data.sources import Items, Row
from fmegatron.data.template import ChatTemplate, Messages

_LOOKED_AT = 16  # items that show whether a template writes past turns in another way


def template_of(tokenizer: Any, template: ChatTemplate | None = None) -> ChatTemplate:
    """The chat template: the one given, else the tokenizer's own, of our tokenizers (`chat`) or of `transformers`.

    ValueError for a tokenizer that has none.
    """
    found = template or getattr(tokenizer, "chat", None)
    if found is None and getattr(tokenizer, "chat_template", None) is not None:
        found = ChatTemplate(tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map))
    if found is None:
        raise ValueError(
            "chat: got a tokenizer without a chat template, wanted one; load the folder that has chat_template.jinja "
            "or tokenizer_config.json, or give template=data.load_template(path)"
        )
    return found


def located(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 [n], characters int64 [n, 2] of the text that each is of: start, stop), names of special tokens as
    these tokens.

    tokenizer: one of ours, or a fast one of `transformers`. ValueError for one that does not know.
    """
    if hasattr(tokenizer, "located"):
        return tokenizer.located(text)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"chat: got {type(tokenizer).__name__}, which cannot tell the characters of a token, wanted a tokenizer "
            "with a tokenizer.json; open it with data.load_tokenizer(folder)"
        )
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return np.asarray(found["input_ids"], np.int64), np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)


def chat_row(
    tokenizer: Any,
    messages: Messages,
    roles: Sequence[str] = ("assistant",),
    template: ChatTemplate | None = None,
    **more: object,
) -> Row:
    """{"tokens", "labels" int64 [n - 1], "mask" bool [n - 1]} of a chat of n tokens: True where the label is of a
    message of one of these roles.

    An answer is what the template's {% generation %} marks enclose, where it has them and `roles` are ("assistant",).
    Else it is the text by which the template's output grows with the message, with what the template puts behind it;
    the header of an answer (what it writes before one, `add_generation_prompt`) is no part of it. A token belongs to
    an answer if one of its characters does.

    Args:
        tokenizer: of `fmegatron.data` (`load_tokenizer`), or a fast one of `transformers`.
        messages: [{"role": ..., "content": ...}, ...].
        roles: whose messages are learned.
        template: in the place of the tokenizer's own.
        more: values that the template knows, such as tools=[...].

    Raises ValueError for a tokenizer without a template, and for a template without marks whose output for the first
    messages is no beginning of its output for all.
    """
    by = template_of(tokenizer, template)
    text, spans = by.render(messages, False, **more), None
    if tuple(roles) == ("assistant",):
        spans = by.marks(messages, **more)
    if spans is None:
        spans = _grown(by, text, messages, roles, more)
    return _learned(tokenizer, text, spans)


def turn_row(
    tokenizer: Any, messages: Messages, turn: int, template: ChatTemplate | None = None, **more: object
) -> Row:
    """`chat_row` of the messages up to number `turn`, of which that one alone is learned: for a template that writes
    what was before in another way (thoughts of past turns are cut). ValueError as there."""
    by = template_of(tokenizer, template)
    text = by.render(messages[: turn + 1], False, **more)
    return _learned(tokenizer, text, [_growth(by, text, messages, turn, more)])


def _learned(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> Row:
    """The row of a text of which these characters (start, stop) are learned."""
    ids, characters = located(tokenizer, text)
    learned = np.zeros(len(text) + 2, dtype=np.int64)
    for start, stop in spans:
        learned[start + 1 : stop + 1] = 1
    before = learned.cumsum()  # of each place in the text, how many characters in front of it are learned
    mask = before[np.maximum(characters[:, 1], characters[:, 0] + 1)] > before[characters[:, 0]]
    return {"tokens": ids[:-1], "labels": ids[1:], "mask": mask[1:]}


def _grown(
    by: ChatTemplate, text: str, messages: Messages, roles: Sequence[str], more: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """(start, stop) of the characters by which each message of these roles makes the text longer."""
    return [_growth(by, text, messages, n, more) for n, one in enumerate(messages) if one.get("role") in roles]


def _growth(by: ChatTemplate, text: str, messages: Messages, n: int, more: Mapping[str, Any]) -> tuple[int, int]:
    """(start, stop) of the characters by which message `n` makes a text longer."""
    before = by.render(messages[:n], messages[n]["role"] == "assistant", **more) if n else ""
    after = by.render(messages[: n + 1], **more)
    if not text.startswith(after) or not after.startswith(before):
        raise _OtherBeforeError(
            f"chat: message {n}: got a template without {{% generation %}} marks whose text of the first "
            f"{n + (not text.startswith(after))} messages is no beginning of its text of all of them, so that "
            "nothing tells what belongs to a message, wanted one that only adds; make a row of each turn "
            "(data.Chats(rows='turn')), mark the answers in the template, or use one without a look at other messages"
        )
    return len(before), len(after)


class _OtherBeforeError(ValueError):
    """A template writes messages in another way when others follow."""


@dataclass(frozen=True)
class Chats:
    """A source of chats as one of rows, for `SourceBatches`: item i is `chat_row` of source[i], cut after seq_len.

    source: items are lists of messages, or mappings with them in `key`, and perhaps "tools". roles: whose messages are
    learned. template: in the place of the tokenizer's own. without_answer: what becomes of items of which nothing is
    learned (no message of these roles, or it begins behind seq_len), `unanswered`: "keep" them; "drop" them, for which
    all items are read once; or "refuse" one with ValueError when it is read. rows: "chat", a row of each item; "turn",
    a row of each message that is learned, with what is before it, for templates that write past turns in another way
    (the thoughts of Qwen3 are cut), for which all items are read once; None: what the template asks for, which some
    items show.
    """

    source: Items
    tokenizer: Any
    seq_len: int
    key: str = "messages"
    roles: tuple[str, ...] = ("assistant",)
    template: ChatTemplate | None = None
    without_answer: Literal["keep", "drop", "refuse"] = "keep"
    rows: Literal["chat", "turn"] | None = None

    def __post_init__(self) -> None:
        if self.rows not in (None, "chat", "turn"):
            raise ValueError(f"Chats.rows: got {self.rows!r}, wanted 'chat', 'turn' or None")
        if self.without_answer not in ("keep", "drop", "refuse"):
            raise ValueError(f"Chats.without_answer: got {self.without_answer!r}, wanted 'keep', 'drop' or 'refuse'")

    @cached_property
    def unanswered(self) -> tuple[int, ...]:
        """Numbers of the items of the source of which nothing is learned. The first time, reads all of them."""
        answered = {item for item, turn in self._places if self._row(item, turn)["mask"].any()}
        return tuple(i for i in range(len(self.source)) if i not in answered)

    @cached_property
    def _by_turn(self) -> bool:
        if self.rows is not None:
            return self.rows == "turn"
        size = len(self.source)
        for i in sorted({k * (size - 1) // (_LOOKED_AT - 1) for k in range(_LOOKED_AT)} if size else ()):
            if len(self._turns(i)) > 1:
                try:
                    self._row(i, None)
                except _OtherBeforeError:
                    return True
        return False

    @cached_property
    def _places(self) -> Sequence[tuple[int, int | None]]:
        """(item, turn; None: all of it) of each row, those that may be dropped included."""
        if not self._by_turn:
            return _Items(len(self.source))
        return [(i, turn) for i in range(len(self.source)) for turn in self._turns(i) or [None]]

    @cached_property
    def _kept(self) -> Sequence[tuple[int, int | None]]:
        if self.without_answer != "drop":
            return self._places
        return [place for place in self._places if self._row(*place)["mask"].any()]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Row:
        item, turn = self._kept[index]
        row = self._row(item, turn)
        if self.without_answer == "refuse" and not row["mask"].any():
            raise ValueError(
                f"Chats: item {item}: got a chat in whose first {self.seq_len} tokens nothing is learned, wanted a "
                f"message of {' or '.join(self.roles)} there; raise seq_len, or leave such chats out: "
                'without_answer="drop"'
            )
        return row

    def _messages(self, item: Any) -> Messages:
        return item[self.key] if isinstance(item, Mapping) else item

    def _turns(self, index: int) -> list[int]:
        """The messages of an item that are learned."""
        return [n for n, one in enumerate(self._messages(self.source[index])) if one.get("role") in self.roles]

    def _row(self, index: int, turn: int | None) -> Row:
        item = self.source[index]
        more = {"tools": item["tools"]} if isinstance(item, Mapping) and item.get("tools") else {}
        of = self.tokenizer, self._messages(item)
        if turn is None:
            row = chat_row(*of, self.roles, self.template, **more)
        else:
            row = turn_row(*of, turn, self.template, **more)
        return {name: x[: self.seq_len] for name, x in row.items()}


class _Items(Sequence):
    """(0, None), (1, None), ..., of so many items."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        return range(self.size)[index], None
