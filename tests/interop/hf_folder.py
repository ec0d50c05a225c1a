"""A folder of Hugging Face as `transformers` and the safetensors package write it, without transformers."""

import json

import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip


def tensors(config, dtype=torch.bfloat16):
    """Every tensor of a Llama of this configuration, random."""
    random = torch.Generator().manual_seed(0)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{n}_proj.weight": (kv if n in "kv" else d, d) for n in "qkvo"}
        shapes |= {f"{at}mlp.{n}_proj.weight": (f, d) for n in ("gate", "up")} | {f"{at}mlp.down_proj.weight": (d, f)}
        shapes |= {f"{at}{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def write(folder, shards=3, **changes):
    """(the tensors, bytes of them) of a folder with files of the safetensors package and an index."""
    config = CONFIG | changes
    found = tensors(config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    names = sorted(found)
    if shards == 1:
        save_file(found, folder / "model.safetensors", {"format": "pt"})
        return found
    files = [f"model-{k + 1:05d}-of-{shards:05d}.safetensors" for k in range(shards)]
    for k, file in enumerate(files):
        save_file({name: found[name] for name in names[k::shards]}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: files[i % shards] for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return found
