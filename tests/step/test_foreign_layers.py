"""Layers as others write them, cut in two by every policy, have the gradients that autograd gives the plain one."""

import pytest
import torch

from fmegatron import tree
from fmegatron.step import accumulate, jit, remat, value_and_grad
from fmegatron.step.layer import compiled_layer
from tests.pairs import each_value, few
from tests.sampling import seeds
from tests.step.foreign_layers import CONSTANT, LAYERS, REST, VIEWS, D, arguments

POLICIES = {
    "inputs": "inputs", "mincut": "mincut", "all": "all", "a third": 0.3,
    "products": lambda node: node.target is torch.ops.aten.mm.default,
}  # fmt: skip


def loss_over(layer, names):
    """Two calls; what is made of the first result can be made in its memory before the second and the backwards."""

    def loss(p, given):
        x, w, rest = p["x"] * p["s"], {"a": p["a"], "b": p["b"]}, [given[name] for name in names]
        first = layer(x, w, *rest)
        made = (0.5 * first.to(torch.float64) + 0.1).square() + first
        again = layer(x * 0.5 + made.sum() * 0.01, {"a": p["a"] - 0.1, "b": -p["b"]}, *rest)
        parts = [(y.double() * torch.arange(1, y.numel() + 1).view(y.shape)).cos().sum() for y in (first, made, again)]
        return sum(parts) + x.sum() + p["a"].square().sum() + p["b"].sum()

    return loss


def assert_equal(got, wanted, name):
    for path, a, b in zip(tree.paths(wanted), tree.leaves(got), tree.leaves(wanted), strict=True):
        loose = {"rtol": 1e-4, "atol": 1e-5} if "float" in name else {"rtol": 1e-9, "atol": 1e-10}
        torch.testing.assert_close(a, b, **loose, msg=lambda text, path=path: f"{name}: {path}: {text}")


def gradients_of(layers):
    """name -> value_and_grad; all of them as one function of the arguments."""
    fs = {name: value_and_grad(loss_over(layer, LAYERS[name][1])) for name, layer in layers.items()}
    return lambda p, given: {name: f(p, given) for name, f in fs.items()}


def compare(names, save, offload, backend):
    step = gradients_of({name: compiled_layer(save, offload=offload)(LAYERS[name][0]) for name in names})
    got = (jit(step, backend=backend) if backend else step)(arguments(), REST)
    wanted = gradients_of({name: LAYERS[name][0] for name in names})(arguments(), REST)
    for name in names:
        assert_equal(got[name], wanted[name], name)


def some(campaign, names, fixed, drawn):
    """A sample of names: the first ones, and others that are drawn."""
    names = list(names)
    return list(dict.fromkeys(names[seed % len(names)] for seed in seeds(campaign, fixed, drawn)))


# ---- every layer and policy ------------------------------------------------------------------------------------------
READ = ["tanh", "relu", "sigmoid", "exp", "softmax", "tanh, part", "own function"]


@pytest.mark.parametrize(("op", "save"), each_value(READ, ["mincut", "all"]))
def test_the_last_op_reads_its_result(op, save):
    compare([f"last: {op}"], save, None, None)


@pytest.mark.long
@pytest.mark.parametrize(("save", "offload"), each_value(POLICIES, [None, 0]))
def test_policies(save, offload):
    drawn = some(f"layers {save} {offload}", LAYERS, 0, 5 if save == "all" else 2)
    compare(drawn, POLICIES[save], offload, None)


@pytest.mark.medium
def test_compiled():
    """In a graph whose compiler may write results over: each is in memory of its own."""
    compare(some("compiled layers", LAYERS, 0, 3), "all", None, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", few(1, [("last: softmax",), ("view: x, expanded",)]))
def test_compiled_by_inductor(name):
    compare([name], "all", None, "inductor")


TENS = [list(LAYERS)[i : i + 10] for i in range(0, len(LAYERS), 10)]


@pytest.mark.slow
@pytest.mark.parametrize("offload", [None, 0])
@pytest.mark.parametrize("save", POLICIES)
def test_every_layer(save, offload):
    compare(LAYERS, POLICIES[save], offload, None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", TENS, ids=lambda names: names[0])
@pytest.mark.parametrize("save, backend", [("all", "inductor"), ("all", "aot_eager"), ("mincut", "aot_eager")])
def test_every_layer_compiled(save, backend, names):
    compare(names, save, None, backend)


# ---- what a layer returns --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [f"view: {name}" for name in VIEWS])
def test_views_become_values_of_their_own(name):
    x, w = arguments()["x"], {k: arguments()[k] for k in "ab"}
    y, wanted = compiled_layer()(LAYERS[name][0])(x, w), LAYERS[name][0](x, w)
    assert torch.equal(y, wanted) and y.untyped_storage().nbytes() == y.numel() * y.element_size()
    y.add_(1)
    assert torch.equal(LAYERS[name][0](x, w), wanted)


@pytest.mark.parametrize("offload", [None, 0])
@pytest.mark.parametrize("name", [f"constant: {name}" for name in CONSTANT])
def test_what_has_no_gradient_says_so(name, offload):
    p = arguments()
    layer = compiled_layer(offload=offload)(LAYERS[name][0])
    assert not layer(p["x"].requires_grad_(), {k: p[k] for k in "ab"}).requires_grad


@pytest.mark.long
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_other_shapes_and_dtypes(backend):
    """One layer, called with other numbers of rows (one and none too), other strides and another dtype."""

    def calls(layer):
        def loss(p, rows):
            total = sum(layer(x, {"a": p["a"], "b": p["b"]}).square().sum() for x in rows)
            return total + layer(p["a"].t(), {"a": p["a"], "b": p["b"]}).square().sum() + narrow(layer, p)

        return value_and_grad(loss)

    def narrow(layer, p):
        return layer(p["x"].float(), {"a": p["a"].float(), "b": p["b"].float()}).double().sum()

    def fn(x, w):
        return (x @ w["a"]).softmax(-1) * w["b"]

    args = arguments(), [arguments(n)["x"] for n in (5, 1, 0, 3)]
    layer = compiled_layer("all")(fn)
    got = (jit(calls(layer), backend=backend) if backend else calls(layer))(*args)
    assert_equal(got, calls(fn)(*args), "float")
    assert len(layer.halves) == 6


@pytest.mark.slow
@pytest.mark.long
def test_microbatches_and_nested_layers():
    """A layer in a layer in a gradient that is one node of the step, run for each of two microbatches."""

    def step(layer):
        inner = layer(lambda x, w: (x @ w["a"]).tanh())
        outer = layer(lambda x, w: inner(inner(x, w) * w["b"], w).softmax(-1))

        def loss(p, batch):
            return (outer(batch["x"], {k: p[k] for k in "ab"}) * batch["s"]).sum() / 4

        return accumulate(loss, 2)

    p, batch = arguments(), {k: arguments(4)[k] for k in "xs"}
    for layer in (compiled_layer("all"), remat):
        assert_equal(jit(step(layer), backend="aot_eager")(p, batch), step(lambda fn: fn)(p, batch), "microbatches")


def test_complex_numbers():
    def step(layer):
        return value_and_grad(lambda p: layer(p["x"], {k: p[k] for k in "ab"}).abs().sum())

    def fn(x, w):
        return ((x @ w["a"]).tanh() + w["b"]).exp()

    p = arguments(dtype=torch.complex128)
    for save in ("inputs", "mincut", "all"):
        assert_equal(step(compiled_layer(save)(fn))(p), step(fn)(p), save)


def test_arguments_by_name():
    def fn(x, w, gain=None, *, mask):
        return torch.where(mask, x @ w["a"], w["b"]) * (1.0 if gain is None else gain)

    def step(layer, **named):
        return value_and_grad(lambda p, mask: layer(p["x"], p, mask=mask, **named).exp().sum())

    layer = compiled_layer()(fn)
    for named in ({}, {"gain": torch.tensor(0.5)}):
        got = step(layer, **named)(arguments(), REST["mask"])
        assert_equal(got, step(fn, **named)(arguments(), REST["mask"]), "by name")


@pytest.mark.parametrize("shards", [{}, {"n": torch.tensor(3)}, {"a": torch.ones(D, D).double()}], ids=list)
def test_a_prepare_whose_weights_have_no_gradient(shards):
    """No shards, whole numbers, and weights that are detached."""

    def detached(w):
        return tree.map(torch.detach, w)

    def fn(x, w):
        return x.tanh() * (1 + sum(t.sum() for t in tree.leaves(w)))

    x = arguments()["x"].requires_grad_()
    (wanted,) = torch.autograd.grad(fn(x, shards).sum(), x)
    for name, save in POLICIES.items():
        w = tree.map(lambda t: t.clone().requires_grad_(t.is_floating_point()), shards)
        x.grad = None
        compiled_layer(save)(fn, detached)(x, w).sum().backward()
        assert_equal(x.grad, wanted, name)
        assert all(t.grad is None for t in tree.leaves(w))


def test_gradients_of_gradients_are_refused():
    """They were zero: to autograd a backward that is one compiled node is a constant."""
    p = arguments()
    x = p["x"].requires_grad_()
    (first,) = torch.autograd.grad(remat(lambda x, w: (x @ w["a"]).tanh())(x, p).sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="got a gradient of its gradient, wanted first gradients only"):
        (first.square().sum() + x.sum()).backward()
