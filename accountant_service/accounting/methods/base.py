"""The base class of all accounting methods, and the question that they answer.

A method computes ε at a δ and δ at an ε; the solver searches for noise multipliers, step counts and
sample rates with it. A method works in three steps: it refuses a mechanism with a release that it
has no formula for; it states which hypotheses of its theorem hold; it computes the bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Final

from accountant_service.accounting import release_laws
from accountant_service.accounting.guarantee import (
    Assumption,
    Guarantee,
    Interval,
    NeighbouringRelation,
    Status,
)
from accountant_service.accounting.release_laws import ReleaseGroup
from accountant_service.errors import (
    BoundsContradictError,
    MethodNotApplicableError,
    NoFiniteEpsilonError,
    TooExpensiveError,
)
from accountant_service.mechanisms import Atom, CanonicalForm
from accountant_service.mechanisms.canonical import SAMPLED_IN_TURN, Premises
from accountant_service.numerics.errors import ContradictionError
from accountant_service.numerics.floats import rounding, search
from accountant_service.numerics.floats.bounds import EPSILON_NEGLIGIBLE
from accountant_service.writing import number_format

TOLERANCE: Final = 1e-3
DELTA_MIN: Final = 1e-300  # the least δ that is claimed; smaller ones are rounded up to it
_DELTA_MAX: Final = 1 - 1e-9
_DELTA_NEGLIGIBLE: Final = 1e-250  # widths of δ intervals are measured relative to at least this
_SAMPLED_NOISE_MIN: Final = 0.004  # least effective noise multiplier: 3e5 quadrature nodes
_PARTITION: Final = Assumption(
    "neighbouring datasets have the same number of records, as shuffled batches (a fixed "
    "partition) require: use zero_out_one or replace_one",
    True,
    "arXiv 2403.17673, arXiv 2411.10614",
)
_PARTS: Final = Assumption(
    "each record belongs to one part, which depends on the record alone and never changes, and "
    "neighbouring datasets differ in one part only: a replacement is in the same part",
    True,
    "McSherry 2009, Theorem 4",
)
_ALTERNATIVES_MAX: Final = 64
_UNCUT: Final = Assumption(
    "the larger of two neighbouring datasets has `dataset_size` records, which is at most "
    "`batch_size_max`: no Poisson sample is larger than the limit",
    True,
    "docs/accountants/kinds.md, section Batches of limited size",
)
_PARTICIPATION: Final = Assumption(
    "a record takes part in at most `participations` steps, at least `min_separation` steps apart",
    True,
    "docs/accountants/kinds.md, section Correlated noise",
)
_PERSON: Final = (
    "the unit is a person, who has at most {} records: neighbouring datasets differ in all records "
    "of one person"
)
_PERSON_IN_EACH_RELEASE: Final = (
    "the unit is a person, who has at most {} records, and in each release at most the number that "
    "its `user_level` states: one record in a release without `user_level`. If a person may have "
    "more, the claim holds for one record only"
)
_UNIT_SOURCE: Final = "docs/accountants/kinds.md, section Several records of a person"
# Accounting covers the noisy sum. If a record changed the divisor, the scale of the noise in every
# coordinate would reveal the divisor: with many coordinates, almost surely.
_GROUPS: Final = Assumption(
    "each record belongs to one group of steps, which depends on the record alone, and "
    "neighbouring datasets differ in one group only: a replacement is in the same group",
    True,
    "arXiv 2306.08153",
)
_DIVISOR: Final = Assumption(
    "the number of records is public: each noisy sum is divided by a constant, the planned "
    "expected batch size, which does not change when a record is added or removed",
    True,
    "arXiv 2605.15648; opacus issues 571 and 819",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A mechanism to account for, with the neighbouring relation and the interval's tolerance.

    Attributes:
        form: the mechanism, in canonical form.
        relation: the neighbouring relation.
        tolerance: relative width that a proved interval should have.
        adds_curves: whether `pld` may add the Rényi curves of releases that are known by them. That
            is tighter than composing one dominating pair for each, but parts of the composition can
            then not be exchanged for other releases.
        threshold: an ε that a solver compares with. Bounds on one side of it may be as wide as they
            are.
    """

    form: CanonicalForm
    relation: NeighbouringRelation
    tolerance: float = TOLERANCE
    adds_curves: bool = True
    threshold: float | None = None

    @property
    def release_groups(self) -> tuple[ReleaseGroup, ...]:
        """The mechanism's distinct releases, each with its count, noise and sample rate."""
        return release_laws.release_groups(self.form.atom_counts, self.relation)

    @property
    def alternatives(self) -> tuple[Question, ...]:
        """One question for each combination of the disjoint data parts that may hold the record.

        A record is in one part of each parallel release, and maybe in another part of the next
        one, so the largest ε or δ of these questions holds for the mechanism. Combinations without
        any release cost nothing and are left out.

        Raises:
            TooExpensiveError: there are too many.
        """
        if not any(atom.is_parallel for atom, _ in self.form.atom_counts):
            return (self,)
        if self.form.alternatives_count > _ALTERNATIVES_MAX:
            raise TooExpensiveError(
                "a record may be in another part of each `parallel` release: these can be combined "
                f"in more than {_ALTERNATIVES_MAX} ways. If parallel releases divide the data in "
                "the same way, describe them as one `repeated`, or as one `parallel` of what is "
                "composed in each part"
            )
        forms = (form for form in self.form.alternatives if form.atom_counts)
        return tuple(replace(self, form=form) for form in forms)

    def of_common_part(self) -> Question:
        """Return the question with one part's releases, where all parts with releases are equal."""
        return replace(self, form=self.form.of_common_part())

    def repeated(self, times: int) -> Question:
        """Return the question about this mechanism repeated `times` times."""
        return replace(self, form=self.form.repeated(times))

    @property
    def is_attained(self) -> bool:
        """Return whether some neighbouring datasets have exactly the δ(ε) that is computed.

        If they are not, they give upper bounds only. They are not attained for shuffled batches,
        which are charged without amplification, for sample rates that were rounded up, nor for a
        record that is replaced or zeroed in a sample of fixed size. Under add/remove, all
        fixed-size samples must agree on the size of the larger dataset: it is `dataset_size`, plus
        one where the batch is the whole dataset.
        """
        atoms = [atom for atom, _ in self.form.atom_counts]
        sizes = {_larger_dataset_size(atom) for atom in atoms if atom.sampling == "fixed_size"}
        agree = len(sizes) <= 1 or self.relation is not NeighbouringRelation.ADD_OR_REMOVE_ONE
        return agree and all(has_attained_pair(atom, self.relation) for atom in atoms)

    @property
    def sampling(self) -> str:
        """The sampling of all releases: `mixed` if it differs, `none` if nothing is released."""
        kinds = {atom.sampling for atom, _ in self.form.atom_counts}
        return kinds.pop() if len(kinds) == 1 else ("mixed" if kinds else "none")


def has_attained_pair(release: Atom, relation: NeighbouringRelation) -> bool:
    """Return whether some neighbouring datasets have exactly the δ(ε) computed for a release."""
    if not release_laws.is_attained(release.noise):
        return False
    if release.sampling == "poisson":
        is_personal = release_laws.is_personal(release.noise) and release.sample_rate < 1
        return release.sample_rate >= release_laws.RATE_MIN and not is_personal
    if release.sampling == "balls_in_bins":
        return release_laws.has_bins_law(release, relation) and release.parameters[1] == 1
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    if not added and release.sampling == "fixed_size":
        return release_laws.samples_whole_dataset(release)
    left_out = added and release_laws.samples_whole_dataset(release) and release.noise != "gaussian"
    return release.sampling != "shuffled" and not left_out


def _larger_dataset_size(release: Atom) -> int:
    """Return the size of the larger neighbouring dataset of a release on a fixed-size sample."""
    size = release.fixed_sizes[0] if release.fixed_sizes else 0
    return size + 1 if release_laws.samples_whole_dataset(release) else size


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on ε or δ computed by one accounting method, with how it was obtained.

    Attributes:
        value: the bound, rounded up.
        order: the Rényi or moment order that gave it, for methods that have one.
        conversion: the theorem that turned a divergence into (ε, δ), for methods that use one.
        interval: the proved interval that the value is the upper end of, for `pld`.
        is_exact: whether the value is an exact sum or product of what was written: then 0 is 0.
    """

    value: float
    order: float | None = None
    conversion: str | None = None
    interval: Interval | None = None
    is_exact: bool = False


class Accountant(ABC):
    """Base class of accounting methods: computes ε at δ and δ at ε.

    Attributes:
        name: the method's name in the API and on the command line.
        title: the name in words, for `GET /v1/methods`.
        source: the publication of the formula.
        needs: the mechanisms that the method has a formula for.
        proves: the kind of bound that the method proves.
        accepts_zero_delta: whether the method computes ε at δ = 0.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    needs: ClassVar[str]
    proves: ClassVar[str]
    accepts_zero_delta: ClassVar[bool] = False

    @abstractmethod
    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypotheses of the method's theorem, and whether each holds for the question.

        Raises:
            MethodNotApplicableError: the method has no formula for a release; the error points to
                it.
            TooExpensiveError: the computation would exceed the work limit.
        """

    def claim_assumptions(
        self,
        question: Question,  # noqa: ARG002
        epsilon: float,  # noqa: ARG002
        delta: float,  # noqa: ARG002
    ) -> tuple[Assumption, ...]:
        """Return the hypotheses of the method's theorem on the guarantee's ε and δ, if it has any.

        Args:
            question: a mechanism that the method has a formula for.
            epsilon: the guarantee's ε.
            delta: the guarantee's δ.
        """
        return ()

    @abstractmethod
    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε at δ, rounded up, for a mechanism with at least one release.

        Args:
            question: the mechanism.
            delta: in (0, 1); or 0, if the method accepts it.
        """

    def epsilon_bounds(self, step: Question, times: Sequence[int], delta: float) -> list[Bound]:
        """Return the bound on ε after each number of repetitions of `step`; ∞ if no finite ε holds.

        A method may override this to compute all of them at once.

        Args:
            step: the mechanism that is repeated.
            times: increasing numbers of repetitions.
            delta: in (0, 1).
        """
        bounds = []
        for each in times:
            try:
                bounds.append(self.epsilon_bound(step.repeated(each), delta))
            except NoFiniteEpsilonError:
                bounds.append(Bound(math.inf))
        return bounds

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return δ at ε, rounded up; by default, by a search with `epsilon_bound`."""

        def epsilon_minus_target(delta: float) -> float:
            """Return ε at this δ, minus the target ε."""
            return self.epsilon_bound(question, delta).value - epsilon

        if epsilon_minus_target(_DELTA_MAX) > 0:
            return Bound(1.0)
        if epsilon_minus_target(DELTA_MIN) <= 0:
            return Bound(DELTA_MIN)
        delta = search.find_boundary(
            epsilon_minus_target, feasible=_DELTA_MAX, infeasible=DELTA_MIN, relative_width=1e-10
        )
        return Bound(min(1.0, rounding.up(delta)))

    def epsilon(self, question: Question, delta: float) -> Guarantee:
        """Return the (ε, δ) guarantee at this δ.

        Raises:
            AccountingError: the question has no answer.
        """
        assumptions = self.check_assumptions(question)
        bound = Bound(0.0)
        with report_contradictions(question, f"δ = {delta!r}"):
            if question.form.atom_counts:
                self._require_positive_delta(delta)
                bound = _worst(self.epsilon_bound(each, delta) for each in question.alternatives)
        if not _is_finite(bound):
            raise self.explain_infinite_epsilon(question, delta)
        return self._make_guarantee(question, bound, assumptions, bound.value, delta, "epsilon")

    def _require_positive_delta(self, delta: float) -> None:
        """Raise if δ is 0 and the method has no bound there.

        Raises:
            NoFiniteEpsilonError: the method proves no finite ε at this δ.
        """
        if delta == 0 and not self.accepts_zero_delta:
            raise NoFiniteEpsilonError(
                f"{self.name} proves no finite ε at δ = 0: choose a δ above 0, or the method pld"
            )

    def explain_infinite_epsilon(
        self,
        question: Question,  # noqa: ARG002
        delta: float,
    ) -> NoFiniteEpsilonError:
        """Return the error for a question whose ε at this δ is infinite: it names the way out."""
        return NoFiniteEpsilonError(
            f"{self.name} proves no finite ε at δ = {number_format.exactly(delta)}: add noise, or "
            "allow a larger δ"
        )

    def with_lower_bound(self, question: Question, guarantee: Guarantee) -> Guarantee:  # noqa: ARG002
        """Return a guarantee with a better lower bound, if one is known that takes time to compute.

        A solver does without it.
        """
        return guarantee

    def curve(self, step: Question, times: Sequence[int], delta: float) -> list[Guarantee | None]:
        """Return the guarantee at δ for each number of repetitions of `step`; None if ε is ∞.

        Args:
            step: the mechanism that is repeated.
            times: increasing numbers of repetitions, each at least 1.
            delta: in (0, 1).

        Raises:
            AccountingError: for some number of repetitions, the method has no formula or exceeds
                the work limit.
        """
        questions = [step.repeated(each) for each in times]
        assumptions = [self.check_assumptions(question) for question in questions]
        bounds = [Bound(0.0)] * len(times)
        if step.form.atom_counts:
            self._require_positive_delta(delta)
            with report_contradictions(step, f"δ = {delta!r}, {len(times)} step counts"):
                bounds = self.epsilon_bounds(step, times, delta)
        return [
            self._make_guarantee(question, bound, assumed, bound.value, delta, "epsilon")
            if _is_finite(bound)
            else None
            for question, assumed, bound in zip(questions, assumptions, bounds, strict=True)
        ]

    def delta(self, question: Question, epsilon: float) -> Guarantee:
        """Return the (ε, δ) guarantee at this ε.

        Raises:
            AccountingError: the question has no answer.
        """
        assumptions = self.check_assumptions(question)
        bound = Bound(0.0)
        if question.form.atom_counts:
            with report_contradictions(question, f"ε = {epsilon!r}"):
                bounds = (self.delta_bound(each, epsilon) for each in question.alternatives)
                bound = _at_least_delta_min(_worst(bounds))
        return self._make_guarantee(question, bound, assumptions, epsilon, bound.value, "delta")

    def check_assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return all hypotheses; raise if the method has no formula for a release."""
        if not question.form.atom_counts:
            return (Assumption("nothing is released", True, "definition of privacy"),)
        _require_supported_releases(self.name, question)
        found = [each for other in question.alternatives for each in self.assumptions(other)]
        return tuple(dict.fromkeys((*_relation_assumptions(question), *found)))

    def _make_guarantee(
        self,
        question: Question,
        bound: Bound,
        assumptions: tuple[Assumption, ...],
        epsilon: float,
        delta: float,
        solved_for: str,
    ) -> Guarantee:
        """Make the guarantee for a bound; its status is `estimate` if a hypothesis fails."""
        if question.form.atom_counts:
            found = (self.claim_assumptions(each, epsilon, delta) for each in question.alternatives)
            assumptions = tuple(dict.fromkeys(chain(assumptions, *found)))
        interval = bound.interval if question.form.atom_counts else Interval(0.0, 0.0)
        failed = [each.statement for each in assumptions if not each.holds]
        certified = None if failed else interval
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            solved_for=solved_for,
            method=self.name,
            status=Status.ESTIMATE if failed else Status.PROVEN,
            neighbouring_relation=question.relation,
            sampling=question.sampling,
            assumptions=assumptions,
            mechanism_hash=question.form.hash,
            certified=certified,
            certified_reason=f"a hypothesis fails: {failed[0]}" if failed and interval else None,
            optimal_order=bound.order,
            conversion=bound.conversion,
            warnings=width_warnings(question, certified, solved_for),
        )


@contextmanager
def report_contradictions(question: Question, at: str) -> Iterator[None]:
    """Context manager that reports contradicting proved bounds in an error with the question.

    Args:
        question: the mechanism, relation and tolerance.
        at: the rest of the question, in words, such as "δ = 1e-5".

    Raises:
        BoundsContradictError: two proved bounds contradict each other.
    """
    try:
        yield
    except ContradictionError as error:
        releases = "; ".join(f"{count} × {atom}" for atom, count in question.form.atom_counts)
        raise BoundsContradictError(
            f"{error}. This is a defect of the service, so it returns no number; please report it. "
            f"The question: {at} under {question.relation}, tolerance {question.tolerance!r}, "
            f"mechanism {question.form.hash}: {releases[:2000]}"
        ) from error


def relative_width(interval: Interval, solved_for: str) -> float:
    """Return a proved interval's width, relative to its upper end; `solved_for` is ε or δ.

    An upper end below the negligible ε or δ counts as that value.
    """
    if solved_for == "delta" and interval.upper <= _DELTA_NEGLIGIBLE:
        return 0.0
    least = EPSILON_NEGLIGIBLE if solved_for == "epsilon" else _DELTA_NEGLIGIBLE
    return (interval.upper - interval.lower) / max(interval.upper, least)


def width_warnings(
    question: Question, interval: Interval | None, solved_for: str
) -> tuple[str, ...]:
    """Return a warning if the proved interval is wider than the question's tolerance."""
    if interval is None or relative_width(interval, solved_for) <= question.tolerance:
        return ()
    if not question.is_attained and interval.lower == 0.0:
        return ("only an upper bound is proved: the true value may lie far below it",)
    return (
        f"the proved interval is wider than a relative {question.tolerance:g}: the true value may "
        "lie far below its upper end",
    )


def _worst(bounds: Iterable[Bound]) -> Bound:
    """Return the largest of the bounds, one for each part of the data that may hold the record."""
    found = list(bounds)
    worst = max(found, key=lambda each: each.value)
    intervals = [each.interval for each in found if each.interval is not None]
    if len(intervals) < len(found):
        return replace(worst, interval=None)
    lower, upper = max(each.lower for each in intervals), max(each.upper for each in intervals)
    is_exact = all(each.is_exact for each in found)
    return replace(worst, interval=Interval(lower, upper), is_exact=is_exact)


def _is_finite(bound: Bound) -> bool:
    """Return whether a bound on ε is finite; values above 1e15 count as infinite."""
    return math.isfinite(bound.value) and bound.value <= 1e15


def _at_least_delta_min(bound: Bound) -> Bound:
    """Return a bound on δ, or `DELTA_MIN` if the bound is smaller, in case it underflowed.

    A lower bound so small that doubles lose digits is 0.
    """
    if bound.is_exact:
        return bound
    interval = bound.interval
    if interval is not None:
        lower = interval.lower if interval.lower >= rounding.SMALLEST else 0.0
        interval = Interval(lower, max(interval.upper, DELTA_MIN))
    return replace(bound, value=max(bound.value, DELTA_MIN), interval=interval)


def _require_supported_releases(method: str, question: Question) -> None:
    """Raise if this method has no formula for a release, or its noise is too small."""
    for atom in question.form.all_atoms:
        if atom.noise == "mixture":
            raise MethodNotApplicableError(
                f"{method} has no formula for different releases on one sample; describe each "
                "release with its own sampling",
                atom.pointer,
            )
    every = [(atom, 1) for atom in question.form.all_atoms]
    for group in release_laws.release_groups(every, question.relation):
        noise = release_laws.effective_noise(group)
        if noise is not None and noise < _SAMPLED_NOISE_MIN:
            raise TooExpensiveError(
                "the releases on one sample are equivalent to one with an effective noise "
                f"multiplier of {noise:.2g}; sampled releases need at least "
                f"{_SAMPLED_NOISE_MIN:g}: make fewer releases on a sample, or add noise",
                group.atom.pointer,
            )


def _relation_assumptions(question: Question) -> tuple[Assumption, ...]:
    """Return the hypotheses on neighbouring datasets that the mechanism's sampling requires."""
    sampled = {atom.sampling for atom in question.form.all_atoms} - {"none"}
    added = question.relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    found = []
    has_parts = question.form.premises.has_parts
    if has_parts or any(atom.parts for atom in question.form.all_atoms):
        replaced = question.relation is NeighbouringRelation.REPLACE_ONE
        found.append(replace(_PARTS, holds=not replaced))
    if any(atom.inner == SAMPLED_IN_TURN for atom in question.form.all_atoms):
        replaced = question.relation is NeighbouringRelation.REPLACE_ONE
        found.append(replace(_GROUPS, holds=not replaced))
    if "shuffled" in sampled:
        found.append(replace(_PARTITION, holds=not added))
    if sampled and added:
        found.append(_DIVISOR)
    return (*found, *_description_assumptions(question.form.premises))


def _description_assumptions(premises: Premises) -> Iterator[Assumption]:
    """Yield the hypotheses of a description that its releases alone do not state."""
    if premises.has_uncut_samples:
        yield _UNCUT
    if premises.limits_participation:
        yield _PARTICIPATION
    yield from _unit_assumptions(premises.records_per_person)


def _unit_assumptions(records_per_person: Sequence[int]) -> tuple[Assumption, ...]:
    """Return the hypothesis that states a claim's unit, if it is not one record.

    A release that is described for fewer records of a person than another one covers this person
    only if they have no more there. Proof of what the statement says: docs/accountants/kinds.md,
    section Several records of a person.

    Args:
        records_per_person: the different numbers of records that the releases are described for.
    """
    most = max(records_per_person, default=1)
    if most == 1:
        return ()
    if len(records_per_person) == 1:
        return (Assumption(_PERSON.format(most), True, _UNIT_SOURCE),)
    return (Assumption(_PERSON_IN_EACH_RELEASE.format(most), True, _UNIT_SOURCE),)


def require_noise(method: str, question: Question, allowed: Sequence[str]) -> None:
    """Raise unless every release's noise (gaussian, laplace, …) is in `allowed`."""
    for atom, _ in question.form.atom_counts:
        if atom.noise not in allowed:
            raise MethodNotApplicableError(
                f"{method} has no formula for {_name_noise(atom.noise)}", atom.pointer
            )


def _name_noise(kind: str) -> str:
    """Return the name of a noise (`kind`) in words, for an error message."""
    return f"{kind} noise" if kind in ("gaussian", "laplace") else kind


def require_single_group(method: str, question: Question) -> ReleaseGroup:
    """Return the only distinct release; raise if there are several, which the method cannot handle.

    Raises:
        MethodNotApplicableError: the mechanism has different releases.
    """
    groups = question.release_groups
    if len(groups) > 1:
        raise MethodNotApplicableError(
            f"{method} has a formula for one repeated release, not for different releases",
            groups[1].atom.pointer,
        )
    return groups[0]


def assume_sampling(
    question: Question, allowed: Sequence[str], statement: str, source: str
) -> Assumption:
    """Return the hypothesis that every release is sampled in an allowed way, and if it holds."""
    holds = all(atom.sampling in allowed for atom, _ in question.form.atom_counts)
    return Assumption(statement, holds, source)


def assume_poisson_sampling(question: Question, source: str) -> Assumption:
    """Return the hypothesis that batches are Poisson samples or all the data, and if it holds."""
    statement = "each batch is a Poisson sample (or all the data)"
    return assume_sampling(question, ["poisson", "none", "shuffled"], statement, source)


def assume_relation(
    question: Question, allowed: Sequence[NeighbouringRelation], statement: str, source: str
) -> Assumption:
    """Return the hypothesis that the neighbouring relation is an allowed one, and if it holds."""
    return Assumption(statement, question.relation in allowed, source)
