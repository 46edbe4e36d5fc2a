"""`blockferry plan`: its tables, its JSON, its picture, and one line for every mistake."""

import dataclasses
import json
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockferry.cluster import cli
from blockferry.cluster.plan_model import PlanQuestion, plan_model, read_model_config
from blockferry.cluster.plan_report import PlannedModel, page_bars
from blockferry.engine.kv.model_layers import LayerOptions
from blockferry.engine.kv.plan import Planner

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
WINDOWED = {**TINY, "sliding_window": 32, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}


@dataclasses.dataclass(frozen=True)
class Outcome:
    out: str
    err: str
    code: object


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Call the command in this process; main() replaces signal handlers, so they are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run_main(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["blockferry", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return Outcome(out=shown.out, err=shown.err, code=ended.value.code)

    yield run_main
    for number, handler in before.items():
        signal.signal(number, handler)
    assert logging.getLogger("blockferry.engine.kv").level == logging.NOTSET  # the command quietens itself alone


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WINDOWED))
    return path


def plan(config: dict[str, Any], planner: Planner = Planner.UNIFORM, **question: Any) -> PlannedModel:
    asked = PlanQuestion(**({"memory_bytes": 1 << 20, "layers": LayerOptions()} | question))
    return plan_model(config, asked, [planner])[0]


def test_shipped_name_shows_groups_waste_and_what_fits(run: Run) -> None:
    shown = run("gemma-3-27b", "--memory", "80GiB", "--planner", "uniform")
    assert shown.code == 0
    assert shown.out.count("sliding_window  ") >= 6
    assert "padding waste: 11.4%" in shown.out
    assert "holds 737,080 tokens: 5.62 sequences of 131,072" in shown.out


def test_json_has_the_promised_shape_and_nothing_beside_it(run: Run, config_file: Path) -> None:
    document = json.loads(run(str(config_file), "--memory", "1MiB", "--planner", "slab", "--json").out)
    assert document["planner"] == "slab"
    assert [(group["type"], group["layers"]) for group in document["groups"]] == [
        ("full_attention", [0]),
        ("sliding_window", [1, 2]),
    ]
    assert {group["block_size"] for group in document["groups"]} == {16}
    assert [group["page_size_bytes"] for group in document["groups"]] == [8192, 16384]
    assert document["num_blocks"] == 1 + max((1024 // 8 - 2) // 2 * 2, 0)
    assert document["useful_fraction"] == 1.0
    assert document["capacity_tokens"] == int(document["max_concurrency"] * 256)
    assert document["sequence_bytes"] == {"full_attention": 16 * 8192, "sliding_window": 16 * 16384}


def test_folder_and_file_name_the_same_model(run: Run, config_file: Path) -> None:
    arguments = ("--memory", "1MiB", "--json")
    assert run(str(config_file.parent), *arguments).out == run(str(config_file), *arguments).out


def test_comparison_has_every_planner_and_marks_the_best(run: Run) -> None:
    document = json.loads(run("jamba-1.5-mini", "--memory", "80GiB", "--compare", "--json").out)
    assert [one["planner"] for one in document["plans"]] == ["uniform", "slab", "unified"]
    assert document["best"] == "slab"
    assert "cannot share one block table" in document["plans"][2]["error"]
    shown = run("jamba-1.5-mini", "--memory", "80GiB", "--compare").out
    assert "*  slab" in shown
    assert "unified: not possible" in shown


def test_uniform_plan_of_a_model_with_states_has_blocks_as_large_as_they_need() -> None:
    config = read_model_config("qwen3-next-80b")
    assert plan(config, memory_bytes=80 << 30).plan.hash_block_size == 544
    assert plan(config, Planner.SLAB, memory_bytes=80 << 30).plan.hash_block_size == 16
    assert plan(config, memory_bytes=80 << 30, block_size=32).plan.hash_block_size == 32


def test_length_is_halved_until_a_sequence_fits_and_that_is_said(run: Run, config_file: Path) -> None:
    config_file.write_text(json.dumps({**WINDOWED, "max_position_embeddings": 1 << 20}))
    shown = run(str(config_file), "--memory", "1MiB", "--planner", "uniform").out
    assert "(the model allows 1,048,576 tokens, which do not fit)" in shown
    assert plan(WINDOWED, max_model_len=128).request.limits.max_model_len == 128


def test_pool_too_small_for_the_length_asked_is_refused_with_a_length_that_fits(run: Run, config_file: Path) -> None:
    refused = run(str(config_file), "--memory", "100KiB", "--max-model-len", "256")
    assert refused.code == 1
    assert "or set max_model_len to " in refused.err
    assert refused.err.count("\n") == 1


def test_stages_of_a_pipeline_plan_their_own_layers() -> None:
    whole = plan(TINY, memory_bytes=1 << 20)
    stage = plan(TINY, memory_bytes=1 << 20, pp_size=2)
    assert [share.layer_numbers for share in stage.shares()] == [(0, 1)]
    assert stage.plan.capacity_tokens == pytest.approx(1.5 * whole.plan.capacity_tokens, rel=0.05)
    slab = plan(WINDOWED, Planner.SLAB, memory_bytes=1 << 20, pp_size=3)
    assert [share.layer_numbers for share in slab.shares()] == [(0,)]


def test_drafts_are_planned_with_the_last_stage() -> None:
    config = {**TINY, "num_nextn_predict_layers": 1}
    planned = plan(config, layers=LayerOptions(num_speculative_tokens=1), pp_size=2)
    assert {share.layer_numbers for share in planned.shares()} <= {(0, 1), (2, 3)}


def test_an_encoder_is_said_to_cache_nothing(run: Run, config_file: Path) -> None:
    config_file.write_text(json.dumps({**TINY, "architectures": ["BertForMaskedLM"]}))
    assert "nothing to cache" in run(str(config_file), "--memory", "1MiB").out


def test_bar_shades_what_holds_nothing() -> None:
    types = ["full_attention"] * 4 + ["sliding_attention"] * 3
    bars = [bar.plain for bar in page_bars(plan({**WINDOWED, "num_hidden_layers": 7, "layer_types": types}))]
    assert bars[0] == "one block of 32.00 KiB:"
    assert bars[1].count("█") == 64
    assert (bars[2].count("█"), bars[2].count("░")) == (48, 16)


def test_bar_of_a_slab_shows_where_pages_end() -> None:
    bars = [bar.plain for bar in page_bars(plan(WINDOWED, Planner.SLAB))]
    assert [bar.count("│") for bar in bars[1:]] == [1, 0]


def test_picture_is_written(run: Run, config_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    assert run(str(config_file), "--memory", "1MiB", "--compare", "--plot", str(picture)).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gema-3-27b", "--memory", "1GiB"], "did you mean 'gemma-3-27b'?"),
        (["gemma-3-27b", "--memory", "lots"], "--memory: 'lots' is not a size"),
        (["gemma-3-27b", "--memory", "0"], "--memory: 0 leaves no memory"),
        (["gemma-3-27b", "--memory", "80GiB", "--pp", "63"], "exceeds the model's 62 layers"),
        (["gemma-3-27b", "--memory", "80GiB", "--layout", "NHD"], "'NHD' is unknown"),
        (["gemma-3-27b", "--memory", "80GiB", "--layout", "LBHNC", "--planner", "slab"], "use layout BLHNC"),
        (["gemma-3-27b", "--memory", "\u0668\u0660GiB"], "write it in digits 0 to 9"),
        (["gemma-3-27b", "--memory", "\u00b2"], "write it in digits 0 to 9"),
        (["gemma-3-27b", "--memory", "9" * 5000 + "GiB"], "more than any machine has"),
        (["gemma-3-27b", "--memory", "9999999TiB"], "more than any machine has"),
        (
            ["gemma-3-27b", "--memory", "80GiB", "--max-model-len", str(10**26)],
            "'--max-model-len': Input should be less",
        ),
        (
            ["gemma-3-27b", "--memory", "80GiB", "--speculative-tokens", "9" * 20],
            "'--speculative-tokens': Input should be less",
        ),
        (["gemma-3-27b", "--memory", "80GiB", "--plot", "/nowhere/x.png"], "--plot: cannot write /nowhere/x.png: No"),
        (["gemma-3-27b", "--memory", "80GiB", "--plot", "/tmp"], "--plot: /tmp is a folder"),
        (["gemma-3-27b", "--memory", "80GiB", "--plot", "x.abc"], "--plot: x.abc"),
        (["gemma-3-27b"], "Missing option '--memory'"),
    ],
)
def test_mistake_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    refused = run(*arguments)
    assert refused.code != 0
    assert message in refused.err
    assert (refused.out, refused.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a":' * 100_000])
def test_file_that_is_no_config_is_one_line(run: Run, config_file: Path, text: str) -> None:
    config_file.write_text(text)
    refused = run(str(config_file), "--memory", "1GiB")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert str(config_file) in refused.err


def test_config_without_a_longest_sequence_asks_for_one(run: Run, config_file: Path) -> None:
    config_file.write_text(json.dumps({key: value for key, value in TINY.items() if "position" not in key}))
    assert "give --max-model-len" in run(str(config_file), "--memory", "1GiB").err
    assert run(str(config_file), "--memory", "1GiB", "--max-model-len", "64").code == 0


def test_mistake_in_a_config_names_its_file(run: Run, config_file: Path) -> None:
    config_file.rename(config_file.with_name("mine.json"))
    mine = config_file.with_name("mine.json")
    mine.write_text(json.dumps({**TINY, "num_attention_heads": "two"}))
    assert run(str(mine), "--memory", "1GiB").err.startswith(f"error: {mine}: num_attention_heads is 'two'; it must")


def test_family_that_is_not_known_is_warned_of(run: Run, config_file: Path) -> None:
    config_file.write_text(json.dumps({**TINY, "model_type": "brand_new"}))
    warning = "model_type brand_new is not known: planned as plain full attention"
    assert f"warning: {warning}" in run(str(config_file), "--memory", "1MiB").out
    document = json.loads(run(str(config_file), "--memory", "1MiB", "--json").out)
    assert document["warnings"][0].startswith(warning)


def test_cache_that_a_config_quantizes_is_told(run: Run, config_file: Path) -> None:
    config_file.write_text(json.dumps({**TINY, "quantization_config": {"kv_cache_quant_algo": "FP8"}}))
    note = "keys and values are fp8, as quantization_config.kv_cache_quant_algo says"
    assert f"({note})" in run(str(config_file), "--memory", "1MiB").out
    assert json.loads(run(str(config_file), "--memory", "1MiB", "--json").out)["notes"] == [note]


def test_comparison_says_who_limits_the_length(run: Run, config_file: Path) -> None:
    config_file.write_text(json.dumps({**WINDOWED, "max_position_embeddings": 512}))
    arguments = (str(config_file), "--memory", "700KiB", "--compare", "--max-num-batched-tokens", "32")
    document = json.loads(run(*arguments, "--json").out)
    assert document["length_limited_by"] == ["unified"]
    shown = run(*arguments).out
    assert "which do not fit: unified limits the length of all)" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.rstrip().endswith("limits the length")] == [
        "unified"
    ]


def test_comparison_of_planners_that_all_refuse_has_every_reason(run: Run, config_file: Path) -> None:
    arguments = (str(config_file), "--memory", "1KiB", "--compare")
    refused = run(*arguments)
    assert (refused.code, refused.out) == (1, "")
    assert [line.split(":")[1].strip() for line in refused.err.splitlines()] == ["uniform", "slab", "unified"]
    document = json.loads(run(*arguments, "--json").out)
    assert document["best"] is None
    assert all("give the pool" in one["error"] or "or more" in one["error"] for one in document["plans"])


@pytest.mark.parametrize("memory", ["1KiB", "40KiB", "100KiB"])
def test_pool_that_a_slab_plan_asks_for_is_enough(run: Run, config_file: Path, memory: str) -> None:
    arguments = (str(config_file), "--planner", "slab", "--max-model-len", "256", "--memory")
    refused = run(*arguments, memory)
    needed = re.search(r"(\S+) MiB or more", refused.err)
    assert needed, refused.err
    assert run(*arguments, f"{needed[1]}MiB").code == 0


def test_stage_that_was_planned_is_named(run: Run, config_file: Path) -> None:
    config_file.write_text(json.dumps(TINY))
    arguments = (str(config_file), "--memory", "1MiB", "--pp", "2")
    assert "pipeline stage 0, which holds least: layers 0-1" in run(*arguments).out
    stage = json.loads(run(*arguments, "--json").out)["stage"]
    assert stage == {"pp_rank": 0, "first_layer": 0, "last_layer": 1}


def test_picture_without_a_suffix_is_a_png_and_its_name_is_told(run: Run, config_file: Path, tmp_path: Path) -> None:
    told = run(str(config_file), "--memory", "1MiB", "--plot", str(tmp_path / "plan")).err
    assert told == f"picture: {tmp_path / 'plan.png'}\n"
    assert (tmp_path / "plan.png").exists()


def test_help_says_what_units_are_and_which_families_are_known(run: Run) -> None:
    words = " ".join(run("--help").out.replace("│", " ").split())
    assert "80GiB is 80 x 2^30 bytes, 80G and 80GB are 80 x 10^9" in words
    assert "gpt_oss" in words
