"""Packages come from where pip is set up to find them."""

from __future__ import annotations

from scripts.install import read_settings

LISTED = r"""global.index-url='https://packages.example/simple'
global.timeout='60'
global.find-links='\n/wheels\n/more'
:env:.find-links='/here'
"""


def test_pips_settings_become_those_of_uv() -> None:
    assert read_settings(LISTED) == {
        "UV_DEFAULT_INDEX": "https://packages.example/simple",
        "UV_FIND_LINKS": "/here",
    }
    listed = "".join(LISTED.splitlines(keepends=True)[:-1])
    assert read_settings(listed)["UV_FIND_LINKS"] == "/wheels,/more"
    assert read_settings("") == {}
