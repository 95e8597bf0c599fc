"""A Flower `ClientApp` that makes a round only after the ledger has granted it.

The mod charges a round before the app's train function runs, passes that function the steps of this
one round, and withholds a reply that took none of them. Messages other than training and the end of
the run are refused, because nothing charges what they would reveal. The participant's data, plan
and budget stay on its node; the server receives noisy contributions, and is told when no more come.

The strategy of the server is in `strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from training_client.client import Reservation
from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.flower.messages import (
    ARRAYS,
    CONTRIBUTED,
    END_RUN,
    ENDED,
    OUTCOME,
    PROTOCOL,
    ROUND,
    SPENT,
    TRAIN,
)
from training_client.integrations.flower.round_budget import GrantedRound, RoundBudget

_STATE: Final = "privacy-accountant"  # the record in Context.state
_WITHHELD_REASON: Final = (
    "the site gives no answer; its own log says why. The reason is not sent, because it may depend "
    "on the site's records or budget"
)
_ROUND: Final[ContextVar[GrantedRound | None]] = ContextVar("granted_round", default=None)

Next = Callable[[Message, Context], Message]
OpenBudget = Callable[[Context], RoundBudget]


def make_client_app(open_budget: OpenBudget) -> ClientApp:
    """Return a `ClientApp` whose rounds spend budget; register training with `@app.train()`.

    Args:
        open_budget: returns the participant's budget, given Flower's context; it is called for each
            message, possibly in a new process.
    """
    app = ClientApp(mods=[charge_rounds(open_budget)])
    app.query(END_RUN.partition(".")[2])(_refuse_without_mod)
    return app


def charge_rounds(open_budget: OpenBudget) -> Callable[[Message, Context, Next], Message]:
    """Return a Flower mod that spends a round's budget before the app runs it."""

    def charge(message: Message, context: Context, call_next: Next) -> Message:
        """Spend a round's budget and run the app, or end the run.

        Raises:
            NoGuaranteeError: the message is of another kind or protocol; or anything else failed,
                such as the service or the app. Flower sends an error's text to the server, so the
                reason, which may depend on records or budget, is only in the site's own log.
        """
        kind = message.metadata.message_type
        if kind not in (TRAIN, END_RUN):
            raise NoGuaranteeError(
                f"messages of type {kind!r} are refused: nothing charges what their answers reveal "
                "of the private records. Evaluate the model on public records, on the server"
            )
        config = _read_config(message)
        try:
            return answer(kind, str(config["job"]), message, context, call_next)
        except Exception as error:
            raise NoGuaranteeError(_WITHHELD_REASON) from error

    def answer(kind: str, job: str, message: Message, context: Context, call_next: Next) -> Message:
        """Return the site's reply; raise whatever fails."""
        budget = open_budget(context)
        try:
            reservation = _find_reservation(budget, context, job)
            if kind == END_RUN:
                budget.end(reservation)
                return _reply(message, ENDED)
            granted = _grant_or_end(budget, reservation)
        except BudgetExhaustedError:
            return _reply(message, SPENT)
        return _run_app(granted, message, context, call_next)

    return charge


def granted_round() -> GrantedRound:
    """Return the budget of the round for which the app runs; pass it to `Participant`.

    Raises:
        NoGuaranteeError: the ledger granted no round to this call.
    """
    found = _ROUND.get()
    if found is None:
        raise NoGuaranteeError(
            "no round was granted to this call: make the app with make_client_app, or put "
            "charge_rounds into its mods"
        )
    return found


def received_parameters(message: Message) -> list[torch.Tensor]:
    """Return the model's parameters that the server sent, in the model's order."""
    return [torch.from_numpy(each.numpy()) for each in message.content[ARRAYS].values()]


def send_contribution(
    message: Message, model: nn.Module, contribution: Sequence[torch.Tensor] | None
) -> Message:
    """Return the reply to a training message.

    Args:
        message: the message from the server.
        model: the participant's model; its trained parameters name the contribution's tensors.
        contribution: what `contribute` returned; None if the budget is spent.
    """
    if contribution is None:
        return _reply(message, SPENT)
    reply, names = _reply(message, CONTRIBUTED), trained_names(model)
    pairs = zip(names, contribution, strict=True)
    reply.content[ARRAYS] = ArrayRecord(
        {name: Array(each.detach().cpu().numpy()) for name, each in pairs}
    )
    return reply


def trained_names(model: nn.Module) -> list[str]:
    """Return the names of a model's trained parameters, in the model's order."""
    return [name for name, each in model.named_parameters() if each.requires_grad]


def _grant_or_end(budget: RoundBudget, reservation: Reservation) -> GrantedRound:
    """Return the next round, or end the run if all rounds are done.

    Raises:
        BudgetExhaustedError: all rounds are made.
    """
    try:
        return budget.grant_round(reservation)
    except BudgetExhaustedError:
        budget.end(reservation)
        raise


def _run_app(granted: GrantedRound, message: Message, context: Context, call_next: Next) -> Message:
    """Run the app with the granted round; withhold a reply that used none of its steps."""
    token = _ROUND.set(granted)
    try:
        reply = call_next(message, context)
    finally:
        _ROUND.reset(token)
    if not granted.is_used:
        raise NoGuaranteeError(
            "the app replied without a private step, so its reply is withheld: pass "
            "granted_round() to Participant or to an optimizer of training_client"
        )
    return reply


def _find_reservation(budget: RoundBudget, context: Context, job: str) -> Reservation:
    """Return the job's reservation, and keep its identifier in Flower's context.

    Raises:
        NoGuaranteeError: the context holds a reservation of another dataset or job.
    """
    kept: dict[str, Any] = dict(context.state.get(_STATE) or {})
    if kept and (kept["dataset"], kept["job"]) != (budget.dataset, job):
        raise NoGuaranteeError(
            f"this node holds a reservation of dataset {kept['dataset']!r} for job "
            f"{kept['job']!r}, not of {budget.dataset!r} for {job!r}: begin a new Flower run"
        )
    found = budget.find_reservation(job, kept.get("reservation"))
    context.state[_STATE] = ConfigRecord(
        {"reservation": found.identifier, "dataset": budget.dataset, "job": job}
    )
    return found


def _read_config(message: Message) -> dict[str, Any]:
    """Return the server's configuration of a round, from a message.

    Raises:
        NoGuaranteeError: there is none, or it is of another version of the protocol.
    """
    config = dict(message.content.get(ROUND) or {})
    if config.get("protocol") != PROTOCOL:
        raise NoGuaranteeError(
            f"the server speaks protocol {config.get('protocol')!r}, this client {PROTOCOL}: use "
            "the strategy BudgetedAverage of the same version of training_client"
        )
    return config


def _reply(message: Message, state: str) -> Message:
    """Return a reply that says whether the participant contributed to the server's round."""
    number = _read_config(message)["round"]
    outcome = ConfigRecord({"protocol": PROTOCOL, "round": number, "state": state})
    return Message(RecordDict({OUTCOME: outcome}), reply_to=message)


def _refuse_without_mod(message: Message, context: Context) -> Message:  # noqa: ARG001
    """Raise an error, since `charge_rounds` should have answered this message."""
    raise NoGuaranteeError("charge_rounds is not among the app's mods")
