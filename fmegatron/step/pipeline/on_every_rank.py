"""The table of a pipeline on simulated ranks: each rank of pp runs the parts of its stages, in the table's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmegatron.layout import Mesh
from fmegatron.step import opaque
from fmegatron.step.pipeline import entry, table

__all__ = ["simulated"]


def simulated(plan: entry.Plan, columns: list[list], mesh: Mesh, interpret: Callable) -> list[list]:
    """What the node of a pipeline gives, per output the values of all ranks.

    columns: of its inputs, each one value a rank. interpret: (graph, mesh, columns) -> (columns of the outputs, ...).
    Between ranks of pp goes what the messages of the table carry, and what all exchange at the end.
    """
    size = mesh["pp"]
    first = [rank for rank in range(mesh.size) if mesh.coordinates(rank)["pp"] == 0]
    of_stage = [[mesh.moved(rank, ("pp",), i) for rank in first] for i in range(size)]
    inner = [first.index(mesh.moved(rank, ("pp",), 0)) for rank in range(mesh.size)]
    graphs = {}

    def run(part: Any, values: list) -> list:
        """A part on the ranks that have one place along pp; those of other places do the same beside them."""
        if part not in graphs:
            graphs[part] = opaque.inline_layers(part.graph_module.graph)
        outs, _ = interpret(graphs[part], mesh, [[value[i] for i in inner] for value in values])
        return [[out[rank] for rank in first] for out in outs]

    with torch.no_grad():
        given, first_entry = [columns[plan.takes.index(f"0/{path}")] for path in plan.brought], plan.first()
        whole: list[list] = []
        if first_entry is not None:
            whole, _ = interpret(opaque.inline_layers(first_entry.graph_module.graph), mesh, given)

        def at(i: int, of: list[list]) -> list[list]:
            return [[column[rank] for rank in of_stage[i]] for column in of]

        ranks = [entry.RankOfPipeline(plan, i, at(i, columns), at(i, whole), run, _each) for i in range(size)]
        waiting: dict[tuple[str, int, int], list[table.Message]] = {}
        for message in table.messages(plan.table):
            waiting.setdefault((message.kind, message.stage, message.microbatch), []).append(message)
        for i, unit in table.played(plan.table):
            ranks[i].held.do(*unit)
            made = [(kind, action.stage, action.microbatch) for action in unit for kind in action.kind]
            for key in made:  # behind both actions of a pair, as in `programs`
                for message in waiting.pop(key, ()):
                    ranks[message.target].held.receive(message, ranks[i].held.sent(message))
        assert not waiting, "every message is sent"
        for rank in ranks:
            rank.held.end()
        shares = [[x for xs in rank.shares() for x in xs] for rank in ranks]
        place = [mesh.coordinates(rank)["pp"] for rank in range(mesh.size)]
        exchanged = [[shares[place[q]][k][inner[q]] for q in range(mesh.size)] for k in range(len(shares[0]))]
        end, _ = interpret(opaque.inline_layers(plan.last().graph_module.graph), mesh, [*columns, *exchanged])
        results = [rank.results([[out[q] for q in of_stage[i]] for out in end]) for i, rank in enumerate(ranks)]
    return [[results[place[q]][k][inner[q]] for q in range(mesh.size)] for k in range(len(results[0]))]


def _each(function: Callable, *values: list) -> list:
    return [function(*of_rank) for of_rank in zip(*values, strict=True)]
