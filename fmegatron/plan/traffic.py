"""What a rank sends in a step, by formulas: weights and gradients over data axes, activations over tp; by axes."""

from __future__ import annotations

from fmegatron import tree
from fmegatron.layout import data_parallel
from fmegatron.plan.setting import Setting
from fmegatron.step import costs

__all__ = ["sent_by_axes"]


def sent_by_axes(setting: Setting) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """(bytes, calls, what no formula counts) of a step on one rank: bytes and calls by axes, "fsdp" or "dp+fsdp".

    Weights: `step.least_transfers`; the leaves of a block, and those of its gradients, travel in one call. Over tp a
    block's parts send what a psum forward and one backward do, an all-gather and a reduce-scatter each with sequence
    parallelism. Left out: sums of losses, norms and router statistics, a few bytes each.
    """
    sent: dict[str, int] = {}
    calls: dict[str, int] = {}
    mesh, decoder = setting.mesh, setting.decoder
    policy = None if decoder is None else decoder.policy
    wires = (
        None
        if policy is None
        else dict(zip(tree.paths(setting.params), tree.leaves(policy.wires(setting.params)), strict=True))
    )
    freed = ("blocks", "embed", "head") if setting.freed is None else setting.freed
    again = 2 if "blocks" in freed and (decoder is None or setting.save is not None) else 1
    of_layout = dict(zip(map(id, tree.leaves(setting.params)), tree.paths(setting.params), strict=True))

    def gathered(layout):
        wire = None if wires is None else wires[of_layout[id(layout)]]
        return layout.dtype if wire is None or wire.gather is None else wire.gather

    def reduced(layout):
        wire = None if wires is None else wires[of_layout[id(layout)]]
        return (
            (gathered(layout) if setting.strategy.params else layout.dtype)
            if wire is None or wire.reduce is None
            else wire.reduce
        )

    stacks = {} if decoder is None else {name: len(stack.depths) for name, stack in decoder.stacks.items()}
    if decoder is not None and mesh["pp"] > 1:  # of a rank's layers, in the mean
        stacks = {name: max(1, n // mesh["pp"]) if name != "mtp" else n for name, n in stacks.items()}
    # By stages gradients are reduced behind the table, once, but for what is gathered where it is read, or by actions.
    times = setting.microbatches if mesh["pp"] == 1 or setting.strategy.params else 1
    gathers, reductions = (0, 0) if setting.pipeline is None else setting.pipeline.table.moves
    runs = {"gather": gathers, "reduce": reductions}
    together: dict[tuple, int] = {}
    for one in costs.least_transfers(
        setting.params,
        setting.strategy,
        times,
        gathers=lambda path: again if path.partition("/")[0] in stacks else 1,
        gather_dtype=gathered,
        reduce_dtype=reduced,
    ):
        over = tuple(name for name in one.over if mesh[name] > 1)
        if not over or not one.nbytes:
            continue
        name, count = "+".join(over), min(one.times, runs.get(one.kind) or one.times)
        sent[name] = sent.get(name, 0) + one.nbytes // one.times * count
        group = one.path.partition("/")[0]
        layers = stacks.get(group, 1) if one.kind == "gather" or setting.strategy.params else 1
        together[group, one.kind, name] = count * layers
    for (_, _, name), count in together.items():
        calls[name] = calls.get(name, 0) + count
    unknown = _over_tp(setting, sent, calls)
    return sent, calls, unknown


def _over_tp(setting: Setting, sent: dict[str, int], calls: dict[str, int]) -> tuple[str, ...]:
    """Add what activations send over tp -> what is not counted."""
    mesh, decoder = setting.mesh, setting.decoder
    unknown = []
    if mesh.extent(data_parallel.SEQUENCE_AXES) > 1:
        unknown.append("what attention sends over cp")
    if decoder is None:
        if mesh["tp"] > 1:
            unknown.append("what activations send over tp: the loss is not model.loss")
        return tuple(unknown)
    mixers = dict.fromkeys(part.mixer for parts in dict.fromkeys(decoder.blocks) for part in parts)
    unknown += dict.fromkeys(what for mixer in mixers for what in mixer.sends(mesh))
    n = mesh["tp"]
    if n == 1:
        return tuple(unknown)
    tokens = setting.rows * setting.length * setting.microbatches
    once = 2 * tokens * decoder.dim * decoder.compute_dtype.itemsize * (n - 1) // n
    parts = sum(map(len, decoder.blocks))
    parts = max(1, parts // mesh["pp"])
    sums = 2 * parts + 2  # forward and backward of each part, of the embedding, of the head's gradient
    if setting.save == "inputs":
        sums += parts - len(decoder.blocks)  # made again for the backward, but for the last of a block
    sent["tp"] = sent.get("tp", 0) + sums * once + 2 * (n - 1) * 3 * tokens * 4 // n
    calls["tp"] = calls.get("tp", 0) + setting.microbatches * (sums + 2)
    return tuple(unknown)
