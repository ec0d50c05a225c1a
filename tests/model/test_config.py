"""Decoders and specs: errors name the number, what was wanted and the fix; counts agree with what runs."""

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fmegatron import model, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh, Rules
from fmegatron.model.array_specs import init
from fmegatron.model.array_specs import rules as rules_of_model
from fmegatron.model.counts import cache_bytes_per_token, flops_per_token, parameters
from tests.definition import loss_of
from tests.model import plain_llama
from tests.model.test_golden import MODELS
from tests.model.test_reference import TINY, make_batch, tiny


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 30}, r"llama.dim: got 30, wanted a multiple of heads=4; try dim=32"),
        ({"dim": 12}, r"Rope.dim: got a width of 3, wanted an even one .* choose dim / heads even"),
        ({"kv_heads": 3}, r"Attention.kv_heads: got 3, wanted a divisor of heads=4; choose one of \[1, 2, 4\]"),
        ({"layers": 0}, r"Decoder.layers: got 0, wanted a whole number of at least 1"),
        ({"vocab_size": 65.0}, r"Decoder.vocab_size: got 65.0"),
        ({"param_dtype": "bf16"}, r"Decoder.param_dtype: got 'bf16', wanted a floating dtype"),
        ({"compute_dtype": torch.int32}, r"Decoder.compute_dtype: got torch.int32"),
    ],
)
def test_config_errors(change, message):
    with pytest.raises(ValueError, match=message):
        tiny(**change)


@pytest.mark.parametrize(
    ("change", "mesh", "message"),
    [
        ({}, Mesh(tp=8), r"Attention.heads: got 4, wanted a multiple of tp=8 on the mesh tp8"),
        ({"kv_heads": 1}, Mesh(tp=2), r"Attention.kv_heads: got 1, wanted a multiple of tp=2 .* or more kv_heads"),
        ({"ffn_dim": 47}, Mesh(fsdp=2, tp=2), r"MLP.ffn_dim: got 47, wanted a multiple of tp=2 .* try ffn_dim=48"),
        ({"vocab_multiple": 1, "vocab_size": 51}, Mesh(tp=2), r"padded_vocab: got 51, .* set vocab_multiple=2"),
        (
            {},
            Mesh(fdsp=2),
            r"mesh fdsp2: got the axis 'fdsp'.*, which splits no array .* name it dp, fsdp, cp, cpi, tp",
        ),
        ({}, Mesh(fsdp=5), r"attention/wo: got dim 1 of size 32, wanted a multiple of 5 \(fsdp of the mesh fsdp5\)"),
    ],
)
def test_a_model_that_does_not_fit_its_mesh(change, mesh, message):
    with pytest.raises(ValueError, match=message):
        model.specs(tiny(**change), mesh)


def test_rules_of_ones_own():
    rules = Rules([(r".*norm", ("fsdp",)), *rules_of_model(TINY).table])
    specs = model.specs(TINY, Mesh(fsdp=2), rules)
    assert specs["final_norm"].layout.axes(0) == ("fsdp",)
    with pytest.raises(ValueError, match="wrong_axis"):
        model.specs(TINY, Mesh(fsdp=2), Rules([(r".*", ("wrong_axis",))]))


def test_the_mesh_need_not_have_every_axis():
    assert tree.layouts(model.specs(TINY, Mesh())) == model.layouts(TINY, Mesh())
    for layout in tree.leaves(model.layouts(TINY, Mesh(tp=2))):
        assert layout.sharded in ((), ("tp",))


def test_residual_outputs_start_smaller():
    params = init(tiny(layers=8), Mesh(), key=1)
    std = {path: float(x.std()) for path, x in zip(tree.paths(params), tree.leaves(params), strict=True)}
    assert abs(std["blocks/attention/wqkv"] / 0.02 - 1) < 0.05
    for path in ("blocks/attention/wo", "blocks/mlp/w_down"):
        assert abs(std[path] / (0.02 / math.sqrt(16)) - 1) < 0.05
    assert bool((params["final_norm"] == 1).all())


def test_initial_loss_is_that_of_a_uniform_guess():
    parts, _ = model.loss(init(TINY, Mesh(), 0), make_batch(TINY), TINY, Axes(Mesh()))
    assert abs(float(loss_of(parts)) - math.log(TINY.vocab_size)) < 0.05


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_flops(tied):
    config = dataclasses.replace(TINY, tied=tied)
    params = init(config, Mesh(), 0)
    count = parameters(config)
    assert count["total"] == sum(x.numel() for x in tree.leaves(params))
    assert count["total"] == sum(n for name, n in count.items() if name != "total")
    batch = make_batch(config)
    params = tree.map(lambda x: x.requires_grad_(), params)
    for training in (False, True):
        with FlopCounterMode(display=False) as counter:
            value = plain_llama.loss(params, batch, config)
            if training:
                value.backward()
        wanted = flops_per_token(config, batch["tokens"].shape[1], training=training, causal=False)["total"]
        assert counter.get_total_flops() == wanted * batch["tokens"].numel()


def test_llama_3_8b_has_the_published_number_of_parameters():
    assert parameters(MODELS["llama3_8b"])["total"] == 8_030_261_248


def test_cache_bytes():
    bf16 = dataclasses.replace(TINY, compute_dtype=torch.bfloat16)
    assert cache_bytes_per_token(bf16) == 2 * 2 * 2 * 8 * 2
