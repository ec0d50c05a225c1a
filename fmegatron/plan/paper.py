"""The ranks of a mesh on paper, whose process groups have a size: what Inductor asks for when it schedules a graph."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fmegatron.collectives import torch_private
from fmegatron.step.timelines import planned

__all__ = ["SizedWorld"]


class SizedWorld(planned.PaperWorld):
    """A `PaperWorld` whose groups torch knows, under names that no other world has. Close it, or use it in `with`."""

    def _open(self, key: str, axes: tuple[str, ...], own: bool) -> tuple[str, dist.ProcessGroup]:
        number = 0
        while _is_known(name := f"{key}{'.' if '#' in key else '#'}paper{number or ''}"):
            number += 1
        make: Any = dist.ProcessGroup  # torch's stubs know another of its forms
        group = make(self.index(axes), self.mesh.extent(axes))  # without a library: it has a size
        torch_private.register_group(name, group)
        self._registered.append(name)
        return name, group

    def __enter__(self) -> SizedWorld:
        return self

    def opened(self) -> dict[str, int]:
        """The groups that were asked for, in order -> how many ranks each has."""
        return {key: group.size() for key, (_, group) in self._groups.items()}

    def close(self) -> None:
        """Let torch forget the groups."""
        for name in self._registered:
            torch_private.unregister_group(name)
        self._registered.clear()
        super().close()


def _is_known(name: str) -> bool:
    try:
        torch_private.group_named(name)
    except RuntimeError:
        return False
    return True
