"""jax_privacy: `BandMFConfig`, `DPKerasConfig`, and an execution plan with its event.

jax_privacy at commit 8967688c: `execution_plan.py`, `keras_api.py`, `accounting.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Facts, Imported, Node
from accountant_service.importing.keys import (
    CLAIM,
    CLASS,
    POST_PROCESSING,
    SAMPLING,
    SEED,
    SIZES,
    UNIT,
    Fields,
    acts,
    checked,
    harmless,
    join,
)
from accountant_service.importing.runs import (
    check_epochs,
    fewest_batches,
    poisson_run,
    read_batch,
    read_claims,
    read_delta,
    read_epochs,
    read_noise,
    read_size,
    require_agreement,
    with_accumulation,
)
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.writing.number_format import round_nearest as shown

_BANDS_MAX: Final = 100_000
CONSTRUCTORS: Final = {
    "DPKerasConfig": (
        "epsilon", "delta", "clipping_norm", "batch_size", "gradient_accumulation_steps",
        "train_steps", "train_size", "poisson_sampling_in_fit", "noise_multiplier",
        "rescale_to_unit_norm", "microbatch_size", "seed",
    ),
    "BandMFConfig": (),
}  # fmt: skip
KEYS: Final = join(
    *CLASS,
    acts("iterations", "of `BandMFConfig`: number of noisy updates"),
    acts("expected_participations", "of one record in all iterations"),
    acts("strategy", "coefficients of the noise; their number is that of the bands", is_whole=True),
    acts("num_bands", "number of bands, instead of the coefficients"),
    acts("truncated_batch_size", "the most records that a batch keeps"),
    acts("noise_multiplier", "standard deviation of the noise over the sensitivity"),
    acts("train_steps", "of `DPKerasConfig`: number of noisy updates, not of batches"),
    acts(
        "gradient_accumulation_steps", "batches in one update: `batch_size` times this is charged"
    ),
    acts("poisson_sampling_in_fit", "true: `fit` draws Poisson samples. Else batches are shuffled"),
    checked("epochs num_epochs", "passes over the data, compared with `train_steps`"),
    *SIZES,
    *SAMPLING,
    *CLAIM,
    *UNIT,
    harmless("microbatch_size", "how many gradients are computed at once; each is clipped alone"),
    harmless(
        "rescale_to_unit_norm normalize_by column_normalize", "a public factor of the noisy sum"
    ),
    harmless(
        "dtype intermediate_strategy spmd_axis_name keep_batch_dim performance_flags "
        "strategy_optimization_steps",
        "how noise and gradients are computed",
        is_whole=True,
    ),
    SEED,
    *POST_PROCESSING,
)


def detect(fields: Fields) -> bool:
    """Return whether a document is a `BandMFConfig` or a `DPKerasConfig`."""
    is_keras = fields.has("train_steps", "dataset_size", "batch_size") and fields.has_any_spelled(
        "train_steps"
    )
    is_bands = fields.has("iterations", "expected_participations")
    return fields.class_name in CONSTRUCTORS or is_keras or is_bands


def read(fields: Fields, facts: Facts) -> Imported:
    """Import a `BandMFConfig` or a `DPKerasConfig` of jax_privacy."""
    if fields.class_name == "BandMFConfig" or fields.has("iterations"):
        return _read_bands(fields, facts)
    return _read_keras(fields, facts)


def _read_bands(config: Fields, facts: Facts) -> Imported:
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
    run = poisson_run(
        config.root.pointer, None if noise is None else read_noise(noise), rate, steps
    )
    examples = config.find("dataset_size")
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
        sampling_pointer=config.root.pointer,
        groups=bands,
        is_sampling_stated=True,
    )
    return _with_claim(found, config, facts)


def _count_bands(config: Fields) -> int:
    """Return the number of bands: the strategy's number of coefficients, or `num_bands`."""
    strategy, stated = config.find("strategy"), config.find("num_bands")
    if strategy is None:
        return config.field("num_bands").whole(1, _BANDS_MAX)
    bands = Part(len(strategy.items()), strategy.pointer).whole(1, _BANDS_MAX)
    if stated is not None:
        require_agreement(stated, stated.whole(1, _BANDS_MAX), bands)
    return bands


def _truncate(config: Fields, run: Node, size: int | None, bands: int, largest: Part) -> Node:
    """Limit a run's Poisson batches, drawn within groups, to `largest` records."""
    if size is None:
        raise config.field("dataset_size").fault("is required")
    noise = config.field("noise_multiplier")
    fields = {
        "dataset_size": max(1, size // bands),
        "sample_rate": run.fields["sample_rate"],
        "batch_size_max": largest.whole(1, COUNT_MAX),
        "mechanism": Node("gaussian", noise.pointer, {"noise_multiplier": read_noise(noise)}),
    }
    step = Node("truncated_poisson_sampled", largest.pointer, fields)
    return Node("repeated", config.root.pointer, {"count": run.fields["steps"], "mechanism": step})


def _read_keras(config: Fields, facts: Facts) -> Imported:
    """Import a `DPKerasConfig`, whose accountant always assumes Poisson sampling."""
    given, steps = config.field("dataset_size"), config.field("train_steps")
    size = given.whole(1, COUNT_MAX)
    require_agreement(given, size, facts.dataset_size)
    config.field("batch_size")
    batch = read_batch(config, facts.batch_size, size)
    assert batch is not None
    noise, count = config.find("noise_multiplier"), steps.whole(0, COUNT_MAX)
    run = poisson_run(
        config.root.pointer, None if noise is None else read_noise(noise), batch / size, count
    )
    found = Imported(
        "a jax_privacy DPKerasConfig",
        run,
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        method="pld",
        dataset_size=size,
        batch_size=batch,
        sampling="shuffled",  # by default; `poisson_sampling_in_fit` is read as stated
        sampling_pointer=f"{config.root.pointer}/poisson_sampling_in_fit",
        epoch_batches=fewest_batches(config, size, batch, drops_last=True),
    )
    internal = config.find("poisson_sampling_in_fit")
    if internal is not None and internal.flag() and noise is not None:
        found = _draw_alone(found, config)
    else:
        found = with_accumulation(found, config, facts.sampling or "shuffled")
    return _with_claim(_check_updates(found, config, steps, size / batch), config, facts)


def _draw_alone(found: Imported, config: Fields) -> Imported:
    """Return a run in which each of the batches of an update is a Poisson sample of its own.

    `fit` draws them so, and a record may be in all of them: it counts as that many records of one
    person.
    """
    part, run, batch = (
        config.find("gradient_accumulation_steps"),
        found.mechanism,
        config.field("batch_size"),
    )
    if part is None or part.value == 1 or run is None or found.dataset_size is None:
        return found
    sample = run.but(sample_rate=batch.value / found.dataset_size)
    finding = Finding(
        "accumulated-batches",
        part.pointer,
        f"fit draws each of the {part.value} batches of an update by itself, so a record may be in "
        "several of them; the accountant charges one larger sample",
        "the computed cost is that of the batches as they are drawn",
    )
    fields = {"records": int(part.value), "mechanism": sample}
    return replace(
        found,
        mechanism=Node("user_level", part.pointer, fields),
        accounted=run,
        batch_size=int(batch.value),
        findings=(*found.findings, finding),
    )


def _check_updates(found: Imported, config: Fields, steps: Part, per_epoch: float) -> Imported:
    """Return the run with a finding if its steps may count batches that are accumulated.

    Raises:
        DocumentError: the document states epochs too, and they have another number of updates.
    """
    count, epochs = int(steps.value), config.find("epochs")
    if epochs is not None:
        check_epochs(steps, count, read_epochs(epochs), per_epoch)
        return found
    part = config.find("gradient_accumulation_steps")
    together = 1 if part is None else int(part.value)
    if together == 1:
        return found
    finding = Finding(
        "accumulated-steps",
        steps.pointer,
        f"train_steps = {count} are updates of {together} batches each: "
        f"{shown(count / per_epoch)} epochs",
        f"if they count batches, the run has {shown(count / per_epoch / together)} epochs, and "
        f"train_steps = {count // together}; state epochs, which are compared",
    )
    return replace(found, findings=(*found.findings, finding))


def _with_claim(found: Imported, config: Fields, facts: Facts) -> Imported:
    """Add the configuration's ε and δ as a claim; ε is also the target if no noise is stated."""
    delta = read_delta(config.find("delta")) or facts.delta
    run, claims = found.mechanism, read_claims(config, delta)
    has_noise = run is not None and (run.kind != "dp_sgd" or "noise_multiplier" in run.fields)
    if not has_noise and not claims:
        config.field("noise_multiplier")
    target = None if has_noise else claims[0].epsilon
    return replace(found, delta=delta, claims=claims, target=target)
