"""Each kind of thing that a cell may define again, or change, and that a step reads: three times as much behind it."""

import importlib
import sys
import textwrap
import types
import warnings
from typing import Any

import pytest
import torch

from fmegatron import step

START = """
import collections, dataclasses, enum, functools, types
import numpy as np
import torch
spare = 1.0
"""
RATE = """
class Rate:
    by = 1.0
    def __init__(self, own=1.0):
        self.own = own
    def now(self):
        return 1.0
"""
# name -> (what is defined before, what f returns, what a cell does then, words of the warning)
KINDS = {
    "a method of a class": (RATE + "rate = Rate()", "x * rate.now()", "Rate.now = lambda self: 3.0", "now"),
    "a class, and its object": (
        RATE + "rate = Rate()",
        "x * rate.now()",
        RATE.replace("return 1.0", "return 3.0") + "rate = Rate()",
        "now|rate",
    ),
    "a class that the step makes objects of": (
        RATE,
        "x * Rate().now()",
        RATE.replace("return 1.0", "return 3.0"),
        "Rate",
    ),
    "an attribute of a class": (RATE + "rate = Rate()", "x * rate.by", "Rate.by = 3.0", "by.*3.0"),
    "an attribute that hides that of the class": (RATE + "rate = Rate()", "x * rate.by", "rate.by = 3.0", "by"),
    "an attribute of an object": (RATE + "rate = Rate()", "x * rate.own", "rate.own = 3.0", "own is 3.0"),
    "an attribute of an object that is handed on": (
        RATE + "rate = Rate()\ndef scale(x, rate):\n    return x * rate.own",
        "scale(x, rate)",
        "rate.own = 3.0",
        "own is 3.0",
    ),
    "an attribute of an object of an object": (
        RATE + "rate = Rate(Rate())",
        "x * rate.own.own",
        "rate.own.own = 3.0",
        "own",
    ),
    "another object in its place": (RATE + "rate = Rate()", "x * rate.own", "rate = Rate(3.0)", "own is 3.0"),
    "a property": (
        "class Rate:\n    by = 1.0\n    @property\n    def twice(self):\n        return self.by\nrate = Rate()",
        "x * rate.twice",
        "rate.by = 3.0",
        "by",
    ),
    "what a method of a base reads": (
        RATE + "class Own(Rate):\n    def now(self):\n        return super().now() * self.own\nrate = Own()",
        "x * rate.now()",
        "rate.own = 3.0",
        "own",
    ),
    "an argument of a partial": (
        "def scale(x, by):\n    return x * by\ngo = functools.partial(scale, by=1.0)",
        "go(x)",
        "go = functools.partial(scale, by=3.0)",
        "go",
    ),
    "the arguments of a partial, in place": (
        "def scale(x, by):\n    return x * by\ngo = functools.partial(scale, by=1.0)",
        "go(x)",
        "go.keywords['by'] = 3.0",
        "go.*other values",
    ),
    "the function of a partial": (
        "def scale(x, by):\n    return x * by\ngo = functools.partial(scale, by=1.0)",
        "go(x)",
        "def scale(x, by):\n    return 3 * x * by\ngo = functools.partial(scale, by=1.0)",
        "go",
    ),
    "a lambda in a configuration": (
        "config = {'act': lambda x: x, 'lr': 0.1}",
        "config['act'](x)",
        "config['act'] = lambda x: 3 * x",
        "config",
    ),
    "a number in a configuration in a dict": (
        "config = {'model': {'by': 1.0}}",
        "x * config['model']['by']",
        "config['model']['by'] = 3.0",
        "config",
    ),
    "a number in another one, equal in Python": (
        "by = [1, 2]",
        "x * (3 if by[0] is True else 1)",
        "by[0] = True",
        "by",
    ),
    "a field of a dataclass": (
        "@dataclasses.dataclass\nclass Config:\n    by: float = 1.0\nconfig = Config()",
        "x * config.by",
        "config.by = 3.0",
        "by is 3.0",
    ),
    "a field of a dataclass with slots": (
        "@dataclasses.dataclass(slots=True)\nclass Config:\n    by: float = 1.0\nconfig = Config()",
        "x * config.by",
        "config.by = 3.0",
        "by is 3.0",
    ),
    "a field of a frozen one inside of one": (
        "@dataclasses.dataclass(frozen=True)\nclass In:\n    by: float = 1.0\n@dataclasses.dataclass(frozen=True)\n"
        "class Config:\n    of: In = In()\nconfig = Config()",
        "x * config.of.by",
        "config = dataclasses.replace(config, of=In(3.0))",
        "config",
    ),
    "a name of a namespace": (
        "config = types.SimpleNamespace(by=1.0)",
        "x * config.by",
        "config.by = 3.0",
        "by is 3.0",
    ),
    "a namespace that is handed on": (
        "config = types.SimpleNamespace(by=1.0)\ndef scale(x, c):\n    return x * c.by",
        "scale(x, config)",
        "config.by = 3.0",
        "by is 3.0",
    ),
    "a default": (
        "def scale(x, by=1.0):\n    return x * by",
        "scale(x)",
        "def scale(x, by=3.0):\n    return x * by",
        "defaults",
    ),
    "a default by name": (
        "def scale(x, *, by=1.0):\n    return x * by",
        "scale(x)",
        "scale.__kwdefaults__['by'] = 3.0",
        "default",
    ),
    "a list as a default": (
        "def scale(x, by=[1.0]):\n    return x * by[0]",
        "scale(x)",
        "scale.__defaults__[0][0] = 3.0",
        "default",
    ),
    "a closure in a closure": (
        "def outer(by):\n    def middle():\n        def inner(x):\n            return x * by\n        return inner\n"
        "    return middle()\ngo = outer(1.0)",
        "go(x)",
        "go = outer(3.0)",
        "by",
    ),
    "one of two closures of a function": (
        "def outer(by):\n    return lambda x: x * by[0]\nbys = [1.0], [1.0]\ngoes = [outer(by) for by in bys]",
        "goes[1](goes[0](x))",
        "bys[1][0] = 3.0",
        "by",
    ),
    "a decorator": (
        "def scaled(f):\n    @functools.wraps(f)\n    def wrapped(x):\n        return f(x) * by\n    return wrapped\n"
        "by = 1.0\n"
        "@scaled\ndef go(x):\n    return x",
        "go(x)",
        "by = 3.0",
        "'by'",
    ),
    "what a decorated function reads": (
        "@torch.no_grad()\ndef go(x):\n    return x * by\nby = 1.0",
        "go(x)",
        "by = 3.0",
        "'by'",
    ),
    "a function that is handed to another": (
        "def apply(f, x):\n    return f(x)\ndef act(x):\n    return x",
        "apply(act, x)",
        "def act(x):\n    return 3 * x",
        "'act'",
    ),
    "a set": ("on = {'a'}", "x * (3 if 'b' in on else 1)", "on.add('b')", "on"),
    "a deque": ("by = collections.deque([1.0])", "x * by[0]", "by[0] = 3.0", "by"),
    "a tuple with a list": ("by = (1, [1.0])", "x * by[1][0]", "by[1][0] = 3.0", "by"),
    "a NamedTuple": (
        "Config = collections.namedtuple('Config', 'by')\nconfig = Config(1.0)",
        "x * config.by",
        "config = Config(3.0)",
        "config",
    ),
    "an enum": (
        "class Mode(enum.Enum):\n    one, three = 1, 3\nmode = Mode.one",
        "x * mode.value",
        "mode = Mode.three",
        "mode",
    ),
    "a number of numpy": ("by = np.float32(1)", "x * float(by)", "by = np.float32(3)", "by"),
    "an array of numpy": ("by = np.ones(3)", "x * float(by[0])", "by = by * 3", "by"),
    "an array of numpy, in place": ("by = np.ones(3)", "x * float(by[0])", "by *= 3", "by.*other values"),
    "a name of Python's": ("", "x * max(1, 0)", "def max(*x):\n    return 3", "max"),
    "a table with a number beside tensors": (
        "state = {'w': torch.ones(2), 'by': 1.0}",
        "x * state['by']",
        "state['by'] = 3.0",
        "state",
    ),
    "an attribute of a module": (
        "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.by = 1.0\n"
        "    def forward(self, x):\n        return x * self.by\nnet = torch.nn.Sequential(Net(), Net())",
        "torch.func.functional_call(net, {}, (x,))",
        "net[1].by = 3.0",
        "by",
    ),
    "training and evaluation": (
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x if self.training else 3 * x\n"
        "net = Net()",
        "torch.func.functional_call(net, {}, (x,))",
        "net.eval()",
        "training",
    ),
    "a number of torch's module": (
        "net = torch.nn.LeakyReLU(1.0)",
        "torch.func.functional_call(net, {}, (x - 2,)) + 2",
        "net.negative_slope = -1.0",
        "negative_slope",
    ),
    "what a method of a module reads": (
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x * by\nnet, by = Net(), 1.0",
        "torch.func.functional_call(net, {}, (x,))",
        "by = 3.0",
        "'by'",
    ),
}


@pytest.fixture
def cells():
    """A notebook: its names, and how a cell is run."""
    module: Any = types.ModuleType("notebook")

    def run(text):
        exec(compile(textwrap.dedent(text), "/tmp/ipykernel_1/cell.py", "exec"), vars(module))

    run(START)
    module.run = run
    return module


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_each_kind_traces_again(cells, kind):
    before, body, change, words = KINDS[kind]
    cells.run(before)
    cells.run(f"def f(x):\n    return {body}")
    jitted, x = step.jit(cells.f, backend="eager"), torch.ones(3)
    first = jitted(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cells.run("spare = 5.0")
        cells.run("\n\n" + before)  # the same cell again, some lines further down
        assert torch.equal(jitted(x), first) and torch.equal(jitted(x), first)
        cells.run(before)
        jitted(x)
    cells.run(change)
    with pytest.warns(UserWarning, match=f"code has changed.*({words})"):
        again = jitted(x)
    assert torch.equal(again, 3 * first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(jitted(x), again)


def test_a_file_that_is_loaded_again(tmp_path, monkeypatch):
    """`settings.by`, and a function of it, of a module that importlib.reload reads again."""
    file = tmp_path / "own_settings.py"
    file.write_text("by = 1.0\ndef scale(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    settings = importlib.import_module("own_settings")
    monkeypatch.setitem(sys.modules, "own_settings", settings)
    jitted, x = step.jit(lambda x: settings.scale(x) * settings.by, backend="eager"), torch.ones(3)
    first = jitted(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(settings)
        assert torch.equal(jitted(x), first)
    for text, words in (
        ("by = 3.0\ndef scale(x):\n    return x\n", r"own_settings\.by is 3\.0, was 1\.0"),
        ("by = 3.0\ndef scale(x):\n    return x / 3\n", r"own_settings\.scale"),
    ):
        file.write_text(text)
        importlib.invalidate_caches()
        importlib.reload(settings)
        with pytest.warns(UserWarning, match=words):
            assert torch.allclose(jitted(x), settings.scale(x) * settings.by)


@pytest.mark.parametrize(
    "before, body, between",
    [
        ("losses = []", "x * 2", "losses.append(1)"),
        (
            "params = {'w': torch.ones(2)}\ndef g(x, p):\n    return x * 2",
            "g(x, len(params))",
            "params = {'w': torch.zeros(2)}",
        ),
        ("history = [torch.ones(2)]", "x * min(len(history), 1)", "history.append(torch.ones(2))"),
        (RATE + "rate = Rate()\nrate.step = 0", "x * rate.own", "rate.step += 1"),
        ("def done():\n    return spare\nhooks = {}", "x * 2", "hooks['a'] = done"),
        ("config = {'by': 1.0}", "x * config['by']", "config = dict(config)"),
    ],
)
def test_what_a_loop_changes_beside_the_step(cells, before, body, between):
    cells.run(before)
    cells.run(f"def f(x):\n    return {body}")
    jitted, x = step.jit(cells.f, backend="eager"), torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(x)
        kept = list(jitted.cache.values())
        for _ in range(3):
            cells.run(between)
            jitted(x)
        assert list(jitted.cache.values()) == kept
