"""What a step takes before it is launched: memory, traffic, work and time on any mesh, without ranks or devices."""

from fmegatron.plan.exact import Exact, deep, exact, in_mib
from fmegatron.plan.quick import Quick, quick, quick_of
from fmegatron.plan.rates import measured_rates, measured_write
from fmegatron.plan.search import Found, Search, meshes_of, search
from fmegatron.plan.setting import Setting, setting_of
from fmegatron.plan.wrapper import Held

__all__ = [
    "Exact",
    "Found",
    "Held",
    "Quick",
    "Search",
    "Setting",
    "deep",
    "exact",
    "in_mib",
    "measured_rates",
    "measured_write",
    "meshes_of",
    "quick",
    "quick_of",
    "search",
    "setting_of",
]
