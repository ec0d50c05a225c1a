"""A key that config.json leaves out means what transformers takes it for, and what contradicts is refused.

Keys are left out of configurations with the defaults of transformers, one after another: the model stays the same, or
the key is named.
"""

import json
import re
from dataclasses import replace

import pytest
import torch

from fmegatron import model
from fmegatron.collectives import Axes
from fmegatron.interop import hf
from fmegatron.layout import Mesh
from fmegatron.model.families.registry import FAMILIES

transformers = pytest.importorskip("transformers")
# transformers computes no multi-token prediction, and counts one depth where none is stated
NOT_OURS = {"num_nextn_predict_layers", "num_mtp_layers"}
WITHOUT_DEFAULT = {"deepseek_v2": {"num_experts_per_tok": 6}}
SMALL = {
    "model_type": "qwen3_moe", "vocab_size": 70, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
NESTED = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}


def stored(folder, **changes):
    """A folder of random weights, and transformers' model of it."""
    config = {**SMALL, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    of = transformers.AutoConfig.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_config(of, dtype=torch.float32, attn_implementation="eager").eval()
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_an_absent_key_is_transformers_default_or_is_named(name):
    family = FAMILIES[name]
    whole = {**transformers.AutoConfig.for_model(name).to_dict(), **WITHOUT_DEFAULT.get(name, {})}
    wanted = family.decoder(whole)
    for key in sorted(whole.keys() - NOT_OURS):
        try:
            got = family.decoder({other: value for other, value in whole.items() if other != key})
        except ValueError as error:
            assert key in str(error)
        else:
            assert got == wanted, key


@pytest.mark.parametrize("first", (0, 1, 28))
def test_windows_of_qwen3_moe_are_in_every_layer(first, tmp_path):
    theirs = stored(tmp_path / "a", use_sliding_window=True, sliding_window=5, max_window_layers=first)
    decoder = hf.decoder(tmp_path / "a")
    layouts = model.layouts(decoder, Mesh())
    params, tokens = hf.load(tmp_path / "a", decoder, layouts), torch.randint(3, 70, (2, 24))
    got, want = model.logits(params, tokens, decoder, Axes(Mesh()))[..., :70], theirs(tokens).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    (
        ("qwen2", {"layer_types": ["chunked_attention", LAYERS[1]]}, "layer_types: got 'chunked_attention', wanted"),
        ("gpt_oss", {"layer_types": LAYERS[:1]}, "layer_types: got 1 layers, wanted num_hidden_layers=2"),
        ("gemma2", {"layer_types": [*LAYERS, "full_attention"]}, "layer_types: got 3 layers, wanted num_hidden_layers"),
        ("qwen3", {"rope_parameters": NESTED}, "rope_parameters: got those of 'full_attention' by themselves"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope scaling linear: factor: got no value"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope scaling llama3: low_freq_factor",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: got 30.0, wanted None"),
    ),
)
def test_what_no_family_computes_is_refused_by_its_name(kind, changes, message):
    whole = transformers.AutoConfig.for_model(kind, num_hidden_layers=2).to_dict()
    whole.pop("rope_parameters")
    with pytest.raises(ValueError, match=r"config.json: " + re.escape(message)):
        FAMILIES[kind].decoder({**whole, **changes})


def test_the_balance_loss_of_gpt_oss_counts_where_it_is_asked_for():
    whole = {**transformers.AutoConfig.for_model("gpt_oss").to_dict(), "router_aux_loss_coef": 0.25}
    found = [FAMILIES["gpt_oss"].decoder({**whole, "output_router_logits": on}).blocks[0][1] for on in (False, True)]
    assert [part.mixer.balance for part in found] == [0.0, 0.25]


def test_a_folder_that_does_not_fit_its_configuration_is_named_in_a_few_lines(tmp_path):
    stored(tmp_path / "a")
    decoder = hf.decoder(tmp_path / "a")
    decoder = replace(decoder, blocks=decoder.blocks * 8)
    with pytest.raises(ValueError, match="got no tensor 'model.layers.2") as raised:
        hf.load(tmp_path / "a", decoder, model.layouts(decoder, Mesh()))
    assert len(str(raised.value)) < 2000
