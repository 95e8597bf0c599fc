"""Training runs in other tools' words: sizes, rates and steps, as nodes of this service."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.importing.keys import Fields, acts, checked
from accountant_service.mechanisms.kinds import COUNT_MAX, NOISE_MAX, NOISE_MIN
from accountant_service.writing.number_format import round_nearest as shown

# Keys of a training run, beside its sizes.
RUN: Final = (
    acts("noise_multiplier sigma", "standard deviation of the noise over the clipping norm"),
    acts(
        "sample_rate sampling_rate sampling_probability",
        "expected fraction of the records in a batch; else batch size over number of records",
    ),
    acts(
        "steps num_steps max_steps train_steps total_steps num_iterations",
        "number of noisy updates",
    ),
    acts(
        "epochs num_epochs n_epochs num_train_epochs max_epochs",
        "passes over the data, if no steps are stated; else compared with them",
    ),
    acts("steps_per_epoch", "updates in an epoch, instead of records over batch size"),
    acts("drop_last", "true: an epoch leaves out its last, smaller batch"),
    acts(
        "gradient_accumulation_steps accumulate_grad_batches",
        "batches in one noisy update: `batch_size` times this is charged",
    ),
    checked("enable_dp use_dp dp", "must be true: without noise nothing is private"),
    checked("disable_dp", "must be false: without noise nothing is private"),
)

DELTA_MIN: Final = 1e-50
DELTA_MAX: Final = 1 - 1e-9
EPSILON_MAX: Final = 1e6
_EPOCHS_MAX: Final = 1e6


def read_noise(part: Part) -> float:
    """Return a document's noise multiplier.

    Raises:
        DocumentError: it is outside the limits of this service; without noise nothing is private.
    """
    return part.number(NOISE_MIN, NOISE_MAX)


def read_size(part: Part | None, stated: int | None = None) -> int | None:
    """Return a number of records, clients or steps: the document's, or the one stated beside it.

    Raises:
        DocumentError: the document contradicts the stated number.
    """
    if part is None:
        return stated
    size = part.whole(1, COUNT_MAX)
    require_agreement(part, size, stated)
    return size


def require_agreement(part: Part, size: int, stated: int | None) -> None:
    """Raise DocumentError if a size of a document is not the one that is stated elsewhere."""
    if stated not in (None, size):
        raise part.fault(f"is {size}, and {stated} is stated too: correct one of them")


def read_delta(part: Part | None) -> float | None:
    """Return a stated δ, after checking its range; None if it is not given."""
    if part is None:
        return None
    return part.number(0.0, DELTA_MAX) and part.number(DELTA_MIN, DELTA_MAX)


def read_epsilon(part: Part | None) -> float | None:
    """Return an ε, claimed or targeted, after checking its range; None if it is not given."""
    return None if part is None else part.number(0.0, EPSILON_MAX, above=True)


def read_epochs(part: Part) -> float:
    """Return a document's number of epochs."""
    return part.number(0.0, _EPOCHS_MAX, above=True)


def batches_per_epoch(dataset_size: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Return the number of batches that a data loader has in an epoch."""
    whole, rest = divmod(dataset_size, batch_size)
    return max(1, whole + (rest > 0 and not drop_last))


def poisson_run(pointer: str, noise: float | None, rate: float, steps: int) -> Node:
    """Return a run of Poisson-sampled Gaussian releases, which the document has at `pointer`."""
    known = {} if noise is None else {"noise_multiplier": noise}
    return Node("dp_sgd", pointer, {**known, "sample_rate": rate, "steps": steps})


def read_claims(fields: Fields, delta: float | None) -> tuple[Claim, ...]:
    """Return the document's ε as a claim at δ; empty if it states none."""
    claimed = fields.find("epsilon")
    epsilon = read_epsilon(claimed)
    return () if claimed is None or epsilon is None else (Claim(epsilon, delta, claimed.pointer),)


def read_run(fields: Fields, facts: Facts, tool: str, *, by_loader: bool) -> Imported:
    """Import a training run: its noise, its sizes or sample rate, and its steps or epochs.

    Args:
        fields: the keys of the document.
        facts: what the document does not say.
        tool: the document in words.
        by_loader: whether the sample rate is one over the number of batches of a data loader,
            and not the batch size over the number of records.
    """
    _require_noise(fields)
    size = read_size(fields.find("dataset_size"), facts.dataset_size)
    batch = read_batch(fields, facts.batch_size, size)
    dropping = fields.find("drop_last")
    drops_last = None if dropping is None else dropping.flag()
    loaded = exact = None
    if size is not None and batch is not None:
        loaded = batches_per_epoch(size, batch, drop_last=bool(drops_last))
        exact = size / batch
    rate = _read_rate(fields, loaded if by_loader else exact, agrees_with=exact)
    per_epoch = loaded if by_loader or drops_last else exact
    steps = _read_steps(fields, per_epoch or 1 / max(rate, 1e-12))
    fewest = epochs = None
    if size is not None and batch is not None:
        drops_any = drops_last is True or (drops_last is None and not by_loader)
        fewest = fewest_batches(fields, size, batch, drops_last=drops_any)
        epochs = _whole_epochs(fields)
    noise = fields.find("noise_multiplier")
    delta = read_delta(fields.find("delta"))
    claims = read_claims(fields, delta)
    if noise is None and not claims:
        fields.field("noise_multiplier")
    found = Imported(
        tool,
        poisson_run(fields.root.pointer, None if noise is None else read_noise(noise), rate, steps),
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        target=claims[0].epsilon if noise is None else None,
        claims=claims,
        dataset_size=size,
        batch_size=batch,
        sampling_pointer=fields.root.pointer,
        has_loader_rate=by_loader,
        epochs=epochs,
        epoch_batches=fewest,
    )
    return with_accumulation(found, fields, facts.sampling or "poisson")


def fewest_batches(fields: Fields, size: int, batch: int, *, drops_last: bool) -> float:
    """Return the updates that an epoch of shuffled data has, `batch` records together in each.

    A loader that drops the last batch drops one of those that are accumulated to an update.
    """
    together = fields.find("gradient_accumulation_steps")
    pieces = 1 if together is None else int(together.value)
    return batches_per_epoch(size, batch // pieces, drop_last=drops_last) / pieces


def _whole_epochs(fields: Fields) -> int | None:
    """Return the stated number of epochs if it is whole, and no part of an epoch is trained."""
    part = fields.find("epochs")
    if part is None or fields.has("steps_per_epoch"):
        return None
    epochs = read_epochs(part)
    return int(epochs) if epochs % 1 == 0 else None


def _require_noise(fields: Fields) -> None:
    """Raise DocumentError if the document says that the run has no differential privacy."""
    for name, right in (("enable_dp", True), ("disable_dp", False)):
        part = fields.find(name)
        if part is not None and part.flag() is not right:
            raise part.fault(f"must be {str(right).lower()}: without noise nothing is private")


def read_batch(fields: Fields, stated: int | None, size: int | None) -> int | None:
    """Return the records of an update: the batch size times the batches that are accumulated.

    Raises:
        DocumentError: it is not the one that is stated beside the document, or above `size`.
    """
    part, accumulated = fields.find("batch_size"), fields.find("gradient_accumulation_steps")
    if part is None:
        return stated
    batch = part.whole(1, COUNT_MAX) * (accumulated.whole(1, COUNT_MAX) if accumulated else 1)
    if size is not None and batch > size:
        times = " times gradient_accumulation_steps" if batch != part.value else ""
        raise part.fault(f"{times} must be at most the {size} records".strip())
    require_agreement(part, batch, stated)
    return batch


def with_accumulation(found: Imported, fields: Fields, sampling: str) -> Imported:
    """Add what a cost rests on if an update adds up several batches.

    The batches of an epoch that are cut from one order of the data may be joined. Those that are
    drawn one by one may hold the same record several times.
    """
    part = fields.find("gradient_accumulation_steps")
    count = 1 if part is None else part.whole(1, COUNT_MAX)
    if part is None or count == 1 or sampling in ("shuffled", "none"):
        return found
    finding = Finding(
        "accumulated-batches",
        part.pointer,
        f"{count} batches make an update: if each is a sample of its own, a record may be in "
        "several of them, which costs more than one larger sample",
        "if one sample is cut into pieces, state its whole size as batch_size, and leave the "
        "accumulation out",
    )
    premise = f"the {count} batches of an update are pieces of one sample"
    return found.unless(premise, finding)


def _read_rate(fields: Fields, per_epoch: float | None, agrees_with: float | None) -> float:
    """Return the stated sample rate, or one over the number of batches per epoch.

    Raises:
        DocumentError: the stated rate is not that of the sizes, which the document states too.
    """
    given = fields.find("sample_rate")
    if given is None and per_epoch is not None:
        return 1.0 / per_epoch
    rate = fields.field("sample_rate").number(0.0, 1.0)
    if given is not None and agrees_with and fields.has("dataset_size", "batch_size"):
        rates = sorted((1 / agrees_with, 1 / math.ceil(agrees_with), 1 / math.floor(agrees_with)))
        if not rates[0] * (1 - _ROUNDED) <= rate <= rates[-1] * (1 + _ROUNDED):
            message = f"is {shown(rate)}, and batch size over number of records is {{}}: {_CORRECT}"
            raise given.fault(message.format(shown(1 / agrees_with)))
    return rate


_ROUNDED: Final = 1e-3  # relative; a document may state a rate with few digits
_CORRECT: Final = "correct one of them"


def _read_steps(fields: Fields, per_epoch: float) -> int:
    """Return the stated number of steps, or epochs times batches per epoch, rounded up.

    Raises:
        DocumentError: steps and epochs are stated, and differ by more than rounding.
    """
    stated, epochs_part = fields.find("steps"), fields.find("epochs")
    in_epoch = fields.find("steps_per_epoch")
    of_sizes = per_epoch
    if in_epoch is not None:
        per_epoch = in_epoch.whole(1, COUNT_MAX)
    if stated is None:
        epochs = read_epochs(fields.field("epochs"))
        steps = math.ceil(epochs * per_epoch * (1 - 1e-12))
        if steps > COUNT_MAX:
            raise fields.field("epochs").fault(f"must be at most {shown(COUNT_MAX)} steps")
        return steps
    steps = stated.whole(0, COUNT_MAX)
    if epochs_part is not None:
        check_epochs(stated, steps, read_epochs(epochs_part), per_epoch)
    elif in_epoch is not None:
        check_epochs(in_epoch, in_epoch.whole(1, COUNT_MAX), 1.0, of_sizes)
    return steps


def check_epochs(part: Part, steps: int, epochs: float, per_epoch: float) -> None:
    """Raise DocumentError unless steps are epochs times batches per epoch, rounded either way."""
    low = math.floor(epochs) * max(1, math.floor(per_epoch * (1 - _ROUNDED)))
    high = math.ceil(epochs) * math.ceil(per_epoch * (1 + _ROUNDED))
    if not low <= steps <= high:
        has = f"{shown(epochs)} epochs of {shown(per_epoch)} steps each"
        raise part.fault(f"contradicts the rest: {steps} steps, but {has}: {_CORRECT}")


_SAMPLINGS: Final = ("poisson", "shuffled", "fixed_size", "none")
_UNLESS_STATED: Final = ("shuffled", "poisson", "fixed_size", "none")
_SAMPLING_FLAGS: Final = (  # what true and false leave; the first is taken if nothing else is said
    ("poisson_sampling", ("poisson",), ("shuffled", "fixed_size", "none")),
    ("poisson_sampling_in_fit", ("poisson",), _UNLESS_STATED),
    ("shuffle", ("shuffled",), _UNLESS_STATED),
)


def read_sampling(fields: Fields, facts: Facts) -> tuple[str | None, str]:
    """Return how a document says that batches are drawn, and a JSON pointer to where.

    Each statement leaves some samplings; the first that leaves none of those before is the fault.

    Raises:
        DocumentError: the document contradicts itself, or what is stated beside it.
    """
    again = fields.find_known("replacement")
    if again is not None and again.flag():
        raise again.fault(
            "must be false: no cost is proved for samples with replacement. Draw Poisson samples, "
            "or samples of fixed size without replacement"
        )
    stated: list[tuple[Part, tuple[str, ...]]] = []
    if (named := fields.find_known("sampling")) is not None:
        stated.append((named, (named.choice(_SAMPLINGS),)))
    for name, if_true, if_false in _SAMPLING_FLAGS:
        if (flag := fields.find_known(name)) is not None:
            stated.append((flag, if_true if flag.flag() else if_false))
    left: tuple[str, ...] = (facts.sampling,) if facts.sampling else _SAMPLINGS
    where = "the import"
    for part, allowed in stated:
        kept = tuple(each for each in allowed if each in left)
        if not kept:
            text = f"is {str(part.value).lower()}, and {where} states {left[0]} sampling"
            raise part.fault(f"{text}: {_CORRECT}")
        left, where = kept, part.pointer
    return (left[0], stated[0][0].pointer) if stated else (facts.sampling, fields.root.pointer)
