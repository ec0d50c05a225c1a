"""Random pure steps under jit are the plain function, to the bit, whatever they do to memory; on every backend."""

import pytest
import torch

from fmegatron import tree
from fmegatron.step import jit
from tests.sampling import seeds
from tests.step.random_steps import random_step

CALLS = 3


def copied(x):
    """A copy with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def wrong(step, run, state, batch) -> str:
    """What differs after CALLS calls of `run` that donate the state; "" if nothing does.

    All outputs of all calls, and views of the first state, are looked at in the end, when the memory of the states has
    been written again and again; and no two results may share memory.
    """
    plain = {name: copied(x) for name, x in state.items()}
    views = {name: (x.detach(), x.clone()) for i, (name, x) in enumerate(state.items()) if (step.seed + i) % 3 == 0}
    results = []
    for call in range(CALLS):
        plain, wanted = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, step(plain, batch))
        state, got = run(state, batch)
        results.append((call, wanted, got))
        found = [x for x in tree.leaves((state, got)) if isinstance(x, torch.Tensor) and x.numel()]
        if len({x.untyped_storage().data_ptr() for x in found}) < len(found):
            return f"call {call}: two results share memory"
        for name, x in state.items():
            if not torch.equal(x, plain[name]):
                return f"call {call}: leaf {name} is {x.tolist()}, not {plain[name].tolist()}"
    for call, wanted, got in results:
        for key, x in wanted.items():
            same = (
                torch.equal(x, got[key]) and x.dtype == got[key].dtype if isinstance(x, torch.Tensor) else x == got[key]
            )
            if not same:
                return f"call {call}: output {key} is {got[key]}, not {x}"
    changed = [name for name, (view, before) in views.items() if not torch.equal(view, before)]
    return f"views of {changed} have changed" if changed else ""


def tried(seed: int, backend: str) -> str:
    """What is wrong with the step of a seed on a backend, with its program, else ""."""
    step, state, batch = random_step(seed)
    found = wrong(step, jit(step, donate=0, backend=backend), state, batch)
    return found and "\n".join([f"seed {seed}, {backend}: {found}", *step.code, f"new {step.new}, outs {step.outs}"])


def op_by_op(some: list[int]) -> None:
    """Every other seed on aot_eager, the others on eager."""
    found = [tried(seed, ("eager", "aot_eager")[i % 2]) for i, seed in enumerate(some)]
    assert not any(found), "\n\n".join(filter(None, found))


@pytest.mark.medium
@pytest.mark.parametrize("part", range(4))
def test_op_by_op(part):
    op_by_op(seeds("steps", 50, 70)[part::4])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_op_by_op_more(part):
    op_by_op(seeds("more steps", 0, 1000)[part::10])


class Together:
    """Several random steps as one, so that they are compiled at once."""

    def __init__(self, several):
        self.steps, self.__name__ = [random_step(seed) for seed in several], "together"
        self.seed = several[0]
        self.code = [line for step, _, _ in self.steps for line in [f"# seed {step.seed}", *step.code, str(step.new)]]

    def start(self):
        state = {f"{i}{name}": x for i, (_, state, _) in enumerate(self.steps) for name, x in state.items()}
        return state, [batch for _, _, batch in self.steps]

    def __call__(self, state, batch):
        new, outs = {}, {}
        for i, (step, leaves, _) in enumerate(self.steps):
            one, found = step({name: state[f"{i}{name}"] for name in leaves}, batch[i])
            new |= {f"{i}{name}": x for name, x in one.items()}
            outs |= {f"{i}{key}": x for key, x in found.items()}
        return new, outs


def compiled(several: list[int], backend: str) -> None:
    step = Together(several)
    found = wrong(step, jit(step, donate=0, backend=backend, patches={"cpp.simdlen": 1}), *step.start())
    assert not found, "\n".join([f"seeds {several}, {backend}: {found}", *step.code])


@pytest.mark.slow
def test_compiled():
    compiled(seeds("compiled steps", 3, 3), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "compile"])
@pytest.mark.parametrize("part", range(10))
def test_compiled_more(part, backend):
    compiled(seeds("more compiled steps", 20, 40)[part::10], backend)
