"""model.state_dict() and optimizer.state_dict() of FSDP2 and tensor-parallel modules, saved and loaded on any mesh."""

import contextlib
import math
import os
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.collectives import connect
from fmegatron.interop import load_state_dict, save_state_dict
from fmegatron.interop.state_dict import from_state_dict, to_state_dict
from fmegatron.layout import Mesh
from fmegatron.tree import place
from tests.interop.models import build, full, same, state_of


def save(rank, path, kind, size):
    net, optimizer = build(kind, size)
    state = state_of(net, optimizer)
    with connect(Mesh(world=size), device="cpu") as world:
        save_state_dict(path, state, world, {"note": kind}, step=3)
    wanted = full(state)
    if rank == 0:
        torch.save(wanted, f"{path}.wanted")
    dist.barrier()


def load(rank, path, kind, size):
    net, optimizer = build(kind, size, seed=7)
    state = state_of(net, optimizer)
    before = [x._local_tensor.data_ptr() for x in net.state_dict().values() if isinstance(x, DTensor)]
    wanted = torch.load(f"{path}.wanted", weights_only=False)
    different = not same(full(state), wanted)
    load_state_dict(path, state)
    optimizer.load_state_dict(state["optimizer"])
    got = full(state_of(net, optimizer))
    after = [x._local_tensor.data_ptr() for x in net.state_dict().values() if isinstance(x, DTensor)]
    return different and before == after, same(got, wanted), optimizer.param_groups[0]["betas"]


@pytest.mark.medium
@pytest.mark.parametrize("kind, size", [("fsdp", 4), ("tp", 2), ("fsdp_tp", 4)])
def test_any_mesh_to_any_mesh(ranks, tmp_path, kind, size):
    path = str(tmp_path / "c")
    ranks.run(save, path, kind, size, ranks=size)
    assert checkpoint.metadata(path)["note"] == kind
    for other, count in (("fsdp", 2), ("fsdp", 4), ("tp", 2), ("fsdp_tp", 4)):
        assert ranks.run(load, path, other, count, ranks=count) == [(True, True, (0.9, 0.98))] * count, (other, count)


def test_restore_without_targets_gives_the_global_arrays(ranks, tmp_path):
    """On one process, what FSDP2 and tensor parallel ranks have saved: every tensor and every value."""
    path = str(tmp_path / "c")
    ranks.run(save, path, "fsdp_tp", 4, ranks=4)
    got, wanted = checkpoint.restore(path), torch.load(f"{path}.wanted", weights_only=False)
    assert same(got, wanted)


class Pair(NamedTuple):
    first: torch.Tensor
    rest: tuple


def test_named_tuples_on_the_way_are_made_anew(tmp_path):
    def state(fill):
        return {
            "opt": Pair(torch.full((3,), fill), (torch.full((2,), fill), {"deep": [Pair(torch.ones(1) * fill, ())]}))
        }

    save_state_dict(tmp_path / "c", {**state(2.0), "n": Pair(torch.tensor(5), (7,))})
    into = {**state(0.0), "n": Pair(torch.tensor(0), (0,))}
    load_state_dict(tmp_path / "c", into)
    assert same(into["opt"], state(2.0)["opt"]) and type(into["opt"]) is Pair
    assert type(into["opt"].rest[1]["deep"][0]) is Pair and into["n"] == Pair(torch.tensor(5), (7,))


def round_trip(rank, size):
    net, optimizer = build("fsdp_tp", size)
    model = net.state_dict()
    tree, layouts, values = from_state_dict({"model": model, "n": 3})
    assert values == {"n": 3} and all(x.data_ptr() == tree[f"model/{k}"].data_ptr() for k, x in locals_of(model))
    mesh = net.up.weight.device_mesh
    inner = {k: v for k, v in tree.items() if layouts[k].mesh.names == ("fsdp", "tp")}
    inner = place(inner, {k: layouts[k] for k in inner}, rank)
    back = to_state_dict(inner, mesh)["model"]
    for name, x in back.items():
        assert x.placements == model[name].placements and torch.equal(x._local_tensor, model[name]._local_tensor), name
    return sorted(back)


def locals_of(model):
    return [(k, x._local_tensor if isinstance(x, DTensor) else x) for k, x in model.items()]


def test_back_to_dtensors(ranks):
    assert ranks.run(round_trip, 4) == [["down.bias", "down.weight", "up.bias", "up.weight"]] * 4


def refuse(rank, path, size):
    with connect(Mesh(world=size), device="cpu") as world:
        for state, match in (
            ({"x": torch.zeros(2), "lr": 0.1 * (rank + 1)}, "values.*differ between ranks 0 and 1: lr"),
            ({"x": torch.zeros(2 + rank)}, "differ, wanted that of rank 0"),
        ):
            with pytest.raises((ValueError, RuntimeError), match=match):
                save_state_dict(path, state, world)
            world.barrier()  # rank 0 has cleared up when it raises
            assert not os.path.exists(path)


def test_ranks_that_disagree(ranks, tmp_path):
    ranks.run(refuse, str(tmp_path / "c"), 2, ranks=2)


VALUES = {
    "lr": 0.1,
    "odd": [math.inf, -math.inf, -0.0, 1e-310, 2**70, True, None, "text", b"\0\xff", torch.bfloat16],
    "nested": ({"a": (1, [2, ()])}, []),
    3: {"empty": {}, "deep": [{"t": torch.arange(3)}, {}]},
    "pair": (torch.tensor(2.5), {"x": 1}),
    "size": torch.Size([2, 3]),
}


def test_values_come_back_exactly(tmp_path):
    save_state_dict(tmp_path / "c", VALUES)
    state = {
        "lr": 0,
        "odd": [],
        "nested": ({"a": 0}, 0),
        3: {"empty": 1, "deep": [{"t": torch.zeros(3, dtype=torch.int64)}, 5]},
        "pair": (torch.zeros(()), {"x": 0}),
        "size": None,
    }
    load_state_dict(tmp_path / "c", state)
    assert state.pop("size") == (2, 3)
    wanted = {k: v for k, v in VALUES.items() if k != "size"}
    assert same(state, wanted) and math.copysign(1, state["odd"][2]) == -1
    nan = {"x": math.nan}
    save_state_dict(tmp_path / "n", nan | {"t": torch.zeros(1)})
    load_state_dict(tmp_path / "n", got := {"x": 0, "t": torch.ones(1)})
    assert math.isnan(got["x"])


def test_requests_that_do_not_fit(tmp_path):
    path = tmp_path / "c"
    save_state_dict(path, {"model": {"w.weight": torch.zeros(2, 3), "n": 5}})
    start = torch.ones(2, 3)
    for state, match in (
        ({"model": {"w.wieght": start, "n": 1}}, "w.wieght: not in the checkpoint.*did you mean model/w.weight"),
        ({"model": {"w.weight": torch.ones(3, 2), "n": 1}}, r"stored with global shape \(2, 3\), wanted \(3, 2\)"),
        ({"model": {"w.weight": start.double(), "n": 1}}, "pass cast=True"),
        ({"model": {"w.weight": start}}, "stored but not asked for: model/n"),
        ({"model": {"w.weight": start, "n": 1, "m": 2}}, "model/m: not in the checkpoint"),
    ):
        with pytest.raises(ValueError, match=match):
            load_state_dict(path, state)
        assert start.eq(1).all()
    load_state_dict(path, {"model": {"w.weight": start}}, strict="subset")
    assert start.eq(0).all()
    load_state_dict(path, {"model": {"w.weight": (wide := torch.ones(2, 3, dtype=torch.float64)), "n": 0}}, cast=True)
    assert wide.eq(0).all()
    turned = torch.ones(3, 2).t()
    load_state_dict(path, {"model": {"w.weight": turned, "n": 0}})
    assert turned.eq(0).all()


class Odd(torch.Tensor):
    """A tensor whose meaning nobody here knows."""


def test_what_is_no_plain_data_is_refused(tmp_path):
    for state, match in (
        ({"f": {"g": print}}, "f/g: got <built-in function print>"),
        ({"a": {"b/c": torch.zeros(1), "b": {"c": torch.zeros(1)}}}, "a/b/c: got two entries with this path"),
        ({"x": {1, 2}}, "x: got {1, 2}"),
        ({"s": torch.eye(3).to_sparse()}, "s: got a torch.Tensor .torch.sparse_coo"),
        ({"m": torch.empty(3, device="meta")}, "m: got a torch.Tensor .meta"),
        ({"k": torch.zeros(2).as_subclass(Odd)}, "k: got a .*Odd"),
    ):
        with pytest.raises(ValueError, match=match):
            save_state_dict(tmp_path / "c", state)
    loop = {"x": torch.zeros(1)}
    loop["self"] = loop
    with pytest.raises(ValueError, match="contains itself"):
        save_state_dict(tmp_path / "c", loop)
    with pytest.raises(ValueError, match="metadata: got the key .state_dict."):
        save_state_dict(tmp_path / "c", {"x": torch.zeros(1)}, metadata={"state_dict": 1})
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_is_named(tmp_path):
    path = tmp_path / "c"
    save_state_dict(path, {"model": {"w": torch.arange(40000.0)}})
    file = next(p for p in (path / "arrays").rglob("c*") if p.is_file() and p.stat().st_size > 1000)
    data = bytearray(file.read_bytes())
    data[777] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="model/w: .*is damaged"):
        load_state_dict(path, {"model": {"w": torch.zeros(40000)}})
    with contextlib.suppress(ValueError):
        load_state_dict(path, {"model": {"w": torch.zeros(40000)}}, verify=False)


def test_rules_and_strictness(tmp_path):
    path = tmp_path / "c"
    save_state_dict(path, {"net": {"a": torch.arange(4.0), "b": torch.arange(6.0).view(2, 3)}, "lr": 1})
    rules = [
        checkpoint.rename("net/(.*)", r"model/\1"),
        checkpoint.transpose("model/b", (1, 0)),
        checkpoint.pad("model/a"),
    ]
    into = {"model": {"a": torch.ones(6), "b": torch.ones(3, 2), "new": torch.ones(2)}, "lr": 0, "wd": 5}
    with pytest.raises(ValueError, match="model/new: not in the checkpoint"):
        load_state_dict(path, into, rules=rules)
    assert load_state_dict(path, into, rules=rules, strict="return_all") == ((), ("model/new", "wd"))
    assert into["model"]["a"].tolist() == [0, 1, 2, 3, 0, 0] and into["model"]["b"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert into["model"]["new"].eq(1).all() and into["lr"] == 1 and into["wd"] == 5
    with pytest.warns(RuntimeWarning, match="net/b"):
        assert load_state_dict(path, {"net": {"a": torch.ones(4)}}, strict="log_all")[0] == ("net/b", "lr")
