"""Opacus: an accountant for `PrivacyEngine` that asks the service before every step.

    from training_client.integrations.opacus import connect

    connect("http://127.0.0.1:8000", epsilon=2.0, delta=1e-5)
    engine = PrivacyEngine(accountant="remote")      # the rest of the program stays as it is

Opacus calls its accountant from the optimizer's step, after the noise is drawn and before gradients
are reduced over ranks or parameters change. A step that does not fit the budget, or for which the
service gives no answer, raises there and leaves the parameters unchanged. In distributed training
rank 0 asks, and all ranks get its answer. `get_epsilon`, `get_noise_multiplier` and
`make_private_with_epsilon` ask the service too.

The charge is read off the sampler and the optimizer. `make_private` refuses a loader that samples
neither by Poisson nor by balls in bins; of the latter whole epochs are charged. Noise is exact
(`exact_noise`). It and the batches are drawn under keys of the operating system, whatever the
program seeds. The step itself
refuses: no noise; noise or batches from a generator that the program made; an infinite or adaptive
clipping norm; ghost clipping; parameters in half precision; a gradient that is not finite; several
batches (even if accumulated by `signal_skip_step`); more steps than batches. The sampler refuses to
draw a batch while the one before has had no step, and `get_epsilon` and `made` raise if the last
batch of a pass had none.

The training loop itself cannot be observed. Batches are counted as the sampler draws them, and
workers draw ahead of the loop, so a second step of one batch is refused only if there are more
steps than batches drawn. The callbacks for Lightning and Hugging Face observe each batch, and
refuse it.

Loading a checkpoint never reduces the number of steps that this process counts. The steps of
another run's checkpoint count beside those made here. A new process knows only what the checkpoint
says: steps made after it was written are counted only if a ledger granted them (`connect_ledger`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx
from opacus.accountants import IAccountant, register_accountant
from opacus.optimizers import DPOptimizer

from training_client.budget import (
    BEFORE,
    RESERVATIONS,
    LedgerBudget,
    require_granted,
    require_same_charge,
)
from training_client.client import AccountingService
from training_client.errors import BudgetExhaustedError, NoGuaranteeError, ServiceUnreachableError
from training_client.integrations.opacus.batch_counting import BatchCounter
from training_client.integrations.opacus.charged_updates import allow_update
from training_client.integrations.opacus.checks import (
    plan_of,
    require_constant_plan,
    require_no_skipped_steps,
    require_one_batch,
    require_plan,
)
from training_client.integrations.opacus.skipped_steps import (
    require_finite_gradients,
    require_full_precision,
)
from training_client.integrations.patches import warn_if_untested
from training_client.plan import POISSON, Plan
from training_client.private_step.processes.process_group import run_on_rank_zero

warn_if_untested("opacus", "torch")

NAME: Final = "remote"
_DELTA: Final = 1e-5
# Equal steps: noise multiplier, sample rate, their number, and their sampling unless it is Poisson
Run = tuple[Any, ...]
Parameters = tuple[Any, ...]  # the same without the number


@dataclass
class _Connection:
    """The accounting service and the budget for Opacus accountants that are created later."""

    service: AccountingService
    epsilon: float | None
    delta: float
    block: int
    budget: LedgerBudget | None = None


_connection: _Connection | None = None


def connect(
    url: str = "http://127.0.0.1:8000",
    *,
    epsilon: float | None = None,
    delta: float = _DELTA,
    api_key: str | None = None,
    block: int = 50,
    transport: httpx.BaseTransport | None = None,
) -> None:
    """Choose the service that `PrivacyEngine(accountant="remote")` asks.

    Args:
        url: the service's address.
        epsilon: the largest ε of the run; without it steps are accounted for and never refused.
        delta: δ at which ε is computed.
        api_key: the key, if the service requires one for computations.
        block: the number of steps asked for at once.
        transport: replaces the network in tests.
    """
    global _connection
    service = AccountingService(url, api_key=api_key, transport=transport)
    _connection = _Connection(service, epsilon, delta, block)


def connect_ledger(budget: LedgerBudget) -> None:
    """Choose the ledger reservation whose budget `PrivacyEngine(accountant="remote")` spends.

    The engine continues after the steps granted before, whatever a checkpoint says. One engine uses
    a reservation at a time: a second may start after the first has ended. At the end
    `training_client.run_report.settle` commits the reservation.

    Args:
        budget: the budget, with the plan that `checks.plan_of` returns.

    Raises:
        NoGuaranteeError: the plan's noise or clip norm changes from step to step.
    """
    global _connection
    require_constant_plan(budget.plan)
    _connection = _Connection(budget.service, None, budget.delta, budget.block, budget)


class RemoteAccountant(IAccountant):  # type: ignore[misc]
    """An Opacus accountant whose ε is computed by the accounting service.

    Attributes:
        history: a row (noise multiplier, sample rate, steps) for each run of equal steps; of balls
            in bins it has the sampling too, and whole epochs of steps.

    Raises:
        ServiceUnreachableError: `connect` was not called before.
    """

    def __init__(self) -> None:
        if _connection is None:
            raise ServiceUnreachableError(
                "call training_client.integrations.opacus.accountant.connect(url) before "
                'PrivacyEngine(accountant="remote")'
            )
        self.history: list[Run] = []
        self._connection = _connection
        self._allowed = 0  # steps left of the last block
        self._batches: list[BatchCounter] = []  # one for each loader
        self._charged: list[_ChargedEpoch] = []  # one for each loader
        self._is_load_refused = False  # parameters may be those of a checkpoint that was refused
        budget = _connection.budget
        if budget is not None and budget.made:
            self.history = _append_steps([], _parameters(budget.plan), budget.made)

    @property
    def made(self) -> int:
        """The number of steps so far, including those of a loaded checkpoint, for `settle`.

        Raises:
            NoGuaranteeError: the last batch of a pass had no step, which nothing else notices; or
                the accountant refused to load a checkpoint.
        """
        self._require_known_parameters()
        for each in self._batches:
            each.require_ended_pass_used()
        return self._counted

    @property
    def _counted(self) -> int:
        """The number of steps in the history."""
        return sum(run[2] for run in self.history)

    def get_optimizer_hook_fn(
        self,
        sample_rate: float,
        data_loader: Any = None,
    ) -> Callable[[DPOptimizer], None]:
        """Return the hook that checks each step, and spends its budget, before the step.

        Args:
            sample_rate: Opacus' 1/len(loader). It is not used: rounding may shorten the loader by a
                batch, and a sampler may be told its number of steps.
            data_loader: the training loader; by default the one given to `make_private`.

        Raises:
            NoGuaranteeError: the loader samples neither by Poisson nor by balls in bins, or cannot
                be found.
        """
        loader = _find_callers_loader() if data_loader is None else data_loader
        batches, charged = BatchCounter(loader), _ChargedEpoch()
        self._batches.append(batches)
        self._charged.append(charged)
        budget = self._connection.budget

        def before_step(optimizer: DPOptimizer) -> None:
            """Check the optimizer's batch and gradients, and spend the step's budget."""
            require_one_batch(optimizer)
            require_no_skipped_steps(optimizer)
            require_full_precision(optimizer)
            if budget is not None:
                require_plan(optimizer, loader, budget.plan)
            plan = plan_of(optimizer, loader)
            require_finite_gradients(optimizer)
            batches.require_unused_batch()
            batches.use_batch()
            if charged.must_charge(plan, batches.epoch):
                self._take(_parameters(plan), plan.steps_per_charge)
                charged.set(plan, batches.epoch)  # a refused epoch has no step
            allow_update(optimizer)

        before_step.counts_batches = True  # type: ignore[attr-defined]
        return before_step

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Spend budget on one more step; Opacus calls it before that step.

        Raises:
            BudgetExhaustedError: the step would exceed the budget.
            NoGuaranteeError: the step differs from the ledger's plan, or another engine made it.
            ServiceError: the service gave no usable answer.
        """
        self._take((noise_multiplier, sample_rate), 1)

    def _take(self, parameters: Parameters, steps: int) -> None:
        """Spend budget on a step, or with balls-in-bins sampling on an epoch at its first step."""
        self._require_known_parameters()
        if self._connection.budget is not None:
            self._take_from_ledger(self._connection.budget, parameters)
        else:
            is_new = not self.history or _parameters_of_run(self.history[-1]) != parameters
            if is_new or self._allowed == 0:
                self._allowed = run_on_rank_zero(partial(self._request_block, parameters, steps))
            self._allowed -= 1
        self.history = _append_steps(self.history, parameters, steps)

    def _take_from_ledger(self, budget: LedgerBudget, parameters: Parameters) -> None:
        """Take the next step of the ledger's reservation; raise unless it has these parameters."""
        if parameters != _parameters(budget.plan):
            raise NoGuaranteeError(
                f"the step has σ, q = {parameters}, but the ledger's plan is "
                f"{_parameters(budget.plan)}: make the plan with "
                "training_client.integrations.opacus.checks.plan_of(optimizer, loader)"
            )
        run_on_rank_zero(partial(budget.take, self._counted + 1))

    def _request_block(self, parameters: Parameters, steps: int) -> int:
        """Return a number of units of `steps` steps that fit ε, at most one block of steps."""
        limit, block = self._connection.epsilon, -(-self._connection.block // steps)
        while block > 0:
            longer = _append_steps(self.history, parameters, block * steps)
            spent = self._epsilon(longer, self._connection.delta)  # without a limit too: no step
            if limit is None or spent <= limit:  # is made that the service did not account for
                return block
            block //= 2
        raise BudgetExhaustedError(
            f"one more step would exceed ε = {limit:g} at δ = {self._connection.delta:g}: "
            f"{self._counted} steps are made"
        )

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """Return ε of all steps so far, rounded up.

        It is proven only for a run that was planned to end here. A run that is stopped after
        looking at results needs the guarantee of its whole plan, which `settle` writes.

        Raises:
            NoGuaranteeError: the last batch of a pass had no step, or the accountant refused to
                load a checkpoint.
            ServiceError: the service gave no usable answer.
        """
        return self._epsilon(self.history, delta) if self.made else 0.0

    def _epsilon(self, history: list[Run], delta: float) -> float:
        """Ask the service for ε at δ of all steps in an Opacus history."""
        runs = [
            {"kind": "dp_sgd", "noise_multiplier": sigma, "sample_rate": rate, "steps": steps}
            | ({"sampling": sampling[0]} if sampling else {})
            for sigma, rate, steps, *sampling in history
        ]
        whole = runs[0] if len(runs) == 1 else {"kind": "composed", "mechanisms": runs}
        return self._connection.service.epsilon(whole, delta).epsilon

    def __len__(self) -> int:
        """Return the number of steps in the history, as the interface of Opacus defines it.

        The accountants that Opacus has itself return the number of entries of their history.
        """
        return self._counted

    @classmethod
    def mechanism(cls) -> str:
        """Return the name under which Opacus registers this accountant."""
        return NAME

    def state_dict(self, destination: Any = None) -> Any:
        """Return the step history for a checkpoint, and what a claim about the steps rests on."""
        found = super().state_dict(destination)
        found.update(_checkpoint_keys(self._connection.budget))
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a checkpoint's step history, and keep the steps that budget was spent on.

        An older checkpoint of the same steps changes nothing. Steps of another run are counted
        beside those made here, since the parameters cost what that run cost. With a ledger, the
        ledger's count is kept. After a refusal no step is made and no ε is claimed until another
        checkpoint is loaded: Opacus has replaced the model's parameters by then.

        Raises:
            NoGuaranteeError: the ledger has granted fewer steps than the checkpoint counts, or its
                plan is not that of the checkpoint's steps, or they were charged to another
                reservation or followed other releases.
            ValueError: the checkpoint is not one of this accountant.
        """
        made, budget = self.history, self._connection.budget
        self._is_load_refused, self._allowed = True, 0
        for each in self._charged:
            each.clear()
        super().load_state_dict(state_dict)
        loaded, self.history = self.history, made
        loaded = [tuple(row) for row in loaded]
        steps = sum(run[2] for run in loaded)
        require_same_charge(state_dict, steps, _checkpoint_keys(budget))
        if budget is not None:
            _require_charged(loaded, budget)
        elif _is_continuation(loaded, made):
            self.history = loaded
        elif not _is_continuation(made, loaded):
            self.history = [*made, *loaded]
        self._is_load_refused = False

    def _require_known_parameters(self) -> None:
        """Raise if the accountant refused to load the checkpoint that Opacus loaded last."""
        if self._is_load_refused:
            raise NoGuaranteeError(
                "the accountant refused to load a checkpoint, and the model may have its "
                "parameters: load a checkpoint of this run, or begin again with a new PrivacyEngine"
            )


def _checkpoint_keys(budget: LedgerBudget | None) -> dict[str, Any]:
    """Return what a checkpoint must name of its steps, beside the history that says their noise."""
    if budget is None:
        return {BEFORE: [], RESERVATIONS: []}
    return budget.checkpoint_keys()


def _require_charged(loaded: list[Run], budget: LedgerBudget) -> None:
    """Raise unless the ledger charged the steps of a checkpoint.

    Raises:
        NoGuaranteeError: they are steps of another plan, or more than it has granted.
    """
    planned = _parameters(budget.plan)
    for run in loaded:
        if _parameters_of_run(run) != planned:
            raise NoGuaranteeError(
                f"the checkpoint has {run[2]} steps of σ, q = {_parameters_of_run(run)}, but the "
                f"ledger's plan is {planned}: make a new PrivacyEngine, and load a checkpoint of "
                "this reservation's run. To train on with another plan, load only the model's "
                "parameters, and give the earlier run's mechanism to the budget: before=(…,)"
            )
    require_granted(sum(run[2] for run in loaded), budget.made)


def _find_callers_loader() -> Any:
    """Find in the call stack the data loader that was passed to `make_private`.

    The charge depends on the sampler, but Opacus tells its accountant only a rate. Batch sizes
    would reveal the sampler only after private steps were made, and not reliably.

    Raises:
        NoGuaranteeError: the caller has no loader.
    """
    loader = sys._getframe(2).f_locals.get("data_loader")
    if loader is None:
        raise NoGuaranteeError(
            "the loader and its sampling are unknown: call "
            "get_optimizer_hook_fn(sample_rate, data_loader=loader)"
        )
    return loader


class _ChargedEpoch:
    """The balls-in-bins epoch that budget was last spent on."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._epoch: tuple[object, int] | None = None

    def must_charge(self, plan: Plan, epoch: tuple[object, int]) -> bool:
        """Return whether a step spends budget: with balls-in-bins only each epoch's first does.

        Args:
            plan: the plan of the step.
            epoch: the epoch of the step's batch, as `BatchCounter.epoch` identifies it.

        Raises:
            NoGuaranteeError: the step differs from the first of its epoch, which was charged.
        """
        if plan.sampling == POISSON or epoch != self._epoch:
            return True
        if plan != self._plan:
            raise NoGuaranteeError(
                f"the step is of {plan}, but its epoch was charged for {self._plan}: change "
                "parameters between epochs of balls-in-bins sampling"
            )
        return False

    def set(self, plan: Plan, epoch: tuple[object, int]) -> None:
        """Note that budget was spent on an epoch of this plan."""
        self._plan, self._epoch = plan, epoch

    def clear(self) -> None:
        """Forget the epoch, so that a further step of it spends budget again."""
        self._plan = self._epoch = None


def _parameters(plan: Plan) -> Parameters:
    """Return a plan's noise multiplier, sample rate and sampling, as in Opacus' history."""
    parameters = plan.noise_multiplier, plan.sample_rate
    return parameters if plan.sampling == POISSON else (*parameters, plan.sampling)


def _parameters_of_run(run: Run) -> Parameters:
    """Return a history entry's parameters, without its number of steps."""
    sigma, rate, _, *sampling = run
    return (sigma, rate, *sampling)


def _is_continuation(longer: list[Run], history: list[Run]) -> bool:
    """Return whether the history `longer` begins with all steps of `history`."""
    if not history:
        return True
    last = len(history) - 1
    return (
        len(longer) > last
        and longer[:last] == history[:last]
        and _parameters_of_run(longer[last]) == _parameters_of_run(history[last])
        and longer[last][2] >= history[last][2]
    )


def _append_steps(history: list[Run], parameters: Parameters, steps: int) -> list[Run]:
    """Return an Opacus history with `steps` more steps that have these parameters."""
    sigma, rate, *sampling = parameters
    if history and _parameters_of_run(history[-1]) == parameters:
        return [*history[:-1], (sigma, rate, history[-1][2] + steps, *sampling)]
    return [*history, (sigma, rate, steps, *sampling)]


register_accountant(NAME, RemoteAccountant)
