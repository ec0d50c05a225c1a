"""Tables of pipelines as text and as a PNG."""

import pytest

from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.clock import Costs
from fmegatron.step.pipeline.pictures import picture, plot
from fmegatron.step.pipeline.table import Action, Table

ZB_H1 = """\
ZB-H1 p=3 m=4: 14 long, 14.3% idle          |  idle   held
0|F0 F1 F2 ......B0 W0 F3 B1 W1 B2 W2 B3 W3 |     2      3
1|...F0 F1 ...B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 |     2      3
2|......F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 |     2      3
F forward, B gradient of the input, W gradients of the weights
"""


def test_a_row_for_each_rank():
    assert picture(schedules.zb_h1(3, 4), width=62) == ZB_H1.removesuffix("\n")


def test_stages_of_a_rank_are_told_apart():
    two = picture(schedules.zb_v(2, 3), width=60)
    assert "f0" in two and "F0" in two and two.endswith("W gradients of the weights; small: a rank's second stage")
    three = picture(schedules.interleaved(2, 2, 3), width=120)
    assert "F0a" in three and "BW1c" in three and three.endswith("; a, b, ... a rank's stages")


@pytest.mark.parametrize("width", [10, 80])
def test_any_width_and_any_costs(width):
    for table in (schedules.one_f_one_b(4, 12), schedules.dualpipe_v(2, 8), schedules.zb_h1(12, 13)):
        for costs in (Costs(), Costs(F=0.37, B=0.1, W=1.13, send=0.02), Costs(F=0.0, B=0.0, W=0.0)):
            lines = picture(table, costs, width).splitlines()
            rows = lines[1 : 1 + table.ranks]
            assert len({row.rindex("|") for row in rows}) == 1 and all(
                row.index("|") == len(str(table.ranks - 1)) for row in rows
            )
            assert max(map(len, rows)) <= max(width, 30)


def test_a_wrong_table_has_no_picture():
    with pytest.raises(ValueError, match="table: got no B0.0"):
        picture(Table(((Action("F", 0, 0),),), (0,), 1))


@pytest.mark.slow
def test_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    plot(schedules.zb_v(2, 4), tmp_path / "v.png", Costs(W=0.5))
    assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG")
