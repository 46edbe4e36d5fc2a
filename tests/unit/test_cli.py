"""The command line: bad input is one line on stderr and a failing exit, --json is one document on stdout."""

import dataclasses
import json
import signal
import sys
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

from blockferry.cluster.cli import main
from blockferry.cluster.cli_bench import fill_json_target
from blockferry.cluster.cli_output import progress_bar, size_words
from blockferry.cluster.launch_progress import Progress
from blockferry.cluster.shipped import find_config


@dataclasses.dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process; main() replaces signal handlers, so they are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run_main(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["blockferry", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return Done(returncode=int(ended.value.code or 0), stdout=shown.out, stderr=shown.err)

    yield run_main
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["generate"], ["status"], ["check"], ["fetch-model"], ["bench"], ["scale"], ["restart"]]
)
def test_every_command_has_help(run, command):
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chek"], "No such command 'chek'"),
        (["serve"], "Missing argument"),
        (["serve", "absent.yaml"], "no such file: absent.yaml"),
        (["generate", "absent.yaml", "hello"], "no such file: absent.yaml"),
        (["generate", "absent.yaml"], "Missing argument"),
        (["generate", "absent.yaml", "hello", "--max-tokens", "-1"], "--max-tokens"),
        (["generate", "absent.yaml", "hello", "--max-tokens", "many"], "--max-tokens"),
        (["status", "--jsn"], "No such option"),
        (["scale", "nobody", "prefill=2"], "no deployment is named 'nobody'"),
        (["scale", "nobody", "prefill"], "is no ROLE=COUNT"),
        (["scale", "nobody", "prefill=-1"], "is no ROLE=COUNT"),
        (["scale", "nobody", "encoder=1"], "is no ROLE=COUNT"),
        (["scale", "nobody"], "Missing argument"),
        (["restart", "nobody"], "no deployment is named 'nobody'"),
        (["restart", "nobody", "--drain-timeout", "-1"], "--drain-timeout"),
        (["fetch-model", "gpt-5"], "smollm2-135m-instruct"),
        (["bench", "serve", "--concurrency", "0"], "concurrency"),
        (["bench", "transfer", "--path", "pigeon"], "pigeon"),
        (["bench", "transfer", "--piece", "lots"], "lots"),
    ],
)
def test_bad_input_is_one_line_on_stderr(run, arguments, words):
    done = run(*arguments)
    assert done.returncode != 0
    assert done.stdout == ""
    line = done.stderr.strip()
    assert "\n" not in line
    assert line.startswith("error: ")
    assert words in line


def test_check_says_what_is_wrong_and_fails(run, tmp_path):
    file = tmp_path / "deployment.yaml"
    file.write_text("model: {path: nowhere}\ninstances: [{role: mixed}]\n")
    done = run("check", str(file), "--json")
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    assert [finding["level"] for finding in findings] == ["error"]
    assert "nowhere" in findings[0]["message"]


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        (["bench", "kv", "--json"], ["bench", "kv", "--json", "-"]),
        (["bench", "kv", "--json", "out.json"], ["bench", "kv", "--json", "out.json"]),
        (["bench", "kv", "--json", "--plot", "p.png"], ["bench", "kv", "--json", "-", "--plot", "p.png"]),
        (["bench", "kv", "--json", "-"], ["bench", "kv", "--json", "-"]),
        (["status", "--json"], ["status", "--json"]),
    ],
)
def test_json_without_a_file_goes_to_stdout(given, filled):
    assert fill_json_target(given) == filled


def test_sizes_are_words():
    assert [size_words(one) for one in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]


def test_a_bare_name_means_the_shipped_deployment_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = find_config(Path("smollm2-pd-cpu.yaml"))
    assert "role: prefill" in shipped.read_text()
    Path("smollm2-pd-cpu.yaml").write_text("mine")
    assert find_config(Path("smollm2-pd-cpu.yaml")).read_text() == "mine"
    assert find_config(Path("other/smollm2-pd-cpu.yaml")) == Path("other/smollm2-pd-cpu.yaml")


def test_pools_larger_than_memory_are_refused_before_ray_starts(run, tmp_path):
    file = tmp_path / "huge.yaml"
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    (checkpoint / "tokenizer.json").write_text("{}")
    file.write_text(
        f"model: {{path: {checkpoint}, dtype: float32}}\ncache: {{memory: 9000GiB}}\n"
        "instances: [{role: mixed}]\napi: {port: 0}\n"
    )
    done = run("serve", str(file))
    assert done.returncode == 1
    assert "MiB available; lower cache.memory" in done.stderr


def test_progress_that_no_terminal_shows_is_a_line_per_phase_and_tenth_of_a_long_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar() as report:
        for done in range(3):
            report(Progress(phase="starting", done=done, total=2))
        for done in range(1, 201):
            report(Progress(phase="training", done=done, total=200, note=f"loss {300 - done}"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["starting ...", "training ...", "training, loss 280: 20 of 200"]
    assert len(lines) == 12
