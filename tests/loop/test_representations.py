"""A jit, a Manager and a Run say what they are."""

import torch

from fmegatron import checkpoint, data, loop, step, tree
from fmegatron.layout import Mesh


def double(x):
    return x * 2


def test_a_jit():
    doubled = step.jit(double, backend="eager")
    line = double.__code__.co_firstlineno
    of = f"jit of double (test_representations.py:{line}) on one process: eager"
    assert repr(doubled) == f"{of}, 0 signatures compiled"
    doubled(torch.ones(2))
    assert repr(doubled) == f"{of}, 1 signature compiled"
    assert ": inductor, donates 0, 0 signatures compiled" in repr(step.jit(double, donate=0))


def test_a_manager_and_a_run(tmp_path):
    specs = {"w": tree.specs({"w": (2,)}, Mesh())["w"]}

    def train_step(state, batch):
        return {"w": state["w"] + batch}, {"loss": state["w"].sum()}

    run = loop.Run(tmp_path / "a", train_step, specs, options=loop.Options(save=loop.Save(every=1, keep=None)))
    folder = tmp_path / "a" / "checkpoints"
    manager = f"Manager('{folder}', keep=None)"
    assert repr(run) == f"Run('{tmp_path / 'a'}', rank 0 of {Mesh()}): not begun; {manager}: steps none"
    for _ in run(data.source(lambda i: torch.ones(2)), steps=6):
        pass
    assert repr(run).endswith(f": begun at step 0; {manager}: steps 1, 2, ..., 6")
    again = checkpoint.Manager(folder, keep=2)
    assert repr(again) == f"Manager('{folder}', keep={checkpoint.Keep(last=2)}): steps 1, 2, ..., 6"
