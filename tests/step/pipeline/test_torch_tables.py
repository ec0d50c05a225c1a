"""Tables of torch.distributed.pipelining, read from what torch writes."""

import csv
import io
import itertools
from types import SimpleNamespace

import pytest
import torch

from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.clock import clock
from fmegatron.step.pipeline.torch_tables import read_torch

# By torch 2.13, two ranks and four microbatches
ZBV = """
0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0F3,0I0,0W0,3F2,3I2,3W2,0I1,0W1,3F3,3I3,3W3,0I2,0W2,0I3,0W3
,1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1F3,1I1,1W1,2F3,2I2,2W2,1I2,2I3,1I3,1W2,2W3,1W3
"""
DUAL = """
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3
"""
COMMS = """
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
"""


def test_torch_zbv_and_dualpipe_v():
    """Read, right, and the very orders of our own."""
    zbv, dual = read_torch(ZBV), read_torch(DUAL, "DualPipeV p=2 m=4")
    assert zbv.rows == schedules.zb_v(2, 4).rows and zbv.place == (0, 1, 1, 0) and zbv.pairs == ()
    assert dual == schedules.dualpipe_v(2, 4) and dual.pairs == ((7, 9, 12), (6, 8, 10))
    assert max(clock(zbv).idle) == 1


def test_communication_of_torch():
    table = read_torch(COMMS)
    assert " ".join(map(str, table.rows[0])) == "G0.0 F0.0 F0.1 BW0.0 BW0.1 R0.1"
    assert table.microbatches == 2 and table.place == (0, 1)


def test_rows_of_texts_and_none():
    found = read_torch({1: [None, "1F0", "1B0"], 0: ["0F0", None, "", "0B0"]})
    assert found.rows == schedules.one_f_one_b(2, 1).rows


@pytest.mark.parametrize(
    "given, text",
    [
        ("0F0,0X0", "torch: rank 0, cell 1: got '0X0', wanted a stage, F, I, W or B, and a microbatch, such as 2F0"),
        ("0F0,0B", "torch: rank 0, cell 1: got '0B', wanted a stage"),
        ("0F0,(0F1;0W0)OVERLAP_F_B", "torch: rank 0, cell 1: got '(0F1;0W0)OVERLAP_F_B', wanted a stage"),
        ("0F0,0B0\n1F0,1B0,0F1,0B1", "torch: got F0.1 on rank 1, wanted it with its stage on rank 0; move it"),
        ("0F0,0I0", "torch: got no W0.0, wanted it on rank 0"),
        ("0F0,0B0\n2F0,2B0", "torch: got stages [0, 2], wanted 0 to 2, each once"),
        ("", "torch: got stages [], wanted 0 to 0, each once"),
        ({0: ["0F0", "0B0"], 2: []}, "torch: got ranks [0, 2], wanted 0 to 1, each once"),
        ("0F0,0B0,0UNSHARD", "torch: rank 0: got F0.0 before the first G of its stage"),
    ],
)
def test_what_is_refused(given, text):
    with pytest.raises(ValueError) as error:
        read_torch(given)
    assert text in str(error.value)


@pytest.mark.slow
def test_the_schedules_of_the_installed_torch():
    """All with several stages a rank, as values and as CSV, with and without communication; the same orders as ours."""
    from torch.distributed.pipelining import schedules as theirs

    ours = {
        theirs.ScheduleZBVZeroBubble: lambda p, m: schedules.zb_v(p, m) if m >= 2 * p - 1 else None,
        theirs.ScheduleDualPipeV: lambda p, m: schedules.dualpipe_v(p, m),
        theirs.ScheduleInterleaved1F1B: lambda p, m: schedules.interleaved(p, m, 2),
        theirs.ScheduleLoopedBFS: lambda p, m: None,
        theirs.ScheduleInterleavedZeroBubble: lambda p, m: None,
    }
    read = 0
    for (made_by, own), p, m in itertools.product(ours.items(), range(1, 9), range(1, 17)):
        stages = [
            SimpleNamespace(
                group_size=p,
                group_rank=0,
                num_stages=2 * p,
                stage_index=s,
                submod=torch.nn.Identity(),
                has_backward=True,
            )
            for s in range(2)
        ]
        if (made_by is theirs.ScheduleDualPipeV and m < 2 * p) or ("Interleaved" in made_by.__name__ and m % p):
            continue
        theirs_made = made_by(stages, m, loss_fn=lambda *_: None)
        table = read_torch(theirs_made.pipeline_order)
        for order in (theirs_made.pipeline_order, theirs_made.pipeline_order_with_comms):
            text = io.StringIO()
            csv.writer(text).writerows(order[rank] for rank in range(p))
            again = read_torch(text.getvalue())
            assert tuple(tuple(a for a in row if a.kind not in "GR") for row in again.rows) == table.rows
        expected = own(p, m)
        assert expected is None or (expected.rows, expected.pairs) == (table.rows, table.pairs or expected.pairs)
        read += 1
    assert read > 300
