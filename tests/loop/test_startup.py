"""The arithmetic that a run prints before it starts."""

import numpy as np
import pytest
import torch

from fmegatron import data, tree
from fmegatron.collectives import World
from fmegatron.layout import Layout, Mesh
from fmegatron.loop.reading import reading_of
from fmegatron.loop.startup import startup

MESH = Mesh(fsdp=2, tp=2)
LAYOUTS = {
    "w": Layout((8, 6), torch.float32, MESH, ("fsdp", "tp")),
    "norm": Layout((8,), torch.bfloat16, MESH),
}


def tokens(rows, length, **axes):
    """The layout of a batch whose rows dp splits, and whose sequences cp."""
    return Layout((rows, length), torch.int64, Mesh(**{"dp": 1, "cp": 1} | axes), ("dp", "cp"))


def test_arithmetic():
    text = startup(LAYOUTS, tokens(16, 32, dp=2), steps=100, start=40, microbatches=4)
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines()}
    assert lines["mesh"] == "fsdp2·tp2: 4 ranks"
    assert lines["parameters"] == "56 in 2 leaves, 64 B of them on a rank"  # 4 x 3 fp32 and 8 bf16
    assert lines["batch"].startswith("16 x 32 = 512 tokens per step; 2 x 32 per rank and microbatch")
    assert lines["steps"] == "40 to 100: 30,720 tokens"
    assert lines["FLOPs"] == f"{6 * 56 * 512:.3g} per step, {6 * 56 * 512 * 60:.3g} in all"
    assert "1e+03 per step" in startup(LAYOUTS, tokens(2, 5), steps=1, flops_per_token=100)
    assert "; 16 x 16 per rank" in startup(LAYOUTS, tokens(16, 32, cp=2), steps=1)

    text = startup(LAYOUTS, tokens(16, 32), steps=30, start=40)
    assert "steps        40 to 40: 0 tokens (more than the 30 that were asked for are done)" in text
    assert "per step, 0 in all" in text


@pytest.mark.parametrize("after", [0, 3, 5, 20])
def test_tokens_of_batches_that_grow(after):
    """What all updates read, whatever the size of the first batch, and of a run that goes on behind a change."""
    batches, sizes = data.Batches(np.arange(9000) % 256, 2, 8, seed=0), ((0, 2), (5, 8), (12, 4))
    reading = reading_of(batches, {"w": tree.ArraySpec(LAYOUTS["norm"])}, World.alone(), sizes, ((3, 9),))
    begun = reading.begin(None, after)
    want = [begun.tokens(step) for step in range(after + 1, 21)]
    assert begun.all_tokens(20) == sum(want) and begun.all_tokens(0) == 0
    first = begun.course.pieces[0][1]
    text = startup(LAYOUTS, tokens(first.batch_size, 8), steps=20, start=after, in_all=begun.all_tokens(20))
    assert f"to 20: {sum(want):,} tokens" in text and f"{6 * 56 * sum(want):.3g} in all" in text


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(ValueError, match="batch_size: got 6, wanted a multiple of 4 .* try 8"):
        startup(LAYOUTS, tokens(6, 32, dp=2), steps=1, microbatches=2)
