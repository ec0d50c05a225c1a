"""Settings of torch around a call are part of its signature: each graph computes what plain torch computes there."""

import contextlib
import warnings

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.step.ambient import ambient
from fmegatron.step.layer import compiled_layer

pytestmark = pytest.mark.filterwarnings("ignore:.*is compiled again")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def descent(w, x):
    (loss, _), grads = step.value_and_grad(lambda p: (torch.tanh(x @ p["w"]).square().mean(), {}))({"w": w})
    return {"w": w - grads["w"]}, loss


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


@contextlib.contextmanager
def changed(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


def precision(value):
    return changed(torch.set_float32_matmul_precision, value, "highest")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", [contextlib.nullcontext, autocast])
def test_autocast(backend, first):
    """Traced inside and called outside, traced outside and called inside, another dtype: as plain torch there."""
    w, x = randn(64, 64), randn(8, 64, seed=1)
    jitted = step.jit(descent, backend=backend)
    for around in (first, autocast, contextlib.nullcontext, lambda: autocast(torch.float16), autocast):
        with around():
            got, wanted = jitted(w, x)[0]["w"], descent(w, x)[0]["w"]
        bar = 0 if backend == "eager" else 2e-3 if around is not contextlib.nullcontext else 1e-6
        assert (got - wanted).abs().max() <= bar
    assert len(jitted.cache) == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_inside_of_inference_mode(backend):
    """A step takes its gradients wherever it is called; torch refuses them there."""
    w, x = randn(8, 8), randn(4, 8, seed=1)
    wanted = descent(w, x)[0]["w"]
    for around in (torch.inference_mode, torch.no_grad):
        jitted = step.jit(descent, backend=backend)
        with around():
            assert torch.equal(jitted(w.clone(), x.clone())[0]["w"], wanted)
        assert torch.equal(jitted(w, x)[0]["w"], wanted)


def test_the_second_trace_is_said_by_name():
    jitted = step.jit(descent, backend="eager")
    w, x = randn(4, 4), randn(8, 4, seed=1)
    jitted(w, x)
    with autocast(), pytest.warns(UserWarning, match="torch's autocast on cpu is torch.bfloat16, was off"):
        jitted(w, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(w, x)
        assert len(jitted.cache) == 2


def test_default_dtype():
    jitted, fresh = (step.jit(lambda n: n / 3, backend="eager") for _ in range(2))
    counts = torch.arange(4)
    jitted(counts)
    with changed(torch.set_default_dtype, torch.float64, torch.float32):
        assert jitted(counts).dtype == fresh(counts).dtype == torch.float64
    assert jitted(counts).dtype == torch.float32


def test_default_device():
    jitted = step.jit(lambda x: x + torch.ones(3, device=None).to(x.device), backend="eager")
    x = torch.ones(3)
    jitted(x)
    with torch.device("meta"):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            jitted(x)
        assert ambient() != jitted.cache[next(iter(jitted.cache))].ambient
    assert torch.equal(jitted(x), x + 1)


@pytest.mark.parametrize(
    "around, words",
    [
        (lambda: precision("medium"), "fp32 precision of mkldnn matmul is bf16, was ieee"),
        (lambda: changed(torch.use_deterministic_algorithms, True, False), "deterministic algorithms is on, was off"),
        (lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), "flash attention is off, was on"),
        (lambda: torch.backends.cudnn.flags(enabled=False), "cudnn is off, was on"),
    ],
)
def test_other_settings(around, words):
    jitted = step.jit(lambda x: x @ x, backend="eager")
    jitted(x := randn(8, 8))
    with around(), pytest.warns(UserWarning, match=words):
        got, wanted = jitted(x), x @ x
    assert torch.equal(got, wanted) and len(jitted.cache) == 2
    assert torch.equal(jitted(x), x @ x) and len(jitted.cache) == 2


def test_a_state_that_is_taken_whole():
    """The quick way of a donated call asks too."""
    specs = tree.specs({"w": (64, 64)}, Mesh(), init=tree.Normal(0.3))
    opt = optim.sgd(0.1)

    def loss(p, b):
        return ((b["x"] @ p["w"]).square().mean(), {})

    train = step.build_train_step(loss, opt, tree.layouts(specs), Axes(Mesh()))
    runs = []
    for jitted in (step.jit(train, donate=0, backend="eager"), train):
        state, losses = tree.init(step.state_specs(specs, opt), 0, 0), []
        for i in range(6):
            with autocast() if i == 3 else contextlib.nullcontext():
                state, metrics = jitted(state, {"x": randn(8, 64, seed=i)})
            losses.append(float(metrics["grad_norm"]))
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


def test_layers_and_jits_inside():
    """What is traced once and called again knows where it was traced."""
    layer, inner = compiled_layer()(lambda x, w: x @ w), step.jit(lambda x, w: (x @ w).tanh(), backend="eager")
    x, w = randn(16, 16), randn(16, 16, seed=1)

    def plain(x, w):
        return ((x @ w).float(), (x @ w).tanh())

    def both(x, w):
        return layer(x, w).float(), inner(x, w)

    jitted, other = step.jit(both, backend="eager"), step.jit(lambda x, w: both(x, w), backend="eager")
    for call, around in ((jitted, autocast), (other, contextlib.nullcontext), (other, autocast)):
        with around():
            for got, wanted in zip(call(x, w), plain(x, w), strict=True):
                assert torch.equal(got, wanted)
