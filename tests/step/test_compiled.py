"""A compiled step computes what the plain function computes, on every backend and policy, and is compiled once.

In fp64 losses, parameters and both moments agree to 1e-10 after five AdamW steps. In fp32 only losses are compared:
AdamW turns the rounding of gradients near zero into steps of the size of the learning rate.
"""

import pytest
import torch
from torch._dynamo.utils import counters

from fmegatron import tree
from fmegatron.step import jit
from fmegatron.testing import assert_pure
from fmegatron.testing.compare_ranks import relative_error
from tests.fresh_state import fresh_state
from tests.step import tiny

CALLS = 10
CONFIG = tiny.config_with(layers=1)  # several in one step: the stack of MLP layers
DECODER_BATCHES = [tiny.decoder_batch(seed=i) for i in range(CALLS)]
MLP_BATCHES = [tiny.mlp_batch(seed=i) for i in range(5)]


def keep_products(node) -> bool:
    """A policy: matrix products are saved, everything else is made again."""
    return node.target is torch.ops.aten.mm.default


def compilations() -> tuple:
    """What torch has compiled or loaded in this process so far."""
    inductor = counters["inductor"]
    return (
        counters["stats"]["unique_graphs"],
        counters["aot_autograd"]["total"],
        inductor["fxgraph_cache_hit"] + inductor["fxgraph_cache_miss"],
    )


def assert_equal_states(got, wanted):
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(wanted), strict=True):
        assert relative_error(a, b) <= 1e-10, path


# ---- the decoder -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def plain():
    """The plain Python function with plain layers: (loss of each call, state after five, state after the last)."""
    step = tiny.decoder_step(CONFIG)
    first, state = tiny.run_steps(step, tiny.decoder_state(CONFIG), DECODER_BATCHES[:5])
    rest, last = tiny.run_steps(step, state, DECODER_BATCHES[5:])
    return first + rest, state, last


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("inductor", marks=pytest.mark.medium),
        pytest.param("compile", marks=pytest.mark.slow),
        "aot_eager",
    ],
)
def compiled(request):
    """(step, loss of each call, state after five, state after the last, what was compiled after 1 and after all)."""
    step = jit(tiny.decoder_step(CONFIG, save="mincut"), donate=0, backend=request.param, patches=tiny.SCALAR)
    first, state = tiny.run_steps(step, tiny.decoder_state(CONFIG), DECODER_BATCHES[:1])
    after_one = compilations()
    losses, state = tiny.run_steps(step, state, DECODER_BATCHES[1:5])
    after_five = tiny.copied(state)
    rest, state = tiny.run_steps(step, state, DECODER_BATCHES[5:])
    return step, first + losses + rest, after_five, state, (after_one, compilations())


@pytest.mark.medium
def test_decoder_equals_the_plain_function(compiled, plain):
    assert compiled[1] == pytest.approx(plain[0], rel=1e-10)
    assert_equal_states(compiled[2], plain[1])
    assert_equal_states(compiled[3], plain[2])


@pytest.mark.medium
def test_nothing_is_compiled_after_the_first_call(compiled):
    after_one, after_all = compiled[4]
    assert after_one == after_all
    assert len(compiled[0].cache) == 1


PRECISIONS = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "tolerance"), PRECISIONS, ids=str)
def test_lower_precision(compute, tolerance):
    """fp32 against the plain function in fp32; bf16 matrices and activations over fp32 weights against all fp32."""
    single = tiny.config_with(torch.float32, layers=1)
    wanted, _ = tiny.run_steps(tiny.decoder_step(single), tiny.decoder_state(single), DECODER_BATCHES[:5])
    config = tiny.config_with(torch.float32, compute_dtype=compute, layers=1)
    step = jit(tiny.decoder_step(config, save="mincut"), donate=0)
    losses, state = tiny.run_steps(step, tiny.decoder_state(config), DECODER_BATCHES[:5])
    assert losses == pytest.approx(wanted, rel=tolerance)
    assert {x.dtype for x in tree.leaves(state) if x.is_floating_point()} == {torch.float32}


# ---- plain functions -------------------------------------------------------------------------------------------------
POLICIES = [("mincut", 1), ("mincut", 2), ("inputs", 1), ("all", 1), (0.5, 1), (keep_products, 1)]
COMPILED = [(*case, "inductor") for case in POLICIES]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("save", "microbatches", "backend"),
    [
        *((*case, "aot_eager") for case in POLICIES),
        COMPILED[1],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED if case != COMPILED[1]),
    ],
)
def test_policies(save, microbatches, backend):
    """With microbatches the layers are opaque nodes inside of an opaque node."""
    wanted = tiny.run_steps(tiny.mlp_step(), fresh_state(tiny.mlp_params(), tiny.OPTIMIZER), MLP_BATCHES)
    step = jit(tiny.mlp_step(save, microbatches=microbatches), donate=0, backend=backend, patches=tiny.SCALAR)
    losses, state = tiny.run_steps(step, fresh_state(tiny.mlp_params(), tiny.OPTIMIZER), MLP_BATCHES)
    assert losses == pytest.approx(wanted[0], rel=1e-10)
    assert_equal_states(state, wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "tolerance"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] == torch.float32 else ()) for case in PRECISIONS],
    ids=str,
)
def test_layers_of_lower_precision(compute, tolerance):
    """The same of the stack of MLP layers."""
    params, loss = tiny.mlp_params(dtype=torch.float32), tiny.mlp_loss("mincut")
    batches = [tiny.mlp_batch(dtype=torch.float32, seed=i) for i in range(5)]
    wanted, _ = tiny.run_steps(tiny.mlp_step(params=params), fresh_state(params, tiny.OPTIMIZER), batches)

    def in_compute(params, batch):
        return loss(*tree.map(lambda x: x.to(compute), (params, batch)))

    step = jit(tiny.train_step_of(in_compute, params), donate=0, patches=tiny.SCALAR)
    losses, state = tiny.run_steps(step, fresh_state(params, tiny.OPTIMIZER), batches)
    assert losses == pytest.approx(wanted, rel=tolerance)
    assert {x.dtype for x in tree.leaves(state) if x.is_floating_point()} == {torch.float32}


@pytest.mark.medium
@pytest.mark.parametrize("backend", ["inductor", "compile", "aot_eager", "eager"])
def test_any_pure_function(backend):
    """Trees of any kind in and out, constants in the arguments and in the result."""

    def f(numbers, scale, name):
        total = sum(x.sum() for x in numbers["list"])
        return {"scaled": [scale * x + total for x in numbers["list"]], "same": (numbers["one"], name, scale)}

    numbers = {
        "list": [torch.randn(3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)],
        "one": torch.ones(2),
    }
    compiled = jit(f, backend=backend)
    got, wanted = assert_pure(compiled, numbers, 2.5, "name"), f(numbers, 2.5, "name")
    assert tree.paths(got) == tree.paths(wanted)
    assert got["same"][1:] == ("name", 2.5)
    for a, b in zip(got["scaled"] + [got["same"][0]], wanted["scaled"] + [wanted["same"][0]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.filterwarnings("ignore:f is compiled again")  # test_signature.py
def test_signature():
    """Shape, stride, dtype, structure and Python constants make a graph; values of tensors do not."""
    calls = []

    def f(x, n=1):
        calls.append(n)
        return x * n

    step = jit(f, backend="eager")
    for x, n, entries in [
        (torch.ones(2, 3), 1, 1),
        (torch.zeros(2, 3), 1, 1),
        (torch.ones(2, 4), 1, 2),
        (torch.ones(3, 2).t(), 1, 3),
        (torch.ones(2, 3, dtype=torch.float64), 1, 4),
        (torch.ones(2, 3), 2, 5),
        (torch.ones(2, 3), 2.0, 6),
        (torch.ones(2, 3), True, 7),
        (torch.ones(2, 3), 1, 7),
    ]:
        assert torch.equal(step(x, n), x * n)
        assert len(step.cache) == len(calls) == entries
    with pytest.raises(ValueError, match="leaf '1': got a ndarray, wanted a tensor"):
        step(torch.ones(2), torch.ones(2).numpy())


def test_a_tree_of_another_structure_is_another_graph():
    step = jit(lambda t: t["a"] if "a" in t else t["b"] * 2, backend="eager")
    assert torch.equal(step({"b": torch.ones(1)}), torch.full((1,), 2.0))
    with pytest.warns(UserWarning, match="'0/a' is new; '0/b' is missing"):
        assert torch.equal(step({"a": torch.ones(1)}), torch.ones(1))


@pytest.mark.medium
def test_without_a_compiler(monkeypatch):
    """One line names the package to install; the result is right, and nothing else changes."""
    monkeypatch.setattr("fmegatron.step.compile.cpp_compiler", lambda: None)
    step = jit(tiny.mlp_step("mincut"), donate=0)
    with pytest.warns(UserWarning) as warnings:
        losses, _ = tiny.run_steps(step, fresh_state(tiny.mlp_params(), tiny.OPTIMIZER), MLP_BATCHES)
    assert len(warnings) == 1 and "g++" in str(warnings[0].message) and "aot_eager" in str(warnings[0].message)
    assert "\n" not in str(warnings[0].message)
    wanted, _ = tiny.run_steps(tiny.mlp_step(), fresh_state(tiny.mlp_params(), tiny.OPTIMIZER), MLP_BATCHES)
    assert losses == pytest.approx(wanted, rel=1e-10)
    assert {c.program.target.backend for c in step.cache.values()} == {"aot_eager"}
