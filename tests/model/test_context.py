"""Decoders over a sequence that cp splits equal one rank, loss and each gradient, fp64, 1e-10; check proves it."""

import pytest
import torch

from fmegatron import data, model, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.nn.context_parallel import zigzag
from fmegatron.testing import assert_parity, split
from tests.model.test_reference import leaves_that_differ, make_batch, tiny
from tests.model.test_sharded import batch_layouts, make_step, raw_layouts, small
from tests.pairs import few, mixed
from tests.step.proven import proven_and_equal

TWO = Mesh(cp=2, cpi=2)
MESHES = [Mesh(cp=2), Mesh(cp=4), Mesh(cp=2, tp=2), Mesh(fsdp=2, cp=2), Mesh(dp=2, cp=2, tp=2), TWO]
FORMS = ["ring", "balanced", "gathered", "ulysses", "two_level", "two_level_balanced", None]
VARIANTS = {
    "plain": {},
    "tied, mask": {"tied": True, "z_loss": 1e-2},
    "window": {"window": 3},
    "scale": {"head_dim": 8, "qk_norm": model.RMSNorm()},
    "sequence parallel": {"sequence_parallel": True},
}
BATCHES = ["in order", "packed", "mask"]


def batch_of(config, kind, n=1):
    """Of 4 rows of 16 tokens; n: in zigzag order for so many ranks, with the positions as data."""
    batch = make_batch(config, 4, seq=16, mask=kind == "mask")
    if kind == "packed" or n > 1:
        documents = (torch.arange(16) >= torch.tensor([[5], [8], [16], [3]])).long()
        starts = torch.where(documents == 0, 0, torch.tensor([[5], [8], [16], [3]]))
        packed = {"positions": torch.arange(16) - starts, "documents": documents}
        batch |= packed if kind == "packed" else {"positions": torch.arange(16).repeat(4, 1)}
    return {name: x[:, zigzag(16, n)].contiguous() for name, x in batch.items()} if n > 1 else batch


def check(config, mesh, batch, save=None):
    params = leaves_that_differ(init(config, Mesh(), key=3))
    return assert_parity(
        make_step(config, save), mesh, params, batch,
        layouts=(model.layouts(config, mesh), batch_layouts(batch, mesh)), out_layouts=raw_layouts(config, mesh),
    )  # fmt: skip


def dealt_to(form, mesh):
    """For how many ranks a form wants its tokens in zigzag order."""
    return {"balanced": mesh["cp"] * mesh["cpi"], "two_level_balanced": mesh["cp"]}.get(form, 1)


CASES = [case for case in mixed(FORMS, MESHES, VARIANTS, BATCHES) if case[0] != "ulysses" or case[1]["cp"] < 4]


@pytest.mark.long
@pytest.mark.parametrize(("form", "mesh", "name", "kind"), few(2, CASES, ["-".join(map(str, c)) for c in CASES]))
def test_loss_and_each_gradient(form, mesh, name, kind):
    config = small(context=form, **{"max_seq": 16} | VARIANTS[name])
    check(config, mesh, batch_of(config, kind, dealt_to(form, mesh)), save="inputs")


CAPPED = mixed(FORMS, [Mesh(cp=2), TWO, Mesh(fsdp=2, cp=2, tp=2), Mesh(cp=2, cpi=2, tp=2)])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("form", "mesh"), few(2, CAPPED, ["-".join(map(str, c)) for c in CAPPED]))
def test_caps_and_sinks(form, mesh):
    """Sinks are one key more, behind all blocks of a ring; their gradient is a sum over the ranks of cp."""
    config = small(max_seq=16, softcap=2.0, sinks=True, window=5, context=form)
    check(config, mesh, batch_of(config, "packed", dealt_to(form, mesh)))
    rows, strategy = batch_layouts(batch_of(config, "packed", dealt_to(form, mesh)), mesh), DataParallel()
    specs = step.state_specs(model.specs(config, mesh, strategy=strategy), optim.adamw(1e-2), strategy)
    report = step.check(make_train_step(config, strategy, 1e-2, mesh), specs, rows)
    assert report.ok, str(report)


STEPS = [
    (Mesh(cp=2, tp=2), DataParallel.zero1()),
    (Mesh(dp=2, fsdp=2, cp=2), DataParallel.hsdp()),
    (Mesh(fsdp=2, cp=2), DataParallel(("fsdp",), ("fsdp", "cp"), ("fsdp", "cp"), ("fsdp", "cp"))),
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "strategy"), few(1, STEPS, [str(mesh) for mesh, _ in STEPS]))
def test_a_train_step_is_proven_and_the_same(mesh, strategy):
    """The state of the optimizer, and parameters, are sharded over cp too where the strategy states it."""
    config, rate = tiny(max_seq=16), 1e-2
    optimizer = optim.adamw(rate)

    def of_mesh(m):
        return make_train_step(config, strategy, rate, m)

    batch = batch_of(config, "mask")
    specs = step.state_specs(model.specs(config, mesh, strategy=strategy), optimizer, strategy)
    rows = {name: strategy.batch_layout(tuple(x.shape), x.dtype, mesh) for name, x in batch.items()}
    whole = step.state_specs(model.specs(config, Mesh(), strategy=strategy), optimizer, strategy)
    state = tree.init(whole, 0, 0)
    proven_and_equal(of_mesh, mesh, state, batch, layouts=(tree.layouts(specs), rows), steps=2)


def make_train_step(config, strategy, rate, mesh):
    layouts = model.layouts(config, mesh, strategy=strategy)
    axes = Axes(mesh, data=strategy.tokens)

    def loss(params, batch):
        return model.loss(params, batch, config, axes, "inputs")

    return step.build_train_step(loss, optim.adamw(rate), layouts, axes, strategy=strategy)


@pytest.mark.medium
def test_attention_that_knows_nothing_of_a_split_is_found():
    """Where the sequence is split over an axis of another name, which no mixer looks at."""
    config, mesh, strategy = tiny(max_seq=16), Mesh(seq=2), DataParallel((), sequence=("seq",))
    rows = strategy.batch_layout((4, 16), torch.int64, mesh)
    specs = step.state_specs(model.specs(config, mesh, strategy=strategy), optim.adamw(1e-2), strategy)
    report = step.check(make_train_step(config, strategy, 1e-2, mesh), specs, {"tokens": rows, "labels": rows})
    assert not report.ok and "seq" in str(report), report


def test_what_cannot_be():
    with pytest.raises(ValueError, match="Attention.context: got 'rings', wanted one of ring, balanced"):
        small(context="rings")
    with pytest.raises(ValueError, match=r"sequence: got 15 positions, which 2 ranks of cp .* pad it to 16"):
        DataParallel().batch_layout((4, 15), torch.int64, Mesh(cp=2))
    assert DataParallel().batch_layout((4,), torch.int64, Mesh(cp=2)) == Layout((4,), torch.int64, Mesh(cp=2))


@pytest.mark.slow
def test_batches_bring_the_order_of_a_balanced_ring():
    """A user arranges nothing by hand: the loader's order on a mesh has the loss of the text in order on one rank."""
    mesh, config = Mesh(fsdp=2, cp=2), small(context="balanced", max_seq=16)
    ids = torch.randint(config.vocab_size, (200,), generator=torch.Generator().manual_seed(5)).numpy()
    batches, in_order = (data.Batches(ids, 4, 16, seed=0, zigzag=n) for n in (2, 1))
    batch, layout = batches.at(3), batches.layout(mesh)
    parts = split(batch, dict.fromkeys(batch, layout))
    for rank in range(mesh.size):
        got = batches.for_rank(layout, rank).at(3)
        assert got.keys() == {"tokens", "labels", "positions"}
        assert all(torch.equal(got[name], parts[rank][name]) for name in batch)
    found = check(config, mesh, batch)
    loss = check(config, Mesh(dp=1), in_order.at(3)).single.gather("1")
    torch.testing.assert_close(found.sharded.gather("1"), loss, rtol=1e-12, atol=0)


def test_tokens_in_order_are_no_balanced_ring():
    for form, mesh in (("balanced", Mesh(cp=2)), ("two_level_balanced", TWO)):
        with pytest.raises(ValueError, match=r"batch\['positions'\]: got none, .*give data.Batches\(..., zigzag=2\)"):
            check(small(context=form, max_seq=16), mesh, batch_of(small(), "in order"))
