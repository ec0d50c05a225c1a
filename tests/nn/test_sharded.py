"""Every op of nn on simulated ranks equals itself on one rank: values and each gradient, fp64, 1e-10.

A failure names the op and the mesh; the message names the line where meaning is lost. Rows of the table: inputs with
their global shapes and layouts, outputs with theirs. Sizes differ, and every local dim is above 1 on every mesh.
"""

from dataclasses import dataclass, field

import pytest
import torch

from fmegatron import nn
from fmegatron.collectives import Axes, enter
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing import assert_parity
from tests.pairs import each_value, few

DATA = ("dp", "fsdp")
MESHES = [
    Mesh(dp=2, fsdp=1, tp=1),
    Mesh(dp=1, fsdp=2, tp=1),
    Mesh(dp=1, fsdp=1, tp=2),
    Mesh(dp=1, fsdp=2, tp=2),
    Mesh(dp=2, fsdp=2, tp=2),
    Mesh(dp=1, fsdp=1, tp=4),
]
B, S, D, F, V = 8, 24, 10, 32, 40  # batch, sequence, width, hidden, vocabulary
H, G, K = 16, 8, 6  # heads, kv heads, head width


@dataclass(frozen=True)
class Op:
    """One row: `run(tp, *inputs) -> outputs`; (shape, spec) of each. An input without a batch is a weight."""

    run: callable
    inputs: tuple
    outputs: tuple
    ids: dict = field(default_factory=dict)  # position of an integer input -> number of ids


x = ((B, S, D), (DATA,))
x_sp = ((B, S, D), (DATA, "tp"))
hidden = ((B, S, F), (DATA, None, "tp"))
tokens = ((B, S), (DATA,))
column, row = ((D, F), (None, "tp")), ((F, D), ("tp",))
norm_weight = ((D,), ())
gate_up = ((D, 2 * F), (None, Split("tp", 2)))
table = ((V, D), ("tp",))
scores = ((B, S, V), (DATA, None, "tp"))
q, kv = ((B, S, H, K), (DATA, None, "tp")), ((B, S, G, K), (DATA, None, "tp"))


def rope(tp, x_BSHK):
    return nn.apply_rope(x_BSHK, *nn.rope_angles(torch.arange(S), K, 100.0, torch.float64))


OPS = {
    "rms_norm": Op(lambda tp, x, w: nn.rms_norm(x, w), (x, norm_weight), (x,)),
    "rms_norm, sequence parallel": Op(lambda tp, x, w: nn.rms_norm(x, enter(w, tp)), (x_sp, norm_weight), (x_sp,)),
    "layer_norm": Op(lambda tp, x, w, b: nn.layer_norm(x, w, b), (x, norm_weight, norm_weight), (x,)),
    "layer_norm, sequence parallel": Op(
        lambda tp, x, w, b: nn.layer_norm(x, enter(w, tp), enter(b, tp)), (x_sp, norm_weight, norm_weight), (x_sp,)
    ),
    "rope": Op(rope, (q,), (q,)),
    "attention, softcap and sinks": Op(
        lambda tp, q, k, v, sinks: nn.attention(q, k, v, softcap=2.0, sinks_H=sinks), (q, kv, kv, ((H,), ("tp",))), (q,)
    ),
    "attention": Op(lambda tp, q, k, v: nn.attention(q, k, v), (q, kv, kv), (q,)),
    "column_parallel": Op(lambda tp, x, w: nn.column_parallel(x, w, tp), (x, column), (hidden,)),
    "column_parallel, sequence parallel": Op(
        lambda tp, x, w: nn.column_parallel(x, w, tp, sequence_parallel=True), (x_sp, column), (hidden,)
    ),
    "row_parallel": Op(lambda tp, h, w: nn.row_parallel(h, w, tp), (hidden, row), (x,)),
    "row_parallel, sequence parallel": Op(
        lambda tp, h, w: nn.row_parallel(h, w, tp, sequence_parallel=True), (hidden, row), (x_sp,)
    ),
    "gated_mlp": Op(lambda tp, *a: nn.gated_mlp(*a, tp), (x, gate_up, row), (x,)),
    "gated_mlp, sequence parallel": Op(
        lambda tp, *a: nn.gated_mlp(*a, tp, sequence_parallel=True), (x_sp, gate_up, row), (x_sp,)
    ),
    "embed": Op(lambda tp, t, w: nn.embed(t, w, tp), (tokens, table), (x,), {0: V}),
    "embed, sequence parallel": Op(
        lambda tp, t, w: nn.embed(t, w, tp, sequence_parallel=True), (tokens, table), (x_sp,), {0: V}
    ),
    "cross_entropy": Op(lambda tp, z, t: nn.cross_entropy(z, t, tp), (scores, tokens), (tokens, tokens), {1: V}),
    "cross_entropy, padded": Op(  # on tp4 the last rank has padding only
        lambda tp, z, t: nn.cross_entropy(z, t, tp, 27), (scores, tokens), (tokens, tokens), {1: 27}
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), each_value(OPS, MESHES))
def test_op(name, mesh):
    op = OPS[name]
    generator = torch.Generator().manual_seed(len(name))

    def array(i, shape):
        if i in op.ids:
            return torch.randint(0, op.ids[i], shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = [array(i, shape) for i, (shape, _) in enumerate(op.inputs)]
    cotangents = [array(-1, shape) for shape, _ in op.outputs]
    wanted = [i for i in range(len(inputs)) if i not in op.ids]

    def make_step(mesh):
        tp = Axes(mesh)["tp"]

        def step(inputs, cotangents):
            inputs = [v.detach().requires_grad_(i in wanted) for i, v in enumerate(inputs)]
            with torch.enable_grad():
                out = op.run(tp, *inputs)
            out = out if isinstance(out, tuple) else (out,)
            grads = torch.autograd.grad(out, [inputs[i] for i in wanted], cotangents)
            return [o.detach() for o in out], list(grads)

        return step

    def layout(value, shape, spec):
        return Layout(shape, value.dtype, mesh, spec)

    ins = [layout(v, *place) for v, place in zip(inputs, op.inputs, strict=True)]
    outs = [layout(v, *place) for v, place in zip(cotangents, op.outputs, strict=True)]
    # a weight's gradient is whole over tp, and a pending sum over the axes that split the batch
    grads = [ins[i] if DATA in ins[i].spec else ins[i].replace(unreduced=DATA) for i in wanted]
    assert_parity(make_step, mesh, inputs, cotangents, layouts=(ins, outs), out_layouts=(outs, grads))


GATHERED = {  # every place where the gathered axis can stand
    "rows": ((12, 5), ("fsdp",)),
    "columns": ((3, 12), (None, "fsdp")),
    "middle": ((3, 12, 5), (None, "fsdp")),
    "with tp": ((12, 8), ("fsdp", "tp")),
    "with tp before": ((8, 12), ("tp", "fsdp")),
    "below tp": ((16, 5), (("tp", "fsdp"),)),
    "interleaved": ((3, 40), (None, Split("fsdp", (24, 8, 8)))),
    "interleaved with tp": ((3, 80), (None, Split(("tp", "fsdp"), (48, 16, 16)))),
    "interleaved tp beside": ((12, 24), ("fsdp", Split("tp", 3))),
    "not sharded": ((7,), ()),
    "tp only": ((6, 8), (None, "tp")),
}


GATHERING = [*(mesh for mesh in MESHES if mesh["fsdp"] > 1), Mesh(dp=1, fsdp=4, tp=1)]


@pytest.mark.parametrize("mesh", few(1, [(mesh,) for mesh in GATHERING], map(str, GATHERING)))
def test_gather_tree(mesh):
    generator = torch.Generator().manual_seed(0)
    arrays = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, (shape, _) in GATHERED.items()
    }
    arrays["other dtype"] = torch.randn(8, generator=generator)
    places = {**GATHERED, "other dtype": ((8,), ("fsdp",))}
    cotangents = {name: torch.randn(x.shape, generator=generator, dtype=x.dtype) for name, x in arrays.items()}
    cotangents["other dtype"] = cotangents["other dtype"].mul(8).round()  # whole numbers: fp32 sums them exactly

    def shards(mesh):
        return {name: Layout(shape, arrays[name].dtype, mesh, spec) for name, (shape, spec) in places.items()}

    def make_step(mesh):
        fsdp, layouts = Axes(mesh)["fsdp"], shards(mesh)

        def step(arrays, cotangents):
            arrays = {name: x.detach().requires_grad_() for name, x in arrays.items()}
            with torch.enable_grad():
                whole = nn.gather_tree(arrays, layouts, fsdp)
            grads = torch.autograd.grad(list(whole.values()), list(arrays.values()), list(cotangents.values()))
            return {n: x.detach() for n, x in whole.items()}, dict(zip(arrays, grads, strict=True))

        return step

    ins = shards(mesh)
    whole = {name: layout.without("fsdp") for name, layout in ins.items()}
    # each fsdp rank uses the weight for its own rows of the batch: its gradient is a term of a sum
    pending = {name: layout.replace(unreduced=("fsdp",)) for name, layout in whole.items()}
    grads = {name: x if "fsdp" in x.sharded else x.replace(unreduced=("fsdp",)) for name, x in ins.items()}
    result = assert_parity(make_step, mesh, arrays, cotangents, layouts=(ins, pending), out_layouts=(whole, grads))
    targets = [str(n.target) for n in result.sharded.traced.graph_module.graph.nodes]
    assert targets.count("fmegatron.all_gather.default") == 1, "one gather whatever the dtypes"
    assert targets.count("fmegatron.reduce_scatter.default") == 1


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((5, 4), ("fsdp",), r"w: .* is uneven, .* make the dim a multiple of 2"),
        (
            (8, 4),
            (("fsdp", "tp"),),
            r"w: got .*, whose dim 0 is split over \('fsdp', 'tp'\), wanted fsdp, .* as its minor",
        ),
    ],
)
def test_gather_tree_errors(shape, spec, message):
    mesh = Mesh(fsdp=2, tp=2)
    layout = Layout(shape, torch.float32, mesh, spec)
    with pytest.raises(ValueError, match=message):
        nn.gather_tree({"w": torch.zeros(layout.local_shape(0))}, {"w": layout}, Axes(mesh)["fsdp"])
