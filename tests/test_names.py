"""Public names: few, each in an example that runs, none named as its file; names of before say where they are."""

import ast
import importlib
import inspect
import pkgutil
import re
import types

import pytest

import fmegatron
from fmegatron.moved import INTERNAL, REPLACED
from tests.house import ROOT, nodes, none, sources

PACKAGES = sorted(i.name for i in pkgutil.walk_packages(fmegatron.__path__, "fmegatron.") if i.ispkg)
MOST = 280
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*"), *ROOT.glob("experiments/*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def public(package: str) -> list[str]:
    """What `dir` of a package shows, modules left aside."""
    names = vars(importlib.import_module(package))
    return sorted(n for n, x in names.items() if n[0] != "_" and not isinstance(x, types.ModuleType))


def test_fronts_show_what_they_name_and_no_more():
    none(
        f"{package}: {', '.join(names)}: not in __all__, or not there"
        for package in PACKAGES
        if (names := set(public(package)) ^ set(vars(importlib.import_module(package)).get("__all__", ())))
    )


def test_few():
    assert sum(len(public(package)) for package in PACKAGES) <= MOST


def test_no_name_is_that_of_its_file():
    none(
        f"fmegatron/{room}: {name} is a public name and the name of a file"
        for room in sorted({package.split(".")[1] for package in PACKAGES})
        for name in {n for package in PACKAGES if package.split(".")[1] == room for n in public(package)}
        & {path.stem for path in (ROOT / "fmegatron" / room).rglob("*.py")}
    )


def test_each_name_is_shown():
    told = "\n".join(path.read_text(encoding="utf-8") for path in PAGES if path.suffix in (".md", ".ipynb", ".py"))
    none(
        f"{package}.{name}: in no page, notebook or experiment; show it in docs/names.md"
        for package in PACKAGES
        for name in public(package)
        if not re.search(rf"\b{package.split('.')[-1]}\.{name}\b|import\b[^\n]*\b{name}\b|^ +\"?{name}\b", told, re.M)
    )


# Public functions that take any names, by what the names are. Other functions state their arguments: what is passed on
# is written out, or has the type of a TypedDict, where it would be more than 8.
NAMES_THAT_ARE_DATA = {
    "names of axes": "layout.Mesh.__init__ layout.Mesh.rank layout.Mesh.view",
    "names of transforms, and of their state in files": "optim.chain optim.grouped optim.optimizer",
    "names of what is written": "loop.JsonLines.__init__ loop.Settings.__init__ loop.Settings.about",
    "fields of the value that is returned, to be changed": "collectives.Precision.fp32 collectives.Precision.fp64 "
    "collectives.Precision.bf16 collectives.Precision.fp8_wire collectives.Precision.bf16_wire data.Blend.of_epochs "
    "layout.Layout.replace tree.ArraySpec.replace model.opened model.llama",
    "arguments of another library, read by it": "loop.WeightsAndBiases.__init__",
    "names of other libraries' arguments, refused with what takes their place": "step.jit step.value_and_grad",
}
TYPED = {
    "RestoreOptions": "checkpoint.Manager.restore checkpoint.Manager.restore_latest checkpoint.start",
    "ChoiceFields": "model.generate model.stream",
}


def any_names() -> dict[str, str]:
    """{function or method of a public name: the annotation of its **names}."""
    found, seen = {}, set()
    for package in PACKAGES:
        for name in public(package):
            if id(thing := getattr(importlib.import_module(package), name)) in seen:
                continue
            seen.add(id(thing))
            inner = [(f".{n}", x) for n, x in vars(thing).items() if n[0] != "_"] if isinstance(thing, type) else []
            made = [(".__init__", vars(thing).get("__init__"))] if isinstance(thing, type) else [("", thing)]
            for of, function in (*inner, *made):
                function = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
                if isinstance(function, types.FunctionType):
                    kinds = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
                    found |= {f"{package.removeprefix('fmegatron.')}.{name}{of}": str(p.annotation) for p in kinds}
    return found


def test_functions_that_take_any_names_are_known():
    found, data = any_names(), {name for names in NAMES_THAT_ARE_DATA.values() for name in names.split()}
    typed = {name: f"Unpack[{kind}]" for kind, names in TYPED.items() for name in names.split()}
    assert {name: kind for name, kind in found.items() if name not in data} == typed
    assert data <= set(found), sorted(data - set(found))


def test_the_page_of_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/names.md").read_text(encoding="utf-8")
    names = {"__name__": "names"}
    for block in BLOCK.finditer(text):
        lines = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(lines + block[1], "docs/names.md", "exec"), names)


@pytest.mark.parametrize("package", sorted({f"fmegatron.{room}" for room, *_ in (*INTERNAL, *REPLACED)}))
def test_names_of_before_say_where_they_are(package):
    room, front = package.removeprefix("fmegatron."), importlib.import_module(package)
    told = (ROOT / "docs/changes.md").read_text(encoding="utf-8")
    for _, module, names in (row for row in INTERNAL if row[0] == room):
        assert f"| `{room}` | `fmegatron.{module}` | {', '.join(f'`{name}`' for name in names.split())} |" in told
        target = importlib.import_module(f"fmegatron.{module}")
        for name in names.split():
            assert hasattr(target, name), f"{module}.{name}"
            with pytest.raises(AttributeError, match=rf"has no attribute '{name}'.*fmegatron\.{module} import {name}"):
                getattr(front, name)
    for _, name, place in (row for row in REPLACED if row[0] == room):
        with pytest.raises(AttributeError, match=re.escape(place)):
            getattr(front, name)
        assert re.search(rf"\b{name}\b", told), f"docs/changes.md does not say what stands for {room}.{name}"


def test_an_import_says_so_too():
    """`from room import name` drops the text of an AttributeError: a name of before is an ImportError there, which has
    it; elsewhere nothing changes."""
    with pytest.raises(
        ImportError, match="cannot import name 'Jitted' from 'fmegatron.step'.*step.jitted import Jitted"
    ):
        from fmegatron.step import Jitted  # noqa: F401
    with pytest.raises(ImportError, match=r"'balance_loss' from 'fmegatron.nn'; in its place stands .*expert_probs"):
        exec("from fmegatron.nn import balance_loss, dropout", {})
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from fmegatron.step import nonsense  # noqa: F401
    step = importlib.import_module("fmegatron.step")
    assert not hasattr(step, "Jitted") and getattr(step, "Jitted", None) is None


def test_a_name_that_never_was():
    with pytest.raises(AttributeError, match=r"^module 'fmegatron.step' has no attribute 'nonsense'$"):
        importlib.import_module("fmegatron.step").nonsense  # noqa: B018


def test_rooms_take_modules_past_a_front():
    """What another room needs is imported from its file: as a module, by which a reader sees whose it is."""
    taken = set()
    for path in sources("fmegatron"):
        room = path.parts[1].removesuffix(".py")
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fmegatron."):
                parts = node.module.split(".")
                for alias in node.names if parts[1] != room and len(parts) > 2 else ():
                    taken.add((room, f"{node.module}.{alias.name}"))
    assert len(taken) <= 90
