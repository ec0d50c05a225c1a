"""The protocol between trainer and writer process: lines of JSON over a socket, and a write plan as JSON."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from typing import Any

from fmegatron.checkpoint.writing.plan import LeafPlan
from fmegatron.layout import Layout, Mesh

_SEND_S = 10.0  # messages are small: one that does not fit into the socket's buffer for so long means a dead reader


class Channel:
    """One end of a socket pair. `closed`: the other end is gone, and all that it had sent was received."""

    def __init__(self, end: socket.socket):
        self._end, self._left, self.closed = end, b"", False
        end.settimeout(_SEND_S)

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError when the other end is gone or does not listen."""
        self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = 0.0) -> list[dict[str, Any]]:
        """The messages that are there; waits up to `timeout_s` (None: for ever) while there is none."""
        messages: list[dict[str, Any]] = []
        while not self.closed and select.select([self._end], [], [], 0.0 if messages else timeout_s)[0]:
            try:
                data = self._end.recv(1 << 16)
            except OSError:  # a reset: the other end was killed with unread messages
                data = b""
            if not data:
                self.closed = True
            *lines, self._left = (self._left + data).split(b"\n")
            messages += map(json.loads, lines)
        return messages

    def close(self) -> None:
        """The other end sees it."""
        self._end.close()
        self.closed = True


def plans_to_json(plans: Sequence[LeafPlan]) -> bytes:
    """A plan for another process."""
    meshes: list[Mesh] = []
    rows = []
    for p in plans:
        if p.layout.mesh not in meshes:
            meshes.append(p.layout.mesh)
        layout = {**p.layout.to_json(), "mesh": meshes.index(p.layout.mesh)}
        rows.append([p.path, layout, p.home, p.chunk, p.shard, p.stack, p.turn, p.line])
    return json.dumps({"meshes": [mesh.to_json() for mesh in meshes], "leaves": rows}).encode()


def plans_from_json(data: bytes) -> tuple[LeafPlan, ...]:
    """The plan that `plans_to_json` wrote."""
    value = json.loads(data)
    meshes = value["meshes"]
    found = []
    for path, layout, home, chunk, shard, stack, turn, line in value["leaves"]:
        layout = Layout.from_json({**layout, "mesh": meshes[layout["mesh"]]})
        within = None if stack is None else tuple(stack)
        found.append(LeafPlan(path, layout, home, tuple(chunk), tuple(shard), within, turn, tuple(line)))
    return tuple(found)
