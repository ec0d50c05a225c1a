"""The smallest things that show what the step room does: a decoder, a stack of MLP layers, and their train steps."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch._inductor.utils import get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.step import build_train_step, state_specs
from fmegatron.step.layer import compiled_layer, unstack
from fmegatron.testing import split
from tests.fresh_state import fresh_state

ONE = Mesh(dp=1)
SIZES = {
    "vocab_size": 30, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_seq": 8,
    "vocab_multiple": 4,
}  # fmt: skip
CONFIG = model.llama(**SIZES, param_dtype=torch.float64, compute_dtype=torch.float64)
OPTIMIZER = optim.adamw(learning_rate=1e-2)
SCALAR = {"cpp.simdlen": 1}  # patches of jit: no vector instructions, for which g++ takes a third of its time


# ---- a decoder -------------------------------------------------------------------------------------------------------
def config_with(dtype: torch.dtype = torch.float64, **changes) -> model.Decoder:
    """CONFIG in another dtype (fields such as compute_dtype may differ from it), with other sizes."""
    return model.llama(**SIZES | {"param_dtype": dtype, "compute_dtype": dtype} | changes)


def decoder_step(
    config: model.Decoder = CONFIG, save=None, mesh: Mesh = ONE, optimizer: optim.Optimizer = OPTIMIZER, **options
) -> Callable:
    """The usual train step of the decoder; save: policy of its compiled layers, None for plain ones."""
    layouts, axes = model.layouts(config, mesh), Axes(mesh)

    def loss_fn(params, batch):
        return model.loss(params, batch, config, axes, save)

    return build_train_step(loss_fn, optimizer, layouts, axes, **options)


def decoder_state(
    config: model.Decoder = CONFIG, mesh: Mesh = ONE, rank: int = 0, optimizer: optim.Optimizer = OPTIMIZER
):
    """This rank's state at step 0."""
    return fresh_state(init(config, mesh, key=0, rank=rank), optimizer)


def decoder_batch(
    config: model.Decoder = CONFIG,
    rows: int = 4,
    seed: int = 0,
    mesh: Mesh = ONE,
    rank: int = 0,
    microbatches: int = 1,
) -> dict:
    """This rank's rows of a batch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (rows, config.max_seq + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    strategy = DataParallel(Axes(mesh).data)
    return split(batch, tree.map(lambda x: strategy.batch_layout(x.shape, x.dtype, mesh, microbatches), batch))[rank]


def decoder_layouts(config: model.Decoder, mesh: Mesh):
    """Layouts of the decoder's state."""
    return tree.layouts(state_specs(model.specs(config, mesh), OPTIMIZER))


# ---- a stack of MLP layers -------------------------------------------------------------------------------------------
def mlp(x_BD: torch.Tensor, w: dict) -> torch.Tensor:
    """One layer: x + tanh(x a) b."""
    return x_BD + torch.tanh(x_BD @ w["a"]) @ w["b"]


def mlp_params(layers: int = 2, width: int = 8, hidden: int = 16, dtype: torch.dtype = torch.float64) -> dict:
    """Stacked weights {"a": [L, D, F], "b": [L, F, D]}."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (layers, width, hidden), "b": (layers, hidden, width)}
    return {name: 0.3 * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def mlp_loss(save=None, offload=None) -> Callable:
    """loss(params, batch) over the stack; save, offload: of compiled layers; save None: plain ones."""
    layer = mlp if save is None else compiled_layer(save, offload=offload)(mlp)

    def loss(params, batch):
        x_BD = batch["x"]
        for w in unstack(params):
            x_BD = layer(x_BD, w)
        loss = (x_BD - batch["y"]).square().mean()
        return loss, {"loss": loss.detach()}

    return loss


def mlp_step(save=None, params: dict | None = None, offload=None, **options) -> Callable:
    """The usual train step over `mlp_loss`."""
    return train_step_of(mlp_loss(save, offload), mlp_params() if params is None else params, **options)


def train_step_of(loss: Callable, params: dict, **options) -> Callable:
    """The usual train step over loss(params, batch) on one rank."""
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, ONE), params)
    return build_train_step(loss, OPTIMIZER, layouts, Axes(ONE), **options)


def mlp_batch(rows: int = 4, width: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict:
    """{"x", "y": [B, D]}."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, width, generator=generator, dtype=dtype) for name in ("x", "y")}


# ---- what tests do with them -----------------------------------------------------------------------------------------
def run_steps(step: Callable, state, batches: list) -> tuple[list[float], object]:
    """(loss of every step, state after the last)."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def generated_code(compiled) -> list[str]:
    """The code that Inductor generates for every graph of a `Compiled`; it is neither compiled nor run."""
    with inductor.patch(fx_graph_cache=False):
        return [code for code in get_code(compiled.compile) if code]


@contextlib.contextmanager
def fake_ranks(mesh: Mesh):
    """The `World` of rank 0 of a mesh on process groups that move nothing (torch's "fake" backend)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    try:
        with connect(mesh, device="cpu") as world:
            yield world
    finally:
        dist.destroy_process_group()


def copied(t):
    """A tree of tensors with memory of its own."""
    return tree.map(torch.clone, t)


def line_of(file: str, mark: str) -> str:
    """ "name.py:12", the line of a file that ends with the comment `# HERE mark`."""
    lines = Path(file).read_text().splitlines()
    return f"{Path(file).name}:{next(i for i, line in enumerate(lines, 1) if line.endswith('# HERE ' + mark))}"
