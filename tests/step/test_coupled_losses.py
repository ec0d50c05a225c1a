"""Losses that couple the rows of a microbatch mean the same on every mesh, if rows are assigned by `batch_layout`."""

import pytest
import torch
import torch.nn.functional as F

from fmegatron import loop, optim, tree
from fmegatron.collectives import Axes, all_gather, axis_index, enter, pmax, psum
from fmegatron.data import Batches
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from fmegatron.step import accumulate, build_train_step, check, jit, state_specs
from fmegatron.step.timelines.planned import PaperWorld
from fmegatron.testing import assert_parity, parity, simulate, split
from tests.pairs import each_value, few

F64, ROWS, WIDE = torch.float64, 36, 5
SETTINGS = [(Mesh(dp=2), 2), (Mesh(dp=2, fsdp=2), 3), (Mesh(fsdp=3), 2), (Mesh(fsdp=4), 3), (Mesh(fsdp=3), 1)]
OPTIMIZER = optim.sgd(0.1, momentum=0.9)
STRATEGIES = {"replicated": DataParallel.replicated(), "zero3": DataParallel.zero3()}


# ---- losses: (params, batch, data axis, rows of all ranks) -> this rank's part ---------------------------------------
def softmax_over_the_batch(p, b, dp, rows):
    """CLIP: every row against the rows of all ranks, which are gathered."""
    left, right = F.normalize(b["x"] @ p["a"], dim=-1), F.normalize(b["y"] @ p["b"], dim=-1)
    logits = left @ all_gather(right, dp, 0).t() / 0.1
    own = axis_index(dp, like=logits) * len(left) + torch.arange(len(left))
    return (logits.logsumexp(1) - logits.gather(1, own[:, None]).squeeze(1)).sum() / rows


def batch_statistics(p, b, dp, rows):
    """Batch normalization, in training, over the rows of all ranks."""
    h = b["x"] @ p["a"]
    mean = enter(psum(h.sum(0), dp), dp) / rows
    centred = h - mean
    scale = (enter(psum(centred.square().sum(0), dp), dp) / rows + 1e-5).rsqrt()
    return (centred * scale * p["b"].sum(0)).tanh().square().sum() / rows


def balance_of_load(p, b, dp, rows):
    """Switch Transformer: the share of rows that choose an expert, times the mean of its probability."""
    probabilities = (b["x"] @ p["a"]).softmax(-1)
    chosen = F.one_hot(probabilities.argmax(-1), WIDE).to(F64)
    share = psum(chosen.sum(0), dp) / rows
    return WIDE * (share * probabilities.sum(0) / rows).sum() + ((b["y"] @ p["b"]) ** 2).sum() / rows


def correlation(p, b, dp, rows):
    """Barlow Twins: the correlation of two views over the batch, of which every rank takes an equal part."""
    both = torch.einsum("bi,bj->ij", b["x"] @ p["a"], b["y"] @ p["b"])
    both = enter(psum(both, dp), dp) / rows
    off = both - torch.diag(both.diagonal())
    return ((1 - both.diagonal()).square().sum() + 0.1 * off.square().sum()) / dp.size


def ranking(p, b, dp, rows):
    """All pairs: a row must score above every row of a lower target."""
    score, target = (b["x"] @ p["a"]).sum(1), (b["y"] @ p["b"].detach()).sum(1)
    scores, targets = all_gather(score, dp, 0), all_gather(target, dp, 0)
    lower = (target[:, None] > targets[None, :]).to(F64)
    return (lower * F.softplus(scores[None, :] - score[:, None])).sum() / rows**2


def hardest(p, b, dp, rows):
    """A temperature that the largest logit of the microbatch decides."""
    h = b["x"] @ p["a"]
    return (h / (1 + pmax(h.detach().abs().amax(), dp))).sin().sum() / rows


LOSSES = (softmax_over_the_batch, batch_statistics, balance_of_load, correlation, ranking, hardest)
NAMES = [lambda loss: loss.__name__, lambda setting: f"{setting[0]}-{setting[1]}", str]


def make_step(loss, mesh, n, strategy):
    """A train step with n microbatches."""
    axes = Axes(mesh)
    layouts = layouts_of(mesh, strategy)
    dp = axes[axes.data]

    def loss_fn(params, batch):
        whole = {
            name: x if not layouts[name].sharded else all_gather(x, axes[layouts[name].axes(0)], 0)
            for name, x in params.items()
        }
        value = loss(whole, batch, dp, len(batch["x"]) * dp.size)
        return value, {"loss": psum(value.detach(), dp)}

    return build_train_step(loss_fn, OPTIMIZER, layouts, axes, strategy=strategy, microbatches=n)


def layouts_of(mesh, strategy):
    shapes = {"a": (12, WIDE), "b": (12, WIDE)}
    return {name: strategy.params_layout(Layout(shape, F64, mesh)) for name, shape in shapes.items()}


def batch_layouts(mesh, n, strategy=STRATEGIES["replicated"]):
    rows = strategy.batch_layout((ROWS, 12), F64, mesh, n)
    return {"x": rows, "y": rows}


def specs_of(mesh, strategy):
    specs = tree.map(lambda x: tree.ArraySpec(x, tree.Normal(0.3)), layouts_of(mesh, strategy))
    return state_specs(specs, OPTIMIZER, strategy)


def arguments(step=0):
    state = tree.init(specs_of(Mesh(), STRATEGIES["replicated"]), 0, 0)
    generator = torch.Generator().manual_seed(step)
    return state, {name: torch.randn(ROWS, 12, generator=generator, dtype=F64) for name in ("x", "y")}


@pytest.mark.long
@pytest.mark.parametrize("loss, setting, strategy", each_value(LOSSES, SETTINGS, STRATEGIES, ids=NAMES))
def test_parity_on_every_mesh(loss, setting, strategy):
    (mesh, n), strategy = setting, STRATEGIES[strategy]
    layouts = tree.layouts(specs_of(mesh, strategy)), batch_layouts(mesh, n)
    assert_parity(
        lambda m: make_step(loss, m, n, strategy), mesh, arguments()[0], lambda step: arguments(step)[1],
        layouts=layouts, steps=2, tolerance=1e-12,
    )  # fmt: skip


def test_a_loss_of_rows_alone_does_not_depend_on_n():
    """What couples nothing is the same for every n, too."""

    def loss(p, b, dp, rows):
        return (b["x"] @ p["a"]).tanh().square().sum() / rows

    mesh, strategy, found = Mesh(dp=2), STRATEGIES["replicated"], []
    for n in (1, 2, 3):
        layouts = tree.layouts(specs_of(mesh, strategy)), batch_layouts(mesh, n)
        found.append(simulate(make_step(loss, mesh, n, strategy), mesh, *arguments(), layouts=layouts).metrics["loss"])
    assert max(found) - min(found) < 1e-13


# ---- rows that are assigned in another way ---------------------------------------------------------------------------
MESSAGE = (
    r"'1/x': got the layout f64\[36@dp, 12\].*cuts the rows of a rank into 2 microbatches.*strategy.batch_layout\("
)


def wrong_rows(mesh):
    rows = Layout((ROWS, 12), F64, mesh, (("dp",),))
    return {"x": rows, "y": rows}


@pytest.mark.medium
def test_a_wrong_assignment_is_refused_where_layouts_are_known():
    mesh, strategy = Mesh(dp=2), STRATEGIES["replicated"]
    step, specs = make_step(softmax_over_the_batch, mesh, 2, strategy), specs_of(mesh, strategy)
    state, batch = arguments()
    with pytest.raises(ValueError, match="check: the arguments: " + MESSAGE):
        check(step, specs, wrong_rows(mesh))
    with pytest.raises(ValueError, match="simulate: the arguments: " + MESSAGE):
        simulate(step, mesh, state, batch, layouts=(tree.layouts(specs), wrong_rows(mesh)))
    with pytest.raises(ValueError, match="simulate: the arguments: " + MESSAGE):
        parity(
            lambda m: make_step(softmax_over_the_batch, m, 2, strategy), mesh, state, batch,
            layouts=(tree.layouts(specs), wrong_rows(mesh)),
        )  # fmt: skip
    one = make_step(softmax_over_the_batch, mesh, 1, strategy)  # with one microbatch any assignment will do
    simulate(one, mesh, state, batch, layouts=(tree.layouts(specs), wrong_rows(mesh)))
    simulate(one, mesh, state, batch, layouts=(tree.layouts(specs), batch_layouts(mesh, 2)))


@pytest.mark.medium
def test_rows_that_were_assigned_by_hand_are_taken_as_they_are():
    """And show why: the loss is another one."""
    mesh, strategy = Mesh(dp=2), STRATEGIES["replicated"]
    step, layouts = make_step(softmax_over_the_batch, mesh, 2, strategy), tree.layouts(specs_of(mesh, strategy))
    state, batch = arguments()
    by_hand = split(batch, wrong_rows(mesh))
    wrong = simulate(step, mesh, state, by_hand, layouts=(layouts, None), out_layouts=(layouts, None)).metrics["loss"]
    right = simulate(step, mesh, state, batch, layouts=(layouts, batch_layouts(mesh, 2))).metrics["loss"]
    wanted = simulate(
        make_step(softmax_over_the_batch, Mesh(), 2, strategy), Mesh(), state, batch,
        layouts=(tree.layouts(specs_of(Mesh(), strategy)), batch_layouts(Mesh(), 2)),
    ).metrics["loss"]  # fmt: skip
    assert abs(right - wanted) < 1e-12 < 1e-4 < abs(wrong - wanted)


def own_step(axes, n, prepare=lambda b: b):
    """A step of one's own, without build_train_step."""
    dp = axes[axes.data]

    def loss_fn(p, b):
        value = softmax_over_the_batch(p, b, dp, len(b["x"]) * dp.size)
        return value, {"loss": psum(value.detach(), dp)}

    def step(params, batch):
        (_, metrics), grads = accumulate(loss_fn, n)(params, prepare(batch))
        return tree.map(lambda p, g: p - 0.1 * psum(g, dp), params, grads), metrics

    return step


PREPARED = {
    "as it is": lambda b: b,
    "cast and scaled": lambda b: tree.map(lambda x: (x.to(torch.float32) / 2).to(F64).contiguous(), b),
    "in a jit of its own": None,
}


@pytest.mark.parametrize("prepare", few(1, [(name,) for name in PREPARED], PREPARED))
def test_steps_of_ones_own_are_compared_too(prepare):
    mesh = Mesh(dp=2)
    params = Layout((12, WIDE), F64, mesh)
    layouts = {"a": params, "b": params}
    step = own_step(Axes(mesh), 2, PREPARED[prepare] or (lambda b: b))
    step = step if PREPARED[prepare] else jit(step)
    run = (lambda p, b: step(p, b)) if PREPARED[prepare] is None else step
    check(run, layouts, batch_layouts(mesh, 2)).require("own")
    check(run, layouts, batch_layouts(mesh, 6)).require("own")  # three pieces to a microbatch
    with pytest.raises(ValueError, match=MESSAGE):
        check(run, layouts, wrong_rows(mesh))
    with pytest.raises(ValueError, match=r"got the layout f64\[\(3×12\)@dp, 12\].*wanted f64\[\(2×18\)@dp, 12\]"):
        check(run, layouts, batch_layouts(mesh, 3))


def test_a_standard_step_takes_batches_in_its_parts():
    """Also in more of them than it cuts."""
    mesh, strategy = Mesh(dp=2), STRATEGIES["replicated"]
    step, specs = make_step(softmax_over_the_batch, mesh, 3, strategy), specs_of(mesh, strategy)
    for parts in (3, 6):
        report = check(step, specs, batch_layouts(mesh, parts))
        assert report.ok, str(report)


@pytest.mark.parametrize(
    ("shape", "mesh", "n", "wanted"),
    [
        ((8, 3), Mesh(dp=2), 1, ("dp",)),
        ((8, 3), Mesh(dp=2), 2, Split(("dp",), 2)),
        ((8, 3), Mesh(tp=2), 4, ()),
        ((8, 3), Mesh(dp=1, fsdp=2), 2, Split(("dp", "fsdp"), 2)),
        ((), Mesh(dp=2), 2, None),
    ],
)
def test_batch_layout(shape, mesh, n, wanted):
    layout = DataParallel().batch_layout(shape, F64, mesh, n)
    assert layout == Layout(shape, F64, mesh, () if wanted is None else (wanted,))


@pytest.mark.parametrize(
    ("rows", "n", "message"),
    [
        (6, 2, "got 6 rows, which 2 data-parallel ranks and 2 microbatches cannot share evenly, wanted 4 or 8"),
        (3, 1, "got 3 rows, which 2 data-parallel ranks cannot share evenly, wanted 2 or 4"),
        (2, 0, "got microbatches=0, wanted 1 or more"),
    ],
)
def test_batches_that_cannot_be_assigned(rows, n, message):
    with pytest.raises(ValueError, match=message):
        DataParallel().batch_layout((rows, 3), F64, Mesh(dp=2), n)


# ---- batches of `data` in the loop -----------------------------------------------------------------------------------
def tokens_step(mesh, n):
    """A step over {"tokens", "labels"} of `data.Batches`."""
    layouts, optimizer = {"w": Layout((), F64, mesh)}, optim.sgd(0.1)
    step = build_train_step(
        lambda p, b: (p["w"] * b["tokens"].double().sum(), {}), optimizer, layouts, Axes(mesh), microbatches=n
    )
    specs = {"w": tree.ArraySpec(layouts["w"], 1.0)}
    return step, tree.init(state_specs(specs, optimizer), 0, 0)


LOOPS = [
    (Mesh(dp=2), 2, lambda batches, mesh: batches.layout(mesh, microbatches=2), None),
    (Mesh(dp=2), 2, lambda batches, mesh: batches.layout(mesh, microbatches=4), None),
    (Mesh(dp=2), 2, lambda batches, mesh: batches.layout(mesh), "into 2 microbatches.*microbatches=2"),
    (Mesh(dp=2), 2, lambda batches, mesh: batches.layout(mesh, microbatches=3), "into 2 microbatches"),
    (Mesh(dp=2), 2, lambda batches, mesh: None, "layouts are not known: '1/labels'"),
    (Mesh(dp=2), 1, lambda batches, mesh: batches.layout(mesh), None),
    (Mesh(dp=2), 1, lambda batches, mesh: batches.layout(mesh, microbatches=2), None),
    (Mesh(dp=2), 1, lambda batches, mesh: batches.layout(Mesh(dp=4)), "of the mesh dp4, wanted dp2"),
    (Mesh(dp=2, fsdp=2), 1, lambda batches, mesh: batches.layout(mesh, DataParallel("dp")), "finding.* of the check"),
    (Mesh(), 3, lambda batches, mesh: None, None),
]


@pytest.mark.parametrize(("mesh", "n", "layout", "message"), LOOPS)
def test_the_first_update_compares_batches_with_the_step(mesh, n, layout, message):
    batches = Batches(torch.arange(1000).numpy(), 24, 4, seed=0)

    def infos():
        step, state = tokens_step(mesh, n)
        of_rank = layout(batches, mesh)
        source = batches if of_rank is None else batches.for_rank(of_rank, 0)
        jitted = jit(step, donate=0, world=PaperWorld(mesh), backend="eager")
        return loop.train(jitted, state, source, steps=1)

    if message is not None:
        with pytest.raises(ValueError, match=message):
            next(infos())
    else:
        infos()
