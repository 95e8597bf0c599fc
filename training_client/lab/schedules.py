"""Schedules as text on the command line: a curve and its last factor, or steps and factors.

`linear:0.5` goes from 1 to 0.5 over the whole run; so do `cosine` and `exponential`, each on its
curve. `200:1,300:0.5` makes 200 steps at the full value and 300 steps, and any after them, at half
of it. `decay:0.05:100` multiplies by e^(−0.05) after every 100 steps: with the steps of an epoch
this is the EXP budget of Yu et al. 2019 (arXiv 1904.02200), whose factor is e^(−kt) in epoch t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from training_client.plan import Plan, Schedule

_CURVES: Final[dict[str, Callable[[float, int], Schedule]]] = {
    "linear": Schedule.linear,
    "cosine": Schedule.cosine,
    "exponential": Schedule.exponential,
}
_DECAY: Final = "decay"
_FACTOR_MAX: Final = 1e6
SMALLEST_FACTORS: Final = {  # of each schedule of a plan
    "noise_schedule": 1 / _FACTOR_MAX,
    "clip_schedule": 1 / _FACTOR_MAX,
    "learning_rate_schedule": 0.0,
}


def parse_schedule(name: str, text: str, steps: int, steps_per_level: int = 1) -> Schedule:
    """Return the schedule that a text describes.

    Args:
        name: the attribute of the plan that it is for.
        text: see above.
        steps: the number of steps of the run.
        steps_per_level: steps of the run that a curve's levels are made of, such as an epoch.

    Raises:
        ValueError: the text is no schedule, or a factor is out of range.
    """
    curve, _, end = text.partition(":")
    if curve == _DECAY:
        return _parse_decay(name, text, end, steps)
    if curve not in _CURVES:
        return Schedule(tuple(_parse_piece(name, text, each) for each in text.split(",")))
    last = _parse_factor(name, text, end)
    if curve == "exponential" and not last > 0:
        raise ValueError(f"exponential decay ends above 0, not at {last:g}")
    schedule = _CURVES[curve](last, max(1, steps // steps_per_level))
    return Schedule(tuple((count * steps_per_level, factor) for count, factor in schedule.pieces))


def _parse_decay(name: str, text: str, parameters: str, steps: int) -> Schedule:
    """Parse `RATE:STEPS`; return the schedule of `steps` steps with factors e^(−RATE·level)."""
    rate_text, _, length = parameters.partition(":")
    try:
        rate = float(rate_text)
    except ValueError:
        raise _unreadable_error(text) from None
    if not (length.isascii() and length.isdigit() and int(length) > 0 and 0 <= rate < math.inf):
        raise _unreadable_error(text)
    starts = range(0, steps, int(length))
    return Schedule(
        tuple(
            (min(int(length), steps - start), _parse_factor(name, text, str(factor)))
            for start in starts
            for factor in [math.exp(-rate * (start // int(length)))]
        )
    )


def format_schedule(schedule: Schedule) -> str:
    """Return a schedule as steps and factors, with all their digits."""
    return ",".join(f"{steps}:{factor!r}" for steps, factor in schedule.pieces)


def schedules_of(plan: Plan) -> dict[str, str]:
    """Return a plan's schedules as text, keyed by attribute name."""
    found = {name: getattr(plan, name) for name in SMALLEST_FACTORS}
    return {name: format_schedule(each) for name, each in found.items() if each is not None}


def _parse_piece(name: str, text: str, piece: str) -> tuple[int, float]:
    """Parse one piece `STEPS:FACTOR` of a schedule into its number of steps and its factor."""
    steps, _, factor = piece.partition(":")
    if not (steps.strip().isascii() and steps.strip().isdigit() and int(steps) > 0):
        raise _unreadable_error(text)
    return int(steps), _parse_factor(name, text, factor)


def _parse_factor(name: str, text: str, number: str) -> float:
    """Parse a factor in a schedule; raise unless it is in the range of this kind of schedule."""
    try:
        factor = float(number)
    except ValueError:
        raise _unreadable_error(text) from None
    if not SMALLEST_FACTORS[name] <= factor <= _FACTOR_MAX:
        raise ValueError(
            f"factor {factor:g} is not from {SMALLEST_FACTORS[name]:g} to {_FACTOR_MAX:g}"
        )
    return factor


def _unreadable_error(text: str) -> ValueError:
    """Return the error for a text that is not a valid schedule."""
    return ValueError(
        f"{text!r} is no schedule: give a curve ({', '.join(_CURVES)}) and its last factor, as in "
        "linear:0.5, a rate and steps, as in decay:0.05:100, or steps and factors, as in "
        "200:1,300:0.5"
    )
