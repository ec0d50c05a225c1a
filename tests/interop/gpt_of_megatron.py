"""Megatron's own GPT models, made and saved by megatron-core on CPU ranks; a program of the peers' environment.

    PYTHON tests/interop/gpt_of_megatron.py models TP FOLDER      (PYTHON: .venv-peers/bin/python)
    PYTHON tests/interop/gpt_of_megatron.py trained TP FOLDER

models: on TP ranks, for each case, FOLDER/CASE/run/iter_0000007 is a torch_dist checkpoint as Megatron's training
writes it, with the arguments that describe the model, and FOLDER/CASE/logits.pt holds tokens and the logits of them.
trained: on 2 ranks, in fp32, in bf16 and (tp 1) with experts, FOLDER/CASE/run/iter_0000002 is one with AdamW's state
behind two steps of its distributed optimizer, saved for each parameter (fully_reshardable); FOLDER/CASE/next.pt holds
the batch of a third step, its loss, and the logits behind it.

megatron-core runs on the CPU here with stubs: "cuda" means the CPU, its dropout has no generator of its own, and a name
that its router misses without Transformer Engine is None.
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
TRAINED = {"fp32": "dense", "bf16": "dense", "experts": "experts"}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}


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


class OnCPU(torch.overrides.TorchFunctionMode):
    """What asks for a tensor on CUDA gets one on the CPU, and tensors say that they are on CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not given:
            return func(*args).replace("torch.", "torch.cuda.")
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        return func(*("cpu" if isinstance(x, str) and x == "cuda" else x for x in args), **given)


@contextlib.contextmanager
def ranks(rank: int, size: int, tp: int, folder: str):
    """megatron-core on gloo ranks of this machine."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    torch.set_num_threads(1)
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    with OnCPU():
        yield
    torch.distributed.destroy_process_group()


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V], with causal attention."""
    length = tokens.shape[1]
    hidden = torch.ones(length, length).triu(1)[None, None].bool()
    return model(tokens, torch.arange(length).expand_as(tokens), hidden)


def save(run: str, step: int, args: argparse.Namespace, content: dict, metadata: dict | None = None) -> None:
    """A checkpoint of a run as Megatron's training lays it out."""
    from megatron.core import dist_checkpointing

    path = f"{run}/iter_{step:07d}"
    os.makedirs(path, exist_ok=True)
    torch.distributed.barrier()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": step, **content}
    dist_checkpointing.save(state, path, content_metadata=metadata)
    with open(f"{run}/latest_checkpointed_iteration.txt", "w") as file:
        file.write(str(step))


def models(rank: int, tp: int, folder: str) -> None:
    """Write every case with its logits, as one of `tp` ranks."""
    with ranks(rank, tp, tp, folder):
        tokens = torch.randint(0, 65, (6, 16), generator=torch.Generator().manual_seed(5))
        for case in CASES:
            args = arguments(case, tp)
            model = gpt(args)
            with torch.no_grad():
                logits = logits_of(model, tokens)
            save(f"{folder}/{case}/run", 7, args, {"model": model.sharded_state_dict()})
            if rank == 0:
                torch.save({"tokens": tokens, "logits": logits}, f"{folder}/{case}/logits.pt")


def trained(rank: int, tp: int, folder: str) -> None:
    """Train every case for two steps, save, and train for a third, as one of two ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with ranks(rank, 2, tp, folder):
        for name, case in TRAINED.items():
            args, dtype = arguments(case, tp), torch.bfloat16 if name == "bf16" else torch.float32
            args.vocab_size = None  # its loss is over the padded vocabulary
            if tp > 1 and args.num_experts:  # it wants sequence parallelism then, which its plain norms refuse
                continue
            model = gpt(args).to(dtype).train()
            wrapped = DistributedDataParallel(
                model.config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
                model,
            )  # fmt: skip
            config = OptimizerConfig(
                **ADAMW, optimizer="adam", bf16=name == "bf16", params_dtype=dtype, use_distributed_optimizer=True,
                clip_grad=0.0,
            )  # fmt: skip
            optimizer = get_megatron_optimizer(config, [wrapped])
            for group in optimizer.param_groups:  # as its scheduler does: norms and biases do not decay
                group["weight_decay"] = ADAMW["weight_decay"] * group["wd_mult"]
            batches = torch.randint(0, 128, (3, 4, 17), generator=torch.Generator().manual_seed(6))
            for step, batch_BS in enumerate(batches):
                if step == 2:
                    kind = {"distrib_optim_sharding_type": "fully_reshardable"}
                    whole = model.sharded_state_dict(metadata=kind)
                    state = optimizer.sharded_state_dict({"model": whole}, metadata=kind)
                    save(f"{folder}/{name}/run", 2, args, {"model": whole, "optimizer": state}, kind)
                wrapped.zero_grad_buffer()
                optimizer.zero_grad()
                rows = batch_BS.chunk(2 // tp)[rank if tp == 1 else 0]
                logits = logits_of(wrapped, rows[:, :-1]).float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
                loss.backward()
                wrapped.finish_grad_sync()
                optimizer.step()
            torch.distributed.all_reduce(loss.data)
            with torch.no_grad():
                logits = logits_of(model.eval(), batches[2, :, :-1])
            if rank == 0:
                found = {"batch": batches[2], "loss": loss.data / 2, "logits": logits}
                torch.save(found, f"{folder}/{name}/next.pt")


if __name__ == "__main__":
    what, tp, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if what == "models":
        torch.multiprocessing.spawn(models, (tp, folder), tp)
    else:
        torch.multiprocessing.spawn(trained, (tp, folder), 2)
