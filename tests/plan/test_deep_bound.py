"""`plan.deep` where what travels fills the room below the peak: the peak is that of the order of the graph, bounded."""

import math

import pytest

from fmegatron import plan
from fmegatron.layout import Mesh
from fmegatron.plan import from_trace
from tests.plan.described import decoder

MESH = Mesh(fsdp=2)


@pytest.fixture
def uneven(monkeypatch):
    """Layers whose communication is moved do not add the same; in the order of the graph they do."""
    known, real = plan.exact(decoder(MESH), overlap=False), from_trace.deep

    def deep(build, depth, mesh, *, few=None, overlap=True, **how):
        if few is None:
            return real(build, depth, mesh, few=few, overlap=overlap, **how)
        if overlap is not False:
            raise from_trace.UnevenError(f"deep: got {few}")
        return known

    monkeypatch.setattr(from_trace, "deep", deep)
    return known


@pytest.mark.medium
def test_it_is_bounded_by_the_limit_of_overlap(uneven):
    found = from_trace.deep(decoder, 32, MESH)
    assert found.bound == 1.05 and found.transient == math.ceil(1.05 * uneven.transient)
    assert found.peak == found.state + found.batch + found.transient
    assert "at most: 1.05 times what is above state and batch in the order of the graph" in str(found)
    with pytest.raises(from_trace.UnevenError, match=r"got \(8, 14\)"):  # of one rank nothing travels
        from_trace.deep(decoder, 32, Mesh())
