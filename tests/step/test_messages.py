"""What goes wrong in a step is said as "PATH: got X, wanted Y; FIX" with the user's line, wherever it is noticed."""

import logging
import re
from typing import Any, NamedTuple

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.step import State, build_train_step, jit, state_specs, value_and_grad
from fmegatron.step.layer import compiled_layer
from fmegatron.testing import simulate
from tests.fresh_state import fresh_state
from tests.step.tiny import line_of

ONE = Mesh(dp=1)
LAYOUTS = {"b": Layout((3,), torch.float32, ONE), "w": Layout((4, 3), torch.float32, ONE)}
OPTIMIZER = optim.adamw(1e-3)


def params():
    return {"b": torch.zeros(3), "w": torch.ones(4, 3)}


def batch():
    return {"x": torch.ones(8, 4), "y": torch.zeros(8, 3)}


def good(p, b):
    return (b["x"] @ p["w"] + p["b"] - b["y"]).square().mean()


# ---- losses ----------------------------------------------------------------------------------------------------------
def detached(p, b):  # HERE detached
    return good(p, b).detach()


def argmax(p, b):  # HERE argmax
    return (b["x"] @ p["w"]).argmax()


def number(p, b):  # HERE number
    return 3.0


def nothing(p, b):  # HERE nothing
    good(p, b)


def vector(p, b):  # HERE vector
    return (b["x"] @ p["w"]).sum(0)


def named(p, b):  # HERE named
    return {"loss": good(p, b)}


def three(p, b):  # HERE three
    return good(p, b), {}, 3


def listed(p, b):  # HERE listed
    return [good(p, b), {}]


LOSSES = {
    detached: "the loss: got a 0-d tensor without a gradient: it depends on no parameter, or it was detached, wanted a "
    "0-d floating tensor that depends on the parameters; look for .detach(), .data, torch.no_grad()",
    argmax: "the loss: got a tensor of torch.int64, wanted a 0-d floating tensor",
    number: "the loss: got 3.0, wanted a 0-d floating tensor that depends on the parameters; keep it a tensor: no",
    nothing: "the loss: got None, wanted a 0-d floating tensor that depends on the parameters; return it",
    vector: "the loss: got a tensor of shape (3,), wanted a 0-d floating tensor that depends on the parameters; take "
    "its .mean() or .sum()",
    named: "the loss: got a dict of loss, wanted a 0-d floating tensor that depends on the parameters; return the loss "
    "first and the rest behind it",
    three: "its result: got a tuple of 3, wanted loss or (loss, aux); put all else that it returns into aux, a dict",
    listed: "its result: got a list of 2, wanted loss or (loss, aux)",
}


def train(loss, state=None, of=None, **options):
    """One call of the usual step."""
    step = build_train_step(loss, OPTIMIZER, LAYOUTS, Axes(ONE), **options)
    return jit(step, backend="eager")(fresh_state(params(), OPTIMIZER) if state is None else state, of or batch())


WAYS = {
    "value_and_grad": lambda loss: value_and_grad(loss)(params(), batch()),
    "jit": lambda loss: jit(value_and_grad(loss), backend="eager")(params(), batch()),
    "build_train_step": train,
    "two microbatches": lambda loss: train(loss, microbatches=2),
    "simulate": lambda loss: simulate(value_and_grad(loss), Mesh(dp=2), params(), batch()),
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_losses(way):
    for loss, message in LOSSES.items():
        where = f"{loss.__name__} ({line_of(__file__, loss.__name__)})"
        with pytest.raises(ValueError, match=re.escape(f"{where}: {message}")):
            WAYS[way](loss)


@pytest.mark.parametrize("aux, got", [([1.0], "a list of 1"), (torch.zeros(()), r"a tensor of shape \(\)"), (2, "2")])
def test_metrics_that_are_no_dict(aux, got):
    def loss(p, b):  # HERE metrics
        return good(p, b), aux

    (value, _), _ = value_and_grad(loss)(params(), batch())  # any tree will do there
    assert value == good(params(), batch())
    where = re.escape(f"loss ({line_of(__file__, 'metrics')})")
    with pytest.raises(ValueError, match=f"{where}: its metrics: got {got}, wanted a dict of 0-d tensors; give each a"):
        train(loss)


def test_parameters_that_are_none():
    for wrong, message in {
        3.0: "parameter '': got 3.0, wanted a tensor",
        torch.nn.Linear(2, 2): r"got a Linear, wanted a tensor.*of a module: dict\(module.named_parameters\(\)\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            value_and_grad(good)(wrong, batch())
    with pytest.raises(ValueError, match=r"good \(.*:\d+\): its parameters: got an empty dict, wanted a tree"):
        value_and_grad(good)({}, batch())
    with pytest.raises(ValueError, match="value_and_grad: got a dict of b, w, wanted a function"):
        value_and_grad(params())


# ---- inside of a step ------------------------------------------------------------------------------------------------
def transposed(p, b):
    return (b["x"] @ p["w"].t()).sum()  # HERE transposed


def joined(p, b):
    return torch.cat([b["x"] * p["w"][0, 0], b["y"]]).sum()  # HERE joined


def numpy_of_a_batch(p, b):
    return good(p, b) * b["x"].numpy().mean()  # HERE numpy_of_a_batch


def numpy_of_a_weight(p, b):
    return good(p, b) * float(p["b"].numpy().sum())  # HERE numpy_of_a_weight


def item(p, b):
    return good(p, b) * p["b"].sum().item()  # HERE item


INSIDE = {
    transposed: r"{at}: mm got f32\[\d, 4\], f32\[3, 4\]: a and b must have same reduction dim.*of one rank's part",
    joined: r"{at}: cat got f32\[\d, 4\], f32\[\d, 3\]: Sizes of tensors must match except in dimension 0",
    numpy_of_a_batch: r"at {at}: got a read of the values .* \(.numpy\(\) or its memory\).*keep it in tensors, or do",
    numpy_of_a_weight: r"at {at}: got a read of the values of a tensor \(.numpy\(\) or its memory\)",
    item: r"at {at}: got a read of the value of a tensor .*no .item\(\)",
}


@pytest.mark.long
@pytest.mark.parametrize("way", [way for way in WAYS if way != "value_and_grad"])
@pytest.mark.parametrize("loss", INSIDE, ids=lambda loss: loss.__name__)
def test_what_cannot_be_traced(loss, way, caplog):
    """The line and the shapes; the user's part of the stack as a note; no log of torch's own."""
    message = INSIDE[loss].replace("{at}", re.escape(line_of(__file__, loss.__name__)))
    with caplog.at_level(logging.DEBUG, "torch._subclasses.fake_tensor"):
        with pytest.raises(ValueError, match=message) as error:
            WAYS[way](loss)
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.WARNING]
    (note,) = error.value.__notes__
    assert f"in {loss.__name__}\n" in note and "site-packages" not in note


def test_only_this_log_is_silenced(caplog):
    """And only while a step is traced."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def loss(p, b):
        logger.error("something else")
        return transposed(p, b)

    with pytest.raises(ValueError, match="mm got"):
        WAYS["jit"](loss)
    assert [r.message for r in caplog.records] == ["something else"]
    logger.error("failed while attempting to run meta for a test")
    assert len(caplog.records) == 2


def test_errors_of_the_user_stay_their_own():
    def loss(p, b):
        raise KeyError("mine")

    for way in WAYS.values():
        with pytest.raises(KeyError, match="mine"):
            way(loss)


def test_a_step_may_catch_what_torch_refuses():
    """Code that tries one shape and falls back to another is traced as it runs."""

    def loss(p, b):
        try:
            return transposed(p, b)
        except RuntimeError:
            return good(p, b)

    assert WAYS["jit"](loss)[0][0] == good(params(), batch())


# ---- states ----------------------------------------------------------------------------------------------------------
def test_states_that_are_none():
    state = fresh_state(params(), OPTIMIZER)
    for wrong, message in (
        (
            state._asdict(),
            r"got a dict of opt, params, step, wanted a State\(step, params, opt\); give State\(\*\*it\)",
        ),
        (tuple(state), r"got a tuple of 3, wanted a State\(step, params, opt\); give State\(\*it\)"),
        (state.params, r"got a dict of b, w, wanted a State.*; draw one: .* optimizer\), key, rank\)"),
    ):
        with pytest.raises(ValueError, match=f"train_step: its first argument: {message}"):
            train(good, wrong)
    with pytest.raises(ValueError, match=r"got a dict of x, y, wanted .*; the second argument is one: call train_step"):
        train(good, batch(), state)


def test_states_of_other_types_with_the_same_fields():
    """A state of one's own, with more in it, is one."""

    class Mine(tuple):
        step, params, opt = (property(lambda self, i=i: self[i]) for i in range(3))

    state = fresh_state(params(), OPTIMIZER)
    step = build_train_step(good, OPTIMIZER, LAYOUTS, Axes(ONE))
    assert step(Mine(state), batch())[0].step == 1


def test_a_subclass_of_state():
    with pytest.raises(
        TypeError, match=r"class More: got a subclass of State, .*; to carry more, write class More\(Na"
    ):
        type("More", (State,), {})

    class More(NamedTuple):
        step: Any
        params: Any
        opt: Any
        seed: Any

    state = fresh_state(params(), OPTIMIZER)
    train_step = build_train_step(good, OPTIMIZER, LAYOUTS, Axes(ONE))

    def step(more, batch):
        new, metrics = train_step(more, batch)
        return more._replace(**new._asdict(), seed=more.seed + 1), metrics

    got, _ = jit(step, donate=0, backend="eager")(More(*state, torch.zeros(())), batch())
    assert type(got) is More and got.step == got.seed == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"params": {"w": torch.ones(4, 3)}}, "b: got nothing, wanted a leaf"),
        ({"params": {"w": torch.ones(4, 3), "bias": torch.ones(3)}}, "b: got nothing, wanted a leaf"),
        ({"params": [torch.ones(3), torch.ones(4, 3)]}, "the tree itself: got a list of 2, wanted a dict of b, w"),
        ({"params": {"b": None, "w": torch.ones(4, 3)}}, "b: got None, wanted a leaf"),
        ({"opt": optim.sgd(0.1, momentum=0.9).init(params())}, "adam: got nothing, wanted a dict of m, v"),
        ({"opt": None}, "the tree itself: got None, wanted a dict of adam, count"),
    ],
    ids=["missing", "renamed", "list", "None", "another optimizer", "no optimizer"],
)
def test_trees_of_another_structure(changes, message):
    """Both trees are named, and the first place where they differ comes first."""
    (of,) = changes
    whose = {"params": "the layouts of build_train_step", "opt": "what the optimizer makes of the layouts"}[of]
    with pytest.raises(ValueError) as error:
        train(good, fresh_state(params(), OPTIMIZER)._replace(**changes))
    first, second, *_ = str(error.value).splitlines()
    wanted = f"state.{of}: got another structure than {whose}, wanted the same names and containers:"
    assert first == wanted and second == f"  {message}"


@pytest.mark.parametrize(
    "w, message",
    [
        (
            torch.ones(3, 4),
            r"got local shape \(3, 4\), wanted \(4, 3\) .*; its dims are in another order: permute them",
        ),
        (torch.ones(5, 3), r"got local shape \(5, 3\), wanted \(4, 3\) .*; make it with this layout \(tree.init"),
        (torch.ones(4, 3).double(), r"got dtype f64, wanted f32 .*; cast with x.to\(torch.float32\)"),
    ],
)
def test_wrong_leaves_come_with_a_fix(w, message):
    whose = "state.params: got 1 of 2 leaves that disagree with the layouts of build_train_step, wanted none"
    with pytest.raises(ValueError, match=f"(?s){whose}.*w: {message}"):
        train(good, fresh_state({"b": torch.zeros(3), "w": w}, OPTIMIZER))


# ---- calls -----------------------------------------------------------------------------------------------------------
def test_arguments_by_name():
    with pytest.raises(ValueError, match=r"jit of good \(.*:\d+\): got p, b by name, wanted all arguments by position"):
        jit(good, backend="eager")(p=params(), b=batch())

    def scaled(p, b, *, scale):
        return good(p, b) * scale

    (loss, _), _ = value_and_grad(scaled)(params(), batch(), scale=3)
    assert loss == 3 * good(params(), batch())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: jit(3), "jit: got 3, wanted a pure function of trees of tensors"),
        (lambda: jit(torch.nn.Linear(2, 2)), r"jit: got a Linear, wanted .*torch.func.functional_call\(module, params"),
        (lambda: build_train_step(good, OPTIMIZER, LAYOUTS, ONE), r"axes: got a Mesh, wanted Axes\(mesh\)"),
        (lambda: build_train_step(good, OPTIMIZER, params(), Axes(ONE)), r"layouts: b: got a tensor of shape \(3,\)"),
        (
            lambda: build_train_step(good, torch.optim.AdamW([torch.ones(2)]), LAYOUTS, Axes(ONE)),
            "got an AdamW, wanted",
        ),
        (
            lambda: build_train_step(good, torch.optim.AdamW, LAYOUTS, Axes(ONE)),
            "got the class AdamW, wanted an optim.Optimizer",
        ),
        (
            lambda: build_train_step(good, optim.scale_by_adam(), LAYOUTS, Axes(ONE)),
            r"got an optim.Transform, wanted an optim.Optimizer; make one of it .*optim.optimizer\(direction=transform",
        ),
        (
            lambda: value_and_grad(good, has_aux=True),
            "got has_aux=True, wanted .*; leave it out: aux is given whenever",
        ),
        (lambda: value_and_grad(good, argnums=(0, 1)), r"got argnums=\(0, 1\), wanted .*first argument is differ"),
        (lambda: value_and_grad(good, 0), "got argnums=0, wanted a loss_fn and perhaps a torch dtype; leave it out"),
        (lambda: value_and_grad(good, holomorphic=True), "got holomorphic=True, wanted .*arguments of loss_fn go to"),
        (lambda: compiled_layer("min-cut"), "compiled_layer: got save='min-cut', wanted 'mincut', 'inputs'"),
        (lambda: compiled_layer()(torch.ones(1)), "compiled_layer: got a tensor of shape .*, wanted a function"),
        (lambda: compiled_layer()(good)(2.0, {}), r"good \(.*\): x: got 2.0, wanted a tensor; give fn its constants"),
        (lambda: compiled_layer()(good)(torch.ones(1), {"n": 1}), "shards 'n': got 1, wanted a tensor"),
        (lambda: tree.check(LAYOUTS, params(), 0), "its layouts: b: got a tensor .*two trees in each other's place"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_modules_without_arrays_are_functions():
    assert jit(torch.nn.Tanh(), backend="eager")(torch.zeros(2)).tolist() == [0, 0]


def test_shapes_inside_a_layer():
    def layer(x, w):
        return x @ w.t()  # HERE layer

    where = line_of(__file__, "layer")
    with pytest.raises(ValueError, match=rf"layer layer \(.*\): {where}: mm got f32\[8, 4\], f32\[3, 4\]"):
        compiled_layer()(layer)(batch()["x"], params()["w"])


@pytest.mark.parametrize(
    ("named", "fix"),
    [
        ({"donate_argnums": 0}, "give donate=0, the positions"),
        ({"static_argnums": (1,)}, "what is no tensor among the arguments is static"),
        ({"fullgraph": True}, "the whole function is one graph"),
        ({"x": 1}, "arguments of the function go to what jit returns"),
    ],
)
def test_arguments_of_other_jits(named, fix):
    (name,) = named
    with pytest.raises(
        ValueError, match=rf"jit: got {name}=.*, wanted arguments of its own: donate, world, .*; .*{fix}"
    ):
        jit(good, **named)


def test_a_module_of_which_a_parameter_is_left_out():
    module = torch.nn.Linear(4, 3)

    def call(p, x):
        return torch.func.functional_call(module, p, (x,))

    with pytest.raises(
        ValueError, match=r"got a tensor from a closure.*functional_call\(module, \{\*\*params, \*\*buf"
    ):
        jit(call, backend="eager")({"weight": torch.ones(3, 4)}, torch.ones(2, 4))


def test_specs_of_a_transform():
    specs = tree.specs({"w": (4, 3)}, ONE)
    with pytest.raises(ValueError, match="state_specs: optimizer: got an optim.Transform, wanted an optim.Optimizer;"):
        state_specs(specs, optim.scale_by_adam())


def test_a_layer_of_its_arguments():
    layer = compiled_layer(lambda x, w, n: x * w)  # a choice of nodes, and no function yet
    with pytest.raises(ValueError, match=r"wanted a function .*compiled_layer\(save=...\)\(fn\)"):
        layer(torch.ones(2), torch.ones(2), torch.ones(2))
