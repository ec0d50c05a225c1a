"""Text from a trained decoder: weights gathered once, functions compiled once, tokens one by one or all at the end.

Legend: B sequences, S tokens that are read at once, T slots of the cache, V vocabulary, N new tokens, G key/value heads
of this rank, K head width.

Prompts are aligned at their ends: the last token of every row is in the same slot, shorter rows have padding before
them, which no token of a text looks at and which has no part in a state. So a prompt is read in pieces of one length
into a cache of one of a few lengths, and two compiled forms for each length of the cache serve every prompt and count.
Everything is a pure function: the cache is a value that goes in and comes out, the slot is a 0-d tensor, and chance is
a function of (key, row, token), so one key gives one text, whatever the mesh.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from fmegatron import nn, tree
from fmegatron.collectives import Axes, all_gather
from fmegatron.model.arrays import TokenContext
from fmegatron.model.choose import Choice, ChoiceFields, choose, seen_in
from fmegatron.model.decoder import Decoder, Part, round_up
from fmegatron.model.forward import block, known, read_out
from fmegatron.model.mixer import Slots
from fmegatron.model.text import Spoken, Tokenizer, hear, texts_of
from fmegatron.model.weights import block_weights, embedded, gather_weights, prepared
from fmegatron.nn import loss
from fmegatron.step.layer import layer_layout, unstack

ENDED = -1  # in the place of a token behind the end of a row
_SHORTEST = 256  # slots of the shortest cache


@dataclass(frozen=True, eq=False)
class Inference:
    """A decoder ready to read and write: `inference` makes it, `generate`, `stream` and `score` take it.

    decoder: the model. axes: of the running ranks. weights: as the compiled functions take them. read, write: for each
    length of the cache the function that reads `chunk` tokens, and one. losses: for each length of texts
    that of their tokens (`score`).
    empty: what the mixers keep of one token. chunk: tokens of a prompt that are read at once.
    """

    decoder: Decoder
    axes: Axes
    weights: dict
    read: Mapping[int, Callable]
    write: Mapping[int, Callable]
    losses: Mapping[int, Callable]
    empty: list[dict]
    chunk: int


def inference(
    params: dict,
    decoder: Decoder,
    axes: Axes,
    *,
    compile: Callable | None = None,
    chunk: int = 64,
) -> Inference:
    """Gather the weights and prepare the functions that read and write; all ranks of a mesh call it.

        compile = functools.partial(step.jit, world=world, check=False)
        writer = model.inference(params, decoder, axes, compile=compile)
        model.generate(writer, prompts, 100, temperature=0.8)

    The forms of a cache are of 256, 1024, 4096, ... slots, up to what decoder.max_seq needs; each batch size is another
    form.

    Args:
        params: this rank's shards, which know their layouts; one process's full arrays need not.
        decoder: the model.
        axes: bound to the running ranks (`Axes(mesh, world)`), or of a mesh of size 1.
        compile: what compiles a function, as `compile(fn)` and `compile(fn, donate=0)`; None: nothing is compiled.
        chunk: tokens of a prompt that are read at once: more need more memory and less time.

    Raises ValueError for axes that have no processes behind them.
    """
    if axes.mesh.size > 1 and axes.world is None:
        raise ValueError(
            f"inference: got symbolic axes of the mesh {axes.mesh}, wanted axes with processes behind them; "
            "pass Axes(mesh, connect(mesh)), or restore the parameters onto a mesh of size 1"
        )
    chunk = min(chunk, decoder.max_seq)
    # jit binds symbolic axes itself
    inside: dict[str, Any] = {"decoder": decoder, "axes": axes if compile is None else Axes(axes.mesh)}
    how = (lambda fn, donate=None: fn) if compile is None else compile
    slots, texts = cache_lengths(decoder.max_seq, chunk), lengths(_SHORTEST // 4, decoder.max_seq)
    with torch.no_grad():
        weights = sampling_weights(params, decoder, known(params, axes)[0], axes)
        read, write = ({n: how(partial(extend, **inside), donate=0) for n in slots} for _ in range(2))
        losses = {n: how(partial(token_losses, **inside)) for n in texts}
        return Inference(decoder, axes, weights, read, write, losses, _empty(weights, decoder, axes), chunk)


def lengths(first: int, last: int) -> tuple[int, ...]:
    """Powers of 4 times `first`, and `last` in the place of one above half of it."""
    out = [first]
    while out[-1] * 2 <= last:
        out.append(out[-1] * 4)
    return (*out[:-1], last)


def cache_lengths(max_seq: int, chunk: int) -> tuple[int, ...]:
    """The slots that a cache may have: 256, 1024, 4096, ..., the last for texts of max_seq behind a rounded prompt."""
    return lengths(_SHORTEST, round_up(max_seq + chunk - 1, chunk))


def sampling_weights(params: dict, decoder: Decoder, layouts: dict, axes: Axes) -> dict:
    """Parameters as the functions below take them: gathered over the data axes, in the compute dtype, one dict a layer.

    Shards over fsdp (and dp) are gathered here, once, in one collective (experts that axes of the data hold stay
    split, in one for each layer); every rank then holds its tp part of the model.
    """
    params = prepared(params, layouts, decoder, axes)
    layers: list = [None] * decoder.layers
    of_layers: list = [None] * decoder.layers
    arrays: list = [None] * decoder.layers
    for name, stack in decoder.stacks.items():
        if stack.depths[0] >= decoder.layers:  # what only training has
            continue
        layout = tree.map(layer_layout, layouts[name])
        for depth, layer in zip(stack.depths, unstack(params[name]), strict=True):
            layers[depth], of_layers[depth], arrays[depth] = layer, layout, stack.arrays
    outer, of_outer = ({k: v for k, v in all_.items() if k not in decoder.stacks} for all_ in (params, layouts))
    if any(array.kept or array.wide for array in tree.leaves(arrays)):
        blocks = [block_weights(*one, decoder, axes) for one in zip(layers, arrays, of_layers, strict=True)]
        return {**gather_weights(outer, of_outer, decoder, axes), "blocks": blocks}
    return gather_weights({**outer, "blocks": layers}, {**of_outer, "blocks": of_layers}, decoder, axes)


def _over(axes: Axes, at: list[TokenContext]) -> list[TokenContext]:
    return [one._replace(axes=axes) for one in at]


def _trunk(
    weights: dict,
    tokens_BS: Tensor,
    at: list[TokenContext],
    decoder: Decoder,
    cache: list[dict] | None = None,
    slots: Slots | None = None,
) -> tuple[Tensor, list[dict]]:
    """(what comes from the last block: x[B, S, D], the cache with these tokens)."""
    x_BSD, out = embedded(tokens_BS, weights["embed"], at[0].positions, decoder, at[0].axes, False), []
    for depth, (parts, w, at_layer) in enumerate(zip(decoder.blocks, weights["blocks"], at, strict=True)):
        before, behind = {} if cache is None else cache[depth], {}

        def mix(part: Part, u_BSD: Tensor, w: dict, at: TokenContext, before=before, behind=behind) -> Any:
            y_BSD, behind[part.name] = part.mixer.read(u_BSD, w, at, before.get(part.name), slots)
            return y_BSD

        y_BSD = block(x_BSD, w, at_layer, parts=parts, mix=mix)
        x_BSD = y_BSD[0] if isinstance(y_BSD, tuple) else y_BSD
        out.append(behind)
    return x_BSD, out


def extend(
    cache: list[dict], weights: dict, tokens_BS: Tensor, slot: Tensor, padding_B: Tensor, decoder: Decoder, axes: Axes
) -> tuple[list[dict], Tensor]:
    """Read tokens into a cache: (the cache with them, logits[B, V_tp] after the last of each row).

    Shapes do not depend on where the tokens are, so one compiled form serves all of one S and T; with the cache donated
    (`jit(extend, donate=0)`) it is updated in place.

    Args:
        cache: for each block {part: what its mixer keeps (`Mixer.read`)}.
        weights: `sampling_weights`.
        tokens_BS: int64.
        slot: 0-d int64, that of the first token; those before it are filled.
        padding_B: int64, how many slots each row has before its text.
        decoder: the model.
        axes: Axes(mesh).
    """
    slots = Slots(slot + torch.arange(tokens_BS.shape[1], device=tokens_BS.device), padding_B)
    positions_BS = slots.positions
    documents_BS = (positions_BS >= 0).to(torch.int64)  # padding is a document of its own
    at = _over(axes, decoder.at(positions_BS.clamp(min=0), documents_BS))
    x_BSD, cache = _trunk(weights, tokens_BS, at, decoder, cache, slots)
    last = at[0]._replace(positions=at[0].positions[:, -1:])
    return cache, read_out(x_BSD[:, -1:], weights, last, decoder)[:, 0]


def _empty(weights: dict, decoder: Decoder, axes: Axes) -> list[dict]:
    """What the mixers keep of one token of one row: a cache for `Mixer.new_cache`."""
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=weights["embed"]["table"].device)
    return _trunk(weights, token_11, _over(axes, decoder.at(token_11[0])), decoder)[1]


def new_cache(of: Inference, rows: int, slots: int) -> list[dict]:
    """A cache of so many rows and slots, nothing read."""
    return [
        {part.name: part.mixer.new_cache(one[part.name], rows, slots) for part in parts}
        for parts, one in zip(of.decoder.blocks, of.empty, strict=True)
    ]


def token_losses(
    weights: dict, tokens_BS: Tensor, labels_BS: Tensor, decoder: Decoder, axes: Axes
) -> tuple[Tensor, Tensor]:
    """(-log p of each label[B, S], fp32 or wider; whether it is the best token, bool[B, S]), equal on all tp ranks."""
    at = _over(axes, decoder.at(torch.arange(tokens_BS.shape[1], device=tokens_BS.device)))
    x_BSD, _ = _trunk(weights, tokens_BS, at, decoder)
    logits_BSV, tp = read_out(x_BSD, weights, at[0], decoder), axes["tp"]
    nll_BS, _ = nn.cross_entropy(logits_BSV, labels_BS, tp, decoder.vocab_size)
    return nll_BS, loss.best(logits_BSV, tp, decoder.vocab_size) == labels_BS


def stream(
    of: Inference,
    prompts: Tensor | Sequence[Sequence[int] | Tensor],
    count: int,
    *,
    key: int = 0,
    rows: Sequence[int] | None = None,
    stop_ids: Collection[int] | Tensor = (),
    stop_texts: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    **choice: Unpack[ChoiceFields],
) -> Iterator[Tensor]:
    """The next token of every row as it is chosen, int64 [B], at most `count` times: what `generate` returns.

    Behind the end of a row its tokens are ENDED (-1); with the last row the iteration ends. All ranks of a mesh iterate
    together and get the same tokens. Every row has the text that it has alone.

    Args:
        of: the model.
        prompts: int64 [B, P], or a sequence of ids for each row, of any lengths of 1 or more; the same on all ranks.
        count: the most tokens of a row.
        key: of the random choices: a function of it, the row's number and the number of the new token.
        rows: numbers of the rows, for the random choices; None: 0, 1, 2, ...
        stop_ids: tokens that end a row, integers in any collection, array or tensor [n]; they are its last.
        stop_texts: texts that end a row with the token that completes one of them. A tokenizer is needed.
        tokenizer: of the model; ids that it does not have, as of a padded vocabulary, are not chosen.
        choice: fields of `Choice`: temperature, top_k, top_p, min_p, repetition_penalty.

    Raises ValueError: prompt and count do not fit into decoder.max_seq, stop texts without a tokenizer, stop ids that
    are no integers, or a choice that cannot be meant.
    """
    how, texts = Choice(**choice), texts_of(prompts, of.decoder.vocab_size)
    if stop_texts and (tokenizer is None or not all(stop_texts) or isinstance(stop_texts, str)):
        raise ValueError(
            f"stop_texts: got {stop_texts!r}, wanted texts of one character or more, and a tokenizer; pass "
            "stop_texts=('\\n\\n',), tokenizer=tokenizer"
        )
    longest = max(map(len, texts))
    if not min(map(len, texts)) or count < 0 or longest + count > of.decoder.max_seq:
        raise ValueError(
            f"generate: got prompts of {min(map(len, texts))} to {longest} and {count} new tokens, wanted 1 or more "
            f"and together at most Decoder.max_seq={of.decoder.max_seq}; cut the prompt (prompt[:, -n:]), or ask for "
            "fewer tokens"
        )
    if rows is not None and len(rows) != len(texts):
        raise ValueError(f"rows: got {len(rows)} numbers, wanted one for each of the {len(texts)} prompts")
    return _stream(of, texts, count, how, key, rows, _Ends(_ids(stop_ids), tuple(stop_texts), tokenizer))


def _ids(stop_ids: Any) -> frozenset[int]:
    """As ints: a tensor or array gives elements that are equal to no int of a set."""
    try:
        found = stop_ids.tolist() if hasattr(stop_ids, "tolist") else list(stop_ids)
        if not any(isinstance(id, bool) for id in found):
            return frozenset(operator.index(id) for id in found)
    except TypeError:
        pass
    raise ValueError(f"stop_ids: got {stop_ids!r:.80}, wanted integers; pass stop_ids=(id,)")


class _Ends(NamedTuple):
    """What ends a row. tokenizer: of the texts, and whose ids may be chosen."""

    ids: frozenset[int]
    texts: tuple[str, ...]
    tokenizer: Tokenizer | None

    def hear(self, spoken: list[Spoken], ids: list[int], ended: list[bool]) -> list[Spoken]:
        """What the rows have said with these ids; those that have ended say no more."""
        if self.tokenizer is None or not self.texts:
            return spoken
        now = zip(spoken, ids, ended, strict=True)
        return [one if over else hear(one, id, self.tokenizer) for one, id, over in now]

    def at(self, id: int, spoken: Spoken) -> bool:
        """Whether a row ends with this id."""
        return id in self.ids or any(stop in spoken.recent(stop) for stop in self.texts)


def _stream(
    of: Inference,
    texts: list[Tensor],
    count: int,
    how: Choice,
    key: int,
    rows: Sequence[int] | None,
    ends: _Ends,
) -> Iterator[Tensor]:
    device, tp, B = of.weights["embed"]["table"].device, of.axes["tp"], len(texts)
    V = min(of.decoder.vocab_size, of.decoder.vocab_size if ends.tokenizer is None else ends.tokenizer.vocab_size)
    numbers_B = torch.tensor(range(B) if rows is None else rows, dtype=torch.int64, device=device)
    uniform_BN, ended, spoken = None, [False] * B, [Spoken()] * B
    with torch.no_grad():
        if how.temperature > 0:
            uniform_BN = nn.uniform(torch.empty(B, count, dtype=torch.float64, device=device), key=key, count=numbers_B)
        seen_BV = seen_in(texts, of.decoder.vocab_size, device)[:, :V] if how.repetition_penalty != 1 else None
        cache, logits_BV, padding_B, slot, write = _read(of, texts, count, device)
    token_B = padding_B
    for i in range(count):
        with torch.no_grad():  # a generator keeps no mode across its yields
            if i:
                cache, logits_BV = write(cache, of.weights, token_B[:, None], slot, padding_B)
                slot = slot + 1
            all_BV = all_gather(logits_BV, tp, 1)[:, :V]  # one row per sequence: small
            token_B = choose(all_BV, None if uniform_BN is None else uniform_BN[:, i], how, seen_BV)
            seen_BV = None if seen_BV is None else seen_BV.scatter(1, token_B[:, None], True)
        if not ends.ids and not ends.texts:
            yield token_B
            continue
        ids = token_B.tolist()
        out = torch.tensor([ENDED if over else id for id, over in zip(ids, ended, strict=True)], device=device)
        spoken = ends.hear(spoken, ids, ended)
        ended = [over or ends.at(id, one) for over, id, one in zip(ended, ids, spoken, strict=True)]
        yield out
        if all(ended):
            return


def _read(of: Inference, texts: list[Tensor], count: int, device: torch.device) -> tuple:
    """(cache, logits after the prompts, padding[B], the next slot, the function that writes into this cache)."""
    B, C = len(texts), of.chunk
    padded = round_up(max(map(len, texts)), C)
    slots = min(n for n in of.read if n >= padded + count - 1)
    padding_B = torch.tensor([padded - len(text) for text in texts], device=device)
    # The prompt itself, again and again: a router spreads it over its experts as it does a text.
    rows = [text.repeat(-(-padded // len(text)))[-padded:] for text in texts]
    cache, logits_BV = new_cache(of, B, slots), None
    for at in range(0, padded, C):
        slot = torch.full((), at, dtype=torch.int64, device=device)
        piece_BC = torch.stack([row[at : at + C] for row in rows]).to(device)
        cache, logits_BV = of.read[slots](cache, of.weights, piece_BC, slot, padding_B)
    return cache, logits_BV, padding_B, torch.full((), padded, dtype=torch.int64, device=device), of.write[slots]


def generate(
    of: Inference,
    prompts: Tensor | Sequence[Sequence[int] | Tensor],
    count: int,
    *,
    key: int = 0,
    rows: Sequence[int] | None = None,
    stop_ids: Collection[int] | Tensor = (),
    stop_texts: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    **choice: Unpack[ChoiceFields],
) -> Tensor:
    """`count` tokens after each prompt, int64 [B, N], ENDED (-1) behind the end of a row; N < count if all ended.

    The same on all ranks of a mesh, all of which must call it. The arguments and errors are those of `stream`.
    """
    ends: Any = {"stop_ids": stop_ids, "stop_texts": stop_texts, "tokenizer": tokenizer}
    tokens = list(stream(of, prompts, count, key=key, rows=rows, **ends, **choice))
    return torch.stack(tokens, 1) if tokens else torch.zeros(len(prompts), 0, dtype=torch.int64)
