"""Tiny models of every family by transformers, with random weights, saved as folders."""

from __future__ import annotations

import importlib

import torch

SEED = 0
SMALL = {
    "vocab_size": 70, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 64, "attn_implementation": "eager", "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 20}
MLA = {
    "n_routed_experts": 8, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
SHARPER = {"mscale": 0.7, "mscale_all_dim": 1.0}
MAMBA = {
    "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 12, "mamba_d_state": 10, "mamba_chunk_size": 8,
}  # fmt: skip
# name -> (prefix of the classes of transformers, fields of its configuration)
MODELS = {
    "llama2": ("Llama", {}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 8}),
    "llama-biases": ("Llama", {"attention_bias": True, "rope_parameters": {**YARN, "rope_theta": 5e5}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2.5-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**GEMMA, "rope_parameters": GEMMA3}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "num_experts": 8, "norm_topk_prob": True, "head_dim": 16}),
    "deepseek-v2": ("DeepseekV2", {**MOE, **MLA, "q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**MOE, **MLA, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **MOE,
            **MLA,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "rope_parameters": {**YARN, **SHARPER},
            "num_mtp_layers": 0,
        },
    ),
    "bamba": ("Bamba", {**MAMBA, "attention_bias": True}),
    "bamba-groups": (
        "Bamba",
        {**MAMBA, "mamba_n_groups": 4, "mamba_conv_bias": False, "mamba_d_conv": 3, "time_step_limit": (0.01, 0.5)},
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "head_dim": 16}),
}


def config_of(name: str, vocab_size: int = 70):
    """(class of the model, its configuration)."""
    transformers = importlib.import_module("transformers")
    family, fields = MODELS[name]
    fields = {**fields, "vocab_size": vocab_size}
    if family == "GPT2":
        of = transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=48, n_layer=3, n_head=4, n_positions=64, attn_implementation="eager",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel, of
    text = "Text" if family == "Gemma3" else ""
    of = getattr(transformers, f"{family}{text}Config")(**SMALL | fields)
    return getattr(transformers, f"{family}ForCausalLM"), of


def model_of(name: str, vocab_size: int = 70):
    """A model with random weights: norms and biases too, or a missing factor would not be seen."""
    torch.manual_seed(SEED)
    kind, config = config_of(name, vocab_size)
    model = kind(config).float().eval()
    with torch.no_grad():
        for path, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in path or "embed_scale" in path:
                continue
            p.normal_(std=0.15 if p.dim() > 1 else 0.02 if "correction" in path else 0.3)
            if "norm" in path or "ln_" in path:
                p.add_(1.0)
    return model
