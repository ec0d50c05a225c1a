"""Experiments as modules: the file of an experiment, loaded by its path, for programs that look at its step."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_experiment(path: str) -> ModuleType:
    """The module of an experiment's file.

    It has a dataclass `Config` with a field `mesh`, and `describe(config) -> (train_step, state_specs, batch_layouts)`:
    the step over symbolic axes (`Axes(config.mesh)`), and trees of Layouts or ArraySpecs.
    Raises ValueError for a file that has not, and what its import raises.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"load_experiment: got {path!r}, wanted a Python file; give the path of an experiment")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    missing = [name for name in ("Config", "describe") if not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"load_experiment: got a file that defines no {' and no '.join(missing)}, wanted a Config with a mesh, and "
            "describe(config) -> (train_step, state_specs, batch_layouts); see experiments/shakespeare.py"
        )
    return module
