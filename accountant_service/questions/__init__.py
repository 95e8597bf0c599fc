"""The questions: their models, answers, cache and problems, and the functions of the package."""

from typing import Final

PRELOADING: Final = f"{__name__}.preloading:fill_caches"  # what computation processes share
