"""An optimizer or norm whose numbers depend on layouts refuses arrays that know none, where there are several ranks."""

import re

import pytest
import torch

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Axes, World, connect
from fmegatron.collectives.known_ranks import recorded_mesh
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.optim import contrib
from fmegatron.optim.clipping import group_norms
from fmegatron.testing import simulate, split

F32 = torch.float32
SHAPES = {"a": (8, 6), "b": (4, 8)}
MATRICES = {
    "muon": lambda: optim.muon(0.1, dtype=F32),
    "soap": lambda: contrib.soap(0.1),
    "adafactor": lambda: contrib.adafactor(0.1),
    "8 bits": lambda: contrib.compressed(optim.adamw(0.1), [("adam/v", contrib.int8(block=2, smallest=0, root=True))]),
    "clip": lambda: optim.adamw(0.1),
}
NORMS = {"global": lambda g: optim.global_norm(g), "groups": lambda g: group_norms(g)["a"]}
REFUSED = (
    "{who}: (a|b): got a (parameter|gradient) whose layout is not known, as that of no other is, on {where}.*place"
)


def layouts_on(mesh):
    return {k: Layout(shape, F32, mesh, ("fsdp",)) for k, shape in SHAPES.items()}


def values():
    g = torch.Generator().manual_seed(0)
    return {k: torch.randn(shape, generator=g) for k, shape in SHAPES.items()}


def refused(where, who="(muon|soap|adafactor|compressed|global_norm)"):
    return pytest.raises(ValueError, match=REFUSED.format(who=who, where=where))


def as_it_is(x):
    return x


def cast(x):
    return x * 1


def stepped(name, params_as=cast, grads_as=cast, state_as=cast):
    """step(carry, grads) -> carry: an update of parameters, gradients and a state that are computed before."""
    opt = MATRICES[name]()

    def update(carry, grads):
        params, state = tree.map(params_as, carry["params"]), tree.map(state_as, carry["state"])
        grads = tree.map(grads_as, grads)
        norm = optim.global_norm(grads) if name == "clip" else None
        new, state = opt.update(grads, state, params)
        return {"params": new, "state": state}, {} if norm is None else {"norm": norm}

    return update


def carry_on(name, mesh):
    """(specs of the carry and of its gradients, the arrays of one rank)."""
    opt, params = MATRICES[name](), tree.map(tree.ArraySpec, layouts_on(mesh))
    return {"params": params, "state": opt.init(params)}, params


@pytest.mark.long
@pytest.mark.parametrize("name", MATRICES)
def test_the_arguments_of_what_is_traced_know(name):
    """check, simulate, the trace of a jit: Muon was taken to work on full matrices before, and the check said ok."""
    specs, grads = carry_on(name, Mesh(fsdp=2))
    with refused("the mesh fsdp2"):
        step.check(stepped(name), specs, grads)
    full = {"params": values(), "state": MATRICES[name]().init(values())}
    layouts = tree.layouts((specs, grads))
    with refused("the mesh fsdp2"):
        simulate(stepped(name), Mesh(fsdp=2), full, values(), layouts=layouts)
    one = tree.layouts(carry_on(name, Mesh())[0]), layouts_on(Mesh())
    after, _ = simulate(stepped(name), Mesh(), full, values(), layouts=one).globals()  # on one rank it is right
    torch.testing.assert_close(after["params"], stepped(name)(full, values())[0]["params"])


@pytest.mark.parametrize("beside", ["gradients", "state"])
@pytest.mark.parametrize("name", ["muon", "soap", "adafactor", "8 bits"])
def test_outside_of_a_trace_what_stands_beside_them_knows(name, beside):
    """The gradients of one rank of two, or its state; parameters that were cast, as every op gives another array."""
    specs, layouts = carry_on(name, Mesh(fsdp=2))
    carry, grads = tree.init(specs, 0, 0), split(values(), tree.layouts(layouts))[0]
    how = {"grads_as": as_it_is} if beside == "gradients" else {"state_as": as_it_is}
    with refused("the mesh fsdp2"):
        stepped(name, **how)(carry, grads)


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_what_was_computed(name):
    layouts = layouts_on(Mesh(fsdp=2))
    with refused("the mesh fsdp2", "global_norm"):
        step.check(lambda g: NORMS[name](tree.map(cast, g)), layouts)
    assert step.check(lambda g: NORMS[name](tree.place(tree.map(cast, g), layouts)), layouts).ok
    assert NORMS[name](values()) > 0


def moments(of):
    return tree.scale(tree.subtract(tree.add(of, of), tree.scale(of, 0.5)), 2)


@pytest.mark.parametrize("name", NORMS)
def test_sums_of_arrays_that_lie_alike_lie_so_too(name):
    mesh = Mesh(dp=2, fsdp=2)
    layouts = layouts_on(mesh)
    assert step.check(lambda g: NORMS[name](moments(g)), layouts).ok
    found = simulate(lambda g: NORMS[name](moments(g)), mesh, values(), layouts=(layouts,)).globals()
    torch.testing.assert_close(found, NORMS[name](moments(values())))


def test_sums_of_arrays_that_lie_otherwise_are_not_known():
    """Another layout, a pending sum beside a sum, a factor that may differ on each rank: no statement is made."""
    mesh = Mesh(fsdp=2)
    one, other = layouts_on(mesh)["a"], Layout((8, 6), F32, mesh)
    x = tree.place(torch.ones(4, 6), one)
    y = tree.place(torch.ones(4, 6), Layout((4, 6), F32, mesh))
    pending = tree.place(torch.ones(4, 6), Layout((4, 6), F32, mesh, unreduced=("fsdp",)))
    assert tree.layout_of(tree.add(x, x)) == tree.layout_of(tree.scale(x, 2)) == one
    assert tree.layout_of(tree.add(x, tree.place(torch.ones(4, 6).double(), one.replace(dtype=torch.float64)))) == (
        one.replace(dtype=torch.float64)
    )
    for wrong in (tree.add(x, y), tree.subtract(y, pending), tree.add(x, torch.ones(4, 6))):
        assert tree.layout_of(wrong) is None
    assert tree.layout_of(tree.scale(x, torch.tensor(2.0))) is None
    assert tree.layout_of(tree.add(x, tree.place(torch.ones(6), Layout((6,), F32, mesh)))) is None
    assert tree.layout_of(tree.add(pending, pending)) == tree.layout_of(pending) and other != one


# ---- the ranks of a jit, and of the process --------------------------------------------------------------------------
def on_ranks(rank, mesh, name):
    """What each way to call an update says on real ranks, of parameters that nobody has placed."""
    said = {}

    def told(key, call):
        try:
            said[key] = call() is not None and "right"
        except ValueError as error:
            said[key] = str(error)

    specs, grads_at = carry_on(name, mesh)
    world = connect(mesh)
    bare = tree.map(torch.clone, split(values(), tree.layouts(grads_at))[rank])
    carry = {"params": bare, "state": tree.map(torch.clone, tree.init(specs, 0, rank)["state"])}
    update = stepped(name, as_it_is, as_it_is, as_it_is)
    told("eager", lambda: update(carry, bare))
    told("jit", lambda: step.jit(update, world=world, backend="eager", check=False)(carry, bare))
    told("jit without ranks", lambda: step.jit(update, backend="eager")(carry, bare))
    full = {"params": values(), "state": MATRICES[name]().init(tree.place(values(), layouts_on(Mesh())))}
    alone = step.jit(update, world=World.alone("cpu"), backend="eager")
    told("one rank among others", lambda: alone(full, values()))
    return said


@pytest.mark.long
@pytest.mark.parametrize("name", ["muon", "clip"])
def test_real_ranks(ranks, name):
    for said in ranks.run(on_ranks, Mesh(fsdp=2), name, ranks=2):
        for key, where in (("eager", "2 processes"), ("jit", "the mesh fsdp2"), ("jit without ranks", "2 processes")):
            assert re.search(REFUSED.format(who="(muon|global_norm)", where=where), said[key]), (key, said[key])
        assert said["one rank among others"] == "right"


def test_a_trace_inside_of_a_trace_is_for_the_same_ranks():
    """A jitted function that is called with what was computed does not know its arguments' mesh, but the outer does."""
    seen = []
    inner = step.jit(lambda g: seen.append(recorded_mesh()) or optim.global_norm(g), backend="eager")
    with refused("the mesh fsdp2", "global_norm"):
        step.check(lambda g: inner(tree.map(cast, g)), layouts_on(Mesh(fsdp=2)))
    assert seen == [Mesh(fsdp=2)] and recorded_mesh() is None
    assert inner(values()) > 0


def test_a_decoder_of_parameters_that_were_cast():
    """Split over tp, its shapes fit: each rank's part of the sums was taken for all of it."""
    of = model.llama(vocab_size=32, dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=16, max_seq=8)
    specs = model.specs(of, Mesh(tp=2))
    batch = {k: Layout((4, 8), torch.int64, Mesh(tp=2)) for k in ("tokens", "labels")}

    def loss(params, batch):
        parts, _ = model.loss(tree.map(cast, params), batch, of)
        return step.means(parts, Axes(Mesh(tp=2)))

    with pytest.raises(ValueError, match=r"model: .*: got a parameter whose layout is not known.*the mesh tp2"):
        step.check(loss, specs, batch)


def test_averages_of_what_was_cast():
    mesh, opt = Mesh(dp=2), optim.averaged(optim.sgd(0.1), decay=0.9)
    params = tree.specs({"w": (4, 4)}, mesh, strategy=DataParallel.zero1())
    specs = step.state_specs(params, opt)
    with pytest.raises(ValueError, match=r"averaged_params: w: got a parameter whose layout is not known"):
        step.check(lambda s: {"w": step.averaged_params(step.State(*tree.map(cast, (s.step, s.params, s.opt))))}, specs)
    assert step.check(lambda s: {"w": step.averaged_params(s)}, specs).ok
