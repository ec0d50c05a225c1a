"""The state at step 0: drawn into its shards under a memory limit, the same under every strategy, masters included."""

import sys

import pytest
import torch

from fmegatron import model, optim, tree
from fmegatron.layout import DataParallel, Mesh
from fmegatron.optim import contrib
from fmegatron.step import state_specs
from fmegatron.testing import join
from tests.house import ROOT
from tests.optim.table import DTYPES, assert_same, grads_of, make_specs
from tests.step.strategies import STRATEGIES, make_config, specs_of

LIMITED = """
import resource
import torch
from fmegatron import optim, step, tree
from fmegatron.layout import DataParallel, Layout, Mesh

mesh, strategy, optimizer = Mesh(dp=4, fsdp=8), DataParallel.{strategy}(), optim.adamw(1e-3)
specs = {{f"w{{i}}": tree.ArraySpec(strategy.params_layout(Layout((4096, 2048), torch.float32, mesh)), tree.Normal())
         for i in range(8)}}
whole = sum(s.layout.nbytes for s in tree.leaves(step.state_specs(specs, optimizer, strategy)))
mine = sum(s.layout.local_nbytes(5) for s in tree.leaves(step.state_specs(specs, optimizer, strategy)))
small = {{"w": tree.ArraySpec(Layout((64, 64), torch.float32, mesh), tree.Normal())}}
tree.init(step.state_specs(small, optimizer, strategy), 0, 5)  # imports and threads, before the limit
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
limit = used + mine + (64 << 20)
assert whole > 2 * (limit - used), (whole, limit - used)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
state = tree.init(step.state_specs(specs, optimizer, strategy), 0, 5)
assert sum(x.nbytes for x in tree.leaves(state)) == mine
try:
    torch.ones(limit - used, dtype=torch.uint8)
except RuntimeError:
    print("the limit holds;", whole >> 20, "MiB drawn under", (limit - used) >> 20)
"""


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero3", "hybrid"])
def test_a_state_that_is_larger_than_the_memory_of_a_rank(strategy, python):
    script = LIMITED.format(strategy=strategy)
    done = python.run([sys.executable, "-c", script], timeout=600, cwd=ROOT, env={"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert "the limit holds" in done.stdout


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_strategy_starts_alike(dtype):
    """The same parameters as one rank draws, and masters that are the parameters."""
    config = make_config(dtype)
    optimizer = optim.adamw(1e-3)
    one = tree.init(state_specs(model.specs(config, Mesh()), optimizer), 7, 0)
    for name, strategy in STRATEGIES.items():
        for mesh in (Mesh(dp=2, fsdp=2), Mesh(fsdp=4)):
            specs = model.specs(config, mesh, strategy=strategy)
            state_at_0 = state_specs(specs, optimizer, strategy)
            parts = [tree.init(state_at_0, 7, rank) for rank in range(mesh.size)]
            for rank, part in enumerate(parts):
                tree.check(part, tree.layouts(specs_of(config, mesh, strategy, optimizer)), rank)
            state = join(parts, specs_of(config, mesh, strategy, optimizer))
            for path, a, b in zip(tree.paths(one), tree.leaves(state), tree.leaves(one), strict=True):
                assert torch.equal(a, b), (name, mesh, path)
    if dtype == torch.bfloat16:
        for a, b in zip(tree.leaves(one.params), tree.leaves(one.opt["master"]), strict=True):
            assert b.dtype == torch.float32 and torch.equal(a.float(), b)


STILL = {
    "adamw": optim.adamw(1e-30),
    "muon": optim.muon(1e-30, parts=[("blocks/0/w", 2)], matrices=["w$"]),
    "soap": contrib.soap(1e-30, matrices=["w$"]),
    "adafactor": contrib.adafactor(1e-30),
    "guarded": optim.skip_nonfinite(optim.adamw(1e-30)),
    "sgd": optim.sgd(1e-30, momentum=0.9),
}


@pytest.mark.parametrize("dtypes", [DTYPES["bf16"], DTYPES["mixed"]], ids=["bf16", "mixed"])
@pytest.mark.parametrize("optimizer", STILL.values(), ids=STILL)
def test_a_step_of_no_length_moves_nothing(optimizer, dtypes):
    """A master copy that began as other numbers than its parameter would replace it at the first step."""
    specs = make_specs(dtypes)
    state = tree.init(state_specs(specs, optimizer), key=0, rank=0)
    assert_same(state.params, tree.init(specs, key=0, rank=0))  # one key, one model
    params, _ = optimizer.update(grads_of(state.params), state.opt, state.params)
    assert_same(params, state.params)


def test_a_strategy_by_its_name():
    assert DataParallel.named("zero2") == DataParallel.zero2()
    with pytest.raises(ValueError, match="got the strategy 'zero4', wanted one of replicated, zero1"):
        DataParallel.named("zero4")
