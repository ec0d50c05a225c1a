"""Pictures: the table names the ranks of every cell; the SVG's rectangles cover each panel once."""

import xml.dom.minidom

import torch
from hypothesis import given, settings

from fmegatron.layout import Layout, Mesh, Split
from tests.layout.strategies import layouts

MESH = Mesh(dp=2, fsdp=2, tp=2)


def test_text_tables():
    assert Layout((8, 6), torch.float32, MESH, ("fsdp", Split("tp", (4, 2)))).show().splitlines()[2:] == [
        "dim 0  0:2  2:4  4:5  5:6",
        "0:4    0,4  1,5  0,4  1,5",
        "4:8    2,6  3,7  2,6  3,7",
    ]
    assert Layout((8,), torch.float32, MESH, ("dp",), unreduced="tp").show().splitlines()[2:] == [
        "  0:4      4:8",
        "  0+1,2+3  4+5,6+7",
    ]
    flat = Layout((2, 2), torch.float32, Mesh(dp=2), flat="dp").show().splitlines()
    assert flat[1:] == ["  rank 0: 2 elements = [0:1, 0:2]", "  rank 1: 2 elements = [1:2, 0:2]"]


def test_large_layouts_are_drawn_in_part():
    big = Layout((8192, 28672), torch.bfloat16, Mesh(pp=8, dp=16, fsdp=64, tp=16), ("fsdp", "tp"))
    assert "more columns" in big.show() and "more rows" in big.show() and "…×128" in big.show()
    assert "128 of 1024 shards drawn" in big._repr_svg_() and len(big._repr_svg_()) < 60_000


@settings(max_examples=60, deadline=None)
@given(layouts(unreduced=True))
def test_any_layout_can_be_drawn(layout):
    assert layout.show().startswith(repr(layout))
    rectangles = xml.dom.minidom.parseString(layout._repr_svg_()).getElementsByTagName("rect")
    boxes = {box[:2] for rank in range(layout.mesh.size) for box in layout.boxes(rank)}
    assert len(rectangles) == len(boxes)
