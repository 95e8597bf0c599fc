"""Scripts with arguments print their help, and name a wrong argument."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from scripts import article_pdf, page_output, people, pictures


def run(
    main: Callable[[], object],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[object, str, str]:
    """Run a script that ends by itself; return its exit code, its output and its errors."""
    monkeypatch.setattr(sys, "argv", ["script", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize("main", [people.main, page_output.main, pictures.main, article_pdf.main])
def test_a_script_prints_its_help(
    main: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, _ = run(main, ["--help"], monkeypatch, capsys)
    assert code == 0
    assert f"usage: python -m {main.__module__}" in printed


def test_a_wrong_person_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        (["nobody"], "nobody is called 'nobody': choose from researcher, "),
        (["--write", "auditor"], "--write writes the rows of all people"),
        (["--install"], "--install needs the names of people"),
    ):
        code, _, errors = run(people.main, words, monkeypatch, capsys)
        assert code == 2
        assert told in errors
