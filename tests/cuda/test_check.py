"""`make check-cuda`: a dense step is as promised on an H100, mistakes are found, the cover leaves nothing out."""

import dataclasses
import shutil

import pytest

from fmegatron import model, optim
from fmegatron.plan.cuda import codegen, faults
from tests.cuda import check, cover
from tests.house import ROOT

MUTANTS = {  # of `mutants.py` -> what is said of it
    "right": "",
    "constant_on_cpu": "is on the host; give it device=x.device",
    "item": "cannot be traced or lowered for CUDA: ValueError",
    "there_and_back": "is on the host",
    "dense_mask": "has a value for each pair of positions: [176, 176]",
    "dense_scores": "attention: got the kernels [], promised ['cudnn']",
    "of_cpu_only": "has no kernel on CUDA",
    "real_tensor": "Torch not compiled with CUDA enabled",
}
WITHOUT = "left out: no g++, with which check-cuda builds what a CPU build of torch lacks"
NONE: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def looked():
    """What is found of a dense step and of the mutants, by name, from one process; None without g++."""
    if shutil.which("g++") is None:
        return None
    names = ["dense", *(f"tests/cuda/mutants.py:{name}" for name in MUTANTS)]
    return {found["case"].rpartition(":")[2]: found for found in check.look(names)}


def test_a_dense_step_is_as_promised(looked):
    """(a) to (c): nothing on the host, no wait, cuDNN's attention once a layer forward and backward, no scores."""
    if looked is None:
        return print(WITHOUT)
    found = looked["dense"]
    assert check.wrong(found, cover.promise(cover.DENSE)) == []
    name = "scaled_dot_product_cudnn_attention"
    assert found["attention"] == {name: 2, f"{name}_backward": 2}
    assert found["graphs"] == {"block_fwd": 2, "block_bwd": 2, "step": 1}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(looked, name):
    if looked is None:
        return print(WITHOUT)
    faults = check.wrong(looked[name], cover.Promise(frozenset({"cudnn"}), False))
    assert any(MUTANTS[name] in fault for fault in faults) if MUTANTS[name] else faults == [], faults


def test_its_code_is_as_it_was():
    """(d) and (e): Inductor's code for an H100, as many kernels and launches as it had, machine code without spills."""
    pytest.importorskip("triton", reason="make check-cuda installs it (700 MB)")
    if shutil.which("g++") is None:
        return print(WITHOUT)
    (found,) = check.look(["dense"], code=True)
    assert check.wrong(found, cover.promise(cover.DENSE)) == []
    assert found["what"] in check.golden() and check.differences(found, check.golden()) == []


# ---- nothing is left out ---------------------------------------------------------------------------------------------
def test_the_cover_has_every_pair_and_every_family_strategy_and_form():
    assert cover.left_out(cover.CASES) == []
    assert cover.CASES == pairs_again() and len(cover.CASES) < 80


def pairs_again():
    """The cases, made once more: they depend on nothing but the options."""
    return cover._spread()


def test_a_case_that_is_left_out_is_missed():
    """The only ones of a family, of a strategy, of a pair."""
    for name, value in (("family", "bamba"), ("strategy", "hybrid"), ("axes", "ring"), ("optimizer", "muon")):
        fewer = [case for case in cover.CASES if case[name] != value]
        assert f"{name} {value}" in cover.left_out(fewer)
    assert any("mask sinks with" in text for text in cover.left_out([c for c in cover.CASES if c["mask"] != "sinks"]))
    assert any(cover.left_out([case for case in cover.CASES if case is not left]) for left in cover.CASES)


def test_every_experiment_is_looked_at():
    """A new one is a case by being there; those that have no step of their own stand in APART with the reason."""
    assert set(cover.APART) <= set(cover.experiments())
    for name in set(cover.experiments()) - set(cover.APART):
        assert "def describe(" in (ROOT / "experiments" / f"{name}.py").read_text(), f"{name}: a case, or in APART"


def test_every_optimizer_and_field_of_attention_is_known():
    """What decides who sees whom is a mask of the cover; a new field of attention is one, or is named here."""
    rest = {"heads", "kv_heads", "head_dim", "rope", "scale", "bias", "out_bias", "qk_norm", "kv_copies", "context"}
    masks = {name for fields in cover.MASKS.values() for name in fields}
    assert {field.name for field in dataclasses.fields(model.Attention)} == rest | masks
    used = {name for make in cover.OPTIMIZERS.values() for name in make.__code__.co_names}
    for room in (optim, optim.contrib):
        made = {n for n in room.__all__ if str(getattr(room, n).__annotations__.get("return")) == "Optimizer"}
        assert made - {"optimizer"} <= used, f"an optimizer is in no case: {made - used}"


# ---- what is said ----------------------------------------------------------------------------------------------------
GOOD = {"host": [], "cpu only": [], "waits": [], "attention": {}, "scores": []}


@pytest.mark.parametrize(
    "found,promised,text",
    [
        ({"waits": ["a wait"]}, cover.Promise(NONE, False), "a wait"),
        ({"scores": ["scores"]}, cover.Promise(NONE, False), "scores"),
        ({}, cover.Promise(NONE, True), "the host does not wait any more"),
        ({"spills": ["k"]}, None, "registers spill: k"),
        ({"wrapper waits": ["x.item()"]}, None, "x.item()"),
        ({"code": {"step": {"calls": {"torch.ops.aten.sort.default": 1}}}}, None, "sort.default, which is not allowed"),
    ],
)
def test_what_is_not_as_promised_is_said(found, promised, text):
    assert check.wrong(GOOD, cover.Promise(NONE, False)) == []
    assert any(text in fault for fault in check.wrong(GOOD | found, promised))


def test_a_wrapper_that_waits_and_counts_that_differ_are_said():
    wrapper = "\n".join(
        ("def call(args):", "    buf0.copy_(buf1)", "    u0 = buf0.item()", "    k.run(buf0, stream=s)")
    )
    code = codegen.read(wrapper)
    assert code.launches == 1 and faults.waits_in("step", code) == ["step: the wrapper waits: u0 = buf0.item()"]
    found = {"what": "dense", "code": {"step": {"kernels": 2}}}
    assert check.differences(found, {"dense": {"step": {"kernels": 2}}}) == []
    assert check.differences(found, {"dense": {"step": {"kernels": 1}}}) and check.differences(found, {"dense": {}})
    assert check.differences(found, {}) == []
