"""Optimizers, rules and formats that none of our own runs uses: SOAP, Adafactor, muP, state in 8 or 16 bits.

What is admitted here has a paper or a peer that it is compared with by a test, works on every mesh and under every
strategy as the table of `tests/optim` has it, and is imported by nothing outside; it moves up to `optim` when an
experiment of this project trains with it.
"""

from fmegatron.moved import no_name as _no_name
from fmegatron.optim.contrib.blockwise import float8, int8
from fmegatron.optim.contrib.compression import compressed
from fmegatron.optim.contrib.factored import adafactor
from fmegatron.optim.contrib.mup import mup_init, mup_multipliers
from fmegatron.optim.contrib.rotated_adam import soap

__all__ = [
    "adafactor",
    "compressed",
    "float8",
    "int8",
    "mup_init",
    "mup_multipliers",
    "soap",
]

globals()["__getattr__"] = _no_name(__name__)
