"""`blockferry bench`: files that cannot be written are refused before anything is measured."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockferry.cluster.cli import app


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
