"""The training step of a decoder and its loss, as one value."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence

import torch

from fmegatron import optim, step
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.array_specs import specs
from fmegatron.model.decoder import Decoder
from fmegatron.model.forward import loss
from fmegatron.model.post_updates import post_update
from fmegatron.step import partition

__all__ = ["build"]


def build(
    decoder: Decoder,
    optimizer: optim.Optimizer,
    mesh: Mesh,
    shape: tuple[int, int],
    *,
    strategy: str | DataParallel = "hsdp",
    microbatches: int | step.Pipelining | step.Pipeline = 1,
    samples: bool = False,
    save: partition.Policy | None = "mincut",
    twice: bool = False,
    memory: str | Sequence[tuple[str, str]] = "device",
) -> step.Description:
    """What an experiment that trains a decoder by `model.loss` returns of `describe(config)`.

    Args:
        decoder: the model; its precision also says how gradients are reduced.
        optimizer: of its parameters.
        mesh: of the ranks.
        shape: (sequences, tokens of each) of a batch, all ranks together.
        strategy: how parameters, gradients and the optimizer's state are sharded; or its name (`DataParallel.named`).
        microbatches: into which a rank's rows are cut; on a mesh with pp they are computed by stages, as
            `step.Pipelining(...).of(n)` or a `step.Pipeline` says: of an int by 1F1B with balanced ones.
        samples: dropout and router noise of the model are applied, the same on every mesh; else it has none.
        twice: one more forward pass of each microbatch, for counts that depend on the parameters: the balance of
            experts over the whole batch, with several microbatches.
        save: what a block keeps for its backward (`model.logits`).
        memory: where the optimizer's state is at rest, "device", "host" or "host-update", or by paths, of parameters
            too: see `step.state_specs`.

    Raises ValueError, naming what does not fit the mesh. Warns of what depends on the number of microbatches.
    """
    how = {"strategy": strategy, "microbatches": microbatches, "samples": samples, "save": save, "twice": twice}
    on = functools.partial(_on, decoder, optimizer, shape, {**how, "memory": memory})
    strategy = DataParallel.named(strategy) if isinstance(strategy, str) else strategy
    pipeline = None
    if mesh["pp"] > 1:
        parts = step.Pipelining().of(microbatches) if isinstance(microbatches, int) else microbatches
        microbatches = pipeline = parts.on(mesh["pp"], decoder.layers)
    found = specs(decoder, mesh, strategy=strategy, pipeline=pipeline)
    axes = Axes(mesh, data=strategy.tokens)

    plain = functools.partial(loss, decoder=decoder, axes=axes, save=save)

    def of_samples(params: dict, batch: dict, numbers: torch.Tensor | None = None) -> tuple[dict[str, step.Part], dict]:
        return plain(params, batch, samples=numbers)

    def held_out(state: step.State, rows: dict) -> dict:
        return step.means({"loss": plain(state.params, rows)[0]["lm"]}, axes)

    described = step.build(
        of_samples if samples else plain,
        optimizer,
        found,
        {"tokens": shape, "labels": shape},
        microbatches=microbatches,
        samples=samples,
        precision=decoder.precision,
        post_update=functools.partial(post_update, decoder=decoder),
        evaluate=held_out if pipeline is None else None,  # else by stages
        twice=twice,
        shards=True,
        memory=memory,
    )
    if described.microbatches > 1:
        _say_what_couples(decoder, described.microbatches)
    evaluate = described.evaluate if pipeline is None else functools.partial(_of_tokens, described)
    return dataclasses.replace(described, decoder=decoder, save=save, evaluate=evaluate, on=on)


def _on(
    decoder: Decoder, optimizer: optim.Optimizer, shape: tuple[int, int], how: dict, mesh: Mesh
) -> step.Description:
    """The same step on another mesh."""
    return build(decoder, optimizer, mesh, shape, **how)


def _of_tokens(described: step.Description, state: step.State, rows: dict) -> dict:
    """Of the means of all parts of the loss, that of the tokens alone."""
    assert described.evaluate is not None, "`step.build` makes one"
    means = described.evaluate(state, rows)
    return {"loss": means["lm"], "loss/count": means["lm/count"]}


def _say_what_couples(decoder: Decoder, microbatches: int) -> None:
    depths = [depth for stack in decoder.stacks.values() for depth in stack.depths]
    found = dict.fromkeys(words for depth in depths for part in decoder.block(depth) for words in part.mixer.couples)
    if found:
        text = f"model.build: got microbatches={microbatches}, and {'; '.join(found)}: what it means depends on their "
        warnings.warn(f"{text}number (docs/losses.md, Microbatches)", RuntimeWarning, stacklevel=3)
