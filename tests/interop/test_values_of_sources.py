"""What others saved beside tensors: plain values come back, or are named; torch's own FSDP2 checkpoints resume."""

import fractions
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fmegatron import checkpoint, interop
from tests.interop.models import Net, train

STATE = {
    "w": torch.arange(3.0),
    "epoch": 7,
    "opt": {"lr": 0.1, "betas": (0.9, 0.95), "groups": [{"lr": 1e-3, "w": torch.ones(2)}, {"lr": 2e-3}]},
    "note": "a text",
    "none": None,
}


def same(a, b):
    if isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        yield


def test_plain_values_of_a_dcp_directory(tmp_path, quiet):
    """Without a target, into a state, into modules' state dicts, and below a path: numbers, texts, lists, tuples."""
    dcp.save(STATE, checkpoint_id=tmp_path / "c", no_dist=True)
    source = interop.source(tmp_path / "c")
    assert same(checkpoint.restore(source), STATE)
    empty = {"w": torch.zeros(3), "epoch": 0, "note": "", "none": None}
    empty["opt"] = {"lr": 0.0, "betas": (0, 0), "groups": [{"lr": 0.0, "w": torch.zeros(2)}, {"lr": 0.0}]}
    assert same(checkpoint.restore(source, empty), STATE)
    interop.load_state_dict(source, empty)
    assert same(empty, STATE)
    assert same(checkpoint.restore(source, prefix="opt"), STATE["opt"])
    with pytest.raises(ValueError, match="stored but not asked for: .*epoch"):
        checkpoint.restore(source, {"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="epochs: not in the checkpoint .did you mean epoch"):
        checkpoint.restore(source, {("epochs" if key == "epoch" else key): x for key, x in empty.items()})


def test_lists_of_tensors_alone_and_keys_with_a_slash(tmp_path, quiet):
    """Also where no plain value is beside them."""
    state = {"a": [torch.ones(2), torch.zeros(3)]}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert same(checkpoint.restore(interop.source(tmp_path / "a")), state)
    keys = {"b": {"x/y": 1, "w": {"0/1": [2, {"q": 3}]}}}
    dcp.save(keys, checkpoint_id=tmp_path / "b", no_dist=True)
    assert same(checkpoint.restore(interop.source(tmp_path / "b")), keys)


def test_what_is_no_plain_value_is_named(tmp_path, quiet):
    """Code, and tensors inside of objects: never dropped in silence."""
    state = {"w": torch.ones(2), "step": 3, "half": fractions.Fraction(1, 2), "rows": [{"n": 1, "x": torch.ones(2)}]}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.warns(RuntimeWarning, match="1 stored objects are no plain values, and were not read: half"):
        got = checkpoint.restore(interop.source(tmp_path / "c"))
    assert got["step"] == 3 and torch.equal(got["rows"][0]["x"], torch.ones(2)) and "half" not in got
    target = {"w": torch.zeros(2), "step": 0, "rows": [{"n": 0, "x": torch.zeros(2)}]}
    with pytest.warns(RuntimeWarning, match="not read: half"):
        interop.load_state_dict(interop.source(tmp_path / "c"), target)
    assert target["step"] == 3 and target["rows"][0]["n"] == 1


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_own_checkpoint_of_module_and_optimizer_resumes(tmp_path, quiet, flat):
    """As torchtitan writes it: get_state_dict, names of parameters in the optimizer's state, flat or not."""
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(flatten_optimizer_state_dict=flat)
    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = Net()
        nets.append((net, torch.optim.AdamW(net.parameters(), lr=0.01 + seed, betas=(0.9, 0.98))))
    (net, optimizer), (other, another) = nets
    for _ in range(3):
        train(net, optimizer)
    train(other, another, 1)
    model, moments = get_state_dict(net, optimizer, options=options)
    saved = {"model": model, "optim": moments, "epoch": 4, "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.01]}}
    dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    got = checkpoint.restore(interop.source(tmp_path / "c"))
    assert got["epoch"] == 4 and got["lr_scheduler"] == {"last_epoch": 3, "base_lrs": [0.01]}
    set_state_dict(other, another, model_state_dict=got["model"], optim_state_dict=got["optim"], options=options)
    for a, b in zip(optimizer.param_groups[0]["params"], another.param_groups[0]["params"], strict=True):
        assert same(another.state[b], optimizer.state[a]) and int(another.state[b]["step"]) == 3
    assert another.param_groups[0]["lr"] == 0.01
    train(net, optimizer)
    train(other, another)
    assert same(dict(other.state_dict()), dict(net.state_dict()))


def test_texts_of_safetensors(tmp_path):
    """The texts of a header are the metadata of the file."""
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"epoch": "7"})
    found = checkpoint.describe(interop.source(tmp_path / "a.safetensors"))
    assert found.metadata == {"safetensors": {"epoch": "7"}}
