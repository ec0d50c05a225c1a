"""Every strategy of data parallelism over a small decoder with uneven token masks, and torch.optim as the reference."""

import torch

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.array_specs import init
from fmegatron.step import build_train_step, state_specs
from fmegatron.testing import Ranks, simulate
from tests.model import plain_llama

STRATEGIES = {
    "replicated": DataParallel.replicated(),
    "zero1": DataParallel.zero1(),
    "zero2": DataParallel.zero2(),
    "zero3": DataParallel.zero3(),
    "hsdp": DataParallel.hsdp(),
    "hybrid": DataParallel.hybrid(),
}
ROWS, SEQ = 12, 6  # divides by 4 ranks x 3 microbatches
LR, DECAY = 1e-2, 0.1
OPTIMIZER = optim.adamw(LR, weight_decay=DECAY)


def make_config(dtype=torch.float64, precision: Precision | None = None, layers: int = 2) -> model.Decoder:
    """A decoder whose sizes differ per dim; the 2 layers divide by 2, not by 4."""
    return model.llama(
        vocab_size=30, dim=32, layers=layers, heads=4, kv_heads=2, ffn_dim=40, max_seq=SEQ, vocab_multiple=16,
        tied=True, z_loss=1e-3, param_dtype=dtype, compute_dtype=dtype, precision=precision,
    )  # fmt: skip


def make_step(config, mesh, strategy, microbatches=1, clip_norm=None, optimizer=OPTIMIZER, save=None, **options):
    """The usual train step of the decoder under a strategy; options: others of `build_train_step`."""
    layouts, axes = model.layouts(config, mesh, strategy=strategy), Axes(mesh)

    def loss_fn(params, batch):
        return model.loss(params, batch, config, axes, save)

    options |= {"strategy": strategy, "precision": config.precision, "microbatches": microbatches}
    return build_train_step(loss_fn, optimizer, layouts, axes, clip_norm=clip_norm, **options)


def specs_of(config, mesh, strategy, optimizer=OPTIMIZER):
    """Specs of the state."""
    return state_specs(model.specs(config, mesh, strategy=strategy), optimizer, strategy)


def batch_at(config, step) -> dict:
    """The global batch of a step: its mask leaves some rows few tokens and others all."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (ROWS, SEQ + 1), generator=generator)
    kept = torch.arange(SEQ) <= torch.randint(0, SEQ, (ROWS, 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "mask": kept.to(torch.int64),
    }


def batch_layouts(mesh, microbatches=1) -> dict:
    """Rows over the data axes."""
    rows = DataParallel().batch_layout((ROWS, SEQ), torch.int64, mesh, microbatches)
    return {"tokens": rows, "labels": rows, "mask": rows}


def simulated(config, mesh, strategy, steps, save=None, **options):
    """(losses, gradient norms, global state) after so many steps on simulated ranks."""
    specs = specs_of(config, mesh, strategy)
    state = Ranks(tree.init(specs, 0, rank) for rank in range(mesh.size))
    sim, losses, norms = None, [], []
    for i in range(steps):
        batch = batch_at(config, i)
        if sim is None:
            layouts = (tree.layouts(specs), batch_layouts(mesh, options.get("microbatches", 1)))
            step = make_step(config, mesh, strategy, save=save, **options)
            sim = simulate(step, mesh, state, batch, layouts=layouts, out_layouts=(layouts[0], None))
        else:
            sim = sim.again(Ranks(out[0] for out in sim.outputs), batch)
        losses.append(sim.metrics["loss"])
        norms.append(sim.metrics["grad_norm"])
    return losses, norms, sim.globals()[0]


def by_torch(config, steps, clip_norm=None):
    """(losses, gradient norms, parameters) of torch.optim.AdamW on whole parameters and a Llama in plain torch."""
    params = tree.map(torch.Tensor.requires_grad_, init(config, Mesh(), key=0))
    leaves = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    decayed = [x for path, x in leaves.items() if "norm" not in path]
    others = [x for path, x in leaves.items() if "norm" in path]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}], lr=LR, betas=(0.9, 0.95)
    )
    losses, norms = [], []
    for i in range(steps):
        adamw.zero_grad()
        loss = plain_llama.loss(params, batch_at(config, i), config)
        loss.backward()
        limit = float("inf") if clip_norm is None else clip_norm
        norms.append(torch.nn.utils.clip_grad_norm_(list(leaves.values()), limit).item())
        adamw.step()
        losses.append(loss.item())
    return losses, norms, tree.map(torch.detach, params)
