"""Megatron's names, shapes and order of heads become ours by ten rules and a table of names; moments with them."""

import re

import pytest
import torch

from fmegatron import model, optim, tree
from fmegatron.checkpoint import copy, fuse, pad, rename, restore, split, stack, take, transpose
from fmegatron.layout import Layout, Mesh
from fmegatron.model import llama
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.test_reshard import state_for
from tests.pairs import each_value

SIZES = {"vocab_size": 65, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "max_seq": 16, "vocab_multiple": 16}
CONFIG = llama(**SIZES, layers=3)
HEADS, HEAD = 4, 8
GROUP = (HEADS // 2 * HEAD, HEAD, HEAD)  # q, k, v of one group of heads

NAMES = {
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": "blocks/attention_norm",
    "decoder.layers.self_attention.linear_proj.weight": "blocks/attention/wo",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": "blocks/mlp_norm",
    "decoder.layers.mlp.linear_fc1.weight": "blocks/mlp/w_gate_up",
    "decoder.layers.mlp.linear_fc2.weight": "blocks/mlp/w_down",
    "decoder.final_layernorm.weight": "final_norm",
    "embedding.word_embeddings.weight": "embed/table",
    "output_layer.weight": "head/w",
}
RULES = [
    rename(r"optimizer\.state\.exp_avg\.(.*)", r"opt/adam/m/\1"),
    rename(r"optimizer\.state\.exp_avg_sq\.(.*)", r"opt/adam/v/\1"),
    rename(r"((?!opt/).*)", r"params/\1"),
    stack(r"(.*)decoder\.layers\.{i}\.(.*)", r"\1decoder.layers.\2"),
    transpose(r".*decoder\.layers.*\.linear_\w+\.weight", (0, 2, 1)),
    transpose(r".*output_layer\.weight", (1, 0)),
    split(r"(.*)decoder\.layers\..*linear_qkv\.weight", [r"\1q", r"\1k", r"\1v"], dim=2, sizes=GROUP),
    fuse([r"(.*)q", r"(.*)k", r"(.*)v"], r"\1blocks/attention/wqkv", dim=2),
    *(rename(rf"(.*){re.escape(theirs)}", rf"\1{ours}") for theirs, ours in NAMES.items()),
    pad(r".*embed/table", dim=0),
    pad(r".*head/w", dim=1),
]


def ours(mesh, config=CONFIG):
    """Layouts of parameters and moments."""
    specs = model.specs(config, mesh)
    moments = optim.adamw(1e-3).init(specs)["adam"]
    return tree.layouts({"params": specs, "opt": {"adam": moments}})


def as_megatron(params, start):
    """The same parameters under Megatron's names, made with torch. Vocabulary: padded to 128 with zeros."""
    out = {}

    def wide(x):
        return torch.cat([x, x.new_zeros(128 - x.shape[0], x.shape[1])])

    for i in range(CONFIG.layers):
        blocks, at = tree.map(lambda x, i=i: x[i], params["blocks"]), f"{start}decoder.layers.{i}."
        q, k, v = blocks["attention"]["wqkv"].split((HEADS * HEAD, 2 * HEAD, 2 * HEAD), 1)
        groups = zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True)
        out |= {
            at + "self_attention.linear_qkv.weight": torch.cat([x for group in groups for x in group], 1).t(),
            at + "self_attention.linear_qkv.layer_norm_weight": blocks["attention_norm"],
            at + "self_attention.linear_proj.weight": blocks["attention"]["wo"].t(),
            at + "mlp.linear_fc1.layer_norm_weight": blocks["mlp_norm"],
            at + "mlp.linear_fc1.weight": blocks["mlp"]["w_gate_up"].t(),
            at + "mlp.linear_fc2.weight": blocks["mlp"]["w_down"].t(),
        }
    return out | {
        f"{start}decoder.final_layernorm.weight": params["final_norm"],
        f"{start}embedding.word_embeddings.weight": wide(params["embed"]["table"]),
        f"{start}output_layer.weight": wide(params["head"]["w"].t()),
    }


@pytest.fixture(scope="module")
def states():
    state = state_for(ours(Mesh()))
    moments = state["opt"]["adam"]
    stored = as_megatron(state["params"], "")
    stored |= as_megatron(moments["m"], "optimizer.state.exp_avg.")
    stored |= as_megatron(moments["v"], "optimizer.state.exp_avg_sq.")
    return state, {name: x.contiguous() for name, x in stored.items()}


def save_megatron(path, stored):
    """Saved as two tensor-parallel ranks would hold it."""
    mesh = Mesh(tp=2)

    def layout(name, x):
        dim = None if x.dim() == 1 else 1 if "linear_proj" in name or "fc2" in name else 0
        return Layout(tuple(x.shape), x.dtype, mesh, ("tp",) if dim == 0 else (None, "tp") if dim == 1 else ())

    assert save_all(path, stored, {name: layout(name, x) for name, x in stored.items()}) == [None] * 2


TARGETS = (Mesh(), Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=4))


@pytest.mark.long
@pytest.mark.parametrize(("target", "read"), each_value(TARGETS, ("own", "once")))
def test_ten_rules(tmp_path, states, target, read):
    state, stored = states
    with small_sizes(512, 128):
        save_megatron(tmp_path / "a", stored)
        wanted = ours(target)
        got = run(target.size, lambda world: restore(tmp_path / "a", wanted, world=world, rules=RULES, read=read))
        for rank, local in enumerate(cut_tree(state, wanted)):
            if isinstance(got[rank], BaseException):
                raise got[rank]
            assert_same_bits(got[rank], local, f"rank {rank}")


def test_fewer_layers_and_fp32_masters_of_parameters_only(tmp_path, states):
    """Finetune: the first two layers of bf16 parameters, and fp32 masters made of them."""
    state, stored = states
    params = {name: x.bfloat16() for name, x in stored.items() if not name.startswith("optimizer")}
    config = llama(**SIZES, layers=2, param_dtype=torch.bfloat16)
    mesh = Mesh(tp=2)
    layouts = ours(mesh, config)["params"]
    wanted = {"params": layouts, "master": tree.map(lambda layout: layout.replace(dtype=torch.float32), layouts)}
    rules = [*RULES, take(r"params/blocks/.*", range(2)), copy(r"params/(.*)", r"master/\1")]
    with small_sizes(512, 128):
        save_megatron(tmp_path / "a", params)
        got = [restore(tmp_path / "a", wanted, rank=rank, rules=rules, cast=True) for rank in range(2)]
    blocks = tree.map(lambda x: x[:2].bfloat16(), state["params"]["blocks"])
    kept = {**tree.map(lambda x: x.bfloat16(), state["params"]), "blocks": blocks}
    for rank, local in enumerate(cut_tree({"params": kept, "master": tree.map(torch.Tensor.float, kept)}, wanted)):
        assert_same_bits(got[rank], local, f"rank {rank}")
