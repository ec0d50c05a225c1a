"""Evaluation on a mesh with pp: the forwards of the stages alone, of uneven stages and of a V."""

import pytest
import torch

from fmegatron import model, optim, step, tree
from fmegatron.layout import Mesh
from fmegatron.step.pipeline import schedules
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error

F64, ROWS, M = torch.float64, 8, 4


def llama(**changes):
    how = {"vocab_size": 60, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "max_seq": 16, "vocab_multiple": 8}
    return model.llama(**{"layers": 3, **how, "param_dtype": F64, "compute_dtype": F64, **changes})


def evaluated(decoder, mesh, microbatches):
    value = model.build(decoder, optim.adamw(1e-2), mesh, (ROWS, decoder.max_seq), microbatches=microbatches, save=None)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, decoder.vocab_size, (ROWS, decoder.max_seq + 1), generator=g)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    batch["labels"][:3, 2:9] = -1  # rows of different counts
    params = tree.init(model.specs(decoder, Mesh()), 7, 0)
    state = step.State(torch.zeros((), dtype=torch.int64), params, optim.adamw(1e-2).init(params))
    layouts = (tree.layouts(value.state), tree.layouts(value.batch))
    sim = simulate(value.evaluate, mesh, state, batch, layouts=layouts)
    return sim.globals(), value, layouts


@pytest.mark.slow
@pytest.mark.parametrize("how", ["uneven", "a V"])
def test_the_loss_of_held_out_rows(how):
    if how == "uneven":
        decoder, mesh, pipeline = llama(), Mesh(pp=2, fsdp=2), step.Pipeline(schedules.one_f_one_b(2, M), (2, 1))
    else:
        decoder, mesh = llama(layers=5, tied=True), Mesh(pp=2)
        pipeline = step.Pipeline(schedules.zb_v(2, M), (1, 2, 1, 1))
    found, value, layouts = evaluated(decoder, mesh, pipeline)
    wanted, _, _ = evaluated(decoder, Mesh(), 1)
    assert found.keys() == wanted.keys()
    assert max(relative_error(wanted[name], found[name]) for name in wanted) < 1e-12
    assert step.check(value.evaluate, *layouts).ok
