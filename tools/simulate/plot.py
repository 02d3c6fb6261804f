"""What a simulation found, as pictures. This is the one file of it that imports matplotlib."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvfs.errors import UsageError
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.traces import Trace

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise UsageError("--plot draws with matplotlib: pip install 'kvfs[plots]', or pip install matplotlib") from error

_COLORS = ("#1f4e79", "#2f7d4f", "#b5482f", "#e0a526", "#7a4f9a", "#4aa3a3", "#a3694a", "#808080")
_OPTIMUM_COLOR = "#111111"
_NUM_SPANS = 60  # of time, in which a rate is taken
_NUM_BARS = 40
Tallies = Mapping[str, Tally]
Curves = Mapping[str, Sequence[tuple[float, float]]]


def check(directory: Path) -> None:
    """Make the directory, and see that files can be written there. Raises UsageError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}") from error


def draw(directory: Path, trace: Trace, tallies: Tallies, curves: Curves, capacity: float, what: str) -> list[Path]:
    """Write all PNGs; returns their paths.

    `curves` are (share of the different chunks, hit ratio) by policy, `capacity` is the share that was simulated, `what` says
    that of which tier. Raises UsageError if it cannot write.
    """
    pictures: dict[str, Callable[[Any], None]] = {
        "hit-rate-over-time": lambda axes: _over_time(axes, trace, tallies),
        "hits-of-requests": lambda axes: _hit_shares(axes, trace, tallies),
        "where-hits-end": lambda axes: _ends(axes, trace, tallies),
        "chunk-reuse": lambda axes: _reuse(axes, trace),
        "request-length": lambda axes: _lengths(axes, trace),
        "reuse-distance": lambda axes: _distances(axes, trace),
        "capacity": lambda axes: _capacity(axes, curves, capacity, what),
    }
    written = []
    try:
        for name, draw_on in pictures.items():
            figure = Figure(figsize=(8, 4.8), layout="constrained", dpi=130)
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            draw_on(axes)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            written.append(directory / f"{name}.png")
            figure.savefig(written[-1], format="png")
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}") from error
    return written


def _color(policies: Sequence[str], policy: str) -> str:
    others = [name for name in policies if name != "opt"]
    return _OPTIMUM_COLOR if policy == "opt" else _COLORS[others.index(policy) % len(_COLORS)]


def _style(policy: str) -> str:
    return "--" if policy == "opt" else "-"


def _found(tally: Tally) -> list[int]:
    return [ram + nvme for ram, nvme in zip(tally.ram, tally.nvme, strict=True)]


def _percent(axes: Any) -> None:
    axes.set_ylim(0, 102)
    axes.set_ylabel("per cent")


def _over_time(axes: Any, trace: Trace, tallies: Tallies) -> None:
    begin = trace.requests[0].at_s
    unit, name = (
        (3600.0, "hours") if trace.seconds > 7200 else (60.0, "minutes") if trace.seconds > 120 else (1.0, "seconds")
    )
    width = trace.seconds / _NUM_SPANS or 1.0
    for policy, tally in tallies.items():
        asked, found = [0] * (_NUM_SPANS + 1), [0] * (_NUM_SPANS + 1)
        for request, hits in zip(trace.requests, _found(tally), strict=False):
            span = min(int((request.at_s - begin) / width), _NUM_SPANS)
            asked[span] += len(request.chunks)
            found[span] += hits
        spans = [span for span, number in enumerate(asked) if number]
        axes.plot(
            [(span + 0.5) * width / unit for span in spans], [100 * found[span] / asked[span] for span in spans],
            _style(policy), color=_color([*tallies], policy), label=policy, linewidth=1.5,
        )  # fmt: skip
    axes.set_title(f"chunks found, of those asked for in each {_seconds(width)}")
    axes.set_xlabel(f"{name} since the first request")
    _percent(axes)
    axes.legend(frameon=False)


def _seconds(value: float) -> str:
    return f"{value / 3600:.1f} h" if value >= 7200 else f"{value / 60:.1f} min" if value >= 120 else f"{value:.3g} s"


def _hit_shares(axes: Any, trace: Trace, tallies: Tallies) -> None:
    for policy, tally in tallies.items():
        pairs = zip(trace.requests, _found(tally), strict=False)
        shares = sorted(100 * hits / len(request.chunks) for request, hits in pairs)
        _cumulated(axes, shares, [*tallies], policy)
    axes.set_title("how much of its prompt a request finds")
    axes.set_xlabel("found of the prompt, per cent")
    axes.set_ylabel("requests that find at most so much, per cent")
    axes.set_ylim(0, 102)
    axes.legend(frameon=False, loc="lower right")


def _ends(axes: Any, trace: Trace, tallies: Tallies) -> None:
    per_chunk = [trace.blocks(trace.sources[request.chunks[0]], 1)[0] for request in trace.requests]
    for policy, tally in tallies.items():
        ends = sorted(hits * each for hits, each in zip(_found(tally), per_chunk, strict=False))
        _cumulated(axes, ends, [*tallies], policy)
    longest = sorted(len(request.chunks) * each for request, each in zip(trace.requests, per_chunk, strict=True))
    axes.plot(*_steps(longest), ":", color="#999999", label="end of the prompt")
    axes.set_xscale("symlog", linthresh=trace.tokens_per_chunk)
    axes.set_xlim(0, None)
    axes.set_title("where in the prompt hits end")
    axes.set_xlabel("tokens from the beginning")
    axes.set_ylabel("requests whose hits end before, per cent")
    axes.set_ylim(0, 102)
    axes.legend(frameon=False, loc="lower right")


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """A cumulated distribution, as the points of a line."""
    places = sorted(set(values))
    return [*places], [100 * bisect_right(values, place) / len(values) for place in places]


def _cumulated(axes: Any, values: Sequence[float], policies: Sequence[str], policy: str) -> None:
    if values:
        axes.plot(*_steps(values), _style(policy), color=_color(policies, policy), label=policy, drawstyle="steps-post")


def _reuse(axes: Any, trace: Trace) -> None:
    """Chunks by how often they are asked for, and what part of all references they make."""
    times = [0] * trace.num_chunks
    for request in trace.requests:
        for chunk in request.chunks:
            times[chunk] += 1
    most = max(times).bit_length()
    chunks, references = [0] * (most + 1), [0] * (most + 1)
    for number in times:
        chunks[number.bit_length()] += 1
        references[number.bit_length()] += number
    places = range(1, most + 1)
    labels = ["1" if place == 1 else f"{1 << (place - 1)}–{(1 << place) - 1}" for place in places]
    axes.bar(
        [place - 0.2 for place in places], [100 * chunks[place] / trace.num_chunks for place in places],
        0.38, color=_COLORS[0], label=f"of {trace.num_chunks:,} different chunks",
    )  # fmt: skip
    axes.bar(
        [place + 0.2 for place in places], [100 * references[place] / sum(times) for place in places],
        0.38, color=_COLORS[3], label=f"of {sum(times):,} that were asked for",
    )  # fmt: skip
    axes.set_xticks([*places], labels, rotation=30 if most > 8 else 0)
    axes.set_title("how often a chunk is asked for")
    axes.set_xlabel("times")
    axes.set_ylabel("per cent")
    axes.legend(frameon=False)


def _lengths(axes: Any, trace: Trace) -> None:
    lengths = [request.tokens for request in trace.requests]
    width = max(1, -(-max(lengths) // _NUM_BARS))
    bars = [0] * (max(lengths) // width + 1)
    for length in lengths:
        bars[length // width] += 1
    axes.bar([(place + 0.5) * width for place in range(len(bars))], bars, width * 0.92, color=_COLORS[0])
    ordered = sorted(lengths)
    for share, name in ((0.5, "median"), (0.99, "p99")):
        value = ordered[min(int(share * len(ordered)), len(ordered) - 1)]
        axes.axvline(
            value,
            color=_COLORS[2],
            linewidth=1,
            linestyle="--" if share > 0.5 else "-",
            label=f"{name}: {value:,} tokens",
        )
    axes.set_title("how long prompts are")
    axes.set_xlabel("tokens")
    axes.set_ylabel("requests")
    axes.legend(frameon=False)


def _distances(axes: Any, trace: Trace) -> None:
    """Between two uses of a chunk, how many other different chunks are used: what a cache by last use must hold."""
    shares = _cumulated_distances(trace)
    total = trace.num_references
    axes.plot([distance for distance, _ in shares], [100 * number / total for _, number in shares], color=_COLORS[0])
    axes.set_xscale("log")
    axes.set_title("reuse distance: different chunks asked for between two uses of one")
    axes.set_xlabel("chunks")
    axes.set_ylabel("references used again within so many, per cent")
    axes.set_ylim(0, 102)


def _cumulated_distances(trace: Trace) -> list[tuple[int, int]]:
    """(distance, references with at most that), in powers of two. A Fenwick tree of the last use of each chunk."""
    size = trace.num_references + 1
    tree = [0] * (size + 1)
    last = [0] * trace.num_chunks
    counts = [0] * (trace.num_chunks.bit_length() + 1)
    now = num_seen = 0
    for request in trace.requests:
        for chunk in request.chunks:
            now += 1
            before = last[chunk]
            if before:
                place, older = before, 0
                while place:
                    older += tree[place]
                    place &= place - 1
                counts[(num_seen - older).bit_length()] += 1
                _add(tree, before, -1)
            else:
                num_seen += 1
            last[chunk] = now
            _add(tree, now, 1)
    return [(1 << power, number) for power, number in enumerate(accumulate(counts))]


def _add(tree: list[int], place: int, amount: int) -> None:
    while place < len(tree):
        tree[place] += amount
        place += place & -place


def _capacity(axes: Any, curves: Curves, capacity: float, what: str) -> None:
    for policy, points in curves.items():
        axes.plot(
            [100 * share for share, _ in points], [100 * ratio for _, ratio in points], _style(policy),
            color=_color([*curves], policy), label=policy, marker="o", markersize=3,
        )  # fmt: skip
    axes.axvline(
        100 * capacity, color="#999999", linewidth=1, linestyle=":", label=f"as simulated, {100 * capacity:.3g} %"
    )
    axes.set_xscale("log")
    shares = [share for share, _ in next(iter(curves.values()), ())]
    axes.set_xticks([100 * share for share in shares], [f"{100 * share:.3g}" for share in shares])
    axes.minorticks_off()
    axes.set_title(f"chunks found, by the size of the cache ({what})")
    axes.set_xlabel("room, per cent of the trace's different chunks")
    _percent(axes)
    axes.legend(frameon=False)
