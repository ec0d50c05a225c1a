"""On two real ranks: steps with every combination of passes are equal to the bit, and the compiled code has the order
of the graph."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from fmegatron import tree
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Layout
from fmegatron.step import build_train_step, jit, layers, timeline
from fmegatron.step.timelines.planned import launched, launches
from fmegatron.testing import split
from fmegatron.testing.compare_ranks import relative_error
from tests.fresh_state import fresh_state
from tests.step import tiny
from tests.step.overlap.decoder import FSDP, config, free, train_step

NONE = free(depth=0, late_reductions=False, bucket_bytes=0, join_ends=False)
SETTINGS = (
    NONE,
    free(),
    free(depth=2, keep_last=True),
    free(depth=1, late_reductions=False, join_ends=False, separate_groups=True),
    free(depth=0, bucket_bytes=0, separate_groups=True),
    free(depth=3, ahead_bytes=16_000, keep_last=True, bucket_bytes=256),
)
STEPS = 3


def of_the_decoder(rank, **options):
    """(train step, this rank's state, this rank's batch at a step)."""
    of = config(2)
    state, n = tiny.decoder_state(of, FSDP, rank), options.get("microbatches", 1)

    def batch_at(i: int) -> dict:
        return tiny.decoder_batch(of, seed=i, mesh=FSDP, rank=rank, microbatches=n)

    return train_step(of, FSDP, **options), state, batch_at


def of_mlp_layers(rank):
    """The same of two layers of tiny.mlp, gathered for use: a third of the kernels."""
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, FSDP, ((), ("fsdp",))), tiny.mlp_params())
    axes = Axes(FSDP)

    def loss_fn(params, batch):
        x_BD = layers(tiny.mlp, params, layouts, axes)(batch["x"])
        loss = (x_BD - batch["y"]).square().sum() / 32
        return loss, {"loss": psum(loss.detach(), axes["fsdp"])}

    step = build_train_step(loss_fn, tiny.OPTIMIZER, layouts, axes)
    params = tree.place(tree.map(torch.clone, split(tiny.mlp_params(), layouts)[rank]), layouts, rank)
    rows = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, FSDP, ("fsdp",)), tiny.mlp_batch())
    return step, fresh_state(params, tiny.OPTIMIZER), lambda i: split(tiny.mlp_batch(seed=i), rows)[rank]


def some_steps(rank, world, overlap, backend, make=of_the_decoder, **options):
    """(the jit, losses and norms of some steps, the state after them)."""
    step, state, batch_at = make(rank, **options)
    step = jit(step, donate=0, world=world, backend=backend, overlap=overlap, patches=tiny.SCALAR)
    seen = []
    for i in range(STEPS):
        state, metrics = step(state, batch_at(i))
        seen += [metrics["loss"], metrics["grad_norm"]]
    return step, torch.stack(seen), state


def same_bits(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def compared(rank, settings, backend, **options):
    """For each setting: whether losses, norms and states are equal to those without overlap; the order of its graph."""
    with connect(FSDP) as world:
        _, wanted, state = some_steps(rank, world, False, backend, **options)
        found = []
        for setting in settings:
            step, seen, after = some_steps(rank, world, setting, backend, **options)
            found.append((torch.equal(seen, wanted), same_bits(after, state), launches(step.graph("donate"))))
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [SETTINGS[1::2], pytest.param(SETTINGS[::2], marks=pytest.mark.slow)], ids=["default", "others"]
)
def test_every_setting_gives_the_same_bits(ranks, settings):
    found = ranks.run(compared, settings, "eager", ranks=2)
    assert found[0] == found[1]
    assert [(a, b) for a, b, _ in found[0]] == [(True, True)] * len(settings)
    assert len({order for _, _, order in found[0]}) == len(settings)  # they do differ


def bytes_that_metrics_keep(rank):
    """(collectives of two sums over ranks, one of a number; bytes of the memory that the number lies in)."""
    with connect(FSDP) as world:
        axis = Axes(FSDP)["fsdp"]
        step = jit(lambda x: (psum(x.sum(), axis), psum(x, axis)), world=world, backend="eager", overlap=free(),
                   check=False)  # fmt: skip
        loss, _ = step(torch.ones(1000))
        return launches(step.graph("donate")), loss.item(), loss.untyped_storage().nbytes()


@pytest.mark.medium
def test_a_metric_does_not_keep_the_buffer_in_which_it_travelled(ranks):
    assert ranks.run(bytes_that_metrics_keep, ranks=2) == [("A0 w:A0", 2000.0, 4)] * 2


def with_microbatches(rank, settings):
    return compared(rank, settings, "eager", microbatches=2)


@pytest.mark.slow
@pytest.mark.long
def test_microbatches_give_the_same_bits(ranks):
    found = ranks.run(with_microbatches, [free(depth=2, separate_groups=True)], ranks=2)
    assert [pair[:2] for pair in found[0] + found[1]] == [(True, True)] * 2


# ---- compiled --------------------------------------------------------------------------------------------------------
def in_code(code: str, started: list[str]) -> str:
    """The order of generated code, in the words of `launches`; started: the graph's collectives, in order."""
    rest, names, counts, out = iter(started), {}, {}, []

    def number(letter):
        counts[letter] = counts.get(letter, 0) + 1
        return f"{letter}{counts[letter] - 1}"

    start = re.compile(r"(\w+) = torch\.ops\._c10d_functional\.(all_to_all_single|all_reduce)\w*\.default\(")
    for line in code.splitlines():
        if found := start.search(line):
            out.append(next(rest))
            names[found[1]] = out[-1]
        elif found := re.search(r"_c10d_functional\.all_reduce_\.default\((\w+)", line):
            out.append(next(rest))
            names[found[1]] = out[-1]
        elif found := re.search(r"wait_tensor\.default\((\w+)", line):
            out.append("w:" + names.get(found[1], "?"))
        elif found := re.search(r"fmegatron_compiled\.\w+_(fwd|bwd)_\w+\.default\(", line):
            out.append(number("F" if found[1] == "fwd" else "B"))
        elif found := re.match(r"\s+(\w+) = (\w+)(?:\[\d+\])?(?:\s+#.*)?$", line):
            if found[2] in names:  # an output of a coalesced collective
                names[found[1]] = names[found[2]]
    return " ".join(dict.fromkeys(out))


def generated(rank, overlap, backend, make):
    """(order of the graph, order of the code, whether all is equal to a step of a backend without overlap, to the bit
    if that is compiled, too; timeline of a call)."""
    with connect(FSDP) as world:
        _, wanted, state = some_steps(rank, world, False, backend, make)
        (step, seen, after), codes = run_and_get_code(some_steps, rank, world, overlap, "inductor", make)
        if backend == "inductor":
            equal = torch.equal(seen, wanted) and same_bits(after, state)
        else:
            pairs = zip([seen, *tree.leaves(after)], [wanted, *tree.leaves(state)], strict=True)
            equal = max(relative_error(a, b) for a, b in pairs) <= 1e-10
        graph = step.graph("exchange")
        return launches(graph), in_code(codes[-1], launched(graph)), equal, timeline(step, after, make(rank)[2](0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "setting", "backend"),
    [
        (of_mlp_layers, free(), "eager"),
        pytest.param(of_the_decoder, free(), "eager", marks=pytest.mark.slow),
        pytest.param(of_the_decoder, free(), "inductor", marks=pytest.mark.slow),
        pytest.param(of_the_decoder, free(depth=2, separate_groups=True), "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(ranks, make, setting, backend):
    gathers = 4 if make is of_mlp_layers else 5  # of two layers; the embedding travels with one, the head by itself
    for graph, code, equal, measured in ranks.run(generated, setting, backend, make, ranks=2):
        assert equal
        assert code == graph
        layers = [e.name for e in measured.events if e.name[0] in "FB"]
        assert layers == ["F0", "F1", "B0", "B1"]
        sent = [e.name for e in measured.events if e.lane != "compute"]
        assert sorted({n for n in sent if n[0] == "G"}) == [f"G{i}" for i in range(gathers)]
        assert "measured" in str(measured) and measured.duration > 0
