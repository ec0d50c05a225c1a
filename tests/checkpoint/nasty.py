"""Mutations of a manifest's JSON by somebody who knows the format: for tests/checkpoint/test_malice.py."""

import copy
import json

INTEGERS = (-1, 0, 1, 2, 3, 7, 2**31, 2**53, 2**62 - 1, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400)
NAMES = (
    *("", ".", "..", "/", "../a", "a/../../b", "/etc/passwd", "arrays/../../etc", "arrays//w", "arrays/.", "arrays/w/"),
    *("arrays\\w", "C:\\w", "a\0b", "\ud800", "é", "e\u0301", "\u202egnp", "ﬁ", "arrays/w ", "ARRAYS/W", "A" * 5000),
    *("/proc/self/mem", "/dev/zero", "file:///etc/passwd", "~", "$HOME", "%2E%2E/%2E%2E", "zarr.json", "COMPLETE"),
)
DTYPES = (
    *("float32", "int64", "bool", "float8_e5m2", "qint8", "quint4x2", "complex32", "bits8", "uint1", "__class__"),
    *("os.system", "float32\0", "Tensor", "dtype", "float4_e2m1fn_x2", "strided", "complex128"),
)
MISSING = object()


def deep(n):
    """Lists in lists."""
    value = []
    for _ in range(n):
        value = [value]
    return value


def other_values(rng, old):
    """A value to put in the place of `old`: near it, of another type, or unreasonable."""
    kinds = [
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice(NAMES + DTYPES),
        lambda: rng.choice((None, True, False, 0.5, 1e308, -0.0, float("nan"), float("inf"), MISSING)),
        lambda: rng.choice(([], {}, [[]], [{}], {"a": {}}, [0] * 70, [1] * 3000, deep(50), deep(300), ["w"] * 3)),
    ]
    if type(old) is int:
        kinds += [lambda: old + rng.choice((-64, -1, 1, 64)), lambda: old * 2, lambda: -old] * 2
    if type(old) is str:
        kinds += [lambda: old + rng.choice(("x", "/", "/..", "\0", "0")), lambda: old.upper(), lambda: old[:-1]]
    if type(old) is list:
        kinds += [lambda: old[::-1], lambda: old[1:], lambda: old * 2, lambda: [*old, 1], lambda: [*old, old]] * 2
    if type(old) is dict:
        kinds += [lambda: {**old, rng.choice(NAMES): 1}, lambda: dict(list(old.items())[1:])]
    return rng.choice(kinds)()


def nodes(value, found=None):
    """(container, key) of every value in a JSON value."""
    found = [] if found is None else found
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            nodes(value[key], found)
    return found


def mutated(rng, value):
    """The text of a manifest with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = nodes(value)
        row, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.6:
            new = other_values(rng, row[key])
            if new is MISSING:
                del row[key]
            else:
                row[key] = new
        elif kind < 0.75:  # something else from the same file: types fit, meaning does not
            from_row, from_key = rng.choice(places)
            row[key] = copy.deepcopy(from_row[from_key])
        elif kind < 0.9 and isinstance(row, dict):  # another name for it
            row[rng.choice((*NAMES, *row))] = row.pop(key)
        elif isinstance(row, dict):  # it and a copy
            row[rng.choice(NAMES)] = copy.deepcopy(row[key])
        elif isinstance(row, list):
            row.insert(key, copy.deepcopy(row[key]))
    text = json.dumps(value)
    if rng.random() < 0.05:
        text = broken(rng, text)
    return text.encode()


def broken(rng, text):
    """Text that is not quite JSON, or says a thing twice."""
    at = rng.randrange(len(text))
    return rng.choice(
        (
            text[:at],
            text[:at] + rng.choice('{}[],:"\\\0') + text[at + 1 :],
            text.replace('"leaves":', '"leaves": {}, "leaves":', 1),
            text.replace('"shape":', '"shape": [1], "shape":', 1),
            text + rng.choice(("}", " {}", "\0", " " * 5000)),
            "\ufeff" + text,
        )
    )
