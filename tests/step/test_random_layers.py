"""Random layers, compiled under every policy, have the results and gradients that autograd gives the plain function."""

import pytest
import torch

from fmegatron import tree
from fmegatron.step import jit
from fmegatron.step.layer import compiled_layer
from tests.sampling import seeds
from tests.step.random_layers import POLICIES, gradients, random_layer

WAYS = [(policy, offload) for policy in POLICIES for offload in (None, 0)]


def difference(got, wanted, rounding: float) -> str:
    """The first leaf that differs by more than rounding, or in shape or dtype; "" if there is none."""
    if isinstance(wanted, dict):
        got = {key: got[key] for key in wanted}
    for path, a, b in zip(tree.paths(wanted), tree.leaves(got), tree.leaves(wanted), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{path}: got {a.dtype} {tuple(a.shape)}, wanted {b.dtype} {tuple(b.shape)}"
        a, b = a.double(), b.double()
        if b.numel() and not float((a - b).abs().max()) <= rounding * (float(b.abs().max()) + 1e-3):
            return f"{path}: got {a.tolist()}, wanted {b.tolist()}"
    return ""


def tried(seed: int, ways=WAYS) -> str:
    """What is wrong with the layer of a seed under the policies, with its program, else ""."""
    layer = random_layer(seed)
    wanted, before = layer.expected(), tree.map(torch.clone, layer.calls)
    for policy, offload in ways:
        compiled = compiled_layer(POLICIES[policy], offload=offload)(layer.fn, layer.prepare)
        try:
            found = difference(gradients(compiled, layer.calls, spoil=True), wanted, layer.rounding)
        except Exception as e:
            found = f"{type(e).__name__}: {e}"
        found = found or difference(layer.calls, before, 0.0)
        if found:
            return f"save={policy!r}, offload={offload}: {found}\n{layer}"
    return ""


@pytest.mark.slow
@pytest.mark.long
def test_layers():
    """Each layer under two of the policies."""
    ways = [(WAYS[i % len(WAYS)], WAYS[(i + 5) % len(WAYS)]) for i in range(20)]
    found = [tried(seed, some) for seed, some in zip(seeds("layers", 10, 10), ways, strict=True)]
    assert not any(found), "\n\n".join(filter(None, found))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
def test_layers_under_every_policy(part):
    found = [tried(seed) for seed in seeds("more layers", 100, 200)[part::10]]
    assert not any(found), "\n\n".join(filter(None, found))


def compiled(several: list[int], policy: str, backend: str) -> None:
    """Several layers in one step."""
    layers = [random_layer(seed) for seed in several]

    def step(calls):
        made = [compiled_layer(POLICIES[policy])(layer.fn, layer.prepare) for layer in layers]
        return [gradients(layer, given) for layer, given in zip(made, calls, strict=True)]

    got = jit(step, backend=backend)([layer.calls for layer in layers])
    for layer, found in zip(layers, got, strict=True):
        wrong = difference(found, layer.expected(), layer.rounding)
        assert not wrong, f"save={policy!r}, {backend}: {wrong}\n{layer}"


@pytest.mark.medium
def test_compiled():
    compiled(seeds("compiled layers", 1, 1), "all", "aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_more_compiled(backend, part, policy):
    compiled(seeds(f"more compiled layers {policy}", 20, 20)[part::5], policy, backend)
