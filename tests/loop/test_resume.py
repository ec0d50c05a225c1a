"""What has changed since a checkpoint was saved is refused, named or free, as the Config's fields say."""

import dataclasses
import functools
import json
import math
from dataclasses import dataclass

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Settings, field
from fmegatron.loop.config import UsageError
from fmegatron.loop.plain import fields

LAYOUTS = {"w": Layout((4,), torch.float32, Mesh())}


@dataclass(frozen=True)
class Part:
    width: int = 8
    eps: float = field(1e-5, resume="named")


@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    other: Mesh = field(Mesh(), resume="refused")
    run: str = field("runs/a", resume="free")
    heads: int = field(2)
    undeclared: float = 0.5
    lr: float = field(1e-3, resume="named")
    part: Part = Part()
    log_every: int = field(10, resume="free")


def changes(now, before=None, allow=(), **facts):
    return Settings(now, allow=allow, **facts).changes(Settings(before or Config(), **facts).metadata(0))


@pytest.mark.parametrize(
    "change, kind, text",
    [
        ({"heads": 4}, "refused", "heads 2 -> 4"),
        ({"undeclared": 1.0}, "refused", "undeclared 0.5 -> 1.0"),
        ({"part": Part(width=16)}, "refused", "part.width 8 -> 16"),
        ({"part": Part(eps=1e-6)}, "named", "part.eps 1e-05 -> 1e-06"),
        ({"lr": 1e-2}, "named", "lr 0.001 -> 0.01"),
        ({"lr": math.inf}, "named", 'lr 0.001 -> "inf"'),
        ({"mesh": Mesh(fsdp=2, tp=2)}, "named", 'mesh "" -> "fsdp=2,tp=2"'),
        ({"other": Mesh(fsdp=2)}, "refused", 'other "" -> "fsdp=2"'),
        ({"run": "runs/b"}, "free", 'run "runs/a" -> "runs/b"'),
        ({"log_every": 1}, "free", "log_every 10 -> 1"),
    ],
)
def test_every_change_has_its_class(change, kind, text):
    found = changes(dataclasses.replace(Config(), **change))
    wanted = {name: () for name in ("refused", "allowed", "named", "free")} | {kind: (text,), "unknown": None}
    assert dataclasses.asdict(found) == wanted
    assert str(found) == f"  {kind:<10} {text}"


def test_nothing_has_changed():
    assert not str(changes(Config())) and not changes(Config(lr=0.001, part=Part(8))).refused


def test_allowed_by_name():
    now = Config(heads=4, undeclared=1.0, part=Part(16))
    assert changes(now, allow=("heads", "part")).refused == ("undeclared 0.5 -> 1.0",)
    assert changes(now, allow=("part.width",)).allowed == ("part.width 8 -> 16",)
    assert not changes(Config(), allow=("heads",)).allowed  # the same command, later
    with pytest.raises(UsageError, match=r"allow: got 'head', .* \(did you mean heads\?\)"):
        changes(now, allow=("head",))


def test_facts_of_the_data_are_refused():
    before = Settings(Config(), data="100 tokens, a").metadata(0)
    assert Settings(Config(), data="100 tokens, b").changes(before).refused == (
        'data "100 tokens, a" -> "100 tokens, b"',
    )
    assert Settings(Config(), allow=("data",), data="b").changes(before).allowed
    assert Settings(Config(), data="b", more=1).changes(Settings(Config(), data="b").metadata(0)).named == (
        "more (not there) -> 1",
    )


def test_fields_come_and_go():
    """A new field had its default before; one that is gone is named."""

    @dataclass(frozen=True)
    class New:
        heads: int = 2
        dropout: float = field(0.0, resume="refused")

    before = {"config": {"heads": 2, "old": [1, 2]}}
    assert Settings(New()).changes(before).named == ("dropout (not there) -> 0.0", "old [1, 2] -> (not there)")
    assert Settings(New(dropout=0.1)).changes(before).refused == ("dropout (not there) -> 0.1",)


def test_metadata_survives_json():
    """What JSON has not is text that does not depend on the process."""

    @dataclass(frozen=True)
    class Odd:
        dtype: torch.dtype = torch.bfloat16
        activation: object = torch.nn.functional.gelu
        other: object = functools.partial(print, end="")
        sizes: frozenset = frozenset({"b", "a"})

    metadata = Settings(Odd(), vocabulary={"a": 0}).metadata(7)
    assert json.loads(json.dumps(metadata)) == metadata
    assert metadata["config"]["dtype"] == "torch.bfloat16" and metadata["config"]["sizes"] == ["a", "b"]
    assert " at 0x" not in json.dumps(metadata)


def test_a_new_part_had_its_default_before():
    @dataclass(frozen=True)
    class New:
        heads: int = 2
        part: Part = Part()

    before = {"config": {"heads": 2}}
    found = Settings(New()).changes(before)
    assert not found.refused and "part.width (not there) -> 8" in found.named
    assert Settings(New(part=Part(16))).changes(before).refused == ("part.width (not there) -> 16",)


@pytest.mark.parametrize(
    "config, allow, words",
    [
        (Config(), "heads", r"Settings: allow: got 'heads', wanted names; pass a tuple of them: \('heads',\)"),
        (Config(), 3, "Settings: allow: got 3, wanted names"),
        (Config(), [1], "allow: got 1, wanted names of the Config's fields or of facts"),
        (Config(), [["heads"]], r"allow: got \['heads'\], wanted names of the Config's fields"),
        ({"heads": 2}, (), "Settings: config: got {'heads': 2}, wanted an instance of a dataclass; write its fields"),
        (Config, (), r"Settings: config: got <class .*, wanted an instance of a dataclass; make one: Config\(\)"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_words(config, allow, words):
    with pytest.raises(ValueError, match=words):
        Settings(config, allow=allow)


def test_facts_come_and_go():
    before = Settings(Config(), data="a").metadata(0)
    assert Settings(Config()).changes(before).named == ('data "a" -> (not there)',)
    assert Settings(Config(), data="a", words=2).changes(before).named == ("words (not there) -> 2",)


def save(manager, step, config, **more):
    state = {"w": torch.full((4,), float(step))}
    manager.save(step, state, LAYOUTS, metadata={**Settings(config).metadata(16 * step), **more})


def fresh():
    return {"w": torch.zeros(4)}


def test_resume(tmp_path, capsys):
    manager = checkpoint.Manager(tmp_path / "checkpoints")
    begun = Settings(Config()).begin(manager, LAYOUTS, fresh)
    assert (begun.step, begun.samples, begun.metadata) == (0, 0, {}) and torch.equal(begun.state["w"], torch.zeros(4))
    save(manager, 100, Config(), note="mine")
    begun = Settings(Config()).begin(manager, LAYOUTS, fresh)
    assert (begun.step, begun.samples, begun.metadata["note"]) == (100, 1600, "mine")
    assert torch.equal(begun.state["w"], torch.full((4,), 100.0)) and capsys.readouterr().out == ""

    now = Config(heads=4, lr=1e-2, log_every=1)
    with pytest.raises(UsageError) as refused:
        Settings(now).begin(manager, LAYOUTS, fresh)
    assert str(refused.value).startswith(
        "the checkpoint of step 100 is of a run with other settings: heads 2 -> 4. These change the function or the"
    )
    assert "Settings(config, allow=('heads',)), or give the Config a field `run: loop.Options" in str(refused.value)
    assert Settings(now, allow=("heads",)).begin(manager, LAYOUTS, fresh).step == 100
    assert capsys.readouterr().out == (
        "resumed from step 100 with other settings:\n"
        "  allowed    heads 2 -> 4\n  named      lr 0.001 -> 0.01\n  free       log_every 10 -> 1\n"
    )


def test_settings_are_compared_before_the_state_is_read(tmp_path):
    """A change of a size is told as that, not as shapes that do not fit."""
    manager = checkpoint.Manager(tmp_path)
    save(manager, 1, Config())
    with pytest.raises(UsageError, match="heads 2 -> 4"):
        Settings(Config(heads=4)).begin(manager, {"w": Layout((8,), torch.float32, Mesh())}, fresh)


def test_a_damaged_newest_checkpoint(tmp_path, capsys):
    """It is the settings of the one that is restored that count."""
    manager = checkpoint.Manager(tmp_path)
    save(manager, 1, Config(heads=1))
    save(manager, 2, Config(heads=2))
    chunk = max((tmp_path / "step_00000002").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with pytest.warns(RuntimeWarning, match="step 2"), pytest.raises(UsageError, match="step 1 .* heads 1 -> 2"):
        Settings(Config(heads=2)).begin(manager, LAYOUTS, fresh)


def test_settings_of_a_step_that_is_gone_past_refuse_nothing(tmp_path, capsys):
    """A change was allowed, its run broke at once, and the old settings go on from the last good step, which has them.

    Without a better step, or where the user asks for the newest, that one's settings count.
    """
    manager = checkpoint.Manager(tmp_path)
    for step, config, finite in ((1, Config(), True), (2, Config(heads=4), False)):
        state = {"w": torch.full((4,), float(step))}
        manager.save(step, state, LAYOUTS, metadata=Settings(config).metadata(step), finite=finite)
    with pytest.warns(RuntimeWarning, match="skipped the checkpoint of step 2"):
        assert Settings(Config()).begin(manager, LAYOUTS, fresh).step == 1
    assert capsys.readouterr().out == ""
    with pytest.warns(RuntimeWarning, match="skipped"), pytest.raises(UsageError, match="step 1 .* heads 2 -> 4"):
        Settings(Config(heads=4)).begin(manager, LAYOUTS, fresh)
    with pytest.raises(UsageError, match="step 2 .* heads 4 -> 2"):
        Settings(Config()).begin(manager, LAYOUTS, fresh, prefer_finite=False)
    manager.delete(1)
    with pytest.warns(RuntimeWarning, match="step 2"), pytest.raises(UsageError, match="step 2 .* heads 4 -> 2"):
        Settings(Config()).begin(manager, LAYOUTS, fresh)


def test_checkpoints_without_settings(tmp_path, capsys):
    """Of an older version, or of other code: that is said, and the run goes on."""
    manager = checkpoint.Manager(tmp_path)
    manager.save(3, {"w": torch.zeros(4)}, LAYOUTS)
    begun = Settings(Config()).begin(manager, LAYOUTS, fresh)
    assert (begun.step, begun.samples) == (3, None)
    assert "the checkpoint has no configuration: whether anything has changed cannot be" in capsys.readouterr().out


def test_the_file_beside_the_checkpoints(tmp_path):
    Settings(Config(), data="d").write(tmp_path / "run" / "config.json")
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (
        written == {"config": fields(Config(), "Config"), "facts": {"data": "d"}}
        and written["config"]["part"]["width"] == 8
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
