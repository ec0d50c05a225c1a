"""Models with dropout or router noise, and the same without: what is random in training is never so in silence."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fmegatron import tree
from fmegatron.model.decoder import Block, Decoder
from fmegatron.model.mixer import Mixer

__all__ = ["deterministic", "require_samples"]


def deterministic(decoder: Decoder) -> Decoder:
    """The model with all rates of dropout and noise 0: in training too it is what is evaluated."""
    mtp = decoder.mtp and dataclasses.replace(decoder.mtp, block=_quiet(decoder.mtp.block))
    return dataclasses.replace(decoder, blocks=tuple(map(_quiet, decoder.blocks)), mtp=mtp, embed_dropout=0.0)


def _quiet(parts: Block) -> Block:
    return tuple(dataclasses.replace(part, dropout=0.0, mixer=_still(part.mixer)) for part in parts)


def _still(mixer: Mixer) -> Mixer:
    found = mixer.without_rates()
    if left := [name for name, rate in found.rates.items() if rate]:
        raise ValueError(
            f"{type(mixer).__name__}.without_rates: got {left[0]}={found.rates[left[0]]}, wanted all rates 0; write it "
            "where rates are no fields of the dataclass"
        )
    return found


def require_samples(decoder: Decoder, params: dict, samples_B: Tensor | None) -> None:
    """ValueError where a gradient is taken of a model with rates, and nothing says whether they count."""
    if samples_B is not None or not any(p.requires_grad for p in tree.leaves(params)):
        return
    for name, rate in _rates(decoder):
        if rate:
            raise ValueError(
                f"{name}: got {rate} in a loss with a gradient and without samples, wanted to know whether it counts; "
                "to train with it give build_train_step(..., with_sample_ids=True) and model.loss(..., "
                "samples=samples), to train without it model.deterministic(decoder)"
            )


def _rates(decoder: Decoder) -> list[tuple[str, float]]:
    """(field, rate) of all that may be random."""
    found = [("Decoder.embed_dropout", decoder.embed_dropout)]
    for parts in (*decoder.blocks, *(() if decoder.mtp is None else (decoder.mtp.block,))):
        for part in parts:
            found.append(("Part.dropout", part.dropout))
            found += [(f"{type(part.mixer).__name__}.{name}", rate) for name, rate in part.mixer.rates.items()]
    return found
