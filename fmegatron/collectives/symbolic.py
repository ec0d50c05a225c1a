"""The symbolic binding: each collective as one graph node that names its axes and knows no group, device or rank.

A step is traced with these ops. The same graph is then checked, simulated, counted, or lowered to real collectives
(`fmegatron.collectives.real`). The ops have shapes only; running one on real data is an error that says what to do.
"""

import torch

from fmegatron.collectives.place import Place
from fmegatron.collectives.torch_private import schema_of
from fmegatron.collectives.wire import wide
from fmegatron.layout import Mesh

__all__ = ["NAMESPACE", "SYMBOLIC_OPS", "is_symbolic", "require_mesh_of_graph"]

NAMESPACE = "fmegatron"


def _same(x, *_):
    return x.new_empty(x.shape)


def _grown(x, axes, n, dim):
    shape = list(x.shape)
    shape[dim] *= n
    return x.new_empty(shape)


def _shrunk(x, axes, n, dim):
    shape = list(x.shape)
    shape[dim] //= n
    return x.new_empty(shape)


def _exchanged(x, axes, n, split_dim, concat_dim):
    shape = list(x.shape)
    shape[split_dim] //= n
    shape[concat_dim] *= n
    return x.new_empty(shape)


def _index(like, axes):
    return like.new_empty((), dtype=torch.int64)


def _all_grown(xs, axes, sizes, places):
    return [x.new_empty(Place.parse(p).whole_shape(x.shape, sizes)) for x, p in zip(xs, places, strict=True)]


def _all_shrunk(xs, axes, sizes, places, exact):
    shapes = [Place.parse(p).shard_shape(x.shape, sizes) for x, p in zip(xs, places, strict=True)]
    return [x.new_empty(n, dtype=wide(x.dtype) if exact else x.dtype) for x, n in zip(xs, shapes, strict=True)]


def _all_same(xs, axes, exact):
    return [x.new_empty(x.shape, dtype=wide(x.dtype) if exact else x.dtype) for x in xs]


def _all_exchanged(xs, axes, n, split_dims, concat_dims):
    return [_exchanged(x, axes, n, split, concat) for x, split, concat in zip(xs, split_dims, concat_dims, strict=True)]


# name, arguments after the tensor (of the coalesced ops: the list of tensors), shape rule. All have one argument more,
# by name: `mesh`, the fingerprint of the mesh of their axes, so that no graph is used on another one.
_SCHEMAS = (
    ("all_gather", "str[] axes, int n, int dim", _grown),
    ("reduce_scatter", "str[] axes, int n, int dim", _shrunk),
    ("psum", "str[] axes", _same),
    ("pmax", "str[] axes", _same),
    ("all_to_all", "str[] axes, int n, int split_dim, int concat_dim", _exchanged),
    ("ppermute", "str[] axes, int n, int shift", _same),
    ("axis_index", "str[] axes", _index),
    ("declare", "str[] axes, str kind, int dim", _same),
    ("all_gather_many", "str[] axes, int[] sizes, str[] places", _all_grown),
    ("reduce_scatter_many", "str[] axes, int[] sizes, str[] places, bool exact", _all_shrunk),
    ("psum_many", "str[] axes, bool exact", _all_same),
    ("all_to_all_many", "str[] axes, int n, int[] split_dims, int[] concat_dims", _all_exchanged),
)
SYMBOLIC_OPS = tuple(name for name, _, _ in _SCHEMAS)


def _refuse(name):
    def run(x, axes, *_, mesh):
        shape = tuple((x[0] if isinstance(x, list) else x).shape)
        raise RuntimeError(
            f"{name} over {'+'.join(axes)} met a real tensor {shape}, but these axes are symbolic: they "
            "have no process group. Run the step through fmegatron.step.jit(..., world=connect(mesh)), look at it with "
            "fmegatron.testing.simulate(...), or call it with Axes(mesh, connect(mesh))."
        )

    return run


def _without_mesh(shape_rule):
    return lambda *args, mesh: shape_rule(*args)


def _define_ops():
    """Register the ops with torch's dispatcher, the way a C extension would when it is loaded."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, arguments, shape_rule in _SCHEMAS:
        many = name.endswith("_many")
        first = "Tensor[] xs" if many else "Tensor like" if name == "axis_index" else "Tensor x"
        library.define(f"{name}({first}, {arguments}, *, str mesh) -> Tensor{'[]' * many}")
        library.impl(name, _without_mesh(shape_rule), "Meta")
        for key in ("CPU", "CUDA"):
            library.impl(name, _refuse(name), key)
    return library


_LIBRARY = _define_ops()


def is_symbolic(target) -> str | None:
    """Name of the collective if `target` (of an fx node) is one of the symbolic ops, else None."""
    schema = schema_of(target)
    if schema is None:
        return None
    namespace, _, name = schema.name.partition("::")
    return name if namespace == NAMESPACE and name in SYMBOLIC_OPS else None


def require_mesh_of_graph(graph: torch.fx.Graph, mesh: Mesh, who: str, whose: str) -> None:
    """ValueError, naming op and line, unless all symbolic collectives of a graph are over axes of `mesh`.

    who: what was called; whose: what was given to it that has this mesh.
    """
    for node in graph.nodes:
        name = is_symbolic(node.target) if node.op == "call_function" else None
        if name and node.kwargs["mesh"] != mesh.fingerprint:
            raise ValueError(
                f"{who}: {name} over {'+'.join(node.args[1])} at {node.meta.get('at', '?')}: got axes of "
                f"{node.kwargs['mesh']}, wanted {mesh.fingerprint}, the mesh of {whose}; make both of one Mesh"
            )
