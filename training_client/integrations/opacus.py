"""Opacus with its accounting done by the service, asked before every step.

    from training_client.integrations.opacus import connect

    connect("http://127.0.0.1:8000", epsilon=2.0, delta=1e-5)
    engine = PrivacyEngine(accountant="remote")      # the rest of the program stays as it is

Opacus calls its accountant from the optimizer's step, after the noise is drawn and before gradients
are added up over processes or parameters change: a step that does not fit the budget, or for which
the service gives no answer, raises there, and the parameters stay as they were. Of several
processes rank 0 asks, and all get its answer. `get_epsilon`, `get_noise_multiplier` and
`make_private_with_epsilon` ask the service too.

What is charged is read off the sampler and the optimizer. A loader that does not sample by Poisson
is refused by `make_private`; a step without noise, with an infinite or an adaptive norm, with ghost
clipping, of parameters in half precision, with a gradient that is not finite, over several batches
(also those that a program adds up by `signal_skip_step`), or for which no batch is left, when it is
about to be made. A batch or a part of one that has no step is refused when the next is drawn.

What is not seen here is the loop. Batches are counted as the sampler draws them, which is an upper
bound on those that the loop was given, for workers draw ahead: a second step of a batch is refused
only if it makes more steps than batches. The callbacks for Lightning and Hugging Face are told of
each batch, and refuse it.

A checkpoint never rewinds what this process has made. A fresh process knows only what the
checkpoint says: steps that were made after it was written are not counted, unless a ledger granted
them (`connect_ledger`).
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

from training_client.budget import LedgerBudget
from training_client.errors import BudgetExhaustedError, NoGuaranteeError, ServiceUnreachableError
from training_client.integrations.checks import (
    plan_of,
    require_no_skipped_steps,
    require_one_batch,
)
from training_client.integrations.draws import Draws
from training_client.integrations.ranks import on_rank_zero
from training_client.integrations.skipped import require_finite, require_usual_precision
from training_client.service import AccountingService

NAME: Final = "remote"
_DELTA: Final = 1e-5


@dataclass
class _Connection:
    """The service that new accountants ask, and what they may spend."""

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
    """Say which service `PrivacyEngine(accountant="remote")` asks.

    Args:
        url: of the service.
        epsilon: what the run may spend; without one steps are accounted for, and not refused.
        delta: at which ε counts.
        api_key: if computations are not left open.
        block: steps asked for at once.
        transport: for tests.
    """
    global _connection
    service = AccountingService(url, api_key=api_key, transport=transport)
    _connection = _Connection(service, epsilon, delta, block)


def connect_ledger(budget: LedgerBudget) -> None:
    """Say which reservation `PrivacyEngine(accountant="remote")` has its steps granted from.

    Its steps are numbered on from those that were granted before, whatever a checkpoint says, and
    made by one engine: a second begins after the first has ended, or is refused. At the end
    `training_client.claims.settle` commits it.

    Args:
        budget: with the plan that `checks.plan_of` finds.
    """
    global _connection
    _connection = _Connection(budget.service, None, budget.delta, budget.block, budget)


class RemoteAccountant(IAccountant):  # type: ignore[misc]
    """What Opacus asks of an accountant, answered by the service.

    Attributes:
        history: (noise multiplier, sample rate, steps), a row for each stretch of equal steps.
    """

    def __init__(self) -> None:
        if _connection is None:
            raise ServiceUnreachableError(
                "call training_client.integrations.opacus.connect(url) before "
                'PrivacyEngine(accountant="remote")'
            )
        self.history: list[tuple[float, float, int]] = []
        self._connection = _connection
        self._allowed = 0  # more steps like the last
        budget = _connection.budget
        if budget is not None and budget.made:
            self.history = _extended([], _like(budget), budget.made)

    @property
    def made(self) -> int:
        """Steps that count as made."""
        return sum(steps for _, _, steps in self.history)

    def get_optimizer_hook_fn(
        self,
        sample_rate: float,
        data_loader: Any = None,
    ) -> Callable[[DPOptimizer], None]:
        """What an optimizer calls when it is about to make a step.

        Args:
            sample_rate: 1/len(loader) as Opacus computes it. It is not used: rounding may have made
                the loader a batch shorter, and a sampler may have been told its number of steps.
            data_loader: of the batches; that of `make_private` by default.

        Raises:
            NoGuaranteeError: the loader does not sample by Poisson, or cannot be found.
        """
        loader = _loader_of_caller() if data_loader is None else data_loader
        draws = Draws(loader)

        def before_step(optimizer: DPOptimizer) -> None:
            require_one_batch(optimizer)
            require_no_skipped_steps(optimizer)
            require_usual_precision(optimizer)
            runs = plan_of(optimizer, loader)
            require_finite(optimizer)
            draws.require_unused()
            draws.use()
            self.step(noise_multiplier=runs.noise_multiplier, sample_rate=runs.sample_rate)

        before_step.counts_draws = True  # type: ignore[attr-defined]
        return before_step

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one more step, if it may be made.

        Raises:
            BudgetExhaustedError: it would pass the budget.
            NoGuaranteeError: it is not what the ledger was told, or another engine made it.
            ServiceError: no usable answer.
        """
        like = (noise_multiplier, sample_rate)
        if self._connection.budget is not None:
            self._draw_on(self._connection.budget, like)
        else:
            if not self.history or self.history[-1][:2] != like or self._allowed == 0:
                self._allowed = on_rank_zero(partial(self._ask, like))
            self._allowed -= 1
        self.history = _extended(self.history, like, 1)

    def _draw_on(self, budget: LedgerBudget, like: tuple[float, float]) -> None:
        if like != _like(budget):
            raise NoGuaranteeError(
                f"the step has σ, q = {like}, and the ledger was told {_like(budget)}: make the "
                "plan with training_client.integrations.checks.plan_of(optimizer, loader)"
            )
        on_rank_zero(partial(budget.take, self.made + 1))

    def _ask(self, like: tuple[float, float]) -> int:
        """How many more such steps may be made: a block of them, or as many of it as fit."""
        limit, block = self._connection.epsilon, self._connection.block
        while block > 0:
            spent = self._epsilon(_extended(self.history, like, block), self._connection.delta)
            if limit is None or spent <= limit:
                return block
            block //= 2
        raise BudgetExhaustedError(
            f"one more step would pass ε = {limit:g} at δ = {self._connection.delta:g}: "
            f"{self.made} steps are made"
        )

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """ε of the steps made so far, proven for a run that was planned to end here, rounded up.

        Whoever stops after looking at results has no such plan: `settle` writes the claim that
        covers the steps reserved.
        """
        return self._epsilon(self.history, delta) if self.history else 0.0

    def _epsilon(self, history: list[tuple[float, float, int]], delta: float) -> float:
        runs = [
            {"kind": "dp_sgd", "noise_multiplier": sigma, "sample_rate": rate, "steps": steps}
            for sigma, rate, steps in history
        ]
        whole = runs[0] if len(runs) == 1 else {"kind": "composed", "mechanisms": runs}
        return self._connection.service.epsilon(whole, delta).epsilon

    def __len__(self) -> int:
        """Stretches of equal steps, as Opacus' own accountants count."""
        return len(self.history)

    @classmethod
    def mechanism(cls) -> str:
        """The name it is registered under."""
        return NAME

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on with a checkpoint's history, if that has all that was made here, and maybe more.

        With a ledger it is the ledger that knows.
        """
        made = self.history
        super().load_state_dict(state_dict)
        if self._connection.budget is not None or not _continues(self.history, made):
            self.history = made  # a rolled-back checkpoint does not rewind what was spent
        self._allowed = 0


def _loader_of_caller() -> Any:
    """The loader of the `make_private` that asks for a hook.

    Opacus tells its accountant a number, and the sampler behind it is what the charge depends on.
    Sizes of batches would show it only after private steps were made, and not for certain; the
    caller's own loader shows it before the first. If it is not there, nothing is trained.
    """
    loader = sys._getframe(2).f_locals.get("data_loader")
    if loader is None:
        raise NoGuaranteeError(
            "how batches are sampled is not known: call "
            "get_optimizer_hook_fn(sample_rate, data_loader=loader)"
        )
    return loader


def _like(budget: LedgerBudget) -> tuple[float, float]:
    return budget.plan.noise_multiplier, budget.plan.sample_rate


def _continues(
    longer: list[tuple[float, float, int]], history: list[tuple[float, float, int]]
) -> bool:
    """Whether one history begins with another."""
    if not history:
        return True
    last = len(history) - 1
    rows = [tuple(row) for row in longer]
    return (
        len(rows) > last
        and rows[:last] == [tuple(row) for row in history[:last]]
        and rows[last][:2] == tuple(history[last][:2])
        and rows[last][2] >= history[last][2]
    )


def _extended(
    history: list[tuple[float, float, int]], like: tuple[float, float], steps: int
) -> list[tuple[float, float, int]]:
    """The history with so many more steps of one kind."""
    if history and history[-1][:2] == like:
        return [*history[:-1], (*like, history[-1][2] + steps)]
    return [*history, (*like, steps)]


register_accountant(NAME, RemoteAccountant)
