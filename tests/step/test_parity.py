"""Some AdamW steps of the whole model: on every mesh what one rank computes, simulated and on real gloo ranks.

Loss, grad_norm, every parameter, and both moments of every gradient are compared. With and without an active clip,
because a clip and Adam each hide a factor that all gradients share.
"""

import itertools
import re

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import connect
from fmegatron.layout import Mesh
from fmegatron.step import jit
from fmegatron.testing import Ranks, assert_parity, assert_pure, parity, simulate, split
from fmegatron.testing.compare_ranks import relative_error
from tests.pairs import few, shifted
from tests.step.whole_step import MESHES, layouts_of, make_config, make_step, whole_batch, whole_state

SWITCHES = list(itertools.product([0.01, None], [False, True], [False, True]))  # clip, sequence parallel, tied


def check(mesh, clip_norm, sequence_parallel, tied):
    config = make_config(tied, sequence_parallel)
    result = assert_parity(
        lambda m: make_step(config, m, clip_norm), mesh, whole_state(config), lambda i: whole_batch(config, i),
        layouts=layouts_of(config, mesh), out_layouts=(layouts_of(config, mesh)[0], None), steps=3,
    )  # fmt: skip
    clipped = result.sharded.metrics["grad_norm"] > (clip_norm or float("inf"))
    assert clipped == (clip_norm is not None)


# In this order every eight in a row have all meshes and all switches.
CASES = [case for by in range(len(MESHES)) for case in shifted(by, MESHES, SWITCHES)]


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "switches"), few(3, CASES, [f"{mesh}-{switches}" for mesh, switches in CASES]))
def test_simulated(mesh, switches):
    check(mesh, *switches)


@pytest.mark.slow
def test_simulated_fp32_losses():
    """Losses to 1e-5; parameters only to about 1e-4, because Adam turns rounding of small gradients into steps."""
    config = make_config(sequence_parallel=True, dtype=torch.float32)
    runs = [simulated_steps(mesh, config, 1.0)[1] for mesh in (Mesh(), Mesh(dp=2, fsdp=2, tp=2))]
    for one, many in zip(*runs, strict=True):
        assert abs(one["loss"] - many["loss"]) <= 1e-5 * one["loss"]


@pytest.mark.slow
@pytest.mark.long
def test_blame_in_the_whole_model():
    """Gradients of replicated norm weights that are not summed over fsdp: found through compiled layers and a clip that
    groups the leaves otherwise on every mesh, with the lines where the sums began and no other finding than theirs."""
    config, mesh, save = make_config(sequence_parallel=True), Mesh(dp=2, fsdp=2), "inputs"
    ins = layouts_of(config, mesh)
    result = parity(
        lambda m: make_step(config, m, 0.01, save, data=("dp",)), mesh, whole_state(config),
        whole_batch(config, 0), layouts=ins, out_layouts=(ins[0], None),
    )  # fmt: skip
    assert len(result.findings) == 3 and all(finding.at.startswith("whole_step.py:") for finding in result.findings)
    since = [f for f in result.findings if re.search(r"a sum over fsdp since \S+ \(in fmegatron/nn/norm\.py:", f.what)]
    assert len(since) == 2, "\n".join(map(str, result.findings))


# ---- real ranks ------------------------------------------------------------------------------------------------------
def steps_on_rank(rank, mesh, config, clip_norm, save, backend):
    """Five steps on this rank, through jit and with donation: (final state, metrics of each step)."""
    layouts = layouts_of(config, mesh)
    with connect(mesh) as world:
        step = jit(make_step(config, mesh, clip_norm, save), donate=0, world=world, backend=backend)
        state = tree.map(lambda x: x.clone(), split(whole_state(config), layouts[0])[rank])
        state = tree.place(state, layouts[0], rank)
        metrics = []
        for i in range(5):
            batch = split(whole_batch(config, i), layouts[1])[rank]
            state, found = step(state, batch)
            metrics.append({k: v.item() for k, v in found.items()})
        assert len(step.cache) == 1
    return state, metrics


def simulated_steps(mesh, config, clip_norm, save=None):
    layouts = layouts_of(config, mesh)
    step = make_step(config, mesh, clip_norm, save)
    state, out_layouts = whole_state(config), (layouts[0], None)
    sims = [simulate(step, mesh, state, whole_batch(config, 0), layouts=layouts, out_layouts=out_layouts)]
    for i in range(1, 5):
        sims.append(sims[-1].again(Ranks(out[0] for out in sims[-1].outputs), whole_batch(config, i)))
    return [o[0] for o in sims[-1].outputs], [sim.metrics for sim in sims]


REAL = [(Mesh(tp=2), None), (Mesh(fsdp=2, tp=2), "mincut"), (Mesh(fsdp=2), "inputs"), (Mesh(dp=2, tp=2), None)]
QUICK_REAL = [(*REAL[2], "eager")]  # aot_eager on ranks: test_strategies.py


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mesh", "policy", "backend"),
    [
        pytest.param(*case, marks=() if case in QUICK_REAL else pytest.mark.slow)
        for case in ((*real, backend) for real in REAL for backend in ("eager", "aot_eager"))
    ],
    ids=str,
)
def test_real_ranks_equal_simulated_ranks(ranks, mesh, policy, backend):
    """Bit for bit where groups have 2 ranks; in a group of 4 gloo may add in another order."""
    config = make_config(sequence_parallel=True)
    real = ranks.run(steps_on_rank, mesh, config, 0.01, policy, backend, ranks=mesh.size)
    states, metrics = simulated_steps(mesh, config, 0.01, policy)
    tolerance = 0.0 if policy is None else 1e-12
    for rank, (state, found) in enumerate(real):
        for i, wanted in enumerate(metrics):
            assert found[i] == pytest.approx(wanted, rel=1e-12), f"metrics of step {i} on rank {rank}"
        for path, got, wanted in zip(tree.paths(state), tree.leaves(state), tree.leaves(states[rank]), strict=True):
            assert relative_error(got, wanted) <= tolerance, f"{path} on rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_real_ranks_fp32_losses(ranks, backend):
    config, mesh = make_config(dtype=torch.float32), Mesh(fsdp=2)
    real = ranks.run(steps_on_rank, mesh, config, 1.0, None, backend, ranks=2)
    _, one = simulated_steps(Mesh(), config, 1.0)
    for _, metrics in real:
        for got, wanted in zip(metrics, one, strict=True):
            assert abs(got["loss"] - wanted["loss"]) <= 1e-5 * wanted["loss"]


# ---- purity ----------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_without_donation_changes_no_argument(compiled):
    """Called plainly and through jit; a donated step is the one exception, and says so."""
    config, mesh = make_config(), Mesh()
    step = make_step(config, mesh, 0.01)
    step = jit(step, backend="aot_eager") if compiled else step
    state, _ = assert_pure(step, whole_state(config), whole_batch(config, 0))
    assert int(state.step) == 1
