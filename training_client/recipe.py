"""What is trained, on what and how, before anybody has said how much noise that needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training_client.budget import Allowance, NoBudget
from training_client.data import Dataset, check, declared_public, is_sparse, load, train_size
from training_client.errors import DataError
from training_client.models import MODELS, Objective, make_model, require, side_information
from training_client.optimizers import OPTIMIZERS, PrivateOptimizer, make_optimizer
from training_client.pca import PrivatePca, Projection
from training_client.plan import Mechanism, Plan
from training_client.warm_start import warm_start

Public = tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class Ingredients:
    """What a run learns from.

    Attributes:
        private: the training set, less what counts as public, and the test set.
        public: examples and targets that were given up, if the recipe asks for some.
    """

    private: Dataset
    public: Public

    def projected(self, projection: Projection | None) -> Ingredients:
        """All of it along the directions, if there are any."""
        if projection is None:
            return self
        public = self.public and (projection(self.public[0]), self.public[1])
        return Ingredients(projection.of(self.private), public)

    def aimed(self, objective: Objective) -> Ingredients:
        """All of it with the objective's targets for labels."""
        public = self.public
        if public is not None and objective.reconstructs:
            public = (public[0], public[0])
        return Ingredients(objective.of(self.private), public)


@dataclass(frozen=True)
class Recipe:
    """Data, a model and its optimizer.

    Attributes:
        data: name of the data set.
        size: records in its training set, known before it is touched.
        model: by name.
        hidden: units of its (first) hidden layer.
        optimizer: by name.
        state: where the optimizer's state comes from.
        options: of the optimizer.
        public_examples: given up as public, if anything needs them.
        warm_start: ordinary steps on these before the private run.
        pca: a private projection of the examples, if one is asked for.
        side_information: whether the inputs' public frequencies guide the optimizer (AdaDPS).
    """

    data: str
    size: int
    model: str
    hidden: int
    optimizer: str
    state: str
    options: dict[str, Any] = field(default_factory=dict)
    public_examples: int = 600
    warm_start: int = 0
    pca: PrivatePca | None = None
    side_information: bool = False

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to protect, and what no model can be made for."""
        if self.private_size <= 0:
            raise DataError(
                f"{self.public_examples} public examples leave none of {self.size} private"
            )
        if self.pca is not None and MODELS[self.model].images:
            raise DataError(
                f"{self.model} takes images, and a projection makes rows of numbers of them"
            )

    @classmethod
    def of(cls, document: dict[str, Any]) -> Recipe:
        """Read what `document` gave."""
        pca = document.get("pca")
        return cls(**(document | {"pca": pca and PrivatePca(**pca)}))

    @property
    def document(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        return asdict(self)

    @property
    def objection(self) -> str | None:
        """Why no guarantee stands; None if one does."""
        if self.state != "raw":
            return None
        return (
            "state 'raw' is made of private gradients as the papers print it: no theorem covers "
            "it, as it does --state privatised"
        )

    @property
    def declared_public(self) -> str | None:
        """What no guarantee covers: computed from the training set without noise, or given up."""
        parts = [declared_public(self.data)]
        if self.gives_up_public:
            parts.append(f"{self.public_examples} records of the training set (--public-examples)")
        return "; ".join(part for part in parts if part) or None

    @property
    def gives_up_public(self) -> bool:
        """Whether some of the training set counts as public."""
        return self.state == "public" or self.warm_start > 0

    @property
    def private_size(self) -> int:
        """Records that are protected."""
        return self.size - (self.public_examples if self.gives_up_public else 0)

    @property
    def before(self) -> tuple[Mechanism, ...]:
        """What is released before the first step."""
        return () if self.pca is None else (self.pca.mechanism(),)

    @property
    def objective(self) -> Objective:
        """What the model is trained for."""
        return MODELS[self.model].objective

    def ingredients(self, folder: Path, device: str) -> Ingredients:
        """Load the data: the first touch of it.

        Raises:
            DataError: they are not to be had, or not what was said of them.
        """
        data = check(load(self.data, folder), self.size).to(torch.device(device))
        require(self.model, data)
        if self.pca is not None:
            self.pca.require(data.inputs)
        if self.side_information and data.frequencies is None:
            raise DataError(f"{self.data} says of no input how frequent it is")
        if not self.gives_up_public:
            return Ingredients(data, None)
        return Ingredients(*data.without_public(self.public_examples))

    def rehearse(self, plan: Plan, found: Ingredients) -> None:
        """Build all that `make` builds once, on a record: nothing is released to find out.

        Args:
            plan: what each step does and costs.
            found: not projected yet.

        Raises:
            TrainingStoppedError: no such model can be built, or be trained privately.
        """
        first = Ingredients(
            found.private.rows(slice(1)),
            found.public and (found.public[0][:1], found.public[1][:1]),
        )
        if self.pca is not None:
            first = first.projected(
                Projection(torch.eye(found.private.inputs, self.pca.components))
            )
        nothing = NoBudget(plan, 0, "it is a rehearsal")
        replace(self, warm_start=0).make(nothing, first)

    def make(self, allowance: Allowance, known: Ingredients) -> tuple[nn.Module, PrivateOptimizer]:
        """A new model, warm if that is asked for, and its optimizer.

        Args:
            allowance: of the optimizer.
            known: projected and aimed.
        """
        model = make_model(self.model, known.private, self.hidden)
        if known.public is not None:
            warm_start(model, known.public, self.objective.loss, self.warm_start)
        public = known.public if self.state == "public" else None
        sparse = is_sparse(self.data) and self.pca is None
        options: dict[str, Any] = {"sparse_inputs": sparse} | self.options
        if self.side_information and known.private.frequencies is not None:
            options["side_information"] = side_information(model, known.private.frequencies)
        made = make_optimizer(
            self.optimizer, model, allowance, state=self.state, public=public, **options
        )
        return model, made


def choose(
    data: str,
    optimizer: str,
    state: str | None = None,
    *,
    size: int | None = None,
    learning_rate: float | None = None,
    momentum: float | None = None,
    box: bool = False,
    own_squares: bool = False,
    physical_batch_size: int | None = None,
    public_batch_size: int | None = None,
    **rest: Any,
) -> Recipe:
    """A recipe from what was asked for, with the optimizer's own defaults.

    Args:
        data: name of the data set.
        optimizer: by name.
        state: the optimizer's first by default.
        size: records in the training set, for data of your own.
        learning_rate: of the optimizer; its own by default.
        momentum: of dp_sgd; 0.9 by default.
        box: of adadp and adan.
        own_squares: of pi_adam, pi_rmsprop and pi_adagrad.
        physical_batch_size: so many examples go through the model at a time; all by default.
        public_batch_size: public examples a step.
        rest: see `Recipe`.

    Raises:
        DataError: there is no such thing; the message names what there is.
    """
    entry = OPTIMIZERS.get(optimizer)
    if entry is None:
        raise DataError(f"there is no optimizer {optimizer!r}; there are {', '.join(OPTIMIZERS)}")
    state = state or ("privatised" if rest.get("side_information") else entry.states[0])
    if state not in entry.states:
        raise DataError(f"{optimizer} has no state {state!r}; it has {', '.join(entry.states)}")
    if momentum is not None and optimizer != "dp_sgd":
        raise DataError(f"--momentum is of dp_sgd, not of {optimizer}")
    printed = [name for name, asked in (("box", box), ("own_squares", own_squares)) if asked]
    _require_of(optimizer, state, printed)
    if rest.get("model") not in MODELS:
        raise DataError(f"there is no model {rest.get('model')!r}; there are {', '.join(MODELS)}")
    if rest.get("side_information") and (optimizer != "adadps" or rest.get("pca")):
        raise DataError("--side-information is of adadps, on inputs that are not projected")
    rate = entry.learning_rate if learning_rate is None else learning_rate
    options: dict[str, Any] = {"learning_rate": rate} | dict.fromkeys(printed, True)
    sizes = {
        "physical_batch_size": physical_batch_size,
        "public_batch_size": public_batch_size if state == "public" else None,
    }
    options |= {name: value for name, value in sizes.items() if value is not None}
    if optimizer == "dp_sgd":
        options["momentum"] = 0.9 if momentum is None else momentum
    return Recipe(
        data, train_size(data, size), optimizer=optimizer, state=state, options=options, **rest
    )


def _require_of(optimizer: str, state: str, printed: Sequence[str]) -> None:
    """Return if an optimizer in a state has the options that take it as printed.

    Raises:
        DataError: it does not; the message names those that do.
    """
    for name in printed:
        those = [other for other, entry in OPTIMIZERS.items() if entry.printed == name]
        if optimizer not in those:
            option = f"--{name.replace('_', '-')}"
            raise DataError(f"{option} is of {', '.join(those)}, not of {optimizer}")
    if "own_squares" in printed and state == "privatised":
        raise DataError(
            "with --own-squares what is released does not tell the gradients that state is made of:"
            " add --state public, or --state raw --no-guarantee"
        )
