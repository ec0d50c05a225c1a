"""What each strategy sends in a step of one and of three microbatches: what is reduced each time, and what once."""

from collections import Counter

import pytest

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.step import collectives_of, trace
from fmegatron.testing import split
from tests.pairs import few
from tests.step import strategies
from tests.step.strategies import STRATEGIES, make_config, make_step, specs_of

MESH = Mesh(dp=2, fsdp=2)


def sent(name, microbatches):
    """{(op, axes): bytes that a rank sends} of the decoder's step; scalars (loss, norm, counts) left out."""
    config, strategy = make_config(), STRATEGIES[name]
    step = make_step(config, MESH, strategy, microbatches, clip_norm=1.0)
    state = split(tree.init(specs_of(config, Mesh(), strategy), 0, 0), specs_of(config, MESH, strategy))[0]
    batch = split(strategies.batch_at(config, 0), strategies.batch_layouts(MESH))[0]
    total = Counter()
    for one in collectives_of(trace(step, (state, batch)).graph_module.graph, MESH):
        if one.nbytes > 16:
            total[one.op, "+".join(one.axes)] += one.sent
    return total


def whole_bytes():
    return sum(
        spec.layout.nbytes for spec in tree.leaves(specs_of(make_config(), MESH, STRATEGIES["replicated"]).params)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "wanted"),
    few(2, [
        # bytes that a rank sends, as shares of all parameters: (of one step, more for each microbatch after the first)
        ("replicated", {("psum", "dp+fsdp"): (3 / 2, 0)}),
        ("zero1", {("reduce_scatter", ...): (3 / 4, 0), ("all_gather", ...): (3 / 4, 0)}),
        ("zero2", {("reduce_scatter", ...): (3 / 4, 3 / 4), ("all_gather", ...): (3 / 4, 0)}),
        ("zero3", {("all_gather", ...): (3 / 4, 3 / 4), ("reduce_scatter", ...): (3 / 4, 3 / 4)}),
        ("hsdp", {("all_gather", "fsdp"): (1 / 2, 1 / 2), ("reduce_scatter", "fsdp"): (1 / 2, 1 / 2),
                  ("psum", "dp"): (1 / 2, 0)}),
        ("hybrid", {("all_gather", "fsdp"): (1 / 2, 1 / 2), ("reduce_scatter", "fsdp"): (1 / 2, 1 / 2),
                    ("reduce_scatter", "dp"): (1 / 4, 0), ("all_gather", "dp"): (1 / 4, 0)}),
    ], STRATEGIES),
)  # fmt: skip
def test_what_is_sent(name, wanted):
    """Without remat a microbatch gathers each parameter once; the tables A2 of the reference and section 5 of ZeRO."""
    one, three, whole = sent(name, 1), sent(name, 3), whole_bytes()
    for (op, axes), (first, more) in wanted.items():
        for got, share in ((one, first), (three, first + 2 * more)):
            found = sum(n for (o, a), n in got.items() if o == op and axes in (..., a))
            assert found == pytest.approx(share * whole, rel=1e-9), (op, axes, found / whole)
    for got in (one, three):
        assert {key for key in got if not any(op == key[0] and axes in (..., key[1]) for op, axes in wanted)} == set()
