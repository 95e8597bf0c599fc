"""A run's configuration: data, model and optimizer. The noise is chosen later (`plan_run`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch import nn

from command_words.names import describe_unknown
from training_client.budget import Allowance, NoBudget
from training_client.errors import DataError
from training_client.lab.data import (
    Dataset,
    declared_public,
    is_sparse,
    load,
    require_size,
    train_size,
)
from training_client.lab.models import (
    MODELS,
    Objective,
    make_model,
    require_compatible,
    side_information,
)
from training_client.lab.pca import PrivatePca, Projection
from training_client.lab.warm_start import warm_start
from training_client.optimizers import OPTIMIZERS, PrivateOptimizer, make_optimizer
from training_client.optimizers.adadps import Statistic
from training_client.plan import Mechanism, Plan

PublicExamples = tuple[torch.Tensor, torch.Tensor] | None

# a variant of a paper's algorithm: the registry's name of the optimizers that have it
_VARIANTS: Final = {"box": "box", "example_squares": "box", "own_squares": "own_squares"}
# settings of a paper's algorithm, and the optimizers' names of them
_SETTINGS: Final = {
    "statistic": ("statistic",),
    "first_moment": ("first",),
    "current_statistic": ("current_statistic",),
    "small_constant": ("epsilon", "eps"),
}


@dataclass(frozen=True)
class TrainingData:
    """A run's private training data, test data and public examples.

    Attributes:
        private: the private training set, and the test set.
        public: public examples and their targets, if the recipe uses any.
    """

    private: Dataset
    public: PublicExamples

    def project(self, projection: Projection | None) -> TrainingData:
        """Return the data projected onto principal components; unchanged without a projection."""
        if projection is None:
            return self
        public = self.public and (projection(self.public[0]), self.public[1])
        return TrainingData(projection.project_dataset(self.private), public)

    def with_targets(self, objective: Objective) -> TrainingData:
        """Return the data with labels replaced by the objective's targets."""
        public = self.public
        if public is not None and objective.reconstructs:
            public = (public[0], public[0])
        return TrainingData(objective.with_targets(self.private), public)


@dataclass(frozen=True)
class Recipe:
    """The configuration of a run: data, model and optimizer.

    Attributes:
        data: the name of the data set.
        size: the number of records in its training set, known before the data are loaded.
        model: the name of the model.
        hidden: the width of its (first) hidden layer.
        optimizer: the name of the optimizer.
        state: the source of the optimizer's state.
        options: keyword arguments of the optimizer.
        public_examples: the number of training examples given up as public, if any are needed.
        warm_start: ordinary steps on the public examples before the private run.
        pca: a private projection of the examples, if there is one.
        side_information: whether public input frequencies guide the optimizer (AdaDPS).
        side_options: how they do; arguments of `side_information`.
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
    side_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a configuration without private records, or with PCA for an image model."""
        if self.private_size <= 0:
            raise DataError(
                f"--public-examples {self.public_examples} leaves no private record of {self.size}"
            )
        if self.pca is not None and MODELS[self.model].images:
            raise DataError(
                f"--model {self.model} takes images, but --pca turns them into rows of numbers"
            )

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Recipe:
        """Make a configuration from a dictionary of plain values, as `document` returns it."""
        pca = document.get("pca")
        return cls(**(document | {"pca": pca and PrivatePca(**pca)}))

    @property
    def document(self) -> dict[str, Any]:
        """The configuration as a dictionary of plain values, for a checkpoint."""
        return asdict(self)

    @property
    def objection(self) -> str | None:
        """The reason why the run has no privacy guarantee; None if it has one."""
        if self.state != "raw":
            return None
        return (
            "--state raw is computed from private gradients, as in the papers, and no theorem "
            "covers it; --state privatised is covered"
        )

    @property
    def declared_public(self) -> str | None:
        """A text that names the data without a guarantee; None if all have one."""
        parts = [declared_public(self.data)]
        if self.uses_public_examples:
            parts.append(f"{self.public_examples} records of the training set (--public-examples)")
        return "; ".join(part for part in parts if part) or None

    @property
    def uses_public_examples(self) -> bool:
        """Return whether some training examples are declared public and have no guarantee."""
        return self.state == "public" or self.warm_start > 0

    @property
    def private_size(self) -> int:
        """The number of records that the guarantee protects."""
        return self.size - (self.public_examples if self.uses_public_examples else 0)

    @property
    def initial_releases(self) -> tuple[Mechanism, ...]:
        """The mechanisms that are released before the first step, such as a private PCA."""
        return () if self.pca is None else (self.pca.mechanism(),)

    @property
    def objective(self) -> Objective:
        """The model's loss and test measure."""
        return MODELS[self.model].objective

    def load_data(self, folder: Path, device: str) -> TrainingData:
        """Load the run's data, which are not read before this call.

        Raises:
            DataError: the data cannot be loaded, or do not fit the recipe.
        """
        data = require_size(load(self.data, folder), self.size).to(torch.device(device))
        require_compatible(self.model, data)
        if self.pca is not None:
            self.pca.require_fits(data.inputs)
        if self.side_information and data.frequencies is None:
            raise DataError(
                f"--side-information needs token frequencies, which {self.data!r} does not have"
            )
        if not self.uses_public_examples:
            return TrainingData(data, None)
        return TrainingData(*data.split_public(self.public_examples))

    def require_buildable(self, plan: Plan, data: TrainingData) -> None:
        """Raise unless model and optimizer can be built for these data; use no budget.

        Args:
            plan: what each step does and costs.
            data: the data before any projection; only the first record is used.

        Raises:
            TrainingStoppedError: the model cannot be built, or cannot be trained privately.
        """
        first = TrainingData(
            data.private.select(slice(1)),
            data.public and (data.public[0][:1], data.public[1][:1]),
        )
        if self.pca is not None:
            first = first.project(Projection(torch.eye(data.private.inputs, self.pca.components)))
        replace(self, warm_start=0).build(
            NoBudget(plan, 0, "the model is built only to check it"), first
        )

    def build(self, allowance: Allowance, data: TrainingData) -> tuple[nn.Module, PrivateOptimizer]:
        """Return the model, warm-started on public data if configured, and its optimizer.

        Args:
            allowance: the budget that the optimizer's steps draw on.
            data: the data after projection, with the objective's targets.
        """
        model = make_model(self.model, data.private, self.hidden)
        if data.public is not None:
            warm_start(model, data.public, self.objective.loss, self.warm_start)
        public = data.public if self.state == "public" else None
        sparse = is_sparse(self.data) and self.pca is None
        options: dict[str, Any] = {"sparse_inputs": sparse} | self.options
        if self.side_information and data.private.frequencies is not None:
            options["side_information"] = side_information(
                model, data.private.frequencies, **self.side_options
            )
        optimizer = make_optimizer(
            self.optimizer, model, allowance, state=self.state, public=public, **options
        )
        return model, optimizer


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """A user's choices for a configuration; None means the optimizer's own default.

    Attributes:
        data, model, hidden, public_examples, warm_start, pca, side_information: as in `Recipe`.
        side_statistic, side_cap, side_others: arguments of `side_information`.
        size: the number of training records; needed only for your own data.
        optimizer: the name of the optimizer.
        state: the source of its state; by default the optimizer's first.
        learning_rate: by default the optimizer's own.
        momentum: of dp_sgd; 0.9 by default.
        box: an option of adadp and adan.
        example_squares: an option of adadp and adan; see `AdaDp`.
        own_squares: an option of pi_adam, pi_rmsprop and pi_adagrad.
        statistic, first_moment, current_statistic: of adadps; see `AdaDps`.
        small_constant: what is added to a root before it divides.
        horizon: the number of steps of the run, for pda_dpmd.
        physical_batch_size: examples per forward pass; all by default.
        public_batch_size: public examples per step.
    """

    data: str
    optimizer: str
    model: str
    hidden: int
    state: str | None = None
    size: int | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    box: bool = False
    example_squares: bool = False
    own_squares: bool = False
    statistic: str | None = None
    first_moment: float | None = None
    current_statistic: bool = False
    small_constant: float | None = None
    horizon: int | None = None
    physical_batch_size: int | None = None
    public_batch_size: int | None = None
    public_examples: int = 600
    warm_start: int = 0
    pca: PrivatePca | None = None
    side_information: bool = False
    side_statistic: str | None = None
    side_cap: float | None = None
    side_others: float | None = None


def make_recipe(chosen: RecipeOptions) -> Recipe:
    """Make a configuration from a user's choices and the optimizer's defaults.

    Raises:
        DataError: a name is unknown, or an option does not belong to the optimizer.
    """
    optimizer = chosen.optimizer
    entry = OPTIMIZERS.get(optimizer)
    if entry is None:
        raise DataError(describe_unknown("optimizer", optimizer, OPTIMIZERS))
    state = chosen.state or ("privatised" if chosen.side_information else entry.states[0])
    if state not in entry.states:
        raise DataError(
            f"{optimizer} has no state {state!r}: --state takes {', '.join(entry.states)}"
        )
    if chosen.momentum is not None and optimizer != "dp_sgd":
        raise DataError(f"--momentum is an option of dp_sgd, not of {optimizer}")
    variants = [name for name in _VARIANTS if getattr(chosen, name)]
    _require_paper_options(optimizer, state, variants)
    if chosen.model not in MODELS:
        raise DataError(describe_unknown("model", chosen.model, MODELS))
    if chosen.side_information and (optimizer != "adadps" or chosen.pca):
        raise DataError("--side-information works only with --optimizer adadps and without --pca")
    rate = entry.learning_rate if chosen.learning_rate is None else chosen.learning_rate
    options: dict[str, Any] = {"learning_rate": rate} | dict.fromkeys(variants, True)
    options |= _find_settings(chosen, state)
    if chosen.horizon is not None and "horizon" in entry.options:
        options["horizon"] = chosen.horizon
    if chosen.physical_batch_size is not None:
        options["physical_batch_size"] = chosen.physical_batch_size
    if chosen.public_batch_size is not None and state == "public":
        options["public_batch_size"] = chosen.public_batch_size
    if optimizer == "dp_sgd":
        options["momentum"] = 0.9 if chosen.momentum is None else chosen.momentum
    return Recipe(
        chosen.data, train_size(chosen.data, chosen.size), chosen.model, chosen.hidden, optimizer,
        state, options, chosen.public_examples, chosen.warm_start, chosen.pca,
        chosen.side_information, _find_side_options(chosen),
    )  # fmt: skip


def _find_settings(chosen: RecipeOptions, state: str) -> dict[str, Any]:
    """Return the chosen settings of the optimizer's paper, by the optimizer's own names.

    Raises:
        DataError: the optimizer has no such setting, or it does not apply to the chosen state.
    """
    found = {}
    for name, own_names in _SETTINGS.items():
        value, option = getattr(chosen, name), f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        having = {
            each: own
            for each, entry in OPTIMIZERS.items()
            for own in own_names
            if own in entry.options
        }
        if chosen.optimizer not in having:
            raise DataError(
                f"{option} is an option of {', '.join(having)}, not of {chosen.optimizer}"
            )
        if name != "small_constant" and chosen.side_information:
            raise DataError(
                f"{option} is of a statistic of gradients: leave out --side-information"
            )
        found[having[chosen.optimizer]] = value
    if chosen.current_statistic and state != "public":
        raise DataError("--current-statistic needs the public gradients of --state public")
    if chosen.statistic is not None and chosen.statistic not in get_args(Statistic):
        raise DataError(
            f"unknown --statistic {chosen.statistic!r}: there are {', '.join(get_args(Statistic))}"
        )
    return found


def _find_side_options(chosen: RecipeOptions) -> dict[str, Any]:
    """Return the arguments of `side_information` that were chosen.

    Raises:
        DataError: there are some without side information, or one is unknown or out of range.
    """
    given: dict[str, Any] = {
        "statistic": chosen.side_statistic, "cap": chosen.side_cap, "others": chosen.side_others,
    }  # fmt: skip
    found = {name: value for name, value in given.items() if value is not None}
    if found and not chosen.side_information:
        raise DataError(f"--side-{next(iter(found))} needs --side-information")
    if found:  # unknown ones are refused before the data are read
        side_information(torch.nn.Linear(2, 1), torch.tensor([0.5, 0.25]), **found)
    return found


def _require_paper_options(optimizer: str, state: str, paper_options: Sequence[str]) -> None:
    """Raise unless the optimizer has the chosen options of its paper, such as `own_squares`.

    Raises:
        DataError: it does not; the message names the optimizers that do.
    """
    for name in paper_options:
        having = [
            each for each, entry in OPTIMIZERS.items() if entry.paper_option == _VARIANTS[name]
        ]
        if optimizer not in having:
            option = f"--{name.replace('_', '-')}"
            raise DataError(f"{option} is an option of {', '.join(having)}, not of {optimizer}")
    for name in ("own_squares", "example_squares"):
        if name in paper_options and state == "privatised":
            option = f"--{name.replace('_', '-')}"
            raise DataError(
                f"{option} does not release the mean that --state privatised needs: add --state "
                "public, or --state raw --no-guarantee"
            )
