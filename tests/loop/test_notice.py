"""The last words of a rank: an error has a name where it has no text, and only who has seen a rank end names it."""

import types

import pytest

from fmegatron.loop.faults import notice
from fmegatron.loop.faults.notice import Place, fail


class Board:
    """A notice board on which another rank may have reported, or left."""

    def __init__(self, failed=None, left=None):
        self.failed, self.how = failed, left

    def speaks(self):
        return True

    def told(self):
        return self.failed

    def left(self):
        return self.how

    def report(self, error):
        return self.failed or f"rank 1: {notice._said(error)}"

    def all_told(self, first):
        pass


class Ended(BaseException):
    pass


@pytest.fixture
def last_words(monkeypatch, capsys):
    def end(message, status=1):
        notice.say(message)
        raise Ended

    def words(error, board=None, brief=True):
        with pytest.raises(Ended):
            fail(error, Place(1, 2), board, brief=brief)
        return capsys.readouterr().err.splitlines()

    monkeypatch.setattr(notice, "end", end)
    monkeypatch.setattr(
        notice, "get_error_handler", lambda: types.SimpleNamespace(initialize=str, record_exception=str)
    )
    return words


@pytest.mark.parametrize(
    "error, words",
    [
        (KeyboardInterrupt(), "rank 1 of 2: interrupted"),
        (KeyboardInterrupt("a second Ctrl-C"), "rank 1 of 2: a second Ctrl-C"),
        (AssertionError(), "rank 1 of 2 failed: AssertionError"),
        (ValueError("a bad thing"), "rank 1 of 2 failed: ValueError: a bad thing"),
        (SystemExit(), "rank 1 of 2 failed: SystemExit"),
    ],
)
def test_an_error_without_a_text_has_a_name(last_words, error, words):
    assert last_words(error) == [words]
    board = Board()
    assert last_words(error, board) == [words]
    other = Board(failed="rank 0: KeyboardInterrupt")
    assert last_words(ValueError("another"), other) == ["rank 1 ends because another failed: rank 0: KeyboardInterrupt"]


@pytest.mark.parametrize(
    "environment, left, words",
    [
        ({"TORCHELASTIC_RUN_ID": "a"}, None, "or left without a word; torchrun's report names it"),
        (
            {"TORCHELASTIC_RUN_ID": "a"},
            "rank 0 returned from main",
            "rank: rank 0 returned from main",
        ),  # it has no error
        ({"SLURM_JOB_ID": "1"}, None, "or left without a word; see what the launcher of the ranks reports of it"),
    ],
)
def test_who_names_a_rank_that_is_gone(last_words, monkeypatch, environment, left, words):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    first = last_words(RuntimeError("Connection closed by peer [127.0.0.1]"), Board(left=left))[0]
    assert first.startswith("rank 1 of 2 lost its connection to another rank: ") and first.endswith(words)
