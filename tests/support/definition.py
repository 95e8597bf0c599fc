"""Privacy profiles by brute force, from the definition; no code is shared with the service.

A dataset is a list of numbers in [−1, 1], what each record adds to a sum. A mechanism's output is
a list of independent blocks, and a block (one release, or several on one sample) is a finite
mixture: probabilities with the sums that its releases make. Every sample that can be drawn is
enumerated; δ(ε) = Σ (p − e^ε·p′)₊ is summed over the exact masses of cells, which can only lower it
(an attacker who sees the cell), and the worst of many pairs of datasets is taken, both ways round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accountant_service.accounting.guarantee import NeighbouringRelation

Array = NDArray[np.float64]
Dataset = tuple[float | None, ...]  # None: a record that was zeroed out
Json = dict[str, Any]
CELLS = 1000


class Block:
    """Releases on a common sample: the noise of each, and the mixture of their sums."""

    def __init__(self, noises: Sequence[tuple[str, float]], mixture: dict[tuple[float, ...], Any]):
        self.noises, self.mixture = list(noises), mixture

    def masses(self, edges: Sequence[Array]) -> Array:
        """Return the probability of each cell between the edges of every axis."""
        total: Any = 0.0
        for sums, probability in self.mixture.items():
            part = np.full(1, float(probability))
            for (noise, scale), each, cuts in zip(self.noises, sums, edges, strict=True):
                part = np.multiply.outer(part, np.diff(_below(noise, (cuts - each) / scale)))
            total = total + part.ravel()
        return np.asarray(total)


def _below(noise: str, z: Array) -> Array:
    """Return the distribution function of a standard noise variable at z."""
    if noise == "gaussian":
        return np.asarray(special.ndtr(z))
    return np.where(z < 0, 0.5 * np.exp(np.minimum(z, 0)), 1 - 0.5 * np.exp(-np.maximum(z, 0)))


def leaves(tree: Json) -> list[Json]:
    """Return the releases of a tree without sampling, in order."""
    if tree["kind"] == "repeated":
        return leaves(tree["mechanism"]) * tree["count"]
    if tree["kind"] == "composed":
        return [leaf for each in tree["mechanisms"] for leaf in leaves(each)]
    return [tree]


def samples(tree: Json, members: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield every sample that nested sampling may draw from some members, with its probability."""
    if tree["kind"] == "poisson_sampled":
        rate = Fraction(tree["sample_rate"])
        for taken in itertools.product((False, True), repeat=len(members)):
            chosen = tuple(m for m, t in zip(members, taken, strict=True) if t)
            probability = rate ** len(chosen) * (1 - rate) ** (len(members) - len(chosen))
            for inner, sample in samples(tree["mechanism"], chosen):
                yield probability * inner, sample
    elif tree["kind"] == "fixed_size_sampled":
        drawn = list(itertools.combinations(members, tree["batch_size"]))
        for chosen in drawn:
            for inner, sample in samples(tree["mechanism"], chosen):
                yield inner / len(drawn), sample
    else:
        yield Fraction(1), members


def blocks(tree: Json, queries: Iterator[Dataset], size: int) -> list[Block]:
    """Return a mechanism's independent blocks; each takes the next dataset of `queries`."""
    if tree["kind"] == "repeated":
        return [b for _ in range(tree["count"]) for b in blocks(tree["mechanism"], queries, size)]
    if tree["kind"] == "composed":
        return [b for each in tree["mechanisms"] for b in blocks(each, queries, size)]
    inner = tree
    while inner["kind"] in ("poisson_sampled", "fixed_size_sampled"):
        inner = inner["mechanism"]
    released = leaves(inner)
    records = next(queries)
    mixture: dict[tuple[float, ...], Any] = {}
    for probability, sample in samples(tree, tuple(range(size))):
        total = math.fsum(records[i] or 0.0 for i in sample)
        sums = (total,) * len(released)
        mixture[sums] = mixture.get(sums, Fraction(0)) + probability
    return [Block([(r["kind"], r["noise_multiplier"]) for r in released], mixture)]


def neighbours(relation: NeighbouringRelation, size: int) -> Iterator[tuple[Dataset, Dataset]]:
    """Yield pairs of neighbouring datasets; all other records add the same −1 or 0."""
    for others in (-1.0, 0.0):
        rest = (others,) * (size - 1)
        if relation is NeighbouringRelation.ADD_OR_REMOVE_ONE:
            yield (1.0, *rest), rest
        elif relation is NeighbouringRelation.REPLACE_ONE:
            yield (1.0, *rest), (-1.0, *rest)
        else:
            yield (1.0, *rest), (None, *rest)


def _edges(noise: tuple[str, float], reach: float) -> Array:
    """Return the edges of the cells along one noise axis."""
    kind, scale = noise
    far = reach + scale * (9.0 if kind == "gaussian" else 26.0)
    return np.linspace(-far, far, CELLS + 1)


def _laws(block: Block, other: Block, reach: float) -> tuple[Array, Array]:
    """Return the masses of the same cells under both distributions of a block."""
    edges = [_edges(noise, reach) for noise in block.noises]
    first, second = block.masses(edges), other.masses(edges)
    kept = (first > 1e-14) | (second > 1e-14)
    return first[kept], second[kept]


def delta(
    tree: Json, relation: NeighbouringRelation, size: int, epsilons: Sequence[float]
) -> list[float]:
    """Return the largest δ at each ε over neighbouring datasets of at most `size` records."""
    worst = [0.0] * len(epsilons)
    count = len(blocks(tree, itertools.repeat((0.0,) * size), size))
    options = list(neighbours(relation, size))
    for chosen in itertools.product(options, repeat=count):  # a block may ask anything of the data
        sides = []
        for side in (0, 1):
            records = [pair[side] for pair in chosen]
            sides.append(blocks(tree, iter(records), len(records[0])))
        laws = [_laws(*pair, float(size)) for pair in zip(*sides, strict=True)]
        for first, second in ((0, 1), (1, 0)):
            p, q = np.ones(1), np.ones(1)
            for law in laws:
                p, q = (np.multiply.outer(a, law[i]).ravel() for a, i in ((p, first), (q, second)))
            for i, epsilon in enumerate(epsilons):
                won = float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())
                worst[i] = max(worst[i], won)
    return worst
