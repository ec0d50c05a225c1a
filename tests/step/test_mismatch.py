"""What a train step says when parameters, labels or dtypes are not what the layouts and the tokens want."""

import functools

import pytest
import torch

from fmegatron import model, optim, step
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from tests.fresh_state import fresh_state

CONFIG = model.llama(65, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, max_seq=8)
MESH = Mesh(dp=1)


def make():
    axes, layouts = Axes(MESH), model.layouts(CONFIG, MESH)
    optimizer = optim.adamw(1e-3)
    loss = functools.partial(model.loss, decoder=CONFIG, axes=axes)
    state = fresh_state(init(CONFIG, MESH, key=0), optimizer)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    train = step.jit(step.build_train_step(loss, optimizer, layouts, axes), donate=0, backend="eager")
    return train, state, {"tokens": tokens, "labels": tokens}


def test_a_leaf_of_another_shape_is_named():
    train, state, batch = make()
    params = {**state.params, "final_norm": torch.ones(15)}
    with pytest.raises(ValueError, match=r"final_norm: got local shape \(15,\), wanted \(16,\)"):
        train(state._replace(params=params), batch)


def test_a_missing_leaf_is_named():
    train, state, batch = make()
    params = {name: leaf for name, leaf in state.params.items() if name != "final_norm"}
    with pytest.raises(ValueError, match="final_norm"):
        train(state._replace(params=params), batch)


def test_a_leaf_of_another_dtype_is_named():
    train, state, batch = make()
    params = {**state.params, "final_norm": torch.ones(16, dtype=torch.float64)}
    with pytest.raises(ValueError, match="final_norm: got dtype f64, wanted f32"):
        train(state._replace(params=params), batch)


def test_labels_of_another_length_are_named():
    train, state, batch = make()
    with pytest.raises(ValueError, match=r"batch\['labels'\]: got shape \(2, 7\), wanted that of the tokens, \(2, 8\)"):
        train(state, {**batch, "labels": batch["labels"][:, :7].contiguous()})


def test_an_integer_parameter_is_named():
    with pytest.raises(ValueError, match="parameter 'b': got torch.int64, which has no gradient"):
        step.value_and_grad(lambda p: p["a"].sum())({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)})
