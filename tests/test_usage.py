"""A wrong command line: value, rule and legal in words and as JSON, exit code 2, no traceback."""

from __future__ import annotations

import json
import sys

import pytest

from polyreme import cli


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
