"""The whole training step of a small model, for any mesh and dtype: what the parity tests run."""

import torch

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.layout.data_parallel import DATA_AXES
from fmegatron.model.array_specs import init
from fmegatron.step import build_train_step, state_specs
from tests.definition import scalar_of
from tests.fresh_state import fresh_state

MESHES = [
    Mesh(),
    Mesh(dp=2),
    Mesh(fsdp=2),
    Mesh(tp=2),
    Mesh(fsdp=2, tp=2),
    Mesh(dp=2, fsdp=2, tp=2),
    Mesh(tp=4),
]
BATCH, SEQ = 8, 12
OPTIMIZER = optim.adamw(learning_rate=1e-2)


def make_config(tied=False, sequence_parallel=False, dtype=torch.float64):
    """Two layers; every local dim is above 1 on every mesh, and the vocabulary is padded."""
    return model.llama(
        vocab_size=90, dim=64, layers=2, heads=8, kv_heads=4, ffn_dim=48, max_seq=SEQ, z_loss=1e-3, tied=tied,
        sequence_parallel=sequence_parallel, param_dtype=dtype, compute_dtype=dtype,
    )  # fmt: skip


def make_step(config, mesh, clip_norm, save=None, data=DATA_AXES):
    """`train_step(state, batch) -> (state, metrics)` over the symbolic axes of a mesh.

    data: other data axes for the step than for the loss, which is wrong.
    """
    layouts, axes = model.layouts(config, mesh), Axes(mesh)

    def loss_fn(params, batch):
        parts, metrics = model.loss(params, batch, config, axes, save)
        return (parts, metrics) if data == DATA_AXES else scalar_of(parts, axes)

    return build_train_step(loss_fn, OPTIMIZER, layouts, Axes(mesh, data=data), clip_norm=clip_norm)


def whole_state(config):
    """The global state; parameters moved off their initial values: norms of all ones would hide a missing factor."""
    generator = torch.Generator().manual_seed(1)

    def move(x):
        return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    return fresh_state(tree.map(move, init(config, Mesh(), key=3)), OPTIMIZER)


def whole_batch(config, step):
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (BATCH, SEQ + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def layouts_of(config, mesh):
    """Layouts of (state, batch)."""
    data = Axes(mesh).data
    tokens = Layout((BATCH, SEQ), torch.int64, mesh, (data,))
    return tree.layouts(state_specs(model.specs(config, mesh), OPTIMIZER)), {"tokens": tokens, "labels": tokens}
