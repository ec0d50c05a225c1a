"""The collectives of a compiled step on real ranks: as many as the layouts imply, the same graph on every rank.

Counted in the lowered graphs, and in the code that Inductor generates: what a layer communicates counts once per call.
"""

import functools
import re
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes, all_gather, all_to_all, connect, pmax, ppermute, psum, reduce_scatter
from fmegatron.layout import Mesh
from fmegatron.step import jit, value_and_grad
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.jitted import Compiled
from fmegatron.step.passes import Target
from fmegatron.step.timelines.planned import launched
from fmegatron.testing import assert_pure
from fmegatron.testing.compare_ranks import relative_error
from tests.pairs import few
from tests.step import tiny

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
}


def implied(config, mesh, recomputed: bool) -> Counter:
    """What the layouts say, read off the paper: the model's collectives, then those of the train step."""
    count, L = Counter(), config.layers
    layouts = model.layouts(config, mesh)
    data = [a for a in Axes(mesh).data if mesh[a] > 1]
    inner = tree.leaves(layouts["blocks"])
    outer = tree.leaves({name: leaf for name, leaf in layouts.items() if name != "blocks"})
    for axis in data:
        for group in (("embed", "final_norm"),) if config.tied else (("embed",), ("final_norm", "head")):
            if any(axis in leaf.sharded for leaf in tree.leaves([layouts[name] for name in group])):
                count += Counter(all_gather=1, reduce_scatter=1)
        if any(axis in leaf.sharded for leaf in inner):  # gathered again for the backward: ZeRO-3
            count += Counter(all_gather=2 * L, reduce_scatter=L)
    if "tp" in mesh and mesh["tp"] > 1:
        count["all_reduce"] += 2 * L + 2 * L  # row-parallel outputs; gradients of column-parallel inputs
        count["all_reduce"] += L if recomputed else 0  # the attention's output again
        count["all_reduce"] += 1 + 2 + 1  # lookup; maximum and sum of the softmax; gradient of the head's input
    if data:
        count["all_reduce"] += 2  # how many tokens count, before the backward; the totals of the loss, for the metrics
        pending = {tuple(a for a in data if a not in leaf.sharded) for leaf in inner + outer}  # small leaves: together
        count["all_reduce"] += len(pending - {()})
    return count + Counter(all_reduce=len({leaf.sharded for leaf in inner + outer if leaf.sharded}))  # squared norms


def in_graph(graph) -> Counter:
    """Collectives of a lowered graph, with what its opaque nodes contain, once per call."""
    count = Counter()
    for node in graph.nodes:
        if entry_of(node) is not None:
            count += in_graph(entry_of(node).graph_module.graph)
        elif node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional":
            count[KINDS.get(node.target._opname, "")] += 1
    return count - Counter({"": count[""]})  # without wait_tensor


def in_code(codes: list[str]) -> tuple[Counter, Counter]:
    """(collectives, calls of opaque layers) in generated code: that of the layers, in any order, then the outer one."""
    *layers, outer = codes
    calls = Counter(re.findall(r"torch\.ops\.fmegatron_compiled\.(\w+)\.default\(", outer))
    names = list(calls)  # in the order of their first use, as they were compiled
    assert len(layers) == len(names)
    count = _collectives(outer)
    for name, code in zip(names, layers, strict=True):
        count += Counter({kind: n * calls[name] for kind, n in _collectives(code).items()})
    return count, calls


def _collectives(code: str) -> Counter:
    found = re.findall(r"torch\.ops\._c10d_functional\.(\w+)\.(?:default|out)\(", code)
    return Counter(KINDS[name.removesuffix("_out")] for name in found if name != "wait_tensor")


def events(code: str, exchanges: str) -> str:
    """The order of things in generated code: G gather, R reduce-scatter, F and B a layer's forward and backward.

    exchanges: what the exchanges are that gloo makes of gathers and reduce-scatters, in their order: "GGR...".
    """
    found = re.findall(r"(all_to_all_single|_fwd_|_bwd_)\w*\.(?:default|out)\(", code)
    which = iter(exchanges)
    return "".join(next(which) if name == "all_to_all_single" else name[1].upper() for name in found)


# ---- lowered graphs --------------------------------------------------------------------------------------------------
def lowered_on_rank(rank, mesh, save):
    """(collectives of the lowered step, its text); nothing is compiled or run."""
    with connect(mesh) as world:
        args = (tiny.decoder_state(mesh=mesh, rank=rank), tiny.decoder_batch(mesh=mesh, rank=rank))
        step = Compiled(tiny.decoder_step(save=save, mesh=mesh), args, (0,), Target(world))
        graphs = {name: stage.graph for name, stage in step.stages.items()}
        return in_graph(graphs["overlap"]), "\n".join(map(str, graphs.values()))


LOWERED = [
    (Mesh(fsdp=2), "mincut"),
    (Mesh(tp=2), "inputs"),
    (Mesh(dp=2), "mincut"),
    (Mesh(tp=2), "mincut"),
    (Mesh(dp=2, fsdp=2), "mincut"),
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "save"), few(2, LOWERED, [f"{mesh}-{save}" for mesh, save in LOWERED]))
def test_lowered_graph(ranks, mesh, save):
    found = ranks.run(lowered_on_rank, mesh, save, ranks=mesh.size)
    assert found[0][0] == implied(tiny.CONFIG, mesh, save == "inputs")
    for rank, (count, text) in enumerate(found):
        assert count == found[0][0], rank
        lines = zip(text.splitlines(), found[0][1].splitlines(), strict=False)
        assert text == found[0][1], (rank, next((pair for pair in lines if pair[0] != pair[1]), None))


# ---- generated code --------------------------------------------------------------------------------------------------
def exchanges_of(graph) -> str:
    """Gathers and reduce-scatters of the graph that is compiled, in their order: "GGR..."."""
    return "".join(name[0] for name in launched(graph) if name[0] in "GR")


def compiled_on_rank(rank, mesh):
    """(code that Inductor generates for every graph, text of the graph it is given, its exchanges, losses)."""
    with connect(mesh) as world:
        step = jit(tiny.decoder_step(save="inputs", mesh=mesh), donate=0, world=world)
        state = tiny.decoder_state(mesh=mesh, rank=rank)
        batches = [tiny.decoder_batch(mesh=mesh, rank=rank, seed=i) for i in range(3)]
        (first, state), codes = run_and_get_code(tiny.run_steps, step, state, batches[:1])
        losses, _ = tiny.run_steps(step, state, batches[1:])
        graph = step.graph("exchange")
        return codes, str(graph), exchanges_of(graph), first + losses


def assert_implied(mesh, codes, exchanges):
    """The code has the collectives that the layouts imply, and the backward gathers what it uses."""
    count, calls = in_code(codes)
    wanted = implied(tiny.CONFIG, mesh, True)
    wanted["all_to_all"] = wanted.pop("all_gather") + wanted.pop("reduce_scatter")  # on gloo
    assert count == wanted
    assert set(calls.values()) == {tiny.CONFIG.layers} and len(calls) == 2
    order = events(codes[-1], exchanges)
    backward = order[order.rindex("F") + 1 :]
    head = 1  # gathered where the blocks end
    assert backward.count("G") - head == backward.count("B") == tiny.CONFIG.layers, order  # not the forward's


@pytest.mark.slow
def test_generated_code():
    """Of rank 0. That all ranks have the same graph, of which the same code is made: above. That compiled steps compute
    the same on ranks: overlap/test_ranks.py, and the next test for more meshes."""
    mesh, sgd = Mesh(fsdp=2, tp=2), optim.sgd(1e-2)
    args = (tiny.decoder_state(mesh=mesh, optimizer=sgd), tiny.decoder_batch(mesh=mesh))
    with tiny.fake_ranks(mesh) as world:
        step = Compiled(tiny.decoder_step(save="inputs", mesh=mesh, optimizer=sgd), args, (0,), Target(world))
        assert_implied(mesh, tiny.generated_code(step), exchanges_of(step.stages["exchange"].graph))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(fsdp=2, tp=2)], ids=str)
def test_generated_code_computes_the_same(ranks, mesh):
    found = ranks.run(compiled_on_rank, mesh, ranks=mesh.size)
    wanted, _ = tiny.run_steps(
        tiny.decoder_step(), tiny.decoder_state(), [tiny.decoder_batch(seed=i) for i in range(3)]
    )
    for codes, graph, exchanges, losses in found:
        assert_implied(mesh, codes, exchanges)
        assert graph == found[0][1]
        assert losses == pytest.approx(wanted, rel=1e-10)


def around_collectives(x, axis):
    """[n, n] -> values that each collective makes, of values that are used again before and after it."""
    y = x * 2
    total, most = psum(y, axis), pmax(y, axis)
    gathered = all_gather(total - y, axis, 0)
    scattered = reduce_scatter(gathered * 3, axis, 0)
    turned, passed = all_to_all(scattered + y, axis, 0, 1), ppermute(most * 5, axis, 1)
    both = psum(torch.stack([turned.sum(), passed.sum()]), axis)
    return {"y": y, "total": total + y, "most": most - total, "gathered": gathered + both.sum(), "both": both,
            "scattered": scattered * most, "turned": turned + 1, "passed": passed - y + most}  # fmt: skip


def compiled_and_not(rank, mesh):
    """Whether compiled and uncompiled calls give the same, twice, and their arguments stay."""
    with connect(mesh) as world:
        step = functools.partial(around_collectives, axis=Axes(mesh)["tp"])
        options = {"world": world, "check": False, "patches": tiny.SCALAR}
        runs = [jit(step, backend=backend, **options) for backend in ("inductor", "eager")]
        same = []
        for i in range(2):
            x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * i + rank))
            got, wanted = (assert_pure(run, x) for run in runs)
            same += [relative_error(a, b) <= 1e-14 for a, b in zip(*map(tree.leaves, (got, wanted)), strict=True)]
        return same


@pytest.mark.slow
@pytest.mark.long
def test_compiled_code_keeps_what_collectives_read(ranks):
    """Inductor reduces in place where it may."""
    assert ranks.run(compiled_and_not, Mesh(tp=2), ranks=2) == [[True] * 16] * 2


# ---- one compiles, the others load -----------------------------------------------------------------------------------
def count_compilations(rank, cache):
    """(graphs found in the compile cache, graphs that were not), on this rank, with an empty cache to begin with."""
    with connect(Mesh(dp=2)) as world, pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        counters.clear()
        grads = value_and_grad(tiny.mlp_loss("mincut"))  # each rank alone
        jit(grads, world=world, check=False, patches=tiny.SCALAR)(tiny.mlp_params(), tiny.mlp_batch())
        return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.medium
def test_followers_load_what_the_leader_compiled(ranks, tmp_path):
    graphs = 3  # a layer's forward and backward, and the step around them
    assert ranks.run(count_compilations, str(tmp_path), ranks=2) == [(0, graphs), (graphs, 0)]


def compile_with_a_bug_on_the_leader(rank):
    with connect(Mesh(dp=2)) as world, pytest.MonkeyPatch.context() as patched:
        if rank == 0:
            patched.setattr(Compiled, "compile", lambda self, tell: 1 / 0)
        try:
            jit(lambda x: x + 1, world=world)(torch.ones(1))
        except RuntimeError as e:
            return str(e)


def test_an_error_of_the_leader_reaches_all_ranks(ranks):
    for message in ranks.run(compile_with_a_bug_on_the_leader, ranks=2):
        assert "compiling" in message and "failed on rank 0 of 2: ZeroDivisionError" in message
