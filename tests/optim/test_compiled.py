"""What the compiler makes of an update: scalars once, and each of p, m, v and g read once."""

import operator
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from fmegatron import optim, tree
from fmegatron.optim import contrib
from fmegatron.optim.guard import Spike
from fmegatron.step import jit, trace
from fmegatron.tree.structure import flatten, unflatten
from tests.pairs import each_value, few

OPTIMIZERS = {
    "adamw": optim.adamw(optim.cosine(1e-2, 100, 10)),
    "sgd": optim.sgd(optim.wsd(1e-2, 100, 10, 5), momentum=0.9, weight_decay=0.1),
    "lion": optim.lion(optim.cosine(1e-2, 100, 10)),
    "adafactor": contrib.adafactor(optim.cosine(1e-2, 100, 10)),
    "muon": optim.muon(optim.cosine(1e-2, 100, 10), matrices=["blocks"], rules=[("norm", optim.Group(lr=0.5))]),
    # Where no gradient has been, the basis is rounding, and so is what it shows of the gradient: 1e-16, which Adam
    # divides by eps. Inductor sums the trace behind the ridge in another order, which is one unit in the last place of
    # the basis; eps=1e-8 makes 7e-11 of it in the parameters, this one 1e-15.
    "soap": contrib.soap(optim.cosine(1e-2, 100, 10), eps=1e-3, matrices=["blocks"]),
    "guarded": optim.skip_nonfinite(optim.adamw(1e-2), spike=Spike(), loss_scale=optim.LossScale()),
}


def make_trees(dtype):
    generator = torch.Generator().manual_seed(0)

    def draw():
        shapes = {"w": (32, 128), "norm": (64,), "blocks": (3, 16, 80)}
        return {path: torch.randn(shape, generator=generator).to(dtype) for path, shape in shapes.items()}

    return draw(), draw()


def clipped_update(opt):
    def update(grads, state, params):
        norm = optim.global_norm(grads)
        return (*opt.update(optim.clip(grads, norm, 1.0), state, params), norm)

    return update


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), each_value(OPTIMIZERS, [torch.float32, torch.bfloat16, torch.float64]))
def test_a_tensor_meets_only_scalars_that_are_stored(name, dtype):
    """Else Inductor computes them again for each element; `optim.scalars` has the measurement."""
    opt, (params, grads) = OPTIMIZERS[name], make_trees(dtype)
    graph = trace(clipped_update(opt), (grads, opt.init(params), params)).graph_module.graph
    met = 0
    for node in graph.nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor) or not node.meta["val"].dim():
            continue
        for source in node.all_input_nodes:
            if not isinstance(source.meta["val"], torch.Tensor):  # the list of an unbind
                continue
            if source.meta["val"].dim() or node.target is torch.ops.aten.stack.default:
                continue
            assert source.target is operator.getitem and "unbind" in str(source.args[0].target), (node, source)
            met += 1
    assert met >= 2 * len(params)


@pytest.mark.medium
@pytest.mark.parametrize("opt", few(1, [(opt,) for opt in OPTIMIZERS.values()], OPTIMIZERS))
def test_compiled_is_eager(opt):
    atol = 1e-13 if opt is OPTIMIZERS["soap"] else 1e-15
    params, grads = make_trees(torch.float64)
    state = opt.init(params)
    compiled = jit(opt.update)
    for _ in range(5):
        wanted = opt.update(grads, state, params)
        got = compiled(grads, state, params)
        for path, x, y in zip(tree.paths(got), tree.leaves(got), tree.leaves(wanted), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=atol, msg=path)
        params, state = got
    assert len(compiled.cache) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_pass_over_the_memory_of_a_leaf(dtype):
    """In the C++ that Inductor writes: one load of p (or its master), m, v, g per leaf; transcendentals before them."""
    opt = OPTIMIZERS["adamw"]
    params, grads = make_trees(dtype)
    arguments = (grads, opt.init(params), params)
    leaves, spec = flatten(arguments)[1:]

    def update(*leaves):
        results = tree.leaves(opt.update(*unflatten(spec, leaves)))
        for old, new in zip(tree.leaves(unflatten(spec, leaves)[2]), results[: len(params)], strict=True):
            old.copy_(new)
        return results

    graph_module = make_fx(update, tracing_mode="fake")(*leaves)
    code = "\n".join(run_and_get_code(torch.compile(graph_module, fullgraph=True), *leaves)[1])
    assert len(re.findall(r"::loadu\(", code)) == 4 * len(params)
    assert (code.count("std::expm1("), code.count("std::cos(")) == (2, 1)
    assert max(code.rindex("std::expm1("), code.rindex("std::cos(")) < code.index("::loadu(")
