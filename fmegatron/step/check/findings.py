"""Findings, each with its source line, and outputs that no rule can prove or refute."""

from __future__ import annotations

from dataclasses import dataclass

_SHOWN = 3  # so many names of outputs are written out


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
class Unproven:
    """A line at which the rules end, and what is not proven because of it.

    at, op: as in `Finding`.  axes: over which of them.  why: what no rule can decide.  fix: how to go on.  outputs:
    paths of the result that depend on it ("0/params/w", "1/loss").
    """

    at: str
    op: str
    axes: tuple[str, ...]
    why: str
    fix: str
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.outputs[:_SHOWN])
        more = f" and {len(self.outputs) - _SHOWN} more" if len(self.outputs) > _SHOWN else ""
        axes = " and ".join(map(repr, self.axes))
        return f"{self.at}: unproven: {self.op} over {axes}: {self.why}; so {names}{more} may be wrong. {self.fix}"


@dataclass(frozen=True)
class Report:
    """findings: proofs of mistakes, in graph order.  unproven: what no rule can decide, with the outputs it concerns.
    silenced: findings and unproven lines that the caller vouches for, with the reason.
    """

    findings: tuple[Finding, ...]
    unproven: tuple[Unproven, ...] = ()
    silenced: tuple[tuple[Finding | Unproven, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all outputs are proven: nothing was found, and nothing is open."""
        return not self.findings and not self.unproven

    @property
    def unproven_outputs(self) -> tuple[str, ...]:
        """Paths of the result of which nothing is claimed, each once."""
        return tuple(dict.fromkeys(path for one in self.unproven for path in one.outputs))

    def __str__(self) -> str:
        lines = [str(f) for f in self.findings] or ["no findings"]
        lines += map(str, self.unproven)
        lines += [
            f"{f.at}: silenced ({reason}): {f.what if isinstance(f, Finding) else f.why}" for f, reason in self.silenced
        ]
        return "\n".join(lines)

    def require(self, what: str = "step") -> Report:
        """This report, or ValueError with all findings. What is unproven is no mistake: it raises nothing."""
        if self.findings:
            head = f"{what}: {len(self.findings)} finding{'s' * (len(self.findings) > 1)} of the check of collectives:"
            raise ValueError("\n  ".join([head, *map(str, self.findings)]))
        return self
