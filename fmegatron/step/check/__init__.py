"""Check a traced step: are all sums over ranks made exactly once, over the right axes, for forward and backward?"""

from fmegatron.step.check.findings import Finding, Report
from fmegatron.step.check.walk import check, check_traced

__all__ = ["Finding", "Report", "check", "check_traced"]
