"""Values of other libraries for the same questions (tests/golden/peers.json, with its sources)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accountant_service.accounting.guarantee import NeighbouringRelation
from tests.support.helpers import epsilon, run

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "peers.json").read_text())[
    "cases"
]
POISSON = [case for case in CASES if case["kind"].startswith("poisson")]
FIXED_SIZE = [case for case in CASES if case["kind"].startswith("gaussian_wor")]


def described(case: dict[str, Any]) -> dict[str, Any]:
    segments = case.get("segments") or [case]
    runs = [run(each["q"], each["sigma"], each["steps"]) for each in segments]
    return runs[0] if len(runs) == 1 else {"kind": "composed", "mechanisms": runs}


def name(case: dict[str, Any]) -> str:
    return str(case["id"])


@pytest.mark.parametrize("case", POISSON, ids=name)
def test_pld_is_never_below_the_truth_nor_above_it_by_much(case: dict[str, Any]) -> None:
    claim = epsilon("pld", described(case), case["delta"])
    assert claim.certified is not None
    truth = case.get("eps_truth")
    if truth is None:  # hard cases: only the peers' own bounds are known
        assert claim.certified.upper >= case["eps_lower"]
        assert claim.certified.lower <= case["eps_upper"]
        return
    assert claim.certified.lower <= truth * (1 + 1e-9)
    assert claim.certified.upper >= truth * (1 - 1e-9)
    assert claim.certified.upper <= truth * 1.002


@pytest.mark.parametrize("case", POISSON, ids=name)
def test_rdp_is_at_most_one_percent_above_the_peers_and_never_below_the_truth(
    case: dict[str, Any],
) -> None:
    found = epsilon("subsampled_rdp", described(case), case["delta"]).epsilon
    assert found <= case["rdp_eps"] * 1.01
    assert found >= (case.get("eps_truth") or case["eps_lower"]) * (1 - 1e-9)


@pytest.mark.parametrize("case", FIXED_SIZE, ids=name)
@pytest.mark.parametrize(
    ("block", "halved"), [("distance_2_clip_norm", False), ("distance_1", True)]
)
def test_fixed_size_rdp_in_both_conventions(case: dict[str, Any], block: str, halved: bool) -> None:
    """`distance_1` takes σ relative to the replace-one sensitivity 2C: twice σ here."""
    mechanism = {
        "kind": "dp_sgd",
        "noise_multiplier": case["sigma"] * (2 if halved else 1),
        "dataset_size": case["n"],
        "batch_size": case["batch"],
        "steps": case["steps"],
        "sampling": "fixed_size",
    }
    claim = epsilon("subsampled_rdp", mechanism, case["delta"], NeighbouringRelation.REPLACE_ONE)
    assert claim.epsilon <= case[block]["rdp_eps"] * 1.01
    assert claim.epsilon >= case[block]["pair_eps"]


@pytest.mark.parametrize("case", FIXED_SIZE, ids=name)
@pytest.mark.parametrize(("block", "factor"), [("distance_2_clip_norm", 1.0), ("distance_1", 2.0)])
def test_poisson_samples_of_which_a_record_is_replaced_cost_what_their_pair_costs(
    case: dict[str, Any], block: str, factor: float
) -> None:
    """`pair_eps` is the cost of two mixtures, with means C and −C (`distance_1`: C/2 and −C/2)."""
    mechanism = {
        "kind": "dp_sgd",
        "noise_multiplier": case["sigma"] * factor,
        "sample_rate": case["q"],
        "steps": case["steps"],
    }
    claim = epsilon("pld", mechanism, case["delta"], NeighbouringRelation.REPLACE_ONE)
    assert claim.certified is not None
    assert claim.certified.lower <= case[block]["pair_eps"] * (1 + 1e-6)
    assert claim.certified.upper >= case[block]["pair_eps"] * (1 - 1e-6)
    assert claim.certified.upper <= case[block]["pair_eps"] * 1.001
