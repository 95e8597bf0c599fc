"""Each key of each format does what its table says: it acts, is checked, or changes nothing.

A row of a table without an example here fails, so a new key cannot be ignored.
"""

from __future__ import annotations

import importlib
import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from accountant_service import import_document, importing, mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.cli import app as command_line
from accountant_service.importing import FORMATS, DocumentError, Facts, account_for, read_document
from accountant_service.importing.keys import Key, Role
from accountant_service.questions.registry import ENDPOINTS
from scripts import import_keys
from scripts.page_parts import DOCS, read_part
from tests.support.helpers import codes

Json = dict[str, Any]
UNREAD = {"unknown-key", "unused-key"}

RUN: Json = {"noise_multiplier": 1.1, "batch_size": 256, "dataset_size": 60_000, "epochs": 15}
STATED: Json = {**RUN, "sampling": "poisson"}
RATE: Json = {"noise_multiplier": 1.1, "steps": 1000}
ARGUMENTS: Json = {**STATED, "max_grad_norm": 1.0}
HISTORY: Json = {"history": [[1.1, 0.01, 1000]], "sampling": "poisson"}
PLAN: Json = {"event": {"class_name": "GaussianDpEvent", "noise_multiplier": 2.0}}
SAMPLE: Json = {
    "event": {"class_name": "PoissonSampledDpEvent", "sampling_probability": 0.01,
              "event": {"class_name": "GaussianDpEvent", "noise_multiplier": 2.0}},
}  # fmt: skip
KERAS: Json = {"train_steps": 20, "train_size": 1000, "batch_size": 10, "noise_multiplier": 1.0}
BANDS: Json = {"iterations": 100, "expected_participations": 5, "num_bands": 2,
               "noise_multiplier": 1.0}  # fmt: skip
LOCAL: Json = {"clipping_norm": 1.0, "sensitivity": 2.0, "epsilon": 0.5, "delta": 1e-5}
SERVER: Json = {"noise_multiplier": 1.0, "num_sampled_clients": 10, "num_rounds": 3,
                "clipping_norm": 1.0}  # fmt: skip
DRAWN: Json = {**SERVER, "num_clients": 100}
SVT: Json = {"path": "SVTPrivacy", "args": {"parameters": 10}}
BUDGET: Json = {"spent_budget": [[0.1, 1e-7], [0.2, 0.0]]}
MEASURE: Json = {"measure": "ZeroConcentratedDivergence", "d_out": 0.1}
GAUSSIAN: Json = {"class_name": "GaussianDpEvent", "noise_multiplier": 3.0}

# For each key that acts or is checked: a document, and a value that changes its answer or is
# refused. The document may have another value of the key.
SAMPLING: dict[str, Any] = {
    "sampling": "shuffled", "poisson_sampling": False, "shuffle": True, "replacement": True,
}  # fmt: skip
CLAIM: dict[str, Any] = {"delta": 1e-3, "epsilon": 7.0, "neighbouring_relation": "replace_one"}
UNIT: dict[str, Any] = {"records_per_user": 2, "privacy_unit": "user"}
SIZES: dict[str, Any] = {"dataset_size": 50_000, "batch_size": 512}


def on(document: Json, **values: Any) -> dict[str, tuple[Json, Any]]:
    return {name: (document, value) for name, value in values.items()}


_OF_A_RUN = {
    "noise_multiplier": 2.0, "steps": 10, "epochs": 3, "steps_per_epoch": 100, "drop_last": True,
    "gradient_accumulation_steps": 4, "enable_dp": False, "disable_dp": True, "seed": 3,
    "clipping": "adaptive", **SIZES, **SAMPLING, **CLAIM, **UNIT,
}  # fmt: skip
EXAMPLES: dict[str, dict[str, tuple[Json, Any]]] = {
    "run": {
        **on(STATED, **_OF_A_RUN, num_microbatches=16, used_microbatching=True),
        **on(RATE, sample_rate=0.01),
    },
    "opacus": {
        **on(ARGUMENTS, **_OF_A_RUN, mechanism="rdp"),
        **on(RATE | {"max_grad_norm": 1.0}, sample_rate=0.01),
        **on(ARGUMENTS | {"clipping": "adaptive"}, unclipped_num_std=2.0),
        **on(HISTORY, history=[[1.1, 0.01, 2000]]),
    },
    "dp_event": {
        **on(PLAN, event=GAUSSIAN, **CLAIM, **UNIT),
        **on(SAMPLE, **{**SAMPLING, "sampling": "shuffled"}),
        **on(SAMPLE | {"batch_size": 10}, dataset_size=5000),
        **on(SAMPLE | {"dataset_size": 5000}, batch_size=10),
    },
    "jax_privacy": {
        **on(KERAS, train_steps=30, noise_multiplier=2.0, gradient_accumulation_steps=2,
             poisson_sampling_in_fit=True, epochs=3, seed=3, replacement=True, sampling="none",
             poisson_sampling=True, dataset_size=5000, batch_size=20, **CLAIM, **UNIT),
        **on(KERAS | {"poisson_sampling": True}, shuffle=True),
        **on(BANDS, iterations=200, expected_participations=6, num_bands=3, strategy=[1.0]),
        **on(BANDS | {"num_examples": 100}, truncated_batch_size=10),
        **on(KERAS, class_name="BandMFConfig"),
    },
    "flower": {
        **on(LOCAL, sensitivity=1.0, clipping_norm=3.0, delta=1e-3, epsilon=0.7),
        **on(DRAWN, noise_multiplier=2.0, num_sampled_clients=20, num_rounds=4, num_clients=200,
             fraction_fit=0.2, batch_size=20, dataset_size=300, seed=1,
             strategy="DifferentialPrivacyServerSideAdaptiveClipping", sampling="none",
             poisson_sampling=True, shuffle=True, replacement=True,
             neighbouring_relation="zero_out_one"),
        **on(DRAWN | {"fraction_fit": 0.05}, min_fit_clients=7),
        **on(SERVER | {"noise_multiplier": 0.9}, initial_clipping_norm=0.2, clip_norm_lr=0.1,
             target_clipped_quantile=0.4, clipped_count_stddev=0.6),
        **on(SERVER | {"strategy": "FedAvg"}, class_name="FedMedian"),
    },
    "nvflare": {
        **on(SVT, path="PercentilePrivacy", args={"parameters": 20}, num_rounds=2, delta=1e-3,
             parameters=20, sampling="poisson", poisson_sampling=True, shuffle=True,
             replacement=True, neighbouring_relation="zero_out_one", epsilon=3.0),
        **on({"task_result_filters": [SVT]}, task_result_filters=[SVT, SVT | {"args": {}}]),
        **on({"scopes": [{"task_result_filters": [SVT]}]},
             scopes=[{"task_result_filters": [SVT | {"args": {}}]}]),
        **on({"args": {"parameters": 9}, "class_name": "SVTPrivacy"}, class_name="GaussianPrivacy"),
    },
    "diffprivlib": {
        **on(BUDGET, spent_budget=[[0.3, 1e-7]], slack=1e-3, epsilon=0.2, delta=1e-3,
             neighbouring_relation="replace_one", class_name="Other"),
    },
    "opendp": on(MEASURE, measure="RenyiDivergence", d_out=0.2, delta=1e-3, epsilon=7.0,
                 neighbouring_relation="replace_one"),
}  # fmt: skip
HARMLESS_BASES: dict[str, Json] = {
    "run": STATED, "opacus": ARGUMENTS, "dp_event": PLAN, "jax_privacy": KERAS, "flower": SERVER,
    "nvflare": SVT, "diffprivlib": BUDGET, "opendp": MEASURE,
}  # fmt: skip


def lint(document: Any, **facts: Any) -> importing.Answer:
    found = read_document(document, Facts(**facts))
    importing.require_valid(found)
    return account_for(found)


def outcome(name: str, document: Json) -> Any:
    """All that an import reads before anything is computed, or why it is refused."""
    try:
        found = read_document(document, Facts(), name)
        importing.require_valid(found)
    except DocumentError as error:
        return [message for _, message in error.faults]
    mechanisms_read = [
        None if each is None else each.to_json() for each in (found.mechanism, found.accounted)
    ]
    claims = [(each.epsilon, each.delta) for each in found.claims]
    findings = [(each.code, each.message) for each in found.findings]
    rest = found.relation, found.delta, found.target, found.method, found.premises
    return mechanisms_read, findings, claims, rest


def rows(*roles: Role) -> list[tuple[str, Key]]:
    return [(name, key) for name, each in FORMATS.items() for key in each.keys if key.role in roles]


def test_every_key_that_acts_or_is_checked_changes_the_answer_or_is_refused() -> None:
    for name, key in rows(Role.ACTS, Role.CHECKED):
        document, value = EXAMPLES[name][key.names[0]]
        changed = outcome(name, {**document, key.names[0]: value})
        assert changed != outcome(name, document), (name, key.names[0])
        for other in key.names[1:]:  # other names say the same
            without = {each: document[each] for each in document if each not in key.names}
            first, second = ({**without, each: value} for each in (key.names[0], other))
            assert outcome(name, first) == outcome(name, second), (name, other)


def test_keys_are_harmless_only_if_they_change_nothing() -> None:
    for name, key in rows(Role.HARMLESS):
        document = HARMLESS_BASES[name]
        plain = outcome(name, document)
        assert isinstance(plain, tuple)
        for each in key.names:
            for value in (
                (3, "x", True, [1]) if key.values is None else ("SGD", "torch.optim.AdamW")
            ):
                assert outcome(name, {**document, each: value}) == plain, (name, each)


@pytest.mark.parametrize("value", ["DP-FTRL", "dp_ftrl", "sgd with tree noise", 3, {"a": 1}])
def test_an_optimizer_that_may_add_noise_of_another_kind_takes_the_proof_away(value: Any) -> None:
    answer = lint({**STATED, "optimizer": value}, delta=1e-5)
    assert answer.guarantee is not None
    assert answer.guarantee.status == "estimate"
    assert {each.pointer.split("/")[1] for each in answer.findings if each.code in UNREAD} == {
        "optimizer"
    }


def test_every_example_is_read_to_the_end() -> None:
    for name, examples in EXAMPLES.items():
        for document, _ in examples.values():
            found = outcome(name, document)
            if isinstance(found, tuple):
                assert not {code for code, _ in found[1]} & UNREAD, (name, document)


@pytest.mark.parametrize("name", FORMATS)
def test_an_unknown_key_takes_the_proof_away(name: str) -> None:
    for document in (HARMLESS_BASES[name], {"section": HARMLESS_BASES[name]}):
        if name == "nvflare" and "section" in document:
            continue  # a filter is its whole document
        plain, answer = (
            lint(each, delta=1e-5, epsilon=1e3) for each in (document, {**document, "nosie": 1})
        )
        assert plain.guarantee is not None
        assert plain.guarantee.status == "proven"
        assert "holds_but_loose" in {claim.verdict for claim in plain.claims}
        assert answer.guarantee is not None
        assert (answer.guarantee.status, answer.guarantee.certified) == ("estimate", None)
        assert {claim.verdict for claim in answer.claims} == {"not_proven"}
        (found,) = (each for each in answer.findings if each.code == "unknown-key")
        assert (found.pointer, found.severity) == ("/nosie", "error")


def test_no_more_than_twenty_unknown_keys_have_a_finding_each() -> None:
    answer = lint({**STATED, **{f"k{i}": i for i in range(500)}}, delta=1e-5)
    assert len(answer.findings) == 21
    assert answer.findings[-1].message.startswith("480 more keys")


def test_a_name_like_a_known_one_is_suggested() -> None:
    (found,) = lint({**STATED, "noise_multipler": 3}, delta=1e-5).findings
    assert found.instead.startswith("is it noise_multiplier?")
    with pytest.raises(DocumentError, match="is epcohs meant to be it"):
        lint({"noise_multiplier": 1, "sample_rate": 0.1, "epcohs": 3}, delta=1e-5)


def test_the_pages_have_the_tables_of_the_code() -> None:
    for name, (mark, render) in import_keys.TABLES.items():
        assert read_part(DOCS / name, mark) == "".join(render()).strip(), name


# --- contradictions


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({**STATED, "steps": 10}, "/steps"),
        ({**STATED, "steps": 3516 + 20}, "/steps"),
        ({**STATED, "sample_rate": 0.01}, "/sample_rate"),
        ({**STATED, "shuffle": True}, "/shuffle"),
        ({**STATED, "poisson_sampling": False}, "/poisson_sampling"),
        ({**STATED, "replacement": True}, "/replacement"),
        ({**STATED, "num_train_epochs": 3}, "/num_train_epochs"),
        ({"train": STATED, "eval": {"batch-size": 1000}}, "/eval/batch-size"),
        ({**STATED, "num_microbatches": 100}, "/num_microbatches"),
        ({**STATED, "num_microbatches": 256, "used_microbatching": True}, "/used_microbatching"),
        ({**STATED, "gradient_accumulation_steps": 500}, "/batch_size"),
        ({**STATED, "privacy_unit": "record", "records_per_user": 3}, "/privacy_unit"),
        ({**STATED, "enable_dp": False}, "/enable_dp"),
        ({**RATE, "sample_rate": 0.01, "epochs": 3}, "/steps"),
        ({**HISTORY, "steps": 10}, "/steps"),
        ({**HISTORY, "noise_multiplier": 2.0}, "/noise_multiplier"),
        ({**HISTORY, "epochs": 3}, "/epochs"),
        ({**KERAS, "poisson_sampling_in_fit": True, "sampling": "shuffled"},
         "/poisson_sampling_in_fit"),
        ({**KERAS, "train_steps": 200, "gradient_accumulation_steps": 10, "epochs": 2},
         "/train_steps"),
        ({**BANDS, "strategy": [1.0, 0.5, 0.2]}, "/num_bands"),
        ({**BUDGET, "epsilon": 0.25}, "/epsilon"),
        ({**BUDGET, "delta": 1e-8}, "/delta"),
        ("BudgetAccountant(spent_budget=[(1.0, 0), ...])", "/spent_budget/1"),
        ('{"noise_multiplier": 1, "noise_multiplier": 5, "sample_rate": 0.1, "steps": 9}', ""),
        ("noise_multiplier: 1\nnoise_multiplier: 5\nsample_rate: 0.1\nsteps: 9", ""),
        ("LocalDpMod(clipping_norm=1.0, clipping_norm=2.0)", ""),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(document: Any, pointer: str) -> None:
    with pytest.raises(DocumentError) as refused:
        lint(document, delta=1e-5)
    assert [at for at, _ in refused.value.faults] == [pointer]


@pytest.mark.parametrize("steps", [3510, 3515, 3516, 3525])
def test_steps_may_round_the_epochs_either_way(steps: int) -> None:
    assert not codes(lint({**STATED, "steps": steps}, delta=1e-5))


# --- what the keys do


def cost(mechanism: Json, relation: str = "add_or_remove_one") -> float:
    read = mechanisms.from_json(mechanism)
    return calculator.epsilon(read, 1e-5, relation=NeighbouringRelation(relation)).epsilon


def dp_sgd(noise: float = 1.1, **fields: Any) -> Json:
    sizes = {"dataset_size": 60_000, "batch_size": 256, "epochs": 15}
    return {"kind": "dp_sgd", "noise_multiplier": noise, **sizes, **fields}


def test_nothing_said_about_sampling_is_a_finding() -> None:
    """Nothing is proven then, unless the tool documents a default."""
    answer = lint(RUN, delta=1e-5)
    assert codes(answer) == {"sampling-not-stated"}
    assert answer.guarantee is not None
    assert answer.guarantee.status == "estimate"
    assert "The document does not establish that batches are Poisson samples" in answer.summary
    for claimed in (1e-3, 1e3):  # of another sampling, either may be true
        assert lint(RUN, delta=1e-5, epsilon=claimed).verdict == "not_proven"
    for document in ({"history": HISTORY["history"]}, {**RUN, "max_grad_norm": 1.0}):
        by_default = lint(document, delta=1e-5)
        assert codes(by_default) == {"sampling-by-default"}
        assert by_default.guarantee is not None
        assert by_default.guarantee.status == "proven"
    assert not codes(lint(STATED, delta=1e-5))
    assert not codes(lint({**RATE, "sample_rate": 1.0}, delta=1e-5))  # all the data


def test_microbatches_of_several_records_halve_the_noise() -> None:
    """TensorFlow Privacy halves it too: `used_microbatching` of compute_dp_sgd_privacy_lib."""
    shuffled = {**RUN, "shuffle": True}
    answer = lint({**shuffled, "num_microbatches": 16}, delta=1e-5)
    assert answer.guarantee is not None
    halved = cost(dp_sgd(0.55, sampling="shuffled"), "zero_out_one")
    assert (answer.guarantee.epsilon, answer.guarantee.status) == (halved, "proven")
    assert "microbatches" in codes(answer)
    # a record that is added may move all others into other microbatches
    poisson = lint({**STATED, "num_microbatches": 16}, delta=1e-5).guarantee
    assert poisson is not None
    assert (poisson.epsilon, poisson.status) == (cost(dp_sgd(0.55)), "estimate")
    alone = lint({**STATED, "num_microbatches": 256}, delta=1e-5)
    assert not codes(alone)


def test_microbatches_and_users_count_together() -> None:
    answer = lint({**STATED, "num_microbatches": 16, "records_per_user": 2}, delta=1e-5)
    assert answer.mechanism is not None
    assert (answer.mechanism["kind"], answer.mechanism["records"]) == ("user_level", 2)
    assert answer.mechanism["mechanism"]["noise_multiplier"] == 0.55


def test_accumulated_batches_are_one_batch_if_they_are_cut_from_one_order() -> None:
    accumulated = {**RUN, "batch_size": 64, "gradient_accumulation_steps": 4}
    shuffled = lint({**accumulated, "shuffle": True}, delta=1e-5).guarantee
    whole = lint({**RUN, "shuffle": True}, delta=1e-5).guarantee
    assert shuffled == whole
    poisson = lint({**accumulated, "sampling": "poisson"}, delta=1e-5)
    assert poisson.guarantee is not None
    assert (poisson.guarantee.epsilon, poisson.guarantee.status) == (cost(dp_sgd()), "estimate")
    assert codes(poisson) == {"accumulated-batches"}


def test_shuffled_steps_are_charged_as_the_most_epochs_that_they_can_be() -> None:
    """A loader that leaves out the last batch makes 1000 epochs of 234 000 steps, not 999."""

    def epochs(**fields: Any) -> int:
        document = {"noise_multiplier": 1.1, "batch_size": 256, "dataset_size": 60_000, **fields}
        mechanism = lint({**document, "shuffle": True}, delta=1e-5).mechanism
        read = mechanisms.from_json(mechanism)
        assert isinstance(read, mechanisms.DpSgd)
        return read.epoch_count()

    assert epochs(steps=234_000) == 1000
    assert epochs(steps=234_000, drop_last=False) == math.ceil(234_000 / 235)
    assert epochs(epochs=15) == epochs(epochs=15, steps=3510) == epochs(epochs=15, steps=3525) == 15
    half = {"batch_size": 128, "gradient_accumulation_steps": 2}  # 468 whole batches, two a step
    assert epochs(steps=234_000, **half) == 1000


def test_the_records_of_a_user_are_protected_together() -> None:
    poisson = lint({**STATED, "records_per_user": 3}, delta=1e-5).guarantee
    user = {"kind": "user_level", "records": 3, "mechanism": dp_sgd()}
    assert poisson is not None
    assert poisson.epsilon == pytest.approx(cost(user), rel=1e-9)
    shuffled = lint({**RUN, "shuffle": True, "records_per_user": 3}, delta=1e-5).guarantee
    assert shuffled is not None
    closer = cost(dp_sgd(1.1 / 3, sampling="shuffled"), "zero_out_one")
    assert shuffled.epsilon == pytest.approx(closer, rel=1e-9)
    unknown = lint({**STATED, "privacy_unit": "user"}, delta=1e-5)
    assert unknown.guarantee is not None
    assert unknown.guarantee.status == "estimate"
    assert codes(unknown) == {"privacy-unit"}


def test_steps_of_keras_that_count_batches_are_found() -> None:
    """12 epochs of batches are 768 of updates, each of 64 batches."""
    document = {**KERAS, "train_steps": 1200, "gradient_accumulation_steps": 64}
    (found,) = (x for x in lint(document, delta=1e-5).findings if x.code == "accumulated-steps")
    assert "768 epochs" in found.message
    assert "12 epochs" in found.instead
    agreed = lint({**document, "epochs": 768}, delta=1e-5)
    assert "accumulated-steps" not in codes(agreed)


def test_a_stated_seed_is_a_warning() -> None:
    assert codes(lint({**STATED, "seed": 0}, delta=1e-5)) == {"seed-stated"}
    assert not codes(lint({**STATED, "seed": None}, delta=1e-5))


def test_a_strategy_with_the_keys_of_adaptive_clipping_adapts() -> None:
    fixed = {**SERVER, "noise_multiplier": 0.9}
    named = {**fixed, "strategy": "DifferentialPrivacyServerSideAdaptiveClipping"}
    unnamed = {**fixed, "initial_clipping_norm": 0.1}
    assert lint(unnamed, delta=1e-5).mechanism == lint(named, delta=1e-5).mechanism
    assert lint(unnamed, delta=1e-5).mechanism != lint(fixed, delta=1e-5).mechanism


def test_the_strategy_inside_a_strategy_is_read() -> None:
    text = "DifferentialPrivacyServerSideFixedClipping({}, 1.0, 1.0, 20)"

    def read(inner: str) -> importing.Answer:
        document = importing.parse_text(text.format(inner)) | {"num_rounds": 3, "num_clients": 100}
        return lint(document, delta=1e-5)

    assert "client-count-mismatch" in codes(read("FedAvg(fraction_train=0.1)"))
    assert "client-count-mismatch" not in codes(read("FedAvg(fraction_train=0.2)"))
    (unknown,) = (x for x in read("FedAvg(fraction=0.1)").findings if x.code == "unknown-key")
    assert unknown.pointer == "/strategy/fraction"
    assert "unused-key" in codes(read("FedMedian()"))  # it does not average


def test_a_round_of_an_unknown_number_of_clients_proves_nothing() -> None:
    """Ten clients of a round that is planned for a hundred have a tenth of the noise."""
    planned = {**SERVER, "num_sampled_clients": 100}
    alone = lint(planned, delta=1e-5).guarantee
    assert alone is not None
    assert alone.status == "proven"
    for drawn in ({"fraction_fit": 0.1}, {"fraction_fit": 0.0, "min_fit_clients": 10}):
        answer = lint({**planned, **drawn}, delta=1e-5)
        assert answer.guarantee is not None
        assert answer.guarantee.status == "estimate"
        assert "100 clients" in answer.summary


def test_two_sections_with_a_length_may_be_two_runs() -> None:
    """Both have the same cost, and together they cost more than one."""
    run = {**RATE, "sample_rate": 0.01}
    for twice in ({"first": run, "second": run}, {**run, "second": {"steps": 1000}}):
        answer = lint({**twice, "sampling": "poisson"}, delta=1e-5)
        assert codes(answer) == {"several-runs"}
        assert answer.guarantee is not None
        assert answer.guarantee.status == "estimate"
    agreed = {"data": {"batch_size": 256}, "run": STATED, "trainer": {"noise_multiplier": 1.1}}
    assert not codes(lint(agreed, delta=1e-5))


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_total_of_spends_is_that_of_their_decimals(delta: float) -> None:
    """In floating point .1 + .7 is below .8, which is what the spends cost."""
    answer = lint({"spent_budget": [[0.1, delta], [0.7, delta]]}, delta=1e-5)
    assert (answer.verdict, answer.claims[0].epsilon) == ("holds", 0.8)


# --- text


def test_one_run_is_the_same_in_every_form_of_text() -> None:
    forms = {
        "JSON": json.dumps(STATED | {"delta": 1e-5}),
        "TOML": 'noise_multiplier = 1.1\nbatch_size = 256\ndataset_size = 60_000\nepochs = 15\n'
        'sampling = "poisson"\ndelta = 1e-5',
        "YAML": "noise_multiplier: 1.1\nbatch_size: 256\ndataset_size: 60_000\nepochs: 15\n"
        "sampling: poisson # as in the paper\ndelta: 1e-5",
        "YAML, sections": "---\nprivacy:\n  noise-multiplier: 1.1\n  delta: 1e-05\n"
        "  sampler: &s {sampling: poisson}\ndata: {batch_size: 256, dataset_size: 60000}\n"
        "train:\n  <<: *s\n  epochs: 15.0\n",
        "Python": repr(STATED | {"delta": 1e-5}),
        "constructor": "Config(privacy=dict(" + "noise_multiplier=1.1, batch_size=256, "
        "dataset_size=60000, epochs=15, sampling='poisson', delta=1e-5))",
    }  # fmt: skip
    expected = lint(STATED, delta=1e-5)
    for name, text in forms.items():
        answer = lint(text)
        assert answer.mechanism == expected.mechanism, name
        assert answer.guarantee is not None, name
        assert answer.guarantee.epsilon == expected.guarantee.epsilon  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("-3.5E2", -350.0), (".5", 0.5), ("3.", 3.0), ("60_000", 60000),
     ("yes", True), ("Off", False), ("~", None), ("", None), ("010", "010"), ("1:30", "1:30"),
     ("2024-01-01", "2024-01-01"), (".inf", ".inf"), (".nan", ".nan"), ("0x10", "0x10")],
)  # fmt: skip
def test_scalars_of_yaml_are_those_of_version_1_2(text: str, value: Any) -> None:
    found = importing.parse_text(f"a: {text}\nb:\n- 1")["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.system ['true']", "a: !b 1", "? [1]\n: 2", "---\na: 1\n---\nb: 2",
     "a: &a [*a]", "a: &a [1]\nb: &b [*a,*a]\n" + "c: &c [*b,*b]\n" * 1 + "d: [" + "*c," * 60_000 +
     "]",
     "a: &a {x: 1}\n" + "".join(f"{c}: &{c}\n  <<: [{', '.join(['*' + b] * 9)}]\n"
                               for b, c in zip("abcdefghijkl", "bcdefghijklm", strict=True)),
     "a: 1\n<<: 3", "k: " + "[" * 2000 + "]" * 2000, "text", "a: 1\n" * 200_000],
    ids=["tag", "own tag", "list as key", "two documents", "cycle", "many aliases", "merges",
         "merged number", "deep", "text", "long"],
)  # fmt: skip
def test_hostile_yaml_is_refused_soon(text: str) -> None:
    with pytest.raises(DocumentError):
        lint(text, delta=1e-5)


# --- newer events of dp_accounting


@pytest.mark.parametrize(
    ("text", "mechanism"),
    [
        ("EpsilonDeltaDpEvent(1.0, 1e-6)", {"kind": "approximate_dp", "epsilon": 1.0,
                                             "delta": 1e-6}),
        ("ExponentialMechanismDpEvent(epsilon=0.5)", {"kind": "exponential", "epsilon": 0.5}),
        ("PermuteAndFlipDpEvent(0.5)", {"kind": "permute_and_flip", "epsilon": 0.5}),
        ("DiscreteGaussianDpEvent(sigma=4.0, sensitivity=2.5, dimension=1)",
         {"kind": "discrete_gaussian", "noise_std": 4.0, "sensitivity": 2}),
        ("ZCDpEvent(rho=0.0, xi=0.25)", {"kind": "approximate_dp", "epsilon": 0.25, "delta": 0.0}),
        ("ZCDpEvent(0.05)", {"kind": "zcdp", "rho": 0.05}),
        ("MixtureOfGaussiansDpEvent(3.0, [0, 1.5], [0.99, 0.01])",
         {"kind": "gaussian_mixture", "noise_multiplier": 2.0, "shifts": [0.0, 1.0],
          "probabilities": [0.99, 0.01]}),
        ("MixtureOfGaussiansDpEvent(3.0, [1.5, 4.5, 1.5], [0.25, 0.5, 0.25])",
         {"kind": "gaussian_mixture", "noise_multiplier": 2.0, "shifts": [1.0, 3.0],
          "probabilities": [0.5, 0.5]}),
        ("MixtureOfGaussiansDpEvent(3.0, range(0, 3), [0.25, 0.5, 0.25])",
         {"kind": "gaussian_mixture", "noise_multiplier": 3.0, "shifts": [0.0, 1.0, 2.0],
          "probabilities": [0.25, 0.5, 0.25]}),
    ],
)  # fmt: skip
def test_newer_events_are_kinds_of_this_service(text: str, mechanism: Json) -> None:
    answer = lint(text, delta=1e-5)
    assert answer.mechanism == mechanism
    assert codes(answer) == {"relation-not-stated"}


def test_several_dimensions_of_discrete_gaussian_noise_are_charged_as_zcdp() -> None:
    for dimension in ("", ", dimension=3", ", dimension=None"):
        found = lint(f"DiscreteGaussianDpEvent(4.0, 2.0{dimension})", delta=1e-5).mechanism
        assert found is not None
        assert found["kind"] == "zcdp"
        assert 0.125 <= found["rho"] < 0.125 * (1 + 1e-8)


def test_zcdp_with_xi_costs_between_its_parts_and_their_sum() -> None:
    """δ ≤ inf over α of e^((α−1)(ξ+ρα−ε))·(1−1/α)^α/(α−1), at a grid finer than the service's."""
    rho, xi = 0.05, 0.1
    answer = lint(f"SelfComposedDpEvent(ZCDpEvent({rho}, {xi}), 3)", delta=1e-5)
    assert answer.guarantee is not None
    orders = [1 + 10 ** (i / 2000 - 3) for i in range(16_000)]
    best = min(
        3 * (xi + rho * a) + math.log((a - 1) / a) - (math.log(1e-5) + math.log(a)) / (a - 1)
        for a in orders
    )
    assert best * (1 - 1e-9) <= answer.guarantee.epsilon < 1.001 * best
    assert answer.guarantee.status == "proven"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("means", "chances"),
    [
        ([0, 1, 2, 3], [0.729, 0.243, 0.027, 0.001]),
        ([0.0, 0.3, 2.0], [0.6, 0.35, 0.05]),
        ([1.0, 1.0, 2.0], [0.3, 0.3, 0.4]),
    ],
)
def test_a_mixture_costs_what_dp_accounting_says(means: list[float], chances: list[float]) -> None:
    peer = importlib.import_module("dp_accounting")
    event = peer.dp_event.MixtureOfGaussiansDpEvent(1.5, means, chances)
    answer = lint(repr(event), delta=1e-5)
    theirs = peer.pld.PLDAccountant().compose(event).get_epsilon(1e-5)
    assert answer.guarantee is not None
    assert answer.guarantee.epsilon == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ("MixtureOfGaussiansDpEvent(1e-5, [0, 1, 2], [0.25, 0.45, 0.3])", ""),
        ("MixtureOfGaussiansDpEvent(2.0, [0, 1], [0.5, 0.4])", "/sampling_probs"),
        ("MixtureOfGaussiansDpEvent(2.0, range(0, 1000000), [1.0])", "/sensitivities/end"),
        ("MixtureOfGaussiansDpEvent(2.0, [0, 1], [1.0])", "/sampling_probs"),
        ("EpsilonDeltaDpEvent(-1.0, 0.1)", ""),
        ("DiscreteGaussianDpEvent(1.0, 1.0, 0)", "/dimension"),
        ("ZCDpEvent(0.1, -1.0)", "/xi"),
        ("PermuteAndFlipDpEvent()", "/epsilon"),
    ],
)
def test_bad_newer_events_are_refused(text: str, pointer: str) -> None:
    with pytest.raises(DocumentError) as refused:
        lint(text, delta=1e-5)
    assert [at for at, _ in refused.value.faults] == [pointer]


# --- diffprivlib


def test_the_total_of_a_budget_accountant_is_a_claim() -> None:
    """The example in the documentation of `BudgetAccountant`: 20 queries of 0.05 at slack 1e-3."""
    document = {"spent_budget": [[0.05, 0]] * 20, "slack": 1e-3}
    answer = lint(document)
    (claim,) = answer.claims
    assert claim.epsilon == pytest.approx(0.7613352285668463, rel=1e-12)
    assert claim.delta == 1e-3
    assert answer.verdict == "holds_but_loose"
    spent = {"kind": "repeated", "count": 20, "mechanism":
             {"kind": "approximate_dp", "epsilon": 0.05, "delta": 0.0}}  # fmt: skip
    assert answer.mechanism == {"kind": "composed", "mechanisms": [spent]}
    text = "BudgetAccountant(epsilon=1.5, spent_budget=[(1.0, 0), (0.25, 0)])"
    assert lint(text, delta=1e-9).verdict == "holds"
    pure = lint(text)  # at δ = 0, which the spends have
    assert (pure.verdict, pure.guarantee and pure.guarantee.epsilon) == ("holds", 1.25)
    assert "at δ = 0 holds" in pure.summary


# --- OpenDP


@pytest.mark.parametrize(
    ("text", "mechanism", "delta"),
    [  # as OpenDP 0.16 prints (measurement.output_measure, measurement.map(1.0))
        ("(MaxDivergence, 0.1)", {"kind": "approximate_dp", "epsilon": 0.1, "delta": 0.0}, 0.0),
        ("(Approximate(MaxDivergence), (0.43, 1e-06))",
         {"kind": "approximate_dp", "epsilon": 0.43, "delta": 1e-6}, 1e-6),
        ("(ZeroConcentratedDivergence, 0.005)", {"kind": "zcdp", "rho": 0.005}, 1e-5),
        # as earlier versions print them, and as functions of the order written out
        ("(MaxDivergence(), 0.1)", {"kind": "approximate_dp", "epsilon": 0.1, "delta": 0.0}, 0.0),
        ("(FixedSmoothedMaxDivergence(), (0.43, 1e-06))",
         {"kind": "approximate_dp", "epsilon": 0.43, "delta": 1e-6}, 1e-6),
        ("(RenyiDivergence(), [(2, 0.1), (8, 0.5)])",
         {"kind": "rdp", "orders": [2, 8], "divergences": [0.1, 0.5]}, 1e-5),
    ],
)  # fmt: skip
def test_a_measure_of_opendp_is_what_it_says(text: str, mechanism: Json, delta: float) -> None:
    answer = lint(text, delta=None if delta != 1e-5 else delta)
    assert answer.mechanism == mechanism
    assert codes(answer) == {"relation-not-stated"}
    assert answer.guarantee is not None
    assert (answer.guarantee.status, answer.guarantee.delta) == ("proven", delta)
    measure, distance = importing.parse_text(text)
    assert lint({"measure": measure, "d_out": distance}, delta=answer.guarantee.delta).mechanism


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({"measure": "SmoothedMaxDivergence", "d_out": 0.1}, "/measure"),
        ({"measure": "Approximate(ZeroConcentratedDivergence)", "d_out": [0.1, 1e-6]}, "/measure"),
        ({"measure": 3, "d_out": 0.1}, "/measure"),
        ({"measure": "MaxDivergence", "d_out": [0.1, 1e-6]}, "/d_out"),
        ({"measure": "MaxDivergence", "d_out": -0.1}, "/d_out"),
        ({"measure": "MaxDivergence", "d_out": "Infinity"}, "/d_out"),
        (["FixedSmoothedMaxDivergence", 0.1], "/1"),
        (["FixedSmoothedMaxDivergence", [0.1, 1]], "/1/1"),
        (["RenyiDivergence", []], "/1"),
        (["RenyiDivergence", [[2, 0.1, 3]]], "/1/0"),
        (["RenyiDivergence", [[1, 0.1]]], "/1"),
        ({"d_out": 0.1}, "/measure"),
    ],
)
def test_a_measure_without_its_distance_is_refused(document: Any, pointer: str) -> None:
    with pytest.raises(DocumentError) as refused:
        lint(document, delta=1e-5)
    assert refused.value.faults[0][0] == pointer


# --- the verdict


@pytest.mark.parametrize(
    ("document", "epsilon", "verdict", "sentence"),
    [
        (HISTORY, 4.33, "holds_but_loose",
         "The claimed ε = 4.33 at δ = 1e-5 holds but is loose: the true ε is at most 1.516."),
        (HISTORY, 1.53, "holds", "The claimed ε = 1.53 at δ = 1e-5 holds."),
        (HISTORY, 1.5, "too_small",
         "The claimed ε = 1.5 at δ = 1e-5 is too small: the true ε is at least 1.515."),
        ({**RUN, "shuffle": True}, 3.0, "not_proven",
         "The claimed ε = 3 at δ = 1e-5 is not proved: ε ≤ 20.57 is."),
        ({**STATED, "nosie": 1}, 3.0, "not_proven",
         "The claimed ε = 3 at δ = 1e-5 is not proved. The document does not establish that the "
         "keys that were not read change nothing."),
        ({**HISTORY, "mechanism": "rdp"}, None, "holds_but_loose",
         "The tool's ε = 1.71175 at δ = 1e-5 holds but is loose: the true ε is at most 1.516."),
        (STATED, None, "nothing_claimed", "Nothing is claimed: ε ≤ 1.134 is proved at δ = 1e-5."),
        ({"path": "SVTPrivacy", "args": {}}, None, "not_proven",
         "No ε is proved: no mechanism with a guarantee is described."),
    ],
)  # fmt: skip
def test_the_verdict_is_the_same_everywhere(
    document: Json, epsilon: float | None, verdict: str, sentence: str
) -> None:
    given: Json = {"delta": 1e-5} | ({} if epsilon is None else {"epsilon": epsilon})
    endpoint = ENDPOINTS["/v1/import"]
    body = endpoint.request.model_validate({"document": document, **given})
    answer = endpoint.answer(body).model_dump(mode="json")
    assert (answer["verdict"], answer["summary"]) == (verdict, sentence)
    python = import_document(document=document, **given)
    assert (python.verdict, python.summary) == (verdict, sentence)
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    printed = CliRunner().invoke(
        command_line, ["import", "-", *options], input=json.dumps(document), terminal_width=500
    )
    assert sentence in " ".join(printed.output.split())
