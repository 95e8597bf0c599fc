"""Training runs in other tools' words: sizes, rates and steps, as nodes of this service."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.importing.document import Part
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.mechanisms.codec import COUNT_MAX, NOISE_MAX, NOISE_MIN
from accountant_service.number_format import round_nearest as shown

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
    """Raise DocumentError if a size of a document is not the one that is stated beside it."""
    if stated not in (None, size):
        raise part.fault(f"is {size}, and {stated} is stated with the import: correct one of them")


def read_delta(part: Part | None) -> float | None:
    """Return a stated δ, after checking its range; None if it is not given."""
    return None if part is None else part.number(DELTA_MIN, DELTA_MAX)


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


def read_claims(part: Part | None, delta: float | None) -> tuple[Claim, ...]:
    """Return the document's ε as a claim at δ; empty if it states none."""
    claimed = part.find("epsilon", "target_epsilon") if part else None
    epsilon = read_epsilon(claimed)
    return () if claimed is None or epsilon is None else (Claim(epsilon, delta, claimed.pointer),)


def read_run(run: Part, facts: Facts, tool: str, *, by_loader: bool) -> Imported:
    """Import a training run: its noise, its sizes or sample rate, and its steps or epochs.

    Args:
        run: the object.
        facts: what the document does not say.
        tool: the document in words.
        by_loader: whether the sample rate is one over the number of batches of a data loader,
            and not the batch size over the number of records.
    """
    size = read_size(run.find("dataset_size", "train_size"), facts.dataset_size)
    batch = read_size(run.find("batch_size"), facts.batch_size)
    per_epoch = None
    if size is not None and batch is not None:
        if batch > size:
            raise (run.find("batch_size") or run).fault(f"must be at most the {size} records")
        per_epoch = size / batch
    if per_epoch is not None and by_loader:
        drop_last = run.find("drop_last")
        per_epoch = batches_per_epoch(
            size or 1, batch or 1, drop_last=drop_last is not None and drop_last.flag()
        )
    rate, noise = _read_rate(run, per_epoch), run.find("noise_multiplier", "sigma")
    steps = _read_steps(run, per_epoch or 1 / max(rate, 1e-12))
    delta = read_delta(run.find("target_delta", "delta"))
    claims = read_claims(run, delta)
    if noise is None and not claims:
        run.field("noise_multiplier")
    return Imported(
        tool,
        poisson_run(run.pointer, None if noise is None else read_noise(noise), rate, steps),
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        target=claims[0].epsilon if noise is None else None,
        claims=claims,
        dataset_size=size,
        batch_size=batch,
        sampling_pointer=run.pointer,
        has_loader_rate=by_loader,
    )


def _read_rate(run: Part, per_epoch: float | None) -> float:
    """Return the stated sample rate, or one over the number of batches per epoch."""
    given = run.find("sample_rate")
    if given is None and per_epoch is not None:
        return 1.0 / per_epoch
    return run.field("sample_rate").number(0.0, 1.0)


def _read_steps(run: Part, per_epoch: float) -> int:
    """Return the stated number of steps, or epochs times batches per epoch, rounded up."""
    given = run.find("steps")
    if given is not None:
        return given.whole(0, COUNT_MAX)
    steps = math.ceil(read_epochs(run.field("epochs")) * per_epoch * (1 - 1e-12))
    if steps > COUNT_MAX:
        raise run.field("epochs").fault(f"must be at most {shown(COUNT_MAX)} steps")
    return steps


def read_sampling(document: Part, facts: Facts) -> tuple[str | None, str]:
    """Return how a document says that batches are drawn, and a JSON pointer to where.

    Raises:
        DocumentError: the document contradicts itself, or what is stated beside it.
    """
    given, flag = document.find("sampling"), document.find("poisson_sampling")
    stated = "is {}, and {} sampling is stated too: correct one of them"
    if given is not None:
        sampling = given.choice(("poisson", "shuffled", "fixed_size", "none"))
        if facts.sampling not in (None, sampling):
            raise given.fault(stated.format(sampling, facts.sampling))
        if flag is not None and flag.flag() != (sampling == "poisson"):
            raise flag.fault(stated.format(str(flag.value).lower(), sampling))
        return sampling, given.pointer
    if flag is None:
        return None, document.pointer
    if flag.flag():
        return "poisson", flag.pointer
    if facts.sampling == "poisson":
        raise flag.fault(stated.format("false", facts.sampling))
    return "shuffled", flag.pointer
