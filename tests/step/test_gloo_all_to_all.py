"""On gloo gathers and reduce-scatters run as exchanges: the same bytes and the same values, and starts where they were.

That values are the same is what every run on real ranks shows (`tests/step/test_compiled.py`, `tests/step/overlap`).
"""

import itertools
import re

import pytest
import torch

from fmegatron.collectives import Axes, all_gather, connect, reduce_scatter
from fmegatron.layout import Mesh
from fmegatron.step import Overlap, collectives_of, jit
from fmegatron.step.gloo_all_to_all import exchanged
from fmegatron.step.timelines.planned import PaperWorld, launched, launches
from fmegatron.step.traffic import bytes_sent
from tests.pairs import few
from tests.step.overlap.decoder import FSDP, POLICIES, compiled, config

MESH = Mesh(fsdp=4)
NATIVE = re.compile(r"all_gather_into_tensor|reduce_scatter_tensor")


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "overlap"),
    [(None, None), (None, Overlap()), *few(1, itertools.product(["bf16", "sums in bf16"], [None, Overlap()]))],
    ids=lambda value: "overlap" if isinstance(value, Overlap) else str(value),
)
def test_same_bytes_in_the_same_places(policy, overlap):
    stages = compiled(overlap, config(precision=POLICIES[policy]) if policy else None).stages
    before, after = stages["overlap"].graph, stages["exchange"].graph
    assert NATIVE.search(str(before)) and not NATIVE.search(str(after))
    sent = [bytes_sent(collectives_of(graph, FSDP)) for graph in (before, after)]
    assert sent[0] == sent[1]
    assert launches(before) == launches(after)
    assert list(dict.fromkeys(launched(after))) == [name for name in launches(before).split() if name[0] in "GRAX"]


def test_libraries_that_do_both_well_keep_them():
    lowered = compiled().stages["overlap"]
    assert exchanged(lowered, PaperWorld(FSDP, device="cuda")) is lowered
    assert exchanged(lowered, None) is lowered


def sums_and_wholes(rank, dtype):
    """What a reduce-scatter and a gather give on this rank, eager and compiled."""
    with connect(MESH) as world:
        fsdp = Axes(MESH)["fsdp"]

        def both(x):
            return reduce_scatter(x, fsdp, 0), all_gather(x, fsdp, 1)

        x = (torch.arange(24).reshape(8, 3) * (rank + 1)).to(dtype)
        step = jit(both, world=world, backend="eager")
        return [y.float() for y in step(x)], str(step.graph("exchange"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_values(ranks, dtype):
    found = ranks.run(sums_and_wholes, dtype, ranks=4)
    wholes = [(torch.arange(24).reshape(8, 3) * (rank + 1)).to(dtype).float() for rank in range(4)]
    for rank, ((total, whole), graph) in enumerate(found):
        assert "all_to_all_single" in graph and not NATIVE.search(graph)
        assert torch.equal(total, sum(wholes)[2 * rank : 2 * rank + 2])  # small whole numbers: exact in 8 bits too
        assert torch.equal(whole, torch.cat(wholes, 1))
