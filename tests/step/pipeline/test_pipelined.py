"""A step computed by stages is the step of microbatches on one rank: losses, gradients, state."""

import pytest
import torch

from fmegatron import step
from fmegatron.layout import Mesh, Split
from fmegatron.step import Pipeline, pipelined
from fmegatron.step.pipeline import schedules
from tests.step.pipeline import hand

F64 = torch.float64


CASES = {
    "1f1b": lambda: (hand.loss_fn, hand.params_of(4), schedules.one_f_one_b(2, 4), (2, 2), "pp"),
    "gpipe": lambda: (hand.loss_fn, hand.params_of(6), schedules.gpipe(3, 4), (2, 2, 2), "pp"),
    "zero bubble": lambda: (hand.loss_fn, hand.params_of(4), schedules.zb_h1(4, 4), (1, 1, 1, 1), "pp"),
    "fewer microbatches": lambda: (hand.loss_fn, hand.params_of(4), schedules.zb_h1(4, 2), (1, 1, 1, 1), "pp"),
    "one microbatch": lambda: (hand.loss_fn, hand.params_of(2), schedules.zb_h1(2, 1), (1, 1), "pp"),
    "uneven on all ranks": lambda: (hand.loss_fn, hand.params_of(5), schedules.zb_h1(3, 4), (3, 1, 1), None),
    "uneven": lambda: (
        hand.loss_fn,
        hand.params_of(5),
        schedules.zb_h1(3, 4),
        (3, 1, 1),
        Split("pp", sizes=(3, 1, 1)),
    ),
    "uneven, shared ends": lambda: (
        hand.loss_fn,
        hand.params_of(3),
        schedules.zb_h1(2, 2),
        (2, 1),
        Split("pp", sizes=(2, 1)),
    ),
    "V": lambda: (hand.loss_fn, hand.params_of(4), schedules.zb_v(2, 4), (1,) * 4, Split("pp", order=(0, 1, 1, 0))),
    "uneven V, tied": lambda: (
        hand.loss_fn,
        hand.params_of(5, tied=True),
        schedules.zb_v(2, 2),
        (1, 1, 2, 1),
        Split("pp", sizes=(1, 1, 2, 1), order=(0, 1, 1, 0)),
    ),
    "DualPipeV": lambda: (
        hand.loss_fn,
        hand.params_of(4),
        schedules.dualpipe_v(2, 4),
        (1,) * 4,
        Split("pp", order=(0, 1, 1, 0)),
    ),
    "tied": lambda: (hand.loss_fn, hand.params_of(4, tied=True), schedules.zb_h1(2, 4), (2, 2), "pp"),
    "around": lambda: (
        hand.loss_fn,
        hand.params_of(4),
        schedules.interleaved(2, 2, 2),
        (1, 1, 1, 1),
        Split("pp", parts=2),
    ),
    "foreign": lambda: (hand.foreign_loss, hand.foreign_params(3), schedules.zb_h1(3, 2), (1, 1, 1), None),
}
SUMS = {"tied", "foreign", "uneven V, tied", "uneven, shared ends"}  # which have another order
ENDS = {"uneven V, tied", "uneven, shared ends"}  # whose embedding, norm and head are shared by all ranks at rest


def compared(name: str, count: int):
    loss_fn, params, table, stages, split = CASES[name]()
    m, mesh = table.microbatches, Mesh(pp=table.ranks)
    batch = hand.batch_of(2 * m)
    one = hand.steps(
        step.accumulate(loss_fn, m, dtype=F64), params, hand.layouts_of(params, Mesh(), None), batch, count
    )
    grad_fn = pipelined(loss_fn, Pipeline(table, stages), dtype=F64)
    layouts = hand.layouts_of(params, mesh, split, name in ENDS)
    return hand.worst(one, hand.steps(grad_fn, params, layouts, batch, count))


@pytest.mark.long
@pytest.mark.parametrize("name", ["uneven, shared ends", "foreign"])
def test_it_is_microbatches(name):
    error, path = compared(name, 1)
    assert error <= (1e-12 if name in SUMS else 0), path


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_microbatches(name):
    error, path = compared(name, 2)
    assert error <= (1e-12 if name in SUMS else 0), path
