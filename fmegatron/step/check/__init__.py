"""The collective checker: every sum over ranks is made exactly once, over the right axes, forward and backward."""

from fmegatron.step.check.declared import Declared, check_call, declared_by
from fmegatron.step.check.findings import Finding, Report, Unproven
from fmegatron.step.check.walk import check, check_traced

__all__ = ["Declared", "Finding", "Report", "Unproven", "check", "check_call", "check_traced", "declared_by"]
