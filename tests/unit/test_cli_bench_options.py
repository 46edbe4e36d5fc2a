"""`blockferry bench`: files that cannot be written are refused before anything is measured."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockferry.cluster.cli import app
from blockferry.engine.errors import ConfigError


@pytest.fixture(autouse=True)
def never_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("blockferry.cluster.bench.kv.run_kv_bench", fail)


@pytest.mark.parametrize(
    ("option", "name", "complaint"),
    [
        ("--json", ".", "is a directory"),
        ("--json", "absent/out.json", "cannot be written: No such file or directory"),
        ("--plot", ".", "is a directory"),
        ("--plot", "absent/out.png", "cannot be written"),
        ("--plot", "out", "does not end in one of .png"),
    ],
)
def test_unwritable_file_is_refused_by_its_option(tmp_path: Path, option: str, name: str, complaint: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kv", option, str(tmp_path / name)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr
    assert complaint in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_check_leaves_no_file_behind_and_an_existing_one_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    for name in ("old.json", "new.json"):
        result = CliRunner().invoke(app, ["bench", "kv", "--json", str(tmp_path / name)])
        assert isinstance(result.exception, AssertionError)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old.json", "{}")]


def test_help_says_how_long_it_takes_and_what_the_document_holds() -> None:
    shown = " ".join(CliRunner().invoke(app, ["bench", "kv", "--help"]).stdout.split())
    assert "About a minute" in shown
    assert "decode_step: rows, groups, mix, block_size" in shown


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--tp", "2:x"], "--tp='2:x' is neither a number nor SRC:DST"),
        (["--tp", "1:2:3"], "--tp='1:2:3' is neither one value nor SRC:DST"),
        (["--tp", "0:1"], "tp=0 is outside 1 .. 64"),
        (["--block-size", ":16"], "--block-size=':16' is neither"),
        (["--layout", "BHLNC:XX"], "layout='XX' is unknown; use BHLNC"),
        (["--piece", "5"], "piece_bytes=5 is not a positive multiple of 16"),
        (["--piece", "2MiB", "--size", "1MiB"], "size=1048576 bytes of a transfer is less than a block's 2097152"),
        (["--path", "pigeon"], "path='pigeon' is unknown; use shm, tcp"),
        (["--model-shape", "gemma-3-27b"], "caches of several kinds"),
        (["--model-shape", "absent"], "'absent' is no file, folder or known model"),
        (["--model-shape", "smollm2-135m", "--tp", "4:1"], "exceeds the model's 3 KV heads"),
    ],
)
def test_a_transfer_that_cannot_be_is_refused_before_anything_starts(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["bench", "transfer", *options])
    assert isinstance(result.exception, ConfigError)
    assert complaint in str(result.exception)
    assert len(str(result.exception).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--router", "least_loaded"], "give --trace FILE.jsonl too"),
        (["--trace", "t.jsonl", "--router", "least_loaded"], "give --config too"),
        (
            ["--trace", "t.jsonl", "--config", "smollm2-2p2d-cpu.yaml", "--router", "x"],
            "'x' is not one of prefix_affinity",
        ),
        (["--trace", "t.jsonl", "--trace-scale-len", "0"], "block_tokens=0 is outside 1 .. 512"),
        (["--trace", "absent.jsonl"], "absent.jsonl cannot be read as a trace"),
        (["--trace", "t.jsonl", "--plot", "out.png"], "a replay has nothing to draw"),
    ],
)
def test_bad_replay_is_refused_before_anything_starts(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *options])
    assert isinstance(result.exception, ConfigError)
    assert complaint in str(result.exception)
