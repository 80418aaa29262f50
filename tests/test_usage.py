"""A wrong command line: value, rule and legal in words and as JSON, exit code 2, no traceback."""

from __future__ import annotations

import json
import sys

import pytest
import typer

import refusals
from polyreme import cli
from polyreme.ending import end

MLP = """
[model]
kind = "mlp"
[data]
kind = "digits"
[train]
steps = 2
global_batch = 8
[cluster]
cpu_processes = 2
"""


def _said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["polyreme", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "path", "value", "rule", "legal"),
    [
        (["chek", "x"], "command line", "chek", "is no command", "check, "),
        (["check"], "command line SPEC.toml", None, "is missing", "spec.toml"),
        (["check", "x", "--jason"], "command line --jason", None, "is no option", "--json"),
        (["plan", "x", "--top", "a"], "command line --top", "a", "is no integer", "5 (or any"),
        (["plan", "x", "--top=0"], "command line --top", "0", "is not >= 1", "5 (or any"),
        (["train", "x", "--devices", "-1"], "command line --devices", "-1", "is not >= 1", "1 ("),
        (["list", "modls"], "command line what", "modls", "is not one of", "models, "),
        (["check", "a", "b", "c"], "command line", "c", "is more than", "leave it out"),
    ],
)
def test_a_wrong_command_line_is_said_like_any_other_fault(
    arguments: list[str],
    path: str,
    value: str | None,
    rule: str,
    legal: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed, said = _said([*arguments, "--json"], monkeypatch, capsys)
    (fault,) = json.loads(printed)["errors"]
    assert (fault["path"], fault["value"]) == (path, value)
    assert fault["rule"].startswith(rule)
    assert fault["legal"].startswith(legal)
    assert said.startswith(f"polyreme: {path}: ")
    in_words = _said(arguments, monkeypatch, capsys)
    assert in_words == ("", said)


def test_an_option_without_its_value_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, said = _said(["plan", "x", "--top"], monkeypatch, capsys)
    assert said == (
        "polyreme: command line --top: wants a value after it. Legal: --top VALUE (see --help).\n"
    )
    assert not printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--fix", "pp=2", "--fix", "pp=4"), '"pp" is fixed more than once'),
        (("--fix", "pp=2", "--set", "parallel.pp=4"), '"pp" is fixed more than once'),
        (("--fix", "microbatch=3"), "--set parallel.NAME=VALUE"),
    ],
)
def test_a_fix_that_another_would_undo_is_refused(tmp_path, arguments, said):
    """The last one won, and nothing was said."""
    (tmp_path / "spec.toml").write_text(MLP)
    found = refusals.command(("plan", str(tmp_path / "spec.toml"), "--assume", *arguments))
    assert found.code == 2
    assert said in found.err


def test_an_interrupted_command_prints_one_json_object(capsys):
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        end(command, True)
    assert ended.value.exit_code == 130
    assert json.loads(capsys.readouterr().out)["errors"][0]["rule"] == "interrupted"


@pytest.mark.slice("check")
@pytest.mark.parametrize("command", ["train", "verify", "check"])
def test_a_model_that_trains_nothing_is_refused(tmp_path, command):
    """`verify` ended in a traceback, and `train` did not say it."""
    (tmp_path / "frozen.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).requires_grad_(False)\n"
    )
    factory = f"{tmp_path}/frozen.py:make"
    spec = MLP.replace('kind = "mlp"', f'kind = "python"\nfactory = "{factory}"')
    (tmp_path / "spec.toml").write_text(spec)
    found = refusals.command((command, str(tmp_path / "spec.toml"), "--devices", "1"))
    assert found.code == 2, found.err
    assert "trains nothing (of 2 parameters)" in found.err
