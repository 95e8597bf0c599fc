"""The tree, its JSON, its hash and its limits."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant_service.mechanisms import (
    KINDS,
    Composed,
    Mechanism,
    MechanismError,
    canonical_form,
    find_dataset_size_mismatches,
    from_json,
    json_schema,
    to_json,
)
from accountant_service.mechanisms.json_form import DEPTH_MAX, fields_of
from accountant_service.mechanisms.kinds import COUNT_MAX, Coordinates, GaussianMixture, Size
from tests.support.helpers import gaussian, run

noise = st.floats(0.01, 1e6)
rates = st.one_of(st.just(0.0), st.floats(1e-12, 1))
leaves = st.one_of(
    st.builds(lambda s: gaussian(s), noise),
    st.builds(lambda s: {"kind": "laplace", "noise_multiplier": s}, noise),
    st.builds(lambda q, s, t: run(q, s, t), rates, noise, st.integers(0, 10**4)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda n, m: {"kind": "repeated", "count": n, "mechanism": m}, st.integers(0, 50), inner
        ),
        st.builds(lambda m: {"kind": "composed", "mechanisms": m}, st.lists(inner, max_size=4)),
        st.builds(
            lambda q, m: {"kind": "poisson_sampled", "sample_rate": q, "mechanism": m},
            rates,
            inner,
        ),
    ),
    max_leaves=6,
)


def hash_of(description: dict[str, Any]) -> str:
    return canonical_form(from_json(description)).hash


@settings(max_examples=40, derandomize=True, database=None)
@given(trees)
def test_json_round_trip(tree: dict[str, Any]) -> None:
    mechanism = from_json(tree)
    again = from_json(json.loads(json.dumps(to_json(mechanism))))
    assert again == mechanism
    assert canonical_form(again) == canonical_form(mechanism)


@settings(max_examples=40, derandomize=True, database=None)
@given(st.lists(trees, max_size=4), st.randoms())
def test_order_and_grouping_do_not_change_the_hash(parts: list[Any], rng: Any) -> None:
    shuffled = list(parts)
    rng.shuffle(shuffled)
    nested = {"kind": "composed", "mechanisms": [{"kind": "composed", "mechanisms": shuffled}]}
    assert hash_of({"kind": "composed", "mechanisms": parts}) == hash_of(nested)


def test_equal_meaning_has_equal_hash() -> None:
    same = [
        run(0.01, 1.1, 1000),
        run(0.01, 1.1, 1000, sampling="poisson"),
        {
            "kind": "dp_sgd",
            "noise_multiplier": 1.1,
            "dataset_size": 60000,
            "batch_size": 600,
            "epochs": 10,
        },
        {
            "kind": "repeated",
            "count": 1000,
            "mechanism": {
                "kind": "poisson_sampled",
                "sample_rate": 0.01,
                "mechanism": gaussian(1.1),
            },
        },
        {"kind": "composed", "mechanisms": [run(0.01, 1.1, 400), run(0.01, 1.1, 600)]},
        {"kind": "composed", "mechanisms": [run(0.01, 1.1, 1000), run(0.0, 1.1, 5)]},
    ]
    assert len({hash_of(each) for each in same}) == 1


@pytest.mark.parametrize(
    "other",
    [
        run(0.01, 1.1, 1001),
        run(0.011, 1.1, 1000),
        run(0.01, 1.2, 1000),
        {
            "kind": "dp_sgd",
            "noise_multiplier": 1.1,
            "dataset_size": 60000,
            "batch_size": 600,
            "steps": 1000,
            "sampling": "fixed_size",
        },
        run(0.01, 1.1, 1000, sampling="shuffled"),
        {"kind": "laplace", "noise_multiplier": 1.1},
    ],
)
def test_different_meaning_has_a_different_hash(other: dict[str, Any]) -> None:
    assert hash_of(other) != hash_of(run(0.01, 1.1, 1000))


def test_the_hash_is_stable_across_releases() -> None:
    """A released hash never changes: certificates refer to it."""
    expected = "sha256:ba4461de48862641ee7d119ed3c4d53e157abadb180359f449b78a07e961ee29"
    assert hash_of(run(0.01, 1.1, 1000)) == expected


def test_a_run_without_sampling_needs_no_sample_rate() -> None:
    unsampled = {"kind": "dp_sgd", "noise_multiplier": 1.1, "steps": 10, "sampling": "none"}
    assert hash_of(unsampled) == hash_of(
        {"kind": "repeated", "count": 10, "mechanism": gaussian(1.1)}
    )
    for wrong in ({"sample_rate": 0.5}, {"dataset_size": 10}, {"sampling": "poisson"}):
        with pytest.raises(MechanismError):
            from_json(unsampled | wrong)


def test_lemma_1_of_papers_000() -> None:
    """Paper: s = (12, 6), σ = (17, 8.5); Σ s²/σ² = 0.99654, so σ* = 1.0017."""
    diagonal = {"kind": "diagonal_gaussian", "sensitivities": [12, 6], "noise_stds": [17, 8.5]}
    ((atom, count),) = canonical_form(from_json(diagonal)).atom_counts
    assert (atom.noise, count) == ("gaussian", 1)
    assert atom.noise_multiplier == pytest.approx(0.99654**-0.5, abs=1e-5)
    swapped = {"kind": "diagonal_gaussian", "sensitivities": [6, 12], "noise_stds": [8.5, 17]}
    assert hash_of(diagonal) == hash_of(swapped)


def test_a_contribution_that_is_made_or_not_is_a_poisson_sample() -> None:
    def mixture(sigma: float, *drawn: tuple[float, float]) -> dict[str, Any]:
        shifts, chances = zip(*drawn, strict=True)
        fields = {"noise_multiplier": sigma, "shifts": shifts, "probabilities": chances}
        return {
            "kind": "gaussian_mixture",
            **{k: json.loads(json.dumps(v)) for k, v in fields.items()},
        }

    def sampled(rate: float, inner: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": inner}

    assert hash_of(mixture(3.0, (1.5, 1.0))) == hash_of(gaussian(2.0))
    made_or_not = mixture(3.0, (0.0, 0.75), (1.5, 0.25), (2.0, 0.0))
    assert hash_of(made_or_not) == hash_of(sampled(0.25, gaussian(2.0)))
    twice = sampled(0.5, mixture(2.0, (1.0, 0.5), (3.0, 0.5)))
    assert hash_of(twice) == hash_of(mixture(2.0, (0.0, 0.5), (1.0, 0.25), (3.0, 0.25)))


@pytest.mark.parametrize(
    ("chances", "drawn"),
    [
        ([0.5, 0.2999999999, 0.2], [0.5, 0.2999999999, 0.2000000001]),  # none is left out
        ([0.5, 0.3000000001, 0.2], [0.4999999999, 0.3000000001, 0.2]),
    ],
)
def test_rounded_probabilities_count_as_the_larger_contributions(
    chances: list[float], drawn: list[float]
) -> None:
    mixture = GaussianMixture(1.0, (0.0, 1.0, 2.0), tuple(chances))
    assert mixture.drawn() == ((0.0, 1.0, 2.0), tuple(drawn))


@pytest.mark.parametrize(
    ("sigma", "shifts", "chances", "pointer"),
    [
        (1.0, [0.0, 1.0], [0.5, 0.4], "/probabilities"),
        (1.0, [0.0, 1.0], [0.5, 0.5 + 1e-8], "/probabilities"),
        (1.0, [0.0, 1.0], [1.0], "/probabilities"),
        (1.0, [1.0, 1.0], [0.5, 0.5], "/shifts/1"),
        (1.0, [0.0, 1.0], [1.0, 0.0], "/shifts"),
        (1.0, [0.0, 101.0], [0.5, 0.5], "/noise_multiplier"),
    ],
)
def test_contradictions_of_a_mixture_are_refused(
    sigma: float, shifts: list[float], chances: list[float], pointer: str
) -> None:
    document = {"noise_multiplier": sigma, "shifts": shifts, "probabilities": chances}
    with pytest.raises(MechanismError) as refused:
        from_json({"kind": "gaussian_mixture", **document})
    assert [at for at, _ in refused.value.faults] == [pointer]


def test_one_sample_used_twice_is_one_gaussian() -> None:
    twice = {"kind": "repeated", "count": 4, "mechanism": gaussian(2.0)}
    sampled = {"kind": "poisson_sampled", "sample_rate": 0.1, "mechanism": twice}
    once = {"kind": "poisson_sampled", "sample_rate": 0.1, "mechanism": gaussian(1.0)}
    assert hash_of(sampled) == hash_of(once)


def test_a_part_of_an_epoch_counts_as_whole_steps() -> None:
    described = {"noise_multiplier": 1.0, "dataset_size": 1000, "batch_size": 300, "epochs": 1}
    ((_, count),) = canonical_form(from_json({"kind": "dp_sgd", **described})).atom_counts
    assert count == 4


@pytest.mark.parametrize(
    "rate", [{"sample_rate": 0.3}, {"dataset_size": 1000, "batch_size": 300}], ids=["rate", "sizes"]
)
def test_an_epoch_may_drop_its_last_smaller_batch(rate: dict[str, float]) -> None:
    """With three batches of 300 of 1000 records an epoch, ten steps are in four epochs."""
    run = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sampling": "shuffled"} | rate
    for steps in (10, 999_999_999):
        ((_, count),) = canonical_form(from_json(run | {"steps": steps})).atom_counts
        assert count == -(-steps // 3)
    whole = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sampling": "shuffled", "epochs": 3} | {
        "dataset_size": 1000, "batch_size": 300
    }  # fmt: skip
    ((_, count),) = canonical_form(from_json(whole)).atom_counts
    assert count == 3, "epochs are what they are"


def test_shuffled_epochs_are_counted_whole() -> None:
    for steps, epochs in ((1000, 10), (1001, 11), (1, 1)):
        ((atom, count),) = canonical_form(
            from_json(run(0.01, 1.0, steps, sampling="shuffled"))
        ).atom_counts
        assert (atom.sampling, count) == ("shuffled", epochs)


def test_numbers_that_json_has_not_are_refused() -> None:
    """Other faults stand in the table of refusals."""
    for number in (float("nan"), float("inf")):
        with pytest.raises(MechanismError) as caught:
            from_json(gaussian(number))
        assert [place for place, _ in caught.value.faults] == ["/noise_multiplier"]


def test_several_faults_are_reported_together() -> None:
    with pytest.raises(MechanismError) as caught:
        from_json(run(-1, -1, -1, surprise=1))
    places = [place for place, _ in caught.value.faults]
    assert places == ["/noise_multiplier", "/sample_rate", "/steps", "/surprise"]


def test_depth_and_size_are_bounded_before_recursion() -> None:
    deep: dict[str, Any] = gaussian(1)
    for _ in range(100_000):
        deep = {"kind": "repeated", "count": 1, "mechanism": deep}
    with pytest.raises(MechanismError, match="nested"):
        from_json(deep)
    while "mechanism" in deep:  # undone by hand: Python's own clean-up would recurse
        deep = deep["mechanism"]
    wide = {"kind": "composed", "mechanisms": [gaussian(1)] * 200_000}
    with pytest.raises(MechanismError, match="at most"):
        from_json(wide)
    fits: dict[str, Any] = gaussian(1)
    for _ in range(DEPTH_MAX - 1):
        fits = {"kind": "repeated", "count": 1, "mechanism": fits}
    assert canonical_form(from_json(fits)).steps == 1


def test_repetition_cannot_multiply_beyond_the_limit() -> None:
    inner = {"kind": "repeated", "count": COUNT_MAX, "mechanism": gaussian(100)}
    with pytest.raises(MechanismError, match="releases"):
        from_json({"kind": "repeated", "count": 2, "mechanism": inner})


def test_descriptions_cannot_be_changed() -> None:
    mechanism = from_json({"kind": "composed", "mechanisms": [gaussian(1)]})
    assert isinstance(mechanism, Composed)
    with pytest.raises(AttributeError):
        mechanism.mechanisms = ()  # type: ignore[misc]


def test_every_kind_has_a_schema_whose_example_it_reads() -> None:
    schemas = json_schema()
    union = schemas.pop("Mechanism")
    assert len(union["oneOf"]) == len(schemas) == len(KINDS) >= 29
    for schema in schemas.values():
        for example in schema["examples"]:
            assert to_json(from_json(example))["kind"] == schema["properties"]["kind"]["const"]
            assert hash_of(example)


SAMPLE = {"kind": "fixed_size_sampled", "dataset_size": 10**9, "batch_size": 600,
          "mechanism": gaussian(1)}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_number_of_records_is_found_in_every_kind(kind: Any) -> None:
    """A kind that the check does not know must not hide a size that makes a run cheap."""
    mechanism: Any = from_json({"kind": kind.kind, **kind.example})
    records = 1000
    names = {field.name for field in fields(kind)}
    stated = {"dataset_size": records, "reports": records}
    mechanism = replace(mechanism, **{name: stated[name] for name in names & stated.keys()})
    inner = from_json(SAMPLE)
    expected: list[str] = []
    if "mechanism" in names:
        mechanism = replace(mechanism, mechanism=inner)
        expected = ["/mechanism/dataset_size"]
    if "mechanisms" in names:
        mechanism = replace(mechanism, mechanisms=(inner, inner))
        expected = ["/mechanisms/0/dataset_size", "/mechanisms/1/dataset_size"]
    found = list(find_dataset_size_mismatches(records, mechanism))
    assert [each.pointer for each in found] == expected
    assert all(each.is_overstated for each in found)
    for name in names & stated.keys():
        larger = replace(mechanism, **{name: records + 1})
        pointers = [each.pointer for each in find_dataset_size_mismatches(records, larger)]
        assert pointers == [f"/{name}", *expected]


@dataclass(frozen=True, slots=True)
class LaterKind(Mechanism):
    """A kind that does not exist: what holds for it holds for the next one."""

    kind: ClassVar = "later"
    example: ClassVar = {}
    dataset_size: Size | None
    rates: Coordinates
    first: Mechanism | None
    several: tuple[Mechanism, ...]


def test_the_number_of_records_is_found_in_a_kind_added_later() -> None:
    sample = from_json(SAMPLE)
    small = LaterKind(999, (), from_json(gaussian(1)), ())
    later = LaterKind(1001, (0.5,), sample, (sample, small))
    found = list(find_dataset_size_mismatches(1000, Composed((later,))))
    places = ["", "/first", "/several/0", "/several/1"]
    assert [each.pointer for each in found] == [f"/mechanisms/0{at}/dataset_size" for at in places]
    assert [each.stated for each in found] == [1001, 10**9, 10**9, 999]
    nothing = replace(small, dataset_size=None)
    assert list(find_dataset_size_mismatches(1000, nothing)) == []


def test_mechanisms_inside_a_kind_added_later_are_found_and_changed() -> None:
    one, two = from_json(gaussian(1)), from_json(gaussian(2))
    later = LaterKind(None, (), one, (one, two))
    assert list(later.inner()) == [("/first", one), ("/several/0", one), ("/several/1", two)]
    assert later.with_inner(lambda _: two) == LaterKind(None, (), two, (two, two))
    assert later.release_count() == 3
    assert list(replace(later, first=None, several=()).inner()) == []
    known = fields_of(LaterKind)
    inner = {name: field.schema.get("type", "mechanism") for name, field in known.items()}
    assert inner["first"] == "mechanism"
    assert inner["several"] == "array"


@pytest.mark.parametrize(
    ("size", "parts", "overstated"),
    [
        (10**9, 1, [True]),
        (1001, 1, [True]),
        (999, 1, [False]),
        (1001, 2, [True]),
        (1000, 2, []),
        (999, 2, []),
    ],
)
def test_one_of_several_parts_may_have_fewer_records(
    size: int, parts: int, overstated: list[bool]
) -> None:
    inner = {"kind": "repeated", "count": 2, "mechanism": SAMPLE | {"dataset_size": size}}
    tree = {"kind": "parallel", "mechanisms": [inner, *[gaussian(1)] * (parts - 1)]}
    found = list(find_dataset_size_mismatches(1000, from_json(tree)))
    assert [each.is_overstated for each in found] == overstated
    assert all(each.pointer == "/mechanisms/0/mechanism/dataset_size" for each in found)


@pytest.mark.parametrize(("reports", "named"), [(1001, True), (1000, False), (1, False)])
def test_there_are_at_most_as_many_reports_as_records(reports: int, named: bool) -> None:
    inner = {"kind": "randomized_response", "categories": 2, "flip_probability": 0.5}
    tree = {"kind": "shuffled_reports", "reports": reports, "mechanism": inner}
    found = [each.pointer for each in find_dataset_size_mismatches(1000, from_json(tree))]
    assert found == ["/reports"] * named


def test_every_kind_and_field_has_a_title_and_optional_fields_their_default() -> None:
    """A form needs names to show, values to start with, and an example."""
    schemas = json_schema()
    schemas.pop("Mechanism")
    for schema in schemas.values():
        fields = {name: each for name, each in schema["properties"].items() if "$ref" not in each}
        titles = [schema["title"], *(each["title"] for each in fields.values())]
        assert all(title[:1].isupper() or title == "zCDP" for title in titles)
        assert not any("_" in title for title in titles)
        given = {name: each["default"] for name, each in fields.items() if "default" in each}
        (example,) = schema["examples"]
        assert to_json(from_json(example | given)).items() >= given.items()
    banded = schemas["BandedMatrixFactorizationMechanism"]["properties"]
    assert banded["noise_multiplier"]["title"] == "Noise multiplier"
    assert schemas["TreeAggregationMechanism"]["properties"]["participations"]["default"] == 1
    assert schemas["DpSgdMechanism"]["title"] == "DP SGD"
