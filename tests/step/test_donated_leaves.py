"""A donated tree is dead after the call and says so; memory that others have is left to them."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from fmegatron import tree
from fmegatron.step import jit

BACKENDS = ["inductor", "compile", "aot_eager", "eager"]


def doubled(state):
    return tree.map(lambda x: x * 2, state)


def twice(backend="eager"):
    """A jit that doubles a state of any structure."""
    return jit(doubled, donate=0, backend=backend)


# ---- dead after the call ---------------------------------------------------------------------------------------------
READS = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "shape": lambda x: x.shape,
    "dtype": lambda x: x.dtype,
    "index": lambda x: x[0],
    "assign": lambda x: x.__setitem__(0, 1.0),
    "item": lambda x: x.sum().item(),
    "float": float,
    "bool": bool,
    "len": len,
    "list": list,
    "tolist": lambda x: x.tolist(),
    "format": lambda x: f"{x:.3f}",
    "numpy": np.asarray,
    "dlpack": lambda x: np.from_dlpack(x),
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "clone": torch.clone,
    "to": lambda x: x.to(torch.float64),
    "as_subclass": lambda x: x.as_subclass(torch.Tensor),
    "data_ptr": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "cat": lambda x: torch.cat([x, x]),
    "foreach": lambda x: torch._foreach_add([torch.ones(2), x], 1),
    "operator": lambda x: torch.ops.aten.add.Tensor(x, 1),
    "in place": lambda x: torch.zeros(2).copy_(x),
    "equal": lambda x: torch.equal(x, x),
    "pickle": pickle.dumps,
    "save": lambda x: torch.save({"x": x}, io.BytesIO()),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "parameter": lambda x: torch.nn.Parameter(x).sum(),
    "tree.map": lambda x: tree.map(torch.clone, {"a": x}),
    "jit": lambda x: jit(lambda x: x + 1, backend="eager")(x),
}  # fmt: skip


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_use_is_an_error(read):
    state = {"params": {"w": torch.ones(2)}, "count": torch.zeros((), dtype=torch.int64)}
    new = twice()(state)
    with pytest.raises(
        ValueError,
        match=r"leaf '0/params/w': got .* donated to doubled, .* use what doubled returned; .*tree.copies\(state\)",
    ):
        read(state["params"]["w"])
    assert new["params"]["w"].tolist() == [2, 2]


def test_it_can_be_shown():
    state = {"w": torch.ones(2)}
    twice()(state)
    assert repr(state) == "{'w': <donated to doubled: '0/w'>}" and str(state["w"]) == "<donated to doubled: '0/w'>"
    assert isinstance(state["w"], torch.Tensor) and hash(state["w"]) and "shape" in dir(state["w"])


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_step_from_the_same_state_is_an_error(backend):
    """It was wrong without a word: both results were one."""
    step = twice(backend)
    first = {"a": torch.ones(2), "b": torch.ones(())}
    second = step(first)
    with pytest.raises(ValueError, match="leaf '0/a': got a tensor that was donated to doubled"):
        step(first)
    assert second["a"].tolist() == [2, 2] and step(second)["a"].tolist() == [4, 4]
    with pytest.raises(ValueError, match="leaf '0/a': got a tensor that was donated to doubled"):
        step(second)


def test_a_leaf_that_is_handed_through_is_dead_too():
    step = jit(lambda s: {"a": s["a"] + 1, "frozen": s["frozen"]}, donate=0, backend="eager")
    state = {"a": torch.ones(2), "frozen": torch.ones(2)}
    where, new = state["frozen"].data_ptr(), step(state)
    assert new["frozen"].data_ptr() == where
    with pytest.raises(ValueError, match="leaf '0/frozen': got a tensor that was donated"):
        state["frozen"].sum()


def test_one_tensor_in_two_states_is_dead_in_both():
    shared = torch.ones(2)
    state, other = {"a": shared}, {"b": shared}
    twice()(state)
    with pytest.raises(ValueError, match="leaf '0/a': got a tensor that was donated"):
        other["b"].sum()


def test_one_tensor_twice_in_a_call():
    x = torch.ones(2)
    with pytest.raises(ValueError, match="got shared memory of which one is donated"):
        jit(lambda a, b: (a + 1, b + 1), donate=(0, 1), backend="eager")(x, x)
    with pytest.raises(ValueError, match="got shared memory of which one is donated"):
        jit(lambda a, b: (a + b).sum() + a, donate=0, backend="eager")(x, x)
    assert x.tolist() == [1, 1]


def test_constants_pass():
    step = jit(lambda s: {"w": s["w"] * s["n"], "n": s["n"], "name": s["name"]}, donate=0, backend="eager")
    state = step({"w": torch.ones(2), "n": 3, "name": "run"})
    assert state["n"] == 3 and state["name"] == "run" and step(state)["w"].tolist() == [9, 9]


def test_no_memory_is_kept_by_the_dead():
    state = {"w": torch.ones(1000)}
    new = twice()(state)
    storage = new["w"].untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor, and Python's object of the storage


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_is_of_plain_tensors(backend):
    """What is donated may be parameters of a module, or need a gradient; what comes back is as without donation."""
    module = torch.nn.Linear(2, 2)
    got = twice(backend)(dict(module.named_parameters()))
    assert {type(x) for x in got.values()} == {torch.Tensor} and not any(x.requires_grad for x in got.values())
    with pytest.raises(ValueError, match="leaf '0/weight': got a tensor that was donated to doubled"):
        module(torch.ones(1, 2))
    torch.func.functional_call(torch.nn.Linear(2, 2), got, torch.ones(1, 2))


# ---- memory that others have -----------------------------------------------------------------------------------------
HOLDERS = {
    "detached": lambda x: x.detach(),
    "view": lambda x: x[1:],
    "transposed": lambda x: x.view(3, 1).t(),
    "data": lambda x: x.data,
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "dlpack": lambda x: torch.from_numpy(np.from_dlpack(x)),
    "storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (3,)),
}


@pytest.mark.medium
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_keeps_the_old_values(backend):
    """The usual ways to keep a state, in torch: before, all of them were overwritten without a word."""
    state = {name: torch.arange(3.0) for name in HOLDERS}
    kept = {name: hold(state[name]) for name, hold in HOLDERS.items()}
    before = tree.map(torch.clone, kept)
    step = twice(backend)
    state = step(step(state))
    assert all(torch.equal(kept[name], before[name]) for name in HOLDERS)
    assert all(x.tolist() == [0, 4, 8] for x in state.values())


def test_what_autograd_has_saved_keeps_its_values():
    x, w = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    z = x * 2
    loss = (x * w).sum() + (z * z).sum()
    twice()({"w": w, "z": z})
    assert torch.autograd.grad(loss, x)[0].tolist() == [11, 11]


def test_memory_of_numpy_is_not_written():
    array = np.ones(2)
    step = twice()
    state = step(step({"w": torch.from_numpy(array)}))
    assert array.tolist() == [1, 1] and state["w"].tolist() == [4, 4]


STORAGES = {
    "untyped": lambda x: x.untyped_storage(),
    "typed": lambda x: x.storage(),  # which holds an untyped one
    "in a list": lambda x: [x.untyped_storage(), x.untyped_storage()],
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", STORAGES)
def test_a_storage_that_is_held_is_not_written(name):
    """The object that Python has for memory is counted, which torch's own count of the memory does not see."""
    state = {"a": torch.ones(3), "b": torch.ones(3)}
    held, where = STORAGES[name](state["a"]), state["b"].data_ptr()
    step = twice()
    state = step(state)
    first = held[0] if name == "in a list" else held
    assert torch.empty(0).set_(first, 0, (3,)).tolist() == [1, 1, 1]
    assert state["a"].tolist() == [2, 2, 2] and state["b"].data_ptr() == where  # the other one went on

    held, where = STORAGES[name](state["a"]), state["a"].data_ptr()
    del held, first  # let go: its memory goes on again
    state = step(state)
    assert state["a"].data_ptr() == where and state["a"].tolist() == [4, 4, 4]


def test_a_storage_of_pieces_that_is_held_is_not_written():
    pieces = torch.ones(4).split(2)
    state = {"a": pieces[0].detach(), "b": pieces[1].detach(), "c": torch.ones(1)}
    memory = pieces[0].untyped_storage()
    del pieces
    state = twice()(state)
    assert torch.empty(0).set_(memory, 0, (4,)).tolist() == [1] * 4 and state["b"].tolist() == [2, 2]


def test_pieces_of_one_tensor():
    """Their owner keeps it as it was; without an owner they may be donated as any others."""
    flat = torch.ones(6)
    state = {"a": flat[:2], "b": flat[2:4].view(2, 1), "c": torch.ones(2, 3).t()}
    step = twice()
    state = step(step(state))
    assert flat.tolist() == [1] * 6 and all((x == 4).all() for x in state.values())

    pieces = torch.ones(4).split(2)
    state = {"a": pieces[0].detach(), "b": pieces[1].detach()}
    where = [x.data_ptr() for x in state.values()]
    del pieces
    step = twice()
    state = step(step({**state, "c": torch.ones(1)}))
    assert [x.data_ptr() for x in state.values()][:2] == where and state["b"].tolist() == [4, 4]


def test_only_what_is_held_is_copied():
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    kept, where = state["a"].detach(), {name: x.data_ptr() for name, x in state.items()}
    new = twice()(state)
    assert new["b"].data_ptr() == where["b"] and new["a"].data_ptr() != where["a"] and kept.tolist() == [1, 1]
