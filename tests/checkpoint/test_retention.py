"""Retention as a pure function: an independent statement of its rules, over generated runs."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.checkpoint.manage.retention import Keep, Saved, to_delete

NUMBERS = st.one_of(st.none(), st.floats(), st.integers(-3, 3), st.booleans(), st.just("0.5"))
SAVED = st.builds(
    Saved,
    st.integers(0, 60),
    st.one_of(st.none(), st.floats(0, 2000)),
    st.dictionaries(st.sampled_from(["loss", "accuracy"]), NUMBERS),
)
RUNS = st.lists(SAVED, max_size=25, unique_by=lambda s: s.step)
COUNT = st.one_of(st.none(), st.integers(1, 6))
BEST = st.one_of(
    st.none(), st.tuples(st.sampled_from(["loss", "accuracy"]), st.sampled_from(["min", "max"]), st.integers(1, 4))
)
RULES = st.fixed_dictionaries(
    {"last": COUNT, "every": COUNT, "best": BEST, "newer_than_s": st.one_of(st.none(), st.floats(1, 2000))}
).filter(lambda rules: any(rule is not None for rule in rules.values()))
NOW = 1000.0


def wanted(s, saved, rules):
    """Whether one step is wanted, from the words of the documentation, one rule at a time and without sorting."""
    newer = sum(other.step > s.step for other in saved)
    if newer == 0 or (rules["last"] is not None and newer < rules["last"]):
        return True
    if rules["every"] is not None and s.step % rules["every"] == 0:
        return True
    if rules["newer_than_s"] is not None and (s.saved_at is None or NOW - s.saved_at < rules["newer_than_s"]):
        return True
    if rules["best"] is not None:
        metric, mode, count = rules["best"]
        sign = 1 if mode == "min" else -1

        def value(x):
            v = x.metrics.get(metric)
            good = type(v) in (int, float) and math.isfinite(v)
            return sign * v if good else None

        mine = value(s)
        if mine is not None:
            better = [
                x for x in saved
                if (v := value(x)) is not None and (v < mine or (v == mine and x.step > s.step))
            ]  # fmt: skip
            return len(better) < count
    return False


@pytest.mark.medium
@settings(max_examples=400, deadline=None)
@given(RUNS, RULES, st.sets(st.integers(0, 60), max_size=5))
def test_exactly_what_no_rule_wants(saved, rules, protected):
    gone = to_delete(saved, Keep(**rules), protected, NOW)
    assert gone == sorted(s.step for s in saved if not wanted(s, saved, rules) and s.step not in protected)


@pytest.mark.medium
@settings(max_examples=200, deadline=None)
@given(RUNS, RULES, st.sets(st.integers(0, 60)), st.randoms())
def test_what_never_goes(saved, rules, protected, random):
    """The newest, the protected; nothing that is not there; the order of the listing does not matter; it is settled."""
    gone = to_delete(saved, Keep(**rules), protected, NOW)
    assert not set(gone) & protected and set(gone) <= {s.step for s in saved} and gone == sorted(set(gone))
    assert not saved or max(s.step for s in saved) not in gone
    mixed = random.sample(saved, len(saved))
    assert to_delete(mixed, Keep(**rules), protected, NOW) == gone
    left = [s for s in saved if s.step not in gone]
    assert to_delete(left, Keep(**rules), protected, NOW) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 300), unique=True, min_size=1, max_size=30), RULES)
def test_a_run_step_by_step(steps, rules):
    """Retention after every save, as a Manager does it: what it ends with holds what the rules want of all steps.

    (Newest, last and best of the survivors are those of the whole run, whatever went in between.)
    """
    rules = {**rules, "newer_than_s": None, "last": rules["last"] or 1}
    run, kept = [Saved(step, None, {"loss": step * 37 % 11}) for step in sorted(steps)], []
    for at in range(len(run)):
        kept.append(run[at])
        gone = to_delete(kept, Keep(**rules))
        kept = [s for s in kept if s.step not in gone]
    assert [s.step for s in run if s.step not in to_delete(run, Keep(**rules))] == [s.step for s in kept]


def test_no_policy_keeps_all():
    assert to_delete([Saved(1), Saved(2)], None) == []


def test_examples():
    run = [Saved(step, 10.0 * step, {"loss": loss}) for step, loss in ((1, 5.0), (2, 3.0), (3, 3.0), (4, 4.0))]
    assert to_delete(run, Keep(best=("loss", "min", 1))) == [1, 2]
    assert to_delete(run, Keep(best=("loss", "max", 1))) == [2, 3]
    assert to_delete(run, Keep(newer_than_s=15), now=42.0) == [1, 2]
    assert to_delete(run, Keep(last=1), protected={2}) == [1, 3]


@pytest.mark.parametrize(
    "rules, words",
    [
        ({}, "got no rule"),
        ({"last": 0}, "Keep.last: got 0"),
        ({"last": True}, "Keep.last: got True"),
        ({"every": 2.5}, "Keep.every: got 2.5"),
        ({"best": ("loss", "least", 1)}, "Keep.best: got"),
        ({"best": ("loss", "min")}, "Keep.best: got"),
        ({"best": ("loss", "min", 0)}, "Keep.best: got"),
        ({"best": "loss"}, "Keep.best: got"),
        ({"newer_than_s": 0}, "Keep.newer_than_s: got 0"),
        ({"newer_than_s": math.nan}, "Keep.newer_than_s: got nan"),
    ],
)
def test_rules_that_mean_nothing(rules, words):
    with pytest.raises(ValueError, match=words):
        Keep(**rules)


def test_a_metric_that_is_not_finite_is_not_among_the_best():
    saved = [Saved(step, metrics={"loss": loss}) for step, loss in ((1, -math.inf), (2, 3.0), (3, math.nan), (4, 9.0))]
    assert to_delete(saved, Keep(best=("loss", "min", 1))) == [1, 3]
