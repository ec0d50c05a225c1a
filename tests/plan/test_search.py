"""The search over meshes, and the command."""

import dataclasses
import functools
import io

import pytest

from fmegatron import model, plan
from fmegatron.layout import Mesh
from fmegatron.plan.__main__ import main
from tests.house import ROOT
from tests.plan.described import SIZES, decoder

SHAKESPEARE = str(ROOT / "experiments/shakespeare.py")
SMALL = ("--dim=48", "--layers=2", "--seq_len=16")


def test_all_meshes_of_some_devices():
    found = list(plan.meshes_of(8))
    assert len(found) == len(set(found)) == 10 and all(mesh.size == 8 for mesh in found)
    assert Mesh(dp=2, fsdp=2, tp=2) in found


def test_what_fits_is_ranked_and_what_does_not_says_why():
    all_of_them = list(plan.meshes_of(8))
    found = plan.search(decoder, all_of_them, 1 << 30)
    assert [one.seconds for one in found.found] == sorted(one.seconds for one in found.found)
    refused = dict(found.failed)
    assert "heads" in refused[Mesh(tp=8)]  # 4 heads
    assert len(found.found) + len(found.failed) == len(all_of_them)
    needs = {one.mesh: one.plan.peak for one in found.found}
    tight = plan.search(decoder, all_of_them, sorted(needs.values())[2])
    assert 0 < len(tight.found) < len(found.found)
    assert all(any(word in why for word in ("too large", "larger than", "heads")) for _, why in tight.failed)
    none = plan.search(decoder, [Mesh(fsdp=8)], 100)
    assert none.failed == ((Mesh(fsdp=8), "the state alone is larger than the device"),)
    assert "fsdp8" in str(none) and f"{len(found.found)} meshes fit" in str(found)


def test_the_batch_must_divide():
    failed = plan.search(lambda mesh: decoder(mesh, batch=4), [Mesh(dp=8)], 1 << 30).failed
    assert "batch_size: got 4 rows" in failed[0][1]
    assert SIZES["heads"] % 4 == 0


def by_parts(decoder, **changes):
    """A decoder with these fields in the mixers that have them."""

    def changed(part):
        names = {field.name for field in dataclasses.fields(part.mixer)}
        own = {name: value for name, value in changes.items() if name in names}
        return dataclasses.replace(part, mixer=dataclasses.replace(part.mixer, **own))

    return dataclasses.replace(decoder, blocks=tuple(tuple(map(changed, block)) for block in decoder.blocks))


def dropping(decoder):
    blocks = tuple(tuple(dataclasses.replace(part, dropout=0.1) for part in block) for block in decoder.blocks)
    return dataclasses.replace(decoder, blocks=blocks)


def predicting(decoder):
    return dataclasses.replace(decoder, mtp=model.MTP(decoder.blocks[0], 1, 0.3))


@pytest.mark.parametrize(
    ("mesh", "of", "what"),
    [
        (Mesh(cp=2), lambda of: of, "keys over cp"),
        (Mesh(dp=2), functools.partial(by_parts, softcap=30.0), "scores of attention"),
        (Mesh(dp=2), functools.partial(by_parts, dropout=0.1), "scores of attention"),
        (Mesh(dp=2), dropping, "what dropout keeps"),
        (Mesh(dp=2), lambda of: dataclasses.replace(of, embed_dropout=0.1), "what dropout keeps"),
        (Mesh(dp=2), predicting, "multi-token prediction"),
    ],
    ids=["cp", "softcap", "dropout of the softmax", "dropout", "dropout of the embedding", "mtp"],
)
def test_a_mesh_of_which_not_all_memory_is_counted_is_undecided(mesh, of, what):
    describe = functools.partial(decoder, of=of)
    found = plan.search(describe, [mesh], 1 << 30)
    assert not found.found and not found.failed and [one.mesh for one in found.undecided] == [mesh]
    assert any(what in one for one in found.undecided[0].plan.unknown_memory), found.undecided[0].plan.unknown_memory
    assert "0 meshes fit" in str(found) and "1 are not decided" in str(found) and what in str(found)
    assert plan.search(describe, [mesh], 100).failed, "what is counted alone is too large: that is certain"


def test_meshes_that_are_counted_fit_beside_those_that_are_not():
    found = plan.search(decoder, [Mesh(dp=2), Mesh(cp=2)], 1 << 30)
    assert [one.mesh for one in found.found] == [Mesh(dp=2)] and not found.found[0].plan.unknown_memory
    assert [one.mesh for one in found.undecided] == [Mesh(cp=2)]


def run(*argv, file=SHAKESPEARE, small=SMALL):
    out, err = io.StringIO(), io.StringIO()
    return main([file, *argv, *small], out, err), out.getvalue(), err.getvalue()


def own(tmp_path, source):
    """An experiment of one's own: shakespeare.py, with another `describe`."""
    file = tmp_path / "own.py"
    file.write_text(
        "from experiments import shakespeare\nfrom experiments.shakespeare import Config\n"
        "from fmegatron import model, optim, step, tree\nfrom fmegatron.collectives import Axes\n\n" + source
    )
    return str(file)


WRITTEN_AS_DEF = """
def describe(config):
    of = shakespeare.describe(config)
    layouts = tree.layouts(of.state.params)

    def loss_fn(params, batch):
        return model.loss(params, batch, of.decoder, save="mincut")

    how = {"strategy": tree.leaves(of.state)[0].strategy}
    made = step.build_train_step(loss_fn, optim.adamw(1e-3), layouts, Axes(config.mesh), **how)
    return step.Description(made, of.state, of.batch)
"""
WRAPPED = """
import dataclasses

def describe(config):
    of = shakespeare.describe(config)

    def with_a_metric(state, batch):
        state, metrics = of.function(state, batch)
        return state, {**metrics, "twice": 2 * metrics["loss"]}

    return dataclasses.replace(of, function=with_a_metric)
"""
PARAMETERS_ALONE = """
def describe(config):
    of = shakespeare.describe(config)
    decayed = lambda params, batch: (tree.map(lambda p: 0.9 * p, params), {})
    return step.Description(decayed, of.state.params, of.batch)
"""


@pytest.mark.slow
def test_a_loss_written_as_def_never_fits_by_formulas(tmp_path):
    """Issue 24, H2: "7 meshes fit", with status 0, of a model of which only the state was counted."""
    file = own(tmp_path, WRITTEN_AS_DEF)
    status, out, _ = run("--mesh", "fsdp=2", "--quick", "--memory", "1", file=file)
    assert status == 3 and "not known whether it fits" in out and "\nfits" not in out
    assert "activations and logits" in out and "decoder=" in out
    assert run("--mesh", "fsdp=2", "--quick", "--memory", "0.0001", file=file)[0] == 1, "the state alone is too large"
    assert run("--mesh", "fsdp=2", "--quick", file=file)[0] == 0, "nobody asked"
    status, out, _ = run("--search", "4", "--memory", "1", file=file)
    assert status == 3 and "0 meshes fit" in out and "not decided" in out and "activations and logits" in out
    assert run("--search", "4", "--memory", "0.0000001", file=file)[0] == 1
    status, out, _ = run("--mesh", "fsdp=2", "--memory", "1", "--layers=1", file=file)
    assert status == 0 and "\nfits: " in out, "the exact plan counts any loss"


def test_a_step_without_formulas_never_fits_by_them(tmp_path):
    file = own(tmp_path, PARAMETERS_ALONE)
    status, out, _ = run("--mesh", "fsdp=2", "--quick", "--memory", "1", file=file)
    assert status == 3 and "wanted a State(step, params, opt)" in out and "not known whether it fits" in out
    assert run("--search", "4", "--memory", "1", file=file)[0] != 0
    assert run("--mesh", "fsdp=2", "--memory", "1", file=file)[0] == 0


def test_a_wrapped_step_is_planned_as_what_it_wraps(tmp_path):
    """Nothing is read off the function: by formula the same, to the byte."""
    how = ("--mesh", "fsdp=2", "--quick", "--memory", "1")
    (status, bare, _), (other, wrapped, _) = run(*how), run(*how, file=own(tmp_path, WRAPPED))
    assert status == other == 0
    fits = [next(line for line in out.splitlines() if line.startswith("fits")) for out in (bare, wrapped)]
    assert fits[0] == fits[1]


def test_the_command_by_formulas():
    status, out, err = run("--mesh", "fsdp=2,tp=2", "--quick")
    assert (status, err) == (0, "")
    for word in ("turn of the forward", "over fsdp", "over tp", "checkpoint", "s at rates assumed"):
        assert word in out
    status, out, _ = run("--mesh", "fsdp=2", "--quick", "--memory", "0.0001")
    assert status == 1 and "does not fit" in out
    assert run("--mesh", "fsdp=2", "--quick", "--memory", "1")[0] == 0


def test_the_command_searches():
    status, out, _ = run("--search", "4", "--memory", "1")
    assert status == 0 and "meshes fit into 1,024.0 MiB" in out and "tokens/s" in out
    assert run("--search", "4", "--memory", "0.0000001")[0] == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "got neither --mesh nor --search, or both"),
        (("--mesh", "dp=2", "--search", "2"), "got neither --mesh nor --search, or both"),
        (("--search", "2"), "got no --memory"),
        (("--mesh", "tp=5"), "wanted a multiple of tp=5"),
        (("--mesh", "dp=2", "--rank", "2"), "got rank=2, wanted one of 0 to 1"),
    ],
)
def test_wrong_use(flags, text):
    status, _, err = run(*flags)
    assert status == 2 and text in err


def test_a_wrong_rank_of_a_deep_model_is_told_once():
    """And not as a reason for which all layers are counted."""
    status, out, err = run(
        "--mesh", "dp=2", "--rank", "2", small=("--dim=8", "--heads=2", "--layers=24", "--seq_len=8")
    )
    assert status == 2 and "got rank 2, wanted 0 to 1" in err and "all layers" not in out
