"""The collective checker: every sum over ranks is made exactly once, over the right axes, forward and backward."""

from fmegatron.step.check.context import Finding, Report, Unproven
from fmegatron.step.check.entrypoints import Declared, check, check_call, check_traced, declared_by

__all__ = ["Declared", "Finding", "Report", "Unproven", "check", "check_call", "check_traced", "declared_by"]
