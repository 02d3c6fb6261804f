"""`kvfs bench vllm` as far as no engine is needed: the workload, the statistics, the plan, what is shown and refused.

The benchmark itself: tests/engines/vllm/test_bench.py.
"""

from __future__ import annotations

import collections
import io
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from kvfs.errors import KvfsError, UsageError
from kvfs.tools.bench_vllm import counts, report, runs, workload
from kvfs.tools.bench_vllm.counts import Counts
from kvfs.tools.bench_vllm.results import Answer, Pass, PassOver, Spread, percentile, ratios
from kvfs.tools.bench_vllm.runs import Plan
from kvfs.tools.bench_vllm.workload import Workload
from kvfs.tools.demo.prompt import text

from .conftest import assert_refused, kvfs

DEFAULT = Workload()
SMALL = Workload(num_groups=3, prompts_per_group=5, system_prompt_len=300, question_len=17, output_len=4)
CONFIG = {
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "head_dim": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer like those of today's models, with some hundred words of the demo's text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([text()], trainer)
    return made


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> list[str]:
    return workload.words(tokenizer)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def make_plan(model: Path, asked: Workload = DEFAULT, **changes: object) -> Plan:
    plan = Plan(asked, list(runs.MEANING), 2, 4, "/usr/bin/python3", str(model), "bfloat16")
    return msgspec.structs.replace(plan, **changes)


def make_pass(
    run: str,
    number: int,
    ttft_ms: list[float],
    seconds: float = 2.0,
    daemon: dict[str, int] | None = None,
    **counted: object,
) -> Pass:
    answers = [Answer(i, 0, each, each + 100, 1000, 8) for i, each in enumerate(ttft_ms)]
    return Pass.of(run, number, answers, PassOver(seconds, Counts(**counted)), daemon or {})  # type: ignore[arg-type]


# the workload


def test_prompts_have_exactly_the_tokens_asked_for(tokenizer: Tokenizer, vocabulary: list[str]) -> None:
    """Prompts of a group share the tokens of their system prompt, and those only; other groups share nothing."""
    asked = workload.requests(SMALL, vocabulary)
    ids = [tokenizer.encode(each.text, add_special_tokens=False).ids for each in asked]
    assert {len(each) for each in ids} == {317}
    systems = collections.defaultdict(set)
    for request, tokens in zip(asked, ids, strict=True):
        systems[request.group].add(tuple(tokens[:300]))
    assert sorted(systems) == [0, 1, 2]
    assert all(len(found) == 1 for found in systems.values())
    assert len({next(iter(found))[:16] for found in systems.values()}) == 3
    assert len({tuple(tokens[300:]) for tokens in ids}) == 15


def test_every_group_is_asked_as_often_as_said_in_mixed_order(vocabulary: list[str]) -> None:
    groups = [each.group for each in workload.requests(SMALL, vocabulary)]
    assert collections.Counter(groups) == {0: 5, 1: 5, 2: 5}
    assert groups != sorted(groups)


def test_equal_seeds_give_equal_requests_in_any_process(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Neither the process nor the order of a set or a dictionary has a say in it."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    script = (
        "import hashlib, sys\n"
        "from tokenizers import Tokenizer\n"
        "from kvfs.tools.bench_vllm import workload as w\n"
        "words = w.words(Tokenizer.from_file(sys.argv[1]))\n"
        "asked = w.Workload(3, 5, 300, 17, 4, request_rate=2.0, seed=int(sys.argv[2]))\n"
        "print(hashlib.sha256(repr(w.requests(asked, words)).encode()).hexdigest())\n"
    )

    def digest(seed: int) -> str:
        command = [sys.executable, "-c", script, str(tmp_path / "tokenizer.json"), str(seed)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert digest(1) == digest(1) != digest(2)


def test_the_warm_up_is_as_long_and_shares_nothing(tokenizer: Tokenizer, vocabulary: list[str]) -> None:
    texts = [each.text for each in workload.requests(SMALL, vocabulary)]
    warm_ups = [workload.warm_up(SMALL, vocabulary, purpose) for purpose in ("ram", "restarted")]
    begins = {tuple(tokenizer.encode(each).ids[:8]) for each in (*texts, *warm_ups)}
    assert len(begins) == 3 + 2
    workload.check_lengths(SMALL, warm_ups, tokenizer)


def test_requests_arrive_at_the_rate_asked_for(vocabulary: list[str]) -> None:
    """As a Poisson process: the pauses have the mean, and the spread, of an exponential distribution."""
    many = Workload(500, 4, 1, 1, 1, request_rate=4.0)
    pauses = [each.pause_s for each in workload.requests(many, vocabulary)]
    assert pauses[0] == 0
    assert statistics.fmean(pauses) == pytest.approx(0.25, rel=0.1)
    assert statistics.pstdev(pauses) == pytest.approx(0.25, rel=0.15)
    assert {each.pause_s for each in workload.requests(SMALL, vocabulary)} == {0.0}


def test_a_prompt_of_another_length_is_refused(tokenizer: Tokenizer, vocabulary: list[str]) -> None:
    """As where a model's tokenizer joins words: better no figures than those of another workload."""
    whole = workload.warm_up(SMALL, vocabulary, "x")
    with pytest.raises(KvfsError, match="a prompt of 317 words has 318 tokens"):
        workload.check_lengths(SMALL, [whole, whole + vocabulary[0]], tokenizer)


def test_a_vocabulary_without_words_is_refused() -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(["one two three four"], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    with pytest.raises(KvfsError, match="of this model's tokens only 5 are words"):
        workload.words(made)


# statistics


def test_percentiles_lie_on_straight_lines_between_values() -> None:
    assert percentile([5.0], 0.99) == 5.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile(list(range(101)), 0.99) == 99
    assert Spread.of([1.0, 2.0, 6.0]) == Spread(3.0, 2.0, 5.9)


def test_a_pass_is_what_its_answers_come_to() -> None:
    """Input tokens a second count all prompt tokens over the whole pass; answers stand in the order of arrival."""
    answers = [Answer(1, 0, 30.0, 50.0, 1000, 8), Answer(0, 1, 10.0, 20.0, 1000, 8)]
    made = Pass.of("ram", 1, answers, PassOver(4.0, Counts(ram=512)), {})
    assert (made.input_tokens, made.output_tokens, made.input_tokens_s) == (2000, 16, 500.0)
    assert (made.ttft_ms.mean, made.latency_ms.mean, made.counts.ram) == (20.0, 35.0, 512)
    assert [each.number for each in made.answers] == [0, 1]


def test_passes_are_compared_with_those_of_the_same_number() -> None:
    passes = [
        make_pass("ram", 1, [300.0]), make_pass("ram", 2, [50.0], seconds=1.0),
        make_pass("ceiling", 1, [200.0]), make_pass("ceiling", 2, [40.0], seconds=0.5),
    ]  # fmt: skip
    found = {(each.run, each.number): (each.ttft, each.input_tokens_s) for each in ratios(passes, "ceiling")}
    assert found == {("ram", 1): (1.5, 1.0), ("ram", 2): (1.25, 0.5)}
    assert ratios(passes, "vllm") == []


METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 4480.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 512.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 2304.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
# TYPE vllm:kvfs_hit_tokens_total counter
vllm:kvfs_hit_tokens_total{engine="0",model_name="m",tier="ram"} 2048.0
vllm:kvfs_hit_tokens_total{engine="0",model_name="m",tier="nvme"} 256.0
# TYPE vllm:kvfs_hit_tokens_created gauge
vllm:kvfs_hit_tokens_created{engine="0",model_name="m",tier="nvme"} 1.7e+09
# TYPE vllm:kvfs_loads_total counter
vllm:kvfs_loads_total{engine="0",model_name="m"} 9.0
"""


def test_counts_are_read_from_metrics() -> None:
    """And the counts of a pass are what came to them meanwhile."""
    found = counts.read(METRICS)
    assert found == Counts(4480, 512, 2048, 256, 1, {"loads": 9})
    before = Counts(4000, 512, 48, 0, 1, {"loads": 2})
    assert found.since(before) == Counts(480, 0, 2000, 256, 0, {"loads": 7})


# the plan


def test_runs_differ_in_the_engine_s_cache_and_in_kvfs_only(model: Path) -> None:
    """4 of 12 prefixes of 16 blocks, and a block for each of two requests; the ceiling never has to give up a block."""
    plan = make_plan(model)
    assert {run: plan.engine_blocks(run) for run in plan.runs} == {
        "vllm": 67, "ram": 67, "ram_nvme": 67, "restarted": 67, "ceiling": 357,
    }  # fmt: skip
    flags = {run: plan.server_flags(run) for run in plan.runs}
    assert {tuple(each[:-1]) for each in flags.values()} == {tuple(flags["vllm"][:-1])}
    needed = 12 * 16 + 2 * 48 + 2 * 17 + 2 * 17  # prefixes, the tails of two passes, the warm-up, two under way
    assert plan.engine_blocks("ceiling") > needed


def test_kvfs_has_ram_for_all_or_for_a_third(model: Path) -> None:
    plan = make_plan(model)
    working_set = 12 * 2048 * 23_040
    assert plan.working_set_bytes == pytest.approx(working_set, rel=0.01)
    assert plan.mount_sizes("vllm") is None
    assert plan.mount_sizes("ceiling") is None
    ram, nvme = plan.mount_sizes("ram") or ("", None)
    assert nvme is None
    assert working_set < int(ram.removesuffix("MiB")) << 20 < 2 * working_set
    ram, nvme = plan.mount_sizes("ram_nvme") or ("", None)
    assert int(ram.removesuffix("MiB")) << 20 == pytest.approx(working_set / 3, rel=0.01)
    assert nvme is not None
    assert int(nvme.removesuffix("MiB")) << 20 > working_set
    assert plan.mount_sizes("restarted") == (ram, nvme)


def test_long_questions_are_part_of_the_working_set(model: Path) -> None:
    """Chunks behind the system prompt are each prompt's own; the last token's KV is never there."""
    asked = Workload(2, 3, 512, 256, 1)
    plan = make_plan(model, asked)
    assert plan.working_set_bytes == (2 * 2 + 6 * 1) * plan.chunk_bytes


def test_the_size_of_a_token_follows_from_the_configuration(model: Path) -> None:
    assert runs.token_bytes(model, "bfloat16") == 23_040
    assert runs.token_bytes(model, "float32") == 46_080
    (model / "config.json").write_text(
        json.dumps({"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2})
    )
    assert runs.token_bytes(model, "float16") == 2 * 2 * 4 * 16 * 2
    (model / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no model whose KV cache has a known size"):
        runs.token_bytes(model, "float16")


# what is shown


@pytest.fixture
def found(model: Path) -> report.Result:
    connector = {"loads": 3, "chunks_dropped": 8, "loads_failed": 0}
    passes = [
        make_pass("vllm", 1, [3000.0, 5000.0], 8.0, computed=2000),
        make_pass("ram", 1, [1000.0, 1400.0], 3.0, computed=500, engine=500, ram=1000, connector=connector),
        make_pass("ram_nvme", 1, [900.0, 1100.0], 2.0, computed=500, nvme=1500),
        make_pass(
            "restarted", 1, [600.0, 600.0], 1.0, {"promotions": 8, "prefetches_useful": 5}, computed=100, nvme=101_900
        ),
        make_pass("ceiling", 1, [900.0, 900.0], 2.0, computed=500, engine=1500),
    ]
    return report.result(make_plan(model, SMALL, num_passes=1), passes)


def test_bars_are_met_or_missed(found: report.Result) -> None:
    assert [(bar.what.partition(":")[0], bar.value, bar.is_met) for bar in found.bars] == [
        ("ram", 1.333, False), ("ram", 0.667, False), ("ram_nvme", 1.111, True), ("ram_nvme", 1.0, True),
        ("restarted", 0.667, False),
    ]  # fmt: skip


def test_tables_have_a_line_for_each_pass_and_fit_on_a_terminal(found: report.Result) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(report.times(found))
    console.print(report.comparison(found))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    times, comparison = [line.split()[2:] for line in lines if line.strip().startswith("ram ")]
    assert times == ["1,200", "1,200", "1,396", "1,300", "1,300", "1,496", "667"]
    assert comparison == ["1.33", "0.67", "0.30", "2.67", "0.5k", "0.5k", "1.0k", "·"]
    assert sum(line.split()[0] in runs.MEANING for line in lines if line.split()) == 2 * 5
    assert any(line.rstrip().endswith(" 101k") for line in lines)
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_was_lost_is_said(found: report.Result) -> None:
    assert report.complaints(found) == ["ram, pass 1: 8 chunks were not stored because too many were waiting"]
    lines = report.remarks(found)
    assert any(line.startswith("ram, pass 1, against vLLM alone: TTFT -70%, input throughput +167%") for line in lines)
    assert any(line.endswith("1.33, [bold]missed[/bold]") for line in lines)
    assert "restarted, pass 1: 8 chunks were read from NVMe, of which 5 were in RAM before they were asked for" in lines


def test_the_result_can_be_read_from_its_json(found: report.Result) -> None:
    assert msgspec.json.decode(msgspec.json.encode(found), type=report.Result) == found


def test_the_picture_is_a_png(found: report.Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib, which is not installed")
    from kvfs.tools.bench_vllm.plot import draw

    draw(found, tmp_path / "x.png")
    written = (tmp_path / "x.png").read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(written) > 10_000


# what is refused


def test_without_matplotlib_a_picture_is_refused_at_once() -> None:
    script = "import sys; sys.modules['matplotlib'] = None; sys.argv[1:] = ['bench', 'vllm', '--plot', 'x.png']\n"
    result = subprocess.run(
        [sys.executable, "-c", f"{script}from kvfs.tools import cli; cli.main()"], capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "kvfs: --plot draws with matplotlib: pip install 'kvfs[plots]', or pip install matplotlib\n"
    )


def test_a_picture_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib, which is not installed")
    for place in (tmp_path, tmp_path / "missing" / "x.png"):
        result = kvfs("bench", "vllm", f"--plot={place}")
        assert (result.returncode, result.stderr) == (2, f"kvfs: --plot: no file can be written to {place}\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--runs=vllm,fast"], "--runs: there is no run 'fast'; the runs are vllm,ram,ram_nvme,restarted,ceiling"),
        (["--runs=restarted"], "--runs: restarted goes on from what ram_nvme left, so it needs that"),
        (["--system-prompt-len=255"], "--system-prompt-len is 255: kvfs keeps prefixes of 256 tokens and more"),
        (["--request-rate=0"], "--request-rate is 0; it is a number above 0, or inf"),
        (["--dtype=int8"], "--dtype is one of float32, bfloat16, float16, not 'int8'"),
        (["--python=/bin/false"], "--python: /bin/false has no vLLM 0.32.x with msgspec and xxhash"),
        (["--num-groups=0"], "invalid value for '--num-groups'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str) -> None:
    assert_refused(kvfs("bench", "vllm", *arguments), sentence)


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_VLLM_PYTHON", "/bin/false")
    result = kvfs("bench", "vllm")
    assert result.returncode == 2
    assert "`make bench-vllm` sets one up, --python PATH names" in result.stderr


def test_options_of_the_other_benchmark_are_not_dropped_in_silence() -> None:
    result = kvfs("bench", "--json", "vllm")
    assert result.returncode == 2
    assert result.stderr == "kvfs: options of `kvfs bench vllm` stand behind its name\n"


@pytest.mark.parametrize("command", [["bench"], ["bench", "vllm"]])
def test_help_teaches_by_example(command: list[str]) -> None:
    result = kvfs(*command, "--help")
    assert result.returncode == 0
    assert f"\n  kvfs {' '.join(command)}\n" in result.stdout
    assert f"kvfs {' '.join(command)} --dir /data" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_rate_without_end_is_no_rate() -> None:
    """JSON has no infinity: the plan in the result says null."""
    from kvfs.tools.bench_vllm.command import _rate

    assert _rate(math.inf) is None
    assert _rate(2.5) == 2.5
