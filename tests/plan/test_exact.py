"""The exact plan: counted by hand, against the allocator of a real run, and continued in depth."""

from dataclasses import dataclass, replace

import pytest
import torch

from fmegatron import plan, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.collectives.torch_private import group_named
from fmegatron.layout import Layout, Mesh
from fmegatron.plan import __main__ as command
from fmegatron.plan.paper import SizedWorld
from fmegatron.plan.torch_private import schedule
from fmegatron.plan.wrapper import counted
from fmegatron.step.jitted import Compiled
from fmegatron.step.passes import Target
from fmegatron.step.torch_private import FakeTensorMode, make_fx
from fmegatron.testing.measure import peak_bytes
from tests.pairs import few
from tests.plan.described import decoder, tower
from tests.step import tiny
from tests.step.overlap.decoder import config, state, train_step

SQUARE = 128 * 128 * 4  # bytes


def graph_of(fn):
    with FakeTensorMode():
        fakes = [torch.empty(128, 128)]
        return make_fx(fn)(*fakes), fakes


HAND = {
    "product": (lambda x: [x @ x], 1),
    "chain": (lambda x: [((x @ x) @ x) @ x], 2),  # the third takes the memory of the first
    "fused": (lambda x: [torch.relu((x + 1).sin() @ x) * 2], 2),  # elementwise work is fused, and done in place
    "kept": (lambda x: [(y := x @ x) @ y, y], 2),
    "joined": (lambda x: [torch.cat([x @ x, x.t() @ x])], 2),  # written where they are joined
}


@pytest.mark.parametrize("name", few(2, [(name,) for name in HAND], HAND))
def test_by_hand(name):
    fn, squares = HAND[name]
    module, fakes = graph_of(fn)
    found = counted(module, fakes, {}, {}, "hand")
    assert found.peak == squares * SQUARE
    assert sum(one.nbytes for one in found.held) == found.peak


@pytest.mark.medium
def test_a_real_run_takes_what_was_planned():
    """The allocator of torch, in this process; the whole heap of real ranks is the sweep's (test_measured.py)."""
    update, layouts, batch = tower(depth=3, width=128, rows=512)
    planned = plan.exact(update, layouts, batch, Mesh())
    run = step.jit(update, donate=0)
    params = {"w": torch.zeros(layouts["w"].shape)}
    x = torch.zeros(batch.shape)
    params, _ = run(params, x)
    measured = peak_bytes(lambda: run(params, x))
    assert planned.transient == pytest.approx(measured, rel=0.01)
    assert planned.state == layouts["w"].local_nbytes(0) and planned.batch == batch.local_nbytes(0)
    assert sum(one.nbytes for one in planned.held) == planned.transient
    text = str(planned)
    assert "described.py:" in text and "alive at the peak" in text


def test_collectives_need_no_ranks():
    mesh = Mesh(dp=16384)
    layout = Layout((1 << 14, 256), torch.float32, mesh, ("dp",))

    def summed(x, scale):
        return x + psum(x * scale, Axes(mesh)["dp"]), {}

    found = plan.exact(summed, layout, Layout((), torch.float32, mesh), mesh, rank=77)
    assert found.state == 256 * 4 and found.transient >= 256 * 4
    world = SizedWorld(mesh, 5)
    with world:
        name, again = world.group_name(("dp",)), SizedWorld(mesh, 5)
        assert again.group_name(("dp",)) != name and world.group(("dp",)).size() == 16384
        again.close()
    with pytest.raises(RuntimeError):
        group_named(name)


@pytest.mark.slow
def test_a_deep_model_is_continued():
    def build(depth):
        return tower(depth, rows=512, save="all")

    shallow = plan.deep(build, 14, Mesh(), few=(4, 8))
    whole = plan.exact(*build(14), Mesh())
    assert shallow.depth == (14, (4, 8)) and shallow.state == whole.state
    assert shallow.transient == pytest.approx(whole.transient, rel=0.01)
    assert plan.deep(build, 11, Mesh(), few=(4, 8)).depth is None


@pytest.mark.slow
def test_what_does_not_grow_evenly_is_refused():
    def build(depth):
        return tower(depth, width=8 * 2**depth, save="all")

    with pytest.raises(ValueError, match="layers differ: plan all layers"):
        plan.deep(build, 14, Mesh(), few=(4, 8))


def test_a_model_that_has_no_few_layers():
    def build(depth):
        if depth < 20:
            raise ValueError(f"got {depth} layers, wanted 20 or more")
        return tower(depth)

    with pytest.raises(ValueError, match="deep: got no model of 8 layers: got 8 .* or more; plan all layers"):
        plan.deep(build, 24, Mesh())


def with_wider(decoder, which):
    """The decoder with an MLP of twice the width in these layers."""

    def wider(part):
        return replace(part, mixer=replace(part.mixer, ffn_dim=2 * part.mixer.ffn_dim)) if part.name == "mlp" else part

    blocks = [tuple(map(wider, block)) if i in which else block for i, block in enumerate(decoder.blocks)]
    return replace(decoder, blocks=tuple(blocks))


@pytest.mark.slow
def test_layers_that_differ_behind_the_depths_counted_are_refused():
    """Found by a reviewer: a wider MLP from layer 12 on made a plan of 20 layers 41 % too low."""

    def build(depth):
        return decoder(layers=depth, of=lambda d: with_wider(d, range(12, depth)))

    with pytest.raises(ValueError, match="deep: got a state of .* bytes at 22 layers, wanted .*; layers differ"):
        plan.deep(build, 22, Mesh())


@pytest.mark.slow
def test_the_first_layers_may_be_of_another_kind():
    """As of DeepSeek V3, which has three dense layers in front: 4 layers are too few then."""

    def build(depth):
        return decoder(layers=depth, of=lambda d: with_wider(d, range(3)))

    shallow, whole = plan.deep(build, 24, Mesh()), plan.exact(*build(24), Mesh())
    assert shallow.depth is not None and shallow.state == whole.state
    assert shallow.transient == pytest.approx(whole.transient, rel=0.02)


def test_depths_at_equal_distances():
    def build(depth):
        return tower(depth)

    with pytest.raises(ValueError, match="wanted two depths from 4 on, 4 or more apart, by an even number"):
        plan.deep(build, 9, Mesh(), few=(1, 2))


def test_layouts_of_another_mesh_are_refused():
    described = decoder(Mesh(fsdp=2))
    with pytest.raises(ValueError, match="plan: the state"):
        plan.exact(*described, Mesh(fsdp=4))
    assert tree.leaves(described.batch)[0].mesh == Mesh(fsdp=2)


@pytest.mark.slow
def test_what_was_compiled_before_changes_nothing():
    """A graph whose operators Inductor has met is ordered as one whose operators it has not."""
    of, mesh = config(layers=1), Mesh(fsdp=2)
    arguments = state(of, mesh), tiny.decoder_batch(of, mesh=mesh)
    with SizedWorld(mesh, 0) as world:
        program = Compiled(train_step(of, mesh), arguments, (0,), Target(world)).program
        found = [schedule(program.graph_module, program.fakes, dict(program.settings))[0] for _ in range(2)]
    first, again = (source.partition("def call(")[2] for source in found)  # what stands before has numbers of its own
    assert "all_to_all_single" in first and first == again


@dataclass(frozen=True)
class Config:
    """No field is called "layers", and two others have the number of layers."""

    rows: int = 24
    blocks_in_all: int = 24
    steps: int = 24


def described_by(of):
    if of.blocks_in_all % 2:
        raise ValueError(f"got {of.blocks_in_all} layers, wanted pairs")
    return decoder(layers=of.blocks_in_all, batch=of.rows)


def stacks_of(of):
    layout = Layout((of.blocks_in_all, 8, 8), torch.float32, Mesh())
    batch = Layout((of.rows, 8), torch.float32, Mesh())
    return step.Description(print, {"w": tree.ArraySpec(layout, stacked=True)}, batch)


def without_layers(of):
    return step.Description(print, {"w": Layout((of.blocks_in_all, 8), torch.float32, Mesh())}, tower().batch)


@pytest.mark.parametrize(
    ("describe", "field"), [(described_by, "blocks_in_all"), (stacks_of, "blocks_in_all"), (without_layers, None)]
)
def test_the_field_that_decides_the_depth_is_found_by_what_is_described(describe, field):
    depths = command._depths(describe(Config()))
    assert depths == ({24} if field else set())
    assert command._field_of_depth(describe, Config(), {24}) == field
