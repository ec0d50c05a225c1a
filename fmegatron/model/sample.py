"""Text from a trained decoder: greedy, temperature and top-p, with a cache of keys and values, or of states.

Legend: B sequences, P prompt tokens, T cache slots, V vocabulary, G key/value heads of this rank, K head width.
Everything is a pure function: the cache is a value that goes in and comes out, the position is a 0-d tensor, and
chance is a uniform number made from (key, position, row), so one key gives one text, whatever the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron import tree
from fmegatron.collectives import Axes, all_gather
from fmegatron.model.arrays import At
from fmegatron.model.decoder import Decoder, Part
from fmegatron.model.forward import block, read_out
from fmegatron.model.weights import embedded, gather_weights, prepared
from fmegatron.step import layer_layout, unstack


def sampling_weights(params: dict, decoder: Decoder, layouts: dict, axes: Axes) -> dict:
    """Parameters as the functions below take them: whole over the data axes, in the compute dtype, one dict per layer.

    Shards over fsdp (and dp) are gathered here, once, in one collective; every rank then holds its tp part of the
    model.
    """
    params = prepared(params, layouts, decoder, axes)
    layers: list = [None] * decoder.layers
    of_layers: list = [None] * decoder.layers
    for name, stack in decoder.stacks.items():
        if stack.depths[0] >= decoder.layers:  # what only training has
            continue
        layout = tree.map(layer_layout, layouts[name])
        for depth, layer in zip(stack.depths, unstack(params[name]), strict=True):
            layers[depth], of_layers[depth] = layer, layout
    outer, of_outer = ({k: v for k, v in whole.items() if k not in decoder.stacks} for whole in (params, layouts))
    return gather_weights({**outer, "blocks": layers}, {**of_outer, "blocks": of_layers}, decoder, axes)


def _forward(
    weights: dict,
    tokens_BS: Tensor,
    positions_S: Tensor,
    decoder: Decoder,
    axes: Axes,
    look: Callable,
    step: Callable,
) -> Tensor:
    """Logits [B, V_tp] after the last token; `look(mixer, q, k, v, w, at)` is what the heads of an attention read,
    `step(mixer, u, w, at)` what a mixer with a state makes of u."""

    def mix(part: Part, u_BSD: Tensor, w: dict, at: At) -> Any:
        mixer: Any = part.mixer
        if getattr(mixer, "per_token", False):
            return mixer(u_BSD, w, at, axes)
        if hasattr(mixer, "advance"):
            return step(mixer, u_BSD, w, at)
        if not hasattr(mixer, "cache_width"):
            raise ValueError(
                f"generate: got the mixer {mixer!r}, wanted one that has keys and values, or a state, or looks at one "
                "token only; give it project, attend, finish and cache_width as Attention has them, or read and "
                "advance as Mamba has them, or per_token = True"
            )
        return mixer.finish(look(mixer, *mixer.project(u_BSD, w, at, axes), w, at), w, False, axes)

    at = decoder.at(positions_S)
    x_BSD = embedded(tokens_BS, weights["embed"], positions_S, decoder, axes, False)
    for parts, w, at_layer in zip(decoder.blocks, weights["blocks"], at, strict=True):
        y_BSD = block(x_BSD, w, at_layer, parts=parts, axes=axes, mix=mix)
        x_BSD = y_BSD[0] if isinstance(y_BSD, tuple) else y_BSD
    last = at[0]._replace(positions=positions_S[-1:])
    return read_out(x_BSD[:, -1:], weights, last, decoder, axes)[:, 0]


def prefill(weights: dict, tokens_BP: Tensor, decoder: Decoder, axes: Axes, slots: int) -> tuple[dict, Tensor]:
    """Read the prompt: (cache with its keys and values in slots 0 .. P-1, logits[B, V_tp] after its last token).

    The cache is {"k", "v": per attention [B, T, G_tp, K], "state": per mixer that has one its state}, T = `slots`,
    fixed for the whole generation.
    """
    P = tokens_BP.shape[1]
    if P > slots:
        raise ValueError(
            f"prompt: got {P} tokens, wanted at most the {slots} slots of the cache; cut it or raise slots"
        )
    cache = {"k": [], "v": [], "state": []}

    def step(mixer: Any, u: Tensor, w: dict, at: At) -> Tensor:
        y, state = mixer.read(u, w, at, axes)
        cache["state"].append(state)
        return y

    def look(mixer: Any, q: Tensor, k: Tensor, v: Tensor, w: dict, at: At) -> Tensor:
        for name, new in (("k", k), ("v", v)):
            cache[name].append(F.pad(new, (0, 0, 0, 0, 0, slots - P)))
        return mixer.attend(q, k, v, w, at)

    positions_P = torch.arange(P, device=tokens_BP.device)
    logits_BV = _forward(weights, tokens_BP, positions_P, decoder, axes, look, step)
    return cache, logits_BV


def decode(
    cache: dict, weights: dict, token_B: Tensor, position: Tensor, decoder: Decoder, axes: Axes
) -> tuple[dict, Tensor]:
    """One more token at `position` (0-d int64, the slot it takes): (the cache with it, logits[B, V_tp] after it).

    Shapes do not depend on the position, so one compiled form serves all tokens; with the cache donated
    (`jit(decode, donate=0)`) it is updated in place.
    """
    position_1 = position.view(1)
    before, states = iter(zip(cache["k"], cache["v"], strict=True)), iter(cache["state"])
    out = {"k": [], "v": [], "state": []}

    def step(mixer: Any, u: Tensor, w: dict, at: At) -> Tensor:
        y, state = mixer.advance(u, w, next(states), axes)
        out["state"].append(state)
        return y

    def look(mixer: Any, q: Tensor, k: Tensor, v: Tensor, w: dict, at: At) -> Tensor:
        keys, values = next(before)
        keys, values = keys.index_copy(1, position_1, k), values.index_copy(1, position_1, v)
        out["k"].append(keys)
        out["v"].append(values)
        slots_T = torch.arange(keys.shape[1], device=keys.device)
        return mixer.attend(q, keys, values, w, at, mixer.visible(position_1, slots_T))

    return out, _forward(weights, token_B[:, None], position_1, decoder, axes, look, step)


def choose(logits_BV: Tensor, uniform_B: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """A token id a row: the best at temperature 0, else drawn from softmax(logits / temperature) cut to its top-p set.

    The set is the shortest prefix of the tokens, by falling probability (equal ones by id), with mass >= top_p; never
    empty. The draw inverts the cumulative mass at `uniform` (in [0, 1)), so it is a function of its arguments and
    nothing else.
    Source: Holtzman et al. 2019, arXiv 1904.09751, section 3.1.
    """
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"choose: got temperature={temperature}, top_p={top_p}, "
            "wanted temperature >= 0 (0 is greedy) and 0 < top_p <= 1"
        )
    if temperature == 0:
        return logits_BV.argmax(-1)
    p_BV, id_BV = torch.sort((logits_BV.double() / temperature).softmax(-1), dim=-1, descending=True, stable=True)
    before_BV = p_BV.cumsum(-1) - p_BV  # mass of the better tokens: below top_p until the set is full
    p_BV = torch.where(before_BV < top_p, p_BV, 0.0)
    upto_BV = p_BV.cumsum(-1)
    rank_B1 = (upto_BV <= uniform_B.to(upto_BV)[:, None] * upto_BV[:, -1:]).sum(-1, keepdim=True)
    last_B1 = (p_BV > 0).sum(-1, keepdim=True) - 1  # rounding must not step over the end of the set
    return id_BV.gather(-1, rank_B1.minimum(last_B1)).squeeze(-1)


def uniform(key: int, position: int, rows: int) -> Tensor:
    """One fp64 number in [0, 1) per row, a function of (key, position, row) only."""
    bits = [tree.fold_in(key, position, row) for row in range(rows)]  # 63 bits each
    return torch.tensor([(b >> 10) * 2.0**-53 for b in bits], dtype=torch.float64)


def generate(
    params: dict,
    prompt_BP: Tensor,
    count: int,
    decoder: Decoder,
    layouts: dict,
    axes: Axes,
    *,
    key: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    compile: Callable | None = None,
) -> Tensor:
    """`count` tokens after each prompt, int64 [B, count]; the same on all ranks of a mesh, all of which must call it.

    Args:
        params: this rank's shards.
        prompt_BP: int64 [B, P], the same on all ranks.
        count: number of tokens to make.
        decoder: the model.
        layouts: of all parameters.
        axes: bound to the running ranks (`Axes(mesh, world)`), or of a mesh of size 1.
        key: of the random choices, see `choose`.
        temperature: divides the logits; 0 is greedy.
        top_p: the smallest set of tokens with this probability is chosen from.
        compile: what compiles the two functions that run the model, as `compile(fn)` and `compile(fn, donate=0)`:
            `partial(step.jit, world=world)`.

    Raises:
        ValueError: prompt and count do not fit into decoder.max_seq, or the axes have no processes behind them.
    """
    B, P = prompt_BP.shape
    if not P or P + count > decoder.max_seq:
        raise ValueError(
            f"generate: got a prompt of {P} and {count} new tokens, wanted 1 or more and together at most "
            f"Decoder.max_seq={decoder.max_seq}; cut the prompt (prompt[:, -n:]), or ask for fewer tokens"
        )
    if axes.mesh.size > 1 and axes.world is None:
        raise ValueError(
            f"generate: got symbolic axes of the mesh {axes.mesh}, wanted axes with processes behind them; "
            "pass Axes(mesh, connect(mesh)), or restore the parameters onto a mesh of size 1"
        )
    tp = axes["tp"]
    inside = {
        "decoder": decoder,
        "axes": axes if compile is None else Axes(axes.mesh),
    }  # jit binds symbolic axes itself
    read, step = partial(prefill, **inside, slots=P + count), partial(decode, **inside)
    if compile is not None:
        read, step = compile(read), compile(step, donate=0)
    with torch.no_grad():
        weights = sampling_weights(params, decoder, layouts, axes)
        cache, logits_BV = read(weights, prompt_BP)
        tokens = []
        for i in range(count):
            whole_BV = all_gather(logits_BV, tp, 1)[:, : decoder.vocab_size]  # one row per sequence: small
            u_B = uniform(key, P + i, B).to(whole_BV.device)
            tokens.append(choose(whole_BV, u_B, temperature, top_p))
            if i + 1 < count:
                position = torch.full((), P + i, dtype=torch.int64, device=whole_BV.device)
                cache, logits_BV = step(cache, weights, tokens[-1], position)
    return torch.stack(tokens, 1) if tokens else prompt_BP[:, :0]
