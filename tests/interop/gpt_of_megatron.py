"""Megatron's own GPT models, made and saved by megatron-core on CPU ranks; a program of the peers' environment.

    PYTHON tests/interop/gpt_of_megatron.py TP FOLDER      (PYTHON: .venv-peers/bin/python)

For each case FOLDER/CASE/run/iter_0000007 is a torch_dist checkpoint as Megatron's training writes it, with the
arguments that describe the model, and FOLDER/CASE/logits.pt holds tokens and the model's logits of them. megatron-core
runs on the CPU here with three stubs: what it asks CUDA for where no GPU is needed, the generator of its dropout, and a
name that its router misses without Transformer Engine.
"""

import argparse
import contextlib
import os
import sys

import torch

SIZES = {"num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 72, "num_attention_heads": 6, "num_query_groups": 2,
         "kv_channels": 8}  # fmt: skip
CASES = {
    "dense": {},
    "tied": {"untie_embeddings_and_output_weights": False, "qk_layernorm": True, "add_qkv_bias": True},
    "experts": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "vocab_size": None},
}


def arguments(case: str, tp: int) -> argparse.Namespace:
    """The arguments of a run, by the names of Megatron's command line; those that a model is made of and some more."""
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        **{
            **SIZES,
            "group_query_attention": True,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-6,
            "swiglu": True,
            "position_embedding_type": "rope",
            "rotary_base": 500000,
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
            "rotary_seq_len_interpolation_factor": None,
            "use_rope_scaling": False,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "apply_layernorm_1p": False,
            "apply_residual_connection_post_layernorm": False,
            "multi_latent_attention": False,
            "window_size": None,
            "mtp_num_layers": None,
            "max_position_embeddings": 16,
            "untie_embeddings_and_output_weights": True,
            "vocab_size": 65,
            "make_vocab_size_divisible_by": 128,
            "padded_vocab_size": 128,
            "num_experts": None,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": None,
            "moe_router_pre_softmax": False,
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
            "moe_router_num_groups": None,
            "moe_router_enable_expert_bias": False,
            "moe_layer_freq": 1,
            "moe_shared_expert_intermediate_size": None,
            "moe_expert_capacity_factor": None,
            "tensor_model_parallel_size": tp,
            "attention_backend": AttnBackend.auto,
            "params_dtype": torch.float32,
            "iteration": 7,
            **CASES[case],
        }
    )


def gpt(args: argparse.Namespace) -> torch.nn.Module:
    """The model of the arguments, with weights that depend on nothing else: not on the number of ranks."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **SIZES, tensor_model_parallel_size=args.tensor_model_parallel_size, normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, add_qkv_bias=args.add_qkv_bias, qk_layernorm=args.qk_layernorm,
        num_moe_experts=args.num_experts, moe_router_topk=args.moe_router_topk,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather", hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        params_dtype=torch.float32, bias_activation_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(args.num_experts, qk_layernorm=args.qk_layernorm, normalization="RMSNorm")
    torch.manual_seed(1)
    model = GPTModel(
        config, spec, args.padded_vocab_size, args.max_position_embeddings, parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope", rotary_base=args.rotary_base,
    )  # fmt: skip
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 1:  # norms are ones and biases zeros: others tell more
                split = "qkv.bias" in name
                parts = args.tensor_model_parallel_size if split else 1
                whole = torch.randn(len(x) * parts, generator=random) * 0.2
                x += whole.chunk(parts)[torch.distributed.get_rank() if split else 0]
    return model.eval()


def main(rank: int, tp: int, folder: str) -> None:
    """Write every case, as one of `tp` ranks."""
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tokens = torch.randint(0, 65, (6, 16), generator=torch.Generator().manual_seed(5))
    hidden = torch.ones(16, 16).triu(1)[None, None].bool()
    for case in CASES:
        args = arguments(case, tp)
        model = gpt(args)
        with torch.no_grad():
            logits = model(tokens, torch.arange(16).expand(6, 16), hidden)
        path = f"{folder}/{case}/run/iter_0000007"
        os.makedirs(path, exist_ok=True)
        torch.distributed.barrier()
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": model.sharded_state_dict()}
        dist_checkpointing.save(state, path)
        if rank == 0:
            torch.save({"tokens": tokens, "logits": logits}, f"{folder}/{case}/logits.pt")
            with open(f"{folder}/{case}/run/latest_checkpointed_iteration.txt", "w") as file:
                file.write("7")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (int(sys.argv[1]), sys.argv[2]), int(sys.argv[1]))
