"""Mechanisms in words, for pages, messages and certificates."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from accountant_service.mechanisms.tree import (
    BallsInBins,
    BandedMatrixFactorization,
    Composed,
    DiagonalGaussian,
    DpSgd,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    MatrixFactorization,
    Mechanism,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    ShuffledReports,
    TreeAggregation,
    TruncatedPoissonSampled,
    UserLevel,
)
from accountant_service.number_format import round_nearest as shown

_SAMPLING: Final = {
    "poisson": "Poisson sampling",
    "fixed_size": "samples of fixed size",
    "balls_in_bins": "balls in bins",
    "shuffled": "shuffled batches",
    "none": "no sampling",
}


def describe_step(mechanism: Mechanism) -> str:
    """Describe one step of a mechanism in words: its name, its noise and its sampling.

    The number of steps is left out: a run and its step are described alike.
    """
    match mechanism:
        case DpSgd():
            rate = "" if mechanism.sampling == "none" else f"q = {shown(mechanism.rate())}, "
            noise = f"σ = {shown(mechanism.noise_multiplier)}"
            return f"DP-SGD, {rate}{noise}, {_SAMPLING[mechanism.sampling]}"
        case Gaussian(noise_multiplier):
            return f"Gaussian noise, σ = {shown(noise_multiplier)}"
        case DiagonalGaussian():
            return f"Gaussian noise, σ* = {shown(mechanism.noise_multiplier())}"
        case Laplace(noise_multiplier):
            return f"Laplace noise, b/C = {shown(noise_multiplier)}"
        case Repeated(_, inner):
            return describe_step(inner)
        case Composed(mechanisms):
            return f"{len(mechanisms)} mechanisms together"
        case _:
            return _describe_sampling(mechanism)


def _describe_sampling(mechanism: Mechanism) -> str:
    """Describe in words one step of a sampled, parallel, selected or shuffled mechanism."""
    match mechanism:
        case PoissonSampled(sample_rate, inner):
            return f"{describe_step(inner)}, q = {shown(sample_rate)}, Poisson sampling"
        case FixedSizeSampled(dataset_size, batch_size, inner):
            return f"{describe_step(inner)}, samples of {batch_size} of {dataset_size} records"
        case BallsInBins(bins, inner, selections):
            return f"{describe_step(inner)}, each record in {selections} of {bins} batches"
        case TruncatedPoissonSampled(_, sample_rate, most, inner):
            sampling = f"Poisson sampling, at most {most} records"
            return f"{describe_step(inner)}, q = {shown(sample_rate)}, {sampling}"
        case Parallel(mechanisms):
            return f"{len(mechanisms)} mechanisms on disjoint parts of the data"
        case PrivateSelection(repeats, inner):
            runs = f"about {shown(repeats.mean)} runs ({repeats.distribution.replace('_', ' ')})"
            return f"the best of {runs} of: {describe_step(inner)}"
        case ShuffledReports(reports, inner):
            return f"{reports} shuffled reports of: {describe_step(inner)}"
        case UserLevel(records, inner):
            return f"{describe_step(inner)}, up to {records} records a person"
        case _:
            return _describe_kind(mechanism)


def _describe_kind(mechanism: Mechanism) -> str:
    """Describe correlated noise in words; of any other mechanism, list the kind and the fields."""
    match mechanism:
        case MatrixFactorization():
            noise = f"σ = {shown(mechanism.noise_multiplier)}"
            return f"correlated Gaussian noise, {noise}, {mechanism.steps} steps"
        case BandedMatrixFactorization():
            noise = f"σ = {shown(mechanism.noise_multiplier)}, q = {shown(mechanism.sample_rate)}"
            sampling = f"Poisson sampling of {mechanism.groups} groups in turn"
            return f"correlated Gaussian noise, {noise}, {mechanism.steps} steps, {sampling}"
        case TreeAggregation():
            noise = f"σ = {shown(mechanism.noise_multiplier)}"
            return f"sums over a tree of {mechanism.steps} steps, {noise}"
        case _:
            values = (
                f"{f.name.replace('_', ' ')} = {_shorten(getattr(mechanism, f.name))}"
                for f in fields(mechanism)
            )
            return ", ".join([mechanism.kind.replace("_", " "), *values])


def _shorten(value: object) -> str:
    """Format a field's value briefly: of a list, only the first and last numbers."""
    if isinstance(value, tuple):
        return " … ".join(dict.fromkeys(f"{shown(each)}" for each in (value[0], value[-1])))
    return f"{shown(value)}" if isinstance(value, float) else str(value)
