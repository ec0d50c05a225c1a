"""show: trees as text and as HTML."""

import pytest
import torch

from fmegatron import tree
from fmegatron.layout import Mesh


def test_specs():
    specs = tree.specs({"a<b": (4, 6), "n": ()}, Mesh(tp=2), [("a<b", ("tp",))], init=0.0)
    shown = tree.show(specs)
    assert repr(shown) == tree.dump(specs)
    html = shown._repr_html_()
    assert "<td>a&lt;b</td><td>4 × 6</td><td>f32</td><td>[4@tp, 6] on tp2</td><td>2 × 6</td>" in html
    assert "<td>scalar</td>" in html and "Constant(value=0.0)" in html and html.endswith("on rank 0: 52 bytes</p>")
    assert "initially" not in tree.show(tree.layouts(specs))._repr_html_()


def test_states():
    state = {"step": torch.tensor(3), "params": [torch.zeros(2, 3, dtype=torch.bfloat16)]}
    assert repr(tree.show(state)).splitlines() == [
        "params/0: bf16[2, 3] on cpu",
        "step: i64[] on cpu",
        "7 elements in 2 leaves, 20 bytes",
    ]
    assert "<th>path</th><th>shape</th><th>dtype</th></tr>" in tree.show(state)._repr_html_()


def test_other_leaves():
    with pytest.raises(ValueError, match="show: w: got .*, wanted a Layout, an ArraySpec or a tensor"):
        tree.show({"w": 3})
