"""Awkward parameters in a whole jitted step, and groups in the decoder's: each as in a plain run by torch."""

import dataclasses
import functools

import pytest
import torch

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes, reshard
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.optim import Group, contrib
from fmegatron.step import build_train_step, jit, state_specs, trace
from fmegatron.testing import assert_parity
from tests.definition import loss_of
from tests.fresh_state import fresh_state
from tests.pairs import few, mixed
from tests.step import tiny

ONE = Mesh(dp=1, fsdp=1, tp=1)


# ---- unused, used twice, of one element, tied ------------------------------------------------------------------------
def awkward_specs(mesh, strategy):
    """A table that embeds and reads out, a matrix used twice, one never used, leaves of one element and of none."""
    shapes = {"table": (6, 4), "w": (2, 4, 4), "unused": (4, 4), "one": (1,), "gain": (), "odd": (5, 3), "none": (0, 4)}
    layouts = {name: Layout(shape, torch.float64, mesh) for name, shape in shapes.items()}
    placed = tree.map(strategy.params_layout, layouts)
    return tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(0.5)), placed)


def awkward_loss(params, batch, layouts, axes, data):
    """The mean over the rows of all ranks; weights are gathered where they are used."""
    whole = tree.map(lambda x, layout: reshard(x, layout, layout.replace(spec=(), flat=()), axes), params, layouts)
    x = whole["table"][batch]
    for _ in range(2):
        for w in whole["w"].unbind(0):
            x = torch.tanh(x @ w)
    x = x * whole["gain"] + whole["one"] + whole["odd"].square().mean()
    loss = (x @ whole["table"].T).square().mean() / axes[data].size
    return loss, {}


MAKE = {
    "adamw": lambda: optim.adamw(1e-2),
    "adafactor": lambda: contrib.adafactor(1e-2),
    "muon": functools.partial(optim.muon, 1e-2, matrices=["^w$", "unused", "odd"]),
    "soap": functools.partial(contrib.soap, 1e-2, matrices=["^w$", "unused"]),
}


def awkward_step(make, strategy, mesh, guard):
    """(step, optimizer, layouts of the state)."""
    specs, axes = awkward_specs(mesh, strategy), Axes(mesh)
    layouts = tree.layouts(specs)
    opt = optim.skip_nonfinite(make()) if guard else make()

    def loss_fn(params, batch):
        return awkward_loss(params, batch, layouts, axes, ("dp", "fsdp"))

    step = build_train_step(loss_fn, opt, layouts, axes, strategy=strategy, clip_norm=0.5)
    return step, opt, tree.layouts(state_specs(specs, opt, strategy))


ALIKE = mixed(MAKE, ["zero1", "zero3"])


@pytest.mark.medium
@pytest.mark.parametrize(("name", "level"), few(2, ALIKE, map("-".join, ALIKE)))
def test_awkward_leaves_are_trained_alike_on_ranks(name, level):
    """More ranks than rows of some; zero gradients of what is not used are no error and no NaN."""
    make, strategy, mesh = MAKE[name], getattr(DataParallel, level)(), Mesh(dp=2, fsdp=2, tp=1)
    params = tree.init(awkward_specs(ONE, strategy), key=0, rank=0)
    _, opt, _ = awkward_step(make, strategy, ONE, guard=True)
    result = assert_parity(
        lambda m: awkward_step(make, strategy, m, guard=True)[0], mesh, fresh_state(params, opt),
        lambda i: (torch.arange(8) * 5 + i) % 6,
        layouts=(awkward_step(make, strategy, mesh, guard=True)[2], Layout((8,), torch.int64, mesh, (("dp", "fsdp"),))),
        steps=3, tolerance=1e-7 if name == "soap" else 1e-10,
    )  # fmt: skip
    state, _ = result.sharded.globals()
    assert state.opt["skipped"] == 0 and all(x.isfinite().all() for x in tree.leaves(state.params))


def test_a_step_with_awkward_leaves_is_torchs():
    """The reference differentiates one parameter that is used twice and hands torch's AdamW a zero for the unused."""
    strategy = DataParallel.replicated()
    step, opt, _ = awkward_step(
        lambda *_: optim.adamw(1e-2, weight_decay=0.1, decay=lambda _: True), strategy, ONE, False
    )
    params = tree.init(awkward_specs(ONE, strategy), key=0, rank=0)
    leaves = tree.map(lambda x: x.clone().requires_grad_(), params)
    reference = torch.optim.AdamW(tree.leaves(leaves), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    state, compiled = fresh_state(params, opt), jit(step, donate=0, backend="eager")
    layouts = tree.layouts(awkward_specs(ONE, strategy))
    for i in range(4):
        batch = (torch.arange(8) * 5 + i) % 6
        reference.zero_grad()
        awkward_loss(leaves, batch, layouts, Axes(ONE), ("dp", "fsdp"))[0].backward()
        for leaf in tree.leaves(leaves):
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        norm = torch.nn.utils.clip_grad_norm_(tree.leaves(leaves), 0.5)
        reference.step()
        state, metrics = compiled(state, batch)
        torch.testing.assert_close(metrics["grad_norm"], norm, rtol=1e-12, atol=0)
    for path, x, y in zip(tree.paths(leaves), tree.leaves(state.params), tree.leaves(leaves), strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-11, atol=1e-13, msg=path)


# ---- groups in the decoder -------------------------------------------------------------------------------------------
TIED = dataclasses.replace(tiny.CONFIG, tied=True)
RULES = [
    ("embed", Group(lr=0.3, weight_decay=0.0)),
    ("head", Group(rate=optim.linear(3e-2, 10))),
    ("final_norm", Group(frozen=True)),
    ("mlp/w_down", Group(frozen=True)),
]


def decoder_step(config, opt):
    layouts, axes = model.layouts(config, ONE), Axes(ONE)

    def loss_fn(params, batch):
        return model.loss(params, batch, config, axes)

    return build_train_step(loss_fn, opt, layouts, axes, clip_norm=None)


def trained(config, opt, steps=3):
    """(first parameters, last state) of a jitted decoder."""
    params = init(config, ONE, key=0)
    compiled, state = jit(decoder_step(config, opt), backend="eager"), fresh_state(params, opt)
    for i in range(steps):
        state, _ = compiled(state, tiny.decoder_batch(config, rows=4, seed=i))
    return params, state


@pytest.mark.medium
@pytest.mark.parametrize("tied", few(1, [(False,), (True,)], ["untied", "tied"]))
def test_decoupled_rates_and_frozen_leaves_are_torchs_groups(tied):
    config = TIED if tied else dataclasses.replace(tiny.CONFIG, tied=False)
    rules = [rule for rule in RULES if not (tied and rule[0] == "head")]
    opt = optim.grouped(1e-2, rules, weight_decay=0.1, adam=optim.scale_by_adam())
    params, state = trained(config, opt)
    leaves = tree.map(lambda x: x.clone().requires_grad_(), params)
    named = dict(zip(tree.paths(leaves), tree.leaves(leaves), strict=True))
    groups = []
    for path, leaf in named.items():
        if path in ("final_norm", "blocks/mlp/w_down"):
            assert not [name for name in tree.paths(state.opt) if name.endswith(path)]
            leaf.requires_grad_(False)
            continue
        decay = 0.0 if "embed" in path or "norm" in path else 0.1
        groups.append({"params": [leaf], "weight_decay": decay, "path": path})
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    axes = Axes(ONE)
    for i in range(3):
        for group in reference.param_groups:
            own = {"embed": 3e-3, "head": optim.linear(3e-2, 10)(i)}
            group["lr"] = own.get(group["path"].partition("/")[0], 1e-2)
        reference.zero_grad()
        loss_of(model.loss(leaves, tiny.decoder_batch(config, rows=4, seed=i), config, axes)[0]).backward()
        reference.step()
    for path, x in zip(tree.paths(state.params), tree.leaves(state.params), strict=True):
        torch.testing.assert_close(x, named[path].detach(), rtol=1e-9, atol=1e-12, msg=path)


@pytest.mark.medium
def test_a_frozen_matrix_of_the_decoder_costs_no_product():
    """One for each layer: the gradient of w_down is not computed, that of its input is."""

    def products(rules):
        opt = optim.grouped(1e-2, rules, adam=optim.scale_by_adam())
        state = fresh_state(init(tiny.CONFIG, ONE, key=0), opt)
        graph = trace(decoder_step(tiny.CONFIG, opt), (state, tiny.decoder_batch(rows=4))).graph_module.graph
        return sum("mm" in str(node.target) for node in graph.nodes)

    assert products([]) - products(RULES[3:]) == tiny.CONFIG.layers


@pytest.mark.slow
@pytest.mark.long
def test_mup_scales_the_first_step_of_a_wide_decoder():
    """By base fan_in / fan_in for hidden matrices and the head, by nothing for embeddings and norms."""
    base = dataclasses.replace(tiny.CONFIG, tied=False)
    wide = tiny.config_with(dim=32, heads=8, kv_heads=4, ffn_dim=72)
    specs = model.specs(wide, ONE)
    multipliers = contrib.mup_multipliers(specs, model.specs(base, ONE))
    moved = []
    for given in (multipliers, None):
        opt = optim.grouped(1e-2, [], weight_decay=0.0, multipliers=given, adam=optim.scale_by_adam())
        params, state = trained(wide, opt, steps=1)
        moved.append(tree.subtract(state.params, params))
    factors = {}
    for path, x, y in zip(tree.paths(moved[0]), *map(tree.leaves, moved), strict=True):
        factors[path] = round((x.norm() / y.norm()).item(), 9)
    assert factors == {
        "blocks/attention/wo": 0.5, "blocks/attention/wqkv": 0.5, "blocks/attention_norm": 1.0,
        "blocks/mlp/w_down": round(24 / 72, 9), "blocks/mlp/w_gate_up": 0.5, "blocks/mlp_norm": 1.0,
        "embed/table": 1.0, "final_norm": 1.0, "head/w": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("make", [contrib.soap, contrib.adafactor, optim.muon], ids=["soap", "adafactor", "muon"])
def test_layouts_of_one_rank_change_nothing(make):
    mesh = Mesh(dp=1)
    layouts = {"w": Layout((6, 4), torch.float32, mesh, flat=("dp",)), "norm": Layout((4,), torch.float32, mesh)}
    params = tree.place({"w": torch.randn(6, 4).view(layouts["w"].local_shape(0)), "norm": torch.ones(4)}, layouts)
    plain = {"w": params["w"].view(6, 4), "norm": torch.ones(4)}
    opt = make(1e-2)
    found, _ = opt.update(params, opt.init(params), params)
    wanted, _ = opt.update(plain, opt.init(plain), plain)
    for path in wanted:
        assert torch.equal(found[path].reshape(wanted[path].shape), wanted[path]), path
