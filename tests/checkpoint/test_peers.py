"""docs/checkpoints.md next to torch.distributed.checkpoint and Orbax: every cell runs; ours has no more lines."""

import re

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_map

from fmegatron import checkpoint
from tests.house import ROOT

TABLE = (ROOT / "docs/checkpoints.md").read_text().partition("<!-- peers")[2].partition("<!-- end of peers")[0]
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in TABLE.splitlines() if line[:2] == "| "]
ROWS = ROWS[1:]  # below the head
AFTER = ("all of it, no target", "from shapes", "in place", "a subtree", "the newest step")  # need what is saved


def lines(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_ours_has_no_more_lines():
    assert len(ROWS) == 8 and {"save a dict", *AFTER} < {row[0] for row in ROWS}
    for task, *cells in ROWS:
        ours, *theirs = (len(lines(cell)) for cell in cells)
        assert ours and all(ours <= n for n in theirs if n), task


def run_column(column, names, path, state):
    """The cells of a column; (task -> the names that it left)."""
    found = {}
    for task, *cells in ROWS:
        if code := lines(cells[column]):
            own = {**names, "state": state, "other": tree_map(np.zeros_like, state) if column == 2 else zeros(state)}
            own["path"] = path / ("steps" if "step" in task else "background" if "background" in task else "dict")
            own["file"] = path / "file.pt"
            exec("\n".join(code), own)
            found[task] = own
    return found


def zeros(state):
    return tree_map(torch.zeros_like, state)


def check(found, state, equal):
    for task in ("all of it, no target", "from shapes", "in place", "the newest step"):
        if task in found:
            assert all(equal(found[task]["got"]["net"][k], x) for k, x in state["net"].items()), task
    assert all(equal(found["a subtree"]["net"][k], x) for k, x in state["net"].items())
    assert found.get("the newest step", {"step": 3})["step"] == 3


STATE = {"net": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}, "rate": torch.tensor(0.5)}


@pytest.mark.medium
def test_our_cells(tmp_path):
    shapes = tree_map(lambda x: torch.empty_like(x, device="meta"), STATE)
    found = run_column(0, {"checkpoint": checkpoint, "shapes": shapes}, tmp_path, STATE)
    assert len(found) == len(ROWS) and found["in place"]["got"] is found["in place"]["other"]
    check(found, STATE, torch.equal)


@pytest.mark.filterwarnings("ignore")
def test_cells_of_torch(tmp_path):
    shapes = tree_map(lambda x: torch.empty_like(x, device="meta"), STATE)
    names = {"dcp": dcp, "torch": torch, "tree_map": tree_map, "dcp_to_torch_save": dcp_to_torch_save}
    names |= {"shapes": shapes, "empty": lambda x: torch.empty_like(x, device="cpu")}
    check(run_column(1, names, tmp_path, STATE), STATE, torch.equal)


def test_cells_of_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    state = tree_map(lambda x: x.numpy(), STATE)
    check(run_column(2, {"ocp": ocp, "shapes": state}, tmp_path, state), state, np.array_equal)
