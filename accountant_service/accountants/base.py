"""The protocol every accounting method follows, and what they share.

A method answers two questions about a mechanism, ε at a δ and δ at an ε; the solver turns these
into noise, steps and rates. It first looks at the whole mechanism and refuses, by name, a part it
has no formula for; then it says which hypotheses of its theorem hold; then it computes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from accountant_service.errors import (
    BoundsContradictError,
    MethodNotApplicableError,
    NoFiniteEpsilonError,
    TooExpensiveError,
)
from accountant_service.guarantee import (
    Assumption,
    Guarantee,
    Interval,
    NeighbouringRelation,
    Status,
)
from accountant_service.mechanisms import Atom, CanonicalForm
from accountant_service.numerics import rounding, search
from accountant_service.numerics.two_sided import EPSILON_NEGLIGIBLE, ContradictionError

TOLERANCE: Final = 1e-3
DELTA_MIN: Final = 1e-300  # where a search for δ ends, and what is claimed below it
_DELTA_MAX: Final = 1 - 1e-9
_DELTA_NEGLIGIBLE: Final = 1e-250  # no engine narrows a δ below it
_SAMPLED_NOISE_MIN: Final = 0.004  # over the sensitivity: 3e5 quadrature nodes
RATE_MIN: Final = 1e-30  # smaller products of sample rates are charged as this one
_PARTITION: Final = Assumption(
    "shuffled batches are a fixed partition, which has no neighbour with one record more or less: "
    "use zero_out_one or replace_one",
    True,
    "arXiv 2403.17673, arXiv 2411.10614",
)
# The noisy sum is what is accounted for. A divisor that a record moves would show in the scale of
# the noise, in every coordinate: with many of them two neighbours are told apart almost surely.
_DIVISOR: Final = Assumption(
    "the number of records is public: noisy sums are divided by a constant, the plan's expected "
    "batch size, which is the same with and without the record",
    True,
    "arXiv 2605.15648; opacus issues 571 and 819",
)


@dataclass(frozen=True, slots=True)
class Part:
    """A release with what an accountant needs to know of it.

    Attributes:
        atom: the release.
        count: how often it is made, at least 1.
        sigma: noise over the sensitivity that the neighbouring relation implies.
        rate: the probability that a given record takes part.
    """

    atom: Atom
    count: int
    sigma: float
    rate: float


@dataclass(frozen=True, slots=True)
class Question:
    """A mechanism, and the notion of neighbours it is to protect.

    Attributes:
        form: the mechanism, in canonical form.
        relation: when two datasets are neighbours.
        tolerance: the relative width that a proved interval should have.
    """

    form: CanonicalForm
    relation: NeighbouringRelation
    tolerance: float = TOLERANCE

    @property
    def parts(self) -> tuple[Part, ...]:
        """The releases, with their effective noise and rate (see decision 0002)."""
        return tuple(
            Part(
                atom,
                count,
                atom.noise_multiplier / _sensitivity(atom, self.relation),
                _rate(atom, self.relation),
            )
            for atom, count in self.form.parts
        )

    def repeated(self, times: int) -> Question:
        """The same question of the whole mechanism run so many times."""
        return replace(self, form=self.form.scaled(times))

    @property
    def is_attained(self) -> bool:
        """Return whether two neighbouring datasets have exactly the pairs charged as their outputs.

        If not, the pairs only dominate: they give upper bounds, and no lower ones. Shuffled
        batches hide more than is charged, and so do rates that were rounded up. Under add/remove,
        fixed-size samples have to agree on the size of the larger dataset: it is `dataset_size`,
        and one more where the batch is the whole dataset.
        """
        atoms = [atom for atom, _ in self.form.parts]
        sizes = {_larger_size(atom) for atom in atoms if atom.sampling == "fixed_size"}
        agree = len(sizes) <= 1 or self.relation is not NeighbouringRelation.ADD_OR_REMOVE_ONE
        return agree and all(_is_attained(atom, self.relation) for atom in atoms)

    @property
    def sampling(self) -> str:
        """The one kind of sampling, `mixed` if there are several, `none` if nothing is released."""
        kinds = {atom.sampling for atom, _ in self.form.parts}
        return kinds.pop() if len(kinds) == 1 else ("mixed" if kinds else "none")


def _takes_all(atom: Atom) -> bool:
    """Return whether a fixed-size sample is the whole dataset."""
    return atom.sampling == "fixed_size" and atom.sample_rate == 1.0


def _sensitivity(atom: Atom, relation: NeighbouringRelation) -> float:
    """How far apart the sums of a batch may be, in units of C.

    In a batch of fixed size another record takes the place of the one that is not drawn, up to 2C
    away. A batch of all the data always holds the record, which is zeroed or replaced in place.
    """
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    if atom.sampling == "fixed_size" and (added or not _takes_all(atom)):
        return 2.0
    return relation.sensitivity


def _rate(atom: Atom, relation: NeighbouringRelation) -> float:
    """The probability that a record takes part, in the larger of two neighbouring datasets.

    A batch of all n records has no neighbour with n − 1 records, of which no such batch could be
    drawn; of n + 1 records it leaves one out. Sampled Laplace noise of fixed size has no formula
    here: its batch of all the data is charged without that amplification.
    """
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    if added and _takes_all(atom) and atom.noise == "gaussian" and atom.fixed_sizes:
        return atom.fixed_sizes[0] / (atom.fixed_sizes[0] + 1)
    if atom.sampling == "poisson":
        return max(atom.sample_rate, RATE_MIN)
    return 1.0 if atom.sampling == "shuffled" else atom.sample_rate


def _is_attained(atom: Atom, relation: NeighbouringRelation) -> bool:
    """Return whether two neighbouring datasets attain the pair of one release."""
    if atom.sampling == "poisson":
        return atom.sample_rate >= RATE_MIN
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    left_out = added and _takes_all(atom) and atom.noise != "gaussian"
    return atom.sampling != "shuffled" and not left_out


def _larger_size(atom: Atom) -> int:
    """The number of records in the larger of two neighbouring datasets."""
    size = atom.fixed_sizes[0] if atom.fixed_sizes else 0
    return size + 1 if _takes_all(atom) else size


@dataclass(frozen=True, slots=True)
class Bound:
    """What a formula gives: the value, and how it came about."""

    value: float
    order: float | None = None
    conversion: str | None = None
    interval: Interval | None = None


class Accountant(ABC):
    """One accounting method.

    Attributes:
        name: the method's name on the wire.
        title, source, needs, proves: what `GET /v1/methods` says of it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    needs: ClassVar[str]
    proves: ClassVar[str]

    @abstractmethod
    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """The theorem's hypotheses and whether they hold, before anything is computed.

        Raises:
            MethodNotApplicableError: the method has no formula for a part, which it names.
            TooExpensiveError: answering would exceed the work limit.
        """

    @abstractmethod
    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """ε at δ, rounded up. At least one part; 0 < delta < 1."""

    def epsilon_bounds(self, step: Question, times: Sequence[int], delta: float) -> list[Bound]:
        """`epsilon_bound` after each of increasing numbers of repetitions, infinite if none is.

        One by one, unless a method knows better; the last is what `epsilon_bound` gives.
        """
        bounds = []
        for each in times:
            try:
                bounds.append(self.epsilon_bound(step.repeated(each), delta))
            except NoFiniteEpsilonError:
                bounds.append(Bound(math.inf))
        return bounds

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """δ at ε, rounded up: by default the least δ found whose ε is small enough."""

        def excess(delta: float) -> float:
            return self.epsilon_bound(question, delta).value - epsilon

        if excess(_DELTA_MAX) > 0:
            return Bound(1.0)
        if excess(DELTA_MIN) <= 0:
            return Bound(DELTA_MIN)
        delta = search.boundary(excess, fit=_DELTA_MAX, unfit=DELTA_MIN, relative_width=1e-10)
        return Bound(min(1.0, rounding.up(delta)))

    def epsilon(self, question: Question, delta: float) -> Guarantee:
        """The guarantee at δ.

        Raises:
            AccountingError: see `errors`.
        """
        assumptions = self._assumptions(question)
        with refusing_contradictions(question, f"δ = {delta!r}"):
            bound = self.epsilon_bound(question, delta) if question.form.parts else Bound(0.0)
        if not _is_finite(bound):
            raise NoFiniteEpsilonError(
                f"{self.name} finds no finite ε at δ = {delta:g}: add noise, or allow a larger δ"
            )
        return self._guarantee(question, bound, assumptions, bound.value, delta, "epsilon")

    def curve(self, step: Question, times: Sequence[int], delta: float) -> list[Guarantee | None]:
        """The guarantee at δ after each number of repetitions; None where no ε is finite.

        Args:
            step: what is repeated.
            times: increasing numbers ≥ 1.
            delta: in (0, 1).

        Raises:
            AccountingError: the method has no formula, or the work is too much, at any of them.
        """
        questions = [step.repeated(each) for each in times]
        assumptions = [self._assumptions(question) for question in questions]
        bounds = [Bound(0.0)] * len(times)
        if step.form.parts:
            with refusing_contradictions(step, f"δ = {delta!r}, {len(times)} step counts"):
                bounds = self.epsilon_bounds(step, times, delta)
        return [
            self._guarantee(question, bound, assumed, bound.value, delta, "epsilon")
            if _is_finite(bound)
            else None
            for question, assumed, bound in zip(questions, assumptions, bounds, strict=True)
        ]

    def delta(self, question: Question, epsilon: float) -> Guarantee:
        """The guarantee at ε."""
        assumptions = self._assumptions(question)
        bound = Bound(0.0)
        if question.form.parts:
            with refusing_contradictions(question, f"ε = {epsilon!r}"):
                bound = _above_underflow(self.delta_bound(question, epsilon))
        return self._guarantee(question, bound, assumptions, epsilon, bound.value, "delta")

    def _assumptions(self, question: Question) -> tuple[Assumption, ...]:
        if not question.form.parts:
            return (Assumption("nothing is released", True, "definition of privacy"),)
        _require_known_atoms(self.name, question)
        return (*_relation_assumptions(question), *self.assumptions(question))

    def _guarantee(
        self,
        question: Question,
        bound: Bound,
        assumptions: tuple[Assumption, ...],
        epsilon: float,
        delta: float,
        solved_for: str,
    ) -> Guarantee:
        interval = bound.interval if question.form.parts else Interval(0.0, 0.0)
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
            warnings=_warnings(question, certified, solved_for),
        )


@contextmanager
def refusing_contradictions(question: Question, at: str) -> Iterator[None]:
    """Turn bounds that contradict each other into an error that names the whole question.

    Args:
        question: what was asked.
        at: the rest of it, in words.

    Raises:
        BoundsContradictError: two proved bounds contradict each other.
    """
    try:
        yield
    except ContradictionError as error:
        releases = "; ".join(f"{count} × {atom}" for atom, count in question.form.parts)
        raise BoundsContradictError(
            f"{error}. This is a defect of the service, and no number is answered: please report "
            f"it. Asked at {at} under {question.relation}, tolerance {question.tolerance!r}, of "
            f"{question.form.hash}: {releases[:2000]}"
        ) from error


def relative_width(interval: Interval, solved_for: str) -> float:
    """Return the width of a proved interval, relative to its upper end or the least that counts."""
    if solved_for == "delta" and interval.upper <= _DELTA_NEGLIGIBLE:
        return 0.0
    least = EPSILON_NEGLIGIBLE if solved_for == "epsilon" else _DELTA_NEGLIGIBLE
    return (interval.upper - interval.lower) / max(interval.upper, least)


def _warnings(question: Question, interval: Interval | None, solved_for: str) -> tuple[str, ...]:
    """Return warnings about a proved interval that is wider than the tolerance."""
    if interval is None or relative_width(interval, solved_for) <= question.tolerance:
        return ()
    if not question.is_attained:
        return ("only an upper bound is proved: the true value may lie far below it",)
    return (
        f"the proved interval is wider than a relative {question.tolerance:g}: the true value may "
        "lie far below its upper end",
    )


def _is_finite(bound: Bound) -> bool:
    return math.isfinite(bound.value) and bound.value <= 1e15


def _above_underflow(bound: Bound) -> Bound:
    """A δ that double precision cannot hold is claimed to be at most the least δ claimed."""
    interval = bound.interval
    if interval is not None:
        interval = Interval(interval.lower, max(interval.upper, DELTA_MIN))
    return replace(bound, value=max(bound.value, DELTA_MIN), interval=interval)


def _require_known_atoms(method: str, question: Question) -> None:
    for atom, _ in question.form.parts:
        if atom.noise == "mixture":
            raise MethodNotApplicableError(
                f"{method} has no formula for a sample on which different releases are made; "
                "describe each release with its own sampling",
                atom.pointer,
            )
    for part in question.parts:
        if part.atom.noise == "gaussian" and part.rate < 1 and part.sigma < _SAMPLED_NOISE_MIN:
            raise TooExpensiveError(
                f"the releases made on one sample count as one, with noise {part.sigma:.2g} times "
                f"the sensitivity; below {_SAMPLED_NOISE_MIN:g} it is not accounted: make fewer "
                "releases on a sample, or add noise",
                part.atom.pointer,
            )


def _relation_assumptions(question: Question) -> tuple[Assumption, ...]:
    """What the sampling asks of the neighbouring relation, whatever the method."""
    sampled = {atom.sampling for atom, _ in question.form.parts} - {"none"}
    added = question.relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    found = []
    if "shuffled" in sampled:
        found.append(replace(_PARTITION, holds=not added))
    if sampled and added:
        found.append(_DIVISOR)
    return tuple(found)


def require_noise(method: str, question: Question, allowed: Sequence[str]) -> None:
    """Refuse, by place, a release whose noise the method has no formula for."""
    for atom, _ in question.form.parts:
        if atom.noise not in allowed:
            raise MethodNotApplicableError(
                f"{method} has no formula for {atom.noise} noise", atom.pointer
            )


def single_part(method: str, question: Question) -> Part:
    """The only part, for theorems about one release repeated."""
    parts = question.parts
    if len(parts) > 1:
        raise MethodNotApplicableError(
            f"{method} has a formula for one release repeated, not for different ones composed",
            parts[1].atom.pointer,
        )
    return parts[0]


def sampled_as(
    question: Question, allowed: Sequence[str], statement: str, source: str
) -> Assumption:
    """The hypothesis that every release's batches are drawn as the theorem says."""
    holds = all(atom.sampling in allowed for atom, _ in question.form.parts)
    return Assumption(statement, holds, source)


def poisson_or_all(question: Question, source: str) -> Assumption:
    """The hypothesis that every batch is a Poisson sample, or all the data."""
    statement = "each batch is a Poisson sample (or all the data)"
    return sampled_as(question, ["poisson", "none", "shuffled"], statement, source)


def related_as(
    question: Question, allowed: Sequence[NeighbouringRelation], statement: str, source: str
) -> Assumption:
    """The hypothesis that neighbours are what the theorem says."""
    return Assumption(statement, question.relation in allowed, source)
