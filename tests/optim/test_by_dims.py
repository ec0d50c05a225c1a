"""What decays, what travels in 16 bits, what Muon orthogonalizes: by dims and what specs say of them, no names."""

import importlib
import pickle
import re

import pytest
import torch

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Precision
from fmegatron.interop import hf
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.optim import contrib
from fmegatron.optim.orthogonalized import is_hidden_matrix
from fmegatron.step.layer import layer_layout
from tests.model.families import tiny_hf

F32 = torch.float32
# Vectors whose names had no "norm" or "bias" and which decayed: norms behind a part, of Mamba-2 A and D (which its
# authors leave out), sinks.
NAMELESS = {
    **dict.fromkeys(("bamba", "bamba-groups"), {"a_log", "skip"}), "gpt-oss": {"sinks"},
    **dict.fromkeys(("gemma2", "gemma3"), {"attention_after", "mlp_after"}),
}  # fmt: skip


def masks(specs):
    """{path: whether it decays by the default of adamw}."""
    params = tree.init(specs, key=0, rank=0)
    opt = optim.adamw(1.0, weight_decay=0.5)
    params = tree.map(lambda x: tree.place(torch.ones_like(x), tree.layout_of(x)), params)
    after, _ = opt.update(tree.map(torch.zeros_like, params), opt.init(params), params)
    return {
        path: bool((old != new).any())
        for path, old, new in zip(tree.paths(params), tree.leaves(params), tree.leaves(after), strict=True)
    }


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """{name: decoder} of every family, from its config.json."""
    pytest.importorskip("transformers")
    found = {}
    for name in tiny_hf.MODELS:
        path = tmp_path_factory.mktemp("config")
        tiny_hf.config_of(name)[1].save_pretrained(path)
        found[name] = hf.decoder(path)
    return found


def test_of_all_families_what_names_decided_is_what_dims_decide(families):
    for name, decoder in families.items():
        specs = model.specs(decoder, Mesh())
        by_names = {p: re.search("norm|bias", p, re.IGNORECASE) is None for p in tree.paths(specs)}
        wires = zip(tree.paths(specs), tree.leaves(Precision.bf16_wire().wires(tree.layouts(specs))), strict=True)
        narrow = {path: wire.reduce == torch.bfloat16 for path, wire in wires}
        decays = masks(specs)
        other = {path.rpartition("/")[2] for path in by_names if decays[path] != by_names[path]}
        assert other == NAMELESS.get(name, set()), name
        flat = {path for path, spec in zip(tree.paths(specs), tree.leaves(specs), strict=True) if len(spec.shape) < 2}
        assert all(narrow[path] == decays[path] for path in narrow), name
        assert not any(decays[path] for path in flat)


def test_of_all_families_muon_takes_what_names_chose(families):
    old = r"norm|bias|scale|router|embed|table|(?:^|/)(?:lm_)?head(?:/|$)"
    for name, decoder in families.items():
        specs = model.specs(decoder, Mesh(tp=1))
        taken = set(tree.paths(optim.muon(1e-2).init(specs)["muon"]))
        by_names = {path for path in tree.paths(specs) if re.search(old, path, re.IGNORECASE) is None}
        assert {path.rpartition("/")[2] for path in by_names ^ taken} == NAMELESS.get(name, set()), name


def test_vectors_of_any_name_do_not_decay_and_matrices_of_any_name_do():
    net = torch.nn.Module()
    net.wte, net.ln_1 = torch.nn.Embedding(16, 8), torch.nn.LayerNorm(8)
    net.unbiased, net.gamma = torch.nn.Linear(8, 24), torch.nn.Parameter(torch.ones(8))
    net.normalizer = torch.nn.Linear(8, 8, bias=False)
    params = {name: p.detach() + 1.0 for name, p in net.named_parameters()}
    grads = tree.map(torch.zeros_like, params)
    for make in (
        lambda: optim.adamw(1.0, weight_decay=0.5),
        lambda: optim.lion(1.0, weight_decay=0.5),
        lambda: optim.sgd(1.0, weight_decay=0.5),
        lambda: optim.grouped(1.0, [], weight_decay=0.5, adam=optim.scale_by_adam()),
        lambda: contrib.adafactor(1.0, weight_decay=0.5),
        lambda: optim.muon(1.0, weight_decay=0.5),
        lambda: contrib.soap(1.0, weight_decay=0.5),
    ):
        opt = make()
        after, _ = opt.update(grads, opt.init(params), params)
        assert {name for name in params if not torch.equal(params[name], after[name])} == {
            name for name in params if params[name].dim() > 1
        }, opt


def test_stacks_of_vectors_are_known_by_their_specs():
    experts = {"up": (3, 4, 8, 8), "b": (3, 4, 8)}
    shapes = {"blocks": {"ln": (3, 8), "w": (3, 8, 8), "experts": experts}, "table": (9, 8)}
    specs = tree.specs(shapes, Mesh(), stacked="blocks", init=tree.Normal(1.0))
    b = specs["blocks"]["experts"]
    b["b"] = tree.ArraySpec(b["b"].layout.replace(lead=2), b["b"].init, stacked=True)
    matrices = {"blocks/w", "blocks/experts/up", "table"}
    assert {path for path, decays in masks(specs).items() if decays} == matrices
    wires = Precision.bf16().wires(tree.layouts(specs))
    of_paths = zip(tree.paths(wires), tree.leaves(wires), strict=True)
    assert {path for path, wire in of_paths if wire.gather == torch.bfloat16} == matrices
    assert set(tree.paths(optim.muon(1.0).init(specs)["muon"])) == {"blocks/w", "blocks/experts/up"}
    assert set(tree.paths(contrib.adafactor(1.0).init(specs)["factored"]["row"])) == matrices
    assert not layer_layout(specs["blocks"]["ln"].layout).is_matrix and layer_layout(b["b"].layout).lead == 1
    assert layer_layout(specs["blocks"]["w"].layout).is_matrix


def test_a_step_knows_it_of_its_specs_whatever_the_arrays_know():
    specs = tree.specs({"blocks": {"ln": (2, 4), "w": (2, 4, 4)}}, Mesh(), init=1.0, stacked="blocks")

    def loss(p, b):
        return 0.0 * (b["x"] @ p["blocks"]["w"][0]).sum(), {}

    train = step.build_train_step(loss, optim.sgd(1.0, weight_decay=0.5), specs)
    state = tree.init(step.state_specs(specs, optim.sgd(1.0, weight_decay=0.5)), key=0, rank=0)
    bare = state._replace(params=tree.map(torch.clone, state.params))
    after = train(bare, {"x": torch.ones(2, 4)})[0].params["blocks"]
    assert (after["ln"] == 1).all() and (after["w"] == 0.5).all()


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=1, tp=1)], ids=["one", "named"])
def test_muon_takes_fused_matrices_apart_as_layouts_say(mesh):
    of = model.llama(50, 64, 2, 4, 2, 96, 16)
    params = tree.init(model.specs(of, mesh), key=0, rank=0)
    grads = tree.map(lambda p: torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), params)

    def update(**how):
        opt = optim.muon(1.0, weight_decay=0.0, **how)
        moved = tree.map(torch.subtract, params, opt.update(grads, opt.init(params), params)[0])
        return dict(zip(tree.paths(params), tree.leaves(moved), strict=True))

    stated, default = update(parts=[("wqkv", (64, 32, 32)), ("w_gate_up", 2)]), update()
    assert all(torch.equal(stated[path], default[path]) for path in stated)
    as_one = update(parts=())
    assert {path for path in stated if not torch.equal(as_one[path], default[path])} == {
        "blocks/attention/wqkv", "blocks/mlp/w_gate_up"
    }  # fmt: skip


def test_parts_of_own_specs_are_those_of_their_split():
    rules = [("wqkv", (None, Split("tp", (4, 2, 2)))), ("up", (None, Split("tp", 2))), ("wo", ("tp",))]
    for mesh in (Mesh(tp=1), Mesh(tp=2), Mesh(fsdp=2, tp=2)):
        specs = tree.specs({"wqkv": (4, 8), "up": (4, 6), "wo": (4, 6)}, mesh, rules, strategy="zero3")
        assert {name: spec.layout.beside for name, spec in specs.items()} == {"wqkv": (4, 2, 2), "up": (3, 3), "wo": ()}


def test_what_dims_mean_is_no_part_of_where_elements_are():
    a = Layout((3, 4, 6), F32, Mesh(tp=2), (None, None, "tp"))
    b = a.replace(lead=1, beside=(2, 4))
    assert a == b and hash(a) == hash(b) and a.to_json() == b.to_json() and a.label != b.label
    again = pickle.loads(pickle.dumps(b))
    assert (again, again.lead, again.beside) == (a, 1, (2, 4))
    assert b.without("tp").beside == (2, 4) and b.replace(shape=(3, 4, 8)).beside == ()
    assert (a.is_matrix, a.replace(lead=2).is_matrix, b.replace(unreduced=()).lead) == (True, False, 1)


def test_the_choice_by_use():
    assert not any(map(is_hidden_matrix, ("embed/positions", "lm_head", "blocks/moe/router", "tables/w")))
    assert all(map(is_hidden_matrix, ("blocks/normalizer/w", "unbiased", "scaled_w", "headless")))
    moved = importlib.import_module("fmegatron.tree")
    with pytest.raises(AttributeError, match="Layout.is_matrix"):
        moved.neither_norm_nor_bias  # noqa: B018
