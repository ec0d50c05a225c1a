"""Arrays on their way to a device: on a stream of their own, and nobody reads them before they have come."""

import torch

from fmegatron import data, tree
from fmegatron.data.contract import Placed
from fmegatron.data.reader import ahead
from fmegatron.layout import Layout, Mesh
from fmegatron.tree.arrivals import Arrivals
from tests.streams import Late

CUDA = torch.device("cuda", 0)


def reading(x, into):
    return lambda: into.append(x.clone())


def test_they_come_beside_what_is_computed():
    """A copy is not behind what the device has to do, and what it does next is behind the copy."""
    late, found, order = Late(), [], []
    late.launch(lambda: order.append("computed"))
    layout = Layout((2,), torch.float32, Mesh())
    arrivals, given = Arrivals(CUDA, lambda device: late), {"x": tree.place(torch.ones(2), layout), "n": 3}
    there, event = arrivals.begin(given)
    late.do(event)
    assert order == [] and torch.equal(there["x"], given["x"]) and there["n"] == 3
    assert tree.layout_of(there["x"]) == layout
    there = arrivals({"x": torch.full((2,), 5.0)})
    late.launch(reading(there["x"], found))
    late.do(late.mark(late.compute))
    assert order == ["computed"] and torch.equal(found[0], torch.full((2,), 5.0)) and late.waits == 0
    assert [(x is there["x"], stream) for x, stream in late.used] == [(True, late.compute)]


def test_without_the_event_they_would_be_read_too_early():
    """The device of these tests shows it."""
    late, found = Late(), []
    there, _ = Arrivals(CUDA, lambda device: late).begin({"x": torch.ones(2)})
    late.launch(reading(there["x"], found))
    late.do(late.mark(late.compute))
    assert found[0].isnan().all()


def test_memory_that_its_owner_has_pinned_is_waited_for():
    late, given = Late(), torch.ones(2)
    late.held.append(given)
    there = Arrivals(CUDA, lambda device: late)({"x": given})["x"]
    given.fill_(9)
    late.finish()
    assert late.waits == 1 and torch.equal(there, torch.ones(2))


def test_batches_by_hand_and_those_that_are_read_ahead():
    """`own_rows(...).at(n)` and the reader of the loop: the same stream, the host waits for neither."""
    late, found = Late(), []
    placed = Placed(data.source(lambda n: {"x": torch.full((2,), float(n))}), CUDA)
    placed.arrivals._make = lambda device: late
    late.launch(reading(placed.at(3)["x"], found))
    with ahead(placed) as batch_at:
        for n in range(3):
            late.launch(reading(batch_at(n)["x"], found))
    late.do(late.mark(late.compute))
    assert [x[0].item() for x in found] == [3, 0, 1, 2] and late.waits == 0
    assert len(late.streams) == 2 and late.threads == 1
