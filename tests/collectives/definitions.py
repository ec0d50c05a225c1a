"""Every collective by its mathematical definition on the list of a group's tensors, and one step that runs them all."""

import torch

from fmegatron import collectives as c
from fmegatron.collectives import Axes
from fmegatron.collectives.ops import all_to_all_rows, declare
from fmegatron.collectives.places import Place
from fmegatron.layout import Mesh

SHAPE = (4, 12, 2)  # the local tensor; dims differ, and dims 0 and 1 divide by groups of 2 and 4


def total(xs):
    return sum(xs[1:], xs[0])


def concat(xs, dim):
    return [torch.cat(xs, dim)] * len(xs)


def parts(x, n, dim):
    return list(x.chunk(n, dim))


def exchange(xs, split_dim, concat_dim):
    n = len(xs)
    return [torch.cat([parts(x, n, split_dim)[i] for x in xs], concat_dim) for i in range(n)]


def routed(x, axis):
    """Index i sends (i + j + 2) % 3 rows to index j, so j expects as many; some have too few, some have no room."""
    counts = (c.axis_index(axis, like=x) + torch.arange(2, axis.size + 2)) % 3
    return all_to_all_rows(x, counts, counts, axis, 5)


def routes(xs, rows):
    """The definition: row by row."""
    queues = [[*x, *[torch.zeros_like(x[0])] * 8] for x in xs]
    came = [[queue.pop(0) for i, queue in enumerate(queues) for _ in range((i + j + 2) % 3)] for j in range(len(xs))]
    return [torch.stack([*own, *[torch.zeros_like(xs[0][0])] * rows][:rows]) for own in came]


def shifted(xs, shift):
    return [xs[(i - shift) % len(xs)] for i in range(len(xs))]


def filled(x, n, size=None):
    """x with zeros behind dim 1, up to a multiple of n, or to a size."""
    return torch.nn.functional.pad(x, (0, 0, 0, (size or -(-x.shape[1] // n) * n) - x.shape[1]))


# name -> (the call, definition of the value, definition of the transpose); both on the list of a group
CASES = {
    "all_gather": (
        lambda x, a: c.all_gather(x, a, 1),
        lambda xs: concat(xs, 1),
        lambda gs: parts(total(gs), len(gs), 1),
    ),
    "all_gather_negative_dim": (
        lambda x, a: c.all_gather(x, a, -3),
        lambda xs: concat(xs, 0),
        lambda gs: parts(total(gs), len(gs), 0),
    ),
    "reduce_scatter": (
        lambda x, a: c.reduce_scatter(x, a, 1),
        lambda xs: parts(total(xs), len(xs), 1),
        lambda gs: concat(gs, 1),
    ),
    "psum": (lambda x, a: c.psum(x, a), lambda xs: [total(xs)] * len(xs), lambda gs: gs),
    "enter": (lambda x, a: c.enter(x, a), lambda xs: xs, lambda gs: [total(gs)] * len(gs)),
    "pmax": (
        lambda x, a: x * c.pmax(x, a),
        lambda xs: [x * torch.stack(xs).amax(0) for x in xs],
        None,  # no gradient passes through the maximum: see the test
    ),
    "all_to_all": (
        lambda x, a: c.all_to_all(x, a, 0, 1),
        lambda xs: exchange(xs, 0, 1),
        lambda gs: exchange(gs, 1, 0),
    ),
    "all_to_all_same_dim": (
        lambda x, a: c.all_to_all(x, a, 1, 1),
        lambda xs: exchange(xs, 1, 1),
        lambda gs: exchange(gs, 1, 1),
    ),
    "all_to_all_rows": (routed, lambda xs: routes(xs, 5), lambda gs: routes(gs, SHAPE[0])),
    "ppermute": (lambda x, a: c.ppermute(x, a, 1), lambda xs: shifted(xs, 1), lambda gs: shifted(gs, -1)),
    "ppermute_back": (lambda x, a: c.ppermute(x, a, -1), lambda xs: shifted(xs, -1), lambda gs: shifted(gs, 1)),
    "shard": (
        lambda x, a: c.shard(x, a, 1),
        lambda xs: [parts(x, len(xs), 1)[i] for i, x in enumerate(xs)],
        lambda gs: concat(gs, 1),
    ),
    "shard_padded": (  # 11 of the 12 columns: the last rank has zeros behind
        lambda x, a: c.shard(x[:, :11], a, Place((1,) * len(a.names), true=((1, (11,)),)) if a.size > 1 else 1),
        lambda xs: [parts(filled(x[:, :11], len(xs)), len(xs), 1)[i] for i, x in enumerate(xs)],
        lambda gs: [filled(x[:, :11], 1, 12) for x in concat(gs, 1)],
    ),
    "axis_index": (
        lambda x, a: x * c.axis_index(a, like=x),
        lambda xs: [x * i for i, x in enumerate(xs)],
        lambda gs: [g * i for i, g in enumerate(gs)],
    ),
    "declare": (lambda x, a: declare(x, a, "partial", ("sharded", 0)), lambda xs: xs, lambda gs: gs),
    "declare_own": (lambda x, a: declare(x, a, "own", 1), lambda xs: xs, lambda gs: gs),
}

# mesh -> the axes to try, joint ones included
AXES = {
    Mesh(a=2): ["a"],
    Mesh(a=2, b=2): ["a", "b", ("a", "b"), ("b", "a")],
    Mesh(a=1, b=4): ["a", "b", ("a", "b")],
    Mesh(a=2, b=2).view(order=("b", "a"), c=4): ["c"],  # another naming of the ranks: 0, 2, 1, 3 along c
}


def inputs(mesh: Mesh, name: str, axis) -> tuple[list, list]:
    """Per rank a tensor and a cotangent; multiples of 1/64, so that every order of additions gives the same bits."""
    n = Axes(mesh)[axis].size

    def draw(seed, shape):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-512, 512, shape, generator=generator).double() / 64

    xs = [draw(rank, SHAPE) for rank in range(mesh.size)]
    shape = CASES[name][1](xs[:n])[0].shape
    return xs, [draw(100 + rank, shape) for rank in range(mesh.size)]


def make_step(name: str, axis):
    """`step(x, g) -> (value, gradient)` of one collective."""

    def step(x, g):
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = CASES[name][0](leaf, axis)
        return y.detach(), torch.autograd.grad(y, leaf, g)[0]

    return step


def same_elsewhere(mesh: Mesh, r: int, s: int, axis) -> bool:
    """Whether two ranks differ only along the axes."""
    return all(mesh.coordinates(r)[a] == mesh.coordinates(s)[a] for a in mesh.names if a not in axis)


def by_definition(mesh: Mesh, axis, definition, values: list) -> list:
    """What each rank holds when the definition is applied to every group of the axis."""
    axis = (axis,) if isinstance(axis, str) else axis
    out = [None] * mesh.size
    for rank in range(mesh.size):
        others = [r for r in range(mesh.size) if same_elsewhere(mesh, r, rank, axis)]
        group = sorted(others, key=lambda r: [mesh.coordinates(r)[a] for a in axis])
        out[rank] = definition([values[r] for r in group])[group.index(rank)]
    return out


def make_second(name: str, axis):
    """`step(x, g, h) -> (h through the transpose of the transpose, through that of this one)`: gradients of gradients,
    whose value is linear in g and in h."""

    def step(x, g, h):
        leaf, g, h = (t.detach().requires_grad_() for t in (x, g, h))
        with torch.enable_grad():
            y = CASES[name][0](leaf, axis)
            (dx,) = torch.autograd.grad(y, leaf, g, create_graph=True)
            (dg,) = torch.autograd.grad(dx, g, h, create_graph=True)
        (dh,) = torch.autograd.grad(dg, h, g)
        return dg.detach(), dh

    return step


def make_transformed(name: str, axis):
    """`step(x, g, h)`: what torch.func makes of a collective: vjp, jvp, and vmap of two rows of both."""

    def step(x, g, h):
        def call(x):
            return CASES[name][0](x, axis)

        _, pull = torch.func.vjp(call, x)
        pulled = torch.func.vmap(pull)(torch.stack([g, 2 * g]))[0]
        pushed = torch.func.vmap(lambda t: torch.func.jvp(call, (x,), (t,))[1])(torch.stack([h, 3 * h]))
        rows = torch.func.vmap(call, in_dims=2, out_dims=1)(torch.stack([x, h, g.sum() * x], 2))
        return pulled[0], pushed[1], rows[:, 1]

    return step
