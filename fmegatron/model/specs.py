"""The arrays of the decoder: their shapes, layouts and initial values."""

from __future__ import annotations

import math

from fmegatron import tree
from fmegatron.layout import DATA_AXES, DataParallel, Layout, Mesh, Rules, Split
from fmegatron.model.config import Config
from fmegatron.tree import ArraySpec, Constant, Normal

# Where tp splits the rows of a matrix, data axes split them further: their pieces follow each other in memory, so that
# gathers and reduce-scatters copy nothing.
RULES = Rules(
    [
        (r"embed/table", (("tp", "fsdp"),)),
        (r"blocks/attention/wqkv", (None, "fsdp", "tp")),
        (r"blocks/attention/wo", (None, ("tp", "fsdp"))),
        (r"blocks/mlp/w_gate_up", (None, "fsdp", "tp")),
        (r"blocks/mlp/w_down", (None, ("tp", "fsdp"))),
        (r"head/w", ("fsdp", "tp")),
        (r"blocks/\w+_norm|final_norm", ()),
    ]
)


def specs(config: Config, mesh: Mesh, rules: Rules = RULES, strategy: DataParallel | None = None) -> dict:
    """The tree of ArraySpecs of the model: shape, dtype, layout on `mesh`, initial values.

    strategy: over which data axes parameters are sharded at rest; every leaf is, vectors too, on the dim where the
    rules name a data axis, else on another one. Its axes may have other names than dp and fsdp, for which the rules'
    then stand. None: just as the rules say (fsdp shards matrices, dp nothing), except that a data axis that does not
    divide its dim goes to one that it divides.

    `rules` gives the axes of each leaf; dp, fsdp and tp count as size 1 where the mesh lacks them. Dims that hold
    several matrices side by side (q, k, v; gate, up) are interleaved here, so a rule only names the axis.
    Raises ValueError when a size does not divide by the axes that split it, naming leaf, size and fix, and when an axis
    of the mesh would do nothing.
    """
    config.check_mesh(mesh)
    D, L, F, V = config.dim, config.layers, config.ffn_dim, config.padded_vocab
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    meant = _meant(strategy)
    known = tuple(dict.fromkeys((*DATA_AXES, *meant.values(), "tp")))
    narrow, residual = Normal(0.02), Normal(0.02 / math.sqrt(2 * L))  # GPT-2's scaling of what is added to the stream

    def array(path, shape, init, parts=None):
        spec = tuple(_by_strategy(entry, meant) for entry in rules.match(path))
        if parts and len(spec) == len(shape) and (axes := spec[-1]) and not isinstance(axes, Split):
            spec = (*spec[:-1], Split(axes, parts))
        layout = Layout(shape, config.param_dtype, mesh, spec)
        stack = (0,) if path.startswith("blocks/") else ()
        if strategy is not None:  # the layer dim of a stack stays whole: a layer is gathered when it runs
            layout = strategy.params_layout(layout, whole=stack)
        elif not layout.is_even:
            layout = _moved_data_axes(layout, stack)
        for dim, (size, entry) in enumerate(zip(shape, layout.spec, strict=True)):
            pieces, ways = entry.sizes(size) if isinstance(entry, Split) else (size,), mesh.extent(layout.axes(dim))
            if any(piece % ways for piece in pieces):
                raise ValueError(
                    f"{path}: got dim {dim} of size {' + '.join(map(str, pieces))}, wanted a multiple of {ways} "
                    f"({'·'.join(layout.axes(dim))} of the mesh {mesh}); change size or mesh, or give a rule without it"
                )
        return ArraySpec(layout, init)

    blocks = {
        "attention_norm": array("blocks/attention_norm", (L, D), Constant(1.0)),
        "attention": {
            "wqkv": array("blocks/attention/wqkv", (L, D, q + 2 * kv), narrow, (q, kv, kv)),
            "wo": array("blocks/attention/wo", (L, q, D), residual),
        },
        "mlp_norm": array("blocks/mlp_norm", (L, D), Constant(1.0)),
        "mlp": {
            "w_gate_up": array("blocks/mlp/w_gate_up", (L, D, 2 * F), narrow, (F, F)),
            "w_down": array("blocks/mlp/w_down", (L, F, D), residual),
        },
    }
    out = {
        "embed": {"table": array("embed/table", (V, D), narrow)},
        "blocks": blocks,
        "final_norm": array("final_norm", (D,), Constant(1.0)),
    }
    out = out if config.tied else {**out, "head": {"w": array("head/w", (D, V), narrow)}}
    _check_every_axis_works(out, mesh, known)
    return out


def _meant(strategy: DataParallel | None) -> dict[str, str]:
    """For each data axis that rules may name the axis that the strategy has for it: of others the last for fsdp."""
    if strategy is None:
        return {name: name for name in DATA_AXES}
    free = [name for name in DATA_AXES if name not in strategy.axes]
    own = [name for name in strategy.axes if name not in DATA_AXES]
    return {name: name for name in strategy.axes} | dict(zip(reversed(free), reversed(own), strict=False))


def _moved_data_axes(layout: Layout, whole: tuple[int, ...]) -> Layout:
    """The layout with its data axes on a dim that they divide, where they do not divide that of the rule."""
    axes = tuple(name for name in DATA_AXES if name in layout.sharded)
    moved = DataParallel(axes, axes, axes, axes).params_layout(layout, whole) if axes else layout
    return moved if set(moved.sharded) == set(layout.sharded) and not moved.flat else layout


def _check_every_axis_works(specs: dict, mesh: Mesh, known: tuple[str, ...]) -> None:
    """ValueError for an axis that splits neither the model nor the batch: its ranks would all do the same work."""
    used = {*known, *(name for spec in tree.leaves(specs) for name in spec.layout.sharded)}
    if idle := [name for name in mesh.names if mesh[name] > 1 and name not in used]:
        raise ValueError(
            f"mesh {mesh}: got the axis {idle[0]!r}, which splits no array of the model and no batch, wanted each axis "
            f"to split one, or its {mesh[idle[0]]} ranks would repeat each other's work; name it {', '.join(known)}, "
            "give a strategy over it, or a rule that uses it"
        )


def layouts(config: Config, mesh: Mesh, rules: Rules = RULES, strategy: DataParallel | None = None) -> dict:
    """The tree of Layouts of the model on `mesh` (see `specs`)."""
    return tree.layouts(specs(config, mesh, rules, strategy))


def init(config: Config, mesh: Mesh, key: int, rank: int = 0, rules: Rules = RULES) -> dict:
    """This rank's shards of the initial parameters; the global arrays depend on `key` only, not on mesh or rank.

    Args:
        config: of the model.
        mesh: of all ranks.
        key: of the random values (`tree.fold_in`).
        rank: whose shards.
        rules: how the dims of each leaf are split.
    """
    return tree.init(specs(config, mesh, rules), key, rank)


def _by_strategy(entry, meant: dict[str, str]):
    """A rule's entry for one dim, by the names that the strategy has for the data axes."""
    axes = entry.names if isinstance(entry, Split) else (entry,) if isinstance(entry, str) else entry or ()
    axes = tuple(meant.get(name, name) for name in axes)
    return Split(axes, entry.parts) if isinstance(entry, Split) else axes
