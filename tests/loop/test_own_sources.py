"""Sources of one's own in a run: the same rows on one and two ranks, read ahead, and resumed where they were."""

import functools
import math
import threading
import warnings
from dataclasses import dataclass, replace

import pytest
import torch

from fmegatron import checkpoint, data, loop, tree
from fmegatron.collectives import World, connect
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.loop import Faults, Log, Options, Run, Save
from fmegatron.loop.config import UsageError
from fmegatron.step import Description

ROWS = 8
EVERY_TWO = Options(log=Log(every=1), save=Save(every=2))
ALONE_OF_TWO = World(Mesh(dp=2), 0, torch.device("cpu"))  # rank 0, for what asks no other


def whole(position, scale=1.0):
    draw = torch.Generator().manual_seed(position)
    x = scale * torch.randn(ROWS, 4, generator=draw, dtype=torch.float64)
    return {"x": x, "mask": x[:, 0] > 0, "position": torch.tensor(position)}


class Rows(data.Source):
    """Reads what it is asked for; `at` only where nobody can know how many rows there are."""

    def __init__(self):
        self.asked, self.threads = set(), set()

    def at(self, position):
        self.threads.add(threading.current_thread().name)
        return self._without_number(whole(position))

    def rows(self, position, ranges):
        self.threads.add(threading.current_thread().name)
        self.asked.add(ranges)
        batch = self._without_number(whole(position))
        return {name: torch.cat([x[a:b] for a, b in ranges]) for name, x in batch.items()}

    @staticmethod
    def _without_number(batch):
        return {name: batch[name] for name in ("x", "mask")}

    def describe(self):
        return {"kind": "rows"}


@dataclass
class Empty:
    """No settings."""


class Counter(data.Source):
    """A position does not determine its batches: they follow from how many it has given."""

    def __init__(self, key="given"):
        self.given, self.key = 0, key

    def at(self, position):
        self.given += 1
        return whole(1000 + self.given)

    def state(self):
        return {self.key: self.given}

    def restore(self, state):
        self.given = state[self.key]


class CounterOfRows(Counter):
    """The same, of which each rank reads its own part; each has a state of its own."""

    def at(self, position):
        return self.rows(position, ((0, ROWS),))

    def rows(self, position, ranges):
        self.given += ranges[0][0] + 1  # another number on each rank
        batch = Rows._without_number(whole(2000 + self.given))
        return {name: torch.cat([x[a:b] for a, b in ranges]) for name, x in batch.items()}


class Loader:
    """As torchdata's, with a state_dict."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        while self.n % 5 or not self.n or True:
            self.n += 1
            yield whole(3000 + self.n)

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class Wrapped(data.Source):
    """What a user writes around a source: it counts what was read."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0

    def at(self, position):
        self.count += 1
        return self.inner.at(position)

    def rows(self, position, ranges):
        return self.inner.rows(position, ranges)

    def describe(self):
        return self.inner.describe()

    def state(self):
        return self.inner.state()

    def restore(self, state):
        self.inner.restore(state)


KINDS = {
    "function": lambda: data.source(whole),
    "lambda": lambda: data.source(lambda position: whole(position)),
    "partial": lambda: data.source(functools.partial(whole, scale=2.0)),
    "rows": Rows,
    "state": Counter,
    "stream": lambda: data.Stream(Loader()),
    "wrapped rows": lambda: Wrapped(Rows()),
    "wrapped state": lambda: Wrapped(Wrapped(Counter())),
    "wrapped batches": lambda: Wrapped(data.Batches(torch.arange(500).numpy(), ROWS, 4, seed=0)),
}


def described_by(mesh, batch):
    """The Description of a step that reads such batches."""
    specs = {"n": tree.ArraySpec(Layout((), torch.float64, mesh))}
    how = DataParallel("dp")
    rows = {name: how.batch_layout(tuple(x.shape), x.dtype, mesh) for name, x in batch.items()}
    return Description(lambda state, batch: (state, {}), specs, rows)


def reads(path, source, of, world=None, *, steps=5, leave=None, **options):
    """The batches that this rank's steps are given, copied; the loop is left after update `leave`."""
    seen = []

    def update(state, batch):
        assert all(tree.layout_of(x) is not None for x in tree.leaves(batch))
        seen.append({name: x.clone() for name, x in batch.items()})
        return {"n": state["n"] + 1}, {"loss": batch["x" if "x" in batch else "tokens"].double().sum()}

    run = Run(path, update, of, world=world, **{"options": EVERY_TWO, **options})
    for info in run(source, steps=steps):
        if info.step == leave:
            break
    return seen


def equal(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in zip(a, b, strict=True)
    )


def described(kind, mesh):
    """(source, its Description)."""
    first = whole(0)
    if "rows" in kind:
        first = Rows._without_number(first)
    if "batches" in kind:
        first = data.Batches(torch.arange(500).numpy(), ROWS, 4, seed=0).at(0)
    return described_by(mesh, first)


def all_kinds_on_a_rank(rank, folder):
    mesh, found = Mesh(dp=2), {}
    with connect(mesh, device="cpu") as world:
        for kind, make in KINDS.items():
            of = described(kind, mesh)
            for known, given in (("description", of), ("specs", of.state)):
                source = make()
                found[kind, known] = reads(f"{folder}/{kind}-{known}", source, given, world)
                inner = source.inner if kind == "wrapped rows" else source
                if kind.endswith("rows"):
                    assert inner.asked == ({((4 * rank, 4 * rank + 4),)} if known == "description" else set())
                    assert inner.threads == {"fmegatron-data-ahead"}
    return found


@pytest.mark.slow
def test_every_kind_on_one_and_two_ranks(tmp_path, ranks):
    first, second = ranks.run(all_kinds_on_a_rank, str(tmp_path / "two"), ranks=2)
    for kind, make in KINDS.items():
        of = described(kind, Mesh())
        for known, given in (("description", of), ("specs", of.state)):
            alone = reads(tmp_path / f"{kind}-{known}", make(), given)
            parts = [
                {name: torch.cat([x, b[name]]) if x.dim() else x for name, x in a.items()}
                for a, b in zip(first[kind, known], second[kind, known], strict=True)
            ]
            assert len(alone) == 5 and equal(parts, alone), (kind, known)
            if kind in ("function", "lambda", "rows"):
                assert all(torch.equal(x["x"], whole(n)["x"]) for n, x in enumerate(alone))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["function", "state", "stream", "wrapped state", "wrapped rows"])
def test_killed_and_resumed_is_uninterrupted(tmp_path, kind):
    """The run is left at step 5, saved at step 4, and has read further."""
    of = described(kind, Mesh())
    straight = reads(tmp_path / "a", KINDS[kind](), of, steps=9)
    source = KINDS[kind]()
    before = reads(tmp_path / "b", source, of, steps=9, leave=5)
    assert equal(before, straight[:5])
    assert equal(reads(tmp_path / "b", KINDS[kind](), of, steps=9), straight[4:])
    # In the same process the same object goes on, too, wherever its read-ahead was.
    reads(tmp_path / "c", again := KINDS[kind](), of, steps=9, leave=5)
    assert equal(reads(tmp_path / "c", again, of, steps=9), straight[4:])


def rows_with_state(rank, folder, mesh):
    with connect(mesh, device="cpu") as world:
        of = described("rows", mesh)
        straight = reads(f"{folder}/a", CounterOfRows(), of, world, steps=9)
        before = reads(f"{folder}/b", CounterOfRows(), of, world, steps=5)
        after = reads(f"{folder}/b", CounterOfRows(), of, world, steps=9)
        whole_before = reads(f"{folder}/c", Counter(), described("state", mesh), world, steps=5)
        return equal([*before, *after], straight), straight, len(whole_before)


def test_each_rank_has_a_state_of_its_own(tmp_path, ranks):
    got = ranks.run(rows_with_state, str(tmp_path), Mesh(dp=2), ranks=2)
    assert [same for same, *_ in got] == [True, True] and not equal(got[0][1], got[1][1])
    with pytest.raises(ValueError, match=r"states of a source on 2 ranks.*rows \[\[0, 4\]\]; \[\[4, 8\]\], wanted one"):
        reads(tmp_path / "b", CounterOfRows(), described("rows", Mesh()), steps=12)
    # One that reads whole batches goes on on any number of ranks.
    straight = reads(tmp_path / "alone", Counter(), described("state", Mesh()), steps=8)
    assert equal(reads(tmp_path / "c", Counter(), described("state", Mesh()), steps=8), straight[5:])


@pytest.mark.medium
def test_rows_along_other_axes_have_the_state_of_their_rows(tmp_path, ranks):
    """Saved on two ranks that read all rows, as tp does not cut them; gone on with on one."""
    got = ranks.run(rows_with_state, str(tmp_path), Mesh(tp=2), ranks=2)
    assert all(same for same, *_ in got)
    straight = reads(tmp_path / "alone", CounterOfRows(), described("rows", Mesh()), steps=12)
    assert equal(reads(tmp_path / "b", CounterOfRows(), described("rows", Mesh()), steps=12), straight[9:])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["function", "state", "stream"])
def test_a_roll_back_goes_on_without_the_bad_batch(tmp_path, kind):
    of = described(kind, Mesh())
    straight = reads(tmp_path / "a", KINDS[kind](), of, steps=11)
    bad, seen = straight[5]["x"], []

    def update(state, batch):
        seen.append(batch)
        broken = torch.equal(batch["x"], bad)
        scale = math.nan if broken else 1.0
        return {"n": state["n"] + scale}, {"loss": torch.tensor(scale)}

    run = Run(tmp_path / "b", update, of, options=replace(EVERY_TWO, faults=Faults(nonfinite="roll back")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [info.step for info in run(KINDS[kind](), steps=9)][-1] == 9
    assert checkpoint.metadata(run.manager.path(9))["skip"] == [[4, 6]]
    assert equal(seen[-5:], straight[6:])  # what was read since the checkpoint is left out


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.zeros(7, 4)},
            r"<lambda>: the batch of position 0: 'x': got \(7, 4\) .*, wanted \(8, 4\)",
        ),
        (
            {"x": torch.zeros(8, 4, dtype=torch.float64)},
            r"'x': got \(8, 4\) torch.float64, wanted .* torch.float32",
        ),
        ({"y": torch.zeros(8, 4)}, "got the arrays 'y', wanted 'x' among them, as the Description of the step has it"),
        (
            {"x": torch.zeros(8, 4), "y": torch.zeros(3)},
            r"'y': got \(3,\), wanted 8 rows, as the other",
        ),
        (
            {"x": tree.place(torch.zeros(8, 4), Layout((16, 4), torch.float32, Mesh(dp=2), ("dp",)))},
            "'x': got an array that is known to be a part, .*wanted the whole one",
        ),
    ],
    ids=["rows", "dtype", "name", "another", "part"],
)
def test_what_is_not_as_described_is_named(tmp_path, batch, message):
    of = described_by(Mesh(), {"x": torch.zeros(8, 4)})
    with pytest.raises(ValueError, match=message) as raised:
        reads(tmp_path, data.source(lambda position: batch), of)
    assert any(entry.name == "reads" for entry in raised.traceback)  # at the line of the loop


def test_rows_that_ranks_cannot_share(tmp_path):
    of = described("function", Mesh(dp=2))
    with pytest.raises(ValueError, match="own_rows: got the world of the mesh one rank, wanted dp2"):
        loop.own_rows(data.source(whole), of, World.alone())
    part = loop.own_rows(data.source(lambda position: {"x": torch.zeros(7, 4)}), of.state, ALONE_OF_TWO)
    with pytest.raises(ValueError, match=r"<lambda>: the batch of position 3: 'x': .*got 7 rows, which 2 data"):
        part.at(3)

    class Short(Rows):
        def rows(self, position, ranges):
            return {name: x[:3] for name, x in self.at(position).items()}

    part = loop.own_rows(Short(), described("rows", Mesh(dp=2)), ALONE_OF_TWO)
    with pytest.raises(ValueError, match=r"'mask': got shape \(3,\) of rows\(...\), wanted the 4 rows that"):
        part.at(0)


def test_what_a_resume_refuses(tmp_path):
    class Named(Rows):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def describe(self):
            return {"name": self.name}

    of = described("rows", Mesh())
    reads(tmp_path / "a", Wrapped(Named("one")), of)
    with pytest.raises(UsageError, match=r'data {"name": "one"} -> {"name": "two"}'):
        reads(tmp_path / "a", Named("two"), of, steps=7)
    of = described("state", Mesh())
    reads(tmp_path / "b", Counter(), of)
    with pytest.raises(ValueError, match="a checkpoint of step 5 with the state of its source and _Function"):
        reads(tmp_path / "b", data.source(whole), of, steps=7)
    with pytest.raises(ValueError, match="with the state of its source and Batches, which has none"):
        reads(tmp_path / "b", data.Batches(torch.arange(500).numpy(), ROWS, 4, seed=0), of, steps=7)
    reads(tmp_path / "c", data.source(whole), of)
    with pytest.raises(ValueError, match="a checkpoint of step 5 without a source's state and Counter, which has one"):
        reads(tmp_path / "c", Counter(), of, steps=7)


def test_a_function_that_closes_over_another_number_is_refused(tmp_path):
    """One that was computed of the mesh, say: the data would be others, and nothing would say so."""

    def scaled(by):
        return data.source(lambda position: whole(position, by))

    of = described("rows", Mesh())
    reads(tmp_path / "a", scaled(2.0), of)
    reads(tmp_path / "a", scaled(2.0), of, steps=6)
    with pytest.raises(UsageError, match=r'data {"uses": {"by": "2.0"}} -> {"uses": {"by": "3.0"}}'):
        reads(tmp_path / "a", scaled(3.0), of, steps=7)


def test_a_scratch_buffer_of_whatever_content_goes_on(tmp_path):
    """What a function fills is no number that its batches follow from, whatever was in it when the run began."""

    def filled(begins, by=2.0):
        buffer = torch.full((ROWS, 4), begins, dtype=torch.float64)  # as of torch.empty: anything

        def batch(position):
            buffer[:] = whole(position, by)["x"]
            return {"x": buffer.clone()}

        return data.source(batch)

    of = described_by(Mesh(), {"x": whole(0)["x"]})
    reads(tmp_path / "a", filled(1.0), of)
    assert checkpoint.metadata(tmp_path / "a" / "checkpoints" / "step_00000005")["written"] == ["buffer"]
    assert equal(reads(tmp_path / "a", filled(7.0), of, steps=6), [{"x": whole(5, 2.0)["x"]}])
    with pytest.raises(UsageError, match=r'"by": "2.0".*"by": "3.0"'):
        reads(tmp_path / "a", filled(7.0, 3.0), of, steps=7)


def test_a_name_that_only_one_of_two_functions_has_is_named(tmp_path, capsys):
    of, by, rate = described("rows", Mesh()), 2.0, 2.0
    reads(tmp_path / "a", data.source(lambda position: whole(position, by)), of)
    reads(tmp_path / "a", data.source(lambda position, also=1: whole(position, by)), of, steps=6)
    assert '"also": "1"' in capsys.readouterr().out
    reads(tmp_path / "a", data.source(lambda position: whole(position, rate)), of, steps=7)  # a name that changed
    assert '"by": "2.0"' in (said := capsys.readouterr().out) and '"rate": "2.0"' in said
    rate = 3.0
    with pytest.raises(UsageError, match="other settings"):
        reads(tmp_path / "a", data.source(lambda position: whole(position, rate)), of, steps=8)
    with pytest.raises(UsageError, match="other settings"):
        reads(tmp_path / "a", data.source(lambda position, by=4.0: whole(position, by)), of, steps=8)


def test_a_checkpoint_that_states_nothing_of_a_function_goes_on():
    """As of those that were written before functions stated what they use."""
    for fact in ({"kind": "function"}, None):
        before = {"config": {}, "facts": {} if fact is None else {"data": fact}}
        found = loop.Settings(Empty()).about(data=data.source(lambda position, by=2.0: whole(position, by)).describe())
        changes = found.changes(before)
        assert not changes.refused and "by" in "".join(changes.named)


def test_states_that_cannot_be_kept(tmp_path):
    of = described("state", Mesh())
    for key, words in ((3, "keys that are no texts"), ((1, 2), "keys must be str")):
        with pytest.raises(ValueError, match=rf"Counter.state: got .*wanted a JSON value \({words}"):
            reads(tmp_path / "a", Counter(key), of)

    class Late(Counter):
        def state(self):
            return super().state() if self.given else None

    with pytest.raises(ValueError, match="Late.state: got {'given': .*}, and None when the run began, wanted one from"):
        reads(tmp_path / "b", Late(), of)

    class NoRestore(data.Source):
        def at(self, position):
            return whole(position)

        def state(self):
            return 1

    with pytest.raises(TypeError, match="NoRestore.restore: got a state and a class without this method"):
        reads(tmp_path / "c", NoRestore(), of)


def test_only_sources_and_only_whole_ones(tmp_path):
    of = described("function", Mesh())
    rows = loop.own_rows(data.source(whole), of, World.alone())
    assert torch.equal(rows.at(2)["x"], whole(2)["x"])
    with pytest.raises(ValueError, match="Run: batches: got the part of one rank, wanted those of all"):
        reads(tmp_path, rows, of)
    with pytest.raises(ValueError, match="own_rows: got a function.*wanted a data.Source; give data.source"):
        loop.own_rows(whole, of, World.alone())
    with pytest.raises(ValueError, match="wanted a function from position to a batch; a data.Source needs none"):
        data.source(data.source(whole))
    with pytest.raises(TypeError, match="abstract"):
        data.Source()
