"""Metrics of microbatches: n of them mean what one means, or an error names the metric and the fix."""

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.step import accumulate, build_train_step, jit, value_and_grad
from fmegatron.testing.compare_ranks import relative_error
from tests.fresh_state import fresh_state

ROWS, SEQ = 8, 3


def batch_of(masked_rows=()):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, SEQ, generator=generator, dtype=torch.float64)
    mask = torch.rand(ROWS, SEQ, generator=generator) < 0.7
    mask[:, 0] = True
    mask[list(masked_rows)] = False
    return {"x": x, "mask": mask, "ids": torch.arange(ROWS * SEQ).view(ROWS, SEQ)}


def mean_over_tokens(p, batch, aux):
    """The mean of the masked tokens of what it is given; it is 0/0 where all of them are masked."""
    keep = batch["mask"]
    loss = ((p["w"] * batch["x"]).sin() * keep).sum() / keep.sum()
    return loss, {"loss": loss.detach(), **aux(p, batch)}


# ---- right: what the full batch gives --------------------------------------------------------------------------------
def tokens_float(p, b):
    return {"tokens": b["mask"].sum().double()}


def tokens_int32(p, b):
    return {"tokens": b["mask"].sum(dtype=torch.int32)}


def with_numbers(p, b):
    return {**tokens_float(p, b), "lr": 0.1, "note": "text", "rows": b["x"].shape[0], "on": True}


def rows_of_the_batch(p, b):
    return {**tokens_float(p, b), "ids": b["ids"], "masks": b["mask"], "x": b["x"]}


def rows_of_the_loss(p, b):
    values = (p["w"] * b["x"]).cos()
    return {**tokens_float(p, b), "each": values.sum(1), "flat": values.flatten(), "best": values.argmax(1)}


def statistics(p, b):
    """As many entries as a microbatch of 4 has rows, and yet no rows: only the full batch tells them apart."""
    weighed = (b["x"] * b["mask"]).sum() / b["mask"].sum()
    load = torch.zeros(4, dtype=torch.int64).index_add(0, b["ids"].flatten() % 4, torch.ones_like(b["ids"]).flatten())
    return {**tokens_float(p, b), "load": load, "share": weighed * torch.ones(4, dtype=torch.float64)}


def a_parameter(p, b):
    return {**tokens_float(p, b), "temperature": p["w"], "nested": {"sizes": [b["mask"].sum(), (b["x"].numel(), "x")]}}


RIGHT = (tokens_float, tokens_int32, with_numbers, rows_of_the_batch, rows_of_the_loss, statistics, a_parameter)


@pytest.mark.long
@pytest.mark.parametrize("aux", RIGHT, ids=lambda f: f.__name__)
def test_n_microbatches_mean_one(aux):
    params, batch = {"w": torch.tensor(0.7, dtype=torch.float64)}, batch_of(masked_rows=(0, 1, 5))
    loss_fn = lambda p, b: mean_over_tokens(p, b, aux)  # noqa: E731
    (loss, metrics), grads = value_and_grad(loss_fn)(params, batch)
    assert torch.isfinite(loss)
    for n, compiled in ((1, False), (2, False), (4, False), (2, True), (4, True)):
        run = accumulate(loss_fn, n)
        (got_loss, got), got_grads = (jit(run, backend="eager") if compiled else run)(params, batch)
        assert relative_error(got_loss, loss) <= 1e-12 and relative_error(got_grads["w"], grads["w"]) <= 1e-12
        assert tree.paths(got) == tree.paths(metrics)
        for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(metrics), strict=True):
            if isinstance(b, torch.Tensor):
                assert relative_error(a, b) <= 1e-12, (path, n)
            else:
                assert a == b and type(a) is type(b), (path, n)


def test_a_masked_microbatch_takes_no_part():
    """Rows 0 to 3 have no token: their loss is 0/0, and so are its gradients."""
    params, batch = {"w": torch.tensor(0.7, dtype=torch.float64)}, batch_of(masked_rows=range(4))
    loss_fn = lambda p, b: mean_over_tokens(p, b, tokens_float)  # noqa: E731
    grad_fn = value_and_grad(loss_fn)
    assert grad_fn(params, tree.map(lambda x: x[:4], batch))[0][0].isnan()
    (loss, _), grads = grad_fn(params, batch)
    for backend in ("eager", "aot_eager"):
        (got, metrics), got_grads = jit(accumulate(loss_fn, 2), backend=backend)(params, batch)
        assert relative_error(got, loss) <= 1e-12 and relative_error(got_grads["w"], grads["w"]) <= 1e-12
        assert metrics["tokens"] == batch["mask"].sum() and relative_error(metrics["loss"], loss) <= 1e-12
    (got, metrics), got_grads = accumulate(loss_fn, 2)(params, batch_of(masked_rows=range(ROWS)))
    assert (got, metrics["tokens"], got_grads["w"]) == (0, 0, 0)


def test_a_nan_of_a_microbatch_with_tokens_is_seen():
    batch = batch_of()
    batch["x"][5, 0] = torch.nan
    loss_fn = lambda p, b: mean_over_tokens(p, b, tokens_float)  # noqa: E731
    (loss, _), grads = accumulate(loss_fn, 4)({"w": torch.tensor(0.7, dtype=torch.float64)}, batch)
    assert loss.isnan() and grads["w"].isnan()


def test_weights_below_one():
    """Their sum is the divisor, however small it is."""

    def loss_fn(p, b):
        weight = b["weights"].sum()
        return (p * b["weights"]).sum() / weight, {"share": weight}

    weights = torch.tensor([0.1, 0.0, 0.2, 0.1], dtype=torch.float64)
    (loss, aux), grads = accumulate(loss_fn, 2, weight="share")(torch.tensor(3.0).double(), {"weights": weights})
    assert loss.item() == pytest.approx(3.0, rel=1e-12) and grads.item() == pytest.approx(1.0, rel=1e-12)
    assert aux["share"].item() == pytest.approx(0.4, rel=1e-12)


def test_narrow_metrics_are_averaged_in_fp32():
    def loss_fn(p, b):
        return (p * b["x"].float()).sum(), {"tokens": b["x"].numel() * torch.ones((), dtype=torch.int64),
                                            "mean": b["x"].mean()}  # fmt: skip

    x = torch.ones(256, 1, dtype=torch.bfloat16)
    x[0] = 2.0
    (_, aux), _ = accumulate(loss_fn, 256)(torch.ones(()), {"x": x})
    assert aux["mean"].dtype == torch.bfloat16 and aux["tokens"] == 256
    assert aux["mean"].item() == torch.tensor(1 + 1 / 256).bfloat16().item()


def test_other_leaves_of_a_batch_go_to_each_microbatch():
    f = accumulate(lambda p, b: (p * b["x"]).sum() * b["scale"], 2)
    (loss, _), _ = f(torch.ones(()), {"x": torch.ones(4), "scale": 3.0})
    assert loss == 6


# ---- wrong: an error that names the metric and the fix ---------------------------------------------------------------
def bool_of(p, b):
    return {"finite": torch.isfinite(b["x"]).all()}


def bool_statistic(p, b):
    return {"used": torch.zeros(5, dtype=torch.bool).index_fill(0, b["ids"].flatten() % 5, True)}


def shape_of_rows(p, b):
    return {"gram": b["x"] @ b["x"].t()}


def tokens_per_row(p, b):
    return {"tokens": b["mask"].sum(1)}


def tokens_text(p, b):
    return {"tokens": "some"}


def tokens_bool(p, b):
    return {"tokens": b["mask"].any()}


WRONG = {
    bool_of: r"metric 'finite': got a bool, .*count it \(x.long\(\) is summed\)",
    bool_statistic: "metric 'used': got a bool",
    shape_of_rows: r"metric 'gram': got shape \(4, 4\) of one of 2 microbatches and \(8, 8\) of the full batch",
    tokens_per_row: r"metric 'tokens': got torch.int64 of shape \([48],\), wanted one number",
    tokens_text: "metric 'tokens': got 'some', wanted one number",
    tokens_bool: r"metric 'tokens': got torch.bool of shape \(\), wanted one number",
}


@pytest.mark.parametrize("aux", WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_microbatches_cannot_give_is_refused(aux, compiled):
    f = accumulate(lambda p, b: mean_over_tokens(p, b, aux), 2)
    with pytest.raises(ValueError, match=WRONG[aux]):
        (jit(f, backend="eager") if compiled else f)({"w": torch.tensor(0.7, dtype=torch.float64)}, batch_of())


def test_python_numbers_that_depend_on_data_are_refused():
    f = accumulate(lambda p, b: (loss := (p * b["x"]).sum(), {"loss": loss.item()}), 2)
    with pytest.raises(ValueError, match=r"metric 'loss': got 1.0, 5.0 of 2 microbatches.*return a tensor"):
        f(torch.ones(()), {"x": torch.tensor([0.0, 1.0, 2.0, 3.0])})


def test_metrics_that_come_and_go_are_refused():
    def loss_fn(p, b):
        return (p * b["x"]).sum(), {"loss": p.detach(), **({"big": p.detach()} if b["x"].sum() > 2 else {})}

    with pytest.raises(ValueError, match="the metrics big, loss of one microbatch and loss of another"):
        accumulate(loss_fn, 2)(torch.ones(()), {"x": torch.arange(4.0)})


@pytest.mark.parametrize("n", [1, 2])
def test_an_empty_batch_is_refused(n):
    f = accumulate(lambda p, b: (p * b["x"]).mean(), n)
    with pytest.raises(ValueError, match=r"batch leaf 'x': got local shape \(0, 3\), wanted 1 row or more"):
        f(torch.ones(()), {"x": torch.ones(0, 3)})
    nothing = accumulate(lambda p, b: p.square(), n)
    if n == 1:
        assert nothing(torch.ones(()), {})[1] == 2  # a loss of the parameters alone
    else:
        with pytest.raises(ValueError, match="got a batch without tensors, wanted rows to cut into 2 microbatches"):
            nothing(torch.ones(()), {})


@pytest.mark.parametrize("n", [1, 2])
def test_a_metric_with_the_name_of_the_norm_is_refused(n):
    layouts, optimizer = {"w": Layout((), torch.float64, Mesh())}, optim.sgd(0.1)
    step = build_train_step(
        lambda p, b: ((p["w"] * b["x"]).sum(), {"grad_norm": p["w"].detach()}), optimizer, layouts, Axes(Mesh()),
        microbatches=n,
    )  # fmt: skip
    state = fresh_state({"w": torch.tensor(0.7, dtype=torch.float64)}, optimizer)
    with pytest.raises(ValueError, match="metric 'grad_norm': got one of loss_fn, wanted .*rename yours"):
        step(state, {"x": torch.ones(4, dtype=torch.float64)})


@pytest.mark.parametrize("n", [2.0, True, "2", 0])
def test_the_number_of_microbatches_is_a_whole_number(n):
    with pytest.raises(ValueError, match="accumulate: n: got .*, wanted a whole number of microbatches"):
        accumulate(lambda params, batch: None, n)
