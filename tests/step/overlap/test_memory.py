"""How many collectives a ZeRO-3 step has, and how many bytes of gathered weights are alive: counted in its graph."""

from collections import Counter

import pytest

from fmegatron.model.weights import GROUPS
from fmegatron.step import Overlap
from fmegatron.step.overlap.gathers import units
from fmegatron.step.overlap.schedule import overlapped, planned_peak
from fmegatron.step.timelines.planned import launches
from tests.pairs import few
from tests.step.gathered import gathered_bytes, largest_unit_bytes
from tests.step.overlap.decoder import LAYERS, compiled, config, free
from tests.step.overlap.decoder import lowered as lowered_of

L = LAYERS
NONE = free(depth=0, late_reductions=False, bucket_bytes=0, join_ends=False)


def lowered(tied=False, reshard=None):
    """The lowered step of L layers."""
    if reshard is None:
        return lowered_of(config(L, tied=tied))
    return lowered_of(config(L, tied=tied), reshard=reshard)


def planned(graph) -> int:
    """The peak that the limit is about, of a graph that runs nowhere."""
    return planned_peak(graph, None)


def counted(module, setting) -> tuple[Counter, float]:
    """(starts by letter, most bytes of gathered weights at a time in units of the largest layer)."""
    graph = overlapped(module, setting).graph
    starts = Counter(name[0] for name in launches(graph).split() if name[0] in "GRA")
    return starts, gathered_bytes(graph) / largest_unit_bytes(module.graph)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("setting", "gathers", "scatters", "reductions", "layers"),
    [
        (NONE, 2 * L + 2, L + 2, 3, 2.0),  # while a layer is laid out, its buffer and its arrays
        (free(), 2 * L + 1, L + 1, 1, 2.0),  # the layer that runs, and the next one on its way
        (free(join_ends=False), 2 * L + 2, L + 2, 1, 2.0),
        (free(depth=2), 2 * L + 1, L + 1, 1, 3.0),
        (free(keep_last=True), 2 * L, L + 1, 1, 2.27),  # head and last layer, and the one before it on its way
    ],
    ids=lambda value: repr(value)[8:-1] if isinstance(value, Overlap) else None,
)
def test_by_default(setting, gathers, scatters, reductions, layers):
    starts, alive = counted(lowered(), setting)
    assert starts == Counter(G=gathers, R=scatters, A=reductions)
    assert alive == pytest.approx(layers, abs=0.05)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("tied", "reshard", "gathers", "scatters", "layers"),
    few(
        2,
        [
            (False, ("blocks",), 2 * L + 1, L + 1, 2.27),  # table and head in one gather; the head, 0.27, stays
            (False, (), L + 1, L + 1, L + 1.27),  # all of them, while the last one is laid out
            (True, None, 2 * L + 1, L + 1, 2.27),  # a tied table is kept: gathered once, reduced once
            (True, GROUPS, 2 * L + 2, L + 2, 2.0),
        ],
    ),
)
def test_groups_that_are_freed_or_kept(tied, reshard, gathers, scatters, layers):
    starts, alive = counted(lowered(tied, reshard), NONE)
    assert starts == Counter(G=gathers, R=scatters, A=3)  # the loss, the norms' gradients, the gradients' norm
    assert alive == pytest.approx(layers, abs=0.05)


def test_unknown_groups_are_refused():
    with pytest.raises(ValueError, match="reshard_after_forward: got 'layers', wanted names among blocks, embed, head"):
        compiled(None, reshard=("layers",))


@pytest.mark.medium
def test_a_layer_is_gone_after_its_use():
    """The order of the default graph: no gathered array is read after the layer that it was gathered for."""
    graph = overlapped(lowered(), free()).graph
    place = {n: i for i, n in enumerate(graph.nodes)}
    found = units(graph)
    for unit, after_next in zip(found, found[2:], strict=False):
        last = max(place[u] for n in unit.after for u in n.users)
        assert last < place[after_next.anchor]


def test_everything_that_is_alive():
    """Gathers that start early and waits that come late add at most a layer of weights and one of gradients."""
    without, with_overlap = (overlapped(lowered(), s).graph for s in (NONE, free()))
    assert planned(with_overlap) <= planned(without) + 2 * largest_unit_bytes(without)


def wide(save, vocab=1024):
    """The lowered step of 4 layers of some width; save: the layers' policy."""
    shape = {"dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 176, "max_seq": 32}
    return lowered_of(config(4, vocab_size=vocab, **shape), save=save)


@pytest.mark.slow
def test_where_memory_is_highest_overlap_gives_way():
    """With a large vocabulary the peak is at the loss, and behind it: there gathers wait for their turn, and the head's
    gradient does not travel while the last block computes."""
    lowered = wide("mincut")
    without_limit, limited = (overlapped(lowered, s).graph for s in (free(), free(peak=1.05)))
    before = planned(lowered.graph)
    assert planned(limited) <= 1.05 * before < planned(without_limit)
    assert launches(limited) == launches(without_limit).replace(
        "w:G4 G5 R0 w:G5 G6 B0 w:R0 R1 w:G6 G7 B1 w:R1 R2 w:G7 G8",
        "w:G4 R0 w:R0 G5 w:G5 G6 B0 R1 w:G6 B1 w:R1 R2 G7 w:G7 G8",
    )


@pytest.mark.slow
@pytest.mark.long
def test_where_it_is_highest_at_the_end_the_ends_part():
    """Where layers save only inputs the peak is where the gradients of all layers are stacked, which needs the first
    block's: joined with it, the shard of the embedding's gradient is there already."""
    lowered = wide("inputs")
    without = planned(lowered.graph)
    without_limit, limited = (overlapped(lowered, s).graph for s in (free(), free(peak=1.05)))
    assert planned(limited) <= 1.05 * without < planned(without_limit)
    starts = [Counter(name[0] for name in launches(graph).split()) for graph in (without_limit, limited)]
    assert [(s["G"], s["R"]) for s in starts] == [(9, 5), (9, 6)]
    joined = overlapped(lowered, free(depth=0, late_reductions=False)).graph  # nothing else than joins
    assert planned(joined) > 1.05 * without


@pytest.mark.medium
@pytest.mark.parametrize("save", ["mincut", "inputs"])
@pytest.mark.parametrize("vocab", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_the_limit_is_kept(save, vocab):
    """Of depth 1, wherever the peak is: at the loss, in the backward, at the stack of gradients."""
    lowered = wide(save, vocab)
    for limit in (1.0, 1.05, 1.1):
        assert planned(overlapped(lowered, free(peak=limit)).graph) <= limit * planned(lowered.graph)
