"""The model on one rank equals a plain torch Llama in fp64: loss and every gradient, over the switches of llama."""

import dataclasses
import functools

import pytest
import torch

from fmegatron import model, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from fmegatron.step import value_and_grad
from fmegatron.testing import assert_pure
from tests.definition import loss_of
from tests.model import plain_llama

SIZES = {
    "vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "max_seq": 12,
    "vocab_multiple": 32, "param_dtype": torch.float64, "compute_dtype": torch.float64,
}  # fmt: skip


def tiny(**changes):
    """A Llama of two layers, with other arguments."""
    return model.llama(**SIZES | changes)


TINY = tiny()
VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "z_loss": {"z_loss": 1e-2},
    "mask": {},
    "mask_and_z_loss": {"z_loss": 1e-2, "tied": True},
    "one_kv_head": {"kv_heads": 1},
    "all_kv_heads": {"kv_heads": 4},
    "no_padding": {"vocab_size": 64},
    "sequence_parallel": {"sequence_parallel": True},
}


def make_batch(config, batch_size=3, seq=12, mask=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (batch_size, seq + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    if mask:
        batch["mask"] = (torch.rand(batch_size, seq, generator=generator) < 0.7).to(torch.float64)
    return batch


def leaves_that_differ(params, seed=1):
    """Parameters moved off their initial values: norms that are all ones would hide a missing factor."""
    generator = torch.Generator().manual_seed(seed)
    return tree.map(
        lambda x: x + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype), params
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_equal_the_plain_llama(name):
    config = tiny(**VARIANTS[name])
    mesh = Mesh()
    params = tree.map(lambda x: x.requires_grad_(), leaves_that_differ(init(config, mesh, key=3)))
    batch = make_batch(config, mask="mask" in name)
    parts, _ = model.loss(params, batch, config, Axes(mesh))
    ours, metrics = loss_of(parts), step.means(parts, Axes(mesh))
    theirs = plain_llama.loss(params, batch, config)
    assert abs(ours - theirs) <= 1e-12 * abs(theirs)
    shown = metrics["lm"] + config.z_loss * metrics.get("z", 0)
    assert abs(shown - theirs) <= 1e-12 * abs(theirs)
    assert metrics["lm/count"] == (batch["mask"].sum() if "mask" in batch else batch["tokens"].numel())
    assert ("z" in metrics) == bool(config.z_loss)
    for path, ours_grad, theirs_grad in zip(
        tree.paths(params),
        torch.autograd.grad(ours, tree.leaves(params)),
        torch.autograd.grad(theirs, tree.leaves(params)),
        strict=True,
    ):
        torch.testing.assert_close(
            ours_grad, theirs_grad, rtol=1e-10, atol=1e-14, msg=lambda m, path=path: f"{path}: {m}"
        )


def test_logits_equal_the_plain_llama():
    mesh = Mesh(dp=1, fsdp=1, tp=1)
    params = leaves_that_differ(init(TINY, mesh, key=3))
    tokens = make_batch(TINY)["tokens"]
    ours = model.logits(params, tokens, TINY, Axes(mesh))
    plain = plain_llama.forward(params, tokens, TINY)[..., : TINY.vocab_size]  # padding is not handed out
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("by", ["mask", "labels"])
def test_an_empty_mask_gives_zero_and_not_nan(by):
    mesh, batch = Mesh(), make_batch(TINY)
    batch = batch | ({"mask": torch.zeros(3, 12)} if by == "mask" else {"labels": batch["labels"] * 0 - 100})
    of = functools.partial(model.loss, decoder=TINY, axes=Axes(mesh))
    (value, metrics), grads = value_and_grad(of)(init(TINY, mesh, 0), batch)
    assert float(value) == 0 and metrics["lm/count"] == 0 and metrics["lm"].isnan()
    assert not any(g.any() for g in tree.leaves(grads))


def test_labels_below_0_are_a_mask():
    mesh, batch = Mesh(), make_batch(TINY, mask=True)
    ignored = {"tokens": batch["tokens"], "labels": torch.where(batch["mask"] > 0, batch["labels"], -100)}
    of = functools.partial(model.loss, decoder=TINY, axes=Axes(mesh))
    found = [
        value_and_grad(of)(init(TINY, mesh, 0), b) for b in (batch, ignored, {**batch, "labels": ignored["labels"]})
    ]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found[0]), tree.leaves(other), strict=True))


def test_low_precision_compute_follows_fp32():
    """bf16 matrices with fp32 parameters: the loss agrees to rounding, gradients have the parameters' dtype."""
    mesh = Mesh()
    wide = dataclasses.replace(TINY, param_dtype=torch.float32, compute_dtype=torch.float32)
    narrow = dataclasses.replace(wide, compute_dtype=torch.bfloat16)
    params = tree.map(lambda x: x.requires_grad_(), init(wide, mesh, 0))
    batch = make_batch(TINY)
    ours, exact = (loss_of(model.loss(params, batch, of, Axes(mesh))[0]) for of in (narrow, wide))
    assert ours.dtype == torch.float32 and abs(ours - exact) < 1e-2
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(ours, tree.leaves(params)))


def test_loss_changes_none_of_its_arguments():
    mesh = Mesh()
    axes = Axes(mesh)
    f = value_and_grad(lambda params, batch: model.loss(params, batch, TINY, axes))
    assert_pure(f, init(TINY, mesh, 0), make_batch(TINY, mask=True))


def test_a_sequence_longer_than_the_model_was_made_for():
    mesh = Mesh()
    tokens = torch.zeros(1, 13, dtype=torch.int64)
    with pytest.raises(ValueError, match="got sequences of 13, wanted at most Decoder.max_seq=12"):
        model.logits(init(TINY, mesh, 0), tokens, TINY, Axes(mesh))
