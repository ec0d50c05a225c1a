"""Settings of a decoder's train step, any two of which may be wanted together: what they make, and what is refused.

A case is a dict of one value for each of OPTIONS. `allowed` knows which values say nothing together, or more than eight
ranks; REFUSED which ones the library refuses, each with the error that a user gets and its fix.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.families.registry import family_of
from fmegatron.nn.context_parallel import zigzag
from tests import pairs
from tests.model.test_reference import leaves_that_differ

SEQ, VOCAB, MOST_RANKS = 16, 46, 8
DATA = ("dp", "fsdp", "ep")
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": SEQ, "rms_norm_eps": 1e-5,
}  # fmt: skip
MLA = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 12, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": SEQ}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # `test_dropout` has them
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}  # of scores in memory one head leaves no trace in sizes
GEMMA2 = {**HEADS, "head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
GPT_OSS = {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3, "head_dim": 8}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gemma2": {"model_type": "gemma2", **SIZES, **GEMMA2, "query_pre_attn_scalar": 24},
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 3},
    "mixtral": {"model_type": "mixtral", **SIZES, **MIXTRAL},
    "deepseek_v3": {"model_type": "deepseek_v3", **SIZES, **MLA},
    "gpt_oss": {"model_type": "gpt_oss", **SIZES, **GPT_OSS, "intermediate_size": 12},
}
EXPERTS = ("mixtral", "deepseek_v3", "gpt_oss")
OVER = {  # what holds experts -> its axes
    "each rank all": (), "own axis": ("ep",), "over fsdp": ("fsdp",), "over cp": ("cp",), "over tp": ("tp",),
    "over cp and tp": ("cp", "tp"), "over own and tp": ("ep", "tp"),
}  # fmt: skip
OPTIONS = {
    "family": tuple(CONFIGS),
    "dp": (1, 2),
    "fsdp": (1, 2),
    "tp": ("none", "tp", "tp, sequence"),
    "cp": ("none", "ring", "balanced", "gathered", "ulysses", "two_level", "two_level_balanced"),
    "experts": tuple(OVER),
    "microbatches": (1, 2),
    "save": (None, "inputs", "mincut"),
    "state": ("hsdp", "zero1", "zero3"),
    "batch": ("in order", "packed", "mask"),
}
# (values together, what the error says): each of them is refused, and the error names the fix
REFUSED = tuple(
    ({"experts": over, "tp": "tp"}, "set Decoder.sequence_parallel=True, or leave tp out of ep")
    for over, axes in OVER.items()
    if "tp" in axes
)


def sizes(case: dict) -> dict[str, int]:
    """Of the axes, so far as they are decided."""
    holds = OVER[case.get("experts", "each rank all")]
    tp = case.get("tp", "tp" if "tp" in holds else "none") != "none"
    form = case.get("cp", "ring" if "cp" in holds else "none")
    fsdp = case.get("fsdp", 2 if "fsdp" in holds else 1)
    cp = {"cp": 1 + (form != "none"), "cpi": 1 + form.startswith("two_level")}
    return {"dp": case.get("dp", 1), "fsdp": fsdp, "ep": 1 + ("ep" in holds), **cp, "tp": 1 + tp}


def allowed(case: dict) -> bool:
    """Whether the values decided so far are a case of their own, on at most eight ranks, that is not refused."""
    mesh, holds = Mesh(**sizes(case)), OVER[case.get("experts", "each rank all")]
    if mesh.size > MOST_RANKS or any(mesh[name] == 1 for name in holds):
        return False
    if holds and case.get("family", EXPERTS[0]) not in EXPERTS:
        return False
    return not any(all(case.get(k) == v for k, v in values.items()) for values, _ in REFUSED)


# ---- what a case makes -----------------------------------------------------------------------------------------------
class Made(NamedTuple):
    """Of a case: its mesh, strategy, decoder, and how its step is built."""

    mesh: Mesh
    strategy: DataParallel
    decoder: model.Decoder
    save: str | None
    microbatches: int


def made(case: dict) -> Made:
    """Of a case. ValueError for what the library refuses."""
    mesh, wide = Mesh(**sizes(case)), ("dp", "fsdp", "ep", "cp", "cpi")
    kinds = {"hsdp": (("fsdp",),) * 3, "zero1": ((), (), wide), "zero3": (wide,) * 3}[case["state"]]
    return Made(mesh, DataParallel(DATA, *kinds), decoder_of(case), case["save"], case["microbatches"])


def decoder_of(case: dict) -> model.Decoder:
    """The family's model with the forms of the case."""
    config, form = CONFIGS[case["family"]], None if case["cp"] == "none" else case["cp"]
    options = {"precision": Precision.fp64(), "sequence_parallel": case["tp"] == "tp, sequence", "vocab_multiple": 2}
    of = family_of(config).decoder(config, **options)

    experts = {"ep": OVER[case["experts"]]}
    if case["family"] == "deepseek_v3":
        experts |= {"sequence_balance": 0.1, "z_loss": 0.01}
    return with_fields(of, context=form, **experts)


def with_fields(of: model.Decoder, **fields) -> model.Decoder:
    """The model with other fields of those of its mixers that have them."""

    def other(part):
        mine = {name: v for name, v in fields.items() if name in part.mixer.__dataclass_fields__}
        return dataclasses.replace(part, mixer=dataclasses.replace(part.mixer, **mine))

    return dataclasses.replace(of, blocks=tuple(tuple(map(other, block)) for block in of.blocks))


def train_step(mesh: Mesh, of: Made):
    """The step of a case, on its mesh or on one rank."""
    axes, layouts = Axes(mesh, data=of.strategy.tokens), model.layouts(of.decoder, mesh, strategy=of.strategy)
    loss = functools.partial(model.loss, decoder=of.decoder, axes=axes, save=of.save)
    how = {"strategy": of.strategy, "microbatches": of.microbatches, "twice": True}  # Switch's balance needs all loads
    return step.build_train_step(lambda p, b: loss(p, b), optim.adamw(1e-2), layouts, axes, **how)


def specs_of(of: Made, mesh: Mesh):
    """Of the state."""
    specs = model.specs(of.decoder, mesh, strategy=of.strategy)
    return step.state_specs(specs, optim.adamw(1e-2), of.strategy)


def rows_of(of: Made, batch: dict):
    """Layouts of a batch."""
    place = functools.partial(of.strategy.batch_layout, mesh=of.mesh, microbatches=of.microbatches)
    return {name: place(tuple(x.shape), x.dtype) for name, x in batch.items()}


def state_of(of: Made):
    """Global arrays."""
    one = Mesh(**dict.fromkeys(of.mesh.names, 1))
    state = tree.init(specs_of(of, one), 0, 0)
    return state._replace(params=leaves_that_differ(state.params))


def batch_of(case: dict, i: int = 0) -> dict:
    """Global arrays of step i: two rows for each rank and microbatch; balanced rings have them in zigzag order."""
    g, mesh = torch.Generator().manual_seed(i), Mesh(**sizes(case))
    B = 2 * mesh["dp"] * mesh["fsdp"] * mesh["ep"] * case["microbatches"]
    tokens = torch.randint(0, VOCAB, (B, SEQ + 1), generator=g)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    if case["batch"] == "mask":
        batch["mask"] = (torch.rand(B, SEQ, generator=g) < 0.7).double()
    at = torch.arange(SEQ).expand(B, -1)
    if case["batch"] == "packed":  # of two documents in a row, the second may begin on any rank
        begins = torch.randint(1, SEQ + 1, (B, 1), generator=g)
        batch |= {"documents": (at >= begins).long(), "positions": torch.where(at >= begins, at - begins, at)}
    elif "balanced" in case["cp"]:
        batch["positions"] = at
    order = zigzag(SEQ, mesh["cp"]) if "balanced" in case["cp"] else torch.arange(SEQ)
    return {name: x[:, order].contiguous() for name, x in batch.items()}


def named(case: dict) -> str:
    """What of a case is not the first value of its option."""
    return "; ".join(v if k == "family" else f"{k} {v}" for k, v in case.items() if k == "family" or v != OPTIONS[k][0])


PAIRS = pairs.array(OPTIONS, allowed)


def _few(case: dict) -> bool:
    return allowed(case) and Mesh(**sizes(case)).size <= 4


REAL = pairs.array(OPTIONS, _few, 1)  # for gloo ranks: every value of every option is in one of them
