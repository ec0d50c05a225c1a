"""Layout: known answers, agreement with torch's DTensor, replicas and owners, notation, errors for people."""

import pytest
import torch

from fmegatron.layout import Box, Layout, Mesh, Rules, Split, check_cover
from fmegatron.layout.dtypes import dtype_from_name, dtype_name
from fmegatron.layout.split import chunk

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
MESH = Mesh(pp=2, dp=2, fsdp=4, tp=2)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout((8192, 28672), BF16, MESH, ("fsdp", "tp")), "bf16[8192@fsdp, 28672@tp] on pp2·dp2·fsdp4·tp2"),
        (Layout((12, 8), F32, MESH, (Split("tp", (8, 2, 2)), ("dp", "fsdp"))), "f32[(8+2+2)@tp, 8@dp·fsdp] on {}"),
        (Layout((9,), I64, MESH, (Split("pp", 3),), unreduced=("dp", "tp")), "i64[(3×3)@pp] unreduced@dp·tp on {}"),
        (Layout((3, 4), torch.bool, MESH, ("tp",), flat="dp"), "bool[3@tp, 4] flat@dp on {}"),
        (Layout((), torch.float8_e4m3fn, Mesh()), "f8e4m3fn[] on one rank"),
    ],
)  # fmt: skip
def test_repr_is_one_readable_line(layout, text):
    assert repr(layout) == text.format(MESH)


def test_one_meaning_has_one_spelling():
    assert Layout((4, 4), F32, MESH, (("tp",), None)) == Layout([4, 4], F32, MESH, ["tp"])
    assert Layout((4,), F32, MESH, (Split("tp", 1),)) == Layout((4,), F32, MESH, ("tp",))
    assert Layout((4,), F32, MESH, (Split((), 2),)) == Layout((4,), F32, MESH, ((),)) == Layout((4,), F32, MESH)
    assert Layout((4,), F32, MESH, ("tp",)) != Layout((4,), BF16, MESH, ("tp",))


def test_fused_qkv_and_virtual_stages():
    mesh = Mesh(pp=2, tp=2)
    qkv = Layout((3, 8), F32, mesh, (None, Split("tp", parts=(4, 2, 2))))
    assert qkv.local_shape(1) == (3, 4)
    assert [(box.slices[1], box.offset, box.strides) for box in qkv.boxes(1)] == [
        (slice(2, 4), 0, (4, 1)),
        (slice(5, 6), 2, (4, 1)),
        (slice(7, 8), 3, (4, 1)),
    ]
    stages = Layout((8, 3), F32, mesh, (Split("pp", parts=2),))  # 8 layers, 2 stages on each of 2 ranks
    assert [box.slices[0] for box in stages.boxes(0)] == [slice(0, 2), slice(4, 6)]
    assert [box.slices[0] for box in stages.boxes(3)] == [slice(2, 4), slice(6, 8)]


def test_flat_ranges_are_few_boxes_into_one_storage():
    layout = Layout((4, 6), F32, Mesh(dp=3), flat="dp")
    assert [layout.local_shape(rank) for rank in range(3)] == [(8,), (8,), (8,)]
    assert layout.boxes(1) == (
        Box((1, 2), (1, 4), 0, (6, 1)),
        Box((2, 0), (1, 4), 4, (6, 1)),
    )
    long = Layout((50, 60, 70), F32, Mesh(dp=7), flat="dp")
    assert all(len(long.boxes(rank)) <= 5 for rank in range(7))


def test_chunk_is_torch_chunk():
    for size in range(1, 20):
        for count in range(1, 8):
            pieces = [chunk(size, count, i) for i in range(count)]
            assert [n for _, n in pieces if n] == [len(piece) for piece in torch.arange(size).chunk(count)]
            assert [at for at, n in pieces if n] == [int(piece[0]) for piece in torch.arange(size).chunk(count)]


def test_replicas_and_owners():
    layout = Layout((8, 8), F32, MESH, ("fsdp",), unreduced="dp")
    assert (layout.sharded, layout.replicated, layout.replicas) == (("fsdp",), ("pp", "tp"), 4)
    for turn in range(9):
        owners = [rank for rank in range(MESH.size) if layout.owner(rank, turn)]
        assert len(owners) == 8 and len({layout.shard(rank) for rank in owners}) == 4  # 4 shards, 2 pending parts
    in_turn = [rank for turn in range(layout.replicas) for rank in range(MESH.size) if layout.owner(rank, turn)]
    assert sorted(in_turn) == list(range(MESH.size))  # every replica has its turn
    assert layout.without("dp") == layout.replace(unreduced=())
    assert layout.without(("dp", "fsdp")) == Layout((8, 8), F32, MESH)
    assert Layout((8,), F32, MESH, (("dp", "tp"),)).without("dp").spec == ("tp",)
    assert layout.nbytes == 256 and layout.local_nbytes(0) == 64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout((4,), F32, MESH, ("zz",)), r"dim 0: got axis 'zz', wanted one of pp, dp, fsdp, tp of the mesh"),
        (lambda: Layout((4, 4), F32, MESH, ("tp", "tp")), r"axis 'tp' twice, in dim 0 and in dim 1"),
        (lambda: Layout((4,), F32, MESH, ("tp",), unreduced="tp"), r"axis 'tp' twice, in dim 0 and in unreduced"),
        (lambda: Layout((4,), F32, MESH, ("tp", "dp")), r"got 2 spec entries .*at most one for each of the 1 dims"),
        (lambda: Layout((9,), F32, MESH, (Split("tp", (4, 4)),)), r"parts that sum to 8, wanted the size .* 9"),
        (lambda: Layout((9,), F32, MESH, (Split("tp", 2),)), r"got 2 parts of a dim of size 9, wanted"),
        (lambda: Layout((4,), F32, MESH, (3,)), r"got spec entry 3, wanted None, an axis name"),
        (lambda: Layout((4,), "f32", MESH), r"got dtype 'f32', wanted a torch.dtype"),
        (lambda: Layout((4,), F32, {"tp": 2}), r"wanted a Mesh"),
        (lambda: Layout((-1,), F32, MESH), r"wanted sizes of 0 or more"),
        (lambda: Layout((4,), F32, MESH).local_shape(32), r"got rank 32, wanted 0 to 31"),
        (lambda: Layout((4,), F32, MESH).replace(shap=(3,)), r"got \['shap'\], wanted fields among"),
        (lambda: Layout((4,), F32, MESH).without("zz"), r"got mesh axis 'zz'"),
        (lambda: Layout((4, 4), F32, MESH).boxes(0)[0].view(torch.zeros(4, 4).T), r"wanted a contiguous one"),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_dtype_names_are_inverse():
    for name in ("bf16", "f16", "f32", "f64", "i8", "i64", "u8", "bool", "f8e4m3fn", "f8e5m2", "c64"):
        assert dtype_name(dtype_from_name(name)) == name
    with pytest.raises(ValueError, match="got dtype name 'float'"):
        dtype_from_name("float")


def test_check_cover_names_gaps_and_overlaps():
    check_cover([Box((0, 0), (2, 4), 0, (4, 1)), Box((2, 0), (1, 4), 8, (4, 1))], (3, 4))
    check_cover([], (0, 4))
    check_cover([Box((), (), 0, ())], ())
    with pytest.raises(ValueError, match=r"gap: \[2:3, 1:4\] is in no box"):
        check_cover([Box((0, 0), (2, 4), 0, (4, 1)), Box((2, 0), (1, 1), 8, (4, 1))], (3, 4))
    with pytest.raises(ValueError, match=r"overlap: \[1:2, 0:4\] is in box 0 and box 1"):
        check_cover([Box((0, 0), (2, 4), 0, (4, 1)), Box((1, 0), (2, 4), 0, (4, 1))], (3, 4))
    with pytest.raises(ValueError, match=r"gap: \[0:3, 0:4\]"):
        check_cover([], (3, 4))
    with pytest.raises(ValueError, match=r"got box 0 as \[2:4\], wanted it inside an array of shape \(3,\)"):
        check_cover([Box((2,), (2,), 0, (1,))], (3,))
    check_cover(Layout((1000, 1000), F32, Mesh(a=32, b=32), ("a", "b")))


def test_rules_first_match_wins_on_whole_segments():
    rules = Rules([(r"attention/wo", (None, "tp")), (r"attention/w.*", ("tp",)), (r"^table", ("dp",))])
    assert rules.match("blocks/attention/wo") == (None, "tp")
    assert rules.match("opt/mu/blocks/attention/wqkv") == ("tp",)
    assert rules.match("table") == ("dp",)
    with pytest.raises(ValueError, match=r"got no rule for the path 'x/table'(.|\n)*'\^table': \('dp',\)"):
        rules.match("x/table")
    with pytest.raises(ValueError, match="got no rule"):
        rules.match("blocks/attention2/wo")
    with pytest.raises(ValueError, match=r"wanted a regular expression"):
        Rules([("(", ())])
    with pytest.raises(ValueError, match=r"a/attention/wo: by the rule 'attention/wo': .* got 2 spec entries"):
        rules.layout("a/attention/wo", (4,), F32, MESH)
    assert rules.report(["attention/wo"]).splitlines()[1].endswith("no path")
