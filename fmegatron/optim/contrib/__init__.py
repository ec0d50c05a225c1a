"""Optimizers, rules and formats that none of our own runs uses: SOAP, Adafactor, muP, state in 8 or 16 bits.

What is admitted here has a paper or a peer that it is compared with by a test, works on every mesh and under every
strategy as the table of `tests/optim` has it, and is imported by nothing outside; it moves up to `optim` when an
experiment of this project trains with it.
"""

from fmegatron.optim.contrib.adafactor import adafactor, scale_by_factored_rms
from fmegatron.optim.contrib.blockwise import float8, float16, int8
from fmegatron.optim.contrib.compressed import compressed
from fmegatron.optim.contrib.formats import Bfloat16, Float32, NoMaster, Remainder
from fmegatron.optim.contrib.mup import mup_init, mup_multipliers
from fmegatron.optim.contrib.soap import scale_by_soap, soap

__all__ = [
    "Bfloat16",
    "Float32",
    "NoMaster",
    "Remainder",
    "adafactor",
    "compressed",
    "float16",
    "float8",
    "int8",
    "mup_init",
    "mup_multipliers",
    "scale_by_factored_rms",
    "scale_by_soap",
    "soap",
]
