"""What is added up, or chosen by, in 16 bits: a router's product, the bias of its choice, the gradient of a head."""

import functools

import pytest
import torch

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.families.registry import family_of
from fmegatron.model.json_form import described, description
from tests.model.settings import CONFIGS

BF16, ROUTER = torch.bfloat16, nn.Router(64, 6, "sigmoid")
ALL_BF16 = Precision(BF16, BF16)


def decoder(moe, **how):
    norm = model.RMSNorm()
    return model.Decoder(512, 32, ((model.Part("mlp", moe, norm),),), 64, norm, precision=ALL_BF16, **how)


def chosen(of, params, tokens):
    """[E]: how often each expert was chosen."""
    given = {"tokens": tokens, "labels": tokens}
    return model.loss(params, given, of, Axes(Mesh()))[1]["load"]["blocks"]["mlp"][0]


def test_a_router_in_fp32_chooses_as_fp32_does():
    """Of the same bf16 stream: by logits that are not rounded; those of bf16 take others now and then."""
    moe = model.MoE(ROUTER, 8, choice_bias=True, bias_rate=0.1)
    tokens = torch.arange(512).view(8, 64)
    found = {}
    for fp32 in (False, True):
        of = decoder(model.MoE(**{**vars(moe), "fp32_router": fp32}))
        params = tree.map(lambda x: x.clone(), init(of, Mesh(), 0))
        g = torch.Generator().manual_seed(3)
        params["blocks"]["mlp"]["router"] = (
            torch.randn(1, 32, 64, generator=g).to(BF16).to(params["blocks"]["mlp"]["router"].dtype)
        )
        u = torch.nn.functional.embedding(tokens, params["embed"]["table"].to(BF16))
        u = (u.float() * (u.float().square().mean(-1, keepdim=True) + of.norm.eps).rsqrt()).to(BF16)
        exact = ROUTER(u.double() @ params["blocks"]["mlp"]["router"][0].double())
        wanted = torch.bincount(exact.experts.flatten(), minlength=64)
        found[fp32] = int((chosen(of, params, tokens) - wanted).abs().sum())
    assert found[True] == 0 < found[False]


@pytest.mark.parametrize("name, fp32", [("deepseek_v3", True), ("mixtral", False), ("gpt_oss", False)])
def test_families_have_it_where_their_reference_does(name, fp32):
    of = family_of(CONFIGS[name]).decoder(CONFIGS[name], precision=ALL_BF16)
    mixers = [part.mixer for block in of.blocks for part in block if isinstance(part.mixer, model.MoE)]
    assert mixers and all(moe.fp32_router is fp32 for moe in mixers)
    dtypes = {path.rpartition("/")[2]: layout.dtype for path, layout in paths_of(model.layouts(of, Mesh()))}
    assert dtypes["router"] == (torch.float32 if fp32 else BF16) and dtypes["up"] == BF16
    assert dtypes.get("choice_bias", torch.float32) == torch.float32
    assert described(description(of)) == of


def paths_of(layouts):
    return zip(tree.paths(layouts), tree.leaves(layouts), strict=True)


def test_the_bias_of_a_choice_moves_by_its_rate_where_weights_are_bf16():
    """0.001 is lost beside 0.5 in bf16, and a master copy of the optimizer's would put it back."""
    of, optimizer = decoder(model.MoE(ROUTER, 8, choice_bias=True, bias_rate=0.001)), optim.adamw(1e-3)
    specs = model.specs(of, Mesh())
    loss_fn = functools.partial(model.loss, decoder=of)
    after = functools.partial(model.post_update, decoder=of)
    train = step.build_train_step(loss_fn, optimizer, tree.layouts(specs), post_update=after)
    state = tree.init(step.state_specs(specs, optimizer), 0, 0)
    bias = state.params["blocks"]["mlp"]["choice_bias"]
    bias += 0.5
    tokens = torch.arange(64)[None]
    for n in range(1, 4):
        state, _ = train(state, {"tokens": tokens, "labels": tokens})
        moved = (state.params["blocks"]["mlp"]["choice_bias"] - 0.5).abs().max()
        torch.testing.assert_close(float(moved), 0.001 * n, rtol=1e-3, atol=0)


def test_the_gradient_of_a_chunked_head_is_as_good_with_many_chunks_as_with_one():
    g, alone = torch.Generator().manual_seed(0), Axes(Mesh())["tp"]
    x, head = torch.randn(1, 512, 16, generator=g), torch.randn(16, 40, generator=g)
    labels = torch.randint(0, 40, (1, 512), generator=g)

    def grad(dtype, chunks):
        leaf = head.to(BF16).to(dtype).requires_grad_()
        nll, _ = nn.chunked_cross_entropy(x.to(BF16).to(dtype), leaf, labels, alone, chunks=chunks)
        return torch.autograd.grad(nll.sum(), leaf)[0].double()

    exact = grad(torch.float64, 1)
    errors = {n: float((grad(BF16, n) - exact).norm() / exact.norm()) for n in (1, 256)}
    assert errors[256] < 1.5 * errors[1] < 0.01
