"""Mixers around mixers: nothing of the inner one is lost, generation goes the same way, and what cannot is refused."""

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch

from fmegatron import model, nn, optim, plan, step, tree
from fmegatron.collectives import Axes, Precision, enter
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model import Array, Attention, MoE
from fmegatron.model.array_specs import init
from fmegatron.model.counts import cache_bytes_per_token, flops_per_token
from fmegatron.model.families.registry import family_of
from fmegatron.model.json_form import described, description
from fmegatron.model.mixer import Mixer
from fmegatron.model.rope import Rope
from tests.house import ROOT
from tests.model.test_mamba import hybrid
from tests.model.test_reference import TINY, leaves_that_differ, make_batch, tiny
from tests.pairs import few
from tests.step.proven import proven_and_equal

ZERO3 = DataParallel(("dp", "fsdp", "ep"), *[("dp", "fsdp", "ep")] * 3)
ROUTER = nn.Router(4, 2, normalised=True)


# ---- wrappers --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Quiet(model.Wrapped):
    """Changes nothing, as one that logs."""


@dataclass(frozen=True)
class Gated(model.Wrapped):
    """What the inner mixer makes, times a gain; a name of its own, so that it goes around another."""

    name = "gain"

    def own(self, dim):
        return {"g": Array((dim,), init=1.0)}

    def given(self, u_BSD, own, at):
        return 2 * u_BSD

    def result(self, y_BSD, u_BSD, own, at):
        return y_BSD * (enter(own["g"], at.axes["tp"]) if at.splits(u_BSD) else own["g"])


@dataclass(frozen=True)
class Beside(model.Wrapped):
    """A bottleneck beside the inner mixer. The width is a share of the model's."""

    share: int

    def own(self, dim):
        return {
            "down": Array((dim, dim // self.share), ("fsdp",)),
            "up": Array((dim // self.share, dim), (None, "fsdp")),
        }

    def result(self, y_BSD, u_BSD, own, at):
        down, up = (enter(own[k], at.axes["tp"]) if at.splits(u_BSD) else own[k] for k in ("down", "up"))
        return y_BSD + torch.relu(u_BSD @ down) @ up


@dataclass(frozen=True)
class Lora(model.Wrapped):
    """A pair of low rank beside the output's projection, whose rows tp splits."""

    rank: int
    name = "lora"

    def own(self, dim):
        rows = self.inner.arrays(dim)["wo"].shape[0]
        return {"a": Array((rows, self.rank), (("tp", "fsdp"),)), "b": Array((self.rank, dim), (None, "fsdp"))}

    def weights(self, w, own, at):
        return {**w, "wo": w["wo"] + own["a"] @ enter(own["b"], at.axes["tp"])}


@dataclass(frozen=True)
class Noisy(model.Wrapped):
    """With a rate of its own."""

    dropout: float

    @property
    def own_rates(self):
        return {"dropout": self.dropout}


WRAPPERS = {
    "quiet": Quiet,
    "bottleneck": lambda mixer: Beside(mixer, 4),
    "one around another": lambda mixer: Gated(Quiet(Beside(Quiet(mixer), 4))),
}


def wrapped(of, wrap, only=None):
    """The model with this around all mixers, or those of one part."""

    def other(part):
        return dataclasses.replace(part, mixer=wrap(part.mixer)) if only in (None, part.name) else part

    return dataclasses.replace(of, blocks=tuple(tuple(map(other, block)) for block in of.blocks))


def experts(**changes):
    moe = MoE(ROUTER, 12, **{"choice_bias": True, "bias_rate": 0.01, "balance": 0.01, **changes})
    return tiny(mlp=moe)


def deepseek(**changes):
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 24, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "vocab_size": 46,
        "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "first_k_dense_replace": 1, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    config = {"model_type": "deepseek_v3", **sizes}
    return family_of(config).decoder(config, precision=Precision.fp64(), vocab_multiple=2, **changes)


MODELS = {"llama": tiny, "experts": experts, "latents": deepseek, "states": hybrid}


# ---- nothing is lost -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_a_wrapper_that_changes_nothing_gives_the_same_bits(name):
    """Logits (with rope), loss, metrics, balanced biases, counts, layouts, and rates."""
    of, mesh = MODELS[name](), Mesh()
    same, axes = wrapped(of, lambda mixer: Quiet(Quiet(mixer))), Axes(mesh)
    assert model.layouts(of, mesh) == model.layouts(same, mesh)
    params, batch, found = leaves_that_differ(init(of, mesh, 0)), make_batch(of), []
    for one in (of, same):
        parts, metrics = model.loss(params, batch, one, axes)
        value = step.means(parts, axes)
        post_update, _ = model.post_update(params, {**metrics}, one)
        logits = model.logits(params, batch["tokens"], one, axes)
        found.append((value, post_update, logits))
    assert all(torch.equal(a, b) for a, b in zip(*map(tree.leaves, found), strict=True))
    assert flops_per_token(of) == flops_per_token(same)
    assert cache_bytes_per_token(of) == cache_bytes_per_token(same) > 0
    assert [p.mixer.rope for b in same.blocks for p in b] == [p.mixer.rope for b in of.blocks for p in b]


def test_experts_in_a_wrapper_are_balanced():
    of = wrapped(experts(), lambda mixer: Beside(mixer, 4), "mlp")
    params, mesh = leaves_that_differ(init(of, Mesh(), 0)), Mesh()
    _, metrics = model.loss(params, make_batch(of), of, Axes(mesh))
    moved, left = model.post_update(params, metrics, of)
    before, after = (x["blocks"]["mlp"] for x in (params, moved))
    assert not torch.equal(before["choice_bias"], after["choice_bias"]) and "load" not in left
    assert set(before) == set(after) and after["own"] is before["own"]


def test_rates_inside_of_wrappers_are_found():
    inner = Attention(4, 4, 4, Rope(4), dropout=0.5)
    for mixer, names in (
        (Quiet(inner), {"dropout": 0.5}),
        (Noisy(Quiet(inner), 0.25), {"dropout": 0.5, "own.dropout": 0.25}),
        (Quiet(MoE(ROUTER, 8, jitter=0.1, noise=0.2)), {"jitter": 0.1, "noise": 0.2}),
    ):
        assert mixer.rates == names and set(mixer.without_rates().rates.values()) == {0.0}
    of, mesh = wrapped(TINY, lambda _: Quiet(inner), "attention"), Mesh()
    params = init(of, mesh, 0)
    grad = step.value_and_grad(lambda p, b: model.loss(p, b, of, Axes(mesh)))
    with pytest.raises(ValueError, match=r"Quiet.dropout: got 0.5 in a loss"):
        grad(params, make_batch(of))
    quiet = model.deterministic(of)
    assert quiet.blocks[0][0].mixer.inner.dropout == 0.0
    step.value_and_grad(lambda p, b: model.loss(p, b, quiet, Axes(mesh)))(params, make_batch(of))


def test_wrapped_forwards_every_method_of_a_mixer():
    """One that is added to Mixer and not to Wrapped would be the default, in silence."""
    public = [name for name in vars(Mixer) if not name.startswith("_")]
    assert {"rope", "read", "post_update", "widths"} <= set(public)
    assert not [name for name in ("__call__", "_require", *public) if name not in vars(model.Wrapped)]


def test_a_wrapped_model_is_described_and_made_again():
    of = wrapped(TINY, lambda mixer: Gated(Beside(mixer, 4)))
    assert described(description(of), known=(Gated, Beside)) == of


def test_plans_count_what_is_inside_and_say_what_is_not():
    mesh = Mesh(fsdp=2)
    plain, around, own = (quick(of, mesh) for of in (TINY, wrapped(TINY, Quiet), wrapped(TINY, lambda m: Beside(m, 4))))
    assert (plain.peak, plain.flops) == (around.peak, around.flops) and not plain.unknown
    assert around.unknown_memory == ("what Quiet keeps",) and own.flops > plain.flops


def quick(of, mesh):
    layouts, axes = model.layouts(of, mesh, strategy=ZERO3), Axes(mesh, data=ZERO3.tokens)
    loss = functools.partial(model.loss, decoder=of, axes=axes)
    train = step.build_train_step(loss, optim.adamw(1e-2), layouts, axes, strategy=ZERO3)
    rows = ZERO3.batch_layout((8, 12), torch.int64, mesh)
    specs = step.state_specs(model.specs(of, mesh, strategy=ZERO3), optim.adamw(1e-2), ZERO3)
    return plan.quick(step.Description(train, specs, {"tokens": rows, "labels": rows}, decoder=of))


# ---- generation, and meshes ------------------------------------------------------------------------------------------
GENERATED = [(name, how) for name in MODELS for how in WRAPPERS] + [("llama", "lora"), ("latents", "lora")]


def around(name, how, **changes):
    of = MODELS[name](**changes)
    if how == "lora":
        return wrapped(of, lambda mixer: Lora(mixer, 3), "attention")
    return wrapped(of, WRAPPERS[how])


def without_own(params):
    """Those of the model that is not wrapped: the paths of a base do not change."""
    if not isinstance(params, dict):
        return params
    return {k: without_own(v) for k, v in params.items() if k not in ("own", "gain", "lora")}


@pytest.mark.long
@pytest.mark.parametrize(("name", "how"), GENERATED, ids=["-".join(one) for one in GENERATED])
def test_generation_equals_the_growing_prompt(name, how):
    """Ragged prompts too."""
    of, mesh = around(name, how), Mesh()
    axes = Axes(mesh)
    params = leaves_that_differ(init(of, mesh, 5))
    prompts, texts = make_batch(of)["tokens"][:2, :5], []
    for prompt in (prompts[:1, :2], prompts[1:]):
        text = prompt
        for _ in range(4):
            best = model.logits(params, text, of, axes)[:, -1, : of.vocab_size].argmax(-1, keepdim=True)
            text = torch.cat((text, best), 1)
        texts.append(text[0, prompt.shape[1] :])
    writer = model.inference(params, of, axes, chunk=3)
    got = model.generate(writer, [prompts[0, :2], prompts[1]], 4, temperature=0)
    assert torch.equal(got, torch.stack(texts))
    plain = MODELS[name]()
    base = model.logits(without_own(params), prompts, plain, axes)
    assert torch.equal(base, model.logits(params, prompts, of, axes)) == (how == "quiet")


ON_MESHES = [
    *[(mesh, "llama", how, {}) for mesh in (Mesh(fsdp=2), Mesh(tp=2)) for how in ("lora", "one around another")],
    (Mesh(tp=2), "llama", "one around another", {"sequence_parallel": True}),
    (Mesh(ep=2), "experts", "bottleneck", {}),
    (Mesh(ep=2), "latents", "one around another", {}),
    (Mesh(tp=2), "latents", "bottleneck", {}),
    (Mesh(fsdp=2), "states", "bottleneck", {}),
]


@pytest.mark.medium
@pytest.mark.parametrize("case", few(2, [(case,) for case in ON_MESHES], [str(case) for case in ON_MESHES]))
def test_equal_to_one_rank_and_proven(case):
    """Two steps, biases of routers included, fp64."""
    mesh, name, how, changes = case
    of, optimizer = around(name, how, **changes), optim.adamw(1e-2)

    def make(mesh):
        layouts, axes = model.layouts(of, mesh, strategy=ZERO3), Axes(mesh, data=ZERO3.tokens)
        loss = functools.partial(model.loss, decoder=of, axes=axes, save="mincut")
        post_update = functools.partial(model.post_update, decoder=of)
        return step.build_train_step(
            lambda p, b: loss(p, b), optimizer, layouts, axes, strategy=ZERO3, post_update=post_update
        )

    def specs_on(mesh):
        return step.state_specs(model.specs(of, mesh, strategy=ZERO3), optimizer, ZERO3)

    rows = dict.fromkeys(("tokens", "labels"), ZERO3.batch_layout((8, 12), torch.int64, mesh))
    state = tree.init(specs_on(Mesh(**dict.fromkeys(mesh.names, 1))), 0, 0)
    state = state._replace(params=leaves_that_differ(state.params))
    batch = make_batch(of, batch_size=8)
    found = proven_and_equal(make, mesh, state, batch, layouts=(tree.layouts(specs_on(mesh)), rows), steps=2)
    assert found.worst[1] < 1e-10


def test_the_example_of_the_docs():
    text = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    code = text.partition("<!-- mixers: run by")[2].partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(compile(code, "docs/families.md", "exec"), names)
    of, mesh = names["adapted"](tiny(mlp=names["Gate"]()), 4), Mesh()
    params = init(of, mesh, 0)
    tokens = make_batch(of)["tokens"][:, :4]
    plain = tiny(mlp=names["Gate"]())
    base = model.logits(without_own(params), tokens, plain, Axes(mesh))
    assert torch.equal(model.logits(params, tokens, of, Axes(mesh)), base)  # it begins as what it is around
    assert model.generate(model.inference(params, of, Axes(mesh)), tokens, 3).shape == (3, 3)
