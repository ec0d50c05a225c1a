"""Run a notebook's cells in this process, without a kernel, and say what each prints and shows as text."""

import ast
import contextlib
import io
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def committed(name: str) -> list[tuple[str, str]]:
    """(source, text of the outputs) of every code cell of notebooks/NAME."""
    cells = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
    return [("".join(c["source"]), _text(c["outputs"])) for c in cells if c["cell_type"] == "code"]


def _text(outputs: list[dict]) -> str:
    found = []
    for output in outputs:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        found.append("".join(text).rstrip("\n"))
    return "\n".join(found)


def rerun(sources: list[str]) -> list[str]:
    """What the cells print, and the repr of a last expression, when they run one after the other."""
    names: dict = {"__name__": "__main__"}
    results = []
    for source in sources:
        body = ast.parse(source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
        shown = [] if value is None else [repr(value)]
        results.append("\n".join([text for text in [printed.getvalue().rstrip("\n")] if text] + shown))
    return results
