"""Compute the best adversary against a privacy filter, exactly, on small discrete mechanisms.

A filter decides which reservations, grants and ends of runs it allows. It implements `Filter`: a
state is any hashable value, and every move returns the next state. The adversary sees the realised
privacy loss after every granted step. At each state and each loss it chooses the move that
maximises δ, by dynamic programming. All thresholds ε and both directions are played at once: the
value of a state is a profile as in `discrete_mechanisms`.

`ReferenceFilter` models the rules of docs/accountants/filters.md. `find_prices`,
`exchange_back` and `excess` stand for the numerics; `start`, `open_runs`, `reserve`, `grant` and
`close` are the bookkeeping. Every other filter below breaks one rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from tests.support.discrete_mechanisms import NOTHING, REMOVING, ZERO, Array, Mechanism

State = Any  # hashable; only the filter looks inside


class OpenRun(NamedTuple):
    """An open reservation as the adversary sees it.

    Attributes:
        mechanism: the index on the menu.
        granted: the number of steps granted.
        left: the number of steps reserved and not granted.
    """

    mechanism: int
    granted: int
    left: int


class Filter(Protocol):
    """The moves of a privacy filter."""

    def start(self) -> Hashable:
        """Return the state before the first reservation."""

    def open_runs(self, state: State) -> Sequence[OpenRun]:
        """Return the open runs; the other moves name a run by its place here."""

    def reserve(self, state: State, mechanism: int, steps: int) -> Sequence[State]:
        """Return the states after a reservation: one for each price, none if it is refused."""

    def grant(self, state: State, run: int) -> State:
        """Return the state after one more step of a run."""

    def close(self, state: State, run: int) -> State:
        """Return the state after a run's commit, release or expiry."""


@dataclass
class Menu:
    """The mechanisms that an adversary may run, and the profiles of their compositions."""

    mechanisms: Sequence[Mechanism]
    _powers: dict[tuple[int, int], Array] = field(default_factory=dict)

    def power(self, mechanism: int, steps: int) -> Array:
        """Return the profile of a number of steps of one mechanism."""
        if steps == 0:
            return NOTHING
        if (mechanism, steps) not in self._powers:
            rest = self.power(mechanism, steps - 1)
            self._powers[mechanism, steps] = self.mechanisms[mechanism].before(rest)
        return self._powers[mechanism, steps]

    def compose(self, steps: Sequence[int]) -> Array:
        """Return the profile of a composition, given the number of steps of each mechanism."""
        profile = NOTHING
        for mechanism, count in zip(self.mechanisms, steps, strict=True):
            for _ in range(count):
                profile = mechanism.before(profile)
        return profile


class Position(NamedTuple):
    """A point of the interaction: the filter's state, and the moves that the adversary has left."""

    state: Hashable
    grants: int
    withdrawals: int


class Move(NamedTuple):
    """A move: the mechanism that makes a step, if any, and the position afterwards."""

    mechanism: int | None
    after: Position


class Adversary:
    """The adversary who attains the largest δ against a filter, found by dynamic programming.

    Args:
        privacy_filter: the filter.
        menu: the mechanisms.
        lengths: the numbers of steps that a run may have.
        open_runs: the most runs that are open at a time.
        grants: the most steps in all.
        withdrawals: the most runs that are closed without grants.
    """

    def __init__(
        self,
        privacy_filter: Filter,
        menu: Menu,
        lengths: Sequence[int] = (1, 2, 3),
        open_runs: int = 1,
        grants: int = 4,
        withdrawals: int = 0,
    ) -> None:
        self._filter, self._menu, self._lengths = privacy_filter, menu, lengths
        self._open_runs = open_runs
        self.first = Position(privacy_filter.start(), grants, withdrawals)
        self._values: dict[Position, Array] = {}

    def play(self) -> Array:
        """Return the profile of the whole interaction: the largest δ at every ε."""
        return self.value(self.first)

    def positions(self) -> dict[Position, Array]:
        """Return every position reached, each with its `value`."""
        return self._values

    def value(self, position: Position) -> Array:
        """Return the largest profile that the rest of the interaction attains from a position."""
        if position not in self._values:
            best = NOTHING  # the adversary stops
            for move in self.moves(position):
                best = np.maximum(best, self.value_of(move))
            self._values[position] = best
        return self._values[position]

    def value_of(self, move: Move) -> Array:
        """Return the largest profile that the interaction attains from a move on."""
        rest = self.value(move.after)
        if move.mechanism is None:
            return rest
        return self._menu.mechanisms[move.mechanism].before(rest)

    def moves(self, position: Position) -> Iterator[Move]:
        """Yield every move at a position, apart from stopping."""
        state, grants, withdrawals = position
        if not grants:
            return
        runs = self._filter.open_runs(state)
        for place, run in enumerate(runs):
            if run.left:
                after = self._filter.grant(state, place)
                yield Move(run.mechanism, Position(after, grants - 1, withdrawals))
            if run.granted or withdrawals:
                after = self._filter.close(state, place)
                yield Move(None, Position(after, grants, withdrawals - (not run.granted)))
        if len(runs) < self._open_runs:
            for mechanism, steps in product(range(len(self._menu.mechanisms)), self._lengths):
                for after in self._filter.reserve(state, mechanism, steps):
                    yield Move(None, Position(after, grants, withdrawals))


Policy = Callable[[Position, int], Move | None]  # of a position and the loss so far; None: stop


def attained(policy: Policy, first: Position, menu: Menu, epsilon: int, direction: int) -> Fraction:
    """Return the δ that a policy attains at ε, summed over all transcripts.

    Sum P − e^ε·Q over all transcripts for which it is positive. Outcomes that are impossible under
    Q count as they are; outcomes that are impossible under P add nothing.
    """
    pairs = [each if direction == REMOVING else each.swapped() for each in menu.mechanisms]
    pending, total = [(first, 0, Fraction(1))], Fraction(0)
    while pending:
        position, loss, mass = pending.pop()
        move = policy(position, loss)
        if move is None:
            total += mass * max(1 - Fraction(2) ** (epsilon - loss), 0)
        elif move.mechanism is None:
            pending.append((move.after, loss, mass))
        else:
            pair = pairs[move.mechanism]
            total += mass * Fraction(pair.infinite)
            pending += [
                (move.after, loss + more, mass * Fraction(part)) for more, part in pair.losses
            ]
    return total


class Hold(NamedTuple):
    """The holdings of an open reservation.

    Attributes:
        mechanism: the index on the menu.
        steps: the number of steps reserved.
        granted: the number of steps granted.
        copies: the number of reference steps that the run was exchanged for.
        slack: the units of slack for the exchange.
        slack_back: the units of slack for the exchange back.
    """

    mechanism: int
    steps: int
    granted: int
    copies: int
    slack: int
    slack_back: int


class Ledger(NamedTuple):
    """A state of the reference filter: what is free, and the open reservations in a fixed order."""

    copies: int
    slack: int
    holds: tuple[Hold, ...]


class ReferenceFilter:
    """The reference filter in the game, with every price that it may charge for a run.

    Args:
        menu: the mechanisms.
        reference: the index of the reference.
        copies: the number of reference steps of the budget.
        slack: the number of units of slack.
        unit: δ of a unit of slack.
        epsilon: ε of the budget, in units of log 2.
    """

    def __init__(
        self, menu: Menu, reference: int, copies: int, slack: int, unit: float, epsilon: int
    ) -> None:
        self.menu, self.reference, self.unit, self.epsilon = menu, reference, unit, epsilon
        self.copies, self.slack = copies, slack
        self._prices: dict[tuple[int, int], list[Hold]] = {}

    def promise(self, state: Ledger) -> Array:
        """Return the theorem's bound on the profile of the rest of the interaction."""
        counts, slack = [0] * len(self.menu.mechanisms), state.slack
        counts[self.reference] = state.copies
        for hold in state.holds:
            slack += hold.slack_back
            if hold.granted:
                counts[hold.mechanism] += hold.steps - hold.granted
            else:
                counts[self.reference] += hold.copies
                slack += hold.slack
        return self.menu.compose(counts) + slack * self.unit

    def start(self) -> Ledger:
        """Return the state with the whole budget free."""
        return Ledger(self.copies, self.slack, ())

    def open_runs(self, state: Ledger) -> list[OpenRun]:
        """Return the open runs as the adversary sees them."""
        return [
            OpenRun(hold.mechanism, hold.granted, hold.steps - hold.granted) for hold in state.holds
        ]

    def reserve(self, state: Ledger, mechanism: int, steps: int) -> list[Ledger]:
        """Return the states after a reservation, one for each price that fits."""
        if (mechanism, steps) not in self._prices:
            self._prices[mechanism, steps] = list(self.find_prices(mechanism, steps))
        return [
            Ledger(
                state.copies - hold.copies,
                state.slack - hold.slack - hold.slack_back,
                tuple(sorted((*state.holds, hold))),
            )
            for hold in self._prices[mechanism, steps]
            if hold.copies <= state.copies and hold.slack + hold.slack_back <= state.slack
        ]

    def grant(self, state: Ledger, run: int) -> Ledger:
        """Return the state after one more step of a run."""
        hold = state.holds[run]
        return state._replace(holds=_with(state, run, hold._replace(granted=hold.granted + 1)))

    def close(self, state: Ledger, run: int) -> Ledger:
        """Return the state after a run's end, with what it gives back."""
        copies, slack = self.returned(state.holds[run])
        return Ledger(state.copies + copies, state.slack + slack, _with(state, run, None))

    def returned(self, hold: Hold) -> tuple[int, int]:
        """Return the reference steps and the units of slack that are free after a run's end."""
        if not hold.granted:
            return hold.copies, hold.slack + hold.slack_back
        left = hold.steps - hold.granted
        if hold.mechanism == self.reference or not left:
            return left, hold.slack_back
        return self.exchange_back(hold, left), 0

    def exchange_back(self, hold: Hold, left: int) -> int:
        """Return the most reference steps that the remaining steps dominate."""
        copies = hold.copies * left // hold.steps  # the share that was not used, rounded down
        remaining = self.menu.power(hold.mechanism, left)
        while self.excess(self.menu.power(self.reference, copies), remaining) > hold.slack_back:
            copies -= 1
        return copies

    def excess(self, profile: Array, dominating: Array) -> int:
        """Return the units of slack with which one profile dominates another."""
        above = np.max(self.seen(profile) - self.seen(dominating))
        return max(math.ceil(above / self.unit), 0)

    def seen(self, profile: Array) -> Array:
        """Return the part of a profile that a domination test looks at; here all of it."""
        return profile

    def find_prices(self, mechanism: int, steps: int) -> list[Hold]:
        """Return every price of a run that another price does not improve on."""
        if mechanism == self.reference:
            return [Hold(mechanism, steps, 0, steps, 0, 0)]
        found, least = [], self.slack + 1
        run = self.menu.power(mechanism, steps)
        for copies in range(self.copies + 1):
            slack = self.excess(run, self.menu.power(self.reference, copies))
            if slack < least:
                least = slack
                found += [
                    Hold(mechanism, steps, 0, copies, slack, back)
                    for back in range(min(self.slack - slack, int(steps > 1)) + 1)
                ]
        return found


def _with(state: Ledger, run: int, hold: Hold | None) -> tuple[Hold, ...]:
    """Return the state's holds with one of them replaced, or removed if `hold` is None."""
    others = state.holds[:run] + state.holds[run + 1 :]
    return others if hold is None else tuple(sorted((*others, hold)))


class LeastDominatingGivenBack(ReferenceFilter):
    """A faulty filter that gives back reference steps that dominate the remaining steps."""

    def exchange_back(self, hold: Hold, left: int) -> int:
        """Return the fewest reference steps that dominate the remaining steps."""
        remaining = self.menu.power(hold.mechanism, left)
        return next(
            copies
            for copies in range(hold.copies + 1)
            if copies == hold.copies
            or self.excess(remaining, self.menu.power(self.reference, copies)) == 0
        )


class SlackNotCharged(ReferenceFilter):
    """A faulty filter that uses slack in an exchange without charging it."""

    def reserve(self, state: Ledger, mechanism: int, steps: int) -> list[Ledger]:
        """Return the states after a reservation, with no slack charged."""
        return [
            after._replace(slack=state.slack) for after in super().reserve(state, mechanism, steps)
        ]

    def returned(self, hold: Hold) -> tuple[int, int]:
        """Return no slack, because none was charged."""
        return super().returned(hold)[0], 0


class SpentSlackGivenBack(ReferenceFilter):
    """A faulty filter that gives the slack of an exchange back when the run ends."""

    def returned(self, hold: Hold) -> tuple[int, int]:
        """Return all slack at the run's end, also what the exchange used."""
        return super().returned(hold)[0], hold.slack + hold.slack_back


class ReleasedAfterGrants(ReferenceFilter):
    """A faulty filter that gives everything back at a release, although steps were granted."""

    def returned(self, hold: Hold) -> tuple[int, int]:
        """Return everything that was held, whatever was granted."""
        return hold.copies, hold.slack + hold.slack_back


class ProRataPrice(ReferenceFilter):
    """A faulty filter that charges each granted step its share of the whole run's price."""

    def exchange_back(self, hold: Hold, left: int) -> int:
        """Return a share of the price in proportion to the remaining steps."""
        return hold.copies * left // hold.steps


class OneDirection(ReferenceFilter):
    """A faulty filter that tests domination at x ≥ 0 for removing a record only."""

    def seen(self, profile: Array) -> Array:
        """Return the profile at x ≥ 0 for removing a record."""
        return profile[0, ZERO:]


class WorseDirection(ReferenceFilter):
    """A faulty filter that compares the worse directions of both profiles, at x ≥ 0 only."""

    def seen(self, profile: Array) -> Array:
        """Return the larger of both directions' profiles at x ≥ 0."""
        return np.asarray(profile[:, ZERO:].max(0))


class CoarseGrid(ReferenceFilter):
    """A faulty filter that tests domination at every third x only."""

    def seen(self, profile: Array) -> Array:
        """Return every third point of the profile from x = 0 on."""
        return profile[:, ZERO::3]


class OnlyAtEpsilon(ReferenceFilter):
    """A faulty filter that tests domination at x = ε only."""

    def seen(self, profile: Array) -> Array:
        """Return the profile at ε."""
        return profile[:, ZERO + self.epsilon]


class FirstReservation:
    """A reference filter whose reference is the mechanism of the first reservation.

    Args:
        menu: the mechanisms.
        delta: δ of the budget, without slack.
        slack: the number of units of slack.
        unit: δ of a unit of slack.
        epsilon: ε of the budget, in units of log 2.
    """

    most_copies = 4

    def __init__(self, menu: Menu, delta: float, slack: int, unit: float, epsilon: int) -> None:
        self.filters = [
            ReferenceFilter(menu, each, copies, slack, unit, epsilon)
            for each in range(len(menu.mechanisms))
            for copies in [self._count_copies(menu, each, delta, epsilon)]
        ]

    def _count_copies(self, menu: Menu, reference: int, delta: float, epsilon: int) -> int:
        """Return how many steps of a mechanism fit (ε, δ), up to `most_copies`."""
        copies = 0
        while copies < self.most_copies:
            if menu.power(reference, copies + 1)[:, ZERO + epsilon].max() > delta:
                break
            copies += 1
        return copies

    def start(self) -> tuple[int, bool, Ledger]:
        """Return the first state: no reference, nothing granted and no open runs."""
        return -1, False, Ledger(0, 0, ())

    def may_replace(self, granted: bool, ledger: Ledger) -> bool:
        """Return whether the reference may be another one."""
        return not granted and not ledger.holds

    def open_runs(self, state: Any) -> list[OpenRun]:
        """Return the open runs of the current ledger state."""
        reference, _, ledger = state
        return self.filters[reference].open_runs(ledger)

    def reserve(self, state: Any, mechanism: int, steps: int) -> list[Any]:
        """Reserve; the first reservation also chooses the reference."""
        reference, granted, ledger = state
        found = []
        if reference >= 0:
            found = [
                (reference, granted, after)
                for after in self.filters[reference].reserve(ledger, mechanism, steps)
            ]
        if self.may_replace(granted, ledger):
            anew = self.filters[mechanism]
            found += [
                (mechanism, granted, after)
                for after in anew.reserve(anew.start(), mechanism, steps)
            ]
        return found

    def grant(self, state: Any, run: int) -> Any:
        """Return the state after a grant, from which on the reference is fixed."""
        reference, _, ledger = state
        return reference, True, self.filters[reference].grant(ledger, run)

    def close(self, state: Any, run: int) -> Any:
        """Return the state after a run's end."""
        reference, granted, ledger = state
        return reference, granted, self.filters[reference].close(ledger, run)


class ReplacedAfterGrants(FirstReservation):
    """A faulty filter that replaces the reference although steps were granted."""

    def may_replace(self, _granted: bool, ledger: Ledger) -> bool:
        """Return whether nothing is held, whatever was granted."""
        return not ledger.holds


class ComposeAndStop:
    """A faulty filter that admits a step while the composition so far is within δ at ε."""

    def __init__(self, menu: Menu, delta: float, epsilon: int) -> None:
        self._menu, self._delta, self._at = menu, delta, ZERO + epsilon

    def start(self) -> tuple[tuple[int, ...], tuple[Hold, ...]]:
        """Return the first state: no granted steps of any mechanism, and no open runs."""
        return (0,) * len(self._menu.mechanisms), ()

    def open_runs(self, state: Any) -> list[OpenRun]:
        """Return the open runs."""
        return [
            OpenRun(each.mechanism, each.granted, each.steps - each.granted) for each in state[1]
        ]

    def reserve(self, state: Any, mechanism: int, steps: int) -> list[Any]:
        """Reserve a run if all granted and reserved steps together are within δ at ε."""
        granted, holds = state
        hold = Hold(mechanism, steps, 0, 0, 0, 0)
        total = list(granted)
        for each in (*holds, hold):
            total[each.mechanism] += each.steps - each.granted
        if self._menu.compose(total)[:, self._at].max() > self._delta:
            return []
        return [(granted, tuple(sorted((*holds, hold))))]

    def grant(self, state: Any, run: int) -> Any:
        """Return the state after one more step of a run."""
        granted, holds = state
        hold = holds[run]
        counts = list(granted)
        counts[hold.mechanism] += 1
        after = (*holds[:run], *holds[run + 1 :], hold._replace(granted=hold.granted + 1))
        return tuple(counts), tuple(sorted(after))

    def close(self, state: Any, run: int) -> Any:
        """Return the state without a run that has ended."""
        granted, holds = state
        return granted, holds[:run] + holds[run + 1 :]
