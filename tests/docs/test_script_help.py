"""Scripts with arguments print their help, and name a wrong argument."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from scripts import page_output, people, pictures

MAINS = [people.main, page_output.main, pictures.main]


@pytest.mark.parametrize("main", MAINS, ids=lambda each: each.__module__)
def test_a_script_prints_its_help(
    main: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert f"usage: python -m {main.__module__}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nobody"], "nobody is called 'nobody': choose from researcher, "),
        (["--write", "auditor"], "--write writes the rows of all people"),
    ],
)
def test_a_wrong_person_is_named(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["people", *words])
    with pytest.raises(SystemExit) as ended:
        people.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
