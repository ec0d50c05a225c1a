"""Types: the package says that it has them, and no public signature says `Any` where it could say more."""

import ast
import importlib
import inspect
import tomllib

from tests.house import ROOT, none, rooms

# Rooms whose public signatures still have a bare Any.
REST = {"checkpoint", "collectives", "interop", "step", "testing"}
# What takes anything, with the reason.
ANYTHING = {
    "tree.in_words": "what an error is about can be anything",
    "model.llama": "its fields go on to Attention and Decoder, which name their types",
    "loop.Settings.begin": "its options go on to restore_latest, which names their types",
}


def bare(function: ast.FunctionDef) -> list[str]:
    """Parameters (and "return") of a function that are annotated with `Any` alone."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    named = {a.arg: a.annotation for a in every if a is not None} | {"return": function.returns}
    return [name for name, node in named.items() if isinstance(node, ast.Name) and node.id == "Any"]


def public(room: str):
    """(name, syntax) of every function that a room exports, and of every public method of its classes."""
    for name in (package := importlib.import_module(f"fmegatron.{room}")).__all__:
        thing = getattr(package, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        node = ast.parse(inspect.getsource(thing)).body[0]
        if isinstance(node, ast.FunctionDef):
            yield f"{room}.{name}", node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (method.name[0] != "_" or method.name[:2] == "__"):
                    yield f"{room}.{name}.{method.name}", method


def test_no_bare_any_in_public_signatures():
    none(
        f"{name}: {', '.join(found)}: Any; name a type, such as tree.Tree"
        for room in sorted(set(rooms()) - REST)
        for name, node in public(room)
        if name not in ANYTHING and (found := bare(node))
    )


def test_the_package_is_typed():
    assert (ROOT / "fmegatron" / "py.typed").exists()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["setuptools"]["package-data"]["fmegatron"] == ["py.typed"]
    excluded = {path.removeprefix("fmegatron/") for path in settings["basedpyright"]["exclude"]}
    assert excluded <= set(rooms())
