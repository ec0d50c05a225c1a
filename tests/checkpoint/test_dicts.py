"""States without layouts: what goes into a checkpoint comes back, whole, in the place of a target, or in place."""

import collections
import itertools
import random
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, Manager, rename, restore, save, save_async
from fmegatron.collectives import World
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import run

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
NUMPY = ("float32", "float16", "float64", "int8", "int64", "uint16", "bool", "complex128", "bfloat16", "float8_e4m3fn")
VALUES = (
    0, -3, 10**30, 0.5, float("inf"), float("-inf"), -0.0, True, False, None, "", "text", "naïve Ω 漢字 🙂", "a/b\n\0",
    b"\0\xff", torch.bfloat16, [], {}, (), [1, "two", None], (1, (2.0, [3])), torch.Size((2, 3)),
)  # fmt: skip
KEYS = ("w", "b c", "Ω", "a/b", ".hidden", "zarr.json", "0", 0, 1, 7, -1, True, None, (1, 2), 2.5)


class Moments(NamedTuple):
    mu: object
    nu: object


def some_state(r, depth=0):
    """A random state; every kind of leaf and container comes about."""
    kind = r.randrange(9 if depth < 4 else 4)
    shape = [r.randrange(4) for _ in range(r.randrange(4))]
    if kind == 0:
        return torch.randint(0, 2, shape).to(r.choice(DTYPES))
    if kind == 1:
        dtype = np.dtype(r.choice(NUMPY))
        x = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        return dtype.type(1) if r.random() < 0.3 else x.T if r.random() < 0.3 else x
    if kind in (2, 3):
        return r.choice(VALUES)
    if kind == 4:
        return [some_state(r, depth + 1) for _ in range(r.randrange(4))]
    if kind == 5:
        return tuple(some_state(r, depth + 1) for _ in range(r.randrange(4)))
    if kind == 6:
        return Moments(some_state(r, depth + 1), some_state(r, depth + 1))
    return some_dict(r, depth)


def some_dict(r, depth=0):
    keys = {str(key): key for key in r.sample(KEYS, r.randrange(1, 6))}
    return {key: some_state(r, depth + 1) for key in keys.values()}


def same(a, b, fields=False):
    """Whether two states are the same: types, dtypes and bits. fields: a NamedTuple of `a` is a dict of `b`."""
    if isinstance(a, Moments) and fields:
        return type(b) is dict and same(a._asdict(), b, fields)
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k], fields) for k in a) \
            and {*map(type, a)} == {*map(type, b)}  # fmt: skip
    if isinstance(a, torch.Size):
        return tuple(a) == b
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(lambda x, y: same(x, y, fields), a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def zeroed(x):
    """A state of the same structure with other contents."""
    if isinstance(x, torch.Tensor):
        return torch.zeros_like(x)
    if isinstance(x, np.ndarray | np.generic):
        return np.zeros_like(x, order="C") if isinstance(x, np.ndarray) else type(x)(0)
    if isinstance(x, dict):
        return {k: zeroed(v) for k, v in x.items()}
    if isinstance(x, list | tuple) and x and type(x) is not torch.Size:
        made = [zeroed(v) for v in x]
        return type(x)._make(made) if hasattr(x, "_fields") else type(x)(made)
    return x if isinstance(x, list | tuple) or x is None else "other"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_random_states_come_back(tmp_path, seed):
    r = random.Random(seed)
    state, path = some_dict(r), tmp_path / "c"
    save(path, state, metadata={"note": seed}, step=seed)
    assert same(state, restore(path), fields=True)
    assert same(state, restore(path, zeroed(state)))
    target = zeroed(state)
    got = restore(path, into=target)
    assert got is target and same(state, got)
    assert checkpoint.metadata(path) == checkpoint.describe(path).metadata == {"note": seed}


@pytest.mark.long
@pytest.mark.parametrize(
    "leaf", [*VALUES, torch.tensor(2.5), torch.ones(2, 0), np.arange(3), np.float32(1.5)], ids=lambda x: repr(x)[:20]
)
def test_a_leaf_alone(tmp_path, leaf):
    save(tmp_path / "c", leaf)
    assert same(leaf, restore(tmp_path / "c"))
    save(tmp_path / "c", {"x": leaf})
    assert same({"x": leaf}, restore(tmp_path / "c"))


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_arrays_of_any_memory(tmp_path, name):
    x = np.arange(24).reshape(4, 6).astype(name)
    frozen = x.copy()
    frozen.flags.writeable = False
    kinds = {"c": x, "t": x.T, "cut": x[1:, ::2], "back": x[::-1], "frozen": frozen, "0d": x[1, 1].reshape(())}
    save(tmp_path / "c", kinds)
    assert same(kinds, restore(tmp_path / "c"))
    big = {"x": np.arange(3, dtype=">i4")}
    save(tmp_path / "big", big)
    assert restore(tmp_path / "big")["x"].tolist() == [0, 1, 2]


def stepped(seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(2):
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer, scheduler


def dicts_of(net, optimizer, scheduler):
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


@pytest.mark.long
@pytest.mark.parametrize("wait", [True, False])
def test_a_manager_takes_state_dicts(tmp_path, wait):
    state = dicts_of(*stepped())
    with Manager(tmp_path / "m", keep=2) as manager:
        for step in range(3):
            report = manager.save(step, {**state, "step": step}, metadata={"note": step}, wait=wait)
            assert report.bytes == sum(x.nbytes for x in _tensors(state))
    with Manager(tmp_path / "m") as manager:
        step, got, metadata = manager.restore_latest()
        assert (step, got.pop("step"), metadata) == (2, 2, {"note": 2}) and same(state, got)
        assert manager.steps() == [1, 2] and manager.last.bytes == report.bytes
        net, optimizer, scheduler = stepped(1)
        net.load_state_dict(got["net"])
        optimizer.load_state_dict(got["optimizer"])
        scheduler.load_state_dict(got["scheduler"])
        assert same(dicts_of(net, optimizer, scheduler), state)
        other = {**dicts_of(*stepped(2)), "step": -1}
        assert manager.restore(1, into=other)[0] is other and same(other, {**state, "step": 1})
        assert same(manager.restore(2, {**dicts_of(*stepped(2)), "step": -1})[0], {**state, "step": 2})


def _tensors(x):
    if isinstance(x, torch.Tensor):
        yield x
    for item in x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ():
        yield from _tensors(item)


def test_modules_in_place_keep_their_memory(tmp_path):
    net = stepped()[0]
    save(tmp_path / "c", net.state_dict())
    other = stepped(1)[0]
    before = {name: x.data_ptr() for name, x in other.state_dict().items()}
    restore(tmp_path / "c", into=other.state_dict())
    assert same(dict(net.state_dict()), dict(other.state_dict()))
    assert before == {name: x.data_ptr() for name, x in other.state_dict().items()}
    assert type(restore(tmp_path / "c", net.state_dict())) is collections.OrderedDict


def test_in_place_fills_memory_of_any_strides(tmp_path):
    x = torch.arange(6.0).view(2, 3)
    save(tmp_path / "c", {"x": x, "n": np.arange(4), "c": torch.tensor([1 + 2j])})
    target = {"x": torch.zeros(3, 2).T, "n": np.zeros(8, dtype=np.int64)[::2], "c": torch.zeros(1, dtype=torch.cfloat)}
    own = dict(target)
    restore(tmp_path / "c", into=target)
    assert torch.equal(own["x"], x) and target["x"] is own["x"] and target["n"].tolist() == [0, 1, 2, 3]


@pytest.mark.long
def test_async_saves_large_values_as_they_were(tmp_path):
    state = {"x": torch.arange(4), "names": [f"name {i}" * 5 for i in range(20_000)], "k": {i: i for i in range(9)}}
    handle = save_async(tmp_path / "c", state, metadata={"a": 1}, step=4)
    wanted = {**state, "x": state["x"].clone()}
    state["x"].zero_()
    handle.result()
    assert same(wanted, restore(tmp_path / "c")) and checkpoint.metadata(tmp_path / "c") == {"a": 1}


def test_meta_tensors_and_layouts_are_targets(tmp_path):
    state = {"a": torch.arange(6.0), "b": [torch.ones(2, dtype=torch.bfloat16), 5], "n": np.arange(3)}
    save(tmp_path / "c", state)
    like = {
        "a": torch.empty(6, device="meta"),
        "b": [Layout((2,), torch.bfloat16, Mesh()), 0],
        "n": torch.empty(3).long(),
    }
    assert same({**state, "n": torch.arange(3)}, restore(tmp_path / "c", like))
    wide = {**like, "a": torch.empty(6, dtype=torch.float64, device="meta")}
    assert restore(tmp_path / "c", wide, cast=True)["a"].dtype is torch.float64
    with pytest.raises(ValueError, match="a: stored as float32, wanted float64; pass cast=True"):
        restore(tmp_path / "c", wide)


def test_saved_whole_and_restored_on_a_mesh_and_back(tmp_path):
    state = {"opt": Moments(torch.arange(8.0), [torch.ones(4, 2)]), "epoch": 3}
    save(tmp_path / "c", state)
    mesh = Mesh(fsdp=2)
    layouts = {"opt": Moments(Layout((8,), torch.float32, mesh, ("fsdp",)), [Layout((4, 2), torch.float32, mesh)])}
    parts = [restore(tmp_path / "c", layouts, rank=rank)["opt"].mu for rank in range(2)]
    assert torch.equal(torch.cat(parts), state["opt"].mu)
    alone = {"a": {"w": Layout((3,), torch.float32, Mesh())}, "l": [Layout((), torch.int64, Mesh())]}
    save(tmp_path / "d", {"a": {"w": torch.ones(3)}, "l": [torch.tensor(4)]}, alone)
    assert same({"a": {"w": torch.ones(3)}, "l": {"0": torch.tensor(4)}}, restore(tmp_path / "d"))
    like = {"a": {"w": torch.zeros(3)}, "l": [torch.tensor(0)], "none": None}
    assert same({"a": {"w": torch.ones(3)}, "l": [torch.tensor(4)], "none": None}, restore(tmp_path / "d", like))


def test_rules_prefix_initial_and_strictness(tmp_path):
    save(tmp_path / "c", {"m": {"w": torch.ones(2), "lr": 0.5, "t": (torch.ones(1), {3: 4})}, "epoch": 3})
    whole = restore(tmp_path / "c", prefix="m")
    assert same({"w": torch.ones(2), "lr": 0.5, "t": (torch.ones(1), {3: 4})}, whole)
    assert set(restore(tmp_path / "c", rules=[rename("m/w", "m/v")])["m"]) == {"v", "lr", "t"}
    asked = {"m": {"w": torch.zeros(2), "new": torch.zeros(3), "k": 1}}
    got, missing, unexpected = restore(tmp_path / "c", asked, strict="return_all")
    assert (set(got["m"]), missing, unexpected) == ({"w"}, ("m/t/0", "m/lr", "m/t/1/3", "epoch"), ("m/new", "m/k"))
    initial = {"m": {"w": torch.zeros(2), "new": torch.full((3,), 7.0), "k": 8}}
    got = restore(tmp_path / "c", asked, strict="ignore_all", initial=initial)
    assert same({"m": {"w": torch.ones(2), "new": torch.full((3,), 7.0), "k": 8}}, got)
    into = {"m": {"w": torch.zeros(2), "new": torch.full((3,), 6.0), "k": 5}}
    assert restore(tmp_path / "c", into=into, strict="ignore_all") is into
    assert same({"m": {"w": torch.ones(2), "new": torch.full((3,), 6.0), "k": 5}}, into)
    for target, text in (
        (asked, r"m/lr, m/t/1/3, epoch|m/new"),
        ({"m": torch.zeros(2), "epoch": torch.zeros(())}, "epoch: stored as 3, wanted an array; put a plain value"),
        ({"m": {"w": 1}}, "m/w: stored as an array, wanted 1; put a tensor there"),
        ({"m": {"w": torch.zeros(3)}}, r"m/w: stored with global shape \(2,\), wanted \(3,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            restore(tmp_path / "c", target, strict="subset" if target is not asked else "error")


WRONG = [
    ({"net": torch.nn.Linear(1, 1)}, r"^net: got Linear\(.*wanted a tensor, number, .*; pass its state_dict\(\)"),
    ({"a": [torch.ones(1), object()]}, r"^a/1: got <object .*wanted a tensor, number, .*; convert it"),
    ({"a": np.array(["x"])}, r"^a: got a numpy array of dtype <U1, wanted .*; pass x.tolist\(\)"),
    ({"a": np.array([None])}, "^a: got a numpy array of dtype object, wanted"),
    ({"a": np.datetime64("2020-01-01")}, "^a: got a numpy array of dtype datetime64"),
    ({"a": np.str_("x")}, "^a: got a numpy array of dtype <U1"),
    ({"a": torch.ones(2, device="meta")}, r"^a: got a meta tensor, wanted one with memory; pass x.to_empty"),
    ({"a": torch.ones(2, 2).to_sparse()}, r"^a: got torch.sparse_coo, .*; pass x.to_dense\(\)"),
    ({"a": torch.ones(2, dtype=torch.uint8).view(torch.uint4)}, r"^a: got dtype torch.uint4, .*; pass x.view"),
    ({1: torch.ones(1), "1": torch.ones(1)}, "^1: got two leaves of this path"),
    ({"a": {"b": torch.ones(1)}, "a/b": 2}, "^a/b: got a key that is below another key"),
    ({"": torch.ones(1)}, "^state: got the key '', wanted text; rename the key"),
    ({frozenset("a"): torch.ones(1)}, r"its key\): got frozenset"),
    ({"\ud800": torch.ones(1)}, "half a surrogate pair in a key"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"^a: got a nested tensor, .*; pass list"):
        save(tmp_path / "c", {"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])})


@pytest.mark.parametrize("state, text", WRONG, ids=lambda x: None if isinstance(x, str) else "state")
def test_what_cannot_be_stored_names_path_and_fix(tmp_path, state, text):
    with pytest.raises(ValueError, match=text):
        save(tmp_path / "c", state)
    with Manager(tmp_path / "m") as manager, pytest.raises(ValueError, match=text):
        manager.save(0, state, wait=False)
    assert not (tmp_path / "c").exists()


def test_what_contains_itself_is_refused(tmp_path):
    loop, row = {"x": torch.ones(1)}, [1]
    loop["loop"], _ = loop, row.append(row)
    for state in (loop, {"row": row}):
        with pytest.raises(ValueError, match="got a container that contains itself, wanted a tree; take it out"):
            save(tmp_path / "c", state)


def test_several_ranks_need_layouts(tmp_path, monkeypatch):
    save(tmp_path / "c", {"w": torch.ones(2)})
    layouts, asked = (
        "layouts: got None on one of 2 ranks, wanted a Layout for each tensor",
        "got .* and 2 ranks that rest",
    )
    for work, text in (
        (lambda world: save(tmp_path / "d", {"w": torch.ones(2)}, world=world), layouts),
        (lambda world: Manager(tmp_path / "d", world=world).save(0, {"w": torch.ones(2)}), layouts),
        (lambda world: restore(tmp_path / "c", world=world), asked),
        (lambda world: restore(tmp_path / "c", {"w": torch.ones(2)}, world=world), asked),
        (lambda world: restore(tmp_path / "c", into={"w": torch.ones(2)}, world=world), asked),
        (lambda world: Manager(tmp_path / "c", world=world).restore_latest(), asked),
    ):
        for error in run(2, work):
            assert isinstance(error, ValueError) and re.search(text, str(error)), error
            assert re.search("interop.(save|load)_state_dict", str(error))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 4)
    for work in (save, save_async, lambda path, state: Manager(path).save(0, state)):
        with pytest.raises(ValueError, match=r"layouts: got None on one of 4 ranks, .*save_state_dict.*World.alone"):
            work(tmp_path / "d", {"w": torch.ones(2)})
    save(tmp_path / "d", {"w": torch.ones(2)}, world=World.alone("cpu"))


def test_wrong_targets_name_the_fix(tmp_path):
    save(tmp_path / "c", {"w": torch.ones(2)})
    layout = Layout((2,), torch.float32, Mesh())
    for asked, text in (
        ({"target": {"w": layout}, "into": {"w": torch.ones(2)}}, "got a target and into=, wanted one of them"),
        ({"into": {"w": layout}}, "w: got a Layout in into=, wanted a tensor; pass it as the target"),
        ({"into": {"w": torch.ones(2, device="meta")}}, "w: got a meta tensor, wanted one with memory"),
        ({"target": {"w": torch.ones(2)}, "rank": 1}, "rank: got 1 without layouts, wanted 0"),
        ({"target": {"w": np.array(["x"])}}, "w: got a numpy array of dtype <U1"),
    ):
        with pytest.raises(ValueError, match=text):
            restore(tmp_path / "c", **asked)
    for key in ("state_dict", "containers"):
        with pytest.raises(ValueError, match=f"metadata: got the key '{key}', wanted another"):
            save(tmp_path / "d", {"w": torch.ones(2)}, metadata={key: 1})


def test_containers_that_no_save_made_are_damage(tmp_path):
    layouts = {"a": {"b": Layout((2,), torch.float32, Mesh())}}
    kinds = [{"dict": 3}, {"dict": [{"tuple": 3}]}, {"other": []}]
    for i, kind in itertools.product(range(2), kinds):
        save(
            tmp_path / "c",
            {"a": {"b": torch.ones(2)}},
            layouts,
            metadata={"state_dict": {}, "containers": {"a" * i: kind}},
        )
        with pytest.raises(CheckpointError, match="its containers cannot be read"):
            restore(tmp_path / "c")
        assert torch.equal(restore(tmp_path / "c", layouts)["a"]["b"], torch.ones(2))
    assert ml_dtypes.bfloat16 is np.dtype("bfloat16").type


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # of torch, about all that is quantized
def test_a_quantized_tensor_is_refused_with_what_can_be_saved(tmp_path):
    x = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match=r"^a: got a quantized tensor .*; pass x.int_repr\(\)"):
        checkpoint.save(tmp_path / "a", {"a": x})
    checkpoint.save(tmp_path / "a", {"a": x.int_repr()})
