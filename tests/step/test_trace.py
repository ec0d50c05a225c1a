"""The recorded graph: where each node comes from, no wait for the device, and what is refused, naming the line."""

import copy
import functools
import itertools
import pickle
import re

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.step import State, jit, trace, value_and_grad
from fmegatron.step.batch_rows import cut_rows
from fmegatron.step.graph.nodes import opaque_entries
from fmegatron.step.layer import compiled_layer
from fmegatron.testing import assert_pure
from tests.step import tiny

OF_DECODER = {
    "forward.py",
    "linear.py",
    "mlp.py",
    "norm.py",
    "rope.py",
    "dense_attention.py",
    "embedding.py",
    "loss.py",
}


def at(graph, name: str, backward: bool = False) -> list[str]:
    """Lines of the nodes of an op, forward or backward, in order."""
    lines = [n.meta["at"] for n in graph.nodes if n.op == "call_function" and name in str(n.target)]
    return [line for line in lines if line.endswith("(backward)") == backward]


# ---- lines -----------------------------------------------------------------------------------------------------------
def lined_loss(p, x):
    y = torch.tanh(x * p["a"])  # HERE tanh
    z = y @ p["w"]  # HERE product
    return (
        z.square()  # HERE square
    ).sum()


SPLIT = torch.ops.aten.split.Tensor


def test_every_node_knows_its_line():
    def step(p, x):
        (loss, _), grads = value_and_grad(lined_loss)(p, x)
        return {name: p[name] - grads[name].sin() for name in p}, loss  # HERE update

    p = {"a": torch.ones(3), "w": torch.ones(3, 3)}
    graph = trace(step, (p, torch.ones(2, 3))).graph_module.graph
    here = {mark: tiny.line_of(__file__, mark) for mark in ("tanh", "product", "square", "update")}
    assert at(graph, "aten.tanh.") == [here["tanh"]]
    assert at(graph, "aten.tanh_backward") == [] and at(graph, "aten.tanh_backward", True) == [
        here["tanh"] + " (backward)"
    ]
    assert at(graph, "aten.mm.") == [here["product"]]
    assert at(graph, "aten.mm.", True) == [here["product"] + " (backward)"] * 2
    assert set(at(graph, "aten.pow.", True)) == {here["square"] + " (backward)"}
    assert at(graph, "aten.sin.") == [here["update"]] * 2
    assert not [n for n in graph.nodes if n.op == "call_function" and n.meta["at"].startswith("?")]


@pytest.mark.parametrize(("f", "outside"), [(functools.partial(cut_rows, n=2), True), (lambda x: x.split(2), False)])
def test_ops_for_which_no_line_of_the_function_stands(f, outside):
    """Those of the library itself have the line of the call, and say so: it is no line that cuts by a number."""
    (node,) = trace(f, (torch.ones(4, 2),)).graph_module.graph.find_nodes(op="call_function", target=SPLIT)
    assert node.meta["outside"] is outside and re.fullmatch(r"test_trace.py:\d+", node.meta["at"])


def test_lines_inside_compiled_layers():
    """Also after functionalizing, decomposing and cutting; for recomputed nodes it is the forward's line."""

    def layer(x, w):
        y = torch.tanh(x * w)  # HERE inside
        return torch.exp(y) * y  # HERE after

    def loss(w, x):
        return compiled_layer("inputs")(layer)(x * w, w).sum()  # HERE call

    graph = trace(value_and_grad(loss), (torch.ones(3), torch.ones(3))).graph_module.graph
    forward, backward = (entry.graph_module.graph for entry in opaque_entries(graph))
    inside, after = tiny.line_of(__file__, "inside"), tiny.line_of(__file__, "after")
    assert at(forward, "aten.tanh.") == at(backward, "aten.tanh.") == [inside]
    assert at(forward, "aten.exp.") == [after]
    marked = {n.meta["at"] for n in backward.nodes if n.op == "call_function" and "(backward)" in n.meta["at"]}
    assert marked == {inside + " (backward)", after + " (backward)"}
    assert at(graph, "layer_fwd") == [tiny.line_of(__file__, "call")]
    assert at(graph, "layer_bwd", True) == [tiny.line_of(__file__, "call") + " (backward)"]


@pytest.fixture(scope="module", params=[None, "mincut"], ids=["plain", "compiled layers"])
def decoder(request):
    """The decoder's train step over tp and fsdp with everything in it, traced: all its graphs."""
    mesh = Mesh(fsdp=2, tp=2)
    config = tiny.config_with(sequence_parallel=True, z_loss=1e-3)
    step = tiny.decoder_step(config, save=request.param, mesh=mesh, microbatches=2)
    args = (tiny.decoder_state(config, mesh), tiny.decoder_batch(config, mesh=mesh))
    todo, graphs = [trace(step, args).graph_module.graph], []
    while todo:
        graphs.append(todo.pop())
        todo += [entry.graph_module.graph for entry in opaque_entries(graphs[-1])]
    return graphs


@pytest.mark.medium
def test_lines_of_the_decoder(decoder):
    """The user's line first; behind it that of the model, the maths or the optimizer, never of torch or of tracing."""
    lines = {n.meta["at"] for graph in decoder for n in graph.nodes if n.op == "call_function"}
    assert {line.split(":")[0] for line in lines} == {"tiny.py", "test_trace.py"}
    files = {found[1] for line in lines if (found := re.search(r"\(in fmegatron/.*?(\w+\.py):\d+\)", line))}
    assert OF_DECODER | {"adam.py", "clipping.py"} <= files
    assert not files & {"?", "trace.py", "layer.py", "reduce.py", "ops.py", "function.py", "proxy_tensor.py"}


@pytest.mark.long
def test_nothing_waits_for_the_device(decoder):
    """No value is read on the host, and no shape depends on data: the step can be queued ahead."""
    waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default", "bincount")
    for node in itertools.chain.from_iterable(graph.nodes for graph in decoder):
        assert not any(name in str(node.target) for name in waits), (node, node.meta.get("at"))
        moved = getattr(node.target, "_opname", "") == "_to_copy" and "device" in node.kwargs
        assert not moved or node.kwargs["device"] == node.args[0].meta["val"].device
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            assert all(isinstance(size, int) for size in node.meta["val"].shape)


# ---- purity ----------------------------------------------------------------------------------------------------------
def in_place(p, x):
    p["w"].mul_(2)  # HERE in_place
    return p["w"] + x


def through_a_view(p, x):
    p["w"].view(-1)[1:].zero_()  # HERE view
    return p["w"] + x


def by_index(p, x):
    x[0] = 1.0  # HERE index
    return p["w"] + x


def by_out(p, x):
    torch.add(x, 1, out=p["w"])  # HERE out
    return p["w"] + x


def by_list(p, x):
    torch._foreach_add_([x, p["w"]], 1.0)  # HERE list
    return p["w"] + x


def by_data(p, x):
    p["w"].data.mul_(2.0)  # HERE data
    return p["w"] + x


@pytest.mark.long
@pytest.mark.parametrize(
    ("f", "leaf", "mark"),
    [(in_place, "0/w", "in_place"), (through_a_view, "0/w", "view"), (by_index, "1", "index"), (by_out, "0/w", "out"),
     (by_list, "1", "list"), (by_data, "0/w", "data")],
)  # fmt: skip
@pytest.mark.parametrize("donate", [None, 1])
def test_an_argument_changed_in_place(f, leaf, mark, donate):
    args = {"w": torch.ones(2)}, torch.ones(2)
    message = f"argument '{leaf}': got aten.* in place at {tiny.line_of(__file__, mark)}, wanted .* a step is pure"
    with pytest.raises(ValueError, match=message):
        jit(f, donate=donate, backend="eager")(*args)
    assert args[0]["w"].tolist() == args[1].tolist() == [1, 1]


def test_a_parameter_changed_in_place_by_the_loss():
    message = f"at {tiny.line_of(__file__, 'in_place')}: got an argument that is changed in place, .* a step is pure"
    with pytest.raises(ValueError, match=message):
        trace(value_and_grad(in_place), ({"w": torch.ones(2)}, torch.ones(2)))


@pytest.mark.long
def test_temporaries_may_be_changed_and_containers_are_copies():
    def f(p):
        y = p["w"].clone()
        y.add_(1)
        p["w"] = y[1:].mul_(2)  # the caller's dict is another one
        return p

    p = {"w": torch.ones(3)}
    assert assert_pure(jit(f), p)["w"].tolist() == [4, 4]


def test_deep_copies():
    """A copy of a tensor, or of a state, is a copy in the graph: with its line, its layout, and no gradient back."""
    layout = Layout((3,), torch.float32, Mesh())
    seen = []

    def f(state):
        old = copy.deepcopy(state)  # HERE deepcopy
        one, other = copy.deepcopy([state.opt, state.opt])
        seen.append((tree.layouts(old.params), one is other))
        new = state._replace(params=tree.map(lambda x: x * 2, state.params))
        return new, {"moved": (new.params["w"] - old.params["w"]).sum()}

    w = torch.ones(3)
    traced = trace(f, (State(torch.zeros(()), tree.place({"w": w}, layout), w),))
    assert tiny.line_of(__file__, "deepcopy") in {n.meta["at"] for n in traced.graph_module.graph.nodes
                                                    if "clone" in str(n.target)}  # fmt: skip
    assert seen == [({"w": layout}, True)]
    new, metrics = assert_pure(jit(f, backend="eager"), State(torch.zeros(()), {"w": w}, w))
    assert new.params["w"].tolist() == [2, 2, 2] and metrics["moved"] == 3

    def loss(p, x):
        return (p["w"] * copy.deepcopy(p["w"]) * x).sum()

    assert jit(value_and_grad(loss), backend="eager")({"w": 3 * w}, w)[1]["w"].tolist() == [3, 3, 3]


# ---- refused ---------------------------------------------------------------------------------------------------------
CONSTANT = torch.ones(2)


def data_dependent(x):
    if x.sum() > 0:  # HERE if
        return x
    return -x


def reads(x):
    return x * x.sum().item()  # HERE item


def shape_of_data(x):
    return x[x > 0]  # HERE mask


def closes_over(x):
    return x + CONSTANT  # HERE closure


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (data_dependent, "data_dependent: at {if}: got a read of the value of a tensor"),
        (reads, "reads: at {item}: got a read of the value of a tensor"),
        (shape_of_data, "shape_of_data: at {mask}: got a read of the value of a tensor"),
        (
            closes_over,
            "closes_over: at {closure}: got a tensor from a closure .*among its arguments; pass it as an argument",
        ),
    ],
)
def test_refused(f, message):
    marks = {mark: tiny.line_of(__file__, mark) for mark in ("if", "item", "mask", "closure")}
    with pytest.raises(ValueError, match=message.format(**marks)):
        jit(f, backend="eager")(torch.ones(2))


def shallow(x):
    return copy.copy(x)  # HERE shallow


def pickled(x):
    return pickle.loads(pickle.dumps(x))  # HERE pickled


@pytest.mark.parametrize("f", [shallow, pickled])
def test_copies_that_are_refused(f):
    line = tiny.line_of(__file__, f.__name__)
    with pytest.raises(ValueError, match=rf"{line}: got a shallow copy or a pickle of a tensor .*; x.clone\(\) copies"):
        jit(f, backend="eager")(torch.ones(2))


def test_a_step_that_communicates_needs_a_world():
    tp = Axes(Mesh(tp=2))["tp"]

    def f(x):
        return psum(x, tp)  # HERE psum

    line = tiny.line_of(__file__, "psum")
    with pytest.raises(
        ValueError, match=rf"psum over tp at {line}: got no world, wanted one, since the step communicates"
    ):
        jit(f, backend="eager")(torch.ones(2))
    with pytest.raises(ValueError, match="the step communicates"):  # inside a layer too
        jit(compiled_layer("mincut")(lambda x, w: f(x) * w), backend="eager")(torch.ones(2), torch.ones(2))


def test_unknown_names():
    with pytest.raises(ValueError, match="backend: got 'cuda', wanted one of inductor, compile, aot_eager, eager"):
        jit(lambda x: x + 1, backend="cuda")(torch.ones(1))
    step = jit(lambda x: x + 1, backend="eager")
    with pytest.raises(ValueError, match="got a jit that has compiled nothing"):
        step.graph()
    step(torch.ones(1))
    with pytest.raises(ValueError, match="stage: got 'code', wanted one of trace, lower, overlap, stream, donate"):
        step.graph("code")
