"""Folders of other systems, and of formats that are gone: every call that is given one names it, and what reads it."""

import io
import json
import os
import shutil

import pytest
import tensorstore as ts
import torch
from safetensors.torch import save_file

from fmegatron import checkpoint, interop
from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.tools import verify
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.interop.dcp_read import dcp_objects
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.tokens import plain
from tests.interop.torch_layout import whole, write, write_megatron

LAYOUTS = {"w": Layout((8, 16), torch.float32, Mesh()), "n": Layout((), torch.int64, Mesh())}
STATE = {"w": torch.arange(128.0).view(8, 16), "n": torch.tensor(3)}


def refused(path, *words):
    """Every call that wants a checkpoint raises CheckpointError with these words, and the commands print them."""
    for call in (
        lambda: checkpoint.restore(path, LAYOUTS),
        lambda: checkpoint.layouts(path),
        lambda: checkpoint.metadata(path),
        lambda: checkpoint.describe(path),
        lambda: checkpoint.explain(path, LAYOUTS),
        lambda: interop.load_state_dict(path, {"w": torch.zeros(8, 16)}),
        lambda: interop.fmegatron_to_dcp(path, f"{path}-dcp"),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value
    assert not os.path.exists(f"{path}-dcp")


def said(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    assert status != 0, out.getvalue()
    return out.getvalue() + err.getvalue()


def commands_say(path, *words):
    for argv in (
        ("show", path),
        ("verify", path),
        ("ls", path),
        ("export", path, f"{path}.safetensors"),
        ("diff", path, path),
    ):
        text = said(*argv)
        assert all(word in text for word in words), (argv, text)


# ---- OCDBT: our own format, until commit 147eaa7


@pytest.fixture
def database(tmp_path):
    """What the library wrote with ocdbt=True: marker, manifest and digests beside a database that holds the arrays."""
    checkpoint.save(tmp_path / "plain", STATE, LAYOUTS, metadata={"a": 1}, step=7)
    plain(tmp_path / "plain")
    at = tmp_path / "steps/step_00000007"
    shutil.copytree(tmp_path / "plain", at)
    kv = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{at}/"}).result()
    for folder in ("arrays", "packed"):
        for file in sorted((at / folder).rglob("*")):
            if file.is_file():
                kv[str(file.relative_to(at))] = file.read_bytes()
        shutil.rmtree(at / folder, ignore_errors=True)
    marker = json.loads((at / "COMPLETE").read_text())
    (at / "COMPLETE").write_text(json.dumps({**marker, "version": 2, "store": "ocdbt"}))
    assert (at / "manifest.ocdbt").is_file()
    return at


HOW = ("OCDBT database", "commit 147eaa7", "python -m fmegatron.checkpoint reshard OLD NEW --like OLD")


def test_an_ocdbt_checkpoint_is_named_with_the_command_that_rewrites_it(database):
    refused(database, str(database), *HOW)
    for argv in (("show", database), ("verify", database), ("ls", database), ("diff", database, database)):
        assert "OCDBT" in said(*argv)
    (damage,) = verify(database).damages
    assert all(word in str(damage) for word in HOW)
    assert all(word in listing(database.parent).checkpoints[0].problem for word in HOW)


def test_nothing_of_an_ocdbt_checkpoint_is_waited_for(database):
    """A pipe in the place of its database, which nobody writes to."""
    os.remove(database / "manifest.ocdbt")
    os.mkfifo(database / "manifest.ocdbt")
    refused(database, *HOW)
    assert verify(database).damages


def test_a_manager_goes_past_an_ocdbt_step_and_says_so(database):
    manager = Manager(database.parent)
    checkpoint.save(manager.path(5), STATE, LAYOUTS, step=5)
    with pytest.warns(RuntimeWarning, match="skipped the checkpoint of step 7: .*OCDBT.*147eaa7"):
        assert manager.restore_latest(LAYOUTS)[0] == 5


def test_nothing_makes_one_any_more(tmp_path):
    with pytest.raises(TypeError, match="ocdbt"):
        open_store(tmp_path / "a", ocdbt=True)
    assert "unrecognized arguments: --ocdbt" in (text := said_by_argparse("reshard", "a", "b", "--ocdbt")), text


def said_by_argparse(*argv):
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", err)
        assert main(list(argv)) == 2
    return err.getvalue()


# ---- other systems


def test_a_directory_of_torch(tmp_path):
    write(tmp_path / "dcp", {"w": (whole((4, 6), torch.float32), [((0, 0), (4, 6))])})
    refused(tmp_path / "dcp", "torch.distributed.checkpoint", "interop.source(path)", "dcp-to-fmegatron")
    layouts = checkpoint.layouts(interop.source(tmp_path / "dcp"))  # what it says to call works
    assert checkpoint.restore(interop.source(tmp_path / "dcp"), layouts)["w"].shape == (4, 6)


def test_megatron(tmp_path):
    run = tmp_path / "run"
    step = run / "iter_0000007"
    write_megatron(step)
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    refused(step, "torch_dist checkpoint of Megatron", "interop.source(path)", "dcp-to-fmegatron")
    refused(run, "a run of Megatron", "interop.source(path), layouts, rules=...) restores it at its newest step")
    old = tmp_path / "old/mp_rank_00"
    old.mkdir(parents=True)
    torch.save({}, old / "model_optim_rng.pt")
    refused(old.parent, "Megatron in its format `torch`", "nothing in fmegatron reads it", "--ckpt-convert-format")


@pytest.mark.parametrize("kind", ["sharded", "single", "adapter", "bin", "config"])
def test_hugging_face(tmp_path, kind):
    """What reads it is said, and no call that does not."""
    folder, tensors = tmp_path / "llama", {"model.embed_tokens.weight": torch.ones(4, 2)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    if kind == "sharded":
        save_file(tensors, folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind in ("single", "adapter"):
        save_file(tensors, folder / f"{'adapter_' * (kind == 'adapter')}model.safetensors")
    elif kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    opens = kind in ("sharded", "single", "adapter")
    call = "interop.source" if opens or kind == "config" else "interop.save_state_dict"
    refused(folder, "a folder of Hugging Face", call)
    if not opens:
        commands_say(folder, "a folder of Hugging Face")
        with pytest.raises(CheckpointError, match="a folder of Hugging Face"):
            checkpoint.restore(interop.source(folder), LAYOUTS)
        return
    got = checkpoint.restore(interop.source(folder))  # what it says to call works
    assert torch.equal(got["model.embed_tokens.weight"], torch.ones(4, 2))
    if kind == "single":
        refused(folder / "model.safetensors", "this is a file", "interop.source(path)")
        assert checkpoint.describe(interop.source(folder / "model.safetensors")).leaves == 1


def test_a_run_of_ours_has_a_config_too(tmp_path):
    """config.json alone is not Hugging Face's: it must name a type of model."""
    (tmp_path / "config.json").write_text(json.dumps({"dim": 64}))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path, LAYOUTS)
    assert "Hugging" not in str(caught.value)


def test_orbax_and_databases(tmp_path):
    for name, words in (("_CHECKPOINT_METADATA", "a checkpoint of Orbax"), ("manifest.ocdbt", "an OCDBT database")):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{}")
        refused(tmp_path / name, words, "nothing in fmegatron reads it")


def test_a_directory_of_checkpoints(tmp_path):
    manager = Manager(tmp_path / "run")
    manager.save(3, STATE, LAYOUTS)
    manager.save(12, STATE, LAYOUTS)
    refused(tmp_path / "run", "a directory of checkpoints", "step_00000012", "Manager(path).restore_latest")


def test_ours_given_to_what_reads_torchs(tmp_path):
    checkpoint.save(tmp_path / "a", STATE, LAYOUTS)
    assert checkpoint.restore(interop.source(tmp_path / "a"), LAYOUTS)["n"] == 3  # whatever the source
    with pytest.raises(CheckpointError, match="this is a checkpoint of fmegatron: fmegatron.checkpoint.restore"):
        dcp_objects(tmp_path / "a")


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_odd_files_under_their_names(tmp_path, kind):
    """No pipe is waited for, no link followed."""
    at = tmp_path / "odd"
    at.mkdir()
    {
        "pipe": lambda: os.mkfifo(at / ".metadata"),
        "directory": (at / ".metadata").mkdir,
        "link": lambda: (at / ".metadata").symlink_to("/dev/zero"),
    }[kind]()
    with pytest.raises(CheckpointError, match="check the path"):
        checkpoint.restore(at, LAYOUTS)


def test_in_an_object_store():
    store = open_store("memory://hub/llama", {})
    store.values.write("config.json", [b'{"model_type": "llama"}'])
    store.values.write("model.safetensors.index.json", [b"{}"])
    with pytest.raises(CheckpointError, match="a folder of Hugging Face"):
        checkpoint.restore(store, LAYOUTS)
