"""fmegatron: Megatron-LM, rewritten the JAX way in pure PyTorch: layouts, pure steps, visible collectives."""

import importlib.metadata

__version__ = "0.1.0"

# The oldest and the newest that the tests have run with; docs/launching.md says the same, and a test that it does.
PYTHON = ("3.11", "3.13")
TORCH = ("2.11", "2.14")


def install_command() -> str:
    """The command that installs fmegatron, of the folder it is called in, beside the torch of this machine, of which it
    touches nothing: a package that needs another torch is an error of pip and never a new torch.

    Where there is no torch, the command names the newest that was tried.
    """
    found = next((torch.version for torch in importlib.metadata.distributions(name="torch")), f"{TORCH[1]}.*")
    return f"python -m pip install . 'torch=={found}'"
