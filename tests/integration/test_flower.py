"""Flower's messages, passed in one process: what is charged, refused, averaged and dropped.

It needs Flower, so it runs in the environment of `make flower-environment`: `make test-flower`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.federated_averaging import local_dp_noise
from tests.support.ledger_client import LedgerClient
from tests.support.pages import ROOT
from tests.support.small_models import batch, model, unbudgeted
from training_client.errors import DataError, NoGuaranteeError
from training_client.integrations.flower.messages import END_RUN, PROTOCOL, TRAIN
from training_client.integrations.flower.round_budget import RoundBudget
from training_client.lab.federated import Participant, train_federated
from training_client.lab.models import cross_entropy
from training_client.plan import Plan

pytest.importorskip("flwr", reason="Flower is not installed: run `make test-flower`")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.task_identity import TaskIdentity

from training_client.integrations.flower.client_app import (
    granted_round,
    make_client_app,
    received_parameters,
    send_contribution,
)
from training_client.integrations.flower.strategy import (
    BudgetedAverage,
    load_parameters,
    parameters_of,
)

PLAN = Plan(32, 0.5, 1.0, 4.0)


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The identity that Flower's programs set for the process of a message, and a folder for it."""
    monkeypatch.chdir(tmp_path)
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Site:
    """A node whose process is new for every message: it keeps Flower's context and its folder."""

    def __init__(self, ledger: LedgerClient, rounds: int, plan: Plan = PLAN) -> None:
        self.budget = RoundBudget(ledger, ledger.patients, 1e-5, plan, rounds, folder=Path("site"))
        self.runs = 0
        self.answer: Any = self.contribute
        self.forget()

    def forget(self) -> None:
        """Lose Flower's state, as a restarted node does."""
        self.context = Context(
            run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}
        )

    def contribute(self, message: Message) -> Message:
        net, (examples, labels) = model(), batch(32)
        site = Participant("a", net, examples, labels, granted_round())
        return send_contribution(
            message, net, site.contribute(received_parameters(message), cross_entropy)
        )

    def __call__(self, message: Message) -> Message:
        app = make_client_app(lambda _: self.budget)

        @app.train()
        def train(message: Message, context: Context) -> Message:
            self.runs += 1
            return self.answer(message)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            self.runs += 1
            return self.answer(message)

        return app(message, self.context)

    @property
    def charged(self) -> int:
        return self.budget.find_reservation("job").steps_granted


class InProcess:
    """A grid that passes messages to sites in this process."""

    def __init__(self, sites: dict[int, Any]) -> None:
        self.sites = sites

    def get_node_ids(self) -> list[int]:
        return list(self.sites)

    def send_and_receive(self, messages: Any, **_: Any) -> list[Message]:
        replies = []
        for each in messages:
            each.metadata.__dict__["_message_id"] = "1"
            reply = self.sites[each.metadata.dst_node_id](each)
            if reply is not None:
                reply.metadata.__dict__["_src_node_id"] = each.metadata.dst_node_id
                replies.append(reply)
        return replies


def message(kind: str = TRAIN, protocol: int = PROTOCOL, job: str = "job") -> Message:
    config = ConfigRecord({"protocol": protocol, "job": job, "round": 1})
    content = RecordDict({"round": config, "arrays": parameters_of(model())})
    made = Message(content, dst_node_id=1, message_type=kind)
    made.metadata.__dict__["_message_id"] = "1"
    return made


def state_of(reply: Message) -> str:
    return str(reply.content["outcome"]["state"])


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """Require an error whose reason the site keeps to itself: Flower sends an error's text."""
    with pytest.raises(NoGuaranteeError, match="its own log says why") as caught:
        yield
    assert re.search(reason, str(caught.value.__cause__))
    assert not re.search(reason, str(caught.value))


def test_each_round_is_charged_before_the_app_runs(ledger: LedgerClient) -> None:
    site = Site(ledger, rounds=2)
    seen = []
    site.answer = lambda sent: seen.append(site.charged) or site.contribute(sent)
    replies = [site(message()) for _ in range(2)]
    assert seen == [1, 2]
    assert [state_of(each) for each in replies] == ["contributed"] * 2
    assert set(replies[0].content) == {"outcome", "arrays"}
    assert state_of(site(message())) == "spent"
    assert (site.runs, site.charged) == (2, 2)
    assert site.budget.find_reservation("job").state == "committed"


def test_a_site_that_lost_flowers_state_goes_on_with_its_reservation(
    ledger: LedgerClient,
) -> None:
    site = Site(ledger, rounds=2)
    site(message())
    site.forget()
    site(message())
    assert state_of(site(message())) == "spent"
    assert site.charged == 2


def test_an_app_that_makes_no_private_step_sends_nothing(ledger: LedgerClient) -> None:
    site = Site(ledger, rounds=2)
    site.answer = lambda sent: send_contribution(
        sent, model(), [each.detach() for each in model().parameters()]
    )
    with refused("withheld"):
        site(message())
    assert site.charged == 1
    with pytest.raises(NoGuaranteeError, match="no round was granted"):
        granted_round()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"kind": "evaluate"}, "refused: nothing charges"),
        ({"protocol": PROTOCOL + 1}, "protocol"),
    ],
)
def test_what_nothing_charges_is_refused(
    ledger: LedgerClient, sent: dict[str, Any], words: str
) -> None:
    site = Site(ledger, rounds=2)
    with pytest.raises(NoGuaranteeError, match=words):
        site(message(**sent))
    assert (site.runs, site.charged) == (0, 0)


def test_a_reservation_of_another_dataset_or_job_is_refused(ledger: LedgerClient) -> None:
    site = Site(ledger, rounds=2)
    site(message())
    with refused("begin a new Flower run"):
        site(message(job="another"))
    site.budget = replace(site.budget, dataset="others")
    with refused(f"'{ledger.patients}'.*'others'"):
        site(message())
    assert site.runs == 1


def test_an_error_that_quotes_a_record_is_not_sent(ledger: LedgerClient) -> None:
    site = Site(ledger, rounds=2)

    def fail(sent: Message) -> Message:
        raise ValueError("expected a label, got 73.25")

    site.answer = fail
    with refused(r"73\.25"):
        site(message())
    assert site.charged == 1


def test_a_run_that_does_not_fit_leaves_at_once(ledger: LedgerClient) -> None:
    site = Site(ledger, rounds=10**6)
    assert state_of(site(message())) == "spent"
    assert site.runs == 0


def test_the_end_of_a_run_commits_it(ledger: LedgerClient) -> None:
    site = Site(ledger, rounds=2)
    site(message())
    assert state_of(site(message(END_RUN))) == "ended"
    assert site.budget.find_reservation("job").state == "committed"
    assert state_of(site(message())) == "spent"


def test_the_strategy_ends_when_nobody_contributes(ledger: LedgerClient, tmp_path: Path) -> None:
    site, silent = Site(ledger, rounds=2), lambda _: None
    strategy = BudgetedAverage("job", 0.1, folder=tmp_path)
    result = strategy.start(InProcess({1: site, 2: silent}), parameters_of(model()))  # type: ignore[arg-type]
    assert (site.runs, site.charged) == (2, 2)
    again = BudgetedAverage("job", 0.1, folder=tmp_path)
    resumed = again.start(InProcess({1: silent}), parameters_of(model()))  # type: ignore[arg-type]
    for name, each in result.arrays.items():
        assert (resumed.arrays[name].numpy() == each.numpy()).all()
    with pytest.raises(DataError, match="model of job 'job'"):
        BudgetedAverage("other", 0.1, folder=tmp_path).start(
            InProcess({}), parameters_of(model())  # type: ignore[arg-type]
        )  # fmt: skip


def test_a_round_in_which_nobody_answers_is_tried_again(ledger: LedgerClient) -> None:
    site, sent = Site(ledger, rounds=3), []

    def slow(each: Message) -> Message | None:
        sent.append(each)
        reply = site(each)
        return None if len(sent) == 1 else reply

    BudgetedAverage("job", 0.1).start(InProcess({1: slow}), parameters_of(model()))  # type: ignore[arg-type]
    assert (site.runs, site.charged) == (3, 3)
    assert [each.content["round"]["round"] for each in sent] == [1, 1, 2, 3]


def test_it_makes_the_same_model_as_in_one_process(ledger: LedgerClient) -> None:
    plan = Plan(32, 1.0, 1e9, 1e-18)  # all records, and next to no noise
    site = Site(ledger, rounds=2)

    def contribute_without_noise(sent: Message) -> Message:
        granted = granted_round()
        granted.take(granted.first)
        contribution = participant(plan).contribute(received_parameters(sent), cross_entropy)
        return send_contribution(sent, model(), contribution)

    site.answer = contribute_without_noise
    result = BudgetedAverage("job", 0.1).start(
        InProcess({1: site}), parameters_of(model())  # type: ignore[arg-type]
    )  # fmt: skip
    alone, through_flower = model(), model()
    train_federated(alone, [participant(plan)], cross_entropy, learning_rate=0.1, rounds_max=2)
    load_parameters(through_flower, result.arrays)
    for a, b in zip(alone.parameters(), through_flower.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def participant(plan: Plan) -> Participant:
    examples, labels = batch(32)
    return Participant("a", model(), examples, labels, unbudgeted(plan))


@pytest.mark.parametrize("change", ["round", "shape", "nan", "protocol", "none"])
def test_an_answer_that_does_not_fit_is_left_out(ledger: LedgerClient, change: str) -> None:
    def spoil(reply: Message) -> Message:
        if "arrays" not in reply.content:  # the end of the run
            return reply
        name = next(iter(reply.content["arrays"]))
        array = reply.content["arrays"][name].numpy().copy()
        match change:
            case "round":
                reply.content["outcome"]["round"] = 7
            case "protocol":
                reply.content["outcome"]["protocol"] = 7
            case "none":
                del reply.content["arrays"]
            case "shape":
                reply.content["arrays"] = ArrayRecord([array[:1]])
            case "nan":
                array[0] = float("nan")
                reply.content["arrays"][name] = type(reply.content["arrays"][name])(array)
        return reply

    site = Site(ledger, rounds=2)
    strategy = BudgetedAverage("job", 0.1, silent_rounds_max=0)
    start = parameters_of(model())
    result = strategy.start(InProcess({1: lambda sent: spoil(site(sent))}), start)  # type: ignore[arg-type]
    assert site.charged == 1
    assert all((result.arrays[name].numpy() == start[name].numpy()).all() for name in start)


def test_the_programs_of_the_page_make_their_apps() -> None:
    text = (ROOT / "docs/how-to/several-sites.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    client, server = [names_of(each) for each in programs if "\napp = " in each]
    assert callable(client["train"])
    assert client["open_budget"] is not None
    assert callable(server["main"])


def names_of(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def test_too_few_nodes_are_named() -> None:
    with pytest.raises(DataError, match="0 nodes are connected"):
        BudgetedAverage("job", 0.1, nodes_min=1, wait_seconds=0).start(
            InProcess({}), parameters_of(model())  # type: ignore[arg-type]
        )  # fmt: skip


def test_the_noise_of_local_dp_mod_is_what_the_benchmark_says(monkeypatch: Any) -> None:
    sent = ArrayRecord([np.zeros(50_000), np.zeros((100, 500))])

    def train(message: Message, context: Context) -> Message:
        update = ArrayRecord([np.full(50_000, 3.0), np.full((100, 500), -3.0)])
        return Message(RecordDict({"arrays": update}), reply_to=message)

    np.random.seed(1)
    modified = LocalDpMod(clipping_norm=0.5, sensitivity=2 * 0.5, epsilon=8.0, delta=1e-5)
    message = Message(RecordDict({"arrays": sent}), dst_node_id=1, message_type=TRAIN)
    answer = modified(message, Context(1, 1, {}, RecordDict(), {}), train)
    arrays = answer.content["arrays"].to_numpy_ndarrays()
    values = np.concatenate([each.ravel() for each in arrays])
    assert values.std() == pytest.approx(0.5 * local_dp_noise(8.0, 1e-5), rel=0.02)
