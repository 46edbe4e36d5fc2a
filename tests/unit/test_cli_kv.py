"""`blockferry kv replay`: counts, exit codes and what it says of files that it cannot replay."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockferry.cluster.cli import app

RECORDINGS = Path(__file__).parents[1] / "conformance"


def some(name: str, kind: str, count: int) -> dict[str, Any]:
    document = json.loads(lzma.decompress((RECORDINGS / name).read_bytes()))
    return {kind: document[kind][:count]}


def write(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def test_traces_that_agree_exit_with_0(tmp_path: Path) -> None:
    file = write(tmp_path / "traces.json", some("kv_traces.json.xz", "traces", 9))
    result = CliRunner().invoke(app, ["kv", "replay", file, "--level", "strict", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {key: report[key] for key in ("file", "level", "cases", "matched", "first_mismatch")} == {
        "file": file,
        "level": "strict",
        "cases": 9,
        "matched": 9,
        "first_mismatch": None,
    }
    assert report["families"] == {"full": {"cases": 8, "matched": 8}, "full-bs16": {"cases": 1, "matched": 1}}


def test_planning_cases_are_replayed_too(tmp_path: Path) -> None:
    file = write(tmp_path / "planning.json", some("planning.json.xz", "cases", 5))
    result = CliRunner().invoke(app, ["kv", "replay", file])
    assert result.exit_code == 0, result.output
    assert "all" in result.stdout


def test_trace_that_differs_is_shown_and_exits_with_1(tmp_path: Path) -> None:
    document = some("kv_traces.json.xz", "traces", 2)
    lookup = next(op for op in document["traces"][1]["ops"] if op["op"] == "lookup")
    lookup["out"]["free"] += 1
    file = write(tmp_path / "traces.json", document)
    result = CliRunner().invoke(app, ["kv", "replay", file])
    assert result.exit_code == 1
    assert "full-1, operation" in result.stdout
    assert f"recorded {lookup['out']['free']}" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "either a list"),
        ('{"traces": [{"id": "x-1"}]}', "trace x-1: the trace has no config"),
        ('{"traces": []}', "traces is []"),
        ('{"cases": []}', "cases is []"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_file_that_is_no_recording_is_named_in_a_usage_error(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "traces.json"
    file.write_text(text)
    result = CliRunner().invoke(app, ["kv", "replay", str(file)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"Invalid value for 'FILE': {file}: " in result.stderr
    assert complaint in result.stderr


def test_unknown_operation_is_named_with_its_place_and_the_known_ones(tmp_path: Path) -> None:
    document = some("kv_traces.json.xz", "traces", 2)
    document["traces"][1]["ops"][3]["op"] = "frobnicate"
    file = write(tmp_path / "traces.json", document)
    result = CliRunner().invoke(app, ["kv", "replay", file], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert "trace full-1: operation 3: op is 'frobnicate'; known are new, step, lookup, alloc" in result.stderr


def test_what_the_ledger_refuses_names_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = some("kv_traces.json.xz", "traces", 1)
    file = write(tmp_path / "traces.json", document)

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("blockferry.engine.kv.manager.KVCacheManager.lookup", refuse)
    result = CliRunner().invoke(app, ["kv", "replay", file], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    number = [op["op"] for op in document["traces"][0]["ops"]].index("lookup")
    assert f"trace full-0: operation {number} (lookup): no" in result.stderr


@pytest.mark.parametrize("name", ["nofile.json", "."])
def test_path_that_is_no_file_is_named_with_the_argument(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["kv", "replay", str(tmp_path / name)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert "FILE" in result.stderr


def test_planning_at_level_strict_says_that_it_knows_one_level(tmp_path: Path) -> None:
    file = write(tmp_path / "planning.json", some("planning.json.xz", "cases", 2))
    table = CliRunner().invoke(app, ["kv", "replay", file, "--level", "strict"])
    document = CliRunner().invoke(app, ["kv", "replay", file, "--level", "strict", "--json"])
    assert "planning cases know one level only" in table.stdout
    report = json.loads(document.stdout)
    assert report["level"] == "contract"
    assert "planning cases know one level only" in report["note"]


def test_planning_case_that_differs_is_worded_as_a_trace_is(tmp_path: Path) -> None:
    document = some("planning.json.xz", "cases", 1)
    document["cases"][0]["out"]["num_blocks"] += 1
    file = write(tmp_path / "planning.json", document)
    result = CliRunner().invoke(app, ["kv", "replay", file, "--json"])
    assert result.exit_code == 1
    recorded = document["cases"][0]["out"]["num_blocks"]
    assert f"num_blocks is {recorded - 1}, recorded {recorded}" in json.loads(result.stdout)["first_mismatch"]


def test_help_names_the_keys_of_the_json_document() -> None:
    shown = " ".join(CliRunner().invoke(app, ["kv", "replay", "--help"]).stdout.split())
    assert "file, level, note" in shown
    assert "first_mismatch" in shown
