"""The page of a report: one HTML text with its own pictures, style and script; it loads nothing and sends nothing."""

import json
import math
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from fmegatron.loop.meter import split_of
from fmegatron.loop.report.figures import lines, number, stacked, timeline
from fmegatron.loop.report.ranks import stacks, stragglers
from fmegatron.loop.report.read import Recorded, differences
from fmegatron.loop.report.tables import key, table

FIRST = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "seconds", "mfu", "memory_gb", "joules")
_DOTS = ("heldout", "eval", "valid", "resumed")  # what is measured now and then is drawn as dots
_MOST_EVENTS = 200  # of one run in the table; the newest
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:0 auto;max-width:1320px;padding:12px 20px;color:#1c2430;background:#fff}
h1{font-size:22px;margin:8px 0}h2{font-size:17px;margin:26px 0 8px;border-bottom:1px solid #d8dee6;padding-bottom:3px}
h3{font-size:13px;margin:0 0 2px}table{border-collapse:collapse;font-size:13px}
th,td{text-align:left;padding:3px 10px 3px 0;vertical-align:top;border-bottom:1px solid #edf0f4;
overflow-wrap:break-word;max-width:420px}th{white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.wide,pre{overflow-x:auto}.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(520px,1fr));gap:16px}
figure{margin:0}svg{width:100%;height:auto;max-width:680px}svg text{font:12px system-ui,sans-serif;fill:#1c2430}
svg .tick{font-size:11px;fill:#5f6b7a}svg .grid{stroke:#e6eaf0}.key{display:inline-block;width:11px;height:11px;
margin-right:6px;border-radius:2px}label{margin-right:14px}.note{color:#8a4b00}.tip{position:fixed;display:none;
background:#1c2430;color:#fff;padding:2px 7px;border-radius:3px;font-size:12px;pointer-events:none}
"""

# Runs are switched on and off, and the nearest point under the pointer is shown.
_SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent), tip = document.querySelector(".tip");
const hidden = new Set();
for (const box of document.querySelectorAll("input[data-run]")) box.addEventListener("change", () => {
  if (box.checked) hidden.delete(+box.dataset.run); else hidden.add(+box.dataset.run);
  for (const g of document.querySelectorAll("g.run.r" + box.dataset.run)) g.style.display = box.checked ? "" : "none";
});
document.querySelectorAll("svg.chart").forEach((svg, i) => {
  svg.addEventListener("mousemove", (e) => {
    const box = svg.getBoundingClientRect(), k = 620 / box.width, d = svg.dataset;
    const px = (e.clientX - box.left) * k, py = (e.clientY - box.top) * k;
    let best = null, least = 900;
    for (const s of data[i].series) if (!hidden.has(s.at)) for (const piece of s.pieces) for (const [x, y] of piece) {
      const dx = 64 + (x - d.x0) * d.sx - px, dy = 216 - (y - d.y0) * d.sy - py, far = dx * dx + dy * dy;
      if (far < least) { least = far; best = [s, x, y]; }
    }
    tip.style.display = best ? "block" : "none";
    if (!best) return;
    tip.textContent = best[0].run + " " + best[0].name + ", step " + best[1] + ": " + best[2];
    tip.style.left = e.clientX + 14 + "px"; tip.style.top = e.clientY + 10 + "px";
  });
  svg.addEventListener("mouseleave", () => { tip.style.display = "none"; });
});
"""


def report_page(runs: Sequence[Recorded], title: str = "") -> str:
    """The HTML of a page about some runs, compared where there are several. Every text of theirs is escaped."""
    runs = list(runs)
    title = title or ", ".join(run.name for run in runs)
    charts, data = _charts(runs)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _switches(runs),
        "<h2>Summary</h2>",
        _summary(runs),
        _notes(runs),
        "<h2>Metrics</h2>",
        f'<div class="charts">{charts}</div>' if charts else "<p>No numbers were recorded.</p>",
        "<h2>Where the time of a step goes</h2>",
        _split(runs),
        "<h2>Ranks</h2>",
        stragglers(runs),
        "<h2>Hangs</h2>",
        stacks(runs),
        "<h2>Checkpoints</h2>",
        _checkpoints(runs),
        "<h2>Events</h2>",
        _events(runs),
        "<h2>Configuration</h2>",
        _configuration(runs),
    ]
    # In a script element only "<" could end it.
    numbers = json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "").replace("\u2029", "")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *parts,
            '<div class="tip"></div>',
            f'<script type="application/json" id="data">{numbers}</script>',
            f"<script>{_SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _switches(runs: list[Recorded]) -> str:
    boxes = [
        f'<label><input type="checkbox" checked data-run="{i}"> {key(i)}{escape(run.name)}</label>'
        for i, run in enumerate(runs)
    ]
    return f"<p>{''.join(boxes)}</p>"


def _summary(runs: list[Recorded]) -> str:
    metrics = ("loss", "heldout_loss", "tokens_per_second", "mfu", "memory_gb")
    metrics = [name for name in metrics if any(run.last(name) is not None for run in runs)]
    head = ["run", "outcome", "starts", "last step", *(f"last {name}" for name in metrics), "mesh", "device", "peak"]
    rows = []
    for run in runs:
        begun = next((e for e in reversed(run.events) if e["event"] in ("started", "resumed")), {})
        mesh = begun.get("mesh") or next((r["mesh"] for r in reversed(run.records) if "mesh" in r), "")
        about = [mesh, begun.get("device") or "", begun.get("peak") or ""]
        rows.append([run.name, run.outcome(), run.starts(), run.last("step"), *map(run.last, metrics), *about])
    return table(head, rows, list(range(len(runs))))


def _notes(runs: list[Recorded]) -> str:
    found = [f"<li>{escape(run.name)}: {escape(note)}</li>" for run in runs for note in run.notes]
    for run in runs:
        for name in run.names():
            odd = sum(isinstance(r.get(name), float) and not math.isfinite(r[name]) for r in run.records)
            if odd:
                text = f"{name} is not finite in {odd} of its records, which are not drawn"
                found.append(f"<li>{escape(run.name)}: {escape(text)}</li>")
    return f'<ul class="note">{"".join(found)}</ul>' if found else ""


def _charts(runs: list[Recorded]) -> tuple[str, list[dict]]:
    """(figures, the numbers that they show)."""
    names = {name: None for run in runs for name in run.names() if not name.startswith("time_")}
    held = [name for name in names if name.startswith("heldout") and name.endswith("loss")]
    order = [name for name in FIRST if name in names]
    order += [name for name in names if name not in order and (name not in held or "loss" not in names)]
    out, data = [], []
    for name in order:
        series, shown = [], []
        for i, run in enumerate(runs):
            for own in [name, *(held if name == "loss" else ())]:
                pieces = run.series(own)
                if pieces:
                    dots = own.startswith(_DOTS) and own != name or name.startswith(_DOTS)
                    series.append((i, own, pieces, dots))
                    shown.append({"at": i, "run": run.name, "name": own, "pieces": pieces})
        if series:
            title = name if name != "loss" or not held else f"loss; dots: {', '.join(held)}"
            figure = lines(name, series)
            out.append(f"<figure><h3>{escape(title)}</h3>{figure}</figure>")
            data.append({"name": name, "series": shown})
    return "\n".join(out), data


def mean_split(run: Recorded) -> dict[str, float]:
    """Mean seconds per step by section over the records of a run, but for the first of each start, which compiles."""
    found, seen = [], set()
    for record in run.records:
        split, start = split_of(record), record.get("run", 0)
        if split:
            found += [split] if start in seen else []
            seen.add(start)
    if not found:
        return {}
    return {name: sum(split.get(name, 0.0) for split in found) / len(found) for name in found[0]}


def _split(runs: list[Recorded]) -> str:
    splits = [(i, run.name, mean_split(run)) for i, run in enumerate(runs)]
    splits = [row for row in splits if row[2]]
    if not splits:
        return "<p>Not recorded, or no more than the first log point of a start.</p>"
    names = list(splits[0][2])
    rows = [[name, *(parts.get(part) for part in names)] for _, name, parts in splits]
    shown = table(["run", *(f"{part}, s per step" for part in names)], rows, [i for i, _, _ in splits])
    exposed = [(run.name, run.last("time_exposed")) for run in runs]
    said = "".join(
        f"<p>{escape(name)}: waited for communication: {number(seconds)} s per step (last measured)</p>"
        for name, seconds in exposed
        if seconds is not None
    )
    return f'<div class="charts"><figure>{stacked("Split of a step", splits)}</figure></div>{shown}{said}'


def _marks(run: Recorded) -> list[tuple[float, float, str, str]]:
    """What a timeline shows of a run: (begin, end, kind, words)."""
    found = []
    for event in run.events:
        at, kind, step = float(event["time"]), event["event"], event["step"]
        if kind == "saved":
            seconds = event.get("save_seconds") or event.get("restore_seconds") or 0.0
            failed = event.get("error") is not None
            kind = "save failed" if failed else "saved" if "save_seconds" in event else "restored"
            text = f"step {step}, {number(seconds)} s" + (f": {event['error']}" if failed else "")
            found.append((at - seconds, at, kind, f"{kind}: {text}"))
        elif kind != "profile":
            found.append((at, at, kind, f"{kind} at step {step}"))
    if not run.events:
        for record in run.records:
            if "save_seconds" in record and "time" in record:
                at, seconds = record["time"], record["save_seconds"]
                found.append((at - seconds, at, "saved", f"saved: step {record['step']}, {number(seconds)} s"))
    return found


def _checkpoints(runs: list[Recorded]) -> str:
    rows = [(i, run.name, _marks(run)) for i, run in enumerate(runs)]
    rows = [row for row in rows if row[2]]
    if not rows:
        return "<p>None were recorded.</p>"
    figure = timeline("Checkpoints over time", rows)
    legend = (
        "<p>Bars: saves, from the call to the disk. Triangles: where a process began, went on, stopped or ended.</p>"
    )
    return f'<div class="charts"><figure>{figure}</figure></div>{legend}'


def _events(runs: list[Recorded]) -> str:
    rows, keys, left_out = [], [], 0
    for i, run in enumerate(runs):
        left_out += max(0, len(run.events) - _MOST_EVENTS)
        for event in run.events[-_MOST_EVENTS:]:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event["time"] % 253402300800))
            more = {k: v for k, v in event.items() if k not in ("time", "event", "step") and v is not None}
            rows.append(
                [run.name, when, event["event"], event["step"], json.dumps(more, ensure_ascii=False) if more else ""]
            )
            keys.append(i)
    if not rows:
        return "<p>None were recorded.</p>"
    more = f"<p>{left_out} earlier ones are in events.jsonl.</p>" if left_out else ""
    return table(["run", "UTC", "event", "step", ""], rows, keys) + more


def _configuration(runs: list[Recorded]) -> str:
    out = []
    if len(runs) > 1:
        rows = [[name, *map(_setting, values)] for name, values in differences(runs)]
        out.append("<p>What differs:</p>" if rows else "<p>Nothing differs.</p>")
        if rows:
            out.append(table(["", *(run.name for run in runs)], rows))
    for run in runs:
        rows = [[name, _setting(value)] for name, value in (run.config or {}).items()]
        inside = table(["", "value"], rows) if rows else "<p>None was recorded.</p>"
        out.append(f"<details><summary>{escape(run.name)}: {escape(run.path)}</summary>{inside}</details>")
    return "\n".join(out)


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
