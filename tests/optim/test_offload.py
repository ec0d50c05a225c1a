"""State in host memory: the plan is right for any number of chunks and slots, and running it is a plain update."""

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.optim import Bfloat16, NoMaster, Offloaded, chunks_of, compressed, int8, offload_schedule, to_host
from fmegatron.step import jit
from tests.optim.table import assert_same, grads_of


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_every_chunk_once_and_no_slot_twice(count, slots):
    actions = offload_schedule(count, slots)
    assert sorted((a.chunk, a.kind) for a in actions) == sorted(
        (c, kind) for c in range(count) for kind in ("fetch", "update", "store")
    )
    for lane in ("fetch", "update", "store"):
        assert [a.chunk for a in actions if a.kind == lane] == list(range(count))
    for i, action in enumerate(actions):
        assert all(j < i for j in action.after) and action.slot == action.chunk % slots
    before = [set() for _ in actions]  # everything that has surely happened: by waits, or earlier on the same lane
    for i, action in enumerate(actions):
        earlier = [j for j in range(i) if actions[j].kind == action.kind]
        for j in (*action.after, *earlier[-1:]):
            before[i] |= before[j] | {j}
        done = {(actions[j].kind, actions[j].chunk) for j in before[i]}
        if action.kind != "fetch":
            assert ({"update": "fetch", "store": "update"}[action.kind], action.chunk) in done
        elif action.chunk >= slots:
            assert ("store", action.chunk - slots) in done


def test_lanes_overlap():
    """With three slots a fetch waits for nothing that runs now: the next chunk comes in while this one is updated."""
    actions = offload_schedule(6, 3)
    at = {(a.kind, a.chunk): i for i, a in enumerate(actions)}
    for chunk in range(4):
        assert at["fetch", chunk + 2] < at["update", chunk] < at["store", chunk]
    assert all(not actions[at["fetch", c]].after for c in range(3))
    with pytest.raises(ValueError, match="slots: got 0"):
        offload_schedule(3, 0)


def make(rules):
    shapes = {"a": (8, 16), "b": {"w": (16, 8), "norm": (8,)}, "w": (4, 4), "scale": ()}
    generator = torch.Generator().manual_seed(0)
    params = tree.map(lambda x: torch.randn(x, generator=generator).to(torch.bfloat16), _sizes(shapes))
    opt = compressed(optim.adamw(1e-2), rules) if rules else optim.adamw(1e-2)
    return opt, params


def _sizes(shapes):
    return {k: _sizes(v) if isinstance(v, dict) else torch.Size(v) for k, v in shapes.items()}


RULES = {
    "fp32": [],
    "int8": [("m", int8(block=4, smallest=32)), ("v", Bfloat16(stochastic=True)), ("master", NoMaster())],
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_streamed_is_plain(rules, slots):
    opt, params = make(rules)
    state = to_host(opt.init(params))
    where = [x.data_ptr() for x in tree.leaves(state)]
    run = Offloaded(opt, params, state, chunk_bytes=1024, slots=slots)
    assert len(run.chunks) > 2 and run.device_bytes <= slots * max(chunk.nbytes for chunk in run.chunks)
    wanted = (params, opt.init(params))
    for i in range(4):
        grads = grads_of(params, i)
        wanted = opt.update(grads, wanted[1], wanted[0])
        params, state = run(grads, state, params)
        run.wait()
        assert_same((params, state), wanted)
    assert [x.data_ptr() for x in tree.leaves(state)] == where


@pytest.mark.filterwarnings("ignore:update is compiled again")  # for each chunk
def test_a_jitted_update_writes_where_it_was_fetched():
    opt, params = make([])
    state = to_host(opt.init(params))
    update = jit(opt.update, donate=1, backend="aot_eager")
    run, wanted = Offloaded(opt, params, state, chunk_bytes=2048, update=update), (params, opt.init(params))
    for i in range(2):
        grads = grads_of(params, i)
        wanted = opt.update(grads, wanted[1], wanted[0])
        params, state = run(grads, state, params)
        assert_same((params, state), wanted)
    assert len(update.cache) == len(run.chunks)


def test_chunks_and_errors():
    opt, params = make(RULES["int8"])
    state = opt.init(params)
    chunks = chunks_of(params, state, 2048)
    assert [p for chunk in chunks for p in chunk.params] == tree.paths(params)
    assert sorted(path for chunk in chunks for path in chunk.state) == sorted(set(tree.paths(state)) - {"count"})
    of_b = next(chunk.state for chunk in chunks if "b/w" in chunk.params)
    assert {"adam/m/b/w/codes", "adam/m/b/w/scale", "adam/v/b/w"} <= set(of_b)
    assert all(len(c.params) == 1 or c.nbytes <= 2048 for c in chunks)
    with pytest.raises(ValueError, match="skip_nonfinite"):
        Offloaded(optim.skip_nonfinite(opt), params, state)
    with pytest.raises(ValueError, match="q: got a state of shape"):
        chunks_of(params, {"q": torch.zeros(3)}, 10)


def test_a_path_of_the_state_that_ends_like_two_parameters():
    """ "adam/m/w" is the moment m of "w", though "m/w" is a parameter too."""
    params = {"w": torch.ones(4), "m": {"w": torch.ones(4)}}
    chunks = chunks_of(params, optim.adamw(1e-3).init(params), chunk_bytes=1)
    owned = {path: chunk.params for chunk in chunks for path in chunk.state if path != "count"}
    assert owned["adam/m/w"] == ("w",) and owned["adam/m/m/w"] == ("m/w",)
