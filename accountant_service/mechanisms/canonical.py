"""The one form of every mechanism that means the same: a multiset of atoms, and its hash.

Composition does not depend on order or grouping, so a tree is rewritten into a count for each
distinct atom:

* `repeated` multiplies counts, `composed` adds them, `dp_sgd` is expanded;
* a `diagonal_gaussian` is the Gaussian of its Lemma 1;
* Poisson sampling at rate 1 is no sampling, at rate 0 no release; Poisson sampling of a Poisson
  sample multiplies the rates. A fixed-size sample of everything stays one: its size does not
  follow a record added or removed;
* a sample used for several Gaussian releases is the sample of one Gaussian with
  σ = (Σ 1/σᵢ²)^(−1/2), because the releases see the same sample.

What cannot be written so (a sample of a mixture of Laplace and Gaussian releases) is an atom that
accountants refuse by its place in the tree.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from accountant_service.mechanisms.tree import (
    Composed,
    DiagonalGaussian,
    DpSgd,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    Mechanism,
    PoissonSampled,
    Repeated,
)

Noise = Literal["gaussian", "laplace", "mixture"]
AtomSampling = Literal["none", "poisson", "fixed_size", "shuffled"]


@dataclass(frozen=True, slots=True)
class Atom:
    """One release: a kind of noise on a kind of sample.

    Attributes:
        noise: `mixture` is a sampled composition that no formula here covers.
        noise_multiplier: noise over the clip norm.
        sampling: how the release's records were chosen.
        sample_rate: their expected share of the data; 1 without sampling.
        fixed_sizes: dataset and batch size of a fixed-size sample.
        inner: what a mixture or a sample of a sample holds, for its hash only.
        pointer: where in the tree it came from; no part of its meaning.
    """

    noise: Noise
    noise_multiplier: float
    sampling: AtomSampling = "none"
    sample_rate: float = 1.0
    fixed_sizes: tuple[int, int] | None = None
    inner: str = ""
    pointer: str = field(default="", compare=False)

    def meaning(self) -> list[object]:
        """What enters the hash, in a fixed order."""
        sizes = list(self.fixed_sizes or ())
        return [
            self.noise,
            self.noise_multiplier,
            self.sampling,
            self.sample_rate,
            sizes,
            self.inner,
        ]


@dataclass(frozen=True, slots=True)
class CanonicalForm:
    """A mechanism as counts of distinct atoms, in a fixed order.

    Attributes:
        parts: each atom with how often it is released (≥ 1).
        hash: `sha256:` and 64 hexadecimal digits; equal for equal meaning.
    """

    parts: tuple[tuple[Atom, int], ...]
    hash: str

    @property
    def steps(self) -> int:
        """The number of releases."""
        return sum(count for _, count in self.parts)

    def scaled(self, count: int) -> CanonicalForm:
        """The form of this mechanism repeated `count` times."""
        return _assemble({atom: part * count for atom, part in self.parts})


def canonical_form(mechanism: Mechanism) -> CanonicalForm:
    """The canonical form of a mechanism that the codec has accepted."""
    return _assemble(_expand(mechanism, ""))


def _assemble(counts: Mapping[Atom, int]) -> CanonicalForm:
    present = ((json.dumps(atom.meaning()), atom, n) for atom, n in counts.items() if n > 0)
    lines = sorted(present, key=lambda line: line[0])
    text = json.dumps([[line, count] for line, _, count in lines])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return CanonicalForm(tuple((atom, count) for _, atom, count in lines), f"sha256:{digest}")


def _expand(mechanism: Mechanism, pointer: str) -> dict[Atom, int]:
    """The atoms of a mechanism with their counts (depth is bounded by the codec)."""
    match mechanism:
        case Gaussian(noise_multiplier):
            return {Atom("gaussian", noise_multiplier, pointer=pointer): 1}
        case Laplace(noise_multiplier):
            return {Atom("laplace", noise_multiplier, pointer=pointer): 1}
        case DiagonalGaussian():
            return {Atom("gaussian", mechanism.noise_multiplier(), pointer=pointer): 1}
        case Repeated(count, inner):
            atoms = _expand(inner, f"{pointer}/mechanism")
            return {atom: part * count for atom, part in atoms.items()}
        case Composed(mechanisms):
            return _sum(_expand(m, f"{pointer}/mechanisms/{i}") for i, m in enumerate(mechanisms))
        case PoissonSampled(rate, inner):
            return _sample(_expand(inner, f"{pointer}/mechanism"), "poisson", rate, None, pointer)
        case FixedSizeSampled(size, batch, inner):
            atoms = _expand(inner, f"{pointer}/mechanism")
            return _sample(atoms, "fixed_size", batch / size, (size, batch), pointer)
        case DpSgd():
            return _expand_dp_sgd(mechanism, pointer)


def _expand_dp_sgd(run: DpSgd, pointer: str) -> dict[Atom, int]:
    step = {Atom("gaussian", run.noise_multiplier, pointer=pointer): 1}
    rate, count = run.rate(), run.step_count()
    if run.sampling == "shuffled" and rate > 0.0 and count > 0:
        epoch = Atom("gaussian", run.noise_multiplier, "shuffled", rate, pointer=pointer)
        return {epoch: run.epoch_count()}
    sizes = None
    if run.sampling == "fixed_size" and run.dataset_size and run.batch_size:
        sizes = (run.dataset_size, run.batch_size)
    kind: AtomSampling = "fixed_size" if sizes else "poisson"
    sampled = step if run.sampling == "none" else _sample(step, kind, rate, sizes, pointer)
    return {atom: part * count for atom, part in sampled.items()}


def _sum(parts: Iterable[Mapping[Atom, int]]) -> dict[Atom, int]:
    total: dict[Atom, int] = {}
    for part in parts:
        for atom, count in part.items():
            total[atom] = total.get(atom, 0) + count
    return total


def _sample(
    atoms: Mapping[Atom, int],
    sampling: AtomSampling,
    rate: float,
    sizes: tuple[int, int] | None,
    pointer: str,
) -> dict[Atom, int]:
    """What releasing `atoms` from one common sample means."""
    present = {atom: count for atom, count in atoms.items() if count > 0}
    if not present or (rate == 1.0 and sampling == "poisson"):
        return present
    if rate == 0.0:
        return {}
    merged = _merge_gaussians(present)
    if merged is None:
        inner = _assemble(present).hash
        return {Atom("mixture", 0.0, sampling, rate, sizes, inner, pointer): 1}
    if merged.sampling == "none":
        return {Atom(merged.noise, merged.noise_multiplier, sampling, rate, sizes, "", pointer): 1}
    if merged.sampling == sampling == "poisson":
        joint = max(rate * merged.sample_rate, sys.float_info.min)  # underflow: rounded up
        return {Atom(merged.noise, merged.noise_multiplier, sampling, joint, None, "", pointer): 1}
    return {Atom("mixture", 0.0, sampling, rate, sizes, _assemble(present).hash, pointer): 1}


def _merge_gaussians(atoms: Mapping[Atom, int]) -> Atom | None:
    """The single release that equals these on one sample, or none."""
    if list(atoms.values()) == [1]:
        return next(iter(atoms))
    if any(atom.noise != "gaussian" or atom.sampling != "none" for atom in atoms):
        return None
    precision = math.fsum(sorted(count / atom.noise_multiplier**2 for atom, count in atoms.items()))
    return Atom("gaussian", 1.0 / math.sqrt(precision))
