"""Signatures: types that say more than `Any` where they can, and few arguments."""

import ast
import importlib
import inspect
import re
import tomllib

from tests.house import ROOT, nodes, none, rooms, sources

SILENCED = re.compile(r"#\s*(?:type|pyright):\s*ignore(?P<rule>\[[\w, -]+\])?(?P<why>\s+\S+.*)?")
# What takes anything, with the reason.
ANYTHING = {
    "checkpoint.Manager.restore": "its options go on to `restore`, which names their types",
    "checkpoint.Manager.restore_latest": "its options go on to `restore`, which names their types",
    "checkpoint.start": "its options go on to `restore`, which names their types",
    **{
        f"collectives.Precision.{name}": "its changes are fields of Precision by name, which have types of their own"
        for name in ("fp32", "fp64", "bf16", "fp8_wire", "bf16_wire")
    },
    "data.chat_row": "a tokenizer of ours or of transformers, which no room imports",
    "interop.FmegatronReader.read_metadata": "torch calls it with what its releases add",
    "interop.FmegatronReader.set_up_storage_reader": "torch calls it with what its releases add",
    "interop.FmegatronWriter.set_up_storage_writer": "torch calls it with what its releases add",
    "interop.read_dcp_object": "an object of plain data, as it was stored",
    "step.timeline": "arguments of the user's step",
    "step.value_and_grad": "takes what belongs to JAX, to raise an error that names ours",
    "testing.RankPool.run": "arguments of the user's function",
    "testing.Simulation.again": "arguments of the user's step",
    "testing.assert_parity": "arguments of the user's step, and options of `parity`, which names their types",
    "testing.assert_pure": "the result of the user's function",
    "testing.parity": "arguments of the user's step",
    "testing.simulate": "arguments of the user's step",
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
        for room in sorted(rooms())
        for name, node in public(room)
        if name not in ANYTHING and (found := bare(node))
    )


def test_the_package_is_typed():
    assert (ROOT / "fmegatron" / "py.typed").exists()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["setuptools"]["package-data"]["fmegatron"] == [
        "py.typed",
        "checkpoint/FORMAT.md",
        "plan/cuda/guard.cpp",
    ]
    checked = settings["basedpyright"]
    assert checked["include"] == ["fmegatron"] and not {"exclude", "ignore", "strict"} & checked.keys()


def test_errors_of_types_are_silenced_by_rule_and_with_a_reason():
    none(
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}; name the rule and the reason: # pyright: ignore[rule]  why"
        for path in sorted((ROOT / "fmegatron").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := SILENCED.search(line)) and not (found["rule"] and found["why"])
    )


def test_few_functions_have_many_arguments():
    counts = {}
    for path in sources("fmegatron"):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                own = bool(given.args) and given.args[0].arg in ("self", "cls")
                counts[f"{path}:{node.lineno} {node.name}"] = len(every) - own
    many = {name: count for name, count in counts.items() if count > 8}
    assert max(many.values()) <= 13 and len(many) <= 20, many
