"""ChatTemplate: messages as text, by a Jinja template of Hugging Face, rendered in jinja2's sandbox.

Source of the format: transformers, docs "Chat templates": chat_template.jinja, or "chat_template" in
tokenizer_config.json; what an answer is may be marked {% generation %} ... {% endgeneration %}.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fmegatron.files import disk

Messages = Sequence[Mapping[str, Any]]
_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which no text has: around what is marked


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. text: Jinja. special: what it knows beside the messages, such as {"bos_token": "<s>"}. date: of
    today, for a template that writes it (`strftime_now`), such as "2026-11-27" or "2026-11-27 13:00"; rows of one date
    are the same on all ranks, and tomorrow.

    The template comes from elsewhere: it sees plain JSON values only, in a sandbox that lets it call nothing of ours.
    Rendering raises ValueError for a template that is wrong, or refuses the messages; ImportError without jinja2.
    """

    text: str
    special: Mapping[str, str] = field(default_factory=dict)
    date: str | None = None

    def __post_init__(self) -> None:
        if self.date is not None:
            _moment(self.date)

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self):  # what is compiled does not travel
        return ChatTemplate, (self.text, dict(self.special), self.date)

    @functools.cached_property
    def _compiled(self) -> tuple[Any, Any]:
        """Without and with characters where marks begin and end."""
        return _compiled(self.text, "", "", self.date), _compiled(self.text, _BEGIN, _END, self.date)

    def render(self, messages: Messages, prompt: bool = False, **more: object) -> str:
        """The text of messages. prompt: with the header of an answer behind them (`add_generation_prompt`). more: JSON
        values that the template knows, such as tools=[...]."""
        return self._render(0, messages, prompt, more)

    def marks(self, messages: Messages, **more: object) -> list[tuple[int, int]] | None:
        """(start, stop) of the characters of `render(messages)` that {% generation %} marks; None for a template
        without marks.

        Raises ValueError where marks change the text (a template that trims what is marked).
        """
        if "endgeneration" not in self.text:
            return None
        marked, found, at, begin = self._render(1, messages, False, more), [], 0, 0
        for character in marked:
            if character == _BEGIN:
                begin = at
            elif character == _END:
                found.append((begin, at))
            else:
                at += 1
        if marked.replace(_BEGIN, "").replace(_END, "") != self._render(0, messages, False, more):
            raise ValueError(
                "chat template: got one whose text changes with its {% generation %} marks, wanted marks around what "
                "is written; take the filters out of the template that work on marked text"
            )
        return found

    def _render(self, which: int, messages: Messages, prompt: bool, more: Mapping[str, Any]) -> str:
        known = {"tools": None, "documents": None, **self.special, **more}
        given = [_without_null(one) for one in messages]
        known = _plain({**known, "messages": given, "add_generation_prompt": prompt})
        try:
            return self._compiled[which].render(known)
        except (ImportError, _NoDateError):
            raise
        except Exception as error:  # what a template does with messages may fail in every way
            raise ValueError(
                f"chat template: got {type(error).__name__}: {error}, wanted a text of the {len(messages)} messages; "
                "see what the template asks of their roles and contents"
            ) from None


def _without_null(message: Any) -> Any:
    """A message without its keys of null (OpenAI's `"content": null` beside calls of tools), which templates write as
    the text None; a key that is not there they know. As transformers 5.24 does."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None}


def load_template(path: str | os.PathLike, name: str = "default") -> ChatTemplate | None:
    """The template of a folder of Hugging Face, or of a .jinja file; None where there is none.

    chat_template.jinja, else "chat_template" of tokenizer_config.json or chat_template.json; texts of special tokens
    are those of the tokenizer_config.json. name: of one of several that a configuration has.
    Raises ValueError for a damaged configuration, and for a name that it does not have.
    """
    path = Path(path)
    folder = path if disk.listed(path) is not None else path.parent
    content = disk.content_of(path) if folder is not path else disk.content_of(folder / "chat_template.jinja")
    configurations = [_object(folder / file) for file in ("tokenizer_config.json", "chat_template.json")]
    text = None if content is None else content.decode("utf-8")
    for known in configurations:
        text = _named(known.get("chat_template"), name, folder) if text is None else text
    if text is None:
        return None
    special = {key: x.get("content") if isinstance(x, dict) else x for key, x in configurations[0].items()
               if key.endswith("_token")}  # fmt: skip
    return ChatTemplate(text, {key: x for key, x in special.items() if isinstance(x, str)})


def _named(found: Any, name: str, folder: Path) -> str | None:
    if not isinstance(found, list):
        return found if isinstance(found, str) else None
    texts = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    if not isinstance(texts.get(name), str):
        raise ValueError(
            f"{folder}: got chat templates named {', '.join(map(str, texts))}, wanted {name!r} among them; give "
            "data.load_template(path, name=...) one of these names"
        )
    return texts[name]


def _object(path: Path) -> dict:
    if (content := disk.content_of(path)) is None:
        return {}
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path}: got no JSON ({error}), wanted a configuration of Hugging Face") from None
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    """JSON values only: an object of ours would bring its methods into the sandbox."""
    if value is None or isinstance(value, bool | str | int | float):
        if isinstance(value, str) and (_BEGIN in value or _END in value):
            raise ValueError("chat: got U+FDD0 or U+FDD1 in a message, wanted text without noncharacters; remove them")
        if isinstance(value, str):
            return str.__str__(value)  # of an enum its text alone
        if isinstance(value, int) and not isinstance(value, bool):
            return int(value)
        return float(value) if isinstance(value, float) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(x) for x in value]
    raise ValueError(f"chat: got {type(value).__name__} {value!r:.40}, wanted JSON values; give the texts of messages")


class _NoDateError(ValueError):
    """A template asks for the date of today, which a run of two days does not have."""


def _moment(date: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(date)
    except (TypeError, ValueError):
        raise ValueError(f"ChatTemplate: date: got {date!r:.60}, wanted one such as '2026-11-27'") from None


def _compiled(text: str, begin: str, end: str, date: str | None) -> Any:
    try:
        from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ImportError("chat template: got one without the package that renders it, wanted it; "
                          "pip install 'jinja2>=3.1.6'") from None  # fmt: skip

    class Generation(Extension):
        """{% generation %} body {% endgeneration %}: the body between two characters, in a scope of its own."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in (begin, end))
            return nodes.Scope([first, *body, last]).set_lineno(line)

    def refused(message: object):
        raise TemplateError(str(message))

    def as_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def written(value: object) -> object:
        """What an expression writes; TemplateError for an object whose text is its address."""
        plain = isinstance(value, str | int | float | Undefined) or value is None
        if not plain and " at 0x" in str(value):
            kind = type(value).__name__
            raise TemplateError(f"expression: a {kind}, whose text is another in every process; write JSON values")
        return value

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=written
    )

    def now(form: str) -> str:
        if date is None:
            raise _NoDateError(
                "chat template: got one that writes the date of today, by which ranks differ at midnight and a run "
                "cannot be resumed tomorrow, wanted a fixed date; dataclasses.replace(template, date='2026-11-27')"
            )
        return _moment(date).strftime(form)

    environment.filters["tojson"] = as_json
    del environment.filters["random"], environment.globals["lipsum"]  # rows are the same on all ranks, and tomorrow
    environment.globals.update(raise_exception=refused, strftime_now=now, dict=lambda *x, **more: dict(*x, **more))
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat template: got a text that is no Jinja at line {error.lineno} ({error}), wanted a chat template"
        ) from None
