"""`python -m fmegatron.model chat|score CHECKPOINT`: continue texts on the terminal, and score files.

The weights, the model and the tokenizer come from the checkpoint alone (`model.opened`). Exit status: 0 all went well,
1 it could not be done.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from fmegatron import step
from fmegatron.collectives import Axes
from fmegatron.data import chat
from fmegatron.data.template import ChatTemplate, load_template
from fmegatron.layout import Mesh
from fmegatron.model.sample import Inference, inference, stream
from fmegatron.model.scoring import perplexity
from fmegatron.model.stored import opened
from fmegatron.model.text import Tokenizer, pieces


def parser() -> argparse.ArgumentParser:
    """The parser of both commands."""
    top = argparse.ArgumentParser(prog="python -m fmegatron.model", description="Write with a model, or score texts.")
    commands = top.add_subparsers(dest="command", required=True)
    chat = commands.add_parser(
        "chat",
        help="answer every line that is typed, by the tokenizer's chat template; without one, continue the text so far",
    )
    score = commands.add_parser("score", help="perplexity of text files, as JSON lines")
    for command in (chat, score):
        command.add_argument("checkpoint", help="a checkpoint, or the folder of a run")
        command.add_argument("--tokenizer", help="file of the tokenizer, where the checkpoint does not have it")
        command.add_argument("--device", help="cpu (default) or cuda")
        command.add_argument("--compile", action="store_true", help="compile first (some seconds), then be faster")
    chat.add_argument("--prompt", help="continue this text once, and end")
    chat.add_argument("--tokens", type=int, default=200, help="most new tokens of an answer")
    chat.add_argument("--turn", help="what a line becomes, such as 'User: {}\\nAssistant:'; no template is used then")
    chat.add_argument("--template", help="file of a chat template (Jinja), in the place of the tokenizer's own")
    chat.add_argument("--system", help="what the template's system message says")
    chat.add_argument("--stop", action="append", default=[], help="text that ends an answer (several may be given)")
    chat.add_argument("--key", type=int, default=0, help="of the random choices")
    for name, kind, default in (
        ("temperature", float, 0.8), ("top-k", int, None), ("top-p", float, 0.95), ("min-p", float, 0.0),
        ("repetition-penalty", float, 1.0),
    ):  # fmt: skip
        chat.add_argument(f"--{name}", type=kind, default=default)
    score.add_argument("files", nargs="+", help="texts in UTF-8")
    score.add_argument("--stride", type=int, help="tokens from window to window; default: the longest sequence")
    return top


def main(argv: Sequence[str] | None = None, lines: TextIO | None = None, out: TextIO | None = None) -> int:
    """Run a command; returns the exit status. lines, out: standard input and output."""
    given = parser().parse_args(argv)
    source: TextIO = sys.stdin if lines is None else lines
    target: TextIO = sys.stdout if out is None else out
    try:
        decoder, params, _, tokenizer = opened(given.checkpoint, tokenizer=given.tokenizer, device=given.device)
        if tokenizer is None:
            raise ValueError(
                f"{given.checkpoint}: got a checkpoint without its tokenizer, wanted one; pass --tokenizer, a file "
                "that tokenizer.save wrote"
            )
        compile = step.jit if given.compile else None
        of = inference(params, decoder, Axes(Mesh()), compile=compile)
        if given.command == "score":
            _score(of, tokenizer, given, target)
        elif (template := _template(tokenizer, given)) is not None:
            _talk(of, tokenizer, template, given, source, target)
        else:
            _chat(of, tokenizer, given, source, target)
    except (ValueError, OSError, ImportError) as error:
        print(f"{given.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _score(of: Inference, tokenizer: Tokenizer, given: argparse.Namespace, out: TextIO) -> None:
    for name in given.files:
        text = Path(name).read_text(encoding="utf-8")
        found = perplexity(of, tokenizer.encode(text).astype("int64"), stride=given.stride)
        line = {"file": name, "tokens": found.tokens, "loss": found.loss, "perplexity": found.perplexity}
        print(json.dumps({**line, "bits_per_byte": found.bits_per_byte(len(text.encode()))}), file=out, flush=True)


def _chat(of: Inference, tokenizer: Tokenizer, given: argparse.Namespace, lines: TextIO, out: TextIO) -> None:
    """Answers until the end of the input; the text so far, cut on the left to what fits, is the prompt of the next."""
    if given.prompt is not None:
        for piece in _answer(of, tokenizer, given.prompt, given, 0):
            print(piece, end="", file=out, flush=True)
        print(file=out)
        return
    shown, text = lines.isatty(), ""
    while True:
        if shown:
            print("> ", end="", file=out, flush=True)
        line = lines.readline()
        if not line:
            return
        text += (given.turn or "{}").replace("\\n", "\n").replace("{}", line.rstrip("\n"))
        for piece in _answer(of, tokenizer, text, given, len(text)):
            print(piece, end="", file=out, flush=True)
            text += piece
        text += "\n"
        print(file=out, flush=True)


def _template(tokenizer: Tokenizer, given: argparse.Namespace) -> ChatTemplate | None:
    """What makes prompts of messages; None for texts that are only continued."""
    found = getattr(tokenizer, "chat", None)
    if given.template is not None and (found := load_template(given.template)) is None:
        raise ValueError(f"{given.template}: got a folder without a chat template, wanted one; name the .jinja file")
    if given.system is not None and found is None:
        raise ValueError("--system: got a tokenizer without a chat template, wanted one; pass --template")
    if found is not None and found.date is None:  # who is answered now is told of today
        found = replace(found, date=datetime.date.today().isoformat())
    return None if given.prompt is not None or given.turn is not None else found


def _talk(
    of: Inference, tokenizer: Tokenizer, template: ChatTemplate, given: argparse.Namespace, lines: TextIO, out: TextIO
) -> None:
    """Answers by the chat template, until the end of the input. What gets too long loses its oldest exchanges."""
    messages = [] if given.system is None else [{"role": "system", "content": given.system}]
    first, turn = len(messages), 0
    while True:
        if lines.isatty():
            print("> ", end="", file=out, flush=True)
        line = lines.readline()
        if not line:
            return
        messages.append({"role": "user", "content": line.rstrip("\n")})
        while True:
            prompt = chat.located(tokenizer, template.render(messages, prompt=True))[0].tolist()
            if len(prompt) + given.tokens <= of.decoder.max_seq or len(messages) < first + 3:
                break
            del messages[first : first + 2]
            print(f"chat: {of.decoder.max_seq} tokens are full: the oldest exchange is left out", file=sys.stderr)
        answer, turn = "", turn + 1
        for piece in _answer(of, tokenizer, prompt, given, turn, _ends(tokenizer, template)):
            print(piece, end="", file=out, flush=True)
            answer += piece
        messages.append({"role": "assistant", "content": answer})
        print(file=out, flush=True)


def _ends(tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """The token that a template puts behind an answer, where it is one token, which may be another than eos."""
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    begin, whole = template.render([asked], prompt=True) + "b", template.render([asked, said])
    behind = whole[len(begin) :].strip() if whole.startswith(begin) else ""
    ids = chat.located(tokenizer, behind)[0] if behind else ()
    return frozenset({int(ids[0])}) if len(ids) == 1 else frozenset()


def _answer(
    of: Inference,
    tokenizer: Tokenizer,
    text: str | list[int],
    given: argparse.Namespace,
    turn: int,
    more_ends: frozenset[int] = frozenset(),
) -> Iterator[str]:
    """The pieces of one answer as they come. text: or its ids. turn: another one for each, so that answers to one text
    differ. more_ends: ids beside eos."""
    stops, most = [stop.replace("\\n", "\n") for stop in given.stop], of.decoder.max_seq
    prompt = [int(id) for id in tokenizer.encode(text)] if isinstance(text, str) else text
    count = min(given.tokens, max(most - len(prompt), most // 2))
    prompt = prompt[max(0, len(prompt) + count - most) :]
    eos = getattr(tokenizer, "eos", None)
    how = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    how["tokenizer"] = tokenizer  # the model's vocabulary may be padded
    ends = more_ends | (frozenset() if eos is None else frozenset({eos}))
    tokens = (int(token[0]) for token in stream(of, [prompt], count, key=given.key + turn, stop_ids=ends, **how))
    return pieces((id for id in tokens if id not in ends), tokenizer, stops)


if __name__ == "__main__":
    sys.exit(main())
