"""The decoder's step on a mesh without processes: lowered and ordered, not run."""

import functools

from fmegatron import model
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.step import PaperWorld, build_train_step, compiled_layer
from fmegatron.step.jit import Compiled
from tests.step import tiny

FSDP = Mesh(fsdp=2)
LAYERS = 3


def config(layers: int = LAYERS, **changes) -> model.Config:
    """The tiny decoder with an untied head."""
    return tiny.config_with(layers=layers, **{"tied": False, **changes})


def train_step(of: model.Config, mesh: Mesh, save="mincut", reshard=None, **options):
    """The usual step, its weights gathered for use."""
    layouts, axes = model.layouts(of, mesh), Axes(mesh)
    loss = functools.partial(
        model.loss, config=of, layouts=layouts, axes=axes, layer=compiled_layer(save), reshard_after_forward=reshard
    )
    data_axes = tuple(a for a in model.DATA_AXES if a in mesh)
    return build_train_step(loss, tiny.OPTIMIZER, layouts, axes, data_axes=data_axes, **options)


def compiled(overlap=None, of: model.Config | None = None, mesh: Mesh = FSDP, **options) -> Compiled:
    """The stages of the step on one rank of a mesh, nothing compiled."""
    of = of or config()
    args = (tiny.decoder_state(of, mesh), tiny.decoder_batch(of, mesh=mesh))
    world = PaperWorld(mesh)
    return Compiled(train_step(of, mesh, **options), args, (0,), world, "inductor", {}, {}, None, overlap)
