"""Folders of Hugging Face onto every mesh: bit for bit, each rank the bytes that it holds and no more, and back."""

import io
import json
import os
import re
import threading
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file

from fmegatron import checkpoint, interop, model, tree
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.__main__ import main
from fmegatron.interop import hf, safetensors_source
from fmegatron.layout import Mesh
from fmegatron.model.families import registry
from tests.checkpoint.fake_world import run
from tests.interop.hf_folder import write
from tests.pairs import few

MESHES = (Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=3), Mesh(fsdp=4), Mesh(tp=3))


@pytest.fixture
def counted(monkeypatch):
    """Bytes of elements read since the last look, of all threads together."""
    preadv, lock, count = os.preadv, threading.Lock(), [0]

    def counting(fd, buffers, at):
        got = preadv(fd, buffers, at)
        with lock:
            count[0] += got
        return got

    def taken():
        with lock:
            found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(os, "preadv", counting)
    return taken


def held(params):
    return sum(x.nbytes for x in tree.leaves(params))


def assert_shards(got, whole, layouts, rank):
    for path, x, w, layout in zip(
        tree.paths(layouts), tree.leaves(got), tree.leaves(whole), tree.leaves(layouts), strict=True
    ):
        for box in layout.boxes(rank):
            assert torch.equal(box.view(x), w[box.slices]), (path, layout, rank)


def opened(folder, mesh):
    decoder = hf.decoder(folder, param_dtype=torch.bfloat16)
    return decoder, model.layouts(decoder, mesh)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "shards": 1}], ids=["sharded", "tied"])
def test_every_mesh_reads_what_it_holds(tmp_path, counted, changes):
    """The vocabulary of 131 rows is padded, and cut unevenly by tp=3."""
    stored = write(tmp_path / "a", **changes)
    decoder, layouts = opened(tmp_path / "a", Mesh())
    whole = hf.load(tmp_path / "a", decoder, layouts)
    assert counted() == sum(x.nbytes for x in stored.values())
    q, k = (stored[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qk")  # by hand, once
    wqkv = tree.leaves({p: x for p, x in zip(tree.paths(whole), tree.leaves(whole), strict=True) if "wqkv" in p})[0]
    assert torch.equal(wqkv[1, :, :48], q.t()) and torch.equal(wqkv[1, :, 48:96], k.t())
    table = dict(zip(tree.paths(whole), tree.leaves(whole), strict=True))["embed/table"]
    assert torch.equal(table[:131], stored["model.embed_tokens.weight"]) and not table[131:].any()
    for mesh in MESHES:
        layouts = opened(tmp_path / "a", mesh)[1]
        for rank in range(mesh.size):
            got = hf.load(tmp_path / "a", decoder, layouts, rank=rank)
            assert counted() <= 1.01 * held(got), (mesh, rank)
            assert_shards(got, whole, layouts, rank)


def test_small_blocks_and_casts(tmp_path, monkeypatch):
    write(tmp_path / "a")
    decoder, layouts = opened(tmp_path / "a", Mesh(fsdp=2, tp=2))
    whole = hf.load(tmp_path / "a", decoder, opened(tmp_path / "a", Mesh())[1])
    wide = tree.map(lambda layout: layout.replace(dtype=torch.float32), layouts)
    for size in (100, 3000):
        monkeypatch.setattr(safetensors_source, "_BLOCK_BYTES", size)
        for rank in (0, 3):
            assert_shards(hf.load(tmp_path / "a", decoder, layouts, rank=rank), whole, layouts, rank)
            got = hf.load(tmp_path / "a", decoder, wide, rank=rank)
            assert_shards(got, tree.map(lambda x: x.float(), whole), wide, rank)


def test_replicas_read_once(tmp_path, counted):
    stored = write(tmp_path / "a")
    decoder, layouts = opened(tmp_path / "a", Mesh(dp=2, fsdp=3))
    whole = hf.load(tmp_path / "a", decoder, opened(tmp_path / "a", Mesh())[1])
    counted()
    got = run(6, lambda world: hf.load(tmp_path / "a", decoder, layouts, world=world, read="once"))
    assert counted() == sum(x.nbytes for x in stored.values())
    for rank in range(6):
        assert_shards(got[rank], whole, layouts, rank)


def test_memory_beside_the_shards_is_bounded(tmp_path):
    write(tmp_path / "a", shards=2, hidden_size=1536, intermediate_size=4608, num_hidden_layers=1)
    decoder, layouts = opened(tmp_path / "a", Mesh())
    tracemalloc.start()  # numpy's buffers; the shards are torch's
    try:
        got = hf.load(tmp_path / "a", decoder, layouts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held(got) > 48 << 20 and peak < 20 << 20, peak


def test_what_explain_says_is_read(tmp_path, counted):
    write(tmp_path / "a")
    decoder, layouts = opened(tmp_path / "a", Mesh(tp=2))
    rules = [hf.from_names(decoder, registry.family_of(hf.config_of(tmp_path / "a")))]
    source = interop.source(tmp_path / "a")
    said = checkpoint.explain(source, layouts, 1, rules=rules)
    checkpoint.restore(source, layouts, rank=1, rules=rules)
    assert counted() == sum(read.nbytes for read in said)
    assert {read.file for read in said} == {f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)}


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path, monkeypatch):
    write(tmp_path / "a", shards=1)
    file = tmp_path / "a/model.safetensors"
    with checkpoint.open_snapshot(interop.source(tmp_path / "a")) as snapshot:
        data = file.read_bytes()
        file.write_bytes(data[:-10])
        with pytest.raises(CheckpointError, match="changed while it was read"):
            checkpoint.restore(snapshot)
        monkeypatch.setattr(safetensors_source, "open_regular", lambda path: (os.open(path, os.O_RDONLY), len(data)))
        with pytest.raises(CheckpointError, match="ended at byte"):
            checkpoint.restore(snapshot)


@pytest.mark.parametrize("mesh", few(2, [(mesh,) for mesh in MESHES], map(str, MESHES)))
def test_back_from_every_mesh_bit_for_bit(tmp_path, mesh, monkeypatch):
    """All ranks write their share; files of the safetensors package and ours hold the same."""
    stored = write(tmp_path / "a")
    monkeypatch.setattr("fmegatron.interop.safetensors_write._BLOCK_BYTES", 3000)
    decoder, layouts = opened(tmp_path / "a", mesh)
    parts = [hf.load(tmp_path / "a", decoder, layouts, rank=rank) for rank in range(mesh.size)]
    options = {"like": tmp_path / "a", "shard": 60_000}
    done = run(mesh.size, lambda w: hf.save(tmp_path / "b", parts[w.rank], decoder, layouts, w, **options))
    assert done == [None] * mesh.size
    assert_folder(tmp_path / "b", stored)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert len([name for name in os.listdir(tmp_path / "b") if name.endswith(".safetensors")]) == 3


def assert_folder(folder, stored):
    """The same tensors, and the files beside them."""
    got = checkpoint.restore(interop.source(folder))
    assert set(got) == set(stored)
    assert all(torch.equal(x, got[name]) for name, x in stored.items())
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(os.listdir(folder))


@pytest.mark.parametrize("prefix", ["params", ""])
def test_a_checkpoint_is_exported_by_the_same_names(tmp_path, prefix):
    stored = write(tmp_path / "a", tie_word_embeddings=not prefix)
    decoder, layouts = opened(tmp_path / "a", Mesh())
    params = hf.load(tmp_path / "a", decoder, layouts)
    state = {"params": params, "step": torch.tensor(3)} if prefix else params
    checkpoint.save(tmp_path / "c", state)
    hf.export(tmp_path / "c", tmp_path / "b", like=tmp_path / "a")
    assert_folder(tmp_path / "b", stored)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_configuration_states_the_dtype_that_is_written(tmp_path, key):
    """transformers loads weights in it: trained fp32 weights would be rounded in silence."""
    write(tmp_path / "a", **{key: "bfloat16"})
    decoder, layouts = opened(tmp_path / "a", Mesh())
    params = hf.load(tmp_path / "a", decoder, layouts)
    checkpoint.save(tmp_path / "c", params)
    written = {"b": tree.leaves(layouts)[0].dtype, "d": torch.float16, "e": torch.bfloat16}
    hf.save(tmp_path / "b", params, decoder, layouts, like=tmp_path / "a")
    for name in ("d", "e"):
        hf.export(tmp_path / "c", tmp_path / name, like=tmp_path / "a", cast=written[name])
    like = json.loads((tmp_path / "a" / "config.json").read_text())
    for name, dtype in written.items():
        assert checkpoint.restore(interop.source(tmp_path / name))["lm_head.weight"].dtype == dtype
        assert json.loads((tmp_path / name / "config.json").read_text()) == like | {key: str(dtype)[6:]}


def test_a_folder_that_is_there_is_refused_by_all(tmp_path):
    write(tmp_path / "a")
    decoder, layouts = opened(tmp_path / "a", Mesh(tp=2))
    parts = [hf.load(tmp_path / "a", decoder, layouts, rank=rank) for rank in range(2)]
    (tmp_path / "b").mkdir()
    got = run(2, lambda w: hf.save(tmp_path / "b", parts[w.rank], decoder, layouts, w, like=tmp_path / "a"))
    assert all("exists already" in str(error) for error in got) and os.listdir(tmp_path / "b") == []


def test_a_tensor_that_a_folder_lacks_is_named_in_few_words(tmp_path):
    """The table of the family, which is a rule's argument, does not bury it."""
    write(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"got no tensor 'model.layers.3\..*is config.json of this folder") as info:
        hf.load(tmp_path / "a", *opened(tmp_path / "a", Mesh()))
    assert len(str(info.value)) < 700


def rewritten(folder, changes, **options):
    """The folder's weights in one file, some of them changed (None: removed)."""
    found = write(folder, shards=1, **options) | changes
    save_file({name: x for name, x in found.items() if x is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("rows", (3, 90, 104, 200))
@pytest.mark.parametrize("name", ("model.embed_tokens.weight", "lm_head.weight"))
def test_a_vocabulary_of_another_size_is_refused(tmp_path, rows, name):
    folder = rewritten(tmp_path / "a", {name: torch.ones(rows, 48)}, vocab_size=101)
    with pytest.raises(ValueError, match=f"got {rows} rows, wanted vocab_size=101 of them; .*set vocab_size={rows} in"):
        hf.load(folder, *opened(folder, Mesh(tp=2)), rank=1)
    with pytest.raises(ValueError, match=rf"^{folder}: tensor {name}: got {rows} rows"):
        hf.load(folder, *opened(folder, Mesh()))


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    (
        ("model.layers.1.mlp.up_proj.weight", (95, 48), (96, 48)),
        ("model.layers.2.self_attn.k_proj.weight", (48, 47), (48, 48)),
        ("model.layers.0.input_layernorm.weight", (1, 48), (48,)),
        ("model.embed_tokens.weight", (131, 47), (131, 48)),
        ("model.norm.weight", (), (48,)),
    ),
)
def test_the_tensor_of_another_shape_is_named_first(tmp_path, name, shape, wanted):
    folder = rewritten(tmp_path / "a", {name: torch.ones(shape)})
    message = f"{folder}: tensor {name}: got shape {shape}, wanted {wanted} for "
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        hf.load(folder, *opened(folder, Mesh()))


def test_the_nearest_names_are_those_of_the_same_layer_that_nothing_reads(tmp_path):
    up = "model.layers.1.mlp.up_proj.weight"
    others = {f"model.layers.{i}.mlp.upper_proj.weight": torch.ones(2) for i in range(3)}
    for folder, changes, near in (("a", {}, "; is config"), ("b", others, " (did you mean model.layers.1.mlp.upper_")):
        folder = rewritten(tmp_path / folder, {up: None, **changes})
        with pytest.raises(ValueError, match=f"^{folder}: got no tensor '{up}', wanted it for ") as info:
            hf.load(folder, *opened(folder, Mesh()))
        assert near in str(info.value) and "layernorm" not in str(info.value)


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32))
def test_quantized_weights_without_their_configuration_are_refused(tmp_path, dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = rewritten(tmp_path / "a", {name: torch.ones(96, 48).to(dtype)})
    message = f"^{folder}: tensor {name}: got dtype {str(dtype)[6:]}, wanted .*; dequantize the folder"
    with pytest.raises(ValueError, match=message):
        hf.load(folder, *opened(folder, Mesh()))
    decoder, layouts = opened(folder, Mesh(tp=2))
    errors = run(2, lambda world: hf.load(folder, decoder, layouts, world=world))
    assert all(name in str(error) for error in errors)


def command(*argv):
    out, err = io.StringIO(), io.StringIO()
    return main([str(a) for a in argv], out, err), out.getvalue(), err.getvalue()


def test_commands_take_a_folder_and_a_file(tmp_path):
    stored = write(tmp_path / "a")
    status, out, _ = command("show", tmp_path / "a", "--stats")
    assert status == 0 and "model.layers.2.mlp.down_proj.weight" in out.replace("\n", "") or "30 leaves" in out
    assert command("ls", tmp_path / "a")[0] == 0
    assert command("reshard", tmp_path / "a", tmp_path / "ours", "--mesh", "fsdp=2", "--rules", rules(tmp_path))[0] == 0
    assert all(torch.equal(x, checkpoint.restore(tmp_path / "ours")[name]) for name, x in stored.items())
    assert command("export", tmp_path / "a", tmp_path / "b.safetensors")[0] == 0
    assert command("diff", tmp_path / "a", tmp_path / "b.safetensors", "--ignore", "metadata")[0] == 0
    assert command("diff", tmp_path / "a", tmp_path / "ours", "--ignore", "layouts")[0] == 0
    status, _, err = command("verify", tmp_path / "a")
    assert status == 2 and "no checksums" in err


def rules(tmp_path):
    (tmp_path / "rows.json").write_text('[[".*layernorm.*|.*norm.weight", []], [".*", ["fsdp"]]]')
    return tmp_path / "rows.json"


def test_export_by_rules_of_a_file(tmp_path):
    """Unstack, split, transpose, and rows without padding, from a checkpoint of two ranks, in bounded memory."""
    state = {"blocks": {"w": torch.randn(3, 8, 12)}, "embed": torch.randn(16, 8)}
    checkpoint.save(tmp_path / "c", {"params": state})
    table = [
        ["unstack", "blocks/w", "layers.{i}.w"],
        ["split", r"layers\.(\d+)\.w", [r"layers.\1.a", r"layers.\1.b"], 1, [4, 8]],
        ["transpose", r"layers\..*", [1, 0]],
        ["take", "embed", list(range(13)), 0],
    ]
    (tmp_path / "rules.json").write_text(json.dumps(table))
    argv = ["export", tmp_path / "c", tmp_path / "out", "--prefix", "params", "--rules", tmp_path / "rules.json"]
    assert command(*argv)[0] == 0
    got = checkpoint.restore(interop.source(tmp_path / "out"))
    assert torch.equal(got["embed"], state["embed"][:13]) and len(got) == 7
    for i in range(3):
        a, b = state["blocks"]["w"][i].split([4, 8], 1)
        assert torch.equal(got[f"layers.{i}.a"], a.t()) and torch.equal(got[f"layers.{i}.b"], b.t())
    (tmp_path / "rules.json").write_text('[["explode", "x"]]')
    status, _, err = command(*argv[:2], tmp_path / "other", *argv[3:])
    assert status == 2 and "wanted rows of a rule's name (rename, " in err
    (tmp_path / "rules.json").write_text('[["unstack", "x"]]')
    assert "wanted the arguments of unstack" in command(*argv[:2], tmp_path / "other", *argv[3:])[2]


def test_export_like_a_folder(tmp_path):
    stored = write(tmp_path / "a")
    decoder, layouts = opened(tmp_path / "a", Mesh())
    checkpoint.save(tmp_path / "c", {"params": hf.load(tmp_path / "a", decoder, layouts)})
    assert command("export", tmp_path / "c", tmp_path / "b", "--like", tmp_path / "a", "--shard", "60KB")[0] == 0
    assert_folder(tmp_path / "b", stored)
    status, _, err = command("export", tmp_path / "c", tmp_path / "d", "x", "--like", tmp_path / "a")
    assert status == 2 and "wanted --like alone" in err
