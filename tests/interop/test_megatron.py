"""Megatron's GPT models from directories in Megatron's form, written here shard by shard: model, weights, AdamW."""

import argparse
import enum
import os
import pathlib

import pytest
import torch

from fmegatron import checkpoint, interop, model, nn, optim, step, tree
from fmegatron.checkpoint import CheckpointError
from fmegatron.interop import megatron
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model import MoE, llama
from fmegatron.tree.structure import flatten, unflatten
from tests.interop.test_hf_load import assert_shards
from tests.interop.torch_layout import write

H, HEADS, GROUPS, HEAD, F, V, L, E = 32, 4, 2, 8, 48, 65, 3, 4
SIZES = {"vocab_size": V, "dim": H, "layers": L, "heads": HEADS, "kv_heads": GROUPS, "ffn_dim": F, "max_seq": 16,
         "head_dim": HEAD, "tied": False}  # fmt: skip
ARGS = {
    "num_layers": L, "hidden_size": H, "ffn_hidden_size": F, "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS, "kv_channels": HEAD, "normalization": "RMSNorm", "norm_epsilon": 1e-6,
    "swiglu": True,
    "position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 1.0, "add_bias_linear": False,
    "max_position_embeddings": 16, "untie_embeddings_and_output_weights": True, "padded_vocab_size": 128,
    "vocab_size": V, "num_experts": None, "params_dtype": torch.bfloat16,
}  # fmt: skip
PREFIXES = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")


class Backend(enum.Enum):
    """What real arguments hold too: an object, which is not executed."""

    auto = 5


def by_hand(dtypes, moe=False, tied=False, fused=True, seed=0):
    """(Megatron's tensors by name, ours by path) of one random model: qkv by groups of heads, gate before up."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=random).to(dtypes)  # noqa: E731
    theirs, ours, blocks = {}, {}, []
    for _ in range(L):
        q, k, v = draw(HEADS, HEAD, H), draw(GROUPS, HEAD, H), draw(GROUPS, HEAD, H)
        per = HEADS // GROUPS
        rows = [x for g in range(GROUPS) for x in (*q[g * per : (g + 1) * per], k[g], v[g])]
        block = {
            "qkv": torch.cat(rows),
            "q": q,
            "k": k,
            "v": v,
            "o": draw(H, HEADS * HEAD),
            "n1": draw(H),
            "n2": draw(H),
        }
        many = (E,) if moe else ()
        blocks.append({**block, "gate": draw(*many, F, H), "up": draw(*many, F, H), "down": draw(*many, H, F),
                       "router": draw(E, H)})  # fmt: skip
    each = lambda name: torch.stack([b[name] for b in blocks])  # noqa: E731
    at, mlp = "decoder.layers.", "mlp.experts.experts." if moe else "mlp."
    theirs[f"{at}self_attention.linear_qkv.weight"] = each("qkv")
    theirs[f"{at}self_attention.linear_proj.weight"] = each("o")
    theirs[f"{at}self_attention.linear_qkv.layer_norm_weight" if fused else f"{at}input_layernorm.weight"] = each("n1")
    theirs[f"{at}mlp.linear_fc1.layer_norm_weight" if fused and not moe else f"{at}pre_mlp_layernorm.weight"] = each(
        "n2"
    )
    theirs[f"{at}{mlp}linear_fc1.weight"] = torch.cat([each("gate"), each("up")], -2)
    theirs[f"{at}{mlp}linear_fc2.weight"] = each("down")
    flat = lambda name: each(name).flatten(1, 2).transpose(1, 2)  # noqa: E731
    ours |= {
        "blocks/attention/wqkv": torch.cat([flat("q"), flat("k"), flat("v")], 2),
        "blocks/attention/wo": each("o").transpose(1, 2),
        "blocks/attention_norm": each("n1"),
        "blocks/mlp_norm": each("n2"),
    }
    up, down = torch.cat([each("gate"), each("up")], -2).transpose(-2, -1), each("down").transpose(-2, -1)
    if moe:
        theirs[f"{at}mlp.router.weight"] = each("router")
        ours |= {"blocks/mlp/router": each("router").transpose(1, 2), "blocks/mlp/up": up, "blocks/mlp/down": down}
    else:
        ours |= {"blocks/mlp/w_gate_up": up, "blocks/mlp/w_down": down}
    table, head, norm = draw(V, H), draw(V, H), draw(H)
    wide = lambda x: torch.cat([x, x.new_zeros(128 - V, H)])  # noqa: E731
    theirs |= {"embedding.word_embeddings.weight": wide(table), "decoder.final_layernorm.weight": norm}
    ours |= {"embed/table": wide(table), "final_norm": norm}
    if not tied:
        theirs["output_layer.weight"] = wide(head)
        ours["head/w"] = wide(head).t()
    return theirs, ours


def pieces(x, name):
    """As tensor-parallel 2 and the layers one by one: Megatron's shards."""
    layers = range(x.shape[0]) if ".layers." in name else [None]
    dim = 1 if "layers" in name else 0
    dim += ("experts" in name) + (1 if "linear_proj" in name or "linear_fc2" in name else 0)
    cut = x.ndim > dim and "norm" not in name and "router" not in name
    found = []
    for i in layers:
        for half in range(2 if cut else 1):
            start, shape = [0] * x.ndim, list(x.shape)
            if i is not None:
                start[0], shape[0] = i, 1
            if cut:
                shape[dim] //= 2
                start[dim] = half * shape[dim]
            found.append((tuple(start), tuple(shape)))
    return found


def save(folder, tensors, **changes):
    args = argparse.Namespace(**ARGS | changes, attention_backend=Backend.auto)
    write(folder, {name: (x, pieces(x, name)) for name, x in tensors.items()})
    torch.save({"iteration": 7, "args": args}, os.path.join(folder, "common.pt"))
    (pathlib.Path(folder).parent / "latest_checkpointed_iteration.txt").write_text("7\n")


CASES = {
    "dense": ({}, {}, {}),
    "tied, plain norms": (
        {"tied": True, "fused": False},
        {"untie_embeddings_and_output_weights": False},
        {"tied": True},
    ),
    "experts": (
        {"moe": True},
        {"num_experts": E, "moe_router_topk": 2, "moe_ffn_hidden_size": F},
        {"mlp": MoE(nn.Router(E, 2, normalised=True), F)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_model_and_weights_on_any_mesh(tmp_path, case):
    made, args, fields = CASES[case]
    theirs, ours = by_hand(torch.float32, **made)
    save(tmp_path / "run/iter_0000007", theirs, **args)
    decoder = megatron.decoder(tmp_path / "run", vocab_multiple=64)
    assert decoder == llama(**{**SIZES, "norm_eps": 1e-6, "rope_theta": 5e5, "vocab_multiple": 64, **fields})
    for mesh in (Mesh(), Mesh(fsdp=2, tp=2)):
        layouts = model.layouts(decoder, mesh)
        whole = unflatten(flatten(layouts)[2], [ours[path] for path in tree.paths(layouts)])
        for rank in range(mesh.size):
            assert_shards(megatron.load(tmp_path / "run", decoder, layouts, rank=rank), whole, layouts, rank)
    found = interop.source(tmp_path / "run")
    assert checkpoint.describe(found).step == 7 and checkpoint.describe(found).format.endswith("of Megatron")


@pytest.mark.long
@pytest.mark.parametrize("masters", ["param", "fp32_param", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adamws_state(tmp_path, masters, dtype):
    """bf16 or fp32 parameters of ours from Megatron's with and without masters, by both names that it has for them;
    moments; step and count."""
    parts = [by_hand(torch.bfloat16 if masters and not i else torch.float32, seed=i) for i in range(4)]
    prefixes = (*PREFIXES, f"optimizer.state.{masters}.") if masters else PREFIXES
    stored = {
        f"{prefix}{n}": x for prefix, (theirs, _) in zip(prefixes, parts, strict=False) for n, x in theirs.items()
    }
    save(tmp_path / "run/iter_0000007", stored)
    decoder = megatron.decoder(tmp_path / "run", vocab_multiple=64, param_dtype=dtype)
    mesh, strategy = Mesh(fsdp=2), DataParallel.hsdp()
    layouts = tree.layouts(step.state_specs(model.specs(decoder, mesh), optim.adamw(1e-3), strategy))
    ours = [one for _, one in parts]
    exact = ours[3] if masters else ours[0]
    given = exact if dtype is torch.float32 else ours[0]
    wanted = {f"params/{p}": x.to(dtype) for p, x in given.items()}
    wanted |= {f"opt/adam/{m}/{p}": x for m, one in (("m", ours[1]), ("v", ours[2])) for p, x in one.items()}
    wanted |= {f"opt/master/{p}": x.float() for p, x in exact.items()}
    wanted |= {"step": torch.tensor(7), "opt/count": torch.tensor(7)}
    whole = unflatten(flatten(layouts)[2], [wanted[path] for path in tree.paths(layouts)])
    for rank in range(2):
        got = megatron.load_state(tmp_path / "run", decoder, layouts, rank=rank)
        assert_shards(got, whole, layouts, rank)
    params = megatron.load(tmp_path / "run", decoder, layouts.params, rank=0)  # the model alone: its own weights
    assert_shards(params, unflatten(flatten(layouts.params)[2],
                  [ours[0][p].to(dtype) for p in tree.paths(layouts.params)]), layouts.params, 0)  # fmt: skip


def test_flat_buffers_are_refused_with_the_way_out(tmp_path):
    theirs, _ = by_hand(torch.float32)
    flat = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    save(tmp_path / "run/iter_0000007", theirs)
    decoder = megatron.decoder(tmp_path / "run", vocab_multiple=64)
    specs = step.state_specs(model.specs(decoder, Mesh()), optim.adamw(1e-3), DataParallel.hsdp())
    write(
        tmp_path / "flat", {**{n: (x, pieces(x, n)) for n, x in theirs.items()}, flat: (torch.ones(9), [((0,), (9,))])}
    )
    with pytest.raises(ValueError, match=r"flat buffers \(dp_reshardable\).*--dist-ckpt-optim-fully-reshardable"):
        megatron.load_state(tmp_path / "flat", decoder, tree.layouts(specs))
    assert megatron.load(tmp_path / "flat", decoder, model.layouts(decoder, Mesh()))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"normalization": "LayerNorm"}, "args.normalization: got 'LayerNorm', wanted 'RMSNorm'"),
        ({"swiglu": False}, "args.swiglu: got False"),
        ({"rotary_percent": 0.5}, "args.rotary_percent: got 0.5"),
        ({"num_layers": "3"}, "args.num_layers: got '3'"),
        ({"rotary_base": Backend.auto}, "args.rotary_base: got "),
        ({"moe_router_score_function": "sigmoid"}, "args.moe_router_score_function"),
    ],
)
def test_arguments_that_are_not_understood_are_named(tmp_path, changes, words):
    save(tmp_path / "run/iter_0000007", {"w": torch.ones(4)}, **changes)
    with pytest.raises(ValueError) as caught:
        megatron.decoder(tmp_path / "run")
    assert words in str(caught.value)


def test_a_run_that_names_no_step(tmp_path):
    save(tmp_path / "run/iter_0000007", {"w": torch.ones(4)})
    for text, words in (("8", "iter_0000008"), ("../x", "wanted an iteration"), ("", "wanted an iteration")):
        (tmp_path / "run/latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.describe(interop.source(tmp_path / "run"))
