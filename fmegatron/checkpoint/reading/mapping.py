"""Rules that map the stored tree to the requested one: rename, copy, drop, take; more are in rules.py.

    rules = [rename(r"model\\.(.*)", r"params/\\1"), take(r"params/blocks/.*", range(8)), fresh(r"params/head/.*")]
    restore(path, layouts, rules=rules, initial=state, ...)

Rules are applied in order to all stored leaves, each to what the one before left; from stored names to wanted names.
Patterns are regular expressions that a full path must match (pattern.py); with groups one rule serves parameters,
moments and master weights. Rules move no data: they make views (view.py), of which a restore reads the bands that it
needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fmegatron.checkpoint.reading import view as views_of
from fmegatron.checkpoint.reading.pattern import checked, expand, regex
from fmegatron.checkpoint.reading.view import Fill, View

Views = dict[str, View]
_SHOWN = 200  # characters of a rule's arguments in an error


@dataclass(frozen=True)
class Rule:
    """One step from the stored tree to the wanted tree: a plain value, made by the functions of this file."""

    step: Callable[..., Views]
    arguments: tuple

    def __call__(self, views: Views) -> Views:
        return self.step(views, *self.arguments)

    def __repr__(self) -> str:
        arguments = ", ".join(map(repr, self.arguments))
        if len(arguments) > _SHOWN:  # the table of a family would hide the error that names the rule
            arguments = arguments[:_SHOWN] + "…"
        return f"{self.step.__name__.removeprefix('_')}({arguments})"


# ---- the rules


def rename(pattern: str, replacement: str) -> Rule:
    """Another path: `rename(r"model/(.*)", r"params/\\1")`, `rename(r"h/{i}/(.*)", r"layers/{i+4}/\\1")`."""
    return Rule(_rename, (checked(pattern), replacement))


def copy(pattern: str, replacement: str) -> Rule:
    """One more path for the same stored elements, which need not be asked for: master weights from parameters.

    `copy(r"params/(.*)", r"opt/master/\\1")` with cast=True makes fp32 masters of bf16 parameters.
    """
    return Rule(_copy, (checked(pattern), replacement))


def drop(pattern: str) -> Rule:
    """Stored leaves that are left out on purpose, so that no strictness complains."""
    return Rule(_drop, (checked(pattern),))


def fresh(pattern: str) -> Rule:
    """Wanted leaves that come from `initial`, whatever is stored: `fresh("params/head/.*")` for another task."""
    return Rule(_fresh, (checked(pattern),))


def take(pattern: str, indices: Iterable[int | None], dim: int = 0) -> Rule:
    """Other indices along a dim: fewer layers (`range(8)`), more (`[0, 0, 1, 1]`, `[0, 1, None, None]`), another order.

    None: comes from `initial`.
    """
    return Rule(_take, (checked(pattern), tuple(indices), dim))


def per_rank(pattern: str, how: str) -> Rule:
    """Dim 0 counts ranks (see rank_state.py) and their number may change. how: "first": all get what the first rank
    saved; "wrap": rank i gets what rank i modulo the stored number saved. Without a rule the numbers must agree.
    """
    if how not in ("first", "wrap"):
        raise ValueError(f"per_rank({pattern!r}): got {how!r}, wanted 'first' or 'wrap'; leave the rule out for 'same'")
    return Rule(fit, (checked(pattern), 0, how))


# ---- what restore asks for


def apply_rules(rules: Sequence[Rule], stored: dict[str, tuple[int, ...]]) -> Views:
    """The views, by wanted path, that the rules make of stored leaves (path -> global shape).

    Raises ValueError, naming rule and leaf, when a rule does not fit.
    """
    views = {name: views_of.whole(name, shape) for name, shape in stored.items()}
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(f"rules: got {rule!r:.80}, wanted rules such as rename(...) of fmegatron.checkpoint")
        try:
            views = rule(views)
        except ValueError as error:
            raise ValueError(f"{rule!r}: {error}") from None
    return views


def is_fresh(rules: Sequence[Rule], path: str) -> bool:
    """Whether a rule states that a wanted path comes from `initial`."""
    return any(rule.step is _fresh and regex(rule.arguments[0]).fullmatch(path) for rule in rules)


# ---- steps: views -> views


def _rename(views: Views, pattern: str, replacement: str) -> Views:
    return each(views, pattern, lambda name, match, view: [(expand(match, replacement), view)])


def _copy(views: Views, pattern: str, replacement: str) -> Views:
    def both(name, match, view):
        return [(name, view), (expand(match, replacement), replace(view, spare=True))]

    return each(views, pattern, both)


def _drop(views: Views, pattern: str) -> Views:
    return each(views, pattern, lambda name, match, view: [])


def _fresh(views: Views, pattern: str) -> Views:
    return _drop(views, pattern)


def fit(views: Views, pattern: str, dim: int, how: str) -> Views:
    """The dim may have another size than is stored; `how`: as `fitted` of view.py has it."""

    def mark(name, match, view):
        return [(name, replace(view, fits=(*view.fits, (_dim(view, dim), how))))]

    return each(views, pattern, mark)


def _take(views: Views, pattern: str, indices: tuple[int | None, ...], dim: int) -> Views:
    def chosen(name, match, view):
        d = cut_dim(view, dim)
        n, runs = view.shape[d], [views_of.cut(view, d, 0, 0)]
        if wrong := [i for i in indices if i is not None and not 0 <= i < n]:
            raise ValueError(f"got index {wrong[0]}, wanted 0 to {n - 1} (dim {d} of shape {view.shape}), or None")
        at = 0
        while at < len(indices):
            first, stop = indices[at], at + 1
            while stop < len(indices) and indices[stop] == (None if first is None else first + stop - at):
                stop += 1
            if first is None:
                runs.append(views_of.filled((*view.shape[:d], stop - at, *view.shape[d + 1 :]), Fill.FRESH))
            else:
                runs.append(views_of.cut(view, d, first, first + stop - at))
            at = stop
        return [(name, views_of.joined(runs, d))]

    return each(views, pattern, chosen)


# ---- patterns and names


def each(views: Views, pattern: str, make: Callable) -> Views:
    """Every leaf whose path matches is replaced by what `make(name, match, view)` gives: pairs of path and view."""
    whole_path, out = regex(pattern), {}
    found = {name: whole_path.fullmatch(name) for name in views}
    for name, view in views.items():
        if found[name] is None:
            add(out, name, view)
    for name, view in views.items():
        if found[name] is not None:
            try:
                made = list(make(name, found[name], view))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            for new, made_view in made:
                add(out, new, made_view)
    return out


def add(out: Views, name: str, view: View) -> None:
    """Enter a view under a path. Raises ValueError when there is one."""
    if name in out:
        both = " and ".join(", ".join(sorted(v.sources)[:3]) for v in (out[name], view))
        raise ValueError(
            f"{name}: got two leaves of this path (from {both}), wanted one; rename or drop the other first"
        )
    out[name] = view


def _dim(view: View, dim: int) -> int:
    n = len(view.shape)
    if not -n <= dim < n:
        raise ValueError(f"got dim {dim}, wanted a dim of an array of shape {view.shape}")
    return dim % n


def cut_dim(view: View, dim: int) -> int:
    """A dim that is about to be cut or joined, which cannot adapt its size any more."""
    d = _dim(view, dim)
    if any(d == marked for marked, _ in view.fits):
        raise ValueError(
            f"got dim {d}, which adapts its size by an earlier rule, wanted it later; put pad or per_rank last"
        )
    return d
