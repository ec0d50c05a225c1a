"""A source of leaves that an outsider writes: what restores and tools ask of it, on any mesh, and what is refused."""

import contextlib
from functools import partial

import pytest
import torch

from fmegatron import checkpoint, interop, tree
from fmegatron.checkpoint import CheckpointError, Foreign, Leaf, Source
from fmegatron.checkpoint.tools import reshard, verify
from fmegatron.checkpoint.tools.differences import diff
from fmegatron.checkpoint.tools.resharding import plan_of, target_layouts
from fmegatron.checkpoint.tools.show import show
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run

SHAPES = {"a/w": (6, 20, 3), "a/b": (7,), "one": (), "none": (0, 3)}


class Numbers(Source):
    """Leaf after leaf, whole numbers counting on from one to the next. pins: how many blocks hold it now, and ever."""

    def __init__(self, digest=7, dtype="float64"):
        self._digest, self._dtype, self.pins, self.boxes = digest, dtype, [0, 0], []
        self.full, at = {}, 0
        for path, shape in SHAPES.items():
            n = torch.Size(shape).numel()
            self.full[path] = torch.arange(at, at + n, dtype=torch.float64).view(shape).to(getattr(torch, dtype))
            at += n

    kind = text = "numbers"

    @property
    def digest(self):
        return self._digest

    @property
    def leaves(self):
        return {path: Leaf(path, shape, self._dtype) for path, shape in SHAPES.items()}

    def fill(self, wanted, verify=True):
        assert self.pins[0] == 1 or self.pins[1] == 0, "what is opened for a restore is pinned while it is read"
        for path, targets in wanted.items():
            for target in targets:
                self.boxes.append((path, target.box.start, target.box.shape))
                target.view.copy_(self.full[path][target.box.slices])

    @contextlib.contextmanager
    def pinned(self):
        self.pins[0] += 1
        self.pins[1] += 1
        yield
        self.pins[0] -= 1


def layouts_on(mesh, dtype=torch.float64):
    specs = {"a/w": ("fsdp", "tp"), "a/b": ("tp",), "one": (), "none": (None, "tp")}
    flat = {path: Layout(shape, dtype, mesh, specs[path]) for path, shape in SHAPES.items()}
    return {"a": {"w": flat["a/w"], "b": flat["a/b"]}, "one": flat["one"], "none": flat["none"]}


def state_of(source):
    full = source.full
    return {"a": {"w": full["a/w"], "b": full["a/b"]}, "one": full["one"], "none": full["none"]}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=3), Mesh(tp=5)], ids=str)
@pytest.mark.parametrize("read", ["own", "once"])
def test_any_mesh(mesh, read):
    """Every rank gets its shards; ranks that share a shard share the reading, and read all of it between them."""
    layouts = layouts_on(mesh)
    sources = [Numbers() for _ in range(mesh.size)]
    read = read if mesh.size > 1 else "own"

    def rank(world):
        opened = Foreign("numbers", lambda: sources[world.rank])
        return checkpoint.restore(opened, layouts, world=world, read=read)

    found = run(mesh.size, rank)
    shards = cut_tree(state_of(sources[0]), layouts)
    for number, got in enumerate(found):
        assert not isinstance(got, BaseException), got
        assert_same_bits(got, shards[number])
    assert all(source.pins == [0, 1] for source in sources)
    if read == "once":
        whole = zip(tree.leaves(state_of(sources[0])), tree.leaves(layouts), strict=True)
        taken = sum(torch.Size(shape).numel() for s in sources for _, _, shape in s.boxes)
        assert taken == sum(x.numel() for x, _ in whole)


@pytest.mark.slow
def test_ranks_that_see_two_of_them_are_told():
    layouts = layouts_on(Mesh(fsdp=2, tp=1))
    found = run(
        2, lambda world: checkpoint.restore(Foreign("numbers", partial(Numbers, world.rank)), layouts, world=world)
    )
    assert all(isinstance(error, RuntimeError) for error in found), found
    assert all("numbers: the ranks see different saves of it: rank 0 has step None (digest 0" in str(e) for e in found)


def test_an_error_of_opening_is_one_of_all_ranks():
    def look(rank):
        if rank:
            raise CheckpointError("numbers: gone; download it again")
        return Numbers()

    layouts = layouts_on(Mesh(fsdp=2, tp=1))
    found = run(
        2, lambda world: checkpoint.restore(Foreign("numbers", partial(look, world.rank)), layouts, world=world)
    )
    assert all("numbers: gone; download it again" in str(error) for error in found), found


def test_what_it_is_asked_for_is_refused_before_it_is_read():
    source = Numbers()
    wrong = layouts_on(Mesh())
    wrong["one"] = Layout((2,), torch.float64, Mesh())
    with pytest.raises(
        ValueError, match=r"numbers: got leaves .*\n  one: stored with global shape \(\), wanted \(2,\)"
    ):
        checkpoint.restore(source, wrong)
    assert source.boxes == []


def test_the_reading_tools(tmp_path):
    """describe, layouts, metadata, explain, show, diff; and reshard, which makes one of ours of it."""
    source = Numbers(dtype="float32")
    about = checkpoint.describe(source)
    assert (about.format, about.leaves, about.step, about.path) == ("numbers", 4, None, "numbers")
    assert about.total_bytes == sum(x.nbytes for x in source.full.values()) and about.metadata == {}
    flat = checkpoint.layouts(source)
    assert flat["a"]["w"] == Layout((6, 20, 3), torch.float32, Mesh()) and set(flat) == {"a", "one", "none"}
    reads = checkpoint.explain(source, layouts_on(Mesh(fsdp=2, tp=2), torch.float32), 3)
    assert sum(read.nbytes for read in reads) == 4 * (3 * 10 * 3 + 3 + 1)
    assert [row.path for row in show(source, stats=True).leaves] == list(SHAPES)
    plans = plan_of(target_layouts(source, [Mesh(fsdp=2)]))
    reshard(source, tmp_path / "ours", plans)
    assert not verify(tmp_path / "ours").damages
    with checkpoint.open_snapshot(tmp_path / "ours") as ours:
        values = {"ignore": frozenset(["layouts"])}
        assert diff(source, ours, **values).equal and diff(ours, source, read_all=True, **values).equal
        assert not diff(Numbers(dtype="float64"), ours, **values).equal
        source.full["a/w"][2, 3, 1] += 1
        assert [row.path for row in diff(source, ours, **values).leaves] == ["a/w"]
    with pytest.raises(ValueError, match="numbers: got numbers, which have no checksums, wanted files that can be"):
        verify(source)


def test_a_class_that_lacks_a_part_cannot_be_made():
    class Half(Source):
        kind = text = "half"
        digest = 1

    with pytest.raises(TypeError, match="abstract methods? '?fill'?, '?leaves'?"):
        Half()


def test_a_run_that_begins_with_it(tmp_path):
    with checkpoint.Manager(tmp_path / "run", show_progress=False) as manager:
        step, state, metadata = checkpoint.start(manager, Foreign("numbers", Numbers), layouts_on(Mesh()), rank=0)
    assert (step, metadata) == (0, {})
    assert_same_bits(state, state_of(Numbers()))


def test_scalars_alone_are_shared_among_replicas():
    """Once a division by the bytes that they were said not to have."""
    layouts = {"one": Layout((), torch.float64, Mesh(dp=2))}
    options = {"read": "once", "strict": "subset"}
    found = run(2, lambda world: checkpoint.restore(Foreign("numbers", Numbers), layouts, world=world, **options))
    assert [got["one"].item() for got in found] == [Numbers().full["one"].item()] * 2


def test_what_two_boxes_have_in_common_is_read_once(tmp_path):
    """Of a shard of DCP, which is read in full."""
    interop.save_dcp(tmp_path / "dcp", {"w": torch.arange(32.0).view(8, 4)})
    source = interop.source(tmp_path / "dcp")
    one, two = ({"w": Layout((8, 4), torch.float32, Mesh(tp=2), (Split(("tp",), n),))} for n in (1, 2))
    assert [len(layouts["w"].boxes(0)) for layouts in (one, two)] == [1, 2]
    (a,), (b,) = checkpoint.explain(source, one), checkpoint.explain(source, two)
    assert a.nbytes == b.nbytes > 32 * 4
