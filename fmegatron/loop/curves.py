"""Pictures of runs, from their JSON lines."""

import os
from collections.abc import Mapping

from fmegatron.loop.loggers import read_metrics

COLOURS = ("#4C72B0", "#DD8452", "#55A868", "#C44E52", "#8172B3")


def plot_loss(metrics: str | os.PathLike, picture: str | os.PathLike, title: str = "") -> None:
    """Draw the losses of a metrics.jsonl into a PNG: a line for each start of the run, dots for held-out evaluations.

    Records with `loss` are the training curve, those with `heldout_loss` the dots. Needs matplotlib.
    Raises ValueError when the file holds no loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    losses = [record for record in records if "loss" in record]
    if not losses:
        raise ValueError(f"{metrics}: got no record with a loss, wanted at least one; did the run reach a log point?")
    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.add_subplot()
    runs = sorted({record["run"] for record in losses})
    for run in runs:
        colour = COLOURS[run % len(COLOURS)]
        own = [record for record in losses if record["run"] == run]
        mesh = own[0].get("mesh", "")
        name = "from the start" if run == 0 else f"resumed at step {own[0]['step'] - 1}"
        axes.plot(
            [record["step"] for record in own],
            [record["loss"] for record in own],
            color=colour,
            linewidth=1.4,
            label=f"training, {name}" + (f" on {mesh}" if mesh else ""),
        )
    heldout = [record for record in records if "heldout_loss" in record]
    if heldout:
        last = heldout[-1]
        axes.plot(
            [record["step"] for record in heldout],
            [record["heldout_loss"] for record in heldout],
            "o",
            color="black",
            markersize=5,
            label=f"held-out, last {last['heldout_loss']:.3f}",
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_png(os.fspath(picture))


def plot_losses(runs: Mapping[str, str | os.PathLike], picture: str | os.PathLike, title: str = "") -> None:
    """Draw the losses of several runs, by name their metrics.jsonl, into one PNG: lines of training, dots of held-out.

    Needs matplotlib. Raises ValueError when a file holds no loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.add_subplot()
    for i, (name, metrics) in enumerate(runs.items()):
        colour, records = COLOURS[i % len(COLOURS)], read_metrics(metrics)
        for key, style in (("loss", "-"), ("heldout_loss", "o")):
            points = [(record["step"], record[key]) for record in records if key in record]
            if key == "loss" and not points:
                raise ValueError(
                    f"{metrics}: got no record with a loss, wanted at least one; did it reach a log point?"
                )
            last = f", last {points[-1][1]:.3f}" if points else ""
            label = f"{name}, training" if key == "loss" else f"{name}, held-out{last}"
            if points:
                axes.plot(*zip(*points, strict=True), style, color=colour, label=label, linewidth=1.4, markersize=5)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_png(os.fspath(picture))
