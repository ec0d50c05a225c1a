"""Rules that map the stored tree to the requested one: rename, split, fuse, transpose, stack, pad.

    rules = [
        rename(r"model\\.(.*)", r"params/\\1"),
        transpose(r"params/.*/w\\w", (1, 0)),
        fuse([r"(.*)/wq", r"(.*)/wk", r"(.*)/wv"], r"\\1/wqkv", dim=1),
        stack(r"params/layers/{i}/(.*)", r"params/blocks/\\1"),
        pad(r"params/embed/table", dim=0),
    ]
    restore(path, layouts, rules=rules, ...)

Rules are applied in order to all stored leaves, each to what the one before left; from stored names to wanted names.
Patterns are regular expressions that a whole path must match (pattern.py); with groups one rule serves parameters,
moments and master weights alike. Rules move no data: they make views (view.py), of which a restore reads the bands that
it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fmegatron.checkpoint.reading import view as views_of
from fmegatron.checkpoint.reading.pattern import checked, expand, number, numbers, only_number, regex
from fmegatron.checkpoint.reading.view import Fill, View

Views = dict[str, View]


@dataclass(frozen=True)
class Rule:
    """One step from the stored tree to the wanted tree: a plain value, made by the functions of this file."""

    step: Callable[..., Views]
    arguments: tuple

    def __call__(self, views: Views) -> Views:
        return self.step(views, *self.arguments)

    def __repr__(self) -> str:
        return f"{self.step.__name__.removeprefix('_')}({', '.join(map(repr, self.arguments))})"


# ---- the rules


def rename(pattern: str, replacement: str) -> Rule:
    """Another path: `rename(r"model/(.*)", r"params/\\1")`, `rename(r"h/{i}/(.*)", r"layers/{i+4}/\\1")`."""
    return Rule(_rename, (checked(pattern), replacement))


def copy(pattern: str, replacement: str) -> Rule:
    """One more path for the same stored elements, which nobody has to ask for: master weights from parameters.

    `copy(r"params/(.*)", r"opt/master/\\1")` with cast=True makes fp32 masters of bf16 parameters.
    """
    return Rule(_copy, (checked(pattern), replacement))


def drop(pattern: str) -> Rule:
    """Stored leaves that are left out on purpose, so that no strictness complains."""
    return Rule(_drop, (checked(pattern),))


def fresh(pattern: str) -> Rule:
    """Wanted leaves that come from `initial`, whatever is stored: `fresh("params/head/.*")` for another task."""
    return Rule(_fresh, (checked(pattern),))


def transpose(pattern: str, dims: Sequence[int]) -> Rule:
    """Dim i of the result is stored dim dims[i], as in torch.permute."""
    return Rule(_transpose, (checked(pattern), tuple(dims)))


def split(pattern: str, replacements: Sequence[str], dim: int, sizes: Sequence[int] | None = None) -> Rule:
    """One stored leaf becomes several, cut along a dim.

    sizes: of the parts, in order; equal parts when None. When they are dealt again and again along the dim (q, k and v
    of every group of heads), give the sizes of one deal: the parts of all deals are joined.
    """
    return Rule(_split, (checked(pattern), tuple(replacements), dim, None if sizes is None else tuple(sizes)))


def fuse(patterns: Sequence[str], replacement: str, dim: int, sizes: Sequence[int] | None = None) -> Rule:
    """Several stored leaves become one, joined along a dim in the order of the patterns: the inverse of `split`.

    The leaves whose replacement is the same go together, one of each pattern. sizes: of one deal, as for `split`.
    """
    patterns = tuple(checked(p) for p in patterns)
    return Rule(_fuse, (patterns, replacement, dim, None if sizes is None else tuple(sizes)))


def stack(pattern: str, replacement: str, dim: int = 0) -> Rule:
    """Leaves that differ in a number become one with a new dim: `stack(r"layers/{i}/(.*)", r"blocks/\\1")`.

    The number is the `{name}` that the replacement does not have; it counts up without a gap, from any number.
    """
    return Rule(_stack, (checked(pattern), replacement, dim))


def unstack(pattern: str, replacement: str, dim: int = 0) -> Rule:
    """One leaf becomes one for each index of a dim, which goes: `unstack(r"blocks/(.*)", r"layers/{i}/\\1")`.

    The index is the `{name}` that the pattern does not have; `{i+4}` counts from 4.
    """
    return Rule(_unstack, (checked(pattern), replacement, dim))


def take(pattern: str, indices: Iterable[int | None], dim: int = 0) -> Rule:
    """Other indices along a dim: fewer layers (`range(8)`), more (`[0, 0, 1, 1]`, `[0, 1, None, None]`), another order.

    None: comes from `initial`.
    """
    return Rule(_take, (checked(pattern), tuple(indices), dim))


def pad(pattern: str, dim: int = 0) -> Rule:
    """The dim may have another size than is stored: it grows with zeros and shrinks by leaving the end out.

    For a vocabulary that is padded; without this rule another shape is an error.
    """
    return Rule(_fit, (checked(pattern), dim, "pad"))


def per_rank(pattern: str, how: str) -> Rule:
    """Dim 0 counts ranks (see rank_state.py) and their number may change. how: "first": all get what the first rank
    saved; "wrap": rank i gets what rank i modulo the stored number saved. Without a rule the numbers must agree.
    """
    if how not in ("first", "wrap"):
        raise ValueError(f"per_rank({pattern!r}): got {how!r}, wanted 'first' or 'wrap'; leave the rule out for 'same'")
    return Rule(_fit, (checked(pattern), 0, how))


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
    """Whether a rule says that a wanted path comes from `initial`."""
    return any(rule.step is _fresh and regex(rule.arguments[0]).fullmatch(path) for rule in rules)


# ---- steps: views -> views


def _rename(views: Views, pattern: str, replacement: str) -> Views:
    return _each(views, pattern, lambda name, match, view: [(expand(match, replacement), view)])


def _copy(views: Views, pattern: str, replacement: str) -> Views:
    def both(name, match, view):
        return [(name, view), (expand(match, replacement), replace(view, spare=True))]

    return _each(views, pattern, both)


def _drop(views: Views, pattern: str) -> Views:
    return _each(views, pattern, lambda name, match, view: [])


def _fresh(views: Views, pattern: str) -> Views:
    return _drop(views, pattern)


def _transpose(views: Views, pattern: str, dims: tuple[int, ...]) -> Views:
    return _each(views, pattern, lambda name, match, view: [(name, views_of.transposed(view, dims))])


def _fit(views: Views, pattern: str, dim: int, how: str) -> Views:
    def mark(name, match, view):
        return [(name, replace(view, fits=(*view.fits, (_dim(view, dim), how))))]

    return _each(views, pattern, mark)


def _split(views: Views, pattern: str, replacements: tuple[str, ...], dim: int, sizes: tuple | None) -> Views:
    def parts(name, match, view):
        d = _cut_dim(view, dim)
        n, count = view.shape[d], len(replacements)
        deal = sizes if sizes is not None else (n // count,) * count
        if len(deal) != count or not sum(deal) or n % sum(deal):
            raise ValueError(f"got dim {d} of size {n}, wanted a whole number of deals of {count} parts, {deal}")
        for i, replacement in enumerate(replacements):
            first = sum(deal[:i])
            cuts = [views_of.cut(view, d, at, at + deal[i]) for at in range(first, n, sum(deal))]
            yield expand(match, replacement), views_of.joined(cuts, d)

    return _each(views, pattern, parts)


def _fuse(views: Views, patterns: tuple[str, ...], replacement: str, dim: int, sizes: tuple | None) -> Views:
    groups: dict[str, dict[int, str]] = {}
    for name in views:
        for i, pattern in enumerate(patterns):
            if match := regex(pattern).fullmatch(name):
                group = groups.setdefault(expand(match, replacement), {})
                if i in group:
                    raise ValueError(f"{group[i]} and {name} both are part {i} of {expand(match, replacement)}")
                group[i] = name
                break
    out = {name: view for name, view in views.items() if not any(name in g.values() for g in groups.values())}
    for new, group in groups.items():
        if absent := [patterns[i] for i in range(len(patterns)) if i not in group]:
            raise ValueError(f"{new}: got {', '.join(group.values())}, but no leaf for {absent[0]!r}; store all parts")
        members = [views[group[i]] for i in range(len(patterns))]
        d = _cut_dim(members[0], dim)
        deal = sizes or tuple(m.shape[d] for m in members)
        deals = {divmod(m.shape[d], max(size, 1)) for m, size in zip(members, deal, strict=True)}
        if len(deals) != 1 or min(deals)[1]:
            found = [m.shape[d] for m in members]
            raise ValueError(f"{new}: got parts of sizes {found} along dim {d}, wanted as many deals {deal} of each")
        cuts = [
            views_of.cut(m, _cut_dim(m, dim), turn * size, (turn + 1) * size)
            for turn in range(min(deals)[0])
            for m, size in zip(members, deal, strict=True)
        ]
        _add(out, new, views_of.joined(cuts, d))
    return out


def _stack(views: Views, pattern: str, replacement: str, dim: int) -> Views:
    which = only_number(numbers(pattern) - numbers(replacement), pattern, replacement)
    out: Views = {}
    groups: dict[str, dict[int, str]] = {}
    for name, view in views.items():
        if match := regex(pattern).fullmatch(name):
            group, i = groups.setdefault(expand(match, replacement), {}), number(match, which)
            if i in group:
                raise ValueError(f"{group[i]} and {name} have one number")
            group[i] = name
        else:
            out[name] = view
    for new, group in groups.items():
        order = sorted(group)
        if gaps := [i for i in range(order[0], order[-1]) if i not in group]:
            raise ValueError(f"{new}: got numbers {order[0]} to {order[-1]} without {gaps[0]}; wanted no gap")
        d = dim if dim >= 0 else dim + len(views[group[order[0]]].shape) + 1
        try:
            _add(out, new, views_of.joined([views_of.inserted(views[group[i]], d) for i in order], d))
        except ValueError as error:
            raise ValueError(f"{new}: {error}") from None
    return out


def _unstack(views: Views, pattern: str, replacement: str, dim: int) -> Views:
    which = only_number(numbers(replacement) - numbers(pattern), pattern, replacement)

    def slices(name, match, view):
        d = _cut_dim(view, dim)
        for i in range(view.shape[d]):
            new = expand(match, replacement, {which: i})
            yield new, views_of.removed(views_of.cut(view, d, i, i + 1), d)

    return _each(views, pattern, slices)


def _take(views: Views, pattern: str, indices: tuple[int | None, ...], dim: int) -> Views:
    def chosen(name, match, view):
        d = _cut_dim(view, dim)
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

    return _each(views, pattern, chosen)


# ---- patterns and names


def _each(views: Views, pattern: str, make: Callable) -> Views:
    """Every leaf whose path matches is replaced by what `make(name, match, view)` gives: pairs of path and view."""
    whole_path, out = regex(pattern), {}
    found = {name: whole_path.fullmatch(name) for name in views}
    for name, view in views.items():
        if found[name] is None:
            _add(out, name, view)
    for name, view in views.items():
        if found[name] is not None:
            try:
                made = list(make(name, found[name], view))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            for new, made_view in made:
                _add(out, new, made_view)
    return out


def _add(out: Views, name: str, view: View) -> None:
    if name in out:
        both = " and ".join(", ".join(sorted(v.sources)[:3]) for v in (out[name], view))
        raise ValueError(f"two leaves would have the path {name} (from {both}); rename or drop one of them first")
    out[name] = view


def _dim(view: View, dim: int) -> int:
    n = len(view.shape)
    if not -n <= dim < n:
        raise ValueError(f"got dim {dim}, wanted a dim of an array of shape {view.shape}")
    return dim % n


def _cut_dim(view: View, dim: int) -> int:
    """A dim that is about to be cut or joined, which cannot adapt its size any more."""
    d = _dim(view, dim)
    if any(d == marked for marked, _ in view.fits):
        raise ValueError(f"dim {d} adapts its size by an earlier rule; put pad or per_rank after this one")
    return d
