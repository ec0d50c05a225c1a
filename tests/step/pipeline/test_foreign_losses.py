"""Penalties beside shared parameters, gradients of shared tables through linear ops, what pairs of actions send, rows
of an evaluation beside data axes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fmegatron import data, model, optim, step, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.loop.experiment import load_experiment
from fmegatron.loop.reading import own_part
from fmegatron.step.pipeline import schedules
from fmegatron.testing import simulate

F64 = torch.float64


def trunk(params, batch, each):
    """Blocks with what `each` (n, x, output) makes of them."""
    x = batch["x"] @ params["first"]
    for n, w in enumerate(params["blocks"].unbind()):
        x = step.stage(x, n)
        x = each(n, x, x + torch.tanh(x @ w))
    return step.mean((x - batch["y"]).square().sum(), float(x.numel()))


def half_penalized(params, batch):
    """Half of a leaf is read by late stages alone, the other by a penalty."""
    used, other = params["table"].chunk(2)
    lm = trunk(params, batch, lambda n, x, y: y + used[0] if n > 1 else y)
    return {"lm": lm, "penalty": step.mean((other * batch["x"].sum()).sum(), float(len(batch["x"])))}


def through_softmax(params, batch):
    rows = params["table"].softmax(-1)
    return trunk(params, batch, lambda n, x, y: y * rows[n])


def through_cumsum(params, batch):
    rows = params["table"].cumsum(0).roll(1, 0).tril()
    return trunk(params, batch, lambda n, x, y: y + rows[n])


def values_of(loss_fn, mesh, pipeline):
    g = torch.Generator().manual_seed(0)
    shapes = {"first": (3, 4), "blocks": (4, 4, 4), "table": (4, 4)}
    params: dict[str, Tensor] = {name: torch.randn(s, generator=g, dtype=F64) / 2 for name, s in shapes.items()}
    batch = {"x": torch.randn(8, 3, generator=g, dtype=F64), "y": torch.randn(8, 4, generator=g, dtype=F64)}
    layouts = {name: Layout(s, F64, mesh) for name, s in shapes.items()}
    if mesh["pp"] == 4:
        layouts["blocks"] = layouts["blocks"].replace(spec=("pp", None, None))
    f = step.accumulate(loss_fn, 4) if pipeline is None else step.pipelined(loss_fn, pipeline)
    (loss, _), grads = simulate(f, mesh, params, batch, layouts=(layouts, None), out_layouts=(None, layouts)).globals()
    return [loss, *tree.leaves(grads)]


@pytest.mark.long
@pytest.mark.parametrize("loss_fn", [half_penalized, through_softmax, through_cumsum])
def test_shared_parameters(loss_fn):
    one = values_of(loss_fn, Mesh(), None)
    for x, y in zip(one, values_of(loss_fn, Mesh(pp=4), 4), strict=True):  # their number alone is 1F1B
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_what_a_pair_sends_is_there_behind_both_actions():
    one = values_of(through_softmax, Mesh(), None)
    pipeline = step.Pipeline(schedules.dualpipe_v(2, 4), (1, 1, 1, 1))
    assert pipeline.table.pairs
    for x, y in zip(one, values_of(through_softmax, Mesh(pp=2), pipeline), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axis", ["dp", "fsdp"])
def test_rows_of_an_evaluation_by_stages_are_cut_as_those_of_the_step(axis):
    mesh = Mesh(pp=2, **{axis: 2})
    value = model.build(
        model.llama(100, 8, 2, 2, 2, 8, 4), optim.adamw(1e-3), mesh, (8, 4), strategy="zero3", microbatches=2
    )
    held_out = data.EvaluationBatches(torch.arange(100).numpy(), 8, 4)
    found = [own_part(held_out, value, rank).at(0)["tokens"] for rank in range(4)]
    whole, layout = torch.as_tensor(held_out.at(0)["tokens"]), value.batch["tokens"]
    for rank, rows in enumerate(found):
        wanted = torch.cat([whole[s.start : s.start + s.length] for s in layout.segments(rank, 0)])
        assert torch.equal(torch.as_tensor(rows), wanted), rank


@pytest.mark.slow
def test_averaged_weights_are_evaluated_by_stages():
    kind, describe = load_experiment(str(Path(__file__).parents[3] / "experiments" / "mixer.py"))
    value = describe(kind(mesh=Mesh(pp=2, fsdp=2), dim=8, layers=2, seq_len=8, batch_size=8, microbatches=2))
    assert step.check(value.evaluate, tree.layouts(value.state), tree.layouts(value.batch)).ok
