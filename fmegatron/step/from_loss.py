"""The standard training step of a loss, an optimizer and specs, as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fmegatron import optim, tree
from fmegatron.collectives import Axes, Precision, psum
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step.description import Description
from fmegatron.step.offload import brought
from fmegatron.step.parts import means, parts_of
from fmegatron.step.pipeline.options import Pipeline, Pipelining, by_stages
from fmegatron.step.pipeline.pipeline import evaluated
from fmegatron.step.state import state_specs
from fmegatron.step.train_step import build_train_step
from fmegatron.step.whole import of_whole
from fmegatron.tree import spec, structure

__all__ = ["build"]


def build(
    loss_fn: Callable,
    optimizer: optim.Optimizer,
    specs: structure.Tree,
    batch: structure.Tree,
    *,
    microbatches: int | Pipelining | Pipeline = 1,
    samples: bool = False,
    precision: Precision | None = None,
    post_update: Callable[[Any, dict], tuple[Any, dict]] | None = None,
    evaluate: Callable[[Any, Any], dict] | None = None,
    twice: bool = False,
    shards: bool = False,
    reshard_after_forward: bool = True,
    memory: str | Sequence[tuple[str, str]] = "device",
) -> Description:
    """What `describe(config)` of an experiment with a loss of its own returns: `build_train_step`, described.

    Args:
        loss_fn: loss_fn(params, batch), or (params, batch, samples) with samples -> a loss as `build_train_step` takes
            it. params are whole over the data axes (what tp splits stays split), and the step places their gathers
            (`step.regather`). A part of the tree whose specs are stacked, `tree.specs(..., stacked=)`, is a value of
            which `stack.run(block, x, save=...)` computes all layers, the block compiled once, and which gives the
            weights of one layer after the other: `for w in stack: x = block(x, w)`.
        optimizer: of the parameters.
        specs: of the parameters; mesh, layouts and strategy are said there and nowhere else.
        batch: {name: shape} of int64 arrays, {name: (shape, dtype)}, arrays like them, or their Layouts, of all ranks
            together (`Description`).
        microbatches, post_update, twice: of `build_train_step`.
        precision: in which dtypes weights are gathered and their gradients reduced and added up; None: as they are.
        shards: loss_fn takes this rank's shards and gathers by itself, as `model.loss` and all of `model` do; then
            precision is of the gradients alone.
        reshard_after_forward: of weights that arrive whole, as of `nn.gather_tree`: False keeps what is gathered in the
            forward until the backward has read it, which saves gathers and costs memory.
        samples: its `with_sample_ids`.
        memory: of the optimizer's state, and of parameters, see `state_specs`.
        evaluate: (state, batch) -> metrics of held-out rows, given shards on the device; None: the loss of the
            parameters, of no samples; where it has several parts, the mean of each by its name.

    Raises what `build_train_step`, `state_specs` and `DataParallel.batch_layout` raise.
    """
    strategy, computed = spec.strategy_of(specs), tree.map(lambda of: of.replace(memory="device"), specs)
    layouts = tree.layouts(computed)
    mesh, by = tree.leaves(layouts)[0].mesh, strategy or DataParallel()
    axes = Axes(mesh, data=by.tokens)
    count, pipeline = by_stages(microbatches, mesh)
    how = {
        "strategy": strategy,
        "microbatches": microbatches,
        "precision": precision,
        "post_update": post_update,
        "twice": twice,
    }
    if shards and not reshard_after_forward:
        raise ValueError(
            "build: reshard_after_forward: got False with shards=True, wanted it where loss_fn gathers; say so there: "
            "nn.gather_tree(params, reshard_after_forward=False), or that of step.layers and model.loss"
        )
    given_loss, given_specs = loss_fn, specs
    loss_fn = loss_fn if shards else of_whole(loss_fn, computed, axes, precision, reshard_after_forward)
    train_step = build_train_step(loss_fn, optimizer, layouts, axes, with_sample_ids=samples, **how)

    by_forwards = None if pipeline is None else evaluated(loss_fn, pipeline, axes)

    def held_out(state: Any, rows: Any) -> dict:
        if by_forwards is not None:
            loss, metrics, whole = by_forwards(state.params, rows)
            if whole:
                return {name: x for name, x in metrics.items() if f"{name.removesuffix('/count')}/count" in metrics}
            return {"loss": metrics["loss"] if "loss" in metrics else psum(loss.detach(), axes[axes.data])}
        found = loss_fn(state.params, rows)
        loss, metrics = found if isinstance(found, tuple) else (found, {})
        if (parts := parts_of(loss_fn, loss)) is not None:
            return means(parts, axes)
        whole = metrics["loss"] if "loss" in metrics else psum(loss.detach(), axes[axes.data])
        return {"loss": whole, **({"loss/count": metrics["tokens"]} if "tokens" in metrics else {})}

    of_held_out = evaluate or held_out

    def on_device(state: Any, rows: Any) -> dict:
        return of_held_out(state._replace(params=brought(state.params, rows)), rows)

    own = state_specs(specs, optimizer, strategy, memory)

    def on(other: Mesh) -> Description:
        if other == mesh:
            return described
        if other.size > 1:
            raise ValueError(
                f"build: on {other}: got specs on {mesh}, which say where arrays lie there or on one rank, wanted "
                "those of the other mesh; describe the step anew: lambda mesh: describe(replace(config, mesh=mesh))"
            )
        given = (given_specs, described.batch)
        whole = tree.map(lambda x: x.replace(mesh=other, spec=(), flat=(), padded=False), given)
        same = {name: value for name, value in how.items() if name != "strategy"} | {"memory": memory, "shards": shards}
        same |= {"samples": samples, "evaluate": evaluate, "reshard_after_forward": reshard_after_forward}
        return build(given_loss, optimizer, *whole, **same)

    described = Description(train_step, own, batch, count, evaluate=on_device, pipeline=pipeline, on=on)
    return described
