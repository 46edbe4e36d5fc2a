"""`blockferry kv replay`: counts, exit codes and what it says of files that it cannot replay."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockferry.cluster.cli import app
from blockferry.engine.errors import ConfigError

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
    [("{", "is not JSON"), ("[]", "neither"), ('{"traces": [{"id": "x-1"}]}', "cannot be replayed")],
)
def test_file_that_cannot_be_replayed_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "traces.json"
    file.write_text(text)
    result = CliRunner().invoke(app, ["kv", "replay", str(file)])
    assert isinstance(result.exception, ConfigError)
    assert complaint in str(result.exception)
