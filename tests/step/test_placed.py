"""An array knows how it lies: a jit checks a step by its arguments, whatever is around the step."""

import copy
import functools
import io
import warnings

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import State
from fmegatron.step.signature import signature_of

MESH = Mesh(dp=2)
F64 = torch.float64


def describe(mesh, right=True):
    """A step by hand on any mesh; wrong: the gradients of replicas are not summed."""
    axes, optimizer = Axes(mesh), optim.adamw(1e-2)
    ranks = axes[axes.data]
    specs = tree.specs({"a": (8, 6), "b": {"w": (6, 3)}}, mesh, init=tree.Normal(0.3), dtype=F64)

    def loss_fn(params, batch):
        return (torch.tanh(batch["x"] @ params["a"]) @ params["b"]["w"]).pow(2).mean() / ranks.size

    def train_step(state, batch):
        (loss, _), grads = step.value_and_grad(loss_fn)(state.params, batch)
        grads = step.reduce_gradients(grads) if right else grads
        params, opt = optimizer.update(grads, state.opt, state.params)
        return State(state.step + 1, params, opt), {"loss": psum(loss, ranks)}

    rows = {"x": Layout((8, 8), F64, mesh, (axes.data,))}
    return step.Description(train_step, step.state_specs(specs, optimizer), rows)


class Held:
    """An object that is called, and a method."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, state, batch):
        return self.fn(state, batch)

    def method(self, state, batch):
        return self.fn(state, batch)


def with_a_metric(fn):
    def wrapped(state, batch):
        new, metrics = fn(state, batch)
        return new, {**metrics, "twice": metrics["loss"] * 2}

    return wrapped


def with_torch_func(fn):
    def wrapped(state, batch):
        new, metrics = fn(state, batch)
        grads = torch.func.grad(lambda p: sum(x.square().sum() for x in tree.leaves(p)))(state.params)
        return new, {**metrics, "g": sum(x.sum() for x in tree.leaves(grads))}

    return wrapped


def without_grad(fn):
    @torch.no_grad()
    def wrapped(state, batch):
        with torch.enable_grad():
            return fn(state, batch)

    return wrapped


def with_its_own(fn, *, flag):
    return functools.wraps(fn)(lambda state, batch: fn(state, batch))


WRAPS = {
    "bare": lambda fn: fn,
    "a def": with_a_metric,
    "a lambda": lambda fn: lambda state, batch: fn(state, batch),
    "functools.partial": functools.partial,
    "a partial with a keyword": lambda fn: functools.partial(lambda s, b, flag: fn(s, b), flag=True),
    "functools.wraps": lambda fn: with_its_own(fn, flag=1),
    "an object": Held,
    "a method": lambda fn: Held(fn).method,
    "another jit": lambda fn: step.jit(with_a_metric(fn)),
    "a jit in a def in a jit": lambda fn: with_a_metric(step.jit(fn)),
    "torch.func": with_torch_func,
    "no_grad": without_grad,
}


def arguments(rank):
    described = describe(MESH)
    batch = {"x": torch.randn(8, 8, dtype=F64, generator=torch.Generator().manual_seed(0))}
    return tree.init(described.state, 0, rank), tree.local(batch, described.batch, rank)


def answers(rank):
    """What jit says of each wrapping of the right step and of the wrong one, and of stripped arguments."""
    found = {}
    with connect(MESH) as world:
        for name, wrap in WRAPS.items():
            for right in (True, False):
                jitted = step.jit(wrap(describe(MESH, right).function), donate=0, world=world, backend="eager")
                found[name, right] = _called(jitted, rank)
        for name, strip in STRIPPED.items():
            jitted = step.jit(describe(MESH, False).function, donate=0, world=world, backend="eager")
            found[name] = _called(jitted, rank, strip)
        dp = Axes(MESH)["dp"]
        forgets = step.jit(lambda p, b: {"loss": (b["x"] @ p["a"]).mean()}, world=world, backend="eager")
        right = step.jit(
            lambda p, b: {"loss": psum((b["x"] @ p["a"]).mean(), dp) / dp.size}, world=world, backend="eager"
        )
        for name, evaluation in (("forgets", forgets), ("sums", right)):
            found["evaluation", name] = _evaluated(evaluation, rank)
        bare = {name: x + 0 for name, x in arguments(rank)[0].params.items() if name == "a"}
        found["said"] = _said(right, bare, arguments(rank)[1])
    return found


STRIPPED = {
    "dict": lambda s: s._replace(params=dict(s.params)),
    "stars": lambda s: s._replace(params={**s.params}),
    "of its parts": lambda s: State(*s),
    "deepcopy": copy.deepcopy,
    "clone": lambda s: tree.map(torch.clone, s),
    "a new leaf": lambda s: s._replace(params={**s.params, "a": s.params["a"] * 1}),
}


def _called(jitted, rank, strip=lambda state: state):
    state, batch = arguments(rank)
    try:
        new, _ = jitted(strip(state), batch)
        new, _ = jitted(new, batch)
        known = [tree.layout_of(x) for x in tree.leaves(new)] == tree.leaves(tree.layouts(describe(MESH).state))
        return "proven" if next(iter(jitted.cache.values())).report.ok and known and len(jitted.cache) == 1 else "?"
    except ValueError as error:
        return str(error)


def _evaluated(jitted, rank):
    state, batch = arguments(rank)
    try:
        jitted(dict(state.params), batch)
        return "proven" if next(iter(jitted.cache.values())).report.ok else "?"
    except ValueError as error:
        return str(error)


def _said(jitted, params, batch):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        jitted(params, batch), jitted(params, batch)
    return [str(one.message) for one in said if "is not checked" in str(one.message)]


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(answers, ranks=2)


@pytest.mark.medium
@pytest.mark.parametrize("name", WRAPS)
def test_nothing_around_a_step_loses_the_check(found, name):
    for of_rank in found:
        assert of_rank[name, True] == "proven", of_rank[name, True]
        assert "2 findings of the check" in of_rank[name, False] or "findings" in of_rank[name, False]
        assert "test_placed.py" in of_rank[name, False]


@pytest.mark.medium
@pytest.mark.parametrize("name", ["dict", "stars", "of its parts", "deepcopy"])
def test_containers_keep_how_arrays_lie(found, name):
    assert all("findings of the check" in of_rank[name] for of_rank in found), found[0][name]


@pytest.mark.medium
@pytest.mark.parametrize(("name", "path"), [("clone", "0/step"), ("a new leaf", "0/params/a")])
def test_new_arrays_are_refused_by_name_where_a_state_is_updated(found, name, path):
    for of_rank in found:
        assert (
            f"whose layouts are not known: '{path}'" in of_rank[name] and "tree.place(arrays, layouts)" in of_rank[name]
        )
        assert ", called at test_placed.py:" in of_rank[name]  # the line of who calls it, whoever has written the step


@pytest.mark.medium
def test_evaluations_are_checked(found):
    for of_rank in found:
        assert of_rank["evaluation", "sums"] == "proven"
        assert "1/loss" in of_rank["evaluation", "forgets"] or "loss is" in of_rank["evaluation", "forgets"]


@pytest.mark.medium
def test_what_is_not_checked_is_said_once_by_one_rank(found):
    (said,), others = (of_rank["said"] for of_rank in found)
    assert "'0/a'" in said and "not checked" in said and "test_placed.py" in said and not others


def test_every_op_drops_it_and_containers_keep_it():
    x = tree.init(describe(MESH).state, 0, 0).params["a"]
    layout = Layout((8, 6), F64, MESH)
    assert tree.layout_of(x) == layout and tree.layout_of(copy.deepcopy({"x": x})["x"]) == layout
    made = (x + 0, x.clone(), x.detach(), x.view(-1), x[0], x.to(torch.float32), torch.nn.Parameter(x))
    assert [tree.layout_of(one) for one in made] == [None] * len(made)
    assert tree.layout_of(x.mul_(2)) == tree.layout_of(x.contiguous()) == tree.layout_of(torch.as_tensor(x)) == layout


def test_files_of_placed_arrays_open_everywhere():
    state = tree.init(describe(MESH).state, 0, 0)
    file = io.BytesIO()
    torch.save(state.params, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert torch.equal(read["a"], state.params["a"]) and tree.layout_of(read["a"]) is None
    hash(tuple(signature_of([read["a"]], labels=True)))  # as a jit on several ranks asks


def test_a_layout_is_stated_once():
    x, layout = torch.zeros(4, 6), Layout((8, 6), torch.float32, MESH, ("dp",))
    assert tree.place({"x": x}, layout)["x"] is x and tree.place({"x": x}, {"x": layout})["x"] is x
    assert tree.layouts({"x": x}) == {"x": layout}
    with pytest.raises(ValueError, match=r"place: x: got a tensor that is known to be .*x.detach\(\)"):
        tree.place({"x": x}, Layout((4, 6), torch.float32, MESH))
    with pytest.raises(ValueError, match=r"x: got local shape \(4, 6\), wanted \(8, 6\) on rank 0"):
        tree.place({"x": x.detach()}, Layout((8, 6), torch.float32, MESH))
    with pytest.raises(ValueError, match="y: got a tensor whose layout is not known"):
        tree.layouts({"x": x, "y": x + 1})
    y = tree.place({"y": x.detach()}, {"y": x})["y"]  # as another array
    assert tree.layout_of(y) == layout


def test_a_strategy_is_said_where_the_specs_are_made():
    mesh, optimizer = Mesh(dp=2, fsdp=2), optim.adamw(1e-3)
    specs = tree.specs({"w": (8, 4)}, mesh, strategy=DataParallel.zero3())
    state = step.state_specs(specs, optimizer)
    assert {spec.strategy for spec in tree.leaves(state)} == {DataParallel.zero3()}
    assert {spec.layout.sharded for spec in tree.leaves(state.opt) if spec.shape == (8, 4)} == {("dp", "fsdp")}
    with pytest.raises(ValueError, match="got the strategy .* and specs of .*, wanted one"):
        step.state_specs(specs, optimizer, DataParallel.zero1())
    other = tree.specs({"v": (8, 4)}, mesh, strategy=DataParallel.zero1())
    with pytest.raises(ValueError, match="got two strategies, .* of 'v' and .* of 'w'"):
        step.state_specs({**specs, **other}, optimizer)


def test_a_result_lies_as_the_function_states():
    """What a step returns beside its state is the same on all ranks, unless it says how it lies."""
    described = describe(MESH)
    rows = Layout((8, 6), F64, MESH, ("dp",))

    def with_rows(state, batch, placed):
        new, metrics = described.function(state, batch)
        seen = batch["x"] @ state.params["a"]
        return new, {**metrics, "seen": tree.place(seen, rows) if placed else seen}

    given = described.state, described.batch
    assert step.check(lambda s, b: with_rows(s, b, True), *given).ok
    (finding,) = step.check(lambda s, b: with_rows(s, b, False), *given).findings
    assert "1/seen is sharded on dim 0" in finding.what
    assert step.check(lambda p, b: b["x"] @ p["a"], described.state.params, described.batch).ok  # rows, as it likes
    (finding,) = step.check(lambda p, b: {"g": b["x"].sum(0)}, described.state.params, described.batch).findings
    assert "partial (sum)" in finding.what  # a pending sum is no array


def test_a_description_takes_itself_apart_and_refuses_what_is_none():
    described = describe(MESH)
    function, state, batch = described
    assert (function, state, batch) == (described.function, described.state, described.batch)
    with pytest.raises(ValueError, match="Description: function: got"):
        step.Description(state, function, batch)
    with pytest.raises(ValueError, match="wanted an ArraySpec, a Layout or a tensor"):
        step.Description(function, {"w": (8, 4)}, batch)


def test_build_takes_layouts_and_shapes_of_a_batch():
    specs = tree.specs({"w": (4, 2)}, Mesh(dp=2), strategy=DataParallel.zero1())
    rows = DataParallel.zero1().batch_layout((8, 4), torch.float32, Mesh(dp=2))

    def loss_fn(params, batch):
        return step.mean((batch["x"] @ params["w"]).square().sum(), len(batch["x"]))

    for given in (rows, ((8, 4), torch.float32), torch.zeros(8, 4)):
        assert step.build(loss_fn, optim.sgd(0.1), specs, {"x": given}).batch == {"x": rows}
    with pytest.raises(
        ValueError, match=r"Description: batch\['x'\]: got a dict of a, wanted the shape .* or its Layout"
    ):
        step.build(loss_fn, optim.sgd(0.1), specs, {"x": {"a": 1}})
