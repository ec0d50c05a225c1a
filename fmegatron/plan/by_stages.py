"""A pipeline by formulas: what its actions take on each stage, on the clock of the table, and what a rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fmegatron import model, tree
from fmegatron.layout import data_parallel
from fmegatron.plan.saved import block_bytes
from fmegatron.plan.setting import Setting
from fmegatron.step import Pipeline
from fmegatron.step.timelines import planned

__all__ = ["ByStages", "Work", "by_stages"]

_KINDS = ("F", "B", "W")


@dataclass(frozen=True)
class Work:
    """What an action takes: FLOP of products, bytes that elementwise work moves, bytes sent within it, in calls."""

    flops: float = 0.0
    moved: float = 0.0
    sent: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(self)))

    def seconds(self, rates: planned.Rates) -> float:
        """As `Quick.step_seconds` assumes."""
        return (
            self.flops / rates.flops
            + self.moved / rates.memory
            + self.sent / rates.network
            + self.calls * rates.latency
        )


@dataclass(frozen=True)
class ByStages:
    """A pipeline, seen by one of its ranks.

    work[kind][stage]: of an action. message: bytes of an activation between stages. moments: kind of action -> the most
    bytes that the rank holds while one of these runs, sums of gradients apart.
    """

    pipeline: Pipeline
    rank: int
    work: Mapping[str, tuple[Work, ...]]
    message: int
    moments: Mapping[str, int]

    def costs(self, rates: planned.Rates) -> dict[str, float | tuple[float, ...]]:
        """What its actions take at these rates, in seconds, as `Pipeline.clock` is given it."""
        kinds = {kind: tuple(one.seconds(rates) for one in found) for kind, found in self.work.items()}
        return {**kinds, "send": rates.latency + self.message / rates.network}

    def idle(self, rates: planned.Rates) -> float:
        """Seconds of a step in which the rank waits for others."""
        return self.pipeline.clock(self.costs(rates)).idle[self.rank]

    @property
    def row(self) -> tuple[Any, ...]:
        """The actions of the rank."""
        return self.pipeline.table.rows[self.rank]

    @property
    def held(self) -> tuple[int, ...]:
        """The stages of the rank."""
        return self.pipeline.table.held(self.rank)

    @property
    def sent(self) -> tuple[int, int]:
        """(bytes, calls) of the rank's messages in a step."""
        calls = sum(one.source == self.rank for one in self.pipeline.messages)
        return calls * self.message, calls

    def total(self) -> Work:
        """Of all actions of the rank."""
        found = Work()
        for action in self.row:
            for kind in action.kind:
                found += self.work[kind][action.stage]
        return found


def by_stages(setting: Setting, rank: int, sent: tuple[float, float]) -> ByStages | None:
    """The pipeline of a setting, of one rank of its mesh; None where there is none, or no decoder whose blocks it has.

    sent: (bytes, calls) that the rank's actions send over other axes in a step, all together: of each action as much.
    """
    decoder, pipeline = setting.decoder, setting.pipeline
    if decoder is None or pipeline is None:
        return None
    place = setting.mesh.index(rank, ("pp",))
    row = pipeline.table.rows[place]
    count, table = sum(len(action.kind) for action in row), {(a.kind, a.stage) for r in pipeline.table.rows for a in r}
    each = Work(sent=sent[0] / count, calls=sent[1] / count)
    stages, begin = [], 0
    for size in pipeline.stages:
        stages.append(decoder.blocks[begin : begin + size])
        begin += size
    work = {kind: [Work() for _ in stages] for kind in _KINDS}
    apart = {kind: [each if (kind, n) in table else Work() for n in range(len(stages))] for kind in "GR"}
    whole = list[tuple[int, int]]()
    live, left, during = [], [], {kind: [] for kind in _KINDS}
    x = _activation(setting, decoder)
    for stage, blocks in enumerate(stages):
        last = stage + 1 == len(stages)
        for kind, of_stage in zip(_KINDS, _work(setting, decoder, blocks, last), strict=True):
            work[kind][stage] = of_stage + each
        kept, between, most, all_of_it = _bytes_of(setting, decoder, blocks, ("G", stage) in table)
        whole.append(all_of_it)
        logits = _logits(setting, decoder) if last else 0
        live.append(kept + x + (logits + x if last else 0))
        left.append(kept + x + between + (logits + x if last else 0))
        for kind, of_kind in zip(_KINDS, most, strict=True):
            during[kind].append(of_kind + x + 2 * logits * (kind != "W"))
    moments = _moments(pipeline.table, place, live, left, during, whole)
    return ByStages(pipeline, place, {k: tuple(v) for k, v in (work | apart).items()}, x, moments)


def _moments(
    table: Any,
    rank: int,
    live: list[int],
    left: list[int],
    during: Mapping[str, list[int]],
    whole: list[tuple[int, int]],
) -> dict[str, int]:
    """Kind of action -> the most that is held while one runs, with what it works with. whole: of each stage what its G
    makes, and the sums that its R reduces."""
    held: dict[Any, int] = {}
    most = dict.fromkeys((f"{kind} of the table" for kind in _KINDS), 0)
    last, row = table.ends_of_gathers(rank), table.rows[rank]
    sums = {action.stage for action in row if action.kind == "R"}
    for action in row:
        key = action.stage, action.microbatch
        for kind in action.kind:
            if kind == "G":
                held["G", action.stage] = whole[action.stage][0]
                continue
            if kind == "R":
                held.pop(("R", action.stage), None)
                continue
            if kind == "W" and action.stage in sums:
                held["R", action.stage] = whole[action.stage][1]
            if kind in "FB":
                held[key] = (live if kind == "F" else left)[action.stage]
            name = f"{kind} of the table"
            most[name] = max(most[name], sum(held.values()) + during[kind][action.stage])
            if kind == "W":
                del held[key]
        if action in last:
            del held["G", action.stage]
    return most


def _activation(setting: Setting, decoder: model.Decoder) -> int:
    """Bytes of what goes from stage to stage, of a microbatch."""
    tp = setting.mesh["tp"] if decoder.sequence_parallel else 1
    return setting.rows * setting.length * decoder.dim * decoder.compute_dtype.itemsize // tp


def _logits(setting: Setting, decoder: model.Decoder) -> int:
    tokens = setting.rows * setting.length
    return tokens // decoder.loss_chunks * decoder.padded_vocab // setting.mesh["tp"] * decoder.compute_dtype.itemsize


def _work(setting: Setting, decoder: model.Decoder, blocks: Any, last: bool) -> tuple[Work, Work, Work]:
    """Of F, B and W of a stage, of one microbatch. B has both gradients of products of values with values, as these
    have no weights; and what is computed again."""
    tokens, tp = setting.rows * setting.length, setting.mesh["tp"]
    whole_length = setting.length * setting.mesh.extent(data_parallel.SEQUENCE_AXES)
    weights = products = moved = 0.0
    for parts in blocks:
        for part in parts:
            arrays = tree.leaves(part.mixer.arrays(decoder.dim))
            weights += 2 * sum(math.prod(array.shape) * array.used for array in arrays if len(array.shape) > 1)
            products += part.mixer.products(whole_length, True) or 0.0
        moved += block_bytes(parts, decoder, setting.rows, setting.length, tp, "all", 0).saved
    head = 2 * decoder.dim * decoder.padded_vocab if last else 0
    again = weights + products if setting.save == "inputs" else 0.0
    of_loss = 5 / 3 * _logits(setting, decoder) * decoder.loss_chunks if last else 0.0
    flops = (weights + products + head, weights + 2 * products + head + again, weights + head)
    found = [Work(per_token * tokens / tp, moved + of_loss) for per_token in flops]
    return found[0], found[1], found[2]


def _bytes_of(
    setting: Setting, decoder: model.Decoder, blocks: Any, gathered: bool
) -> tuple[int, int, tuple[int, int, int], tuple[int, int]]:
    """Of a microbatch on a stage: (kept from F to W, kept from B to W beside it, what F, B and W work with); and its
    whole weights, and their gradients in fp32, where actions of their own gather and reduce these."""
    tp, number = setting.mesh["tp"], decoder.compute_dtype.itemsize
    per_token = setting.rows * setting.length * number
    gathers = any(setting.mesh[name] > 1 for name in setting.strategy.params)
    kept = between = forward = backward = layer = every = 0
    wide = decoder.dim / (tp if decoder.sequence_parallel and tp > 1 else 1)
    for parts in dict.fromkeys(blocks):
        count = sum(other == parts for other in blocks)
        one = block_bytes(parts, decoder, setting.rows, setting.length, tp, setting.save, 0)
        widths = [w for part in parts if (w := part.mixer.widths(wide, tp, number)) is not None]
        of_gradients = round(sum(w.backward for w in widths) * per_token)
        kept += count * (one.saved + one.result)
        between += count * of_gradients
        forward, backward = max(forward, one.forward - one.saved), max(backward, one.backward)
        arrays = [a for part in parts for a in tree.leaves(part.mixer.arrays(decoder.dim)) if len(a.shape) > 1]
        layer = max(layer, sum(math.prod(array.shape) for array in arrays) * number // tp)
        every += count * sum(math.prod(array.shape) for array in arrays) // tp
    made = gathers or decoder.compute_dtype != decoder.param_dtype
    weights = layer if made and not gathered else 0
    whole = every * number * made, every * max(4, number) * gathers
    return kept, between, (forward + weights, backward + weights, layer + weights), whole
