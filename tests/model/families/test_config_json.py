"""Released config.json files: the published number of parameters, and in small what transformers computes, or refused.

Nothing is read in silence: a key that the family does not know is an error with its name.
"""

import json
import re

import pytest
import torch

from fmegatron import model
from fmegatron.collectives import Axes
from fmegatron.interop import hf
from fmegatron.layout import Mesh
from fmegatron.model.counts import parameters as parameters_of_model
from fmegatron.model.families.registry import family_of
from tests.model.families.released import READ, REFUSED
from tests.pairs import few

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 70, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4,
    "max_position_embeddings": 64, "head_dim": 16, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64,
    "n_ctx": 64, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "moe_intermediate_size": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "query_pre_attn_scalar": 24, "attn_layer_indices": [1], "attn_rotary_emb": 6, "mamba_n_heads": 12,
    "mamba_d_head": 8, "mamba_d_state": 10, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def small(config):
    """The same configuration in other sizes."""
    out = {key: SMALL.get(key, value) for key, value in config.items()}
    if "num_hidden_layers" in out:
        out["num_hidden_layers"] = 8 if "gemma" in out["model_type"] else 2
        few = config["num_attention_heads"] // config["num_key_value_heads"]
        out["num_key_value_heads"] = {1: 4, 4: 1}.get(few, 2)
    for key, value in {"q_lora_rank": 24, "layer_types": ["sliding_attention", "full_attention"]}.items():
        if out.get(key):
            out[key] = value
    if out.get("first_k_dense_replace"):
        out["first_k_dense_replace"] = 1
    if out.get("sliding_window"):
        out["sliding_window"] = 5
    if out.get("rope_scaling"):
        out["rope_scaling"] = {**out["rope_scaling"], "original_max_position_embeddings": 16}
    return out


@pytest.mark.parametrize("name", READ)
def test_the_published_number_of_parameters(name):
    config, parameters = READ[name]
    decoder = family_of(config).decoder(config, vocab_multiple=1)
    counts = parameters_of_model(decoder)
    assert counts["total"] - counts.get("mtp", 0) == parameters


@pytest.mark.long
@pytest.mark.parametrize("name", few(14, [(name,) for name in READ], READ))
def test_in_small_it_is_what_transformers_computes(name, tmp_path):
    config = small(READ[name][0])
    torch.manual_seed(0)
    kind = config.pop("model_type")
    of = transformers.AutoConfig.for_model(kind, **config, attn_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_config(of, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.15)
    theirs.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    decoder = hf.decoder(tmp_path / "model", mtp=None)  # transformers writes no weights of it
    layouts = model.layouts(decoder, Mesh())
    params = hf.load(tmp_path / "model", decoder, layouts)
    tokens = torch.randint(3, 70, (2, 40))
    got, want = model.logits(params, tokens, decoder, Axes(Mesh()))[..., :70], theirs(tokens).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_its_name(name):
    config, names = REFUSED[name]
    with pytest.raises(ValueError, match=r"config.json: " + re.escape(names)):
        family_of(config).decoder(config)


@pytest.mark.parametrize("name", READ)
def test_any_unknown_key_is_refused(name):
    config = {**READ[name][0], "a_new_multiplier": 2.0}
    with pytest.raises(ValueError, match=r"config.json: a_new_multiplier: got 2.0, wanted a key .*docs/families.md"):
        family_of(config).decoder(config)


def test_two_places_of_rope_that_differ_are_refused():
    """What READMEs say to add beside what transformers 5 has saved: it counts there, and must not be lost here."""
    changed = {key: value for key, value in READ["Qwen2.5-7B"][0].items() if key not in ("rope_theta", "rope_scaling")}
    given = {**changed, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    assert family_of(given).decoder({**given, "rope_scaling": None})
    with pytest.raises(ValueError, match="rope_scaling: got 'yarn' beside rope_parameters of 'default'"):
        family_of(given).decoder({**given, "rope_scaling": {"type": "yarn", "factor": 4.0}})
