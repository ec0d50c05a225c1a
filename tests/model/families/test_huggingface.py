"""Every family against transformers: logits, gradients, and the weights through the names, there and back."""

import copy

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes
from fmegatron.interop import hf
from fmegatron.layout import Mesh
from fmegatron.tree.structure import flatten, unflatten
from tests.model.families.tiny_hf import MODELS, model_of

transformers = pytest.importorskip("transformers")
ONE = Mesh()


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    """(model of transformers, its folder)."""
    theirs = model_of(request.param)
    path = tmp_path_factory.mktemp(request.param) / "model"
    theirs.save_pretrained(path)
    return theirs, path


def ours(path, **changes):
    decoder = hf.decoder(path, **changes)
    layouts = model.layouts(decoder, ONE)
    return decoder, layouts, hf.load(path, decoder, layouts)


def off(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.long
def test_logits_and_gradients(folder, tmp_path):
    """In fp64 as far as transformers goes: rounding of its norms and angles, which are fp32, is what is left."""
    theirs, path = copy.deepcopy(folder[0]).double(), folder[1]
    theirs.config._experts_implementation = "eager"  # the others have no fp64
    decoder, layouts, params = ours(path, param_dtype=torch.float64, compute_dtype=torch.float64)
    params = tree.map(lambda x: x.requires_grad_(), params)
    tokens = torch.randint(3, 70, (2, 24), generator=torch.Generator().manual_seed(1))
    want = theirs(tokens).logits
    got = model.logits(params, tokens, decoder, Axes(ONE))[..., :70]
    assert off(got, want) < 1e-5
    want.square().mean().backward()
    grads = torch.autograd.grad(got.square().mean(), tree.leaves(params), materialize_grads=True)
    grads = unflatten(flatten(params)[2], list(grads))
    hf.save(tmp_path / "gradients", grads, decoder, layouts, like=path)
    back = dict(type(theirs).from_pretrained(tmp_path / "gradients", dtype=torch.float64).named_parameters())
    assert set(back) == {name for name, _ in theirs.named_parameters()}
    worst = {name: off(back[name], p.grad) for name, p in theirs.named_parameters()}
    assert max(worst.values()) < 1e-5, max(worst.items(), key=lambda item: item[1])


@pytest.mark.long
def test_weights_come_back_bit_for_bit(folder, tmp_path):
    theirs, path = folder
    decoder, layouts, params = ours(path)
    hf.save(tmp_path / "back", params, decoder, layouts, like=path)
    back = type(theirs).from_pretrained(tmp_path / "back")
    for name, p in back.state_dict().items():
        assert torch.equal(p, theirs.state_dict()[name]), name
    assert (tmp_path / "back" / "config.json").read_bytes() == (path / "config.json").read_bytes()


@pytest.mark.long
def test_generation_equals_the_growing_prompt(folder):
    _, path = folder
    decoder, layouts, params = ours(path)
    prompt, axes = torch.tensor([[5, 9, 17, 3, 40, 8, 11, 2]]), Axes(ONE)
    text = prompt
    for _ in range(6):
        scores = model.logits(params, text, decoder, axes)[:, -1, : decoder.vocab_size]
        text = torch.cat((text, scores.argmax(-1, keepdim=True)), 1)
    writer = model.inference(params, decoder, axes)
    assert torch.equal(model.generate(writer, prompt, 6, temperature=0), text[:, 8:])
