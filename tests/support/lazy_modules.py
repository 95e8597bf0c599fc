"""Modules that are imported when a test first uses them, and not when tests are collected."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


class LazyModule:
    """A module whose import takes seconds; each attribute is looked up in the real module.

    Args:
        name: the name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every object of a test module for some of these
            raise AttributeError(attribute)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that the module imports
            return getattr(importlib.import_module(self._name), attribute)
