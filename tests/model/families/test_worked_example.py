"""The family that docs/families.md adds computes what transformers does, and its weights go there and back."""

import pytest
import torch

from fmegatron import model
from fmegatron.collectives import Axes
from fmegatron.interop import hf
from fmegatron.layout import Mesh
from tests.house import ROOT

transformers = pytest.importorskip("transformers")


def example() -> dict:
    """The names that the block of docs/families.md defines."""
    text = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    code = text.partition("<!-- family: run by")[2].partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(compile(code, "docs/families.md", "exec"), names)
    return names


def test_phi3(tmp_path):
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=70, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, max_position_embeddings=64, original_max_position_embeddings=64, sliding_window=6,
        attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs = transformers.Phi3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "model")
    family = example()["PHI3"]
    decoder = hf.decoder(tmp_path / "model", family)
    layouts = model.layouts(decoder, Mesh())
    params = hf.load(tmp_path / "model", decoder, layouts, family=family)
    tokens = torch.randint(1, 70, (2, 24))
    got, want = model.logits(params, tokens, decoder, Axes(Mesh()))[..., :70], theirs(tokens).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    hf.save(tmp_path / "back", params, decoder, layouts, like=tmp_path / "model", family=family)
    back = transformers.Phi3ForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(back[name], x) for name, x in theirs.state_dict().items())
    with pytest.raises(ValueError, match="config.json: model_type: got 'phi3', wanted one of bamba"):
        hf.decoder(tmp_path / "model")
