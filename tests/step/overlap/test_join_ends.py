"""The embedding travels with the first block under every policy of dtypes: counted, and equal to the bit."""

from collections import Counter

import pytest
import torch

from fmegatron.collectives import connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import collectives_of, jit
from fmegatron.step.graph.nodes import is_start, kind
from fmegatron.step.overlap.schedule import overlapped
from fmegatron.step.timelines.planned import launches
from fmegatron.step.traffic import bytes_sent
from tests.pairs import few
from tests.step import tiny
from tests.step.overlap.decoder import FSDP, POLICIES, config, free, lowered, state, train_step
from tests.step.overlap.test_ranks import same_bits

L = 2
HSDP = Mesh(dp=2, fsdp=2)
STRATEGIES = {"zero3": (DataParallel.zero3(), FSDP), "hsdp": (DataParallel.hsdp(), HSDP)}


def starts_over(graph, axis: str) -> Counter:
    """Collectives over one axis by their kind; the maximum that scales of 8 bits are made of on its own."""
    found = [n for n in graph.nodes if is_start(n) and n.args[-1] == f"fmegatron:{axis}"]
    return Counter("max" if n.args[1] == "max" else kind(n) for n in found)


def slow_but(kept, cases):
    """Cases as parameters, all but those to be kept marked slow."""
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.slow) for case in cases]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("strategy", "policy"),
    few(2, [(name, policy) for policy in POLICIES for name in STRATEGIES]),
)
def test_counts(strategy, policy):
    """2L+1 gathers, L+1 reduce-scatters, 1 all-reduce over the axis that shards (squares of the norm), in the order of
    fp32, and one over all that deal rows (totals of the loss, in fp64); HSDP sums over the other axis besides."""
    (strategy, mesh), scaled = STRATEGIES[strategy], policy.startswith("fp8")
    step = lowered(config(L, precision=POLICIES[policy]), mesh, strategy)
    joined, apart = (overlapped(step, free(join_ends=join)).graph for join in (True, False))
    scales, reduced = {"max": 1} if scaled else {}, 2 if mesh == FSDP else 1
    assert starts_over(joined, "fsdp") == Counter(gather=2 * L + 1, scatter=L + 1, reduce=reduced, **scales)
    assert starts_over(apart, "fsdp") == Counter(gather=2 * L + 2, scatter=L + 2, reduce=reduced, **scales)
    assert bytes_sent(collectives_of(joined, mesh)) == bytes_sent(collectives_of(apart, mesh))
    if mesh == FSDP:
        wanted = "G0 w:G0 G1 F0 w:G1 G2 F1 w:G2 G3 R0 w:G3 G4 B0 w:R0 R1 w:G4 B1 w:R1 R2 w:R2 A0 w:A0 A1 w:A1"
        scaled_first = "A0 w:A0 " + wanted.replace("A1", "A2").replace("A0", "A1")
        assert launches(joined) == (scaled_first if scaled else wanted)


# ---- equal to the bit ------------------------------------------------------------------------------------------------
def steps(rank, world, mesh, strategy, policy, overlap, backend="eager"):
    """(losses and norms of two steps, the state after them, order of the launches)."""
    of = config(1, precision=POLICIES[policy])
    step = jit(train_step(of, mesh, strategy=strategy), donate=0, world=world, backend=backend, overlap=overlap)
    now, seen = state(of, mesh, strategy, rank), []
    for i in range(2):
        now, metrics = step(now, tiny.decoder_batch(of, seed=i, mesh=mesh, rank=rank))
        seen += [metrics["loss"], metrics["grad_norm"]]
    return torch.stack(seen), now, launches(step.graph("donate")).split()


def compared(rank, name, policies, backend):
    """For each policy whether all is equal to a step without overlap, and how many collectives less it has."""
    strategy, mesh = STRATEGIES[name]
    with connect(mesh) as world:
        found = {}
        for policy in policies:
            seen, now, order = steps(rank, world, mesh, strategy, policy, free(), backend)
            wanted, without, plain = steps(rank, world, mesh, strategy, policy, False, backend)
            less = sum(name[0] in "GR" for name in plain) - sum(name[0] in "GR" for name in order)
            found[policy] = torch.equal(seen, wanted), same_bits(now, without), less
        return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "policies"),
    slow_but(
        [("zero3", ("bf16 wire",))],
        [("zero3", ("bf16 wire",)), ("zero3", tuple(POLICIES)), ("hsdp", ("fp8", "bf16 wire"))],
    ),
)
def test_every_policy_gives_the_same_bits(ranks, name, policies):
    """Two ranks for each sum, which then has one order."""
    for found in ranks.run(compared, name, policies, "eager", ranks=STRATEGIES[name][1].size):
        assert found == dict.fromkeys(policies, (True, True, 2))


@pytest.mark.slow
def test_compiled(ranks):
    policies = ("bf16", "bf16 wire")
    for found in ranks.run(compared, "zero3", policies, "inductor", ranks=2):
        assert found == dict.fromkeys(policies, (True, True, 2))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("ranks", "joined"), [(2, 1), (4, 0)])
def test_a_sum_of_the_library_keeps_its_order(ranks, joined):
    """Its reduce-scatter shares a buffer with sums that are made here between two ranks only: sums have one order."""
    of = lowered(config(1, precision=POLICIES["sums in bf16"]), Mesh(fsdp=ranks), DataParallel.zero3())
    with_ends, without = (starts_over(overlapped(of, free(join_ends=join)).graph, "fsdp") for join in (True, False))
    assert without["scatter"] - with_ends["scatter"] == joined
