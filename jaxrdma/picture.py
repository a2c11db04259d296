"""A timeline as a picture that stands still: a row for each process, and who waited for whom. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrdma.critical import Step
from jaxrdma.errors import ConfigError
from jaxrdma.timeline import PARTS, Slice

# Told apart without colour vision too: after Okabe and Ito.
_COLOURS = dict(zip(PARTS, ("#999999", "#0072B2", "#E69F00", "#D55E00", "#009E73"), strict=True))
_WAITING = "#e8e8e8"
_FORMATS = (".png", ".svg", ".pdf")
_LABELS = 6  # so many steps can be written beside each other


def draw(slices: Sequence[Slice], paths: Sequence[Step], file: str) -> None:
    """Write the picture: parts of steps as bars, the end of each step as a line, the latest with what made them late.

    An arrow leads from that one to whoever waited for it longest.

    **Raises:** `ConfigError` if matplotlib is missing, the file is of no known kind or cannot be written.
    """
    if Path(file).suffix not in _FORMATS:
        raise ConfigError(f"--picture {file}: expected a name that ends in {', '.join(_FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--picture needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    rows = {who: row for row, who in enumerate(sorted({(s.role, s.index) for s in slices}))}
    begin = min((s.begin for s in slices), default=0)
    figure = Figure(figsize=(12, 1.8 + 0.55 * max(1, len(rows))), layout="constrained")
    axes: Any = figure.subplots()
    for (role, index), row in rows.items():
        if role == "worker":
            steps = [((b - begin) / 1e6, (e - b) / 1e6) for b, e in _exchanges(slices, index)]
            axes.broken_barh(steps, (row - 0.4, 0.8), color=_WAITING, linewidth=0, zorder=0.5)
    axes.plot([], [], color=_WAITING, linewidth=6, label="in the step, or waits")
    for part in PARTS:
        for who, row in rows.items():
            bars = _merged([s for s in slices if s.part == part and (s.role, s.index) == who])
            spans = [((b - begin) / 1e6, (e - b) / 1e6) for b, e in bars]
            # What goes on at one time lies in lanes of one row.
            lane = row - 0.4 + 0.16 * PARTS.index(part)
            axes.broken_barh(spans, (lane, 0.16), color=_COLOURS[part], linewidth=0)
        axes.plot([], [], color=_COLOURS[part], linewidth=6, label=part)
    marked = sorted(paths, key=lambda p: p.late_seconds)[-_LABELS:]
    for path in paths:
        axes.axvline((path.end_ns - begin) / 1e6, color="#cccccc", linewidth=0.8, zorder=0)
    for path in marked:
        _mark(axes, path, rows, begin)
    axes.set_yticks(list(rows.values()), [f"{role} {index}" for role, index in rows])
    axes.set_ylim(len(rows) - 0.4, -1.4)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=len(PARTS) + 1, frameon=False)
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise ConfigError(f"--picture {file}: {error.strerror}") from None


def _exchanges(slices: Sequence[Slice], worker: int) -> list[tuple[int, int]]:
    """From the first thing that it gave in a step to the last that it got."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for each in slices:
        if (each.role, each.index) == ("worker", worker) and each.part != "compute":
            key = each.flow, each.step
            begin, end = found.get(key, (each.begin, each.end))
            found[key] = min(begin, each.begin), max(end, each.end)
    return list(found.values())


def _merged(slices: Sequence[Slice]) -> list[tuple[int, int]]:
    """Times at which any of them was."""
    found: list[tuple[int, int]] = []
    for each in sorted(slices, key=lambda s: s.begin):
        if found and each.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], each.end)
        else:
            found.append((each.begin, each.end))
    return found


def _mark(axes: Any, path: Step, rows: dict[tuple[str, int], int], begin: int) -> None:
    end = (path.end_ns - begin) / 1e6
    text = f"step {path.step}, {path.seconds * 1e3:.1f} ms\n{path.text}"
    axes.text(end, -0.6, text, ha="right", va="bottom", fontsize=7)
    culprit = ("server", path.server) if path.worker < 0 else ("worker", path.worker)
    others = [row for who, row in rows.items() if who[0] == "worker" and who != culprit]
    if culprit in rows and others:
        # All the others waited; to the one that is farthest the arrow passes them all.
        row = rows[culprit]
        far = max(others, key=lambda other: abs(other - row))
        arrow = {"arrowstyle": "->", "color": "#CC79A7", "linewidth": 1.4}
        axes.annotate("", (end, far), (end, row), arrowprops=arrow)
