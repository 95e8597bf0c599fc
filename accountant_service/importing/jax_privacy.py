"""jax_privacy: `BandMFConfig`, `DPKerasConfig`, and an execution plan with its event.

jax_privacy at commit 8967688c: `execution_plan.py`, `keras_api.py`, `accounting.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.importing.document import CLASS_NAME, Json, Part
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.importing.runs import (
    poisson_run,
    read_delta,
    read_epsilon,
    read_noise,
    read_size,
    require_agreement,
)
from accountant_service.mechanisms.codec import COUNT_MAX

_BANDS_MAX: Final = 100_000
_KERAS: Final = {"train_steps", "train_size", "batch_size"}
_BANDS: Final = {"iterations", "expected_participations"}


def detect(document: Json) -> bool:
    """Return whether a document is a `BandMFConfig` or a `DPKerasConfig`."""
    if not isinstance(document, dict):
        return False
    named = document.get(CLASS_NAME) in ("BandMFConfig", "DPKerasConfig")
    return named or document.keys() >= _KERAS or document.keys() >= _BANDS


def read(document: Part, facts: Facts) -> Imported:
    """Import a `BandMFConfig` or a `DPKerasConfig` of jax_privacy."""
    document = Part(document.value, document.pointer)
    if document.class_name == "BandMFConfig" or document.find("iterations"):
        return _read_bands(document, facts)
    return _read_keras(document, facts)


def _read_bands(config: Part, facts: Facts) -> Imported:
    """Import a `BandMFConfig`: correlated noise with bands, and Poisson sampling in groups.

    With b bands it costs what ⌈T/b⌉ Poisson-sampled Gaussian releases cost (Choquette-Choo et al.
    2023, arXiv 2306.08153v2, Theorem 4), as the noise multiplier is relative to the column norm.
    """
    iterations = config.field("iterations").whole(1, COUNT_MAX)
    bands = _count_bands(config)
    if bands > iterations:
        raise config.field("strategy").fault(f"must have at most {iterations} coefficients")
    groups = iterations // bands
    participations = config.field("expected_participations").number(0.0, groups)
    noise = config.find("noise_multiplier")
    rate, steps = min(1.0, participations * bands / iterations), -(-iterations // bands)
    run = poisson_run(config.pointer, None if noise is None else read_noise(noise), rate, steps)
    examples = config.find("num_examples")
    size = read_size(examples, facts.dataset_size) if examples else None
    relation = facts.relation or (
        NeighbouringRelation.ADD_OR_REMOVE_ONE
        if size is None
        else NeighbouringRelation.ZERO_OUT_ONE
    )
    largest = config.find("truncated_batch_size")
    if largest is not None:
        run = _truncate(config, run, size, bands, largest)
    found = Imported(
        "a jax_privacy BandMFConfig",
        run,
        relation,
        dataset_size=size,
        sampling_pointer=config.pointer,
        groups=bands,
    )
    return _with_claim(found, config, facts)


def _count_bands(config: Part) -> int:
    """Return the number of bands: the strategy's number of coefficients, or `num_bands`."""
    strategy = config.find("strategy")
    if strategy is None:
        return config.field("num_bands").whole(1, _BANDS_MAX)
    return Part(len(strategy.items()), strategy.pointer).whole(1, _BANDS_MAX)


def _truncate(config: Part, run: Node, size: int | None, bands: int, largest: Part) -> Node:
    """Limit a run's Poisson batches, drawn within groups, to `largest` records."""
    if size is None:
        raise config.field("num_examples").fault("is required")
    noise = config.field("noise_multiplier")
    fields = {
        "dataset_size": max(1, size // bands),
        "sample_rate": run.fields["sample_rate"],
        "batch_size_max": largest.whole(1, COUNT_MAX),
        "mechanism": Node("gaussian", noise.pointer, {"noise_multiplier": read_noise(noise)}),
    }
    step = Node("truncated_poisson_sampled", largest.pointer, fields)
    return Node("repeated", config.pointer, {"count": run.fields["steps"], "mechanism": step})


def _read_keras(config: Part, facts: Facts) -> Imported:
    """Import a `DPKerasConfig`, whose accountant always assumes Poisson sampling."""
    given = config.field("train_size")
    size = given.whole(1, COUNT_MAX)
    require_agreement(given, size, facts.dataset_size)
    accumulation = config.find("gradient_accumulation_steps")
    batch = config.field("batch_size").whole(1, size) * (
        accumulation.whole(1, COUNT_MAX) if accumulation else 1
    )
    if batch > size:
        raise config.field("batch_size").fault(
            f"times gradient_accumulation_steps is {batch}, more than the {size} records"
        )
    require_agreement(config.field("batch_size"), batch, facts.batch_size)
    noise = config.find("noise_multiplier")
    run = poisson_run(
        config.pointer,
        None if noise is None else read_noise(noise),
        batch / size,
        config.field("train_steps").whole(0, COUNT_MAX),
    )
    internal = config.find("poisson_sampling_in_fit")
    found = Imported(
        "a jax_privacy DPKerasConfig",
        run,
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        method="pld",
        dataset_size=size,
        batch_size=batch,
        sampling="poisson" if internal and internal.flag() else "shuffled",
        sampling_pointer=f"{config.pointer}/poisson_sampling_in_fit",
    )
    return _with_claim(found, config, facts)


def _with_claim(found: Imported, config: Part, facts: Facts) -> Imported:
    """Add the configuration's ε and δ as a claim; ε is also the target if no noise is stated."""
    epsilon, delta = config.find("epsilon"), read_delta(config.find("delta")) or facts.delta
    run = found.mechanism
    has_noise = run is not None and (run.kind != "dp_sgd" or "noise_multiplier" in run.fields)
    target = read_epsilon(epsilon)
    if not has_noise and target is None:
        raise config.field("noise_multiplier").fault("is required")
    claims = (Claim(target, delta, epsilon.pointer),) if epsilon and target else ()
    return replace(
        found,
        delta=delta,
        claims=claims,
        target=None if has_noise else target,
        findings=found.findings,
    )
