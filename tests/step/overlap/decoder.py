"""The decoder's step on a mesh without processes: lowered and ordered, not run."""

import dataclasses
import functools

import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import Overlap, build_train_step, state_specs
from fmegatron.step.jitted import Compiled
from fmegatron.step.passes import Target
from fmegatron.step.timelines.planned import PaperWorld
from tests.step import tiny
from tests.step.own_towers import described

FSDP = Mesh(fsdp=2)
LAYERS = 3
# In most of them norms travel in fp32 beside matrices in fewer bits, as bytes in one buffer.
POLICIES = {
    "fp32": Precision.fp32(),
    "bf16": Precision.bf16(),
    "bf16 wire": Precision.bf16_wire(),
    "fp8": Precision.fp8_wire(),
    "fp8, bf16 wire": Precision.bf16_wire(gather=torch.float8_e4m3fn),
    "sums in bf16": Precision.bf16(reduce=None),
}


def free(**changes) -> Overlap:
    """All that can be ordered and merged, without a limit of memory."""
    return Overlap(**{"bucket_bytes": 1 << 22, "peak": None, **changes})


def config(layers: int = LAYERS, **changes) -> model.Decoder:
    """The tiny decoder with an untied head."""
    return tiny.config_with(layers=layers, **{"tied": False, **changes})


def train_step(of: model.Decoder, mesh: Mesh, save="mincut", reshard=None, strategy=None, **options):
    """The usual step, its weights gathered for use. strategy: a DataParallel; None: as the model's rules say."""
    layouts, axes = model.layouts(of, mesh, strategy=strategy), Axes(mesh)
    of_parts = functools.partial(model.loss, decoder=of, axes=axes, save=save, reshard_after_forward=reshard)

    def loss(params, batch):
        """Of a count that is a number, so that nothing but what is looked at here is sent."""
        parts, metrics = of_parts(params, batch)
        of_number = {name: dataclasses.replace(one, count=batch["tokens"].numel()) for name, one in parts.items()}
        return of_number, metrics

    if strategy is not None:
        return build_train_step(
            loss, tiny.OPTIMIZER, layouts, axes, strategy=strategy, precision=of.precision, **options
        )
    return build_train_step(loss, tiny.OPTIMIZER, layouts, axes, **options)


def state(of: model.Decoder, mesh: Mesh, strategy: DataParallel | None = None, rank: int = 0):
    """This rank's state at step 0."""
    if strategy is None:
        return tiny.decoder_state(of, mesh, rank)
    return tree.init(state_specs(model.specs(of, mesh, strategy=strategy), tiny.OPTIMIZER, strategy), 0, rank)


def compiled(overlap=None, of: model.Decoder | None = None, mesh: Mesh = FSDP, strategy=None, **options) -> Compiled:
    """The stages of the step on one rank of a mesh, nothing compiled; one of equal arguments, only to be looked at."""
    return _compiled(overlap, of or config(), mesh, strategy, **options)


def lowered(of: model.Decoder | None = None, mesh: Mesh = FSDP, strategy=None, **options) -> torch.fx.GraphModule:
    """The step before its collectives are ordered."""
    return compiled(None, of, mesh, strategy, **options).stages["lower"]


@functools.cache
def _compiled(overlap, of, mesh, strategy, **options):
    args = (state(of, mesh, strategy), tiny.decoder_batch(of, mesh=mesh))
    world = PaperWorld(mesh)
    step = train_step(of, mesh, strategy=strategy, **options)
    return Compiled(step, args, (0,), Target(world, overlap=overlap))


@functools.cache
def lowered_of_own(mesh: Mesh, strategy: str = "zero3") -> torch.fx.GraphModule:
    """The lowered step of a module of one's own, eight leaves of 4 MiB, on one rank of a mesh."""
    made = described(mesh, "whole, a module", strategy, blocks=4, dim=512, width=2048, dtype=torch.float32)
    args = tree.map(lambda of: torch.empty(of.local_shape(0), dtype=of.dtype), tree.layouts((made.state, made.batch)))
    return Compiled(made.function, args, (0,), Target(PaperWorld(mesh))).stages["lower"]
