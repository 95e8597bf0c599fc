"""Caps of keys and teams: shares of one budget, held in the transaction that reserves.

And the runs that a key may change: its own, those of its team, and all with scope owner.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accountant_service.ledger import database as opening
from accountant_service.ledger import hash_chain, plans, rules
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.errors import LedgerError
from accountant_service.ledger.filters import LateReferenceFilter
from accountant_service.ledger.filters.base import count_units_within, subtract
from accountant_service.ledger.filters.reference import SLACK_UNITS, ReferenceFilter
from accountant_service.ledger.repair import repair
from accountant_service.ledger.repository import Transaction
from accountant_service.ledger.rules import Cap, CapUse, HolderKind
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.ledger.verification import verify
from accountant_service.mechanisms import ApproximateDp, DpSgd
from accountant_service.numerics.floats import rounding
from tests.support.earlier_ledgers import FIXTURES
from tests.support.ledger_scenarios import (
    ADD_OR_REMOVE,
    ON_POSTGRESQL,
    PLAN,
    SQL_MATTERS,
    Commands,
    Person,
    Scenario,
    Service,
    race,
    refusals,
    refused,
)

WRITERS = 12
SAMPLED = DpSgd(1.1, sample_rate=0.01, steps=1)
UNLIKE = DpSgd(1.5, sample_rate=0.01, steps=50)
TEAM = Cap(HolderKind.TEAM, "vision", 0.25)


class Team:
    """A dataset `d`, two keys of the team `vision`, and one of nobody."""

    def __init__(self, scenario: Scenario, by: str = "renyi") -> None:
        scenario.admin.create(by=by, plan=SAMPLED if by == "reference" else PLAN)
        self.one, self.two = scenario.people("one", "two", team="vision")
        self.lone = scenario.person(name="lone")
        self.most = self.lone.affords(plan=SAMPLED if by == "reference" else PLAN)


@pytest.fixture
def team(scenario: Scenario) -> Team:
    return Team(scenario)


@SQL_MATTERS
def test_a_team_takes_its_share_and_nothing_more(scenario: Scenario, team: Team) -> None:
    scenario.cap(0.3, team="vision")
    fits = team.one.affords()
    assert fits == pytest.approx(0.3 * team.most, abs=1)
    with refused("cap-exhausted", r"team 'vision' may take a share of 0\.3"):
        team.one.reserve(fits + 1)
    team.one.reserve(fits - 50)
    assert team.two.affords() == pytest.approx(50, abs=1), "held for the team's other key"
    assert team.lone.affords() == pytest.approx(team.most - fits + 50, abs=1)
    team.two.reserve(40)
    assert 0.28 < scenario.share_taken("vision") <= 0.3
    (use,) = scenario.caps.list_uses("d")[1]
    assert use.cap == replace(TEAM, share=0.3)


def test_what_a_run_gives_back_is_free_under_the_cap(scenario: Scenario, team: Team) -> None:
    scenario.cap(0.3, team="vision")
    fits = before = team.one.affords()
    for end in (team.one.release, team.one.commit):
        run = team.one.reserve(before)
        assert team.two.affords() == 0
        team.one.grant(run, 100)
        assert team.two.affords() == 0, "a grant changes nothing"
        end(run)
        assert team.two.affords() == pytest.approx(before - 100, abs=1)
        before = team.one.affords()
    assert before == pytest.approx(fits - 200, abs=2)
    team.one.reserve(before, lease=60.0)
    scenario.wait(61)
    team.two.reserve(before)  # the lease has ended


def test_caps_of_a_key_and_of_its_team_both_hold(scenario: Scenario, team: Team) -> None:
    scenario.cap(0.3, team="vision")
    scenario.cap(0.1, key=team.one.identifier)
    assert team.one.affords() == pytest.approx(0.1 * team.most, abs=1)
    assert team.two.affords() == pytest.approx(0.3 * team.most, abs=1)
    team.two.reserve(int(0.25 * team.most))
    left = team.one.affords()
    assert left == pytest.approx(0.05 * team.most, abs=2)
    with refused("cap-exhausted", "team 'vision'"):
        team.one.reserve(left + 1)
    assert scenario.caps.list_by_holder() == {
        (HolderKind.KEY, team.one.identifier): [("d", 0.1)],
        (HolderKind.TEAM, "vision"): [("d", 0.3)],
    }


def test_a_cap_below_what_is_taken_stops_further_runs_only(scenario: Scenario, team: Team) -> None:
    run = team.one.reserve(500)
    scenario.cap(0.0, team="vision")
    team.one.grant(run, 500)
    assert team.two.affords() == 0
    team.lone.reserve(10)
    scenario.uncap(team="vision")
    team.two.reserve(10)
    with refused("not-found", "no cap of team 'vision'"):
        scenario.uncap(team="vision")
    for share in (-0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(LedgerError, match="from 0 to 1"):
            scenario.cap(share, team="vision")
    assert scenario.caps.list_uses("d")[1] == []
    assert [event[1:] for event in scenario.audit("cap-set", "cap-removed")] == [
        ("cap-set", "d", "team vision: 0.0"), ("cap-removed", "d", "team vision"),
    ]  # fmt: skip


def test_a_repeated_reservation_is_answered_alike_whatever_the_cap_is(
    scenario: Scenario, team: Team
) -> None:
    scenario.cap(0.3, team="vision")
    with refused("cap-exhausted"):
        team.one.reserve(team.most // 2, once="refused")
    first = team.one.reserve(100, once="admitted")
    scenario.cap(0.0, team="vision")
    assert team.one.reserve(100, once="admitted") == first
    scenario.cap(1.0, team="vision")
    team.one.reserve(team.most // 2, once="refused")  # a refusal is not stored
    assert len(scenario.runs()) == 2


# --- the slack of the reference filter


@pytest.mark.slow
def test_a_cap_limits_the_slack_of_its_holder(scenario: Scenario) -> None:
    team = Team(scenario, "reference")
    scenario.cap(0.2, team="vision")
    assert team.one.affords(plan=SAMPLED) == pytest.approx(0.2 * team.most, abs=1)
    runs = [(team.two, team.one)[at % 2].reserve(UNLIKE) for at in range(12)]
    (use,) = scenario.caps.list_uses("d")[1]
    assert 0.1 * SLACK_UNITS < use.taken[1] <= 0.2 * SLACK_UNITS
    stored = {"team": "vision", "share": 0.2, "slack": True}
    assert all(entry["caps"] == [stored] for entry in scenario.entries()[1:])
    team.lone.reserve(UNLIKE)
    assert next(run.taken[1] for run in scenario.runs() if run.team is None) > 0.15 * SLACK_UNITS
    scenario.cap(0.0, team="vision")
    with refused("cap-exhausted", r"has taken 0\.1"):
        team.one.reserve(UNLIKE)
    for run in runs:
        team.one.release(run)


def test_a_holder_without_slack_may_still_reserve_reference_steps() -> None:
    policy = ReferenceFilter(1.0, 1e-5, ADD_OR_REMOVE, SAMPLED, 100, is_planned=True)
    use = CapUse(TEAM, (10, SLACK_UNITS // 4))
    assert rules.fits_cap(policy, use, (15, 0))
    assert not rules.fits_cap(policy, use, (16, 0))
    assert not rules.fits_cap(policy, use, (15, 1))
    assert rules.fits_cap(policy, replace(use, taken=(10, SLACK_UNITS // 4 - 1)), (15, 1))
    earlier = replace(use, cap=replace(TEAM, limits_slack=False))
    assert rules.fits_cap(policy, earlier, (15, SLACK_UNITS)), "as an earlier version's entry"
    assert policy.limit_slack((0, 0), 0.25, use.taken) == (0, SLACK_UNITS)
    assert policy.apply_cap((0, 0), 0.25, use.taken) == (85, SLACK_UNITS)


@pytest.mark.slow
def test_a_quote_under_a_cap_of_slack_fits_what_a_reservation_gets(scenario: Scenario) -> None:
    team = Team(scenario, "reference")
    scenario.cap(0.1, team="vision")
    for _ in range(4):
        dataset = scenario.dataset()
        caps = scenario.ledger.find_cap_uses(team.one.record, dataset)
        quote = plans.quote_plan(dataset, UNLIKE, caps, 0.0)
        assert quote.charged is not None
        team.one.reserve(UNLIKE)
        assert subtract(scenario.dataset().balance.taken, dataset.balance.taken) == quote.charged
    together = None
    for _ in range(3):
        together = plans.charge_next(scenario.dataset(), UNLIKE, together, caps)
    assert plans.combine_quotes(scenario.dataset(), together, caps).fits


@SQL_MATTERS
def test_what_a_holder_took_is_kept_beside_its_cap(scenario: Scenario, team: Team) -> None:
    """A cap that an earlier server set has nothing beside it: then the runs are read."""
    scenario.cap(0.9, team="vision")
    run = team.one.reserve(100)
    team.one.grant(run, 10)
    team.one.commit(run)
    team.two.release(team.two.reserve(50))
    team.two.reserve(30)
    team.one.reserve(20, lease=60.0)
    scenario.wait(61)
    team.one.look_at_dataset()
    (kept,) = scenario.caps.list_uses("d")[1]
    for wrong in ("[1]", "[0]", "[1, 1]"):
        said = scenario.faults_after(f"UPDATE cap SET taken = '{wrong}'")
        assert any("keeps" in each for each in said)
    scenario.execute("UPDATE cap SET taken = '[1]'")
    assert repair(scenario.repository).mended
    assert scenario.caps.list_uses("d")[1] == [kept]
    scenario.execute("UPDATE cap SET taken = NULL")
    assert scenario.caps.list_uses("d")[1] == [kept]
    team.one.reserve(1)


# --- races


def race_for_the_cap(scenario: Scenario, team: Team) -> list[str]:
    """Twelve writers of one team reserve a tenth each; return the codes of the refusals."""
    scenario.cap(0.35, team="vision")
    tenth = team.most // 10
    writers = [team.one if at % 2 else team.two for at in range(WRITERS)]
    return refusals(race(*(lambda of=of: of.reserve(tenth) for of in writers)))


@SQL_MATTERS
def test_racing_keys_of_a_team_keep_its_cap(scenario: Scenario, team: Team) -> None:
    assert race_for_the_cap(scenario, team) == ["cap-exhausted"] * (WRITERS - 3)
    assert scenario.share_taken("vision") <= 0.35


@ON_POSTGRESQL
@pytest.mark.parametrize("mutant", ["read outside", "without what is held"])
def test_a_cap_that_is_not_counted_in_the_transaction_does_not_hold(
    mutant: str, scenario: Scenario, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario.cap(0.35, team="vision")
    with scenario.repository.reading() as reading:
        known = reading.find_cap_uses(scenario.dataset(), "", "vision")
    genuine = Transaction.find_cap_uses

    def spent_only(self: Transaction, *of: Any) -> list[CapUse]:
        held = sum(run.held[0] for run in self.list_reservations(of[0]) if run.team == "vision")
        return [replace(use, taken=(use.taken[0] - held,)) for use in genuine(self, *of)]

    change = spent_only if mutant == "without what is held" else lambda *_: known
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "find_cap_uses", change)
        race_for_the_cap(scenario, team)
    assert scenario.share_taken("vision") > 0.35
    assert any("do not fit under a cap" in fault for fault in scenario.forge())


# --- sums and a late reference


@pytest.mark.slow
def test_a_cap_limits_additions_and_steps_together(scenario: Scenario) -> None:
    """A holder of a cap of a half does not take half of ε, and then half of what is left."""
    scenario.admin.create(by="reference", plan=None, epsilon=1.0, delta=1e-5)
    one, two = scenario.people("one", "two", team="vision")
    scenario.cap(0.5, team="vision")
    one.reserve(ApproximateDp(0.4, 0.0))
    steps = one.affords(plan=SAMPLED)
    assert steps > 0
    two.reserve(replace(SAMPLED, steps=steps))
    policy = scenario.dataset().policy
    assert isinstance(policy, LateReferenceFilter)
    worth = steps / policy.rest.steps
    assert 0.5 - 0.6 / policy.rest.steps <= 0.4 + 0.6 * worth <= 0.5
    (use,) = scenario.caps.list_uses("d")[1]
    assert policy.largest_share_of(use.taken) == pytest.approx(0.4 + 0.6 * worth)
    with refused("cap-exhausted"):
        one.reserve(SAMPLED)
    scenario.person(name="lone").reserve(SAMPLED)


def test_a_holder_of_steps_may_add_what_its_cap_leaves() -> None:
    first = LateReferenceFilter.of_budget(1.0, 1e-5, ADD_OR_REMOVE)
    others = first.compute_charge(StepPlan.of(ApproximateDp(0.4, 0.0)), first.nothing).reserved
    policy = first.after_reserving(StepPlan.of(SAMPLED), others)
    holder = (policy.rest.steps // 2, 0, 0, 0)  # .3 of ε
    most = policy.apply_cap(policy.nothing, 0.5, holder)
    assert 0.2 <= (policy.whole[2] - most[2]) / first.whole[2] < 0.21
    for tenths, fits in ((1, True), (2, True), (3, False)):
        amount = first.whole[2] * tenths // 10 - first.whole[2] // 1000
        assert policy.fits_share(holder, (0, 0, amount, 0), 0.5) == fits, tenths
    assert policy.fits_share(holder, (0, 0, 0, 0), 0.0)
    for own in range(0, 50, 7):
        adder = (3, 0, first.whole[2] * own // 100, 0)
        steps = policy.rest.steps - policy.apply_cap(policy.nothing, 0.5, adder)[0]
        assert policy.fits_share(adder, (steps, 0, 0, 0), 0.5), own
        assert not policy.fits_share(adder, (steps + 2, 0, 0, 0), 0.5), own


@pytest.mark.slow
def test_verify_knows_the_limits_of_a_cap_by_which_a_run_was_reserved(scenario: Scenario) -> None:
    """A run of exactly the share, and one of ε by a holder that has used its share of δ."""
    scenario.admin.create(by="reference", plan=None, epsilon=1.0, delta=1e-5)
    (one,) = scenario.people("one", team="vision")
    part = replace(SAMPLED, steps=50)
    policy = scenario.dataset().policy.after_reserving(StepPlan.of(part), (0, 0, 0, 0))
    scenario.cap(policy.share_of((50, 0, 0, 0)) / (1 + rounding.MARGIN), team="vision")
    one.reserve(part)
    assert scenario.faults() == []
    scenario.admin.create("sums", by="addition", plan=None, epsilon=1.0, delta=1e-5)
    one.reserve(ApproximateDp(0.0, 3e-6), "sums")
    scenario.cap(0.2, team="vision", name="sums")
    one.reserve(ApproximateDp(0.1, 0.0), "sums")
    assert scenario.faults() == []


# --- the record


def test_verify_finds_a_run_beyond_its_cap_and_changed_rows(scenario: Scenario, team: Team) -> None:
    scenario.cap(0.3, team="vision")
    team.one.reserve(100)
    created, entry = scenario.entries()
    assert entry["team"] == "vision"
    assert entry["caps"] == [{"team": "vision", "share": 0.3}]
    for change in ("taken = '[0]'", "team = 'other'", "team = NULL"):
        assert scenario.faults_after(f"UPDATE reservation SET {change}"), change
    before = hash_chain.hash_entry(hash_chain.GENESIS, hash_chain.encode_entry(created))
    for fields in (
        {"caps": [{"team": "vision", "share": 0.001}]},
        {"caps": [{"team": "other", "share": 1.0}]},
        {"caps": [{"key": team.two.identifier, "share": 1.0}]},
        {"caps": [{"team": "vision", "share": "all"}]},
        {"caps": 3},
        {"team": 3},
    ):
        body = hash_chain.encode_entry(entry | fields)
        digest = hash_chain.hash_entry(before, body)
        faults = scenario.faults_after(
            f"UPDATE entry SET body = '{body}', hash = '{digest}' WHERE number = 2",
            f"UPDATE dataset SET head = '{digest}'",
        )
        assert faults, fields


@pytest.mark.parametrize("fixture", ["ledger-0001", "ledger-0002"])
@pytest.mark.slow
def test_an_earlier_ledger_knows_what_each_run_takes(fixture: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "old.db")) as connection:
        connection.executescript((FIXTURES / f"{fixture}.sql").read_text())
    with closing(opening.open_repository(f"sqlite:///{tmp_path}/old.db")) as repository:
        with repository.reading() as reading:
            runs = [(each, reading.list_reservations(each)) for each in reading.list_datasets()]
        assert any(own for _, own in runs)
        for each, own in runs:
            assert sum(run.taken[0] for run in own) == each.balance.taken[0]
        assert verify(repository).faults == []


def test_shares_round_down_and_a_cap_admits_exactly_its_units() -> None:
    assert [count_units_within(0.3, each) for each in (0, 1, 9, 10, 11)] == [0, 0, 2, 3, 3]
    assert count_units_within(1.0, 7) == 7
    assert count_units_within(0.0, 7) == 0
    policy = ReferenceFilter(1.0, 1e-5, ADD_OR_REMOVE, SAMPLED, 97, is_planned=True)
    for count in range(98):
        assert count_units_within(count / 97, 97) == count, "exact for a number of units"
        use = CapUse(replace(TEAM, share=count / 97), (0, 0))
        assert rules.fits_cap(policy, use, (count, 0))
        assert not rules.fits_cap(policy, use, (count + 1, 0))
        assert rules.fits_cap(policy, replace(use, taken=(97, 0)), (0, 0)), "costs nothing"


# --- whose run it is

CHANGES: dict[str, Callable[[Person, str], Any]] = {
    "grant": lambda who, run: who.grant(run),
    "renew": lambda who, run: who.renew(run),
    "commit": lambda who, run: who.commit(run),
    "release": lambda who, run: who.release(run),
}


def test_a_run_belongs_to_its_key_its_team_and_the_owners(scenario: Scenario, team: Team) -> None:
    owner, nobody = scenario.person(Scope.OWNER), scenario.person()
    other_team = scenario.person(team="speech")
    for change in CHANGES.values():
        for may in (team.one, team.two, owner, scenario.admin):
            change(may, team.one.reserve(5))
        for owned, others in (
            (team.one, (team.lone, other_team)),
            (team.lone, (team.one, nobody)),
        ):
            run = owned.reserve(5)
            for other in others:
                with refused("forbidden", "belongs to another key"):
                    change(other, run)
                assert other.look(run).steps_granted == 0
            change(owned, run)


def test_a_team_key_continues_a_run_after_the_first_key_is_revoked(
    scenario: Scenario, team: Team
) -> None:
    run = team.one.reserve(20)
    team.one.grant(run, 10)
    scenario.keys.revoke(team.one.identifier, "admin")
    assert team.two.grant(run, 10, 10)["steps_granted"] == 20
    assert team.two.commit(run)["state"] == "committed"


# --- HTTP, pages and commands


@pytest.mark.parametrize("orders", ["one", "several"])
@pytest.mark.slow
def test_caps_over_http(orders: str, web: Service) -> None:
    name = f"http-{orders}"
    run = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1}
    owner, reader = web.caller(Scope.OWNER), web.caller()
    made = web.admin.make("/v1/keys", {"scopes": ["run"], "team": "vision"})
    assert made["team"] == "vision"
    member = web.caller(team="vision")
    owner.dataset(name, filter="renyi", **({"planned_mechanism": run} if orders == "one" else {}))
    cap, of = f"/v1/datasets/{name}/caps/teams/vision", f"/v1/datasets/{name}"
    expected = {"team": "vision", "key": None, "share": 0.3, "share_taken": 0.0}
    assert owner.ask("PUT", cap, {"share": 0.3}) == (200, expected)
    for method in ("PUT", "DELETE"):
        assert reader.refusal(method, cap, {"share": 0.3}) == (403, "forbidden")
    assert reader.read(f"{of}/caps") == {"items": [expected], "next_cursor": None}
    assert owner.refusal("PUT", f"{of}/caps/keys/none", {"share": 0.3}) == (404, "not-found")
    own = f"{of}/caps/keys/{member.identifier}"
    assert owner.ask("PUT", own, {"share": 1})[1]["key"] == member.identifier
    for share in (-0.1, 1.5, "0.3", None):
        assert owner.refusal("PUT", cap, {"share": share}) == (422, "invalid-request")
    plan = {"mechanism": run | {"steps": 1500}}
    quote = member.make(f"{of}/quotes", plan)
    assert not quote["fits"]
    status, problem = member.post(f"{of}/reservations", plan)
    assert (status, problem["code"]) == (409, "cap-exhausted")
    assert problem["affordable"] == quote["affordable"]
    fits = run | {"steps": quote["affordable"]["steps"]}
    together = member.make(f"{of}/quotes/batch", {"mechanisms": [fits, fits]})
    assert [each["fits"] for each in together["items"]] == [True, True]
    assert not together["together"]["fits"], "although the budget would allow both"
    quieter = plan["mechanism"] | {"noise_multiplier": quote["affordable"]["noise_multiplier"]}
    for mechanism in (fits, quieter):
        assert member.make(f"{of}/quotes", {"mechanism": mechanism})["fits"]
    member.reserve(name, fits)
    end = f"/v1/reservations/{web.admin.reserve(name, fits | {'steps': 5})['id']}/release"
    assert member.refusal("POST", end, {}) == (403, "forbidden")
    assert owner.post(end)[0] == 200
    assert [owner.ask("DELETE", each)[0] for each in (cap, cap, own)] == [204, 404, 204]


def test_a_bound_owner_caps_keys_of_its_dataset_only(web: Service) -> None:
    for name in ("ours", "theirs"):
        web.admin.dataset(name, filter="renyi")
    owner = web.caller(Scope.OWNER, datasets=("ours",))
    ours, theirs = (web.caller(datasets=(name,)).identifier for name in ("ours", "theirs"))
    for path, status in (
        (f"ours/caps/keys/{ours}", 200),
        (f"ours/caps/keys/{theirs}", 404),
        ("theirs/caps/teams/a", 404),
        (f"theirs/caps/keys/{theirs}", 404),
    ):
        assert owner.ask("PUT", f"/v1/datasets/{path}", {"share": 0.5})[0] == status, path
    assert owner.get("/v1/datasets/theirs/caps")[0] == 404


@pytest.mark.slow
def test_the_page_of_keys_shows_teams_and_caps(own_web: Service) -> None:
    http, admin = own_web.http, own_web.admin
    admin.dataset("d", filter="renyi")
    admin.ask("PUT", "/v1/datasets/d/caps/teams/vision", {"share": 0.25})
    form = {"csrf": own_web.sign_in(admin), "scopes": "run", "name": "trainer"}
    told = http.post("/keys", data=form | {"team": "a b"})
    assert told.status_code == 422
    assert 'value="a b"' in told.text
    made = http.post("/keys", data=form | {"team": "vision"})
    assert made.status_code == 201
    assert "team: 0.25 of d" in made.text
    assert own_web.keys.list_keys()[-1].team == "vision"


def test_caps_on_the_command_line(commands: Commands) -> None:
    identifier = commands.make("keys create --scope run --team vision").split("_")[1]
    assert commands.json("keys list")[0]["team"] == "vision"
    assert commands("keys create --scope run --team 'a b'")[0] == 2
    with closing(opening.open_repository(commands.url)) as repository:
        team = Team(Scenario(repository))
        said = commands.make("caps set d --team vision --share 0.3")
        assert said == "team vision may take 0.3 of the budget of d; taken: 0"
        commands.make("caps set d --key", identifier, "--share", "0.1")
        assert team.one.affords() == pytest.approx(0.3 * team.most, abs=1)
    rows = commands.json("caps list d")
    assert [(row["team"], row["key"], row["share"]) for row in rows] == [
        (None, identifier, 0.1), ("vision", None, 0.3),
    ]  # fmt: skip
    assert "vision" in commands.make("caps list d")
    removed = commands.make("caps remove d --team vision")
    assert removed == "removed the cap of team vision"
    for wrong in (
        "remove d --team vision",
        "set none --team vision --share 0.3",
        "set d --key none --share 0.3",
        "set d --team vision --share 1.3",
        "set d --team vision --share nan",
        "set d --share 0.3",
        f"set d --team vision --key {identifier} --share 0.3",
        "list none",
    ):
        assert commands(f"caps {wrong}")[0] == 2, wrong
    events = commands.json("ledger events")
    assert [event["action"] for event in events][-3:] == ["cap-set", "cap-set", "cap-removed"]
