"""Donation: the old leaves hold the new values, nothing else changes, and there is no second copy of the state."""

import functools

import pytest
import torch

from fmegatron import tree
from fmegatron.step import jit
from fmegatron.testing import assert_pure
from fmegatron.testing.measure import peak_bytes
from fmegatron.tree.structure import flatten
from tests.fresh_state import fresh_state
from tests.pairs import few
from tests.step import tiny


def backends(dynamo=False):
    """Inductor and AOTAutograd; through Dynamo as well in one of these tests, in the others with the slow ones."""
    dynamo = pytest.param("compile", marks=() if dynamo else pytest.mark.slow)
    return pytest.mark.parametrize("backend", ["inductor", dynamo, "aot_eager"])


def pointers(t):
    return [x.data_ptr() for x in tree.leaves(t)]


# ---- a whole training step -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wide():
    """(state, batch) whose weights are far larger than its activations."""
    params = tiny.mlp_params(layers=1, width=256, hidden=256, dtype=torch.float32)
    return fresh_state(params, tiny.OPTIMIZER), tiny.mlp_batch(rows=4, width=256, dtype=torch.float32)


@pytest.fixture(scope="module")
def donated(wide):
    return jit(tiny.mlp_step(params=wide[0].params), donate=0)


@pytest.fixture(scope="module")
def undonated(wide):
    """Op by op; what Inductor leaves of arguments: `test_a_result_never_shares_memory_with_an_argument`."""
    return jit(tiny.mlp_step(params=wide[0].params), backend="aot_eager")


@pytest.mark.medium
def test_every_leaf_of_the_state_stays_where_it_is(wide, donated):
    state = tiny.copied(wide[0])
    before, where = tiny.copied(state), pointers(state)
    for _ in range(3):
        state, _ = donated(state, wide[1])
        assert pointers(state) == where
    unchanged = [p for p, a, b in zip(*flatten(state)[:2], tree.leaves(before), strict=True) if torch.equal(a, b)]
    assert not unchanged


@pytest.mark.medium
def test_without_donation_no_argument_changes(wide, undonated):
    state, batch = tiny.copied(wide[0]), wide[1]
    new, metrics = assert_pure(undonated, state, batch)
    assert not set(pointers((new, metrics))) & set(pointers((state, batch)))


@pytest.mark.medium
def test_memory(wide, donated, undonated):
    """Above the state: the gradients once, and activations; without donation, the new state too."""
    state, batch = donated(tiny.copied(wide[0]), wide[1])[0], wide[1]
    undonated(state, batch)  # compiled before it is measured
    gradients = sum(x.nbytes for x in tree.leaves(state.params))
    peaks = [peak_bytes(lambda step=step: step(state, batch)) for step in (undonated, donated)][::-1]
    activations = 16 * batch["x"].nbytes  # a few [B, D], forward and backward
    assert activations < 0.2 * gradients  # else the bounds below would say little
    assert gradients <= peaks[0] <= gradients + activations
    assert peaks[1] >= peaks[0] + 0.95 * 3 * gradients


# ---- values that come from other leaves ------------------------------------------------------------------------------
COPIES = {
    "itself": lambda x: x,
    "clone": torch.clone,
    "cast there and back": lambda x: x.double().float(),
    "times ones": lambda x: x * torch.ones(3, 3),
    "transposed": lambda x: x.t(),
    "transposed twice": lambda x: x.t().clone().t().clone(),
    "cat of one": lambda x: torch.cat([x]),
    "written into a new tensor": lambda x: torch.empty_like(x).copy_(x),
    "written by parts": lambda x: torch.zeros(3, 3).index_put((torch.arange(3),), x),
    "assigned": lambda x: _assigned(torch.zeros(3, 3), x),
    "computed": lambda x: x + 1,
}


def _assigned(to, x):
    to[:] = x
    return to


@pytest.mark.medium
@backends(dynamo=True)
def test_leaves_that_change_places(backend):
    """Inductor drops copies that change nothing; then each leaf would be read after it was overwritten."""
    state = {name: {"a": torch.randn(3, 3), "b": torch.randn(3, 3)} for name in COPIES}

    def swap(state):
        return {name: {"a": COPIES[name](s["b"]), "b": COPIES[name](s["a"])} for name, s in state.items()}

    wanted, where = swap(tiny.copied(state)), pointers(state)
    got = jit(swap, donate=0, backend=backend)(state)
    wrong = [p for p, a, b in zip(*flatten(got)[:2], tree.leaves(wanted), strict=True) if not torch.equal(a, b)]
    assert not wrong and pointers(got) == where


@pytest.mark.medium
@backends()
def test_the_old_value_returned_beside_the_new_one(backend):
    """A step that remembers: what it returns of the old leaf is not overwritten, and is memory of its own."""
    state = {name: torch.randn(3, 3) for name in COPIES}

    def f(state):
        return {name: x + 1 for name, x in state.items()}, {name: COPIES[name](x)[1:] for name, x in state.items()}

    wanted = f(tiny.copied(state))[1]
    new, old = jit(f, donate=0, backend=backend)(state)
    for name in COPIES:
        assert torch.equal(old[name], wanted[name]), name
        assert old[name].untyped_storage().data_ptr() != new[name].untyped_storage().data_ptr(), name


@pytest.mark.medium
@backends()
def test_a_result_never_shares_memory_with_an_argument(backend):
    x = torch.randn(3, 3)
    got = assert_pure(jit(lambda x: {name: f(x) for name, f in COPIES.items()}, backend=backend), x)
    for name, f in COPIES.items():
        assert torch.equal(got[name], f(x))
        assert got[name].untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), name


WRITES = {
    "index_put": lambda x, i, v: x.index_put((i,), v),
    "index_put accumulated": lambda x, i, v: x.index_put((i,), v, accumulate=True),
    "assigned by index": lambda x, i, v: _assigned_at(x.clone(), i, v),
    "index_copy": lambda x, i, v: x.index_copy(0, i, v),
    "index_add": lambda x, i, v: x.index_add(0, i, v),
    "index_fill": lambda x, i, v: x.index_fill(0, i, 7.0),
    "index_put, a view": lambda x, i, v: x.index_put((i,), v)[1:],
    "index_put, transposed": lambda x, i, v: x.index_put((i,), v).t(),
    "put": lambda x, i, v: x.put(i, v[0, :2]),
    "scatter": lambda x, i, v: x.scatter(0, i[:, None], v),
    "scatter_add": lambda x, i, v: x.scatter_add(0, i[:, None], v),
    "scatter_reduce": lambda x, i, v: x.scatter_reduce(0, i[:, None], v, "amax"),
    "slice_scatter": lambda x, i, v: x.slice_scatter(v, 0, 1, 3),
    "select_scatter": lambda x, i, v: x.select_scatter(v[0], 0, 1),
    "diagonal_scatter": lambda x, i, v: x.diagonal_scatter(v[0]),
    "as_strided_scatter": lambda x, i, v: x.as_strided_scatter(v[0, :2], (2,), (1,), 0),
    "fill_diagonal_": lambda x, i, v: x.clone().fill_diagonal_(3.0),
    "flip": lambda x, i, v: x.flip(0),
    "roll": lambda x, i, v: x.roll(1, 0),
    "new_empty": lambda x, i, v: x.new_zeros(3, 3).copy_(x),
}


def _assigned_at(to, i, v):
    to[i] = v
    return to


ALL_BACKENDS = ["inductor", pytest.param("compile", marks=pytest.mark.slow), "aot_eager", "eager"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("half", few(1, [(0,), (1,)]))
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_what_is_written_into_the_old_value_is_not_the_new_value(backend, half):
    """Inductor writes at indices in place, in the memory of a leaf that is overwritten later: 10 of 20 were wrong."""
    writes = dict(list(WRITES.items())[half::2])

    def f(state, i, v):
        doubled = {name: {"a": s["a"] * 2, "b": writes[name](s["a"], i, v)} for name, s in state.items()}
        return doubled, {name: writes[name](s["a"], i, v) for name, s in state.items()}

    x, i, v = torch.arange(9.0).view(3, 3) - 4, torch.tensor([0, 2]), torch.full((2, 3), 9.0)
    wanted = {name: write(x, i, v) for name, write in writes.items()}
    state = {name: {"a": x.clone(), "b": torch.empty(y.shape)} for name, y in wanted.items()}
    new, beside = jit(f, donate=0, backend=backend)(state, i, v)
    assert [name for name in writes if not torch.equal(beside[name], wanted[name])] == []
    assert [name for name in writes if not torch.equal(new[name]["b"], wanted[name])] == []
    assert [name for name in writes if not torch.equal(new[name]["a"], x * 2)] == []


@pytest.mark.medium
def test_a_row_that_is_written_needs_no_second_leaf():
    """What is safe in place stays in place: a cache of keys takes one more without a copy of all of them."""
    step = jit(lambda cache, i, v: (cache.index_copy(1, i, v), v.sum()), donate=0)
    cache, i, v = torch.zeros(4, 512, 16), torch.tensor([3]), torch.ones(4, 1, 16)
    where, size, (cache, _) = cache.data_ptr(), cache.nbytes, step(cache, i, v)
    assert cache.data_ptr() == where and cache.sum() == 64
    assert peak_bytes(lambda: step(cache, i, v)) < 0.1 * size


@pytest.mark.long
@backends()
def test_leaves_without_dims(backend):
    """Doubles among them were never written on aot_eager: Dynamo takes them for numbers."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool]
    state = {str(dtype): torch.ones((), dtype=dtype) for dtype in dtypes}
    step = jit(lambda s: {name: (x + x).to(x.dtype) for name, x in s.items()}, donate=0, backend=backend)
    for _ in range(3):
        state = step(state)
    assert {name: float(x) for name, x in state.items()} == {str(d): 1.0 if d == torch.bool else 8.0 for d in dtypes}
    assert len(step.cache) == 1


@pytest.mark.medium
def test_rolling_history():
    """Ring buffers: new leaf i is old leaf i - 1."""
    history = [torch.full((4,), float(i)) for i in range(5)]
    step = jit(lambda h: [h[-1] * 2, *h[:-1]], donate=0)
    for _ in range(2):
        history = step(history)
    assert [float(h[0]) for h in history] == [6.0, 8.0, 0.0, 1.0, 2.0]


def test_state_or_parameters_alone():
    """`train_step(params, batch) -> params` and any other position donate as well."""
    w = torch.ones(3)
    where = w.data_ptr()
    got = jit(lambda w, x: w - x, donate=0, backend="aot_eager")(w, torch.ones(3))
    assert got.data_ptr() == where and not got.any()
    a, b = torch.ones(2), torch.ones(2)
    where = b.data_ptr()
    got = jit(lambda a, b: (a + b, b * 3), donate=1, backend="aot_eager")(a, b)
    assert got[1].data_ptr() == where and got[1].tolist() == [3, 3]
    assert a.tolist() == [1, 1] and got[0].tolist() == [2, 2]


def test_a_jit_of_a_jit_has_its_own_options():
    x = torch.ones(2)
    where, step = x.data_ptr(), jit(jit(lambda x: x + 1), donate=0, backend="eager")
    x = step(x)
    assert x.data_ptr() == where and x.tolist() == [2, 2] and step(x).tolist() == [3, 3]


# ---- errors ----------------------------------------------------------------------------------------------------------
def tied():
    w = torch.ones(3)
    return {"a": w, "b": w[1:]}


@pytest.mark.parametrize(
    ("f", "args", "donate", "message"),
    [
        (lambda s: {"a": s["a"].double()}, [{"a": torch.ones(3)}], 0,
         r"donated leaf '0/a': got a new value of float64\[3\] on cpu, wanted float32\[3\] on cpu"),
        (lambda s: {"a": s["a"][:2]}, [{"a": torch.ones(3)}], 0, r"'0/a': got .*float32\[2\].*wanted float32\[3\]"),
        (lambda s, n: (s + 1, n), [torch.ones(3), 2], 2, "donate: got position 2, wanted one of .* 2 arguments"),
        (lambda s, n: (s + 1, n), [torch.ones(3), 2], -1, "donate: got position -1, wanted one of .* 2 arguments"),
        (lambda s: {"a": s["a"]}, [{"a": torch.ones(3), "b": torch.ones(3)}], 0, r"got missing leaves \['0/b'\]"),
        (lambda s: {"a": s["a"], "c": s["a"]}, [{"a": torch.ones(3)}], 0, r"additional leaves \['0/c'\]"),
        (lambda a, b: a + b, [torch.ones(3), torch.ones(3)], (0, 1), "got .* and one result, wanted a tuple"),
        (lambda s: {"a": s["a"] + 1, "b": s["b"]}, [tied()], 0, "leaves '0/a' and '0/b': got shared memory"),
        (lambda s: s + 1, [torch.ones(1).expand(3)], 0, "donated leaf '0': got an expanded tensor"),
    ],
    ids=["dtype", "shape", "position", "negative", "missing", "extra", "two for one", "tied", "expanded"],
)  # fmt: skip
def test_errors(f, args, donate, message):
    before = tiny.copied([x for x in tree.leaves(args) if isinstance(x, torch.Tensor)])
    with pytest.raises(ValueError, match=message):
        jit(f, donate=donate, backend="eager")(*args)
    after = [x for x in tree.leaves(args) if isinstance(x, torch.Tensor)]
    assert all(map(torch.equal, before, after))


def test_an_argument_that_shares_memory_with_a_donated_one():
    state = torch.ones(3)
    step = jit(lambda s, old: (s + 1, (s - old).sum()), donate=0, backend="eager")
    with pytest.raises(ValueError, match="leaves '0' and '1': got shared memory of which one is donated"):
        step(state, state)
    assert step(state, state.clone())[1] == 0
    halves = torch.ones(4)
    assert jit(lambda a, b: (a + 1, b.sum()), donate=0, backend="eager")(halves[:2], halves[2:])[1] == 2


@pytest.mark.parametrize("donate", [None, 0])
def test_only_the_outermost_donates(donate):
    """A step that donates may be wrapped and jitted again: inside it is a node, and its donate says nothing there."""

    @functools.partial(jit, donate=0, backend="eager")
    def inner(state, x):
        return {"a": state["a"] + x, "frozen": state["frozen"]}, {"sum": x.sum()}

    def outer(state, x):
        before = state["a"].sum()
        state, metrics = inner(state, x)
        return state, {**metrics, "before": before, "still": state["frozen"].sum()}

    state = {"a": torch.zeros(3), "frozen": torch.ones(2)}
    held, whole = tree.map(torch.clone, state), jit(outer, donate=donate, backend="eager")
    for _ in range(2):
        state, metrics = whole(state, torch.ones(3))
    assert torch.equal(state["a"], torch.full((3,), 2.0)) and torch.equal(state["frozen"], held["frozen"])
    assert (metrics["sum"], metrics["before"], metrics["still"]) == (3, 3, 2)
    alone = {"a": torch.zeros(3), "frozen": torch.ones(2)}
    inner(alone, torch.ones(3))
    with pytest.raises(ValueError, match="donated"):  # called by itself it donates
        alone["a"].sum()
