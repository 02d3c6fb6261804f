"""The command: what is asked of whom; a bar while it lasts, a table, JSON or a picture at the end."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from kvfs.errors import UsageError
from kvfs.tools.bench_vllm import report
from kvfs.tools.bench_vllm.measuring import measure
from kvfs.tools.bench_vllm.results import Pass
from kvfs.tools.bench_vllm.runs import CHUNK_TOKENS, ITEM_BYTES, MEANING, Plan
from kvfs.tools.bench_vllm.workload import Workload
from kvfs.tools.demo import model as demo_model
from kvfs.tools.demo_vllm.finding import VERSIONS, installed_vllm, is_known
from kvfs.tools.environments import chosen_python
from kvfs.tools.progress import step_bar

EXAMPLES = """
kvfs bench vllm

The whole comparison: tens of minutes on two cores, 2 GiB of disk below the current directory, 6 GiB of memory.

kvfs bench vllm --num-groups 3 --prompts-per-group 2 --engine-prefixes 1 --runs vllm,ram,ceiling

A small one, for a first look: three of the runs, some minutes; vLLM's own cache holds one of three system prompts.

kvfs bench vllm --dir /data --json --plot vllm.png > vllm.json

For scripts: every answer's times among the results; the volume on the device of /data; a picture (needs kvfs[plots]).

kvfs bench vllm --python /opt/vllm/bin/python --model /models/mine --dtype float16

With a vLLM and a model of yours. `make bench-vllm` sets up both where there are none.
"""

_DEFAULTS = Workload()
_NEEDED_BYTES = 1 << 30

Flag = typer.Option


def bench_vllm(
    num_groups: Annotated[int, Flag(min=1, help="System prompts.")] = _DEFAULTS.num_groups,
    prompts_per_group: Annotated[
        int, Flag(min=1, help="Prompts that begin with the same one.")
    ] = _DEFAULTS.prompts_per_group,
    system_prompt_len: Annotated[int, Flag(min=1, help="Tokens of a system prompt.")] = _DEFAULTS.system_prompt_len,
    question_len: Annotated[int, Flag(min=1, help="Tokens of what comes behind it.")] = _DEFAULTS.question_len,
    output_len: Annotated[int, Flag(min=1, help="Tokens that are generated.")] = _DEFAULTS.output_len,
    request_rate: Annotated[
        float, Flag(help="Requests that arrive in a second, at random times; inf: all at once.")
    ] = math.inf,
    max_concurrency: Annotated[
        int, Flag(min=1, help="Requests under way at one time; TTFT counts from a request's turn on.")
    ] = _DEFAULTS.max_concurrency,
    seed: Annotated[int, Flag(help="Of words, order and arrivals.")] = _DEFAULTS.seed,
    engine_prefixes: Annotated[int, Flag(min=1, help="System prompts that vLLM's own cache has room for.")] = 4,
    passes: Annotated[int, Flag(min=1, help="How often each server is asked everything.")] = 2,
    runs: Annotated[str, Flag(metavar="NAMES", help="Which runs to make.")] = ",".join(MEANING),
    python: Annotated[
        Path | None, Flag(metavar="PATH", help="Python of an environment with vLLM 0.32; found if there is one.")
    ] = None,
    model: Annotated[
        Path | None, Flag(metavar="DIR", help="Model; SmolLM2-135M-Instruct if make demo has prepared it.")
    ] = None,
    dtype: Annotated[str, Flag(metavar="|".join(ITEM_BYTES), help="Of weights and KV cache.")] = "bfloat16",
    directory: Annotated[
        Path, Flag("--dir", help="Directory for mount and volume; emptied of our files afterwards.")
    ] = Path(),
    plot: Annotated[Path | None, Flag(metavar="PNG", help="Draw the comparison into this file.")] = None,
    as_json: Annotated[bool, Flag("--json", help="Results, answer by answer, as JSON on stdout.")] = False,
) -> None:
    """Measure a vLLM server with kvfs under shared system prompts, beside vLLM alone.

    Groups of prompts share a system prompt and are asked in random order. Each run starts its own server, warms it with
    a prompt of its own, and asks all of it twice: vllm, alone, its cache too small; ram, with kvfs, all in RAM; ram_nvme,
    RAM for a third of it; restarted, what that left on NVMe; ceiling, vLLM alone with room for everything. In pass 1 a
    prefix is computed once, and what comes later may reuse it. Pass 2 has seen everything.
    """
    if plot is not None:
        _check_plot(plot)
    workload = Workload(
        num_groups, prompts_per_group, system_prompt_len, question_len, output_len, _rate(request_rate), max_concurrency,
        seed,
    )  # fmt: skip
    if system_prompt_len < CHUNK_TOKENS:
        raise UsageError(
            f"--system-prompt-len is {system_prompt_len}: kvfs keeps prefixes of {CHUNK_TOKENS} tokens and more"
        )
    if dtype not in ITEM_BYTES:
        raise UsageError(f"--dtype is one of {', '.join(ITEM_BYTES)}, not {dtype!r}")
    names, model_directory = _names(runs), _model(model)
    console = Console(stderr=True)
    with console.status("looking for vLLM, which takes its time to be imported"):
        found_python = _vllm(python)
    plan = Plan(workload, names, passes, engine_prefixes, found_python, str(model_directory), dtype)
    _check_room(plan, directory)
    console.print(f"vLLM: {plan.python}\nmodel: {plan.model}", highlight=False, markup=False, soft_wrap=True)
    found = report.result(plan, _measure(plan, directory, console))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        shown = Console()
        shown.print(report.times(found))
        shown.print(report.comparison(found))
        for line in report.remarks(found):
            shown.print(line, highlight=False, soft_wrap=True)
    if plot is not None:
        from kvfs.tools.bench_vllm.plot import draw

        draw(found, plot)


def _measure(plan: Plan, directory: Path, console: Console) -> list[Pass]:
    """Make the runs; what is being done is shown from the start: in a bar, or a line each where nobody sees a bar."""
    passes: list[Pass] = []
    with step_bar(console) as bar:
        task = bar.add_task("", total=plan.num_answers)
        doing = ""

        def say(what: str, num_answers: int) -> None:
            nonlocal doing
            bar.update(task, description=what, advance=num_answers)
            if what != doing and not console.is_terminal:
                console.print(what, highlight=False)
            doing = what

        def done(made: Pass) -> None:
            passes.append(made)
            console.print(
                f"{made.run}, pass {made.number}: mean TTFT {made.ttft_ms.mean:,.0f} ms, "
                f"{made.input_tokens_s:,.0f} input tokens/s",
                highlight=False,
            )

        measure(plan, directory, say, done)
    return passes


def _check_plot(plot: Path) -> None:
    """Say now, not after tens of minutes, that there will be no picture."""
    importlib.import_module("kvfs.tools.bench_vllm.plot")
    if plot.is_dir() or not os.access(plot.parent, os.W_OK):
        raise UsageError(f"--plot: no file can be written to {plot}")


def _rate(request_rate: float) -> float | None:
    if math.isnan(request_rate) or request_rate <= 0:
        raise UsageError(f"--request-rate is {request_rate:g}; it is a number above 0, or inf")
    return None if math.isinf(request_rate) else request_rate


def _names(runs: str) -> list[str]:
    asked = {name.strip() for name in runs.split(",")}
    if unknown := asked - MEANING.keys():
        raise UsageError(f"--runs: there is no run {min(unknown)!r}; the runs are {','.join(MEANING)}")
    if "restarted" in asked and "ram_nvme" not in asked:
        raise UsageError("--runs: restarted goes on from what ram_nvme left, so it needs that")
    return [name for name in MEANING if name in asked]


def _vllm(python: Path | None) -> str:
    wanted = f"vLLM {VERSIONS[0]}x with msgspec and xxhash"
    return chosen_python(python, installed_vllm, is_known, wanted, "bench-vllm")


def _model(model: Path | None) -> Path:
    path = model.absolute() if model is not None else demo_model.directory()
    if not (path / "tokenizer.json").is_file():
        where = "" if model is not None else ": `make bench-vllm` prepares it, --model DIR names another"
        raise UsageError(f"there is no model with a tokenizer.json in {path}{where}")
    return path


def _check_room(plan: Plan, directory: Path) -> None:
    needed = 2 * plan.working_set_bytes + _NEEDED_BYTES if "ram_nvme" in plan.runs else _NEEDED_BYTES // 8
    try:
        free = os.statvfs(directory)
    except OSError as error:
        raise UsageError(f"--dir: {directory}: {error.strerror}") from error
    if free.f_bavail * free.f_frsize < needed:
        raise UsageError(f"the benchmark needs {needed / (1 << 30):.1f} GiB of free disk at {directory.resolve()}")
