"""What a check says: findings, each with its line, and the ops that no rule covers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One mistake: where (file.py:line; of the forward for nodes of the backward), which op, over which mesh axis.

    what: what is wrong.  fix: what would be right.  born: the line from which on the value was a pending sum, or "".
    """

    at: str
    op: str
    axis: str
    what: str
    fix: str
    born: str = ""

    def __str__(self) -> str:
        since = f" (pending since {self.born})" if self.born else ""
        return f"{self.at}: {self.op} over {self.axis!r}: {self.what}{since}. Fix: {self.fix}"


@dataclass(frozen=True)
class Report:
    """findings: in graph order.  unproven: ops without a rule, with the line of their first use: nothing is claimed
    about values that come from them.  silenced: findings at lines that the caller vouches for, with the reason.
    """

    findings: tuple[Finding, ...]
    unproven: tuple[tuple[str, str], ...] = ()
    silenced: tuple[tuple[Finding, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        lines = [str(f) for f in self.findings] or ["no findings"]
        lines += [f"{at}: unproven: no rule for {op}" for op, at in self.unproven]
        lines += [f"{f.at}: silenced ({reason}): {f.what}" for f, reason in self.silenced]
        return "\n".join(lines)

    def require(self, what: str = "step") -> Report:
        """This report, or ValueError with all findings."""
        if self.findings:
            head = f"{what}: {len(self.findings)} finding{'s' * (len(self.findings) > 1)} of the check of collectives:"
            raise ValueError("\n  ".join([head, *map(str, self.findings)]))
        return self
