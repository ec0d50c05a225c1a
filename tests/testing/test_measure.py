"""Paired measurements: the order alternates, one round warms up; a report says whether its bar holds."""

import json

import pytest
import torch

from fmegatron.testing.measure import paired_seconds, peak_bytes, report


def test_pairs_alternate_after_a_round_that_warms_up():
    calls = []
    pairs = paired_seconds(lambda: calls.append("a"), lambda: calls.append("b"), 3, before=lambda: calls.append("."))
    assert "".join(calls).replace(".", "") == "ba" + "ab" + "ba" + "ab" and calls[::2] == ["."] * 8
    assert len(pairs) == 3 and all(a >= 0 and b >= 0 for a, b in pairs)


@pytest.mark.parametrize(
    "bar, holds", [("<= 2", True), (">= 2.0", True), ("< 2", False), ("> 1.9", True), (None, None)]
)
def test_a_report_is_one_json_line(bar, holds, capsys):
    assert report("m", [1.0, 2.0, 4.0], unit="ratio", where="here", bar=bar) == 2.0
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert out.count("\n") == 1 and line["holds"] is holds and line["bar"] == bar
    assert (line["value"], line["n"], line["spread"]) == (2.0, 3, [1.0, 4.0]) and "m " in err
    assert ("MISSED" in err) == (holds is False)


def test_a_peak_counts_what_lives_at_once():
    kept = []

    def work():
        a = torch.zeros(1 << 18)  # 1 MiB, gone before the second
        del a
        kept.append(torch.zeros(1 << 18))
        kept.append(torch.zeros(1 << 19))

    assert 3 << 20 <= peak_bytes(work) < (3 << 20) + 4096
    assert peak_bytes(kept.clear) == 0
