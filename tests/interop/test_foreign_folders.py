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
    if head == "other":  # a rank compares parts of it
        with pytest.raises(ValueError, match="got a tied decoder, and a stored lm_head.weight that is not the embed"):
            hf.load(tmp_path / "a", tied, model.layouts(tied, Mesh()))


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
