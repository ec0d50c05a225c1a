"""The quick plan: memory, traffic, work and time of a step by formulas over layouts, for any mesh, in O(1) of depth.

Memory is the largest of five moments of a microbatch: where the forward turns into the backward (all that blocks keep,
and the logits twice), in the first and in the last block of the backward, where gradients are stacked, and in the
optimizer. `exact` counts what these formulas estimate; docs/planning.md has how far they are apart.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron import model, tree
from fmegatron.layout import Layout, Mesh, data_parallel
from fmegatron.model import counts
from fmegatron.plan.by_stages import ByStages, by_stages
from fmegatron.plan.from_trace import in_host, in_mib
from fmegatron.plan.saved import block_bytes
from fmegatron.plan.setting import Setting, setting_of
from fmegatron.plan.traffic import sent_by_axes
from fmegatron.step import Description, Overlap
from fmegatron.step.passes import Target
from fmegatron.step.state import placements
from fmegatron.step.timelines import planned
from fmegatron.tree import structure

__all__ = ["Quick", "quick", "quick_of"]

_NO_DECODER = (
    "activations and logits, since describe(config) states no decoder whose parameters are those of the state: give it "
    "to the step.Description, as decoder=, where the step is that of model.loss; with adapters plan.exact counts them"
)
_INLINED = 4  # reads of a value that Inductor computes where it is used (its realize_reads_threshold)


@dataclass(frozen=True)
class Quick:
    """What a step takes on one rank, by formulas.

    state, batch: bytes at rest on the device; host: of the state in host memory; travels: what a step takes
    there and back, each way: that state, or, where it is updated there, gradients and parameters. moments: name ->
    bytes above state and batch; transient: the largest. sent: bytes that the rank sends in a step, by axes. flops: of
    the rank's part of a step, what is recomputed included; model_flops: without it. checkpoint: bytes of the whole
    state, written: this rank's share of them. unknown: what no formula counts. seconds: of the processor, that the plan
    took. unknown_memory: those
    of `unknown` that take memory; where there are any, `peak` is a lower bound, which can show that a step does not fit
    and never that it does. stages: on a mesh with pp what the actions of its table take; the rest is of one rank.
    """

    mesh: Mesh
    state: int
    batch: int
    moments: Mapping[str, int]
    sent: Mapping[str, int]
    calls: Mapping[str, int]
    flops: float
    model_flops: float
    optimizer_bytes: int
    elementwise_bytes: int
    checkpoint: int
    tokens: int
    unknown: tuple[str, ...] = ()
    seconds: float = 0.0
    unknown_memory: tuple[str, ...] = ()
    host: int = 0
    travels: int = 0
    stages: ByStages | None = None

    @property
    def transient(self) -> int:
        """Bytes above state and batch."""
        return max(self.moments.values())

    @property
    def peak(self) -> int:
        """Bytes of state, batch and transients together, on the device."""
        return self.state + self.batch + self.transient

    @property
    def written(self) -> int:
        """Bytes of a checkpoint that each rank writes: replicas share the duty."""
        return -(-self.checkpoint // self.mesh.size)

    def step_seconds(self, rates: planned.Rates | None = None) -> dict[str, float]:
        """Estimated seconds of a step by part, and in "total".

        Assumptions: products run at `rates.flops` whatever their shape; elementwise work, the optimizer and buffers
        move bytes at `rates.memory`; a rank sends its bytes at `rates.network`, whichever axis, after `rates.latency`
        for each call; nothing of it is hidden behind computation; all ranks have equal work; no data, no logging. On a
        mesh with pp "idle in the pipeline" is how long the rank waits for others on the clock of the table, whose
        actions take what their stages compute, move and send.
        """
        rates = rates or planned.Rates()
        parts = {
            "products": self.flops / rates.flops,
            "elementwise": self.elementwise_bytes / rates.memory,
            "optimizer": self.optimizer_bytes / rates.memory,
            "state from and to the host": self.travels / rates.host,
        }
        for axes, sent in self.sent.items():
            parts[f"sent over {axes}"] = sent / rates.network + self.calls.get(axes, 0) * rates.latency
        if self.stages is not None:
            parts["idle in the pipeline"] = self.stages.idle(rates)
        return {**parts, "total": sum(parts.values())}

    def __str__(self) -> str:
        at, most = max(self.moments.items(), key=lambda item: item[1])
        lines = [
            f"quick: {in_mib(self.peak)} on a rank of {self.mesh or 'one rank'}: state {in_mib(self.state)}, batch "
            f"{in_mib(self.batch)}, above them {in_mib(most)} ({at}){in_host(self.host)}",
            *(f"  {in_mib(value):>14s}  {name}" for name, value in self.moments.items()),
            f"  work       {self.flops:.3g} FLOP a step on this rank, {self.model_flops:.3g} of them the model's",
            *(
                f"  sent       {in_mib(sent)} over {axes}, in {self.calls.get(axes, 0)} calls"
                for axes, sent in self.sent.items()
            ),
            f"  checkpoint {in_mib(self.checkpoint)} in all, {in_mib(self.written)} of them written by each rank",
        ]
        return "\n".join(lines + [f"  not counted: {what}" for what in self.unknown])


def quick(described: Description, *, overlap: Overlap | bool = True) -> Quick:
    """`Quick` of a step, from what `describe(config)` gives; nothing is traced.

    Args:
        described: of a step of a decoder (`Description.decoder`); of another the state and the traffic of the weights
            are planned, and `unknown` says so. Its mesh has any size; with pp the plan is of the rank of it that needs
            most memory.
        overlap: as `jit` is given it.

    Raises ValueError for a state that is no State(step, params, opt), and for stages that do not go with the blocks.
    """
    setting = setting_of(described, overlap)
    ranks = range(setting.mesh["pp"]) if setting.pipeline is not None else (0,)
    found = [quick_of(setting, setting.mesh.rank(pp=i) if len(ranks) > 1 else 0) for i in ranks]
    return max(found, key=lambda one: one.peak)


def quick_of(setting: Setting, rank: int = 0) -> Quick:
    """`Quick` of a setting, on one of its ranks."""
    began = time.process_time()
    state, on_host = (_bytes_in(memory, setting, rank) for memory in (("device",), ("host", "host-update")))
    batch = 2 * 8 * setting.rows * setting.microbatches * setting.length
    sent, calls, unknown = sent_by_axes(setting)
    within = _sent_in_actions(setting, sent, calls)
    stages = by_stages(setting, rank, within)
    moments, more = _moments(setting, rank, stages)
    flops, model_flops = _flops(setting, stages)
    if stages is not None:
        sent, calls = _with_messages(setting, rank, stages, sent, calls)
    whole = sum(math.prod(layout.shape) * layout.dtype.itemsize for layout in tree.leaves(setting.state))
    params = sum(_nbytes(layout, rank) for layout in tree.leaves(setting.params))
    there = sum(_nbytes(layout, rank) for layout in tree.leaves(setting.params) if layout.on_host)
    updated_there = _bytes_in(("host-update",), setting, rank)
    # Parameters that are there are read in each forward and backward.
    travels = on_host - updated_there + (params - there if updated_there else 0) + 2 * setting.microbatches * there
    # State read and written, gradients read for the norm and for the update.
    moved = 2 * (state + on_host) + 2 * params
    return Quick(
        setting.mesh,
        state,
        batch,
        moments,
        sent,
        calls,
        flops,
        model_flops,
        moved,
        _elementwise(setting, stages),
        whole,
        setting.tokens,
        (*unknown, *more, *_without_products(setting)),
        time.process_time() - began,
        more,
        on_host,
        travels,
        stages,
    )


def _sent_in_actions(setting: Setting, sent: Mapping[str, int], calls: Mapping[str, int]) -> tuple[int, int]:
    """(bytes, calls) that a rank's actions of a pipeline send: over tp, and over axes where weights are gathered."""
    axes = [name for name in sent if name == "tp" or setting.strategy.params]
    return sum(sent[name] for name in axes), sum(calls.get(name, 0) for name in axes)


def _with_messages(
    setting: Setting, rank: int, stages: ByStages, sent: Mapping[str, int], calls: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes, calls) by axes with those over pp: messages, ends that are brought to their stages once a step, and the
    terms of their gradients."""
    found, count = stages.sent
    ways = setting.mesh["pp"]
    for layout in _brought(setting):
        whole = _nbytes(layout.without("pp"), rank)
        found += (whole + _nbytes(layout.without("pp"), rank, _wider(layout.dtype))) * (ways - 1) // ways
    return {**sent, "pp": found}, {**calls, "pp": count + 2}


def _brought(setting: Setting) -> list[Layout]:
    """Layouts of the parameters that pp splits otherwise than by layers: each stage that reads one has it in full."""
    stacks = () if setting.decoder is None else setting.decoder.stacks
    pairs = zip(tree.paths(setting.params), tree.leaves(setting.params), strict=True)
    return [
        layout
        for path, layout in pairs
        if "pp" in layout.sharded and not (path.partition("/")[0] in stacks and "pp" in layout.axes(0))
    ]


def _bytes_in(memory: tuple[str, ...], setting: Setting, rank: int) -> int:
    return sum(_nbytes(layout, rank) for layout in tree.leaves(setting.state) if layout.memory in memory)


def _nbytes(layout: Layout, rank: int, dtype: torch.dtype | None = None) -> int:
    return math.prod(layout.local_shape(rank)) * (dtype or layout.dtype).itemsize


def _copied(setting: Setting, rank: int) -> int:
    """Bytes on the device of parameters in host memory: the bucket that is used, and the next."""
    stacks, groups = setting.decoder.stacks if setting.decoder else {}, dict[str, int]()
    for path, layout in zip(tree.paths(setting.params), tree.leaves(setting.params), strict=True):
        name = path.partition("/")[0]
        if layout.on_host:
            layers = layout.shape[0] if name in stacks else 1
            groups[name] = groups.get(name, 0) + _nbytes(layout, rank) // max(1, layers)
    return 2 * max(groups.values(), default=0)


# ---- memory ----------------------------------------------------------------------------------------------------------
def _moments(setting: Setting, rank: int, stages: ByStages | None) -> tuple[dict[str, int], tuple[str, ...]]:
    """(name of a moment -> bytes above the state and the batch there, what no formula counts)."""
    placed = placements(setting.params, setting.strategy)
    waiting = 0
    if setting.microbatches > 1:
        waiting = sum(_nbytes(layout, rank, _wider(layout.dtype)) for layout in tree.leaves(placed.grads))
    sizes = dict(zip(tree.paths(placed.params), (_nbytes(x, rank) for x in tree.leaves(placed.params)), strict=True))
    grads, largest = sum(sizes.values()), max(sizes.values())
    late = sum(_nbytes(layout, rank) for layout in tree.leaves(placed.optim))
    # Of state in host memory that the device updates two buckets that were fetched, and what leaves one of them.
    streamed = 3 * min(_bytes_in(("host",), setting, rank), Target.host_bytes)
    # Where new weights are gathered, one at a time.
    moments = {"optimizer": late + streamed + (largest if late < grads else 0)}
    if setting.decoder is None:
        return moments, (_NO_DECODER,)
    if stages is not None:
        return {**_by_table(setting, rank, stages), **moments}, tuple(_unknown_of_microbatch(setting))
    in_blocks = [size for path, size in sizes.items() if path.partition("/")[0] in setting.decoder.stacks]
    stacked = max(grads, sum(in_blocks) + max(in_blocks, default=0), int(sum(in_blocks) * (1 + _terms(setting))))
    found, travelling, unknown = _of_microbatch(setting, sum(in_blocks))
    found = {name: size + _copied(setting, rank) for name, size in found.items()}
    found["gradients stacked"] = stacked
    if setting.overlap is not None:
        limit = None if setting.overlap.peak is None else int(setting.overlap.peak * max(found.values()))
        for name, more in travelling.items():
            found[name] += more if limit is None else max(0, min(more, limit - found[name]))
    if late < grads:  # they meet the shards that the optimizer has: what is sent, and what arrives
        found["gradients reduced"] = 2 * grads
    return {**{name: value + waiting for name, value in found.items()}, **moments}, unknown


def _by_table(setting: Setting, rank: int, stages: ByStages) -> dict[str, int]:
    """The moments of a pipeline: what its table holds, beside the sums of gradients and the ends where stages read
    them."""
    brought = {id(layout): layout for layout in _brought(setting)}
    own = [layout for layout in tree.leaves(setting.params) if id(layout) not in brought]
    sums = sum(_nbytes(layout, rank, _wider(layout.dtype)) for layout in own)
    ends = [layout.without("pp") for layout in brought.values()]
    # First and last stage read one end each; a rank that has neither keeps none of them.
    share = sum(stage in stages.held for stage in {0, len(stages.pipeline.stages) - 1}) / 2
    there = sum(_nbytes(layout, rank) + _nbytes(layout, rank, _wider(layout.dtype)) for layout in ends)
    held = sums + round(share * there)
    behind = sums + sum(_nbytes(layout, rank, _wider(layout.dtype)) for layout in ends)
    return {**{name: value + held for name, value in stages.moments.items()}, "ends summed over pp": behind}


def _unknown_of_microbatch(setting: Setting) -> Iterator[str]:
    """What no formula counts of the memory of a microbatch."""
    decoder = setting.decoder
    assert decoder is not None, "who asks has looked"
    for _, parts in _kinds(decoder):
        yield from block_bytes(
            parts, decoder, setting.rows, setting.length, setting.mesh["tp"], setting.save, 0
        ).unknown
    if setting.mesh.extent(data_parallel.SEQUENCE_AXES) > 1:
        yield "what attention holds of other ranks' keys over cp"
    yield from _without_formula(decoder)


def _terms(setting: Setting) -> float:
    """Bytes of what the sums of the blocks' gradients are made of, as a share of the sums, while these are stacked.

    A sum that is made on arrival (`Wire.exact`) of at most four terms is computed by Inductor where it is read, in the
    stack of all blocks, and for one block after another: until then the terms are kept. 0 for all other sums.
    """
    ways = setting.mesh.extent(setting.mesh.axes(setting.strategy.params))
    policy = None if setting.decoder is None else setting.decoder.policy
    if policy is None or not 1 < ways <= _INLINED:
        return 0.0
    wires = tree.leaves(policy.wires(setting.params))
    return max((ways * wire.reduce.itemsize / 4 for wire in wires if wire.exact and wire.reduce is not None), default=0)


def _of_microbatch(setting: Setting, grads: int) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """(moments of forward and backward, what is on its way there besides where overlap has no limit, what is unknown).

    grads: bytes of the blocks' gradients as parameters lie.
    """
    decoder, mesh = setting.decoder, setting.mesh
    assert decoder is not None, "who asks has looked"
    tp, T, number = mesh["tp"], setting.rows * setting.length, decoder.compute_dtype.itemsize
    gathers = any(mesh[name] > 1 for name in setting.strategy.params)
    cast = decoder.compute_dtype != decoder.param_dtype
    kept = works = least = layer = 0
    unknown: dict[str, None] = {}
    for (name, parts), count in _kinds(decoder).items():
        weights = _layer_numbers(setting.params[name], setting) * number
        one = block_bytes(parts, decoder, setting.rows, setting.length, tp, setting.save, weights)
        unknown |= dict.fromkeys(one.unknown)
        kept += count * (one.saved + one.result)
        works, least, layer = max(works, one.backward), max(least, one.saved + one.result), max(layer, weights)
    x, V = T * decoder.dim * number, decoder.padded_vocab // tp
    logits, head = T // decoder.loss_chunks * V * number, V * decoder.dim * number
    overlap = setting.overlap
    ordered = overlap is not None and overlap.reorders and gathers
    ahead = 2 * layer if overlap is not None and overlap.depth else 0
    sent = 2 * layer if overlap is not None and overlap.late_reductions else 0  # and what arrives
    weights = layer if gathers or cast else 0
    # Inductor, where it may order a graph, makes the head's gradient after the blocks: what it is made of waits.
    waits = (head if ordered else logits + x) + 2 * x
    if mesh.extent(data_parallel.SEQUENCE_AXES) > 1:
        unknown["what attention holds of other ranks' keys over cp"] = None
    unknown |= dict.fromkeys(_without_formula(decoder))
    first, last = "first block of the backward", "last block of the backward"
    moments = {
        "turn of the forward": kept + 2 * x + 2 * logits + (head if gathers or cast else 0),
        first: kept + works + weights + waits,
        last: least + waits + grads * (decoder.layers - 1) // decoder.layers + works + weights,
    }
    # At the first, the head's weights too, and its gradient where it arrives.
    travelling = {first: ahead + 2 * head, last: ahead + sent} if ordered else {}
    return moments, travelling, tuple(unknown)


def _without_formula(decoder: model.Decoder) -> Iterator[str]:
    """What options of a decoder keep beside the widths of its blocks."""
    parts = [part for block in decoder.blocks for part in block]
    if decoder.embed_dropout or any(part.dropout for part in parts):
        yield "what dropout keeps"
    if decoder.mtp is not None:
        yield "what multi-token prediction keeps"


def _kinds(decoder: model.Decoder) -> Counter[tuple[str, Any]]:
    """(stack, parts of a block) -> how many there are: equal blocks are looked at once."""
    stacks = {depth: name for name, stack in decoder.stacks.items() for depth in stack.depths}
    return Counter((stacks[depth], parts) for depth, parts in enumerate(decoder.blocks))


def _layer_numbers(layouts: structure.Tree, setting: Setting) -> int:
    """Numbers of one layer's weights, whole over the data axes, on a rank."""
    found = 0
    for layout in tree.leaves(layouts):
        whole = math.prod(layout.shape[1:])
        others = [name for name in layout.sharded if name not in setting.strategy.tokens]
        found += whole // layout.mesh.extent(tuple(others))
    return found


def _wider(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


# ---- work ------------------------------------------------------------------------------------------------------------
def _flops(setting: Setting, stages: ByStages | None) -> tuple[float, float]:
    """(FLOP of this rank's part of a step, those without recomputation)."""
    if setting.decoder is None:
        return 0.0, 0.0
    if stages is not None:
        mine = sum(stages.work["F"][a.stage].flops for a in stages.row if "F" in a.kind)
        return stages.total().flops, 3 * mine
    tokens = setting.rows * setting.microbatches * setting.length
    whole_length = setting.length * setting.mesh.extent(data_parallel.SEQUENCE_AXES)
    per_token = counts.flops_per_token(setting.decoder, whole_length)
    shared = setting.mesh["tp"]
    mine = tokens * per_token["total"] / shared
    again = (per_token["matmul"] + per_token["attention"]) / 3 * tokens / shared
    return mine + (again if setting.save == "inputs" else 0.0), mine


def _without_products(setting: Setting) -> tuple[str, ...]:
    """What `_flops` does not count."""
    parts = () if setting.decoder is None else dict.fromkeys(p for block in setting.decoder.blocks for p in block)
    unknown = [part.name for part in parts if part.mixer.products(setting.length, True) is None]
    return tuple(f"the work of {name!r} besides products with its arrays" for name in dict.fromkeys(unknown))


def _elementwise(setting: Setting, stages: ByStages | None) -> int:
    """Bytes that elementwise work reads and writes, roughly: three times what a backward that keeps all would read."""
    decoder = setting.decoder
    if decoder is None:
        return 0
    if stages is not None:
        return round(stages.total().moved)
    tp, total = setting.mesh["tp"], 0
    for (_, parts), count in _kinds(decoder).items():
        one = block_bytes(parts, decoder, setting.rows, setting.length, tp, "all", 0)
        total += count * 3 * one.saved
    logits = setting.rows * setting.length * decoder.padded_vocab // tp * decoder.compute_dtype.itemsize
    return setting.microbatches * (total + 5 * logits)
