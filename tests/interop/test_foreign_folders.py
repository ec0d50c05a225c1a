"""Folders of Hugging Face that contradict themselves, or hold more than one model: honoured, or left with a word."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmegatron import checkpoint, model
from fmegatron.collectives import Axes
from fmegatron.interop import hf
from fmegatron.layout import Mesh
from fmegatron.model.families.llamas import LLAMA
from tests.interop.hf_folder import write


def tied_folder(path, head, shards=1):
    """A Llama with a tied head that stores another, the same, or none."""
    stored = write(path, shards=shards, tie_word_embeddings=True)
    table = stored["model.embed_tokens.weight"]
    if head is not None:
        found = {"other": table.flip(0), "same": table.clone(), "last": table.clone()}[head]
        if head == "last":
            found[-1, -1] += 1
        file = path / ("model.safetensors" if shards == 1 else f"model-00001-of-{shards:05d}.safetensors")
        save_file(load_file(file) | {"lm_head.weight": found}, file, {"format": "pt"})
        if shards > 1:
            index = path / "model.safetensors.index.json"
            known = json.loads(index.read_text())
            known["weight_map"]["lm_head.weight"] = file.name
            index.write_text(json.dumps(known))
    return stored


def logits_of(path, of):
    layouts, ids = model.layouts(of, Mesh()), torch.arange(20)[None]
    with torch.no_grad():
        return model.logits(hf.load(path, of, layouts), ids, of, Axes(Mesh()))[..., :131].float()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("head", ["other", "last"])
def test_a_head_that_is_stored_beside_a_tied_one_is_the_head(tmp_path, head, shards):
    import transformers

    tied_folder(tmp_path / "a", head, shards)
    with pytest.warns(UserWarning, match=r"another lm_head.weight than the embedding: the stored one is the head"):
        of = hf.decoder(tmp_path / "a", compute_dtype=torch.float32)
    net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    with torch.no_grad():
        want = net(torch.arange(20)[None]).logits
    assert not of.tied and (logits_of(tmp_path / "a", of) - want).abs().max() < 1e-4
    tied = hf.decoder(tmp_path / "a", tied=True)
    with pytest.raises(ValueError, match="got a tied decoder, and a stored lm_head.weight that is not the embed"):
        hf.load(tmp_path / "a", tied, model.layouts(tied, Mesh()))


def test_every_element_of_a_head_is_compared_once_by_the_ranks_together(tmp_path, monkeypatch):
    """One that differs where no rank looks would be dropped."""
    monkeypatch.setattr(hf, "_COMPARED", 100)
    stored = tied_folder(tmp_path / "a", "same")
    of, file = hf.decoder(tmp_path / "a", tied=True), tmp_path / "a" / "model.safetensors"
    for at in (0, 99, 100, 1017, stored["model.embed_tokens.weight"].numel() - 1):
        found = load_file(file)
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
        found["lm_head.weight"].view(-1)[at] += 1
        save_file(found, file, {"format": "pt"})
        seen = [hf._has_other_head(tmp_path / "a", of, LLAMA, (rank, 3)) for rank in range(3)]
        assert seen == [rank == at // 100 % 3 for rank in range(3)]


def altered(path, change):
    """A folder of one file whose tensors are changed."""
    file = path / "model.safetensors"
    found = load_file(file)
    change(found)
    save_file(found, file, {"format": "pt"})


def test_a_table_that_is_stored_as_the_head(tmp_path):
    """One array under either name, as transformers has it; numbers without their scales stay refused."""
    tied_folder(tmp_path / "a", None)
    of = hf.decoder(tmp_path / "a", compute_dtype=torch.float32)
    want = logits_of(tmp_path / "a", of)
    altered(tmp_path / "a", lambda x: x.update({"lm_head.weight": x.pop("model.embed_tokens.weight")}))
    assert hf.decoder(tmp_path / "a").tied and torch.equal(logits_of(tmp_path / "a", of), want)
    altered(tmp_path / "a", lambda x: x.update({"lm_head.weight": x["lm_head.weight"].to(torch.int8)}))
    with pytest.raises(ValueError, match="tensor lm_head.weight: got dtype int8.*it is quantized"):
        logits_of(tmp_path / "a", of)
    altered(tmp_path / "a", lambda x: x.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="got no tensor 'model.embed_tokens.weight'"):
        logits_of(tmp_path / "a", of)


@pytest.mark.parametrize("dtype, tied", [(torch.float64, True), (torch.bfloat16, False)])
def test_heads_of_another_dtype_are_compared_by_their_numbers(tmp_path, dtype, tied):
    stored = tied_folder(tmp_path / "a", None)
    table = stored["model.embed_tokens.weight"].float() + 1e-6
    altered(tmp_path / "a", lambda x: x.update({"model.embed_tokens.weight": table, "lm_head.weight": table.to(dtype)}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert hf.decoder(tmp_path / "a").tied == tied and bool(told) != tied


@pytest.mark.parametrize("by", ["save", "export"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_says_whether_its_head_is_tied(tmp_path, tied, by):
    """transformers draws a head that config.json states and no file has; before 5.0 it dropped one that was tied."""
    write(tmp_path / "a", shards=1, tie_word_embeddings=not tied)
    table = load_file(tmp_path / "a" / "model.safetensors")["model.embed_tokens.weight"]
    altered(tmp_path / "a", lambda x: x.update({"lm_head.weight": table.clone()}))
    of = hf.decoder(tmp_path / "a", tied=tied)
    layouts = model.layouts(of, Mesh())
    params = hf.load(tmp_path / "a", of, layouts)
    if by == "save":
        hf.save(tmp_path / "b", params, of, layouts, like=tmp_path / "a")
    else:
        checkpoint.save(tmp_path / "c", params)
        hf.export(tmp_path / "c", tmp_path / "b", like=tmp_path / "a")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(next((tmp_path / "b").glob("*.safetensors")))) is not tied


@pytest.mark.parametrize("change", [{"intermediate_size": 80}, {"num_hidden_layers": 4}, {"vocab_size": 160}])
def test_a_configuration_of_another_model_is_not_copied(tmp_path, change):
    write(tmp_path / "a", shards=1)
    of = hf.decoder(tmp_path / "a")
    layouts = model.layouts(of, Mesh())
    write(tmp_path / "other", shards=1, **change)
    with pytest.raises(ValueError, match=r"other: tensor .*wanted .*as config.json there states"):
        hf.save(tmp_path / "b", hf.load(tmp_path / "a", of, layouts), of, layouts, like=tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other"]


@pytest.mark.parametrize("key, value", [("tie_word_embeddings", "false"), ("attention_bias", 1), ("rms_norm_eps", "1")])
def test_what_is_no_bool_or_number_is_not_taken_for_one(tmp_path, key, value):
    write(tmp_path / "a", shards=1, **{key: value})
    with pytest.raises(ValueError, match=f"config.json: {key}: got .*wanted (true or false|a number)"):
        hf.decoder(tmp_path / "a")


def test_folders_beside_a_model_are_named(tmp_path):
    write(tmp_path / "a", shards=1)
    (tmp_path / "a" / "additional_chat_templates").mkdir()
    of = hf.decoder(tmp_path / "a")
    layouts = model.layouts(of, Mesh())
    with pytest.warns(UserWarning, match="not copied.*additional_chat_templates/"):
        hf.save(tmp_path / "b", hf.load(tmp_path / "a", of, layouts), of, layouts, like=tmp_path / "a")


@pytest.mark.parametrize("head", ["same", None])
def test_a_head_that_is_stored_twice_stays_tied(tmp_path, head):
    tied_folder(tmp_path / "a", head)
    of = hf.decoder(tmp_path / "a")
    assert of.tied and logits_of(tmp_path / "a", of).isfinite().all()


OLD = (
    "tf_model.h5 flax_model.msgpack model.gguf model.onnx model.onnx_data model.pt model.ckpt rust_model.ot"
    " pytorch_model.bin consolidated.00.pth openvino_model.bin model.npz model.safetensors.index.json"
).split()
KEPT = "config.json tokenizer.json generation_config.json merges.txt LICENSE.txt README.md own.py chat_template.jinja"


@pytest.mark.parametrize("by", ["save", "export"])
def test_what_is_copied_is_listed(tmp_path, by):
    write(tmp_path / "a", shards=1)
    for name in (*OLD[:-1], *KEPT.split()[3:], "openvino_model.xml", "training_args.json", ".gitattributes"):
        (tmp_path / "a" / name).write_bytes(b"old")
    of = hf.decoder(tmp_path / "a")
    layouts = model.layouts(of, Mesh())
    params = hf.load(tmp_path / "a", of, layouts)
    checkpoint.save(tmp_path / "c", params)
    with pytest.warns(
        UserWarning, match=r"not copied, .* old weights: openvino_model.xml, training_args.json; copy by"
    ):
        if by == "save":
            hf.save(tmp_path / "b", params, of, layouts, like=tmp_path / "a")
        else:
            hf.export(tmp_path / "c", tmp_path / "b", like=tmp_path / "a")
    made = {path.name for path in (tmp_path / "b").iterdir()} - {"model.safetensors.index.json"}  # which export writes
    assert made == {*KEPT.split(), "model.safetensors"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.save(tmp_path / "d", params, of, layouts, like=tmp_path / "b")  # nothing to speak of
