"""Rules that change layouts of weights: transpose, split, fuse, stack, unstack and pad leaves during a restore.

    rules = [
        rename(r"model\\.(.*)", r"params/\\1"),
        transpose(r"params/.*/w\\w", (1, 0)),
        fuse([r"(.*)/wq", r"(.*)/wk", r"(.*)/wv"], r"\\1/wqkv", dim=1),
        stack(r"params/layers/{i}/(.*)", r"params/blocks/\\1"),
        pad(r"params/embed/table", dim=0),
    ]
    restore(path, layouts, rules=rules, ...)

They go into one list with those of mapping.py (rename, drop, take, ...) and are applied in order.
Patterns are regular expressions that a full path must match.
"""

from __future__ import annotations

from collections.abc import Sequence

from fmegatron.checkpoint.reading import view as views_of
from fmegatron.checkpoint.reading.mapping import Rule, Views, add, cut_dim, each, fit
from fmegatron.checkpoint.reading.pattern import checked, expand, number, numbers, only_number, regex


def transpose(pattern: str, dims: Sequence[int]) -> Rule:
    """Dim i of the result is stored dim dims[i], as in torch.permute."""
    return Rule(_transpose, (checked(pattern), tuple(dims)))


def split(pattern: str, replacements: Sequence[str], dim: int, sizes: Sequence[int] | None = None) -> Rule:
    """One stored leaf becomes several, cut along a dim.

    sizes: of the parts, in order; equal parts when None. When they are interleaved along the dim (q, k and v of every
    group of heads), give the sizes of one group: the parts of all groups are joined.
    """
    return Rule(_split, (checked(pattern), tuple(replacements), dim, None if sizes is None else tuple(sizes)))


def fuse(patterns: Sequence[str], replacement: str, dim: int, sizes: Sequence[int] | None = None) -> Rule:
    """Several stored leaves become one, joined along a dim in the order of the patterns: the inverse of `split`.

    The leaves whose replacement is the same go together, one of each pattern. sizes: of one group, as for `split`.
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


def pad(pattern: str, dim: int = 0) -> Rule:
    """The dim may have another size than is stored: it grows with zeros and shrinks by leaving the end out.

    For a vocabulary that is padded; without this rule another shape is an error.
    """
    return Rule(fit, (checked(pattern), dim, "pad"))


# ---- steps: views -> views


def _transpose(views: Views, pattern: str, dims: tuple[int, ...]) -> Views:
    return each(views, pattern, lambda name, match, view: [(name, views_of.transposed(view, dims))])


def _split(views: Views, pattern: str, replacements: tuple[str, ...], dim: int, sizes: tuple | None) -> Views:
    def parts(name, match, view):
        d = cut_dim(view, dim)
        n, count = view.shape[d], len(replacements)
        deal = sizes if sizes is not None else (n // count,) * count
        if len(deal) != count or not sum(deal) or n % sum(deal):
            raise ValueError(f"got dim {d} of size {n}, wanted a multiple of groups of {count} parts, {deal}")
        for i, replacement in enumerate(replacements):
            first = sum(deal[:i])
            cuts = [views_of.cut(view, d, at, at + deal[i]) for at in range(first, n, sum(deal))]
            yield expand(match, replacement), views_of.joined(cuts, d)

    return each(views, pattern, parts)


def _fuse(views: Views, patterns: tuple[str, ...], replacement: str, dim: int, sizes: tuple | None) -> Views:
    groups: dict[str, dict[int, str]] = {}
    for name in views:
        for i, pattern in enumerate(patterns):
            if match := regex(pattern).fullmatch(name):
                group = groups.setdefault(expand(match, replacement), {})
                if i in group:
                    raise ValueError(
                        f"{expand(match, replacement)}: got {group[i]} and {name}, wanted one leaf as part {i}"
                    )
                group[i] = name
                break
    out = {name: view for name, view in views.items() if not any(name in g.values() for g in groups.values())}
    for new, group in groups.items():
        if absent := [patterns[i] for i in range(len(patterns)) if i not in group]:
            raise ValueError(f"{new}: got {', '.join(group.values())}, wanted also {absent[0]!r}; store all parts")
        members = [views[group[i]] for i in range(len(patterns))]
        d = cut_dim(members[0], dim)
        deal = sizes or tuple(m.shape[d] for m in members)
        deals = {divmod(m.shape[d], max(size, 1)) for m, size in zip(members, deal, strict=True)}
        if len(deals) != 1 or min(deals)[1]:
            found = [m.shape[d] for m in members]
            raise ValueError(f"{new}: got parts of sizes {found} along dim {d}, wanted as many groups {deal} of each")
        cuts = [
            views_of.cut(m, cut_dim(m, dim), turn * size, (turn + 1) * size)
            for turn in range(min(deals)[0])
            for m, size in zip(members, deal, strict=True)
        ]
        add(out, new, views_of.joined(cuts, d))
    return out


def _stack(views: Views, pattern: str, replacement: str, dim: int) -> Views:
    which = only_number(numbers(pattern) - numbers(replacement), pattern, replacement)
    out: Views = {}
    groups: dict[str, dict[int, str]] = {}
    for name, view in views.items():
        if match := regex(pattern).fullmatch(name):
            group, i = groups.setdefault(expand(match, replacement), {}), number(match, which)
            if i in group:
                raise ValueError(f"got {group[i]} and {name} of one number, wanted one leaf for each")
            group[i] = name
        else:
            out[name] = view
    for new, group in groups.items():
        order = sorted(group)
        if gaps := [i for i in range(order[0], order[-1]) if i not in group]:
            raise ValueError(f"{new}: got numbers {order[0]} to {order[-1]} without {gaps[0]}, wanted no gap")
        d = dim if dim >= 0 else dim + len(views[group[order[0]]].shape) + 1
        try:
            add(out, new, views_of.joined([views_of.inserted(views[group[i]], d) for i in order], d))
        except ValueError as error:
            raise ValueError(f"{new}: {error}") from None
    return out


def _unstack(views: Views, pattern: str, replacement: str, dim: int) -> Views:
    which = only_number(numbers(replacement) - numbers(pattern), pattern, replacement)

    def slices(name, match, view):
        d = cut_dim(view, dim)
        for i in range(view.shape[d]):
            new = expand(match, replacement, {which: i})
            yield new, views_of.removed(views_of.cut(view, d, i, i + 1), d)

    return each(views, pattern, slices)
