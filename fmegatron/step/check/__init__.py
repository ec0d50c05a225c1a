"""The collective checker: every sum over ranks is made exactly once, over the right axes, forward and backward."""

from fmegatron.step.check.context import Finding, Report, Unproven
from fmegatron.step.check.entrypoints import ANYHOW, check, check_call, check_traced

__all__ = ["ANYHOW", "Finding", "Report", "Unproven", "check", "check_call", "check_traced"]
