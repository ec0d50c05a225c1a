"""Megatron's GPT models in torch_dist checkpoints: model, parameters and AdamW's state onto any mesh, by one table.

    decoder = megatron.decoder("runs/gpt")                           # a run's folder, or iter_0000100 in it
    params = megatron.load("runs/gpt", decoder, layouts, world=world)
    state = megatron.load_state("runs/gpt", decoder, tree.layouts(specs), world=world)  # and the optimizer

Dense and MoE models with RMSNorm, RoPE, SwiGLU, grouped queries, tied or not. Source of names and shapes: Megatron-LM's
`sharded_state_dict` of GPTModel. What another argument would change is refused by the argument's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fmegatron import checkpoint, nn, tree
from fmegatron.checkpoint import CheckpointError, Source, copy, drop, fuse, pad, rename, split, stack, transpose
from fmegatron.checkpoint.reading import mapping
from fmegatron.collectives import World
from fmegatron.interop.dcp_directory import COMMON, open_dcp
from fmegatron.interop.dcp_read import object_of
from fmegatron.interop.dcp_source import newest_step, open_source
from fmegatron.model import Attention, Decoder, MoE, RMSNorm, array_specs, llama
from fmegatron.step import State
from fmegatron.tree import structure

_LAYERS = r"decoder\.layers\."
_NAMES = MappingProxyType(
    {
        "self_attention.linear_qkv.layer_norm_weight": "attention_norm",
        "input_layernorm.weight": "attention_norm",
        "self_attention.linear_proj.weight": "attention/wo",
        "self_attention.q_layernorm.weight": "attention/q_norm",
        "self_attention.k_layernorm.weight": "attention/k_norm",
        "mlp.linear_fc1.layer_norm_weight": "mlp_norm",
        "pre_mlp_layernorm.weight": "mlp_norm",
        "mlp.linear_fc1.weight": "mlp/w_gate_up",
        "mlp.linear_fc2.weight": "mlp/w_down",
        "mlp.router.weight": "mlp/router",
        "mlp.experts.experts.linear_fc1.weight": "mlp/up",
        "mlp.experts.experts.linear_fc2.weight": "mlp/down",
    }
)
_MATRICES = r"(?:self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12]|mlp\.router)\.weight"
# Masters are "param" in fully_reshardable, "fp32_param" in older forms and of the optimizer that is not distributed.
_STATES = MappingProxyType({"exp_avg": "opt/adam/m", "exp_avg_sq": "opt/adam/v", "(?:fp32_)?param": "opt/master"})
_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..*")
_OPTIMIZER = r"(?:chained_\d+\.)?optimizer\."
_MASTER = re.compile(rf"{_OPTIMIZER}state\.(?:fp32_)?param\.(.*)")
# Arguments that change the function, with the values that are understood; one that is not there has the first.
_ONLY = MappingProxyType(
    {
        "normalization": ("RMSNorm",),
        "swiglu": (True,),
        "position_embedding_type": ("rope",),
        "add_bias_linear": (False,),
        "rotary_percent": (1.0,),
        "rotary_interleaved": (False,),
        "use_rope_scaling": (False,),
        "rotary_seq_len_interpolation_factor": (None, 1),
        "apply_layernorm_1p": (False,),
        "apply_residual_connection_post_layernorm": (False,),
        "multi_latent_attention": (False,),
        "window_size": (None,),
        "mtp_num_layers": (None, 0),
        "moe_shared_expert_intermediate_size": (None, 0),
        "moe_layer_freq": (1,),
        "moe_router_score_function": ("softmax",),
        "moe_router_topk_scaling_factor": (None, 1.0),
        "moe_router_num_groups": (None, 1),
        "moe_router_enable_expert_bias": (False,),
        "moe_expert_capacity_factor": (None,),
    }
)


def decoder(path: str | os.PathLike, **changes: Any) -> Decoder:
    """The model of a checkpoint, by the arguments in its common.pt; changes: fields of `Decoder` and `Attention`.

    Raises ValueError naming the argument that is not understood; CheckpointError where there are none.
    """
    directory = open_dcp(newest_step(path))
    common = object_of(directory, COMMON, lenient=True) if COMMON in directory.objects else None
    args = common.get("args") if isinstance(common, dict) else None
    where = f"{directory.root}: common.pt: args"
    if not isinstance(args, dict):
        raise CheckpointError(f"{where}: got none, wanted those that Megatron saves; make the Decoder by model.llama")
    for key, understood in _ONLY.items():
        _one_of(args, key, understood, where)
    heads, layers, dim = (_count(args, key, where) for key in ("num_attention_heads", "num_layers", "hidden_size"))
    groups = _count(args, "num_query_groups", where) if args.get("group_query_attention") else heads
    ffn, vocabulary = _count(args, "ffn_hidden_size", where), _count(args, "padded_vocab_size", where)
    eps, theta = (_number(args, key, where) for key in ("norm_epsilon", "rotary_base"))
    made: dict[str, Any] = {
        "head_dim": _count(args, "kv_channels", where),
        "norm_eps": eps,
        "rope_theta": theta,
        "bias": _one_of(args, "add_qkv_bias", (False, True), where),
        "tied": not _one_of(args, "untie_embeddings_and_output_weights", (False, True), where),
    }
    if _one_of(args, "qk_layernorm", (False, True), where):
        made["qk_norm"] = RMSNorm(eps)
    if args.get("num_experts") is not None:
        normalised = not _one_of(args, "moe_router_pre_softmax", (False, True), where)
        router = nn.Router(_count(args, "num_experts", where), _count(args, "moe_router_topk", where),
                           normalised=normalised)  # fmt: skip
        own = args.get("moe_ffn_hidden_size") is not None
        made["mlp"] = MoE(router, _count(args, "moe_ffn_hidden_size", where) if own else ffn)
    if type(args.get("vocab_size")) is int:  # of the tokenizer; the rows behind it are padding
        vocabulary = min(vocabulary, _count(args, "vocab_size", where))
    most = _count(args, "max_position_embeddings", where)
    return llama(vocabulary, dim, layers, heads, groups, ffn, most, **{**made, **changes})


def _one_of(args: Mapping[str, Any], key: str, understood: Sequence[Any], where: str) -> Any:
    """The value of an argument; the first that is understood where it is not there."""
    value = args.get(key, understood[0])
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in understood):
        wanted = " or ".join(map(repr, understood))
        raise ValueError(f"{where}.{key}: got {value!r:.60}, wanted {wanted}; other models need rules of their own")
    return value


def _count(args: Mapping[str, Any], key: str, where: str) -> int:
    value = args.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{where}.{key}: got {value!r:.60}, wanted a whole number of at least 1; make it by model.llama"
        )
    return value


def _number(args: Mapping[str, Any], key: str, where: str) -> float:
    value = args.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}.{key}: got {value!r:.60}, wanted a number; make the Decoder by model.llama")
    return float(value)


def rules(decoder: Decoder, *, params: str = "", optimizer: bool = False) -> list[mapping.Rule]:
    """The rules of a restore from Megatron's names to ours.

    params: where the parameters go, e.g. "params/".  optimizer: masters and moments too, to "opt/master" and
    "opt/adam" of a `step.State`.

    Raises ValueError for a model of other blocks than Megatron's GPT.
    """
    ours = tree.paths(array_specs.arrays(decoder))
    attention = [part.mixer for block in decoder.blocks for part in block if part.name == "attention"]
    one = attention[0] if attention else None
    known = {f"blocks/{path}" for path in (*_NAMES.values(), "attention/wqkv", "attention/bias_qkv")}
    others = [path for path in ours if path not in known | {"embed/table", "final_norm", "head/w"}]
    if others or not isinstance(one, Attention) or len(decoder.stacks) != 1:
        raise ValueError(
            f"{others[0] if others else 'blocks'}: got what Megatron's GPT lacks, wanted one stack of attention and MLP"
            " or MoE; write rules of its own (checkpoint.rename, checkpoint.split, ...)"
        )
    group = (one.heads // one.kv_heads * one.head_dim, one.head_dim, one.head_dim)
    found = [drop(rf"{_FLAT.pattern}|.*_extra_state.*")]
    if optimizer:
        found += [rename(rf"{_OPTIMIZER}state\.{theirs}\.(.*)", rf"{to}/\1") for theirs, to in _STATES.items()]
    else:
        found += [drop(rf"{_OPTIMIZER}.*")]
    found += [
        rename(r"((?!opt/).*)", rf"{params}\1"),
        stack(rf"(.*){_LAYERS}{{i}}\.(.*)", r"\1decoder.layers.\2"),  # where the layers are stored one by one
        transpose(rf".*{_LAYERS}{_MATRICES}", (0, 2, 1)),
        transpose(rf".*{_LAYERS}mlp\.experts\.experts\.linear_fc[12]\.weight", (0, 1, 3, 2)),
        transpose(r".*output_layer\.weight", (1, 0)),
    ]
    for kind, to, dim in (("weight", "wqkv", 2), ("bias", "bias_qkv", 1)):
        parts = [rf"\1blocks/{to}/{x}" for x in "qkv"]
        found.append(split(rf"(.*){_LAYERS}self_attention\.linear_qkv\.{kind}", parts, dim=dim, sizes=group))
        found.append(fuse([rf"(.*)blocks/{to}/{x}" for x in "qkv"], rf"\1blocks/attention/{to}", dim=dim))
    found += [rename(rf"(.*){_LAYERS}{re.escape(theirs)}", rf"\1blocks/{to}") for theirs, to in _NAMES.items()]
    top = {"decoder.final_layernorm.weight": "final_norm", "embedding.word_embeddings.weight": "embed/table",
           "output_layer.weight": "head/w"}  # fmt: skip
    found += [rename(rf"(.*){re.escape(theirs)}", rf"\1{to}") for theirs, to in top.items()]
    if decoder.tied:
        found.append(drop(r".*head/w"))
    return [*found, pad(r".*embed/table", dim=0), pad(r".*head/w", dim=1)]


def load(
    path: str | os.PathLike,
    decoder: Decoder,
    layouts: structure.Tree,
    *,
    world: World | None = None,
    rank: int | None = None,
    read: str = "own",
    cast: bool = True,
    device: str | torch.device | None = None,
) -> structure.Tree:
    """This rank's shards of the parameters; only the stored shards that overlap them are read.

    Args:
        path: of a run's folder (its newest step), or of a step.
        decoder: the model (`decoder`).
        layouts: of its parameters on any mesh.
        world: the ranks that load together, as `checkpoint.restore`; or
        rank: whose shards.
        read: as there.
        cast: convert to the dtype of the layouts.
        device: where they go.

    Raises CheckpointError for damage, ValueError for names and shapes that do not fit.
    """
    options = {"world": world, "rank": rank, "read": read, "cast": cast, "device": device}
    return checkpoint.restore(_source(path), layouts, rules=rules(decoder), **options)


def load_state(
    path: str | os.PathLike,
    decoder: Decoder,
    layouts: State,
    *,
    world: World | None = None,
    rank: int | None = None,
    device: str | torch.device | None = None,
) -> State:
    """This rank's state of `optim.adamw`: parameters, fp32 masters, moments, step and count from Megatron's.

    Masters are Megatron's; where it has none, as its parameters are fp32, they are these. Where our parameters are fp32
    and have no masters, they are Megatron's masters.

    Args:
        path: as `load`; saved with an optimizer's state for each parameter (fully_reshardable, fsdp_dtensor).
        decoder: the model.
        layouts: `tree.layouts(step.state_specs(...))`, with `optim.adamw`.
        world: as `load`.
        rank: as `load`.
        device: as `load`.

    Raises CheckpointError for damage; ValueError for flat buffers (dp_reshardable), which can be cut only as they were
    saved, and for what does not fit.
    """
    found = _source(path)
    with checkpoint.open_snapshot(found) as snapshot:
        _check_optimizer(snapshot)
        opt = {key: layouts.opt[key] for key in ("adam", "master") if key in layouts.opt}
        if others := [key for key in layouts.opt if key not in ("adam", "master", "count")]:
            raise ValueError(f"opt/{others[0]}: got what Megatron's AdamW lacks, wanted the state of optim.adamw")
        table = rules(decoder, params="params/", optimizer=True)
        masters = [m[1] for name in snapshot.leaves if (m := _MASTER.fullmatch(name))]
        if "master" not in opt and masters:
            table = [drop("|".join(map(re.escape, masters))), rename(_MASTER.pattern, r"\1"), *table]
        elif "master" in opt and not masters:
            table.append(copy(r"params/(.*)", r"opt/master/\1"))
        options = {"world": world, "rank": rank, "cast": True, "device": device}
        got = checkpoint.restore(snapshot, {"params": layouts.params, "opt": opt}, rules=table, **options)
        step = torch.tensor(snapshot.step or 0, device=tree.leaves(got)[0].device)
    return State(step, got["params"], {**got["opt"], "count": step.clone()})


def _source(path: str | os.PathLike) -> checkpoint.Foreign:
    return checkpoint.Foreign(os.fspath(path), lambda: open_source(path))


def _check_optimizer(snapshot: Source) -> None:
    if any(_FLAT.fullmatch(name) for name in snapshot.leaves):
        raise ValueError(
            f"{snapshot.text}: got the optimizer's state in flat buffers (dp_reshardable), wanted one for each"
            " parameter; start Megatron once with --dist-ckpt-optim-fully-reshardable and save, or take the parameters"
            " alone (load)"
        )
