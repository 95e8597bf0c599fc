"""Canonical form: rewrite equivalent mechanisms into the same atoms with counts, and hash them.

Composition does not depend on order or grouping, so a tree is rewritten into a count for each
distinct atom:

* `repeated` multiplies counts, `composed` adds them, `dp_sgd` is expanded;
* a kind that equals a more basic one is that one: a `diagonal_gaussian` the Gaussian of its
  Lemma 1;
* Poisson sampling at rate 1 is no sampling, at rate 0 no release; Poisson sampling of a Poisson
  sample multiplies the rates. A fixed-size sample of the whole dataset remains a sample: its size
  stays the same when a record is added or removed;
* several Gaussian releases on one sample are one Gaussian release on it with
  σ = (Σ 1/σᵢ²)^(−1/2), because the releases see the same sample;
* the user level is outside of a sample, as the sample contains each record independently;
* balls in bins with as many selections as bins is that many releases without sampling;
* correlated noise is the Gaussian release, or the sampled Gaussian releases, of the worst record;
* `parallel` of one mechanism is that mechanism, and a repeated `parallel` is the `parallel` of its
  repeated parts, because a record stays in its part. Equal `parallel` releases that are composed
  remain several: each may divide the data in its own way.

A kind that is one release with parameters of its own becomes an atom with these parameters.
A mechanism that these rules do not cover (Laplace and Gaussian releases on one sample) becomes a
`mixture` atom, which accountants refuse with its JSON pointer.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Final, Literal

from accountant_service.mechanisms.kinds import (
    BallsInBins,
    BandedMatrixFactorization,
    Composed,
    DpSgd,
    FixedSizeSampled,
    Gaussian,
    GaussianMixture,
    Laplace,
    MatrixFactorization,
    Mechanism,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    Repeats,
    ShuffledReports,
    TreeAggregation,
    TruncatedPoissonSampled,
    UserLevel,
)
from accountant_service.writing.canonical_json import canonical_json

Parameter = float | str | tuple[float, ...]  # of a kind, as hashed
AtomSampling = Literal[
    "none", "poisson", "truncated_poisson", "fixed_size", "balls_in_bins", "shuffled"
]


_SAMPLES: Final = (PoissonSampled, FixedSizeSampled, BallsInBins, TruncatedPoissonSampled)
_LIMITED: Final = (MatrixFactorization, TreeAggregation)  # the steps that a record takes part in
SAMPLED_IN_TURN: Final = "sampled in turn"  # `inner` of releases that see one group of records


@dataclass(frozen=True, slots=True)
class Atom:
    """An elementary release of a mechanism, such as Gaussian noise on a Poisson sample.

    Attributes:
        noise: kind of the release; `mixture` is a sampled composition that no method has a formula
            for.
        noise_multiplier: noise over the clip norm; 0 for a kind without it.
        sampling: how the release's records are chosen.
        sample_rate: expected fraction of the dataset in the sample; 1 without sampling.
        fixed_sizes: dataset size and batch size of a sample of fixed or limited size.
        inner: hash of the mechanism inside, of a release that is made of others; `SAMPLED_IN_TURN`
            if groups of records take part in turn.
        parameters: of a kind that is described by more than a noise multiplier.
        releases: of one run of the mechanism inside, whose hash is `inner`.
        parts: the different mechanisms that run on disjoint parts of the data.
        exact_rate: the sample rate as a product or ratio of the numbers as written, where
            `sample_rate` is rounded; neither compared nor hashed.
        pointer: JSON pointer of the release in the tree; not compared and not hashed.
    """

    noise: str
    noise_multiplier: float
    sampling: AtomSampling = "none"
    sample_rate: float = 1.0
    fixed_sizes: tuple[int, int] | None = None
    inner: str = ""
    parameters: tuple[Parameter, ...] = ()
    releases: tuple[tuple[Atom, int], ...] = field(default=(), compare=False)
    parts: tuple[CanonicalForm, ...] = field(default=(), compare=False)
    exact_rate: Fraction | None = field(default=None, compare=False)
    pointer: str = field(default="", compare=False)

    @property
    def is_parallel(self) -> bool:
        """Return whether the release consists of mechanisms on disjoint parts of the dataset."""
        return self.noise == "parallel" and self.sampling == "none"

    def list_choices(self) -> list[dict[Atom, int]]:
        """List the counted releases that one record may be subject to, by the part that it is in.

        A part may be divided into parts itself.
        """
        forms = (form for part in self.parts for form in part.alternatives)
        return [dict(form.atom_counts) for form in forms]

    def hashed_fields(self) -> list[object]:
        """Return the fields that the canonical hash covers, in a fixed order."""
        sizes = list(self.fixed_sizes or ())
        return [
            self.noise,
            self.noise_multiplier,
            self.sampling,
            self.sample_rate,
            sizes,
            self.inner,
            *([list(self.parameters)] if self.parameters else []),
        ]


@dataclass(frozen=True, slots=True)
class Premises:
    """A description's assumptions about the data that the canonical releases no longer show.

    Equivalent mechanisms have the same releases and may have different premises.

    Attributes:
        records_per_person: the different numbers of records of one person that releases are
            described for, in increasing order: 1 without `user_level`.
        has_uncut_samples: whether there is a Poisson sample of limited size whose limit is at least
            the stated size of the dataset: it is a Poisson sample only for data of this size.
        limits_participation: whether there is correlated noise, or a tree, whose sensitivity rests
            on the steps that a record takes part in.
        has_parts: whether the releases are those of one part of the data, as `of_common_part`
            returns them.
    """

    records_per_person: tuple[int, ...] = (1,)
    has_uncut_samples: bool = False
    limits_participation: bool = False
    has_parts: bool = False


@dataclass(frozen=True, slots=True)
class CanonicalForm:
    """A mechanism as distinct elementary releases (atoms) and their counts, in a fixed order.

    Attributes:
        atom_counts: each atom with the number of times it is released, at least 1.
        hash: `sha256:` and 64 hexadecimal digits; equal for equivalent mechanisms.
        premises: the description's assumptions about the data; neither compared nor hashed.
    """

    atom_counts: tuple[tuple[Atom, int], ...]
    hash: str
    premises: Premises = field(default=Premises(), compare=False)

    @property
    def steps(self) -> int:
        """The number of elementary releases, counted with repetitions."""
        return sum(count for _, count in self.atom_counts)

    @property
    def alternatives(self) -> Iterator[CanonicalForm]:
        """The mechanisms that one record may be subject to: one part of each parallel release.

        Equal parallel releases may divide the data in different ways, so the record may be in
        another part of each.
        """
        chosen = [
            itertools.combinations_with_replacement(atom.list_choices(), count)
            if atom.is_parallel
            else [({atom: count},)]
            for atom, count in self.atom_counts
        ]
        for choice in itertools.product(*chosen):
            yield _form_of_atoms(_add_counts(itertools.chain.from_iterable(choice)))

    @property
    def alternatives_count(self) -> int:
        """The number of `alternatives`."""
        return math.prod(
            math.comb(sum(part.alternatives_count for part in atom.parts) + count - 1, count)
            for atom, count in self.atom_counts
            if atom.is_parallel
        )

    def of_common_part(self) -> CanonicalForm:
        """Return the form with the releases of one part, where all parts with releases are equal.

        The other parts release nothing. If neighbours differ in one part only, this costs the same:
        a record in a part without releases changes no output, and any pair dominates that. The
        premise `has_parts` is set. Other parallel releases remain.
        """
        if not any(atom.is_parallel for atom, _ in self.atom_counts):
            return self
        counts = _add_counts(_count_common_part(atom, count) for atom, count in self.atom_counts)
        return replace(_form_of_atoms(counts), premises=replace(self.premises, has_parts=True))

    @property
    def all_atoms(self) -> Iterator[Atom]:
        """The distinct elementary releases, each followed by those nested in it."""
        return _all_atoms(self.atom_counts)

    def repeated(self, times: int) -> CanonicalForm:
        """Return the canonical form of this mechanism repeated `times` times."""
        form = _form_of_atoms(_multiply_counts(dict(self.atom_counts), times))
        return replace(form, premises=self.premises)


def _count_common_part(atom: Atom, count: int) -> dict[Atom, int]:
    """Return `count` releases, or the counted releases of their only part that releases anything.

    Each of them may divide the data anew, so no releases are merged into one `parallel`.
    """
    if not atom.is_parallel:
        return {atom: count}
    forms = {form.hash: form for form in (part.of_common_part() for part in atom.parts)}
    present = [form for form in forms.values() if form.atom_counts]
    if len(present) > 1:
        return {atom: count}
    return {inner: count * times for form in present for inner, times in form.atom_counts}


def _all_atoms(atom_counts: Iterable[tuple[Atom, int]]) -> Iterator[Atom]:
    """Yield distinct elementary releases (atoms), each followed by those nested in it."""
    for atom, _ in atom_counts:
        yield atom
        yield from _all_atoms(atom.releases)
        for part in atom.parts:
            yield from _all_atoms(part.atom_counts)


def canonical_form(mechanism: Mechanism) -> CanonicalForm:
    """Return the canonical form of a valid mechanism: its distinct releases and their counts."""
    form = _form_of_atoms(_count_atoms(mechanism, ""))
    records = tuple(sorted(_list_records_per_person(mechanism)))
    every = list(_mechanisms_inside(mechanism))
    premises = Premises(
        records,
        has_uncut_samples=any(map(_is_uncut_sample, every)),
        limits_participation=any(isinstance(each, _LIMITED) for each in every),
    )
    return replace(form, premises=premises)


def _form_of_atoms(counts: Mapping[Atom, int]) -> CanonicalForm:
    """Build a canonical form from counted elementary releases: sort them, drop zero counts."""
    present = ((_hashed_text(atom.hashed_fields()), atom, n) for atom, n in counts.items() if n > 0)
    lines = sorted(present, key=lambda line: line[0])
    text = _hashed_text([[line, count] for line, _, count in lines])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return CanonicalForm(tuple((atom, count) for _, atom, count in lines), f"sha256:{digest}")


def _hashed_text(document: object) -> str:
    """Return the JSON text whose SHA-256 is a canonical form's hash."""
    return canonical_json(document, compact=False, ascii_only=True)


def _count_atoms(mechanism: Mechanism, pointer: str) -> dict[Atom, int]:  # noqa: C901 - by kind
    """Return each elementary release (atom) with its count; errors cite `pointer`."""
    simple = mechanism.simplified()
    if simple is not mechanism:
        return _count_atoms(simple, pointer)
    match _with_user_level_outside(mechanism):
        case Repeated(count, inner):
            return _multiply_counts(_count_atoms(inner, f"{pointer}/mechanism"), count)
        case Composed(inners):
            return _add_counts(
                _count_atoms(inner, f"{pointer}/mechanisms/{i}") for i, inner in enumerate(inners)
            )
        case PoissonSampled(rate, inner):
            atoms = _count_atoms(inner, f"{pointer}/mechanism")
            return _apply_sampling(atoms, "poisson", rate, None, pointer)
        case FixedSizeSampled(size, batch, inner):
            atoms = _count_atoms(inner, f"{pointer}/mechanism")
            return _apply_sampling(atoms, "fixed_size", batch / size, (size, batch), pointer)
        case BallsInBins(bins, inner, selections):
            atoms = _count_atoms(inner, f"{pointer}/mechanism")
            return _count_epoch_atoms(atoms, bins, selections, pointer)
        case DpSgd() as run:
            return _count_dp_sgd_atoms(run, pointer)
        case UserLevel(records, inner):
            atoms = _count_atoms(inner, f"{pointer}/mechanism")
            converted = ({_apply_user_level(each, records): n} for each, n in atoms.items())
            return _add_counts(converted)  # two noise multipliers may round to one
        case TruncatedPoissonSampled(size, rate, batch, inner):
            atoms = _count_atoms(inner, f"{pointer}/mechanism")
            return _apply_truncated_sampling(atoms, rate, (size, batch), pointer)
        case BandedMatrixFactorization() as run:
            return _count_banded_atoms(run, pointer)
        case GaussianMixture() as mixture:
            return _count_mixture_atoms(mixture, pointer)
        case PrivateSelection(repeats, inner):
            form = _form_of_atoms(_count_atoms(inner, f"{pointer}/mechanism"))
            return _count_selection_atoms(repeats, form, pointer)
        case ShuffledReports(reports, inner):
            form = _form_of_atoms(_count_atoms(inner, f"{pointer}/mechanism"))
            return {_shuffled_reports_atom(reports, form, pointer): 1}
        case Parallel(inners) as parallel:
            records = _records_per_person(parallel)
            if records > 1 and len(inners) > 1:  # a person's records may be in several parts
                whole = UserLevel(records, _without_user_level(parallel))
                return _count_atoms(whole, pointer)
            return _count_parallel_atoms(inners, pointer)
        case release:
            return {_release_atom(release, pointer): 1}


def _with_user_level_outside(mechanism: Mechanism) -> Mechanism:
    """Return a mechanism on a sample with the user level around the sample, not inside it.

    A sample contains each record independently of all others, also of one person's. So a sample of
    a release at user level is, for a person with up to k records, k records in a release on the
    sample. If several releases on the sample state different k, the largest holds for all.
    """
    if not isinstance(mechanism, _SAMPLES):
        return mechanism
    records = _records_per_person(mechanism.mechanism)
    if records == 1:
        return mechanism
    inner = _without_user_level(mechanism.mechanism)
    return UserLevel(records, replace(mechanism, mechanism=inner))


def _records_per_person(mechanism: Mechanism) -> int:
    """Return the most records of one person that a mechanism or one inside it states, or 1."""
    match mechanism:
        case UserLevel(records, inner):
            return records * _records_per_person(inner)
        case _:
            return max((_records_per_person(inner) for _, inner in mechanism.inner()), default=1)


def _list_records_per_person(mechanism: Mechanism) -> set[int]:
    """Return the different numbers of records of one person that a mechanism's releases state.

    A release that no `user_level` is around states 1. All releases on one sample state the largest
    of them, as in `_with_user_level_outside`.
    """
    match mechanism:
        case UserLevel(records, inner):
            return {records * each for each in _list_records_per_person(inner)}
        case PoissonSampled() | FixedSizeSampled() | BallsInBins() | TruncatedPoissonSampled():
            found = _list_records_per_person(mechanism.mechanism)
            return {max(found)} if found else found
        case Composed(()) | Parallel(()):
            return set()
        case _:
            inners = [_list_records_per_person(inner) for _, inner in mechanism.inner()]
            return set().union(*inners) if inners else {1}


def _mechanisms_inside(mechanism: Mechanism) -> Iterator[Mechanism]:
    """Yield a mechanism and all mechanisms inside it."""
    waiting = [mechanism]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [inner for _, inner in each.inner()]


def _is_uncut_sample(mechanism: Mechanism) -> bool:
    """Return whether a mechanism is a Poisson sample whose limit is no less than the data."""
    match mechanism:
        case TruncatedPoissonSampled(size, rate, batch):
            return batch >= size and rate > 0.0
        case _:
            return False


def _without_user_level(mechanism: Mechanism) -> Mechanism:
    """Return a mechanism in which no release is at user level."""
    if isinstance(mechanism, UserLevel):
        return _without_user_level(mechanism.mechanism)
    return mechanism.with_inner(_without_user_level)


def _release_atom(mechanism: Mechanism, pointer: str) -> Atom:
    """Return one release of noise on all the data, as an atom; errors cite `pointer`."""
    match mechanism:
        case Gaussian(noise_multiplier) | Laplace(noise_multiplier):
            return Atom(mechanism.kind, noise_multiplier, pointer=pointer)
        case TreeAggregation(noise_multiplier):
            lower, upper = mechanism.squared_sensitivity_bounds()
            kind = "gaussian" if lower == upper else mechanism.kind
            return Atom(kind, noise_multiplier / math.sqrt(upper), pointer=pointer)
        case _:
            values = tuple(getattr(mechanism, each.name) for each in fields(mechanism))
            return Atom(mechanism.kind, 0.0, parameters=values, pointer=pointer)


def _count_dp_sgd_atoms(run: DpSgd, pointer: str) -> dict[Atom, int]:
    """Return a DP-SGD run's elementary releases (atoms) and counts; errors cite `pointer`."""
    step = {Atom("gaussian", run.noise_multiplier, pointer=pointer): 1}
    rate, count = run.rate(), run.step_count()
    if run.sampling == "balls_in_bins" and rate > 0.0:
        epoch_atoms = _count_epoch_atoms(step, run.bins(), 1, pointer)
        return _multiply_counts(epoch_atoms, count // run.bins())
    if run.sampling == "shuffled" and rate > 0.0 and count > 0:
        epoch = Atom("gaussian", run.noise_multiplier, "shuffled", rate, pointer=pointer)
        return {epoch: run.epoch_count()}
    sizes = None
    if run.sampling == "fixed_size" and run.dataset_size and run.batch_size:
        sizes = (run.dataset_size, run.batch_size)
    kind: AtomSampling = "fixed_size" if sizes else "poisson"
    sampled = step if run.sampling == "none" else _apply_sampling(step, kind, rate, sizes, pointer)
    return _multiply_counts(sampled, count)


def _count_epoch_atoms(
    atoms: Mapping[Atom, int], bins: int, selections: int, pointer: str
) -> dict[Atom, int]:
    """Return one epoch of balls-in-bins sampling as counted atoms; errors cite `pointer`."""
    present = {atom: count for atom, count in atoms.items() if count > 0}
    merged = _merge_gaussians(present) if present else None
    if merged is None:
        return {}  # nothing is released: a valid one has Gaussian noise only
    if selections == bins:
        return {merged: bins}
    epoch = Atom(
        "balls_in_bins",
        merged.noise_multiplier,
        "balls_in_bins",
        selections / bins,
        parameters=(bins, selections),
        pointer=pointer,
    )
    return {epoch: 1}


def _count_banded_atoms(run: BandedMatrixFactorization, pointer: str) -> dict[Atom, int]:
    """Return the Gaussian releases (atoms) that a banded run equals; errors cite `pointer`."""
    rounds = []
    for norm, count in run.rounds():
        noise = run.noise_multiplier / norm
        step = {Atom("gaussian", noise, inner=SAMPLED_IN_TURN, pointer=pointer): 1}
        sampled = _apply_sampling(step, "poisson", run.sample_rate, None, pointer)
        rounds.append(_multiply_counts(sampled, count))
    return _add_counts(rounds)


def _count_selection_atoms(repeats: Repeats, form: CanonicalForm, pointer: str) -> dict[Atom, int]:
    """Return private selection (the best of many runs) as an atom; errors cite `pointer`."""
    if not form.atom_counts:
        return {}
    shapes = {"geometric": 1.0, "logarithmic": 0.0, "poisson": 0.0}
    shape = shapes.get(repeats.distribution, repeats.shape or 0.0)
    name = "poisson" if repeats.distribution == "poisson" else "negative_binomial"
    atom = Atom(
        "private_selection",
        0.0,
        inner=form.hash,
        parameters=(name, repeats.mean, shape),
        releases=form.atom_counts,
        pointer=pointer,
    )
    return {atom: 1}


def _shuffled_reports_atom(reports: int, form: CanonicalForm, pointer: str) -> Atom:
    """Return shuffled reports as one elementary release (atom); errors cite `pointer`."""
    return Atom(
        "shuffled_reports",
        0.0,
        inner=form.hash,
        parameters=(reports,),
        releases=form.atom_counts,
        pointer=pointer,
    )


def _count_parallel_atoms(inners: Sequence[Mechanism], pointer: str) -> dict[Atom, int]:
    """Count releases on disjoint parts of the data as atoms; errors cite `pointer`.

    A single part is the whole data.
    """
    forms = [
        _form_of_atoms(_count_atoms(inner, f"{pointer}/mechanisms/{i}"))
        for i, inner in enumerate(inners)
    ]
    if len(forms) == 1:
        return dict(forms[0].atom_counts)
    return _count_parts(forms, pointer)


def _count_mixture_atoms(mixture: GaussianMixture, pointer: str) -> dict[Atom, int]:
    """Return a mixture as an atom: a contribution that is made or not is a Poisson sample."""
    shifts, probabilities = mixture.drawn()
    if len(shifts) == 1 or (len(shifts) == 2 and shifts[0] == 0.0):
        noise = Gaussian(mixture.noise_multiplier / shifts[-1])
        return _count_atoms(PoissonSampled(probabilities[-1], noise), pointer)
    parameters = (shifts, probabilities)
    noise_multiplier = mixture.noise_multiplier
    return {Atom(mixture.kind, noise_multiplier, parameters=parameters, pointer=pointer): 1}


def _count_parts(forms: Sequence[CanonicalForm], pointer: str) -> dict[Atom, int]:
    """Return mechanisms on disjoint parts of the data as one counted atom.

    Equal parts are one part, but not the whole data: a replaced record may move between them. It
    may also move to a part without releases, so that is a part as well.
    """
    parts = {form.hash: form for form in forms}
    if not any(form.atom_counts for form in forms):
        return {}
    ordered = tuple(parts[each] for each in sorted(parts))
    inner = _hashed_text(sorted(parts))
    return {Atom("parallel", 0.0, inner=inner, parts=ordered, pointer=pointer): 1}


def _apply_user_level(atom: Atom, records: int) -> Atom:
    """Convert a release (atom) to user level, where a person has up to `records` records."""
    if records == 1:
        return atom
    if atom.inner == SAMPLED_IN_TURN:  # no proof for records of one person in several groups
        return replace(atom, noise=f"user_level of groups {SAMPLED_IN_TURN}")
    if atom.noise == "gaussian" and atom.sampling == "none":  # all records take part at once
        return replace(atom, noise_multiplier=atom.noise_multiplier / records)
    if atom.noise == "gaussian" and atom.sampling == "poisson":
        return replace(atom, noise="user_level", parameters=(records,))
    parameters = (*atom.parameters, records)
    return replace(atom, noise=f"user_level of {atom.noise}", parameters=parameters)


def _apply_truncated_sampling(
    atoms: Mapping[Atom, int], rate: float, sizes: tuple[int, int], pointer: str
) -> dict[Atom, int]:
    """Return the releases on a Poisson sample of limited size; errors cite `pointer`."""
    present = {atom: count for atom, count in atoms.items() if count > 0}
    merged = _merge_gaussians(present) if present else None
    if merged is None or (merged.noise, merged.sampling) != ("gaussian", "none"):
        inner = _form_of_atoms(present).hash
        mixed = Atom("mixture", 0.0, "truncated_poisson", rate, sizes, inner, pointer=pointer)
        return {mixed: 1} if present else {}
    sampled = replace(
        merged,
        noise="truncated_poisson_sampled",
        sampling="truncated_poisson",
        sample_rate=rate,
        fixed_sizes=sizes,
        pointer=pointer,
    )
    return {sampled: 1}


def _multiply_counts(counts: Mapping[Atom, int], factor: int) -> dict[Atom, int]:
    """Multiply the count of each release (atom) by a factor.

    A record is in the same part in all repetitions of a parallel release, so a repeated one is one
    release of repeated parts. A count above 1 stands for releases that each divide the data anew.
    """
    return _add_counts(
        _repeat_parallel_atom(atom, count, factor) if atom.is_parallel else {atom: count * factor}
        for atom, count in counts.items()
    )


def _repeat_parallel_atom(atom: Atom, count: int, factor: int) -> dict[Atom, int]:
    """Return `count` releases on disjoint parts of the data, with `factor` repetitions of each."""
    repeated = _count_parts([part.repeated(factor) for part in atom.parts], atom.pointer)
    return dict.fromkeys(repeated, count)


def _add_counts(all_counts: Iterable[Mapping[Atom, int]]) -> dict[Atom, int]:
    """Add up the counts of each release (atom) over several mechanisms."""
    total: dict[Atom, int] = {}
    for counts in all_counts:
        for atom, count in counts.items():
            total[atom] = total.get(atom, 0) + count
    return total


def _apply_sampling(
    atoms: Mapping[Atom, int],
    sampling: AtomSampling,
    rate: float,
    sizes: tuple[int, int] | None,
    pointer: str,
) -> dict[Atom, int]:
    """Return the releases (atoms) on one sample, which all of them share; errors cite `pointer`."""
    present = {atom: count for atom, count in atoms.items() if count > 0}
    if not present or (rate == 1.0 and sampling == "poisson"):
        return present
    if rate == 0.0:
        return {}
    merged = _merge_gaussians(present)
    if merged is None:
        inner = _form_of_atoms(present).hash
        return {Atom("mixture", 0.0, sampling, rate, sizes, inner, pointer=pointer): 1}
    exact = Fraction(sizes[1], sizes[0]) if sizes else Fraction(repr(rate))
    if merged.noise == GaussianMixture.kind and sampling == "poisson":
        mixture = GaussianMixture(merged.noise_multiplier, *merged.parameters)  # type: ignore[arg-type]
        return _count_mixture_atoms(mixture.on_sample(exact), pointer)
    if merged.sampling == sampling == "poisson":
        exact *= merged.exact_rate or Fraction(repr(merged.sample_rate))
        rate = max(rate * merged.sample_rate, sys.float_info.min)  # underflow: rounded up
    elif merged.sampling != "none":
        inner = _form_of_atoms(present).hash
        return {Atom("mixture", 0.0, sampling, rate, sizes, inner, pointer=pointer): 1}
    sampled = replace(
        merged,
        sampling=sampling,
        sample_rate=rate,
        fixed_sizes=sizes,
        exact_rate=exact,
        pointer=pointer,
    )
    return {sampled: 1}


def _merge_gaussians(atoms: Mapping[Atom, int]) -> Atom | None:
    """Merge unsampled Gaussian releases into an equivalent one; None if one is not Gaussian.

    A single release is returned as it is.
    """
    if list(atoms.values()) == [1]:
        return next(iter(atoms))
    if any(atom.noise != "gaussian" or atom.sampling != "none" for atom in atoms):
        return None
    precision = math.fsum(sorted(count / atom.noise_multiplier**2 for atom, count in atoms.items()))
    return Atom("gaussian", 1.0 / math.sqrt(precision))
