"""Every pair of a schedule, a placement, and what a stage may have inside: dense cases, one a schedule and strategy.

With those of `test_cover` each pair is there at least once; a schedule and a strategy are one each in a case, so that
there are no fewer than 6 x 3.
"""

import itertools

import pytest

from tests.step.pipeline import test_cover
from tests.step.pipeline.hand import worst
from tests.step.pipeline.test_cover import ROUTER, SP, Case

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "dualpipe_v")
STRATEGIES = {"zero1": "dp", "zero2": "fsdp", "zero3": "fsdp"}
INSIDE = ("uneven", "tied", "tp", "cp", "ep", "mtp", "z-loss", "router", "mask", "dropout", "remat", "offload")


def dense(schedule: str, strategy: str) -> Case:
    """As much as goes together on 8 ranks."""
    data, turn = STRATEGIES[strategy], (SCHEDULES.index(schedule) + list(STRATEGIES).index(strategy)) % 3
    stages = (2, 1, 1, 1) if schedule in ("interleaved", "zb_v", "dualpipe_v") else (2, 1)
    mesh = {data: 2} | ({"tp": 2} if turn == 0 else {"cp": 2} if turn == 1 else {})
    experts = ROUTER | ({"ep": (data,)} if turn == 2 or SCHEDULES.index(schedule) % 2 else {})
    decoder = {"layers": sum(stages), "tied": True, "mtp": True, "z_loss": 1e-2, "dropout": 0.1, "experts": experts}
    return Case(
        schedule,
        stages,
        mesh,
        strategy,
        decoder | (SP if turn == 0 else {}),
        {"save": "mincut", "offload": 1},
        mask=True,
    )


CASES = {f"{schedule} {strategy}": dense(schedule, strategy) for schedule in SCHEDULES for strategy in STRATEGIES}


def properties(case: Case) -> set[str]:
    """What a case has."""
    decoder, experts = case.decoder, case.decoder.get("experts") or {}
    there = {
        "uneven": len(set(case.stages)) > 1,
        "tied": decoder.get("tied"),
        "tp": decoder.get("sequence_parallel"),
        "cp": case.mesh.get("cp"),
        "ep": experts.get("ep"),
        "mtp": decoder.get("mtp"),
        "z-loss": decoder.get("z_loss"),
        "router": "sequence_balance" in experts,
        "mask": case.mask,
        "dropout": decoder.get("dropout"),
        "remat": case.loss.get("save"),
        "offload": case.loss.get("offload"),
    }
    return {case.schedule, case.strategy} | {name for name, yes in there.items() if yes}


def test_every_pair_is_there():
    wanted = {frozenset(pair) for pair in itertools.combinations(INSIDE, 2)}
    for one, other in ((SCHEDULES, STRATEGIES), (SCHEDULES, INSIDE), (tuple(STRATEGIES), INSIDE)):
        wanted |= {frozenset(pair) for pair in itertools.product(one, other)}
    every = [*CASES.values(), *test_cover.CASES.values()]
    found = {frozenset(pair) for case in every for pair in itertools.combinations(properties(case), 2)}
    assert not wanted - found and len(wanted) == 192
    assert all(case.mesh.get("tp", 1) * case.mesh.get("cp", 1) <= 2 for case in CASES.values())  # 8 ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_update(name):
    found, report = test_cover.updated(CASES[name], True)
    error, path = worst(test_cover.updated(CASES[name], False)[0], found)
    assert error <= 1e-10, path
    assert report.ok, report
