"""Steps that `make check-cuda` looks at: pairs of what a decoder's step is made of, and every experiment.

A case is a dict of one value for each of OPTIONS. Sizes are small, dtypes those of a GPU; every part of the sequence is
a multiple of PRIME, and no other size of a step is.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from fmegatron import model, optim, step
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop.experiment import load_experiment
from fmegatron.model.context import FORMS
from fmegatron.model.families.registry import FAMILIES, family_of
from fmegatron.optim import contrib
from fmegatron.step import description as step_description
from tests import pairs
from tests.house import ROOT

PRIME, SEQ, VOCAB = 11, 352, 512
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": SEQ, "rms_norm_eps": 1e-5,
}  # fmt: skip
MLA = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 128, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
EXPERT = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
GPT2 = {"vocab_size": VOCAB, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": SEQ}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
BAMBA = {
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 64,
    "mamba_n_groups": 1, "mamba_chunk_size": 16, "attn_layer_indices": [1],
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 64}
MORE: Mapping[str, dict] = {
    "llama": {},
    "bamba": BAMBA,
    "deepseek_v2": {**MLA, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    "deepseek_v3": MLA,
    "gemma2": {"sliding_window": 48, **CAPS},
    "gemma3_text": {"sliding_window": 48, "query_pre_attn_scalar": 64},
    "gpt2": {},
    "gpt_oss": {**EXPERT, "sliding_window": 48, "intermediate_size": 128},
    "mistral": {"sliding_window": 48},
    "mixtral": EXPERT,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": QWEN_EXPERT,
}
MEMORIES = ("device", "host", "host-update")
PAIR_ROWS = 512  # from each rank of experts to each, of 704 tokens
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
EIGHT = [("adam/m", contrib.int8(fit=True)), ("adam/v", contrib.float8(root=True, fit=True))]
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(1e-3),
    "muon": lambda: optim.muon(1e-3),
    "lion": lambda: optim.lion(1e-3),
    "sgd": lambda: optim.sgd(1e-3, momentum=0.9),
    "adafactor": lambda: contrib.adafactor(1e-3),
    "soap": lambda: contrib.soap(1e-3),
    "grouped": lambda: optim.grouped(1e-3, [("embed/.*", optim.Group(lr=0.5))], adam=optim.scale_by_adam()),
    "8 bit": lambda: contrib.compressed(optim.adamw(1e-3), EIGHT),
    "averaged": lambda: optim.averaged(optim.adamw(1e-3), 0.99),
    "guarded": lambda: optim.skip_nonfinite(optim.adamw(1e-3), loss_scale=optim.LossScale()),
}
MASKS: Mapping[str, dict] = {  # fields of attention, in each family that has it
    "causal": {},
    "documents": {},
    "window": {"window": 48},
    "caps": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.125},
}
PLAIN = ("llama", "qwen2", "qwen3", "gpt2")  # families that attend to all before, by `model.Attention`
OPTIONS: Mapping[str, tuple] = {
    "axes": ("one", "dp fsdp", "tp", "tp sequence", *FORMS, "ep fsdp"),
    "mask": tuple(MASKS),
    "strategy": ("hsdp", "replicated", "zero1", "zero2", "zero3", "hybrid"),
    "save": ("mincut", None, "inputs", "all", 0.5, "offload"),
    "precision": ("bf16", "bf16_wire", "fp8_wire", "fp32"),
    "microbatches": (1, 2),
}
SPREAD: Mapping[str, tuple] = {"family": tuple(MORE), "optimizer": tuple(OPTIMIZERS), "memory": MEMORIES}


def mesh_of(case: Mapping) -> Mesh:
    """Of its axes."""
    axes = case["axes"]
    if axes in FORMS:
        return Mesh(cp=2, cpi=2) if axes.startswith("two_level") else Mesh(cp=2)
    return Mesh(**{name: 2 for name in axes.split() if name in ("dp", "fsdp", "tp", "ep")})


def allowed(case: Mapping) -> bool:
    """Whether what is decided of a case may occur together."""
    return not (case.get("mask") == "dropout" and case.get("axes") in FORMS)


def families(case: Mapping) -> tuple[str, ...]:
    """Those that a case can be of."""
    masked, experts = case["mask"] not in ("causal", "documents"), case["axes"].startswith("ep")
    if masked and experts:
        return ("mixtral", "qwen3_moe")
    if masked:
        return PLAIN
    of_cp = [name for name in MORE if name != "bamba"]
    return EXPERTS if experts else tuple(of_cp if case["axes"] in FORMS else MORE)


def _spread() -> list[dict]:
    """The pairs of OPTIONS, each with values of SPREAD that few have before it."""
    used: collections.Counter[tuple] = collections.Counter()
    cases = []
    for number, case in enumerate(pairs.array(OPTIONS, allowed)):
        for name, values in SPREAD.items():
            possible = families(case) if name == "family" else values
            if name == "memory":
                possible = MEMORIES[1:] if number % 6 == 5 else MEMORIES[:1]
            value = min(possible, key=lambda value: used[name, value])
            used[name, value] += 1
            case = {**case, name: value}
        if number % 2 and case["axes"].startswith("ep"):
            case["pair_rows"] = PAIR_ROWS
        cases.append(case)
    return cases


CASES = _spread()
# Experiments whose step is none of their own, and why.
APART = {
    "demo": "runs shakespeare.py",
    "minimal": "has no describe: `jit` of a function of plain tensors, as `mutants.right` is",
}
# What `make test` looks at.
DENSE = {
    "axes": "one", "mask": "causal", "strategy": "zero3", "save": "mincut", "precision": "bf16", "microbatches": 1,
    "family": "llama", "optimizer": "adamw", "memory": "device",
}  # fmt: skip
# Values that make kernels of their own, of which code and machine code are made.
OF_KERNELS = {
    "family": ("llama", "bamba", "deepseek_v3", "gemma2", "gpt_oss", "qwen3_moe"),
    "optimizer": ("adamw", "muon", "lion", "adafactor", "soap", "8 bit", "guarded"),
    "axes": ("one", "tp sequence", "ring", "ep fsdp"),
    "precision": ("bf16", "fp8_wire"),
    "mask": ("documents", "dropout"),
    "memory": ("device", "host-update"),
}


def experiments() -> tuple[str, ...]:
    """Names of the files of experiments."""
    return tuple(sorted(path.stem for path in (ROOT / "experiments").glob("*.py")))


def left_out(cases: Sequence[Mapping]) -> list[str]:
    """Values of OPTIONS and SPREAD, families, forms of context and strategies that are in none of the cases, and pairs
    of OPTIONS that may occur together and do not."""
    has = {item for case in cases for item in case.items()}
    wanted = {(name, value) for name, values in (OPTIONS | SPREAD).items() for value in values}
    wanted |= {("family", name) for name in FAMILIES} | {("axes", form) for form in FORMS}
    wanted |= {("strategy", name) for name in strategies()} | {("pair_rows", PAIR_ROWS)}
    pairs_ = {frozenset(two) for case in cases for two in itertools.combinations(case.items(), 2)}
    possible = (
        frozenset(two)
        for a, b in itertools.combinations(OPTIONS, 2)
        for two in itertools.product(((a, x) for x in OPTIONS[a]), ((b, x) for x in OPTIONS[b]))
        if allowed(dict(two))
    )
    missing = [f"{name} {value}" for name, value in sorted(wanted - has, key=str)]
    return missing + [
        " with ".join(f"{n} {v}" for n, v in sorted(two, key=str)) for two in possible if two not in pairs_
    ]


def strategies() -> tuple[str, ...]:
    """The names that `DataParallel.named` knows, of which its error tells."""
    try:
        DataParallel.named("?")
    except ValueError as error:
        return tuple(str(error).partition("wanted one of ")[2].split(", "))
    raise AssertionError("a strategy named '?'")


def coded() -> list[int]:
    """The places of some ten cases that have all of OF_KERNELS."""
    missing, found = {(name, value) for name, values in OF_KERNELS.items() for value in values}, []
    while missing:
        best = max(range(len(CASES)), key=lambda i: sum(item in missing for item in CASES[i].items()))
        found.append(best)
        missing -= set(CASES[best].items())
    return found


def named(case: Mapping) -> str:
    """A case in one line."""
    return " ".join(f"{name}={value}" for name, value in case.items())


# ---- what is promised ------------------------------------------------------------------------------------------------
class Promise(NamedTuple):
    """Of a case on an H100.

    kernels: of its attention, "cudnn", "flash", "efficient", "tiled". waits: whether the host waits in the step: for
    counts of rows that experts exchange, where these are not fixed, and for products of fp32 groups. Nowhere is a value
    for each pair of positions, scores or a mask.
    """

    kernels: frozenset[str]
    waits: bool


def promise(case: Mapping) -> Promise:
    """What a case is to be on an H100, with torch's builds for CUDA 13."""
    family, mask, axes, wide = case["family"], case["mask"], case["axes"], case["precision"] == "fp32"
    waits = family in EXPERTS and ((axes == "ep fsdp" and "pair_rows" not in case) or wide)
    ring = axes in FORMS and axes not in ("ulysses", "gathered")
    tiled = mask in ("caps", "dropout", "documents", "window") or family == "mistral" or family == "gemma2"
    tiled |= axes in ("gathered", "ulysses") or (ring and "balanced" not in axes)
    if tiled:
        return Promise(frozenset({"tiled"}), waits)
    some = family in ("gpt_oss", "gemma3_text")  # of whose layers some have a window
    if not ring and mask != "sinks" and family != "gpt_oss":  # torch's own attention
        kernel = "efficient" if wide else "cudnn"
    else:
        kernel = "efficient" if wide or family in ("deepseek_v2", "deepseek_v3") else "flash"  # values are narrower
    return Promise(frozenset({kernel, "tiled"} if some else {kernel}), waits)


# ---- what a case makes -----------------------------------------------------------------------------------------------
def decoder_of(case: Mapping) -> model.Decoder:
    """The model of a case."""
    family = case["family"]
    sizes = GPT2 if family == "gpt2" else SIZES
    config = {"model_type": family, **sizes, **MORE[family]}
    precision = getattr(Precision, case["precision"])()
    sequence = case["axes"] == "tp sequence"
    of = family_of(config).decoder(config, precision=precision, sequence_parallel=sequence)
    fields = {**MASKS[case["mask"]], **({"context": case["axes"]} if case["axes"] in FORMS else {})}
    experts = {"ep": ("ep",), "pair_rows": case.get("pair_rows")} if "ep" in case["axes"] else {}
    return with_fields(of, **fields, **experts)


def with_fields(of: model.Decoder, **fields) -> model.Decoder:
    """The model with other fields of those of its mixers that have them."""

    def other(part):
        mine = {name: v for name, v in fields.items() if name in part.mixer.__dataclass_fields__}
        return dataclasses.replace(part, mixer=dataclasses.replace(part.mixer, **mine))

    return dataclasses.replace(of, blocks=tuple(tuple(map(other, block)) for block in of.blocks))


def described(case: Mapping) -> step.Description:
    """The step of a case."""
    of, mesh, named = decoder_of(case), mesh_of(case), DataParallel.named(case["strategy"])
    strategy = DataParallel(("dp", "fsdp", "ep"), named.params, named.grads, named.optim)
    specs, axes = model.specs(of, mesh, strategy=strategy), Axes(mesh, data=strategy.tokens)
    offload = case["save"] == "offload"
    how = {"save": "mincut" if offload else case["save"], "offload": 1 << 16 if offload else None}
    loss = functools.partial(model.loss, decoder=of, axes=axes, **how)

    def of_samples(params, batch, samples):
        return loss(params, batch, samples=samples)

    rows = 2 * case["microbatches"] * mesh["dp"] * mesh["fsdp"] * mesh["ep"]
    names = ["tokens", "labels"] + (["documents", "positions"] if case["mask"] == "documents" else [])
    names += ["positions"] if "balanced" in case["axes"] and "positions" not in names else []
    samples = case["mask"] == "dropout"
    return step.build(
        of_samples if samples else loss,
        OPTIMIZERS[case["optimizer"]](),
        specs,
        dict.fromkeys(names, (rows, SEQ)),
        microbatches=case["microbatches"],
        samples=samples,
        precision=of.precision,
        post_update=functools.partial(model.post_update, decoder=of),
        twice=case["microbatches"] > 1,
        shards=True,
        memory=case["memory"],
    )


def experiment(name: str, folder: Path) -> tuple[step.Description, Mesh]:
    """The step of an experiment's file, as it is without flags, but for the length of its sequences.

    folder: an empty one, for what an experiment begins with.
    """
    Config, describe = load_experiment(str(ROOT / "experiments" / f"{name}.py"))
    changes: dict[str, Any] = {}
    if "seq_len" in {field.name for field in dataclasses.fields(Config)}:
        changes["seq_len"] = SEQ
    if name == "finetune":  # a folder of a model
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
        changes["model"] = str(folder)
    if name == "preferences":  # the model of a run
        describe.__globals__["begun"] = lambda _: SimpleNamespace(decoder=decoder_of({**DENSE, "precision": "fp32"}))
    config = Config(**changes)
    return step_description.require_description(describe(config), name), config.mesh
