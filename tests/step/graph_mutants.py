"""Every way to break one collective of a traced step: dropped, done twice, over another axis, a slice for a scatter."""

import contextlib

import torch

from fmegatron import model, step, tree
from fmegatron.collectives import Axes
from fmegatron.collectives.kinds import collective_of
from fmegatron.collectives.places import Place
from fmegatron.collectives.table import AXIS_INDEX
from fmegatron.layout import DataParallel, Layout, Mesh

TINY = {"vocab_size": 65, "dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "max_seq": 16}


def problem(
    mesh: Mesh, optimizer, *, microbatches=1, clip_norm=1.0, save=None, mask=False, strategy=None, rows=8,
    precision=None, **fields,
):  # fmt: skip
    """(train_step, specs of its state, layouts of its batch) of a tiny decoder."""
    config = model.llama(**{**TINY, "vocab_multiple": 8, **fields})
    axes, specs = Axes(mesh), model.specs(config, mesh, strategy=strategy)
    layouts = tree.layouts(specs)
    train_step = step.build_train_step(
        lambda p, b: model.loss(p, b, config, axes, save),
        optimizer, layouts, axes, strategy=strategy, microbatches=microbatches, clip_norm=clip_norm,
        precision=precision,
    )  # fmt: skip
    dealt = strategy or DataParallel()
    split = dealt.batch_layout((rows * microbatches, 16), torch.int64, mesh, microbatches)
    batch = {"tokens": split, "labels": split} | ({"mask": split.replace(dtype=torch.bool)} if mask else {})
    return train_step, step.state_specs(specs, optimizer, strategy), batch


def traced_problem(*problem_of):
    """(Traced, layouts of its inputs, of its outputs, paths of the batch) for `check_traced`."""
    train_step, specs, batch = problem_of
    layouts = tree.map(lambda x: x if isinstance(x, Layout) else x.layout, (specs, batch))
    empty = tree.map(lambda x: torch.empty(x.local_shape(0), dtype=x.dtype, device="meta"), layouts)
    traced = step.trace(train_step, tree.place(empty, layouts))
    state = dict(zip(tree.paths(layouts[0]), tree.leaves(layouts[0]), strict=True))
    outputs = [state.get(path.removeprefix("0/")) if path.startswith("0/") else None for path in traced.out_paths]
    return traced, tree.leaves(layouts), outputs, {path for path in traced.in_paths if path.startswith("1/")}


def mutants(traced, mesh: Mesh):
    """(what was done to which node, the Traced with that one fault until the next is asked for), one by one."""
    graph = traced.graph_module.graph
    for node in [n for n in graph.nodes if collective_of(n.target)]:
        name, axes = collective_of(node.target).name, list(node.args[1])
        faults = {
            "psum": ["drop", "double"], "pmax": ["drop"], "reduce_scatter": ["slice", "dim"], "all_gather": ["dim"],
        }.get(name, [])  # fmt: skip
        if "dim" in faults and not any(x.meta["val"].dim() == 2 and _turned(text) != text for x, text in _places(node)):
            faults.remove("dim")
        if collective_of(node.target) is not AXIS_INDEX:
            faults = faults + [a for a in mesh.names if [a] != axes and mesh.extent([a]) == mesh.extent(axes)]
        for fault in faults:
            with _restored(graph, node), graph.inserting_after(node):
                _break(graph, node, fault)
                yield f"{name} over {'+'.join(axes)} at {node.meta['at']}: {fault}", traced


def _places(node):
    """(tensor, text of its place) of a gather or reduce-scatter."""
    return list(zip(node.args[0], node.args[3], strict=True))


def _turned(text: str) -> str:
    return {"0": "1", "1": "0"}.get(text, text)


@contextlib.contextmanager
def _restored(graph, node):
    """The graph as it was, after what was done to a node, its users and theirs."""
    before = set(graph.nodes)
    near = {node, *node.users, *(user for result in node.users for user in result.users)}
    saved = [(n, n.args, n.kwargs) for n in near]
    yield
    for n, args, kwargs in saved:
        n.args, n.kwargs = args, kwargs
    for n in reversed([n for n in graph.nodes if n not in before]):
        graph.erase_node(n)


def _break(graph, node, fault: str) -> None:
    results = list(node.users)  # its items
    given = [node.args[0][item.args[1]] for item in results]
    if fault == "drop":
        for result, x in zip(results, given, strict=True):
            result.replace_all_uses_with(x)
    elif fault == "double":
        for result in results:
            with graph.inserting_after(result):
                again = graph.call_function(node.target, ([result], *node.args[1:]), node.kwargs)
            with graph.inserting_after(again):
                item = graph.call_function(result.target, (again, 0))
            result.replace_all_uses_with(item, delete_user_cb=lambda user, again=again: user is not again)
            again.meta, item.meta = dict(node.meta, val=[result.meta["val"]]), dict(result.meta)
    elif fault == "slice":
        for result, x in zip(results, given, strict=True):
            dim = Place.parse(node.args[3][result.args[1]]).dims[0]
            with graph.inserting_after(result):
                new = graph.call_function(torch.ops.aten.slice.Tensor, (x, dim, 0, result.meta["val"].shape[dim]))
            new.meta = dict(result.meta, at=node.meta["at"])
            result.replace_all_uses_with(new)
    elif fault == "dim":
        places = [text if x.meta["val"].dim() < 2 else _turned(text) for x, text in _places(node)]
        node.args = (*node.args[:3], places, *node.args[4:])
    else:
        node.args = (node.args[0], [fault], *node.args[2:])
