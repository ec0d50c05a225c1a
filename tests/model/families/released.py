"""The config.json of released models, as they were published, with the number of their parameters."""

_OF_STORAGE = {
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
    "initializer_range": 0.02,
}


def _llama(vocab, dim, ffn, layers, heads, kv_heads, longest, theta=10000.0, **others):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": dim,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": longest, "rope_theta": theta, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "pretraining_tp": 1,
        "rope_scaling": None, **_OF_STORAGE, **others,
    }  # fmt: skip


def _qwen(kind, vocab, dim, ffn, layers, heads, kv_heads, **others):
    windows = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": layers}
    return {
        **_llama(vocab, dim, ffn, layers, heads, kv_heads, 131072, 1e6), "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(), "rms_norm_eps": 1e-6, **windows, "attention_dropout": 0.0, **others,
    }  # fmt: skip


_LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_BIASES = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_GEMMA = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "cache_implementation": "hybrid", "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    **_OF_STORAGE,
}  # fmt: skip
_MLA = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False,
    "moe_layer_freq": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
_YARN_MLA = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
}  # fmt: skip
_BAMBA = {
    **_llama(128256, 4096, 14336, 32, 32, 8, 4096), "architectures": ["BambaForCausalLM"], "model_type": "bamba",
    "attention_bias": False, "attention_dropout": 0.0, "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False, "mlp_bias": False,
    "num_logits_to_keep": 1, "use_mamba_kernels": True,
}  # fmt: skip
READ = {
    "Llama-2-7b": (_llama(32000, 4096, 11008, 32, 32, 32, 4096), 6_738_415_616),
    "CodeLlama-7b": (_llama(32016, 4096, 11008, 32, 32, 32, 16384, 1e6), 6_738_546_688),
    "TinyLlama-1.1B": (_llama(32000, 2048, 5632, 22, 32, 4, 2048), 1_100_048_384),
    "Yi-34B": (_llama(64000, 7168, 20480, 60, 56, 8, 4096, 5e6, pad_token_id=0), 34_388_917_248),
    "Meta-Llama-3-8B": (_llama(128256, 4096, 14336, 32, 32, 8, 8192, 5e5, **_BIASES), 8_030_261_248),
    "Llama-3.1-8B": (_llama(128256, 4096, 14336, 32, 32, 8, 131072, 5e5, rope_scaling=_LLAMA31), 8_030_261_248),
    "Llama-3.2-1B": (
        _llama(128256, 2048, 8192, 16, 32, 8, 131072, 5e5, head_dim=64, tie_word_embeddings=True,
               rope_scaling={**_LLAMA31, "factor": 32.0}, eos_token_id=[128001, 128008, 128009], **_BIASES),
        1_235_814_400,
    ),
    "SmolLM2-1.7B": (
        _llama(49152, 2048, 8192, 24, 32, 32, 8192, 130000, tie_word_embeddings=True, is_llama_config=True,
               rope_interleaved=False, **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}),
        1_711_376_384,
    ),
    "Mistral-7B-v0.1": (
        {**_llama(32000, 4096, 14336, 32, 32, 8, 32768), "model_type": "mistral", "sliding_window": 4096},
        7_241_732_096,
    ),
    "Mistral-7B-v0.3": (
        {**_llama(32768, 4096, 14336, 32, 32, 8, 32768, 1e6), "model_type": "mistral", "sliding_window": None},
        7_248_023_552,
    ),
    "Mistral-Nemo": (
        {**_llama(131072, 5120, 14336, 40, 32, 8, 131072, 1e6), "model_type": "mistral", "sliding_window": None,
         "head_dim": 128},
        12_247_782_400,
    ),
    "Qwen2-0.5B": (_qwen("Qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True), 494_032_768),
    "Qwen2.5-7B": (_qwen("Qwen2", 152064, 3584, 18944, 28, 28, 4, use_mrope=False), 7_615_616_512),
    "Qwen2.5-7B-yarn": (_qwen("Qwen2", 152064, 3584, 18944, 28, 28, 4, rope_scaling=_YARN), 7_615_616_512),
    "Qwen3-8B": (
        _qwen("Qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128, attention_bias=False, sliding_window=None),
        8_190_735_360,
    ),
    "gemma-2-2b": (
        {**_GEMMA, "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
         "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
         "rope_theta": 10000.0, "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"},
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {**_GEMMA, "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
         "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32768,
         "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512,
         "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "attn_logit_softcapping": None,
         "final_logit_softcapping": None},
        999_885_952,
    ),
    "Mixtral-8x7B": (
        {**_llama(32000, 4096, 14336, 32, 32, 8, 32768, 1e6), "model_type": "mixtral", "sliding_window": None,
         "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02},
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        _qwen("Qwen3", 151936, 2048, 6144, 48, 32, 4, model_type="qwen3_moe", head_dim=128, attention_bias=False,
              decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
              num_experts=128, num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.001,
              sliding_window=None),
        30_532_122_624,
    ),
    "DeepSeek-V2-Lite": (
        {**_llama(102400, 2048, 10944, 27, 16, 16, 163840), **_MLA, "model_type": "deepseek_v2", "q_lora_rank": None,
         "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
         "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
         "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "aux_loss_alpha": 0.001, "seq_aux": True,
         "rope_scaling": {**_YARN_MLA, "mscale": 0.707, "mscale_all_dim": 0.707}},
        15_706_484_224,
    ),
    "DeepSeek-V3": (
        {**_llama(129280, 7168, 18432, 61, 128, 128, 163840), **_MLA, "model_type": "deepseek_v3", "q_lora_rank": 1536,
         "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
         "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "ep_size": 1,
         "rope_scaling": {**_YARN_MLA, "mscale": 1.0, "mscale_all_dim": 1.0}},
        671_026_419_200,
    ),
    "Bamba-9B": (_BAMBA, 9_780_235_392),
    "gpt-oss-20b": (
        {**_llama(201088, 2880, 2880, 24, 64, 8, 131072, 150000), "model_type": "gpt_oss", "head_dim": 64,
         "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4, "initial_context_length": 4096,
         "layer_types": ["sliding_attention", "full_attention"] * 12, "num_experts_per_tok": 4,
         "num_local_experts": 32, "output_router_logits": False, "router_aux_loss_coef": 0.9, "sliding_window": 128,
         "swiglu_limit": 7.0,
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                          "original_max_position_embeddings": 4096}},
        20_914_757_184,
    ),
    "gpt2": (
        {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
         "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
         "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
         "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
         "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
         "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257},
        124_439_808,
    ),
}  # fmt: skip

# Released ones that compute something else: (config, what the error names)
_SMALL = (32000, 4096, 11008, 32, 32, 32, 4096)
REFUSED = {
    "Llama in 4 bits": (_llama(*_SMALL, quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "dynamic NTK": (_llama(*_SMALL, rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type: got 'dynamic'"),
    "longrope": (
        _llama(*_SMALL, rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
        "rope_type: got 'longrope'",
    ),
    "biases of the MLP": (_llama(*_SMALL, mlp_bias=True), "mlp_bias: got True"),
    "another activation": (_llama(*_SMALL, hidden_act="gelu"), "hidden_act: got 'gelu'"),
    "interleaved": (_llama(*_SMALL, rope_interleaved=True), "rope_interleaved: got True"),
    "biases of a Mamba projection": ({**_BAMBA, "mamba_proj_bias": True}, "mamba_proj_bias: got True"),
    "another rotated part": ({**_BAMBA, "attn_rotary_emb": 128}, "attn_rotary_emb: got 128, wanted 64"),
    "Granite": ({**_llama(*_SMALL), "model_type": "granite"}, "model_type: got 'granite'"),
    "multipliers of Granite": (_llama(*_SMALL, residual_multiplier=0.22), "residual_multiplier: got 0.22"),
    "Qwen2.5-7B-1M": (
        _qwen("Qwen2", 152064, 3584, 18944, 28, 28, 4, dual_chunk_attention_config={"chunk_size": 262144}),
        "dual_chunk_attention_config",
    ),
    "Qwen2-VL": (
        _qwen("Qwen2", 152064, 3584, 18944, 28, 28, 4, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
        "rope_type: got 'mrope'",
    ),
    "Gemma 3 with pictures": ({"model_type": "gemma3", "text_config": {}}, "model_type: got 'gemma3'"),
    "a part of each head": (_llama(*_SMALL, partial_rotary_factor=0.5), "partial_rotary_factor"),
    "another key of yarn": (
        _llama(*_SMALL, rope_scaling={**_YARN, "temperature": 2.0}), "rope scaling yarn: temperature: got 2.0",
    ),
}  # fmt: skip
