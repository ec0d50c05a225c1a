"""Text from a trained decoder: greedy, temperature and top-p, with a key/value cache.

Legend: B sequences, P prompt tokens, T cache slots, V vocabulary, G key/value heads of this rank, K head width.
Everything is a pure function: the cache is a value that goes in and comes out, the position is a 0-d tensor, and
chance is a uniform number made from (key, position, row), so one key gives one text, whatever the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron import nn, tree
from fmegatron.collectives import Axes, Axis, all_gather
from fmegatron.model.config import Config
from fmegatron.model.gpt import finish_block, gather_weights, prepared, project_qkv, read_out
from fmegatron.step import layer_layout, unstack


def sampling_weights(params: dict, config: Config, layouts: dict, axes: Axes) -> dict:
    """Parameters as the functions below take them: whole over the data axes, in the compute dtype, one dict per layer.

    Shards over fsdp (and dp) are gathered here, once, in one collective; every rank then holds its tp part of the
    model.
    """
    params = prepared(params, layouts, config, axes)
    layers = unstack(params["blocks"])
    layer_layouts = [tree.map(layer_layout, layouts["blocks"])] * len(layers)
    return gather_weights({**params, "blocks": layers}, {**layouts, "blocks": layer_layouts}, config, axes)


def prefill(weights: dict, tokens_BP: Tensor, config: Config, tp: Axis, slots: int) -> tuple[dict, Tensor]:
    """Read the prompt: (cache with its keys and values in slots 0 .. P-1, logits[B, V_tp] after its last token).

    The cache is {"k", "v": per layer [B, T, G_tp, K]}, T = `slots`, fixed for the whole generation.
    """
    P = tokens_BP.shape[1]
    if P > slots:
        raise ValueError(
            f"prompt: got {P} tokens, wanted at most the {slots} slots of the cache; cut it or raise slots"
        )
    config = _whole_sequence(config)
    angles = _angles(torch.arange(P, device=tokens_BP.device), config)
    x_BPD = nn.embed(tokens_BP, weights["embed"]["table"], tp)
    cache = {"k": [], "v": []}
    for w in weights["blocks"]:
        q, k, v = project_qkv(x_BPD, w, *angles, config, tp)
        x_BPD = finish_block(x_BPD, nn.attention(q, k, v), w, config, tp)
        for name, new in (("k", k), ("v", v)):
            cache[name].append(F.pad(new, (0, 0, 0, 0, 0, slots - P)))
    return cache, read_out(x_BPD[:, -1:], weights, config, tp)[:, 0]


def decode(
    cache: dict, weights: dict, token_B: Tensor, position: Tensor, config: Config, tp: Axis
) -> tuple[dict, Tensor]:
    """One more token at `position` (0-d int64, the slot it takes): (the cache with it, logits[B, V_tp] after it).

    Shapes do not depend on the position, so one compiled form serves all tokens; with the cache donated
    (`jit(decode, donate=0)`) it is updated in place.
    """
    config = _whole_sequence(config)
    position_1 = position.view(1)
    angles = _angles(position_1, config)
    slots = cache["k"][0].shape[1]
    mask_1T = (torch.arange(slots, device=token_B.device) <= position)[None]
    x_B1D = nn.embed(token_B[:, None], weights["embed"]["table"], tp)
    out = {"k": [], "v": []}
    for w, keys, values in zip(weights["blocks"], cache["k"], cache["v"], strict=True):
        q, k, v = project_qkv(x_B1D, w, *angles, config, tp)
        keys, values = keys.index_copy(1, position_1, k), values.index_copy(1, position_1, v)
        x_B1D = finish_block(x_B1D, nn.attention(q, keys, values, mask_1T), w, config, tp)
        out["k"].append(keys)
        out["v"].append(values)
    return out, read_out(x_B1D, weights, config, tp)[:, 0]


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
    config: Config,
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
        config: of the model.
        layouts: of all parameters.
        axes: bound to the running ranks (`Axes(mesh, world)`), or of a mesh of size 1.
        key: of the random choices, see `choose`.
        temperature: divides the logits; 0 is greedy.
        top_p: the smallest set of tokens with this probability is chosen from.
        compile: what compiles the two functions that run the model, as `compile(fn)` and `compile(fn, donate=0)`:
            `partial(step.jit, world=world)`.

    Raises:
        ValueError: prompt and count do not fit into config.max_seq, or the axes have no processes behind them.
    """
    B, P = prompt_BP.shape
    if not P or P + count > config.max_seq:
        raise ValueError(
            f"generate: got a prompt of {P} and {count} new tokens, wanted 1 or more and together at most "
            f"Config.max_seq={config.max_seq}; cut the prompt (prompt[:, -n:]), or ask for fewer tokens"
        )
    if axes.mesh.size > 1 and axes.world is None:
        raise ValueError(
            f"generate: got symbolic axes of the mesh {axes.mesh}, wanted axes with processes behind them; "
            "pass Axes(mesh, connect(mesh)), or restore the parameters onto a mesh of size 1"
        )
    tp = axes["tp"]
    inside = tp if compile is None else Axes(axes.mesh)["tp"]  # jit binds symbolic axes itself
    read, step = partial(prefill, config=config, tp=inside, slots=P + count), partial(decode, config=config, tp=inside)
    if compile is not None:
        read, step = compile(read), compile(step, donate=0)
    with torch.no_grad():
        weights = sampling_weights(params, config, layouts, axes)
        cache, logits_BV = read(weights, prompt_BP)
        tokens = []
        for i in range(count):
            whole_BV = all_gather(logits_BV, tp, 1)[:, : config.vocab_size]  # one row per sequence: small
            u_B = uniform(key, P + i, B).to(whole_BV.device)
            tokens.append(choose(whole_BV, u_B, temperature, top_p))
            if i + 1 < count:
                position = torch.full((), P + i, dtype=torch.int64, device=whole_BV.device)
                cache, logits_BV = step(cache, weights, tokens[-1], position)
    return torch.stack(tokens, 1) if tokens else prompt_BP[:, :0]


def _whole_sequence(config: Config) -> Config:
    """The same model without sequence parallelism: one token cannot be split, and the weights are the same."""
    return replace(config, sequence_parallel=False)


def _angles(positions: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    return nn.rope_angles(positions, config.head_dim, config.rope_theta, config.compute_dtype)
