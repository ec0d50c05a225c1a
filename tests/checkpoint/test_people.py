"""What people do with a checkpoint in the shell: it restores or is refused in words, and nothing of it is deleted."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.tools.gc import collect
from tests.checkpoint.fake_world import assert_same_bits
from tests.checkpoint.test_manager import ONE, filled, state
from tests.checkpoint.tokens import files_of

NAME = "step_00000007"


@pytest.fixture
def step(tmp_path):
    """One of two steps of a run; it was saved twice."""
    filled(tmp_path / "run", 6, 7)
    checkpoint.save(tmp_path / "run" / NAME, state(7), ONE, metadata={"step": 7}, step=7)
    return tmp_path / "run" / NAME


def content(folder):
    """Path below the folder -> bytes of all files, links not followed."""
    found = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if not path.is_symlink()}


def goes_on(directory):
    """Another run finds what is there, saves and cleans up."""
    with Manager(directory) as manager:
        manager.save(8, state(8), ONE)
    collect(directory, age=0.0)


WAYS = {
    "cp -r": "cp -r {step} {to}",
    "cp -rL": "cp -rL {step} {to}",
    "cp -al": "cp -al {step} {to}",
    "tar": "tar -C {run} -cf - {name} | tar -C {to} -xf -",
    "tar without links": "tar -C {run} --exclude={name}/arrays -cf - {name} | tar -C {to} -xf -",
    "mv": "mv {step} {to}",
    "the token as the step": "cp -r {step}/{token} {to}/{name}",
    "the token under its own name": "cp -r {step}/{token} {to}",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_in_another_directory(step, tmp_path, way):
    """`cp -rL` makes a second copy of the arrays in the place of the link to them: that one alone may go."""
    filled(tmp_path / "to", 3)
    there, token, was = content(step), files_of(step).name, content(step.parent)
    of_token = {name.partition("/")[2]: data for name, data in there.items() if "/" in name}
    command = WAYS[way].format(step=step, run=step.parent, name=NAME, token=token, to=tmp_path / "to")
    subprocess.run(["sh", "-c", command], check=True)
    if way == "the token under its own name":  # no name of a step: a checkpoint by its path
        at, wanted = (
            tmp_path / "to" / token,
            {name.partition("/")[2]: data for name, data in there.items() if "/" in name},
        )
        assert Manager(tmp_path / "to").steps() == [3]
    else:
        at, wanted = tmp_path / "to" / NAME, of_token if way == "the token as the step" else there
        number, got, metadata = Manager(tmp_path / "to").restore_latest(ONE)
        assert number == 7 and metadata == {"step": 7}
        assert_same_bits(got, state(7))
    for _ in range(2):
        assert_same_bits(checkpoint.restore(at, ONE), state(7))
        now = content(at)
        assert now.items() >= wanted.items() and (way == "cp -rL" or now == wanted)
        goes_on(tmp_path / "to")
    if way == "mv":
        assert Manager(step.parent).steps() == [6]
        assert_same_bits(Manager(step.parent).restore_latest(ONE)[1], state(6))
    else:
        assert content(step.parent) == was


@pytest.mark.parametrize("of", ["the pointer", "the first", "half", "all but one"])
def test_files_that_come_one_after_another(step, tmp_path, of):
    """As `rsync` brings them, the pointer first: until the last is there an older step is found, and nothing goes."""
    to = tmp_path / "to"
    filled(to, 3)
    there = content(step)
    names = sorted(there, key=lambda name: (name.count("/"), name))
    count = {"the pointer": 1, "the first": 2, "half": len(names) // 2, "all but one": len(names) - 1}[of]

    def bring(some):
        for name in some:
            (to / NAME / name).parent.mkdir(parents=True, exist_ok=True)
            (to / NAME / name).write_bytes(there[name])

    bring(names[:count])
    manager = Manager(to)
    with pytest.warns(RuntimeWarning, match=NAME):
        number, got, _ = manager.restore_latest(ONE)
    assert number == 3
    assert_same_bits(got, state(3))
    with pytest.raises(CheckpointError, match=rf"{NAME}.*; "):
        checkpoint.restore(to / NAME, ONE)
    goes_on(to)
    assert content(to / NAME) == {name: there[name] for name in names[:count]}
    bring(names[count:])
    assert_same_bits(checkpoint.restore(to / NAME, ONE), state(7))


@pytest.mark.parametrize("what", ["all of it", "its token"])
def test_all_files_put_into_an_object_store(step, what):
    """Under the same names, as `aws s3 cp --recursive` does."""
    folder = step if what == "all of it" else files_of(step)
    place = open_store(f"memory://run/{NAME}", {})
    for name, data in content(folder).items():
        place.values.write(name, [data])
    before = place.values.names()
    assert_same_bits(checkpoint.restore(place, ONE), state(7))
    place.sweep(leases.Watch())
    place.above().clean("step_.*", (), leases.Watch())
    assert place.values.names() == before
    checkpoint.save(place, state(9), ONE, step=7)
    assert_same_bits(checkpoint.restore(place, ONE), state(9))
    assert set(place.inside()) == {"COMPLETE", place.pointer()["root"]}


def test_a_pointer_that_is_removed(step):
    """`rm COMPLETE`: it is no step any more, and its files stay."""
    os.remove(step / "COMPLETE")
    left = content(step)
    with pytest.warns(RuntimeWarning, match=NAME):
        assert Manager(step.parent).restore_latest(ONE)[0] == 6
    goes_on(step.parent)
    assert content(step) == left


def test_a_token_that_is_renamed(step):
    """The pointer names one that is not there: an older step is found, the files stay, and `mv` brings it back."""
    files = files_of(step)
    shutil.move(files, step / "0123456789ab")
    left = content(step)
    with pytest.warns(RuntimeWarning, match=NAME):
        assert Manager(step.parent).restore_latest(ONE)[0] == 6
    goes_on(step.parent)
    assert content(step) == left
    shutil.move(step / "0123456789ab", files)
    assert_same_bits(checkpoint.restore(step, ONE), state(7))
