"""Batches depend on (seed, step) only: the same for any rank count, each window once an epoch, labels one ahead."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.data import Batches, EvaluationBatches, train_and_held_out
from fmegatron.data import order as data_order
from fmegatron.data.fingerprint import fingerprint
from fmegatron.data.tokens import TokenArray, write_tokens
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from fmegatron.testing import split

COUNTING = np.arange(10_000)  # token i is i, so a batch shows where it was cut


def part_of(batches, index, count):
    """What part `index` of `count` of every batch is given."""
    return batches.for_rank(batches.layout(Mesh(dp=count)), index)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(2, 400), seq_len=st.integers(1, 20), batch_size=st.integers(1, 12), seed=st.integers(0, 2**63)
)
def test_an_epoch_visits_every_window_once(length, seq_len, batch_size, seed):
    if length < seq_len + 1:
        return
    batches = Batches(COUNTING[:length], batch_size, seq_len, seed)
    epochs = 3
    steps = -(-epochs * batches.windows // batch_size)
    starts = torch.cat([batches.at(step)["tokens"][:, 0] for step in range(steps)])
    for epoch in range(epochs):
        seen = starts[epoch * batches.windows : (epoch + 1) * batches.windows].sort().values
        assert seen.tolist() == list(range(0, batches.windows * seq_len, seq_len))


@pytest.mark.medium
@settings(max_examples=60, deadline=None)
@given(
    count=st.sampled_from([1, 2, 3, 4, 6, 12]),
    step=st.integers(0, 10**9),
    seed=st.integers(0, 2**63),
    seq_len=st.integers(1, 30),
)
def test_the_parts_of_any_count_make_up_the_same_batch(count, step, seed, seq_len):
    batches = Batches(COUNTING, 12, seq_len, seed)
    whole = batches.at(step)
    parts = [part_of(batches, index, count).at(step) for index in range(count)]
    for name in ("tokens", "labels"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
        assert whole[name].shape == (12, seq_len) and whole[name].dtype == torch.int64 and whole[name].is_contiguous()
    assert torch.equal(whole["labels"], whole["tokens"] + 1)


@pytest.mark.medium
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    steps=st.integers(1, 9),
    seed=st.integers(0, 2**63),
    length=st.integers(40, 300),
)
def test_a_batch_size_may_change_and_no_sample_is_lost_or_shown_twice(sizes, steps, seed, length):
    """A run whose batch size changes a few times reads what one that reads row by row does."""
    step, samples, seen = 0, 0, []
    for size in sizes:
        batches = Batches(COUNTING[:length], size, 8, seed).after(samples, step)
        assert batches.samples(step) == samples
        seen += [batches.at(n)["tokens"][:, 0] for n in range(step, step + steps)]
        part = [part_of(batches, index, size).at(step)["tokens"][:, 0] for index in range(size)]
        assert torch.equal(torch.cat(part), seen[-steps])
        step += steps
        samples = batches.samples(step)
    one = Batches(COUNTING[:length], 1, 8, seed)
    assert torch.equal(torch.cat(seen), torch.cat([one.at(n)["tokens"][:, 0] for n in range(samples)]))


def test_positions_before_the_data():
    batches = Batches(COUNTING, 10, 8, 0).after(samples=12, step=3)  # before that it read batches of 4
    assert batches.at(3)["tokens"].shape == (10, 8) and batches.samples(4) == 22
    assert batches.after(None, 3).samples(3) == 30
    with pytest.raises(ValueError, match="got step 1, wanted 0 or more, from 2 on"):
        batches.at(1)
    with pytest.raises(ValueError, match="got -1 samples and 3 steps"):
        Batches(COUNTING, 10, 8, 0).after(-1, 3)


def test_fingerprints():
    """Of the ids, not of how they are stored; of long data too, in little time, from the first token to the last."""
    ids = np.random.default_rng(0).integers(0, 250, 3_000_000)
    prints = {fingerprint(ids.astype(dtype)) for dtype in ("uint8", "uint16", "int64", ">i4")}
    assert len(prints) == 1 and prints.pop().startswith("3000000 tokens, xxh3 ")
    assert len({fingerprint(COUNTING), fingerprint(COUNTING[::-1]), fingerprint(COUNTING[1:])}) == 3
    for at in (0, -1):
        other = ids.copy()
        other[at] += 1
        assert fingerprint(other) != fingerprint(ids)
    few = COUNTING.copy()
    few[5_000] += 1
    assert fingerprint(few) != fingerprint(COUNTING)


def test_batches_on_a_device():
    batches = Batches(COUNTING, 4, 8, seed=0)
    there = batches.for_rank(batches.layout(Mesh(dp=2)), 1, device="meta").at(0)
    assert {x.device.type for x in there.values()} == {"meta"} and there["tokens"].shape == (2, 8)


def test_pure_function_of_seed_and_step():
    a, b = Batches(COUNTING, 4, 16, seed=1), Batches(COUNTING, 4, 16, seed=1)
    later = a.at(700)
    for step in (0, 3, 700):
        assert torch.equal(a.at(step)["tokens"], b.at(step)["tokens"])
    assert torch.equal(later["tokens"], a.at(700)["tokens"])
    assert not torch.equal(a.at(0)["tokens"], a.at(1)["tokens"])
    assert not torch.equal(a.at(0)["tokens"], Batches(COUNTING, 4, 16, seed=2).at(0)["tokens"])


@pytest.mark.parametrize(
    "length, batch_size, seed, part, wanted",
    [
        (10_000, 8, 0, (0, 1), {0: "253 180 288 847 277 351 540 354", 124: "572 100 857 444 358 728 45 312",
                                125: "584 876 180 720 818 498 760 408", 1000: "498 56 102 329 992 482 643 872"}),
        (10_000, 12, 2**63, (2, 3), {0: "128 134 214 479", 83: "337 47 708 120", 10**9: "738 979 273 564"}),
        (101, 32, 5, (1, 4), {0: "4 0 0 2 9 7 4 8", 1: "0 6 8 9 1 2 3 5", 10**6: "0 9 8 1 7 5 0 3"}),
        (21, 5, 3, (0, 1), {0: "1 0 1 0 1", 7: "0 1 0 1 0"}),
    ],
    ids=["the end of an epoch inside a batch", "a part", "batches of several epochs", "two windows"],
)  # fmt: skip
def test_the_order_is_fixed_for_ever(length, batch_size, seed, part, wanted):
    """Resumed runs of a later version see the same data, in whatever blocks it computes the order."""
    batches = part_of(Batches(COUNTING[:length], batch_size, 10, seed), *part)
    for step, windows in wanted.items():
        assert batches.at(step)["tokens"][:, 0].tolist() == [10 * int(window) for window in windows.split()]


@pytest.mark.parametrize("count", [1, 4, 16])
def test_the_order_of_many_steps_is_computed_at_once(monkeypatch, count):
    """The shuffle is 0.9 of the time of a batch when it is made batch by batch."""
    calls = []
    permuted = data_order.permuted
    monkeypatch.setattr(data_order, "permuted", lambda *args: calls.append(args) or permuted(*args))
    batches = Batches(COUNTING, 16, 4, seed=19)
    steps, last = int(batches.steps_per_epoch), part_of(batches, count - 1, count)
    for step in range(steps):
        last.at(step)
    assert steps > 100 and len(calls) < 6


def test_whole_numbers_of_numpy_and_torch_are_whole_numbers():
    wanted = Batches(COUNTING, 4, 16, seed=1).after(12, 3)
    split = np.array([0, len(COUNTING)])
    got = Batches(COUNTING, np.int64(4), np.int32(16), 1, tuple(split)).after(torch.tensor(12), np.int64(3))
    assert torch.equal(got.at(torch.tensor(3))["tokens"], wanted.at(3)["tokens"])


def test_a_step_that_is_no_whole_number_is_refused():
    with pytest.raises(TypeError, match="integer"):
        Batches(COUNTING, 4, 16, seed=1).at(1.5)


def test_epochs_have_different_orders():
    batches = Batches(COUNTING[:9001], 100, 10, seed=0)
    assert batches.windows == 900 and batches.steps_per_epoch == 9
    first, second = (
        torch.cat([batches.at(step)["tokens"][:, 0] for step in range(start, start + 9)]) for start in (0, 9)
    )
    assert (first == second).float().mean() < 0.05


MESHES = [Mesh(dp=2, fsdp=2, tp=2), Mesh(tp=2, dp=4), Mesh(fsdp=3), Mesh(tp=2), Mesh(fsdp=2, dp=2), Mesh()]
STRATEGIES = [None, DataParallel("fsdp"), DataParallel(("fsdp", "dp"))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_rank_reads_what_the_layout_gives_it(mesh, strategy, microbatches):
    batches = Batches(COUNTING, 24, 8, seed=5)
    layout = batches.layout(mesh, strategy, microbatches)
    assert layout == (strategy or DataParallel()).batch_layout((24, 8), torch.int64, mesh, microbatches)
    whole = batches.at(7)
    parts = split(whole, {"tokens": layout, "labels": layout})
    for rank in range(mesh.size):
        got = batches.for_rank(layout, rank).at(7)
        assert all(torch.equal(got[name], parts[rank][name]) for name in whole)


def test_sequences_are_split_as_the_layout_says():
    mesh = Mesh(dp=2, cp=2)
    for columns in ("cp", Split("cp", 2)):
        layout = Layout((4, 8), torch.int64, mesh, ("dp", columns))
        for batches in (Batches(COUNTING, 4, 8, seed=5), EvaluationBatches(COUNTING, 4, 8, windows=6)):
            whole = batches.at(1)
            parts = split(whole, {name: layout.replace(dtype=x.dtype) for name, x in whole.items()})
            for rank in range(mesh.size):
                got = batches.for_rank(layout, rank).at(1)
                assert got.keys() == whole.keys() and all(torch.equal(got[n], parts[rank][n]) for n in whole)


def test_microbatches_are_the_same_rows_on_every_mesh():
    batches, n = Batches(COUNTING, 12, 8, seed=5), 3
    whole = batches.at(2)["tokens"]
    for mesh in (Mesh(dp=2), Mesh(dp=2, fsdp=2)):
        layout = batches.layout(mesh, microbatches=n)
        for m in range(n):
            rows = [batches.for_rank(layout, rank).at(2)["tokens"].chunk(n)[m] for rank in range(mesh.size)]
            assert torch.equal(torch.cat(rows), whole[m * 4 : (m + 1) * 4])


def test_only_the_own_rows_are_read():
    class Counted:
        reads = 0

        def __len__(self):
            return len(COUNTING)

        def __getitem__(self, index):
            self.reads += index.stop - index.start
            return COUNTING[index]

    tokens = Counted()
    batches = Batches(tokens, 12, 8, seed=0)
    batches.for_rank(batches.layout(Mesh(dp=4)), 1).at(0)
    assert tokens.reads == 3 * 9


def test_from_a_token_file(tmp_path):
    ids = COUNTING % 251
    batches = Batches(TokenArray(write_tokens(tmp_path / "t", ids)), 4, 32, seed=0)
    assert torch.equal(batches.at(5)["labels"], Batches(ids, 4, 32, seed=0).at(5)["labels"])


class Sliced:
    """Tokens that are no array: slices of them are."""

    def __init__(self, ids):
        self.given = ids

    def __len__(self):
        return len(self.given)

    def __getitem__(self, index):
        return self.given[index]


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", "<i8", "u1"])
@pytest.mark.parametrize("documents", [False, 3])
def test_tokens_in_every_form_give_the_same_batches(dtype, documents):
    """Arrays are read with one gather, also where they lie askew; others, and every second entry, by slices."""
    ids = np.random.default_rng(0).integers(0, 250, 1000).astype(dtype)
    shifted = np.frombuffer(b"\0" + ids.tobytes(), dtype, offset=1)
    forms = {"array": ids, "slices": Sliced(ids), "apart": np.repeat(ids, 2)[::2], "askew": shifted}
    for split_ in (None, (17, 17 + 64 + 1)):
        given = {name: Batches(x, 5, 16, 3, split_, documents=documents) for name, x in forms.items()}
        for step in (0, 1, 40):
            wanted = given["slices"].at(step)
            for batches in given.values():
                found = batches.at(step)
                assert list(found) == list(wanted) and all(torch.equal(found[name], x) for name, x in wanted.items())
    begin = ids.astype(np.int64).tolist()
    rows = Batches(ids, 1, 999, seed=0).at(0)
    assert (rows["tokens"].tolist(), rows["labels"].tolist()) == ([begin[:-1]], [begin[1:]])


def test_split_ranges_do_not_touch():
    train, held_out = train_and_held_out(COUNTING, 0.1)
    assert (train, held_out) == ((0, 9000), (9000, 10_000))
    batches = Batches(COUNTING, 9, 100, seed=0, split=train)
    assert max(batches.at(step)["labels"].max() for step in range(20)) < 9000
    evaluation = EvaluationBatches(COUNTING, 3, 100, split=held_out)
    for number in range(len(evaluation)):
        assert evaluation.at(number)["tokens"].min() >= 9000
    with pytest.raises(ValueError, match="held_out"):
        train_and_held_out(COUNTING, 10)


@pytest.mark.parametrize("batch_size, count", [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (8, 4), (16, 2)])
def test_evaluation_covers_the_range_for_every_batch_size(batch_size, count):
    evaluation = EvaluationBatches(COUNTING[:1000], batch_size, 64)  # 15 windows
    seen = []
    for number in range(len(evaluation)):
        layout = evaluation.layout(Mesh(dp=count))
        parts = [evaluation.for_rank(layout, rank).at(number) for rank in range(count)]
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        assert batch["tokens"].shape == (batch_size, 64)
        assert ("mask" in batch) == bool(15 % batch_size)
        mask = batch.get("mask", torch.ones(batch_size, 64, dtype=torch.bool))
        assert mask.sum() == evaluation.real_tokens(number)
        seen += batch["labels"][mask].tolist()
    assert seen == list(range(1, 15 * 64 + 1))


def test_evaluation_windows_are_spaced_evenly():
    evaluation = EvaluationBatches(COUNTING[:1001], 2, 10, windows=4)  # of 100
    assert [evaluation.at(number)["tokens"][:, 0].tolist() for number in range(2)] == [[0, 250], [500, 750]]
    assert "mask" not in evaluation.at(0)


ROWS_OF_8 = Layout((8, 8), torch.int64, Mesh(dp=3), ("dp",))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Batches(COUNTING, 0, 8, 0), "batch_size 0"),
        (lambda: Batches(COUNTING, 4, 0, 0), "seq_len 0"),
        (lambda: Batches(COUNTING, 4.0, 8, 0), r"batch_size: got 4.0 \(float\), wanted a whole number; pass int"),
        (lambda: Batches(COUNTING, True, 8, 0), r"batch_size: got True \(bool\)"),
        (lambda: EvaluationBatches(COUNTING, 4, "8"), r"EvaluationBatches: seq_len: got '8' \(str\)"),
        (lambda: Batches(COUNTING, 4, 8, 0).after(12.5, 3), r"after: samples: got 12.5 \(float\)"),
        (lambda: Batches(COUNTING, 4, 8, 0).after(None, 3.0), r"after: step: got 3.0 \(float\)"),
        (lambda: Batches(COUNTING[:8], 4, 8, 0), "got 8 tokens, wanted one window"),
        (lambda: Batches(COUNTING, 4, 8, 0, split=(0, 20_000)), "10,000 tokens"),
        (lambda: Batches(COUNTING, 4, 8, 0).at(-1), "step -1"),
        (
            lambda: Batches(COUNTING, 10, 8, 0).layout(Mesh(dp=4)),
            "got 10 rows, which 4 data-parallel .* wanted 8 or 12",
        ),
        (lambda: Batches(COUNTING, 2, 8, 0).layout(Mesh(dp=4)), "wanted 4; or use a mesh"),
        (lambda: Batches(COUNTING, 4, 8, 0).for_rank(Layout((4, 8), torch.int64, Mesh(dp=2)), 2), "got rank 2"),
        (lambda: Batches(COUNTING, 4, 8, 0).for_rank(ROWS_OF_8, 0), r"wanted one of shape \(4, 8\)"),
        (lambda: EvaluationBatches(COUNTING, 8, 8).for_rank(ROWS_OF_8, 0), "with equal parts"),
        (lambda: EvaluationBatches(COUNTING, 4, 8, windows=5000), "windows=5000"),
        (lambda: EvaluationBatches(COUNTING, 4, 8).at(-1), "got batch -1"),
    ],
)
def test_errors_for_people(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_layouts_of_a_batch_are_not_a_layout():
    batches = Batches(np.arange(100), batch_size=4, seq_len=8, seed=0)
    with pytest.raises(ValueError, match="for_rank: got a dict of labels, tokens as the layout, wanted one Layout"):
        batches.for_rank({name: batches.layout(Mesh()) for name in ("tokens", "labels")}, 0)


@pytest.mark.parametrize("tokens", [np.linspace(0, 1, 50), np.zeros(50, dtype=bool)])
def test_tokens_that_are_no_whole_numbers_are_refused(tokens):
    with pytest.raises(ValueError, match=r"tokens: got (float64|bool), wanted whole numbers; convert them"):
        Batches(tokens, 2, 8, seed=0)
