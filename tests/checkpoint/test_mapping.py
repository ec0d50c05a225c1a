"""Rules: what a restore by rules gives is what torch makes of the stored arrays, bitwise, under any layouts."""

import pickle

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint import (
    CheckpointError,
    copy,
    drop,
    fresh,
    fuse,
    pad,
    rename,
    restore,
    split,
    stack,
    take,
    transpose,
    unstack,
)
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.tree.structure import flatten, unflatten
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes

F32 = torch.float32
SOURCE = Mesh(fsdp=2, tp=2)
TARGETS = (Mesh(), Mesh(tp=3), Mesh(dp=2, fsdp=2, tp=2))


def any_layout(shape, mesh, i=0, dtype=F32):
    """A layout that cuts the first and last dims of an array, the i-th with interleaved parts or flat ranges."""
    axes = [name for name in mesh.names if name != "dp"]
    spec = [None] * len(shape)
    if shape:
        for j, name in enumerate(axes):
            d = (i + j) % len(shape)
            spec[d] = (*(spec[d] or ()), name)
        if i % 3 == 1 and spec[-1]:
            spec[-1] = Split(spec[-1], (shape[-1] // 3, shape[-1] - shape[-1] // 3))
        if i % 3 == 2 and spec[0]:
            return Layout(shape, dtype, mesh, (None, *spec[1:]), flat=spec[0])
    return Layout(shape, dtype, mesh, tuple(spec))


def layouts_of(state, mesh, shift=0):
    paths, leaves, spec = flatten(state)
    return unflatten(spec, [any_layout(tuple(x.shape), mesh, i + shift, x.dtype) for i, x in enumerate(leaves)])


def stored(shapes):
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def check(tmp_path, state, wanted, rules, read="own", **options):
    """Save `state` on the source mesh; by the rules it must be `wanted`, on all meshes and ranks."""
    with small_sizes():
        if not (tmp_path / "a").exists():
            assert save_all(tmp_path / "a", state, layouts_of(state, SOURCE)) == [None] * SOURCE.size
        for shift, mesh in enumerate(TARGETS):
            layouts = layouts_of(wanted, mesh, shift)
            local = cut_tree(wanted, layouts)

            def work(world, layouts=layouts):
                return restore(tmp_path / "a", layouts, world=world, rules=rules, read=read, **options)

            for rank, got in enumerate(run(mesh.size, work)):
                if isinstance(got, BaseException):
                    raise got
                assert_same_bits(got, local[rank], f"{mesh} rank {rank} read {read}")


@pytest.mark.parametrize("read", ["own", "once"])
def test_each_rule(tmp_path, read):
    x = stored({"a": (6, 8), "b": (6, 8), "c": (6, 4), "s": (5, 6, 4)})
    wanted = {
        "renamed": x["a"],
        "t": x["b"].t(),
        "front": x["s"][:2].permute(2, 0, 1),
        "picked": x["s"][[4, 0, 0, 1, 2]],
        "copy": x["s"],
        "c": torch.cat([x["c"], torch.zeros(3, 4)]),
    }
    rules = [
        rename("a", "renamed"),
        transpose("b", (1, 0)),
        rename("b", "t"),
        copy("s", "front"),
        take("front", range(2)),
        transpose("front", (2, 0, 1)),
        copy("s", "picked"),
        take("picked", [4, 0, 0, 1, 2]),
        rename("s", "copy"),
        pad("c"),
    ]
    check(tmp_path, x, {k: v.contiguous() for k, v in wanted.items()}, rules, read)


@pytest.mark.long
@pytest.mark.parametrize("read", ["own", "once"])
def test_fused_to_parts_and_back(tmp_path, read):
    """q, k, v dealt to 3 groups of heads (2 query heads of width 2 each), as Megatron stores them."""
    groups = [[torch.randn(5, n) for n in (4, 2, 2)] for _ in range(3)]
    dealt = torch.cat([x for group in groups for x in group], 1)
    q, k, v = (torch.cat([group[i] for group in groups], 1) for i in range(3))
    plain = torch.cat([q, k, v], 1)
    parts = {"q": q, "k": k, "v": v}
    deal = split("wqkv", ["q", "k", "v"], dim=-1, sizes=(4, 2, 2))
    check(tmp_path, {"wqkv": dealt}, parts, [deal], read)
    check(tmp_path, {"wqkv": dealt}, {"w": plain}, [deal, fuse(["q", "k", "v"], "w", dim=1)], read)
    (tmp_path / "a").rename(tmp_path / "b")
    check(tmp_path, {"w": plain}, parts, [split("w", ["q", "k", "v"], 1, (12, 6, 6))], read)
    (tmp_path / "a").rename(tmp_path / "c")
    check(tmp_path, parts, {"wqkv": dealt}, [fuse(["q", "k", "v"], "wqkv", -1, (4, 2, 2))], read)
    check(tmp_path, parts, {"w": plain}, [fuse(["q", "k", "v"], "w", -1)], read)
    (tmp_path / "a").rename(tmp_path / "d")
    gate_up = {"gate_up": torch.cat([q, q + 1])}
    check(tmp_path, gate_up, {"gate": q, "up": q + 1}, [split("gate_up", ["gate", "up"], 0)], read)


@pytest.mark.long
@pytest.mark.parametrize("read", ["own", "once"])
def test_layers(tmp_path, read):
    layers = [torch.randn(4, 6) for _ in range(5)]
    single = {"layers": {str(i): {"w": x} for i, x in enumerate(layers)}}
    stacked = {"blocks": {"w": torch.stack(layers)}}
    up, down = stack(r"layers/{i}/(.*)", r"blocks/\1"), unstack(r"blocks/(.*)", r"layers/{i}/\1")
    check(tmp_path, single, stacked, [up], read)
    check(tmp_path, single, single, [up, down], read)
    check(tmp_path, single, {"blocks": {"w": torch.stack(layers, 1)}}, [stack(r"layers/{i}/w", "blocks/w", 1)], read)
    check(tmp_path, single, {"blocks": {"w": torch.stack(layers[1:3])}}, [up, take("blocks/w", [1, 2])], read)
    later = {"h": {"4": {"w": layers[0]}, "5": {"w": layers[1]}}}
    check(tmp_path, single, later, [rename(r"layers/{i}/w", "h/{i+4}/w")], read, strict="subset")
    (tmp_path / "a").rename(tmp_path / "b")
    check(tmp_path, stacked, single, [down], read)
    check(tmp_path, stacked, stacked, [down, up], read)
    last = {"stage": {"0": layers[3], "1": layers[4]}}
    check(tmp_path, stacked, last, [unstack("blocks/w", "stage/{i-3}")], read, strict="subset")


def test_experts_of_layers(tmp_path):
    experts = torch.randn(3, 4, 2, 6)
    single = {f"l{i}": {"e": {str(j): experts[i, j] for j in range(4)}} for i in range(3)}
    rules = [stack(r"l{i}/e/{e}", "l{i}/e"), stack(r"l{i}/e", "experts")]
    check(tmp_path, single, {"experts": experts}, rules)
    assert tree.paths(single)[0] == "l0/e/0"


def test_more_layers_than_are_stored(tmp_path):
    w = torch.randn(2, 3, 4)
    checkpoint.save(tmp_path / "a", {"w": w}, {"w": Layout(w.shape, F32, Mesh())})
    layout = Layout((4, 3, 4), F32, Mesh(pp=2), ("pp",))
    rules = [take("w", [0, 1, None, None])]
    now = torch.randn(4, 3, 4)
    for rank in range(2):
        mine = {"w": now[2 * rank : 2 * rank + 2]}
        got = restore(tmp_path / "a", {"w": layout}, rank=rank, rules=rules, initial=mine)
        assert torch.equal(got["w"], w if rank == 0 else now[2:])
        assert got["w"].data_ptr() != mine["w"].data_ptr()
    with pytest.raises(ValueError, match="w: a rule takes it from `initial`, which was not given; pass initial="):
        restore(tmp_path / "a", {"w": layout}, rank=0, rules=rules)
    with pytest.raises(
        ValueError, match=r"(?s)initial: got 1 of 1 leaves .*w: got local shape \(4, 3, 4\), wanted \(2, 3, 4\)"
    ):
        restore(tmp_path / "a", {"w": layout}, rank=0, rules=rules, initial={"w": now})
    # Every layer twice.
    twice = restore(tmp_path / "a", {"w": layout}, rank=1, rules=[take("w", [0, 0, 1, 1])])
    assert torch.equal(twice["w"], w[[1, 1]])


def test_a_head_for_another_task(tmp_path):
    state = {"trunk": torch.randn(4), "head": torch.randn(3), "old": torch.randn(2)}
    checkpoint.save(tmp_path / "a", state, layouts_of(state, Mesh()))
    now = {"trunk": torch.zeros(4), "head": torch.randn(7)}
    got = restore(tmp_path / "a", layouts_of(now, Mesh()), rules=[fresh("head"), drop("old")], initial=now)
    assert torch.equal(got["trunk"], state["trunk"]) and torch.equal(got["head"], now["head"])
    with pytest.raises(ValueError, match="head: a rule takes it from `initial`"):
        restore(tmp_path / "a", layouts_of(now, Mesh()), rules=[fresh("head"), drop("old")])


def test_the_vocabulary_grows_and_shrinks_only_where_it_may(tmp_path):
    table = torch.randn(10, 4)
    state = {"params": {"table": table}, "m": {"table": table + 1}}
    wanted = [
        {k: {"table": f(x["table"])} for k, x in state.items()}
        for f in (lambda x: torch.cat([x, torch.zeros(6, 4)]), lambda x: x[:7].contiguous())
    ]
    for other in wanted:
        check(tmp_path, state, other, [pad(".*/table")])
        with pytest.raises(
            ValueError,
            match=r"stored with global shape \(10, 4\), wanted .* rules=\[checkpoint.pad\('m/table', dim=0\)\]",
        ):
            restore(tmp_path / "a", layouts_of(other, Mesh()), rank=0, rules=[pad("params/.*")])
    with pytest.raises(ValueError, match=r"m/table: stored with global shape \(10, 4\), wanted \(10, 3\)"):
        narrow = {k: {"table": table[:, :3].contiguous()} for k in state}
        restore(tmp_path / "a", layouts_of(narrow, Mesh()), rules=[pad(".*")])


def test_master_weights_from_parameters(tmp_path):
    w = torch.randn(40, 6).bfloat16()
    checkpoint.save(tmp_path / "a", {"params": {"w": w}}, {"params": {"w": Layout(w.shape, w.dtype, Mesh())}})
    mesh = Mesh(fsdp=3)
    wanted = {
        "params": {"w": Layout(w.shape, w.dtype, mesh, (None, "fsdp"))},
        "opt": {"master": {"w": Layout(w.shape, F32, mesh, ("fsdp",))}},
    }
    rules = [copy("params/(.*)", r"opt/master/\1")]
    for rank in range(3):
        got = restore(tmp_path / "a", wanted, rank=rank, rules=rules, cast=True)
        assert torch.equal(got["params"]["w"], w[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(got["opt"]["master"]["w"], w.float().chunk(3)[rank])
    with pytest.raises(ValueError, match=r"opt/master/w: stored as bfloat16 \(from params/w\), wanted float32"):
        restore(tmp_path / "a", wanted, rank=0, rules=rules)
    got = restore(tmp_path / "a", {"params": wanted["params"]}, rank=0, rules=rules)  # nobody must ask for a copy
    assert list(got) == ["params"]


def test_a_subtree(tmp_path):
    state = {"params": {"w": torch.randn(4, 3), "b": torch.randn(3)}, "opt": {"m": {"w": torch.randn(4, 3)}}}
    check(tmp_path, state, state["params"], (), prefix="params")
    check(tmp_path, state, state["opt"], (), prefix="opt/")
    check(tmp_path, state, {"x": state["params"]["b"]}, [rename("b", "x"), drop("w")], prefix="params")
    single = restore(tmp_path / "a", Layout((3,), F32, Mesh()), prefix="params/b")
    assert torch.equal(single, state["params"]["b"])
    with pytest.raises(
        ValueError, match=r"prefix: got 'param', wanted the path of stored leaves \(did you mean params"
    ):
        restore(tmp_path / "a", Layout((3,), F32, Mesh()), prefix="param")
    check(tmp_path, state, {"params": state["params"]}, (), strict="subset")


@pytest.mark.parametrize(
    "rules, message",
    [
        ([take("a", [-1])], "got index -1"),
        ([rename("a(.*)", r"x\2")], "wanted one that fits its pattern"),
        ([rename("[ab]", "x")], "x: got two leaves of this path"),
        ([transpose("a", (0, 0))], r"a: got dims \(0, 0\), wanted every dim of an array of shape \(4, 6\) once"),
        ([split("a", ["x", "y"], 1, (4, 3))], "a: got dim 1 of size 6, wanted a multiple of groups"),
        ([split("a", ["x", "y"], 5)], "got dim 5"),
        ([fuse(["a", "missing"], "x", 0)], "x: got a, wanted also 'missing'"),
        ([fuse(["a", "b"], "x", 0)], r"got shapes \(4, 6\) and \(4, 5\)"),
        ([fuse(["a", "b"], "x", 1, (2, 1))], "wanted as many groups"),
        ([fuse(["a|b"], "x", 0)], "x: got a and b, wanted one leaf as part 0"),
        ([stack("layers/{i}", "w")], "w: got numbers 0 to 3 without 2"),
        ([stack("layers/{i}", "w/{i}")], "wanted exactly one"),
        ([unstack("a", "w")], "wanted exactly one"),
        ([take("a", [9])], r"a: got index 9, wanted 0 to 3"),
        ([pad("a"), take("a", [0])], "put pad or per_rank last"),
        (["a"], "wanted rules such as rename"),
    ],
    ids=str,
)
def test_rules_that_do_not_fit(tmp_path, rules, message):
    state = {"a": torch.zeros(4, 6), "b": torch.zeros(4, 5), "layers": {i: torch.zeros(2) for i in ("0", "1", "3")}}
    checkpoint.save(tmp_path / "a", state, layouts_of(state, Mesh()))
    with pytest.raises(ValueError, match=message) as error:
        restore(tmp_path / "a", layouts_of(state, Mesh()), rules=rules)
    assert not isinstance(error.value, CheckpointError)


def test_one_rule_needs_no_list(tmp_path):
    checkpoint.save(tmp_path / "a", {"x": torch.ones(3)}, {"x": Layout((3,), F32, Mesh())})
    got = restore(tmp_path / "a", {"y": Layout((3,), F32, Mesh())}, rules=rename("x", "y"))
    assert torch.equal(got["y"], torch.ones(3))


def test_rules_are_values():
    rules = [fuse(["(.*)/q", "(.*)/k"], r"\1/qk", 1), take("x", range(2)), pad("y", 1)]
    assert pickle.loads(pickle.dumps(rules)) == rules and rules[2] != pad("y")
    assert repr(rules[1]) == "take('x', (0, 1), 0)"


def test_a_wrong_pattern_is_refused_when_it_is_written():
    with pytest.raises(ValueError, match=r"got the pattern '\(', wanted a regular expression"):
        rename("(", "x")
