"""Stages of pipelines: as text, as Megatron's layouts, balanced; the options of a pipeline."""

import itertools
import random

import pytest

from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.clock import Costs, clock
from fmegatron.step.pipeline.options import Pipelining
from fmegatron.step.pipeline.stages import Stages, balanced, read_layout, read_stages

# What Megatron's own documents and recipes have: (layout, blocks of each stage, blocks, modules, stage of the modules)
LAYOUTS = [
    ("Et*3|(tt|)*29,m|L", (3, *[2] * 29, 0, 0), 61, (30,)),
    ("E|(t|)*3,m|m||L", (0, 1, 1, 1, 0, 0, 0, 0), 3, (4, 5)),
    ("E||t|L", (0, 0, 1, 0), 1, ()),
    ("Ettt|tt,L", (3, 2), 5, ()),
    ("Et*2|(tt|tt|)*2,tmL", (2, 2, 2, 2, 2, 1), 11, (5,)),
    ("E(t|)*3t*2L", (1, 1, 1, 2), 5, ()),
    ("(Et|)*1tmmL", (1, 1), 2, (1, 1)),
    ("Et|*3tL", (1, 0, 0, 1), 2, ()),
]


@pytest.mark.parametrize("text, sizes, blocks, mtp", LAYOUTS, ids=[layout[0] for layout in LAYOUTS])
def test_layouts_of_megatron(text, sizes, blocks, mtp):
    assert read_layout(text, blocks, len(mtp)) == Stages(sizes, mtp) == read_stages(text, blocks, len(mtp))


def test_stages_say_where_they_begin():
    stages = read_stages("3, 0,4,1", 8)
    assert stages.sizes == (3, 0, 4, 1) and stages.begins == (0, 3, 3, 7) and stages.blocks == 8
    assert str(stages) == "3,0,4,1" and read_stages(str(stages), 8) == stages


WRONG = {
    "3,,4": "got '3,,4' with no number at position 2, wanted one for each stage",
    "": "got '' with no number at position 0",
    "3 4,1": "got '3 4' at position 0, wanted one number between commas",
    "3,4": "got '3,4', which are 7 blocks, wanted the model's 8",
    "3,-4": "got '3' at position 0 of '3,-4', wanted E, t, m, L, | between stages",
    "Et*8|x|L": "got 'x' at position 5 of 'Et*8|x|L', wanted E, t, m, L, | between stages",
    "Et*8 |L": "got ' ' at position 4",
    "E(tt|*4L": "got ( that is not closed at position 1",
    "Et)*4L": "got ) at position 2 of 'Et)*4L', wanted a ( before it",
    "E((t|)*2t|)*2L": "got ( at position 2 of 'E((t|)*2t|)*2L', wanted the bracket of position 1 closed before it",
    "E(tt|)4L": "got '4' at position 6 of 'E(tt|)4L', wanted * and a number behind a bracket",
    "E(tt|)": "got the end at position 6",
    "Et*|L": "got '*' at position 2 of 'Et*|L', wanted * and a number of 1 to 10000",
    "Et*0L": "got '*0' at position 2",
    "Et*8*2L": "got '*' at position 4",
    "Et*99999L": "got '*99999' at position 2",
    "E(tttttttttttttttt)*9999L": "got 159984 letters at position 24",
    "Et*7,L": "got 'Et*7,L', which are 7 blocks, wanted the model's 8",
    "tEt*7L": "got t at position 0 of 'tEt*7L', wanted E in the first stage before it; the embedding is first",
    "|Et*8L": "got E at position 1",
    "EEt*8L": "got E at position 1 of 'EEt*8L', wanted E once; remove it",
    "Et*8": "got 'Et*8' without an L at its end",
    "Et*7Lt": "got t at position 5 of 'Et*7Lt', wanted nothing behind L",
    "Et*8LL": "got L at position 5",
    "Et*8L|": "got | at position 5 of 'Et*8L|', wanted L in the last stage; remove it",
    "Et*7|m|tL": "got t at position 7 of 'Et*7|m|tL', wanted every t before m; move it",
    "Et*8|mL": "got 'Et*8|mL', which has 1 m, wanted the model's 0",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_read_is_refused_by_place(text):
    with pytest.raises(ValueError, match="^pipeline.stages: got ") as error:
        read_stages(text, 8, 0, "pipeline.stages")
    assert WRONG[text] in str(error.value)


def test_wrong_stages():
    for sizes in ((), (3, -1)):
        with pytest.raises(ValueError, match="stages: got sizes .*, wanted one or more of 0 or more blocks"):
            Stages(sizes)
    with pytest.raises(ValueError, match="stages: got mtp on stage 0, wanted 1 .that of the last block. or behind it"):
        Stages((2, 1, 0), (0,))


def test_balanced_stages_are_the_best_there_are():
    """Against all divisions: the most of a stage, with one stage a rank."""
    rng = random.Random(0)
    for _ in range(40):
        count, stages = rng.randrange(1, 9), rng.randrange(1, 5)
        blocks = [rng.choice((1.0, 1.0, 0.5, 3.0)) for _ in range(count)]
        first, last = rng.choice((0.0, 0.3)), rng.choice((0.0, 2.5))
        if stages > count:
            with pytest.raises(
                ValueError, match=f"stages: got {count} blocks and {stages} stages, wanted a block or more"
            ):
                balanced(blocks, range(stages), first, last)
            continue

        def most(cuts, blocks=blocks, first=first, last=last):
            costs = [sum(blocks[a:b]) for a, b in itertools.pairwise((0, *cuts, len(blocks)))]
            costs[0] += first
            costs[-1] += last
            return max(costs)

        found = balanced(blocks, range(stages), first, last)
        assert sum(found) == count and min(found) > 0
        least = min(map(most, itertools.combinations(range(1, count), stages - 1)))
        assert most(list(itertools.accumulate(found))[:-1]) == pytest.approx(least)


def test_ranks_are_balanced_where_they_hold_several_stages():
    """Twelve blocks on the eight stages of a V: three a rank, not four here and two there."""
    place = schedules.vee(4)
    found = balanced([1.0] * 12, place, 0.1, 0.2)
    assert [sum(size for size, r in zip(found, place, strict=True) if r == rank) for rank in range(4)] == [3] * 4
    assert max(found) == 2
    assert balanced([1.0] * 12, schedules.loop(4), 0.3, 2.5) == (3, 4, 4, 1)
    with pytest.raises(ValueError, match="stages: got costs -1.0 to 1.0, wanted finite ones of 0 or more"):
        balanced([1.0, 1.0], (0, 1), -1.0)


@pytest.mark.parametrize(
    "options, ranks, blocks, place, name",
    [
        (Pipelining(), 4, 9, (0, 1, 2, 3), "1F1B p=4 m=8"),
        (Pipelining("gpipe"), 2, 4, (0, 1), "GPipe p=2 m=8"),
        (Pipelining("interleaved"), 2, 4, (0, 1, 0, 1), "interleaved v=2 p=2 m=8"),
        (Pipelining("interleaved", chunks=3), 2, 7, (0, 1, 0, 1, 0, 1), "interleaved v=3 p=2 m=8"),
        (Pipelining("interleaved", "Et|t|(t|)*4L"), 2, 6, None, None),
        (Pipelining("interleaved", "Et|(t|)*4L"), 2, 5, (0, 1, 0, 1, 0, 1), "interleaved v=3 p=2 m=8"),
        (Pipelining("zb_h1", "3,4,4,1"), 4, 12, (0, 1, 2, 3), "ZB-H1 p=4 m=8"),
        (Pipelining("zb_v", "3,4,4,1"), 2, 12, (0, 1, 1, 0), "ZB-V p=2 m=8"),
        (Pipelining("dualpipe_v"), 4, 12, schedules.vee(4), "DualPipeV p=4 m=8"),
        (Pipelining("greedy", chunks=2, memory=1.5), 2, 4, (0, 1, 0, 1), "greedy p=2 m=8"),
        (Pipelining("greedy_v"), 2, 4, (0, 1, 1, 0), "greedy_v p=2 m=8"),
    ],
)
def test_options(options, ranks, blocks, place, name):
    if place is None:
        with pytest.raises(
            ValueError, match="pipeline.stages: got 7 stages on 2 ranks with interleaved, wanted a multiple"
        ):
            options.place(ranks, blocks)
        return
    assert options.place(ranks, blocks) == place
    stages = options.cut(place, [1.0] * blocks, 0.1, 0.2)
    assert len(stages.sizes) == len(place) and stages.blocks == blocks
    table = options.table(place, 8, Costs(F=tuple(map(float, stages.sizes))))
    assert table.name == name and table.place == place and table.microbatches == 8
    if options.memory:
        assert max(clock(table).peaks) <= 2 * options.memory


@pytest.mark.parametrize(
    "given, text",
    [
        ({"schedule": "1F1B"}, "pipeline.schedule: got '1F1B', wanted one of gpipe, 1f1b, interleaved, zb_h1"),
        ({"schedule": "zb_v", "chunks": 1}, "pipeline.chunks: got 1 with zb_v, wanted 2"),
        ({"chunks": 2}, "pipeline.chunks: got 2 with 1f1b, wanted 1"),
        ({"schedule": "greedy", "chunks": -1}, "pipeline.chunks: got -1 with greedy, wanted 1 or more, or 0"),
        ({"memory": 2.0}, "pipeline.memory: got 2 with 1f1b, wanted 0, or more with a greedy schedule"),
    ],
)
def test_wrong_options(given, text):
    with pytest.raises(ValueError) as error:
        Pipelining(**given)
    assert text in str(error.value)


def test_options_that_do_not_fit_the_run():
    with pytest.raises(
        ValueError, match="pipeline.stages: got 4 stages on 4 ranks with zb_v, wanted 8; ranks hold equally"
    ):
        Pipelining("zb_v", "3,4,4,1").place(4, 12)
    with pytest.raises(ValueError, match="dualpipe_v: got p=4, m=6, wanted 8 microbatches or more"):
        Pipelining("dualpipe_v").table(schedules.vee(4), 6)
    with pytest.raises(ValueError, match="interleaved: got p=4, m=2, v=2, wanted m that p divides .such as 4."):
        Pipelining("interleaved").table(schedules.loop(4, 2), 2)
    with pytest.raises(ValueError, match="stages: got 3 blocks and 4 stages, wanted a block or more for each stage"):
        Pipelining().cut(schedules.loop(4), [1.0] * 3)
