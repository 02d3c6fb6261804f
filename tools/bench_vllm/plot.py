"""The comparison as a picture. This is the one file that imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvfs.errors import UsageError
from kvfs.tools.bench_vllm.report import Result

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise UsageError("--plot draws with matplotlib: pip install 'kvfs[plots]', or pip install matplotlib") from error

_PASS_COLORS = ("#1f4e79", "#8fb8de")
_SOURCES = {"computed": "#b5482f", "engine": "#9a9a9a", "ram": "#2f7d4f", "nvme": "#e0a526"}


def draw(found: Result, path: Path) -> None:
    """Write a PNG: time to first token, input throughput, and where the tokens came from, run by run."""
    figure = Figure(figsize=(13, 4.6), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    ttft, speed, sources = figure.subplots(1, 3)
    _bars(ttft, found, lambda each: each.ttft_ms.mean / 1000, lambda each: each.ttft_ms.p99 / 1000)
    ttft.set_title("time to first token, s: mean, p99 as a line", fontsize=10)
    _bars(speed, found, lambda each: each.input_tokens_s)
    speed.set_title("input tokens a second", fontsize=10)
    speed.legend(loc="upper left", frameon=False)
    _stacks(sources, found)
    sources.set_title("prompt tokens, thousands, by where their KV was", fontsize=10)
    work = found.plan.workload
    figure.suptitle(
        f"kvfs bench vllm: {work.num_groups} groups × {work.prompts_per_group} prompts, {work.system_prompt_len} + "
        f"{work.question_len} tokens, concurrency {work.max_concurrency}, engine cache for {found.plan.engine_prefixes} "
        "prefixes"
    )
    figure.savefig(path, format="png")


def _bars(axes: Any, found: Result, height: Any, line_to: Any = None) -> None:
    """A group of bars for each run, one for each pass."""
    width = 0.8 / found.plan.num_passes
    for number in range(1, found.plan.num_passes + 1):
        passes = [each for each in found.passes if each.number == number]
        places = [found.plan.runs.index(each.run) + (number - 1) * width for each in passes]
        heights = [height(each) for each in passes]
        color = _PASS_COLORS[(number - 1) % len(_PASS_COLORS)]
        drawn = axes.bar(places, heights, width * 0.95, color=color, label=f"pass {number}")
        if line_to is not None:
            axes.vlines(places, heights, [line_to(each) for each in passes], color=color, linewidth=1)
        labels = axes.bar_label(drawn, [_short(value) for value in heights], fontsize=7, padding=3)
        for label in labels:
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    _name_runs(axes, found, (found.plan.num_passes - 1) * width / 2)


def _stacks(axes: Any, found: Result) -> None:
    width = 0.8 / found.plan.num_passes
    places = [found.plan.runs.index(each.run) + (each.number - 1) * width for each in found.passes]
    bottoms = [0.0] * len(places)
    for source, color in _SOURCES.items():
        heights = [getattr(each.counts, source) / 1000 for each in found.passes]
        axes.bar(places, heights, width * 0.95, bottom=bottoms, color=color, label=source)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylim(0, max(bottoms) * 1.2)
    axes.legend(loc="upper center", ncols=len(_SOURCES), frameon=False, fontsize=8)
    _name_runs(axes, found, (found.plan.num_passes - 1) * width / 2)


def _name_runs(axes: Any, found: Result, middle: float) -> None:
    axes.set_xticks([place + middle for place in range(len(found.plan.runs))], found.plan.runs)
    axes.spines[["top", "right"]].set_visible(False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
