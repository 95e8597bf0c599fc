"""The best adversary against the reference filter, and against filters that break one rule each.

The mechanisms have finitely many outcomes, and removing a record differs from adding one. The
adversary sees every privacy loss and chooses mechanisms, lengths, prices, interleaved grants and
ends of runs. What it attains is exact (`tests/support/privacy_filter_game.py`). Against the
reference filter it never exceeds δ of the reference and the slack, for any ε and either direction.
Against each broken filter it exceeds δ at ε in the games listed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from accountant_service.ledger.filters.base import Amounts
from accountant_service.ledger.filters.reference import ReferenceCharge
from accountant_service.ledger.rules import Balance, RuleError, State, close
from tests.support.discrete_mechanisms import (
    ADDING,
    LATTICE,
    REMOVING,
    ZERO,
    Array,
    mixture,
    random_weights,
    weaken,
)
from tests.support.ledger_game import LedgerRules, Run
from tests.support.privacy_filter_game import (
    Adversary,
    CoarseGrid,
    ComposeAndStop,
    Filter,
    FirstReservation,
    LeastDominatingGivenBack,
    Menu,
    Move,
    OneDirection,
    OnlyAtEpsilon,
    Policy,
    Position,
    ProRataPrice,
    ReferenceFilter,
    ReleasedAfterGrants,
    ReplacedAfterGrants,
    SlackNotCharged,
    SpentSlackGivenBack,
    WorseDirection,
    attained,
)

ROUNDING = 1e-12  # of float64 sums over long interactions
# Each filter that breaks a rule, and games in which the adversary exceeds δ.
BROKEN: dict[type[ReferenceFilter], tuple[int, ...]] = {
    LeastDominatingGivenBack: (7, 12, 22),
    SlackNotCharged: (114, 130),
    SpentSlackGivenBack: (114, 130),
    ReleasedAfterGrants: (0, 1),
    ProRataPrice: (1257, 5536, 6244),
    OneDirection: (2, 8, 14),
    WorseDirection: (8, 21, 99),
    CoarseGrid: (0, 8, 14),
    OnlyAtEpsilon: (0, 4, 7),
}


@dataclass(frozen=True)
class Game:
    """A menu whose first mechanism is the reference, and a budget.

    Attributes:
        menu: the mechanisms.
        copies: the number of reference steps of the budget.
        epsilon: ε, in units of log 2.
        unit: δ of a unit of slack.
        slack: the number of units of slack.
    """

    menu: Menu
    copies: int
    epsilon: int
    unit: float
    slack: int

    @property
    def delta(self) -> float:
        """δ of the reference steps at ε, in the worse direction."""
        return at(self.menu.power(0, self.copies), self.epsilon)

    @property
    def total_delta(self) -> float:
        """δ of the budget with its slack."""
        return self.delta + self.slack * self.unit

    def filtered(self, kind: type) -> ReferenceFilter:
        """Return a filter for this game."""
        made: ReferenceFilter = kind(self.menu, 0, self.copies, self.slack, self.unit, self.epsilon)
        return made


def at(profile: Array, epsilon: int) -> float:
    """Return a profile at ε in the worse direction."""
    return float(profile[:, ZERO + epsilon].max())


def random_game(seed: int) -> Game:
    """Return a game with two or three mechanisms; some are like the reference, only weaker."""
    random = np.random.default_rng(seed)
    reference = random_weights(random, int(random.integers(3, 6)))
    others = [
        weaken(reference, random)
        if random.random() < 0.5
        else random_weights(random, int(random.integers(3, 6)))
        for _ in range(int(random.integers(1, 3)))
    ]
    mechanisms = [mixture(each) for each in (reference, *others)]
    copies, epsilon = int(random.integers(1, 5)), int(random.integers(0, 4))
    unit, slack = 2.0 ** -int(random.integers(4, 11)), int(random.integers(0, 4))
    return Game(Menu(mechanisms), copies, epsilon, unit, slack)


def play(privacy_filter: Filter, game: Game, **limits: int) -> Array:
    """Return what the best adversary attains."""
    return Adversary(privacy_filter, game.menu, **limits).play()


def check_reference_filter(seeds: Iterable[int], **limits: int) -> None:
    """Fail if the best adversary exceeds the promise in one of these games."""
    for seed in seeds:
        game = random_game(seed)
        rules = game.filtered(ReferenceFilter)
        excess = play(rules, game, **limits) - rules.promise(rules.start())
        assert excess.max() <= ROUNDING, f"game {seed}: {excess.max()} above the promise"


@pytest.mark.parametrize("direction", [REMOVING, ADDING])
def test_profiles_are_those_of_the_definition(direction: int) -> None:
    """A composition's profile is the sum over all outcomes, and swapping P and Q turns it round."""
    random = np.random.default_rng(1)
    for _ in range(30):
        menu = Menu([mixture(random_weights(random)), mixture(random_weights(random))])
        found, first = menu.compose([2, 1]), Position(0, 0, 0)
        order = {
            Position(step, 0, 0): Move(mechanism, Position(step + 1, 0, 0))
            for step, mechanism in enumerate((0, 0, 1))
        }

        def plan(position: Position, _: int, order: dict[Position, Move] = order) -> Move | None:
            return order.get(position)

        for epsilon in range(-3, 4):
            exact = attained(plan, first, menu, epsilon, direction)
            assert float(exact) == found[direction, ZERO + epsilon]
        turned = 1 - 2.0**LATTICE + 2.0**LATTICE * found[1 - direction, ::-1]
        assert found[direction] == pytest.approx(turned, rel=1e-9, abs=1e-9)


def best_policy(adversary: Adversary, epsilon: int, direction: int) -> Policy:
    """Return the policy whose δ at ε the adversary's dynamic programming found."""

    def choose(position: Position, loss: int) -> Move | None:
        place = (direction, ZERO + epsilon - loss)
        value = adversary.value(position)[place]
        if value == max(1 - 2.0 ** (epsilon - loss), 0):
            return None
        moves = adversary.moves(position)
        return next(move for move in moves if adversary.value_of(move)[place] == value)

    return choose


def random_policy(adversary: Adversary, seed: int) -> Policy:
    """Return a policy that chooses one of the moves, or to stop, at random."""
    random, chosen = np.random.default_rng(seed), dict[tuple[Position, int], Move | None]()

    def choose(position: Position, loss: int) -> Move | None:
        if (position, loss) not in chosen:
            moves = [*adversary.moves(position)] if random.random() < 0.95 else []
            chosen[position, loss] = moves[random.integers(len(moves))] if moves else None
        return chosen[position, loss]

    return choose


def check_random_policies(seeds: Iterable[int]) -> None:
    """Fail if a random policy exceeds δ by the definition, in exact arithmetic."""
    for seed in seeds:
        game = random_game(seed)
        limits = {"open_runs": 2, "grants": 4, "withdrawals": 1}
        adversary = Adversary(game.filtered(ReferenceFilter), game.menu, **limits)
        policy = random_policy(adversary, seed)
        for direction in (REMOVING, ADDING):
            found = attained(policy, adversary.first, game.menu, game.epsilon, direction)
            assert found <= game.total_delta + ROUNDING, f"game {seed}"


def test_the_value_is_attained_by_a_policy() -> None:
    """The δ found by dynamic programming is δ of the best policy's transcripts."""
    for seed in range(60):
        game = random_game(seed)
        adversary = Adversary(game.filtered(ReferenceFilter), game.menu)
        found = adversary.play()
        for direction in (REMOVING, ADDING):
            policy = best_policy(adversary, game.epsilon, direction)
            exact = attained(policy, adversary.first, game.menu, game.epsilon, direction)
            assert float(exact) == pytest.approx(found[direction, ZERO + game.epsilon], abs=1e-14)


@pytest.mark.slow
def test_random_interactions_stay_within_delta_by_the_definition() -> None:
    check_random_policies(range(40_000, 40_400))


@pytest.mark.slow
def test_the_reference_filter_holds_against_the_best_adversary() -> None:
    check_reference_filter(range(500))


@pytest.mark.slow
def test_the_reference_filter_holds_with_interleaved_runs() -> None:
    check_reference_filter(range(10_000, 10_050), open_runs=2, grants=4)


def test_the_reference_filter_holds_with_runs_released_before_their_first_grant() -> None:
    check_reference_filter(range(20_000, 20_060), withdrawals=1, grants=3)


@pytest.mark.slow
def test_the_bound_holds_from_every_position() -> None:
    """The induction of the proof: no rest exceeds the stack's profile and the slack left."""
    for seed in range(30_000, 30_030):
        game = random_game(seed)
        rules = game.filtered(ReferenceFilter)
        adversary = Adversary(rules, game.menu, open_runs=2, grants=3)
        adversary.play()
        for position, value in adversary.positions().items():
            assert (value <= rules.promise(position.state) + ROUNDING).all()


@pytest.mark.slow
def test_games_exchange_in_both_directions_and_use_slack() -> None:
    """The games above are not empty: exchanges, exchanges back and slack occur and matter."""
    exchanged = returned = above = 0
    for seed in range(300):
        game = random_game(seed)
        rules = game.filtered(ReferenceFilter)
        adversary = Adversary(rules, game.menu)
        above += bool((adversary.play() > game.menu.power(0, game.copies) + ROUNDING).any())
        holds = {hold for place in adversary.positions() for hold in place.state.holds}
        others = [hold for hold in holds if hold.mechanism and hold.granted and hold.copies]
        exchanged += bool(others)
        returned += any(rules.returned(each)[0] for each in others if each.granted < each.steps)
    print(f"of 300 games, {exchanged} exchange, {returned} exchange back, {above} need the slack")
    assert exchanged >= 100
    assert returned >= 50
    assert above >= 20


def test_the_first_reservation_may_choose_the_reference() -> None:
    for seed in range(30):
        game = random_game(seed)
        rules = FirstReservation(game.menu, game.delta, game.slack, game.unit, game.epsilon)
        found = play(rules, game, withdrawals=1, grants=3)
        assert at(found, game.epsilon) <= game.total_delta + ROUNDING


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_rule_is_found_by_the_adversary(kind: type) -> None:
    for seed in BROKEN[kind]:
        game = random_game(seed)
        assert at(play(game.filtered(ReferenceFilter), game), game.epsilon) <= game.total_delta
        assert at(play(game.filtered(kind), game), game.epsilon) > game.total_delta + 1e-6


def check_ledger_rules(seed: int, **limits: int) -> None:
    """Fail if the rules let the adversary exceed the model's promise."""
    game = random_game(seed)
    model = game.filtered(ReferenceFilter)
    found = play(game.filtered(LedgerRules), game, **limits)
    assert (found <= model.promise(model.start()) + ROUNDING).all(), f"game {seed}"


@pytest.mark.nightly
def test_the_ledgers_own_rules_hold_against_the_best_adversary() -> None:
    """The rules attain what the model attains: no more than δ and the slack."""
    for seed in range(50_000, 50_150):
        check_ledger_rules(seed)
    for seed in range(50_000, 50_050):
        check_ledger_rules(seed, open_runs=2, grants=3, withdrawals=1)


def give_back_what_is_held(charge: ReferenceCharge, granted: int) -> Amounts:
    """Return what is held, as if no exchange back were needed."""
    return charge.held(granted)


def test_giving_back_what_is_held_is_found_by_the_adversary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    games = [random_game(seed) for seed in (1257, 5536, 6244)]
    before = [at(play(each.filtered(LedgerRules), each), each.epsilon) for each in games]
    monkeypatch.setattr(ReferenceCharge, "refund", give_back_what_is_held)
    after = [at(play(each.filtered(LedgerRules), each), each.epsilon) for each in games]
    assert all(found <= game.total_delta for found, game in zip(before, games, strict=True))
    assert all(found > game.total_delta + 1e-6 for found, game in zip(after, games, strict=True))


def test_the_rules_refuse_to_give_back_spent_slack() -> None:
    charge = ReferenceCharge(4, 8, 10, 10)
    run = Run(1, charge, 4).reservation
    with pytest.raises(RuleError, match="can be returned"):
        close(replace(run, charge=replace(charge, steps=5)), State.COMMITTED, (0, 20))
    change = close(run, State.COMMITTED)
    assert change is not None
    assert change.balance == Balance((0, 0), (0, -10))


def test_replacing_a_reference_after_grants_is_unsound() -> None:
    for game in map(random_game, (0, 1, 2)):
        rules = ReplacedAfterGrants(game.menu, game.delta, game.slack, game.unit, game.epsilon)
        assert at(play(rules, game), game.epsilon) > game.total_delta + 1e-6


def test_composing_and_stopping_at_the_budget_is_unsound() -> None:
    for game in map(random_game, (0, 7, 8)):
        rules = ComposeAndStop(game.menu, game.delta, game.epsilon)
        assert at(play(rules, game), game.epsilon) > game.delta + 1e-6


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_reference_filter_holds_in_many_games(night_seed: int) -> None:
    """The best adversary in 120 000 games, and 100 000 random interactions by the definition."""
    first = 10**6 * night_seed

    def seeds(low: int, high: int) -> range:
        """Return this night's seeds."""
        return range(first + low, first + high)

    check_reference_filter(seeds(100_000, 200_000))
    check_reference_filter(seeds(200_000, 208_000), open_runs=2, grants=4)
    check_reference_filter(seeds(208_000, 210_000), open_runs=2, grants=6)
    check_reference_filter(seeds(210_000, 220_000), open_runs=2, withdrawals=1, grants=3)
    check_random_policies(seeds(300_000, 400_000))
    for seed in seeds(400_000, 400_500):
        check_ledger_rules(seed)
        check_ledger_rules(seed, open_runs=2, grants=3, withdrawals=1)
