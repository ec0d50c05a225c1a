"""The eight modes of strictness (and two short names) against leaves that are missing, unexpected, both or neither."""

import warnings
from typing import NamedTuple

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, restore
from fmegatron.checkpoint.reading.strict import MODES
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import run

RAISE, WARN, RETURN = "raise", "warn", "return"
# mode: what it does about unexpected leaves (asked for, not stored) and missing ones (stored, not asked for)
TABLE = {
    "assume_ok_unexpected": (RAISE, None),
    "log_unexpected": (WARN, None),
    "log_all": (WARN, WARN),
    "raise_unexpected": (RAISE, None),
    "raise_all": (RAISE, RAISE),
    "return_unexpected": (RETURN, None),
    "return_all": (RETURN, RETURN),
    "ignore_all": (None, None),
    "error": (RAISE, RAISE),
    "subset": (RAISE, None),
}


def layout(mesh=None):
    return Layout((4,), torch.float32, mesh or Mesh())


STORED = {"params": {"wq": torch.arange(4.0), "wk": torch.arange(4.0) + 10}, "step": torch.ones(4)}
NOW = {"params": {"wq": -torch.ones(4), "wx": -torch.ones(4)}, "step": -torch.ones(4)}


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / "a", STORED, {"params": {"wq": layout(), "wk": layout()}, "step": layout()})
    return tmp_path / "a"


def target(missing, unexpected):
    """A target that does not name params/wk if `missing`, and names params/wx if `unexpected`."""
    params = {"wq": layout()} | ({} if missing else {"wk": layout()}) | ({"wx": layout()} if unexpected else {})
    return {"params": params, "step": layout()}


def test_every_mode_is_in_the_table():
    assert set(TABLE) == set(MODES)


@pytest.mark.long
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("unexpected", [False, True])
@pytest.mark.parametrize("mode", TABLE)
def test_modes(saved, mode, missing, unexpected, initial):
    on_unexpected, on_missing = TABLE[mode]
    layouts = target(missing, unexpected)
    now = {"params": {k: -torch.ones(4) for k in layouts["params"]}, "step": -torch.ones(4)} if initial else None
    raises = (unexpected and on_unexpected is RAISE) or (missing and on_missing is RAISE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if raises:
            with pytest.raises(ValueError) as error:
                restore(saved, layouts, strict=mode, initial=now)
            text = str(error.value)
            assert not isinstance(error.value, CheckpointError)
            assert ("params/wx: not in the checkpoint" in text) == unexpected
            assert ("not asked for: params/wk" in text) == (missing and on_missing is RAISE)
        else:
            got = restore(saved, layouts, strict=mode, initial=now)
    texts = [str(w.message) for w in caught]
    if raises:
        assert texts == []
        return
    wanted_texts = [
        *(["params/wx"] if unexpected and on_unexpected is WARN else []),
        *(["params/wk"] if missing and on_missing is WARN else []),
    ]
    assert len(texts) == len(wanted_texts) and all(path in text for path, text in zip(wanted_texts, texts, strict=True))
    assert all(w.category is RuntimeWarning and w.filename == __file__ for w in caught)
    if RETURN in (on_unexpected, on_missing):
        got, was_missing, was_unexpected = got
        assert was_missing == (("params/wk",) if missing else ())
        assert was_unexpected == (("params/wx",) if unexpected else ())
    wanted = {"params": {"wq": STORED["params"]["wq"]}, "step": STORED["step"]}
    if not missing:
        wanted["params"]["wk"] = STORED["params"]["wk"]
    if unexpected and initial:
        wanted["params"]["wx"] = now["params"]["wx"]
    assert set(got) == set(wanted) and set(got["params"]) == set(wanted["params"])
    assert torch.equal(got["step"], wanted["step"])
    assert all(torch.equal(got["params"][k], x) for k, x in wanted["params"].items())


def test_did_you_mean(saved):
    with pytest.raises(ValueError, match=r"params/wx: not in the checkpoint \(did you mean params/wk\?\)"):
        restore(saved, target(True, True))
    with pytest.warns(RuntimeWarning, match=r"left out:\n  params/wx \(did you mean params/wk\?\)"):
        restore(saved, target(True, True), strict="log_unexpected")
    with pytest.raises(
        ValueError, match=r"strict: got 'log', wanted one of 'error', .*\(did you mean 'log_all'|log_all"
    ):
        restore(saved, target(False, False), strict="log")


class Pair(NamedTuple):
    """A container that cannot do without an item."""

    a: object
    b: object


def test_only_items_of_dicts_can_be_left_out(tmp_path):
    checkpoint.save(tmp_path / "a", [{"x": torch.ones(4)}], [{"x": layout()}])
    got = restore(tmp_path / "a", [{"x": layout(), "y": layout()}], strict="ignore_all")
    assert list(got[0]) == ["x"]
    got = restore(tmp_path / "a", [{"x": layout(), "z": {"y": layout()}}], strict="ignore_all")
    assert got[0]["z"] == {}
    wanted = [{"x": layout()}, layout()]
    with pytest.raises(ValueError, match="1: not in the checkpoint, and its container is no dict.*pass initial="):
        restore(tmp_path / "a", wanted, strict="ignore_all")
    got = restore(tmp_path / "a", wanted, strict="ignore_all", initial=[{"x": torch.zeros(4)}, torch.full((4,), 7.0)])
    assert torch.equal(got[0]["x"], torch.ones(4)) and torch.equal(got[1], torch.full((4,), 7.0))
    with pytest.raises(ValueError, match="not in the checkpoint.*, and its container is no dict"):
        restore(tmp_path / "a", [Pair({"x": layout()}, layout())], strict="ignore_all")
    with pytest.raises(ValueError, match="not in the checkpoint.*, and its container is no dict"):
        restore(tmp_path / "a", layout(), strict="ignore_all")


def test_a_tuple_of_dicts_keeps_its_type(tmp_path):
    state = Pair({"x": torch.ones(4)}, [torch.zeros(4)])
    checkpoint.save(tmp_path / "a", state, Pair({"x": layout()}, [layout()]))
    got = restore(tmp_path / "a", Pair({"x": layout(), "y": layout()}, [layout()]), strict="ignore_all")
    assert isinstance(got, Pair) and list(got.a) == ["x"] and isinstance(got.b, list) and len(got.b) == 1


def test_initial_is_checked(saved):
    with pytest.raises(
        ValueError, match="(?s)initial: got another structure than the target layouts, wanted.*params/wx"
    ):
        restore(saved, target(False, True), strict="ignore_all", initial=STORED)


def test_several_ranks_restore_with_what_is_there(saved):
    mesh = Mesh(dp=2)
    wanted = {"params": {"wq": layout(mesh), "wx": layout(mesh)}}
    got = run(2, lambda world: restore(saved, wanted, world=world, strict="return_all"))
    for state, missing, unexpected in got:
        assert torch.equal(state["params"]["wq"], STORED["params"]["wq"]) and "wx" not in state["params"]
        assert (missing, unexpected) == (("params/wk", "step"), ("params/wx",))
