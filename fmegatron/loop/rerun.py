"""Rerun: the updates since the newest good checkpoint once more, to see whether a bad number is the machine's fault.

First on the same ranks, bit by bit: another result means that one of the two was wrong (transient). Then each rank's
part on its neighbour: another result there means that one of two machines computes wrongly, again and again
(persistent). The same everywhere is what data and program give (deterministic). Each ends the run with an exit status
of its own.

The state before comes from the newest good checkpoint in front of the bad update, since a step that donates leaves
none: it costs one restore and the updates since, twice, and no memory while all is well. Programs that are not
deterministic on one machine count as transient.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from fmegatron.loop.faults.notice import say
from fmegatron.loop.faults.pulse import Pulse
from fmegatron.loop.losses import RunAgain
from fmegatron.step import replicas

STATUS = MappingProxyType({"transient": 76, "persistent": 77, "deterministic": 78})
_MEANS = MappingProxyType(
    {
        "transient": "the same updates gave another state the second time; start again, it goes on from the checkpoint",
        "persistent": "on another machine the same part gave another state; take one of the two out, then start again",
        "deterministic": "it is what the program computes from these data; skip them, or change rate or precision",
    }
)


class RerunError(RuntimeError):
    """What the second run showed. verdict: "transient", "persistent" or "deterministic"; exit_status: of `STATUS`."""

    def __init__(self, message: str, verdict: str):
        super().__init__(message)
        self.verdict, self.exit_status = verdict, STATUS[verdict]


def good_step(run: Any, before: int) -> int:
    """The newest complete checkpoint of less than `before` updates that is not known to be bad; 0: none.

    All ranks call it. RuntimeError on all where rank 0, which looks, fails.
    """

    def look() -> int:
        some = run.manager.steps() if run.world.rank == 0 else []
        return max((s for s in some if s < before and run.manager.finite(s) is not False), default=0)

    return int(run.world.broadcast_text(str(run.world.on_all(look, "looking for a good checkpoint"))))


def rerun(run: Any, again: RunAgain, reading: Any, pulse: Pulse) -> None:
    """Run again up to the update that was suspicious, and raise RerunError with what that shows. All ranks call it.

    run: the `Run`. reading: its data (`reading.Reading`).
    """
    world, own = run.world, run.world.rank
    first = world.gather_rows(replicas.hashes(again.state))
    run.manager.close(wait=True)
    start = good_step(run, again.first)
    if own == 0:
        say(f"{again}\nrerun: updates {start + 1} to {again.last} once more, from step {start}")
    second = _replayed(run, reading, start, again.last, pulse)
    differs = sorted({int(rank) for rank in torch.nonzero((first != second).any(1))})
    how, verdict = f"rerun of updates {start + 1} to {again.last}", "transient"
    if differs:
        text = f"other bits on ranks {', '.join(map(str, differs[:8]))}"
    elif world.size == 1:
        verdict, text = "deterministic", "the same bits; there is no other rank to run it on"
    else:
        try:
            world.renew(rank=(own + 1) % world.size)
            third = _replayed(run, reading, start, again.last, pulse)
        finally:
            world.renew(rank=own)
        differs = sorted({int(rank) for rank in torch.nonzero((first != third).any(1))})
        verdict, text = "deterministic", "the same bits on the same and on other ranks"
        if differs:
            pairs = ", ".join(f"{rank} and {(rank - 1) % world.size}" for rank in differs[:4])
            verdict, text = "persistent", f"the same bits on the same ranks, others on their neighbours: ranks {pairs}"
    message = f"{how}: {verdict}: {text}; {_MEANS[verdict]}. It began with: {again}"
    raise RerunError(message, verdict)


def _replayed(run: Any, reading: Any, start: int, last: int, pulse: Pulse) -> torch.Tensor:
    """Hashes of all leaves on all ranks, [ranks, leaves], after these updates."""
    pulse.enter("setup")
    samples, skip, states = 0, (), None
    if start:
        state, metadata = run.manager.restore(start, run.specs, device=run.world.device)
        samples, skip = metadata.get("samples"), tuple((a, b) for a, b in metadata.get("skip", ()))
        states = metadata.get("source")
    else:
        state = run.init()
    data = reading.of_rank(run.world.rank).begin(samples, start, skip, states)
    for number in range(start + 1, last + 1):
        pulse.enter("compile", number)
        state, _ = run.step(state, data.source.at(number - 1))
    return run.world.gather_rows(replicas.hashes(state))
