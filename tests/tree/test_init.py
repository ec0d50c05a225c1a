"""init: the same bits on every mesh, the right distribution, no two streams alike."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import optim, step, tree
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.tree.random import normal_values, pair_words, round_keys, scratch
from tests.layout.strategies import layouts, shapes

MESHES = (
    Mesh(),
    Mesh(dp=2),
    Mesh(fsdp=2, tp=2),
    Mesh(tp=4),
    Mesh(dp=2, fsdp=2, tp=2),
    Mesh(pp=3, fsdp=5),
)


def specs(mesh: Mesh):
    """A small model with every form of layout, on any mesh (axes that a mesh lacks are left out)."""

    def layout(shape, *spec, dtype=torch.float32, flat=()):
        def known(axes):
            axes = (axes,) if isinstance(axes, str) else axes
            return tuple(axis for axis in axes if axis in mesh)

        entries = [
            None if e is None else Split(known(e.names), e.parts) if isinstance(e, Split) else known(e) for e in spec
        ]
        return Layout(shape, dtype, mesh, tuple(entries), flat=known(flat))

    normal, uniform = tree.Normal(0.02), tree.Uniform(-1.0, 2.0)
    return {
        "table": tree.ArraySpec(layout((257, 48), "tp", "fsdp"), normal),
        "wqkv": tree.ArraySpec(layout((3, 48, 96), "pp", "fsdp", Split("tp", (48, 24, 24))), normal),
        "big": tree.ArraySpec(layout((3, 301, 331), "pp", ("fsdp", "tp"), "dp"), normal),
        "half": tree.ArraySpec(layout((40, 41), None, "tp", dtype=torch.bfloat16), normal),
        "zero": tree.ArraySpec(layout((63, 65), flat=("dp", "fsdp")), uniform),
        "moe": tree.ArraySpec(layout((4, 7, 5, 3), "tp", None, "fsdp"), uniform),
        "none": tree.ArraySpec(layout((0, 4), "tp"), normal),
        "scale": tree.ArraySpec(layout(()), normal),
        "ones": tree.ArraySpec(layout((9,), "fsdp", dtype=torch.int64), 1.0),
    }


def whole(specs, key):
    """The global arrays, put together from every rank's boxes; replicas must agree."""
    arrays = tree.map(lambda spec: torch.zeros(spec.shape, dtype=spec.dtype), specs)
    written = tree.map(lambda spec: torch.zeros(spec.shape, dtype=torch.bool), specs)
    mesh = tree.leaves(specs)[0].mesh
    for rank in range(mesh.size):
        local = tree.init(specs, key, rank)
        tree.check(local, specs, rank)
        for spec, array, done, x in zip(*map(tree.leaves, (specs, arrays, written, local)), strict=True):
            for box in spec.layout.boxes(rank):
                before = done[box.slices]
                assert torch.equal(array[box.slices][before], box.view(x)[before]), f"replica on rank {rank} differs"
                array[box.slices] = box.view(x)
                done[box.slices] = True
    assert all(done.all() for done in tree.leaves(written))
    return arrays


def test_bit_identical_on_six_meshes():
    reference = whole(specs(MESHES[0]), 7)
    for mesh in MESHES[1:]:
        arrays = whole(specs(mesh), 7)
        for path, a, b in zip(tree.paths(arrays), tree.leaves(reference), tree.leaves(arrays), strict=True):
            assert torch.equal(a, b), f"{path} on {mesh}"
    other = whole(specs(MESHES[0]), 8)
    assert not torch.equal(other["table"], reference["table"])


@pytest.mark.medium
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_bit_identical_on_any_layout(data):
    layout = data.draw(layouts(shape=data.draw(shapes())))
    init = data.draw(st.sampled_from([tree.Normal(1.0), tree.Uniform(0.0, 1.0)]))
    wanted = tree.init({"w": tree.ArraySpec(Layout(layout.shape, torch.float32, Mesh()), init)}, 3, 0)["w"]
    assert torch.equal(whole({"w": tree.ArraySpec(layout, init)}, 3)["w"], wanted)


def test_values_never_change():
    """A checkpointed run that is started anew, on any machine, must begin with these very bits."""
    spec = tree.ArraySpec(Layout((2, 3), torch.float32, Mesh()), tree.Normal(1.0))
    words = tree.init({"w": spec}, 0, 0)["w"].view(torch.int32).reshape(-1).tolist()
    assert words == [1049983836, -1093136823, 1033000282, -1072386532, 1057995183, 1058189886]
    spec = tree.ArraySpec(Layout((2, 3), torch.float32, Mesh()), tree.Uniform(0.0, 1.0))
    words = tree.init({"w": spec}, 0, 0)["w"].view(torch.int32).reshape(-1).tolist()
    assert words == [1063283640, 1051808230, 1032421224, 1048740200, 1060737055, 1040296644]


def test_lower_precision_is_the_rounded_float32():
    values = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        spec = tree.ArraySpec(Layout((33, 5), dtype, Mesh()), tree.Normal(0.5))
        values[dtype] = tree.init({"w": spec}, 1, 0)["w"]
    assert torch.equal(values[torch.bfloat16], values[torch.float32].to(torch.bfloat16))
    assert torch.equal(values[torch.float64], values[torch.float32].to(torch.float64))


N = 1 << 20


def draw(init, key=0, path="w"):
    return tree.init({path: tree.ArraySpec(Layout((N,), torch.float32, Mesh()), init)}, key, 0)[path].double()


def test_normal_moments_tails_and_distribution():
    x = draw(tree.Normal(2.0)) / 2
    # standard errors of the first four moments of N(0, 1) over n values: sqrt(1, 2, 15, 96 / n); five of them
    for moment, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs((x**moment).mean() - mean) < 5 * (variance / N) ** 0.5, moment
    assert 4.3 < x.abs().max() < 5.8
    # Kolmogorov-Smirnov distance, 1e-6 level: 2.7 / sqrt(n)
    cdf = torch.special.ndtr(x.sort().values)
    assert (cdf - (torch.arange(N) + 0.5) / N).abs().max() < 2.7 / N**0.5


def test_uniform_distribution():
    x = draw(tree.Uniform(-3.0, 5.0))
    assert x.min() >= -3 and x.max() < 5
    ordered = (x.sort().values + 3) / 8
    assert (ordered - (torch.arange(N) + 0.5) / N).abs().max() < 2.7 / N**0.5


@pytest.mark.parametrize("init", [tree.Normal(1.0), tree.Uniform(-(3**0.5), 3**0.5)])
def test_neighbours_leaves_and_keys_are_independent(init):
    n = 1 << 18
    x, other_leaf, other_key = (y[:n] for y in (draw(init), draw(init, path="v"), draw(init, key=1)))
    for lag in (1, 2, 3, 4, 64, 1024, 4096, 1 << 16):
        assert abs((x[:-lag] * x[lag:]).mean()) < 5 / n**0.5, lag
        assert abs((x[:-lag] ** 2 * x[lag:] ** 2).mean() - 1) < 25 / n**0.5, lag
    for y in (other_leaf, other_key):
        assert abs((x * y).mean()) < 5 / n**0.5
        # no run of one stream is found in another, shifted or not: pairs of values as 64-bit words
        pairs = [t.float().view(torch.int32).view(-1, 2).numpy().copy().view(np.int64).ravel() for t in (x, y)]
        assert np.intersect1d(*pairs).size <= 2


def test_words_do_not_repeat_and_high_counters_differ():
    space, keys = scratch(1 << 16), round_keys(5)
    low = np.arange(1 << 16, dtype=np.uint32)
    words = []
    for high in (None, np.uint32(1), np.uint32(2)):
        left, right = pair_words(keys, low, high, space)
        words.append(left.astype(np.uint64) << np.uint64(32) | right)
    words = np.concatenate(words)
    assert np.unique(words).size == words.size
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).mean(0)
    assert abs(bits - 0.5).max() < 5 * 0.5 / words.size**0.5


def test_every_bit_of_the_counter_and_of_the_key_changes_half_of_the_word():
    space = scratch(1 << 14)
    low = np.arange(1 << 14, dtype=np.uint32) * np.uint32(2654435761)

    def word(keys, counters):
        left, right = pair_words(keys, counters, None, space)
        return left.astype(np.uint64) << np.uint64(32) | right

    keys = round_keys(1)
    base = word(keys, low)
    for bit in range(32):
        flip = np.uint32(1 << bit)
        changed = [
            word(keys, low ^ flip),
            word((keys[0] ^ flip, *keys[1:]), low),
            word((keys[0], keys[1] ^ flip, keys[2]), low),
        ]
        for other in changed:
            share = np.unpackbits((base ^ other).view(np.uint8)).reshape(-1, 64).mean(0)
            assert abs(share - 0.5).max() < 0.06, bit


@pytest.mark.slow
def test_logarithm_and_angle_are_right_for_every_word():
    """All 2**24 radii: never below 0, error of the squared radius within 1e-6; all directions are on the circle."""
    space, n = scratch(1 << 16), 1 << 16
    for high in range(0, 1 << 8):
        number = np.arange(n, dtype=np.uint32) + np.uint32(high * n)
        z = normal_values(number << np.uint32(8), number << np.uint32(8), 1.0, space).astype(np.float64)
        assert np.isfinite(z).all()
        squared = z[0::2] ** 2 + z[1::2] ** 2
        u = (number.astype(np.float64) + 1) / 2**24
        assert np.abs(squared + 2 * np.log(u)).max() < 1e-5
        word = number.astype(np.int64) << 8
        angle = np.pi / 2 * ((word & 0x7FFFFFFF) - ((word & 0x40000000) << 1)) / 2**30
        angle = np.where(word >> 31, np.pi - angle, angle)  # the top bit mirrors
        radius = np.sqrt(-2 * np.log(u))
        assert (
            np.abs(z[0::2] - radius * np.cos(angle)).max() < 1e-5
            and np.abs(z[1::2] - radius * np.sin(angle)).max() < 1e-5
        )


def test_errors():
    mesh = Mesh(dp=2)
    cases = [
        (
            tree.ArraySpec(Layout((2,), torch.int64, mesh), tree.Normal(1.0)),
            "w: got Normal.*wanted a floating-point dtype",
        ),
        (tree.ArraySpec(Layout((2,), torch.float32, mesh, unreduced="dp")), "w: got .*wanted no unreduced axes"),
        (Layout((2,), torch.float32, mesh), "w: got a Layout .*, wanted an ArraySpec"),
    ]
    for spec, message in cases:
        with pytest.raises(ValueError, match=message):
            tree.init({"w": spec}, 0, 0)
    for nothing in ("zeros", True, None, torch.zeros(())):
        with pytest.raises(ValueError, match=r"init: got .*, wanted a number, Normal\(std\) or Uniform\(lo, hi\)"):
            tree.ArraySpec(Layout((2,), torch.float32, mesh), nothing)
    with pytest.raises(ValueError, match="got rank 2, wanted 0 to 1"):
        tree.init({"w": tree.ArraySpec(Layout((2,), torch.float32, mesh))}, 0, 2)


def test_arrays_of_more_than_2_to_the_33_elements():
    """Pair numbers above 32 bits: two ways to cut the same array agree around 2**33, where the high word begins."""
    size, around = (1 << 33) + 40_000, 1 << 33
    pieces = []
    for mesh in (Mesh(a=1 << 20), Mesh(a=3 << 18)):
        spec = tree.ArraySpec(Layout((size,), torch.float32, mesh, ("a",)), tree.Normal(1.0))
        window = torch.zeros(4096)
        for shard, boxes in spec.layout.overlapping((around - 2048,), (around + 2048,)):
            local = tree.init({"w": spec}, 0, spec.layout.rank_of(shard))["w"]
            for box in boxes:
                at = box.start[0] - around + 2048
                window[at : at + box.size] = box.view(local)
        pieces.append(window)
    assert torch.equal(*pieces) and pieces[0].ne(0).all()
    assert (
        pieces[0][2048:]
        .ne(tree.init({"w": tree.ArraySpec(Layout((2048,), torch.float32, Mesh()), spec.init)}, 0, 0)["w"])
        .all()
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"params": {"blocks": {"w": torch.ones(4, 4)}}},
            r"given: params/blocks/w: .*mean blocks/w\?\).*in 'params' alone",
        ),
        (
            {"blocks": {"v": torch.ones(4, 4)}},
            r"given: blocks/v: .*\(did you mean blocks/w\?\), wanted it under the name",
        ),
    ],
)
def test_what_is_given_under_a_wrong_name(given, words):
    """The nearest text of {"params": ...} was a moment of the optimizer."""
    of_state = step.state_specs(tree.specs({"blocks": {"w": (4, 4)}}, Mesh()), optim.adamw(1e-3))
    with pytest.raises(ValueError, match=words):
        tree.init(of_state, 0, 0, given=given)
