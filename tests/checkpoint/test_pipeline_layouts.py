"""Checkpoints between pipelines, as the reference's test_pipeline_parallel_layout has them: stages of unequal length,
without layers, virtual ones and a V, to other numbers of stages, to tensor parallelism, and back; bit for bit."""

import json

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.tree import structure
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, save_all, small_sizes
from tests.checkpoint.states import dense, experts
from tests.checkpoint.test_reshard import state_for
from tests.checkpoint.test_reshard_states import there_and_back
from tests.checkpoint.test_tools_reshard import call
from tests.pairs import few

PP4, PP2 = Mesh(pp=4, dp=2, fsdp=1, tp=1), Mesh(pp=2, dp=1, fsdp=2, tp=2)
# The states have 4 layers.
PIPELINES = {
    "pp4": (PP4, "pp"),
    "pp2": (PP2, "pp"),
    "custom": (PP2, Split("pp", sizes=(3, 1))),
    "empty": (PP4, Split("pp", sizes=(0, 2, 0, 2))),
    "ends": (PP4, Split("pp", sizes=(0, 3, 1, 0))),  # as where embedding and head have stages of their own
    "virtual": (PP2, Split("pp", parts=2)),
    "custom_virtual": (PP2, Split("pp", sizes=(1, 0, 1, 2), order=(0, 1, 0, 1))),
    "v": (PP2, Split("pp", order=(0, 1, 1, 0))),
    "tp2": (Mesh(pp=1, dp=1, fsdp=1, tp=2), None),
}


def staged(layouts, stages):
    """The layouts with their layers cut into these stages; the ends are shared by all ranks of pp."""

    def cut(path, x):
        return x.replace(spec=(stages, *x.spec[1:])) if "blocks/" in path and x.axes(0)[:1] == ("pp",) else x

    return structure.map_with_path(cut, layouts)


PAIRS = [(a, b) for a in PIPELINES for b in PIPELINES if a != b]
CHOSEN = [("empty", "tp2"), ("pp4", "pp2"), ("virtual", "pp4"), ("pp2", "custom_virtual"), ("tp2", "v"), ("v", "ends")]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("source, target", [*CHOSEN, *few(1, [pair for pair in PAIRS if pair not in CHOSEN])])
def test_from_one_pipeline_to_another(source, target):
    (here, a), (there, b) = PIPELINES[source], PIPELINES[target]
    there_and_back(staged(dense(here), a), staged(dense(there), b))
    there_and_back(staged(experts(here), a), staged(experts(there), b))


def test_the_tool_reshards_stages(tmp_path):
    """On a mesh of as many stages they stay what they are, on another all are equal, and rules state new ones."""
    mesh = Mesh(pp=4, tp=2)
    layouts = {"w": Layout((9, 6), torch.float32, mesh, (Split("pp", sizes=(0, 4, 3, 2)), "tp"))}
    state = state_for(layouts)
    rules = [["w", [{"axes": ["pp"], "sizes": [1, 3, 2, 3], "order": [0, 1, 1, 0]}, "tp"]]]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    with small_sizes():
        assert save_all(tmp_path / "a", state, layouts) == [None] * 8
        for i, (argv, wanted) in enumerate([
            (["--mesh", "pp=4"], "f32[(0|4|3|2)@pp, 6] on pp4"),
            (["--mesh", "pp=3,tp=3"], "f32[9@pp, 6@tp] on pp3·tp3"),
            (["--mesh", "tp=2"], "f32[9, 6@tp] on tp2"),
            (["--mesh", "pp=2", "--rules", tmp_path / "rules.json"], "f32[(1|3|2|3)@pp order 0-1-1-0, 6] on pp2"),
        ]):  # fmt: skip
            status, _, err = call("reshard", tmp_path / "a", tmp_path / f"{i}", *argv)
            assert status == 0, err
            stored = checkpoint.layouts(tmp_path / f"{i}")
            assert str(stored["w"]) == wanted
            for rank, local in enumerate(cut_tree(state, stored)):
                assert_same_bits(checkpoint.restore(tmp_path / f"{i}", stored, rank=rank), local)


def test_the_manifest_states_stages(tmp_path):
    mesh = Mesh(pp=4, tp=2)
    layouts = {
        "nine": Layout((9, 6), torch.float32, mesh, (Split("pp", sizes=(3, 2, 2, 2)), "tp")),
        "v": Layout((8, 6), torch.bfloat16, mesh, (Split("pp", order=(0, 1, 2, 3, 3, 2, 1, 0)),)),
        "few": Layout((3, 2), torch.float32, mesh, (Split("pp", sizes=(0, 2, 0, 1)),)),
    }
    state = state_for(layouts)
    for sizes in ((128, 32), (1 << 20, 1 << 20)):
        with small_sizes(*sizes):
            assert save_all(tmp_path / f"{sizes[0]}", state, layouts) == [None] * 8
        assert checkpoint.layouts(tmp_path / f"{sizes[0]}") == layouts
        for rank, wanted in enumerate(cut_tree(state, layouts)):
            assert_same_bits(checkpoint.restore(tmp_path / f"{sizes[0]}", layouts, rank=rank), wanted)
