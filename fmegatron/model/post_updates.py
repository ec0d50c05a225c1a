"""What a step sets by a rule and not by a gradient: the biases with which experts are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from fmegatron.model.decoder import Decoder
from fmegatron.model.mixer import Mixer, Rule

__all__ = ["loads", "post_update"]


def _moved(decoder: Decoder) -> dict[str, dict[str, tuple[Mixer, Rule]]]:
    """{stack: {part: (its mixer, by what that settles)}} of what a step sets."""
    found: dict[str, dict[str, tuple[Mixer, Rule]]] = {}
    for name, stack in decoder.stacks.items():
        for part in decoder.block(stack.depths[0]):
            mixers = [p.mixer for d in stack.depths for p in decoder.block(d) if p.name == part.name]
            rules = {mixer.rule: mixer for mixer in mixers}
            some = [(mixer, rule) for rule, mixer in rules.items() if rule is not None]
            if some and len(rules) > 1:
                field, values = some[0][1].field, [rule.value if rule is not None else None for rule in rules]
                raise ValueError(
                    f"{type(some[0][0]).__name__}.{field}: got {values} in the blocks of one stack ({name!r}), wanted "
                    "one value; give all blocks with equal arrays the same"
                )
            if some:
                found.setdefault(name, {})[part.name] = some[0]
    return found


def loads(statistics: list[dict], decoder: Decoder) -> dict[str, dict[str, dict[str, Tensor]]]:
    """{statistic: {stack: {part: [L, ...]}}}: those by which `post_update` sets arrays, such as "load", int64 [L, E].

    statistics: of each block, those of its parts.
    """
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for stack, parts in _moved(decoder).items():
        for part, (_, rule) in parts.items():
            for name in rule.statistics:
                each = [statistics[depth][part][name] for depth in decoder.stacks[stack].depths]
                found.setdefault(name, {}).setdefault(stack, {})[part] = torch.stack(each)
    return found


def post_update(params: dict, metrics: dict, decoder: Decoder) -> tuple[dict, dict]:
    """(parameters with the biases of the next step, metrics without the loads): `build_train_step(post_update=...)`.

        post_update = functools.partial(model.post_update, decoder=decoder)
        train_step = step.build_train_step(loss_fn, optimizer, layouts, axes, post_update=post_update)

    Of each mixer with a `Mixer.rule`, by its `Mixer.post_update` of the statistics of all tokens of the step, which
    `model.loss` gives as metrics: of a `MoE` with a bias_rate the metric "load".

    Args:
        params: this rank's shards; every rank has these biases in full.
        metrics: of `model.loss`, summed over microbatches.
        decoder: the model.

    Raises ValueError for metrics without the loads.
    """
    metrics, params, moved = dict(metrics), dict(params), _moved(decoder)
    wanted = dict.fromkeys(name for parts in moved.values() for _, rule in parts.values() for name in rule.statistics)
    found = {name: metrics.pop(name, None) for name in wanted}
    for name, given in found.items():
        if not given:
            raise ValueError(
                f"post_update: got metrics without {name!r}, wanted those of model.loss for this decoder; return them "
                "from loss_fn"
            )
    for stack, parts in moved.items():
        for part, (mixer, rule) in parts.items():
            mine = {name: found[name][stack][part] for name in rule.statistics}
            params[stack] = {**params[stack], part: mixer.post_update(params[stack][part], mine)}
    return params, metrics
