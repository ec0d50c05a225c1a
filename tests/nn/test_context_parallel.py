"""Attention over a split sequence is attention: values and every gradient, fp64, in every form, on several meshes."""

import collections
import functools

import pytest
import torch

from fmegatron.collectives import Axes, connect
from fmegatron.collectives.kinds import collective_of
from fmegatron.layout import Layout, Mesh
from fmegatron.nn import attention_blocks
from fmegatron.nn.attention_masks import Causal
from fmegatron.nn.context_parallel import ring_attention, ulysses_attention, zigzag
from fmegatron.step import check, jit, trace
from fmegatron.step.layer import compiled_layer
from fmegatron.step.opaque import inline_layers
from fmegatron.testing import Ranks, assert_parity, simulate, split
from tests.nn.cp_step import B, G, H, K, S, layouts, make_step, values
from tests.pairs import few, mixed
from tests.step import tiny
from tests.step.proven import proven_and_equal

CP2, CP4, TWO = Mesh(cp=2, cpi=1), Mesh(cp=4, cpi=1), Mesh(cp=2, cpi=2)
CP2_TP2, CP2_FSDP2 = Mesh(cp=2, cpi=1, tp=2), Mesh(fsdp=2, cp=2, cpi=1)
ONE_AXIS = ("ring", "balanced", "gathered", "ulysses")
FORMS = [(form, mesh) for form in ONE_AXIS for mesh in (CP2, CP4, CP2_TP2, CP2_FSDP2)]
FORMS += [("two levels", TWO), ("two levels, balanced", TWO)]
MASKS = {
    "one document": (False, None),
    "packed": (True, None),
    "window below a chunk": (True, 3),
    "window": (False, 20),
}
CASES = mixed(FORMS, list(MASKS))


def order_for(form, mesh):
    return zigzag(S, mesh["cp"]) if "balanced" in form else None


# ---- proofs ----------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("case, masks", few(4, CASES, [f"{f}-{m}-{masks}" for (f, m), masks in CASES]))
def test_equal_to_one_rank(case, masks):
    """Documents begin inside of a rank's part; that of the second row begins where the next rank's part does."""
    (form, mesh), (packed, window) = case, MASKS[masks]
    given = values(order_for(form, mesh), packed)
    proven_and_equal(lambda m: make_step(m, form, window, packed), mesh, *given, layouts=layouts(mesh))


def test_one_rank_is_attention_with_a_mask():
    """The reference of all the others, against the definition."""
    weights, batch = values()
    q, k, v = ((batch["x"] @ weights[name]).unflatten(-1, (-1, K)) for name in "qkv")
    got = ring_attention(q, k, v, Causal(batch["positions"], batch["documents"]), Axes(Mesh())["cp"])
    mask = torch.ones(S, S, dtype=torch.bool).tril() & (batch["documents"][:, :, None] == batch["documents"][:, None])
    k, v = (x.repeat_interleave(H // G, 2).transpose(1, 2) for x in (k, v))
    s = (q.transpose(1, 2) @ k.mT / K**0.5).masked_fill(~mask[:, None], -torch.inf)
    torch.testing.assert_close(got, (s.softmax(-1) @ v).transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.medium
@pytest.mark.parametrize("form", ["ring", "gathered", "ulysses"])
def test_the_order_of_tokens_is_no_part_of_the_maths(form):
    orders = (torch.arange(S), zigzag(S, 4), torch.randperm(S, generator=torch.Generator().manual_seed(0)))
    sims = [simulate(make_step(CP4, form), CP4, *values(order), layouts=layouts(CP4)) for order in orders]
    for sim in sims[1:]:
        torch.testing.assert_close(sim.metrics["loss"], sims[0].metrics["loss"], rtol=1e-12, atol=0)
        torch.testing.assert_close(sim.gather("0/k"), sims[0].gather("0/k"), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_document_that_one_rank_has_alone_and_one_that_all_share():
    """Every kind of document: some within a rank, one of one position, one over three ranks."""
    weights, batch = values()
    lengths = (3, 1, 40, 4)
    batch["documents"] = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).repeat(B, 1)
    batch["positions"] = torch.cat([torch.arange(n) for n in lengths]).repeat(B, 1)
    for form in ("ring", "balanced"):
        order = zigzag(S, 4) if form == "balanced" else torch.arange(S)
        given = weights, {name: x[:, order] for name, x in batch.items()}
        assert_parity(lambda m, form=form: make_step(m, form), CP4, *given, layouts=layouts(CP4))


def attention_alone(mesh, form, balanced=False):
    """Attention of [B, S, H, K] with positions [S], in bf16 or any dtype -> its output and gradients."""
    cp = Axes(mesh)["cp"]

    def step(x, at):
        q, k, v = (x[name].detach().requires_grad_() for name in "qkv")
        with torch.enable_grad():
            attention = ring_attention if form == "ring" else ulysses_attention
            o = attention(q, k, v, Causal(at["positions"], zigzag=balanced), cp)
        return dict(zip("qkv", torch.autograd.grad(o, (q, k, v), x["do"]), strict=True)) | {"do": o.detach()}, {}

    return step


def alone(mesh, dtype=torch.float64, groups=G, width=K):
    """(arguments, layouts); values may have another width."""
    g = torch.Generator().manual_seed(4)
    shapes = {"q": (B, S, H, K), "k": (B, S, groups, K), "v": (B, S, groups, width), "do": (B, S, H, width)}
    x = {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    at = {name: Layout(shape, dtype, mesh, (None, "cp")) for name, shape in shapes.items()}
    positions = {"positions": torch.arange(S)}
    return (x, positions), (at, {"positions": Layout((S,), torch.int64, mesh, ("cp",))})


OTHERS = mixed(["ring", "balanced", "ulysses"], [(2, K), (G, 5)])  # fewer kv heads than ranks, values of another width


@pytest.mark.long
@pytest.mark.parametrize("form, groups, width", few(2, [(form, *sizes) for form, sizes in OTHERS], map(str, OTHERS)))
def test_other_shapes(form, groups, width):
    (x, positions), at = alone(CP4, groups=groups, width=width)
    order = zigzag(S, 4) if form == "balanced" else torch.arange(S)
    given = {name: v[:, order] for name, v in x.items()}, {"positions": order}
    step = functools.partial(
        attention_alone, form="ulysses" if form == "ulysses" else "ring", balanced=form == "balanced"
    )
    assert_parity(step, CP4, *given, layouts=at)
    assert check(step(CP4), *at).ok


def test_one_kv_head_on_a_rank_of_tp_that_ranks_of_cp_share():
    """Heads of one leave no trace in sizes; their gradient lies as they do."""
    mesh = Mesh(cp=2, cpi=1, tp=4)
    proven_and_equal(lambda m: make_step(m, "ulysses"), mesh, *values(), layouts=layouts(mesh))


@pytest.mark.long
@pytest.mark.parametrize("balanced", [False, True])
def test_bf16(balanced):
    """Sums are wide: the error is that of the products of one rank, not of the hops."""
    order = zigzag(S, 4) if balanced else torch.arange(S)
    (x, positions), _ = alone(CP4)
    given = {name: v[:, order] for name, v in x.items()}, {"positions": order}
    wanted = simulate(attention_alone(CP4, "ring", balanced), CP4, *given, layouts=alone(CP4)[1])
    small = {name: v.bfloat16() for name, v in given[0].items()}, given[1]
    got = simulate(attention_alone(CP4, "ring", balanced), CP4, *small, layouts=alone(CP4, torch.bfloat16)[1])
    one = simulate(
        attention_alone(Mesh(cp=1), "ring"), Mesh(cp=1), *small, layouts=alone(Mesh(cp=1), torch.bfloat16)[1]
    )
    for path in wanted.paths:
        assert got.gather(path).dtype == torch.bfloat16
        error, of_one = ((s.gather(path).double() - wanted.gather(path)).norm() for s in (got, one))
        assert error < 1.5 * of_one, path


# ---- what it costs ---------------------------------------------------------------------------------------------------
def graph_of(form, mesh, packed=True):
    args = [split(v, at)[0] for v, at in zip(values(packed=packed), layouts(mesh), strict=True)]
    return inline_layers(trace(make_step(mesh, form, None, packed), tuple(args)).graph_module.graph)


def hops(graph):
    """(dtype, elements) -> how often so much goes to the next rank."""
    sent = [n.args[0][0].meta["val"] for n in graph.nodes if getattr(collective_of(n.target), "name", "") == "ppermute"]
    return collections.Counter((x.dtype, x.numel()) for x in sent)


def products(graph):
    """Multiplications of attention to blocks, of one row and head: two products forward and five backward, of a causal
    block those of three of its four parts (of which kernels leave out still more)."""
    ours, total = torch.ops.fmegatron_nn, 0
    for node in graph.nodes:
        which = {ours.tiled_attention.default: (0, 2), ours.tiled_attention_backward.default: (1, 5)}.get(node.target)
        if which is not None:
            q, k = (node.args[which[0] + i].meta["val"].shape for i in (0, 1))
            causal = node.args[9 if which[0] else 6]
            total += which[1] * q[2] * k[2] * q[3] * (3 if causal else 4) // 4
    return total


@pytest.mark.long
@pytest.mark.parametrize("mesh", [CP2, CP4], ids=str)
@pytest.mark.parametrize("form, packed", [("ring", True), ("ring", False), ("balanced", True), ("balanced", False)])
def test_hops_and_products(form, packed, mesh, monkeypatch):
    """Forward n - 1 blocks of k and v, backward as many and n of their gradients; positions where masks need them.

    Balanced, 2n + 1 blocks of half a rank's length, two products forward and five backward; a masked ring has 4n.
    """
    monkeypatch.setattr(attention_blocks, "kernel_of", lambda *_, **__: attention_blocks.Choice("tiled", ()))
    n, graph = mesh["cp"], graph_of(form, mesh, packed)
    kv, at = B * G * (S // n) * 2 * K, (2 if packed else 1) * B * (S // n)
    wanted = {(torch.float64, kv): (n - 1) + (n - 1) + n}
    if form == "ring" or packed:
        wanted[torch.int64, at] = 2 * (n - 1)
    assert hops(graph) == wanted
    assert products(graph) == 7 * (2 * n + 1 if form == "balanced" else 4 * n) * (S // n // 2) ** 2 * K


def test_a_mask_is_made_only_where_it_is_needed():
    """Without documents and window a balanced ring makes none: a causal call, then two of half the length each hop."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    calls = [n for n in graph_of("balanced", CP4, packed=False).nodes if n.target is flash]
    assert [n.args[0].meta["val"].shape[2] * 8 // S for n in calls] == [2, 1, 1, 1, 1, 1, 1]
    assert [len(n.args) > 4 and n.args[4] for n in calls] == [True] + [False] * 6
    assert all(n.kwargs.get("attn_mask") is None for n in calls)


def test_what_is_kept_for_the_backward():
    """q, k, v, o, lse and positions of this rank: no block of another."""
    (x, positions), _ = alone(CP4)
    mine = {name: v[:, : S // 4] for name, v in x.items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        trace(attention_alone(CP4, "ring"), (mine, {"positions": torch.arange(S // 4)}))
    total = sum(t.numel() for t in {id(t): t for t in kept}.values())
    own = sum(v.numel() for name, v in mine.items()) + mine["q"].numel() // K + S // 4
    assert 0 < total <= own + S


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: zigzag(20, 4), "got 20 positions for 4 ranks, wanted a multiple of 8, two chunks for each; pad"),
        (lambda: ring(5, H, G, balanced=True), "got 5 positions on each rank, wanted an even number.*multiple of 8"),
        (lambda: ulysses(6, 6, 2), "got 6 heads of queries and 2 of keys, wanted multiples of 4.*two_level_attention"),
        (lambda: ulysses(6, 12, 3), "got 12 heads of queries and 3 of keys"),
        (lambda: check(make_step(CP4, "ring"), *uneven(CP4)), "uneven, wanted equal shapes.*pad the dim"),
    ],
    ids=["zigzag", "odd parts", "heads", "kv heads", "a sequence that does not divide"],
)
def test_errors(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def _given(length, heads, groups):
    return [torch.zeros(1, length, n, K) for n in (heads, groups, groups)]


def ring(length, heads, groups, balanced):
    causal = Causal(torch.arange(length), zigzag=balanced)
    return ring_attention(*_given(length, heads, groups), causal, Axes(CP4)["cp"])


def ulysses(length, heads, groups):
    return ulysses_attention(*_given(length, heads, groups), Causal(torch.arange(length)), Axes(CP4)["cp"])


def uneven(mesh):
    weights, batch = layouts(mesh)
    longer = {name: (x.shape[0], S + 2, *x.shape[2:]) for name, x in batch.items()}
    return weights, {name: Layout(longer[name], x.dtype, mesh, x.spec) for name, x in batch.items()}


# ---- real ranks ------------------------------------------------------------------------------------------------------
def on_rank(rank, form, packed, backend, overlap):
    with connect(CP2) as world:
        given = values(order_for(form, CP2), packed)
        given = [split(v, at)[rank] for v, at in zip(given, layouts(CP2), strict=True)]
        how = {"backend": backend, "overlap": overlap, "patches": tiny.SCALAR if backend == "inductor" else None}
        return jit(make_step(CP2, form, None, packed), world=world, **how)(*given)


RUNS = [
    ("balanced", False, "inductor", True),
    ("ring", True, "aot_eager", True),
    ("gathered", True, "aot_eager", False),
    ("ulysses", True, "aot_eager", False),
]


@pytest.mark.medium
@pytest.mark.parametrize(
    "form, packed, backend, overlap", few(1, [*RUNS[1:], RUNS[0]], [run[0] for run in [*RUNS[1:], RUNS[0]]])
)
def test_gloo_ranks(ranks, form, packed, backend, overlap):
    given = values(order_for(form, CP2), packed)
    sim = simulate(make_step(CP2, form, None, packed), CP2, *given, layouts=layouts(CP2))
    for rank, found in enumerate(ranks.run(on_rank, form, packed, backend, overlap, ranks=2)):
        torch.testing.assert_close(found, sim.outputs[rank], rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_in_a_compiled_layer():
    """A layer keeps what its policy says, the ring inside of it runs again: the same as without."""
    cp = Axes(CP2)["cp"]

    def step(save):
        def layer(x, w, positions):
            q, k, v = ((x @ w[name]).unflatten(-1, (-1, K)) for name in "qkv")
            return ring_attention(q, k, v, Causal(positions), cp).flatten(2)

        call = layer if save is None else compiled_layer(save)(layer)

        def run(w, b):
            w = {name: x.detach().requires_grad_() for name, x in w.items()}
            with torch.enable_grad():
                loss = call(b["x"], {name: w[name] for name in "qkv"}, b["positions"]).square().sum()
            return dict(zip("qkv", torch.autograd.grad(loss, [w[name] for name in "qkv"]), strict=True))

        return run

    given = [split(v, at) for v, at in zip(values(packed=False), layouts(CP2), strict=True)]
    rows = [Ranks(one) for one in given]
    wanted = simulate(step(None), CP2, *rows)
    for save in ("mincut", "inputs"):
        got = simulate(step(save), CP2, *rows)
        for rank in range(2):
            torch.testing.assert_close(got.outputs[rank], wanted.outputs[rank], rtol=1e-12, atol=1e-12)
