"""The page about runs: well-formed, nothing of a run's own texts is markup, and each number in it is in the records."""

import html.parser
import json
import math
import re
import shutil
import subprocess
import unittest

import pytest

from fmegatron import report
from fmegatron.loop import JsonLines, Loggers, read_metrics, read_run, report_page
from fmegatron.loop.events import Events
from fmegatron.loop.report.figures import number, thinned, ticks
from fmegatron.loop.report.page import mean_split
from fmegatron.loop.report.ranks import rank_times
from fmegatron.loop.report.read import differences

HOSTILE = "</script><script>alert(1)</script>&amp;\"'<img src=x onerror=alert(2)>"
VOID = {"meta", "input", "img", "br"}


class Page(html.parser.HTMLParser):
    """What a test wants to know of a page; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.texts, self.scripts, self.shapes = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if dict(attrs).get("class") == "n":
            self.cells.append("")
        self.is_number = dict(attrs).get("class") == "n"
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.open)
        self.is_number = False

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] == "td" and self.is_number:
            self.cells[-1] += data
        else:
            self.texts.append(data)


def write_run(folder, steps=40, name="loss", mesh="tp2", lr=0.1):
    """Records as a run writes them, with a resume behind step 20 that repeats."""
    rows = [(1, 0)] + [(step, 0) for step in range(10, 31, 10)] + [(step, 20) for step in range(21, steps + 1, 5)]
    for after in (0, 20):
        with (
            Events(folder / "events.jsonl") as events,
            Loggers(JsonLines(folder / "metrics.jsonl", after, mesh=mesh)) as log,
        ):
            events.started(after, mesh=mesh, device="cpu", peak="1 TFLOP/s, made up")
            for step, start in rows:
                if start != after:
                    continue
                split = {"time_data": 0.001 * step, "time_step": 0.1, "time_save": 0.002}
                log(step, {name: 3.0 / step, "tokens_per_second": 1234.5 + step, "memory_gb": 0.5, **split})
                if step % 20 == 0:
                    log(step, {"save_seconds": 0.25, "save_gb": 1.5})
                    log(step, {"heldout_loss": 3.3 / step})
                    events("saved", step, durable=True, error=None, save_seconds=0.25)
    config = {"config": {"lr": lr, "optim": {"beta": 0.9}, "name": mesh}, "facts": {"data": "abc"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_ranks(folder, hosts=("a", "a", "b"), work=(0.25, 0.5, 1.0), text="hang: rank 1 (a) makes no progress"):
    """What ranks leave: times at two log points, after some of another job with one rank less, and a hang's stacks."""
    lines = [{"step": 1, "hosts": ["c"], "work": [9.0], "wait": [9.0], "data": [9.0]}]
    for n in (1, 3):
        lines.append({"step": 10 * n, "hosts": list(hosts), "work": [n * x for x in work], "wait": [0.125] * 3})
        lines[-1]["data"] = [0.0] * 3
    (folder / "ranks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3, "ho\n')
    (folder / "stacks").mkdir()
    for rank in (0, 2, 10):
        (folder / "stacks" / f"rank-{rank}.txt").write_text(
            f"{text}\n\nThread 0x1:\n  File x.py, line {rank} in f{rank}"
        )
    with Events(folder / "events.jsonl") as events:
        events("hang", 40, text=text)
        events.active = False
    return folder


def test_ranks_and_stacks(tmp_path):
    run = read_run(write_ranks(write_run(tmp_path / "a")))
    assert run.outcome() == "hang" and any("ranks.jsonl: 1 line that cannot be read" in note for note in run.notes)
    times = rank_times(run)
    assert [(row.rank, row.host, row.work) for row in times] == [(2, "b", 2.0), (1, "a", 1.0), (0, "a", 0.5)]
    page = Page(report_page([run, read_run(write_run(tmp_path / "b"))]))
    rows = [page.cells[i : i + 4] for i in range(len(page.cells))]  # works, waits, data, of the median: of rank 2
    assert ["2", "0.125", "0", "2"] in rows and ["0.5", "0.125", "0", "0.5"] in rows
    assert {"rank-0.txt", "rank-2.txt", "rank-10.txt"} <= set(page.texts)
    assert any("line 10 in f10" in text for text in page.texts)
    assert "step 40: hang: rank 1 (a) makes no progress" in page.texts
    hostile = report_page([read_run(write_ranks(write_run(tmp_path / "c"), (HOSTILE,) * 3, text=HOSTILE))])
    assert not [tag for tag, _ in Page(hostile).tags if tag == "img"] and len(Page(hostile).scripts) == 2
    assert "one rank, or no two log points" in report_page([read_run(write_run(tmp_path / "d"))])


def numbers_of(text):
    """The numbers in a JSON value."""
    if isinstance(text, dict | list):
        return [n for part in (text.values() if isinstance(text, dict) else text) for n in numbers_of(part)]
    return [text] if isinstance(text, int | float) and not isinstance(text, bool) else []


def test_every_number_is_in_the_records(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=60, lr=0.2)]
    runs = [read_run(folder) for folder in folders]
    page = Page(report_page(runs))
    known = {number(n) for run in runs for n in numbers_of([*run.records, *run.events])}
    known |= {number(run.starts()) for run in runs}
    for run, folder in zip(runs, folders, strict=True):  # means of all but the first record of each start
        own = [r for r in read_metrics(folder / "metrics.jsonl") if "time_data" in r]
        later = [r for i, r in enumerate(own) if any(r["run"] == other["run"] for other in own[:i])]
        expected = {k: sum(r[f"time_{k}"] for r in later) / len(later) for k in ("data", "step", "save")}
        assert mean_split(run) == pytest.approx(expected)
        known |= {number(value) for value in expected.values()}
    assert page.cells and all(cell in known or cell == "" for cell in page.cells), set(page.cells) - known
    assert "3.3e-01" not in known and number(3.0 / 20) in known
    # The points that the script and the lines show are those of the records.
    data = json.loads(page.scripts[0])
    loss = next(chart for chart in data if chart["name"] == "loss")
    for run, folder in zip(("a", "b"), folders, strict=True):
        points = [
            tuple(p) for s in loss["series"] if (s["run"], s["name"]) == (run, "loss") for x in s["pieces"] for p in x
        ]
        assert points == [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]
    chart, lines = None, []
    for tag, attrs in page.tags:
        if tag == "svg":
            chart = attrs if attrs.get("aria-label") == "loss" else None
        if tag == "polyline" and chart and "stroke-dasharray" not in attrs:
            x0, sx, y0, sy = (float(chart[f"data-{key}"]) for key in ("x0", "sx", "y0", "sy"))
            pairs = [tuple(map(float, pair.split(","))) for pair in attrs["points"].split()]
            lines.append([((x - 64) / sx + x0, (216 - y) / sy + y0) for x, y in pairs])
    drawn = [s["pieces"] for s in loss["series"] if s["name"] == "loss"]
    for line, (piece,) in zip(lines, drawn, strict=True):
        assert line == [pytest.approx(point, abs=0.05) for point in piece]


def test_texts_of_a_run_are_texts(tmp_path):
    folder = tmp_path / re.sub("/", "", HOSTILE)
    write_run(folder, name=HOSTILE, mesh=HOSTILE)
    (folder / "config.json").write_text(json.dumps({"config": {HOSTILE: HOSTILE}, "facts": {}}))
    with Events(folder / "events.jsonl") as events:
        events("failed", 40, error=HOSTILE)
    run, plain = read_run(folder), read_run(write_run(tmp_path / "b"))
    page, clean = Page(report_page([run, plain], HOSTILE)), Page(report_page([plain, plain]))
    assert len(page.scripts) == len(clean.scripts) == 2 and page.scripts[1] == clean.scripts[1]
    assert "<" not in page.scripts[0] and HOSTILE in page.texts
    assert any(series["name"] == HOSTILE for chart in json.loads(page.scripts[0]) for series in chart["series"])
    assert not [tag for tag, attrs in page.tags if tag == "img" or any(key.startswith("on") for key in attrs)]


def test_nothing_is_loaded(tmp_path):
    page = Page(report_page([read_run(write_run(tmp_path / "a"))]))
    assert not [attrs for _, attrs in page.tags if {"src", "href", "data", "action"} & attrs.keys()]
    policies = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and policies[0].startswith("default-src 'none'")


def test_runs_that_are_not_finished(tmp_path):
    empty, torn, killed = tmp_path / "empty", write_run(tmp_path / "torn"), write_run(tmp_path / "killed")
    empty.mkdir()
    (torn / "metrics.jsonl").write_text(
        (torn / "metrics.jsonl").read_text() + '{"step": 99, "lo\n[1]\n7\n{"step": "x"}'
    )
    (torn / "config.json").write_text('{"config": {"lr"')
    (torn / "events.jsonl").write_bytes((torn / "events.jsonl").read_bytes() + b'{"event": \xff\x00')
    with Events(killed / "events.jsonl") as events:
        events.started(20)
        events.active = False  # killed: nothing more is written
    odd = tmp_path / "odd" / "metrics.jsonl"
    log = JsonLines(odd)
    for step, loss in ((1, 2.0), (2, math.nan), (3, math.inf), (2, 1.5), (3, 1.25)):  # steps that go back
        log.write(step, {"loss": loss})
    log.close()
    runs = [read_run(path) for path in (empty, torn, killed, odd.parent)]
    text = report_page(runs)
    Page(text)
    assert runs[0].outcome() == "no events were written" and runs[0].records == ()
    assert runs[2].outcome() == "no end was written: killed, or still running"
    assert runs[1].outcome() == "ended" and any("4 lines that cannot be read" in note for note in runs[1].notes)
    assert any("config.json: cannot be read" in note for note in runs[1].notes)
    assert runs[3].series("loss") == [[(1, 2.0)], [(2, 1.5), (3, 1.25)]]
    assert "loss is not finite in 2 of its records" in text
    assert read_run(odd).name == "metrics.jsonl" and len(read_run(odd).records) == len(runs[3].records) == 5
    with pytest.raises(ValueError, match="got nothing there, wanted the folder of a run"):
        read_run(tmp_path / "none")


def test_the_configurations_are_compared(tmp_path):
    runs = [read_run(write_run(tmp_path / "a", lr=0.1)), read_run(write_run(tmp_path / "b", lr=0.2))]
    assert differences(runs) == [("lr", [0.1, 0.2])]
    assert "Nothing differs" in report_page([runs[0], runs[0]])


def test_the_command(tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    assert report.main([str(folder), str(folder), "--title", "two"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert "<title>two</title>" in (folder / "report.html").read_text()
    assert report.main([str(tmp_path / "none")]) == 2
    assert "got nothing there" in capsys.readouterr().err


def test_ticks_and_thinning():
    for low, high in ((0, 1), (1e-9, 3e-9), (-5.5, 1e6), (3.0, 3.1), (1e9, 1e9 + 1)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 8 and all(low - 1e-9 * abs(low) <= t <= high * (1 + 1e-9) for t in found), found
    points = [(i, math.sin(i / 50)) for i in range(100_000)]
    points[777] = (777, 50.0)
    few = thinned(points)
    assert len(few) <= 802 and (777, 50.0) in few and few == sorted(few) and set(few) <= set(points)


def test_files_that_cannot_be_read_are_notes(tmp_path):
    names = ("metrics.jsonl", "config.json", "ranks.jsonl", "events.jsonl")
    for name in names:
        (tmp_path / name).mkdir()
    run = read_run(tmp_path)
    assert all(any(note.startswith(name) for note in run.notes) for name in names) and report_page([run])


@pytest.mark.long
def test_a_browser_shows_it(tmp_path):
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        raise unittest.SkipTest("no Chromium on this machine (Debian: apt-get install chromium-headless-shell)")
    folder = write_run(tmp_path / "a")
    write_run(tmp_path / "b", steps=60)
    watch = (
        "<script>window.onerror = (e) => { document.title = 'error ' + e };"
        "document.addEventListener('securitypolicyviolation', () => { document.title = 'blocked' });</script>"
    )
    page = report_page([read_run(folder), read_run(tmp_path / "b")], "a page")
    # The script has run when it has hidden a run, and shown a point.
    act = (
        "<script>document.querySelector('input[data-run]').click();"
        "const s = document.querySelector('svg.chart'), dot = s.querySelector('g.r1 circle');"
        "const c = dot.getBoundingClientRect();"
        "s.dispatchEvent(new MouseEvent('mousemove', {clientX: c.left + 3, clientY: c.top + 3}));</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(page.replace("<head>", "<head>" + watch).replace("</body>", act + "</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "<title>a page</title>" in done.stdout, (done.stdout[:300], done.stderr[-500:])
    assert 'class="run r0" data-name="loss" style="display: none;"' in done.stdout
    assert re.search(r'<div class="tip" style="display: block[^>]*>b (heldout_)?loss, step \d+: ', done.stdout)
