"""A run of a tiny decoder by `loop.Run`: any mesh and dtype, restarts of all kinds. Run by tests under torchrun.

What each rank has read is on disk: RUN-rows-RANK has a line with the hash of its batch for each update it has done.
"""

import functools
import hashlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import Literal

import numpy
import torch

from fmegatron import data, loop, model, optim, step, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop import Faults, Log, Options, Restart, Run, Save, Until, field
from fmegatron.loop.options import Local
from tests import writers
from tests.fresh import Process, Twin

SIZES = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 32, "max_seq": 16}
BATCH, SEQ, STEPS, VOCAB = 8, 16, 12, 61


@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    folder: str = field("runs/decoder", resume="free")
    dtype: Literal["float64", "float32"] = field("float32", resume="refused")
    steps: int = field(STEPS, resume="named", least=1)
    save_every: int = field(3, resume="free", least=1)
    async_save: bool = field(False, resume="free")
    microbatches: int = field(1, resume="named", least=1)
    backend: str = field("eager", resume="free")
    inject: str = field("", resume="free")
    restarts: int = field(0, resume="free")  # 0: no restart in the process
    near: bool = field(False, resume="free")
    step_s: float = field(300.0, resume="free", above=0)  # how long an update may take
    sent: str = field("", resume="free")  # NAME:RANK:STEP, what a rank gets behind an update

    __post_init__ = loop.check


def main(config):
    """Train; returns the metrics of the last update."""
    world, dtype, rank = connect(config.mesh, timeout_s=120), getattr(torch, config.dtype), os.environ.get("RANK", "0")
    of = model.llama(VOCAB, **SIZES, tied=True, param_dtype=dtype, compute_dtype=dtype)
    ids = numpy.random.default_rng(5).integers(0, VOCAB, 4000).astype(numpy.uint16)
    specs, axes = model.specs(of, config.mesh), Axes(config.mesh)
    optimizer = optim.adamw(optim.cosine(1e-2, STEPS, 2, end=1e-3), weight_decay=0.1)
    loss = functools.partial(model.loss, decoder=of, axes=axes)
    train_step = step.build_train_step(loss, optimizer, tree.layouts(specs), axes, microbatches=config.microbatches)
    compiled = step.jit(train_step, donate=0, world=world, backend=config.backend)
    rows = DataParallel().batch_layout((BATCH, SEQ), torch.int64, config.mesh, config.microbatches)
    local = Local(f"{config.folder}-local", "run", every=2, copies=1) if config.near else Local()
    run = Run(
        config.folder,
        compiled,
        step.Description(train_step, step.state_specs(specs, optimizer), rows, config.microbatches),
        world=world,
        settings=config,
        options=Options(
            log=Log(every=1),
            save=Save(config.save_every, in_background=config.async_save, local=local),
            until=Until(signals=("SIGUSR1=stop",)),
            faults=Faults(
                restart=Restart(config.restarts, meet_s=30) if config.restarts else Restart(0),
                patience=f"step={config.step_s}" if world.size > 1 else "off",
                inject=config.inject,
            ),
        ),
    )
    batches = data.Batches(ids, BATCH, SEQ, seed=3)
    run.step = noted(compiled, f"{config.folder}-rows-{rank}")
    name, to, at = (config.sent or "-:-:-").split(":")
    for info in run(batches, config.steps):
        if (to, at) == (rank, str(info.step)):
            os.kill(os.getpid(), getattr(signal, name))
    return run.metrics


def noted(compiled, path):
    """The step, which writes down what it was given."""

    def noting(state, batch):
        out = compiled(state, batch)
        rows = hashlib.sha256(b"".join(x.numpy().tobytes() for x in tree.leaves(batch))).hexdigest()[:12]
        with open(path, "a") as file:
            file.write(f"{rows}\n")
        return out

    return noting


def trained(rank, values):
    """The run without faults, on a rank of a pool."""
    os.environ["RANK"] = str(rank)
    return main(Config(**values))


if __name__ == "__main__":
    forked = sys.argv[1:2] == ["--forked-writers"]
    sys.argv[1:2] = [] if forked else sys.argv[1:2]
    if forked and (server := Twin()).serves:  # before this process has threads
        server.serve()
    elif forked:
        with writers.started_by(lambda command, **settings: Process(server, command, **settings)):
            loop.launch(main, Config)
    else:
        loop.launch(main, Config)
