"""Experiments at the papers' own settings: their epochs, learning rates, networks and data.

A learning rate that a paper prints is used as it is. Where the paper prints none, the one that was
tuned for the same method on MNIST or Adult is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from training_client.lab.papers.experiments import (
    BETA_OPTIONS,
    EXPERIMENTS,
    LOT_CLIP,
    PAPER_CLAIMS,
    PAPER_SCHEDULE,
    Experiment,
    Method,
    PaperResult,
    make_adult_experiments,
    make_method,
)

EPOCHS: Final = {noise: epochs for noise, epochs, _ in PAPER_CLAIMS}  # papers/001 §5.2
EPOCH: Final = 100  # steps, at q = 0.01
# steps at which ε of the training and the projection is 0.5 at δ = 1e-5, by σ and by lot;
# tests/unit/test_paper_experiments.py asks the service
STEPS_BY_NOISE: Final = {4.0: 702, 7.0: 7298}
STEPS_BY_LOT: Final = {200: 93_065, 800: 5797}
# what methods with a cost of their own may spend, by DP-SGD's σ, so that no ε is larger than
# DP-SGD's after as many epochs; tests/unit/test_paper_results.py asks the service
EXP_NOISES: Final = {2.0: 3.47, 4.0: 6.84, 8.0: 13.63}  # σ of the first tenth of the steps
RELEVANCE_NOISE: Final = 30.0
ADPPL_NOISES: Final = {2.0: 2.002, 4.0: 4.04, 8.0: 9.13}
AGD_BUDGETS: Final = {2.0: 0.3224, 4.0: 0.02675, 8.0: 0.001819}  # ρ
AGD_BUDGET_CIFAR: Final = 0.04863  # by σ = 6 and 2 500 steps with q = .04
WATCHED_STEPS: Final = (100, 1000)  # papers/000 Figure 4 (c) and (d)
AGD_STEPS: Final = 30  # full passes; half of the budget is for the selections


def _adadp(state: str, setting: str, rate: float, **options: float) -> Method:
    """Return AdaDP with a setting in its label, and a learning rate that papers/000 prints."""
    label = "adadp" if state == "privatised" else f"adadp {state}"
    return make_method(
        "adadp",
        LOT_CLIP,
        f"{label}, {setting}" if setting else label,
        state=state,
        learning_rate=rate,
        options=BETA_OPTIONS | options,
    )


_SCHEDULED: Final = make_method(
    "dp_sgd", LOT_CLIP, "dp_sgd, schedule", learning_rate=0.1, schedule=PAPER_SCHEDULE
)
_STATES: Final = ("raw", "privatised")


def _publish(
    task: str,
    section: str,
    place: str,
    method: Method,
    noise: float,
    steps: int,
    **settings: object,
) -> Experiment:
    """Return an experiment whose learning rate is the method's own, as a paper prints it."""
    known: dict[str, object] = {"learning_rate": method.learning_rate, "section": section}
    if method.tuned_as:
        known["learning_rate"] = None
    return Experiment(
        task,
        method,
        noise,
        steps,
        PaperResult(place),
        **known | settings,  # type: ignore[arg-type]
    )


def _agd(rho: float, clip_norm: float = LOT_CLIP, label: str = "agd") -> Method:
    """Return AGD, whose step sizes are its own."""
    return make_method("agd", clip_norm, label, learning_rate=1.0, rho=rho)


def _dp_opt(state: str, clip_norm: float = LOT_CLIP) -> Method:
    """Return DpOpt with DP-SGD's learning rates (papers/000 §IV-C)."""
    label = "dp_opt" if state == "privatised" else f"dp_opt {state}"
    return make_method(
        "dp_opt", clip_norm, label, state=state, learning_rate=0.1, schedule=PAPER_SCHEDULE
    )


def _make_adadp_experiments() -> Iterator[Experiment]:
    """Yield the experiments of papers/000 on MNIST, with its learning rates."""
    for noise, epochs in EPOCHS.items():
        methods = (
            _SCHEDULED,
            *(_adadp(state, "", 0.002) for state in _STATES),
            *(_dp_opt(state) for state in _STATES),
        )
        for method in methods:
            yield _publish(
                "mnist", "figure-2", "papers/000 Figure 2", method, noise, epochs * EPOCH
            )
        agd = _agd(AGD_BUDGETS[noise])
        place = "papers/000 Figure 2"
        yield _publish("mnist", "figure-2", place, agd, noise, AGD_STEPS, sample_rate=1.0)
    for method in (_SCHEDULED, _adadp("raw", "", 0.002), _dp_opt("raw")):
        yield _publish(
            "mnist", "table-2", "papers/000 Table II", method, 8.0, 1000, sample_rate=120 / 60_000
        )
    agd = _agd(AGD_BUDGETS[8.0])
    yield _publish(
        "mnist", "table-2", "papers/000 Table II", agd, 8.0, AGD_STEPS, sample_rate=120 / 60_000
    )
    for state in _STATES:
        label = "adan raw" if state == "raw" else "adan"
        adan = make_method(
            "adan", LOT_CLIP, label, state=state, learning_rate=0.1, options=BETA_OPTIONS
        )
        yield _publish("mnist", "figure-4", "papers/000 Figure 4", adan, 8.0, 3000)
    place = "papers/000 Figure 4"
    raw = _adadp("raw", "", 0.002)
    yield _publish("mnist", "figure-4", place, raw, 8.0, 1000, watched=WATCHED_STEPS)
    adal = make_method("adal", LOT_CLIP, learning_rate=0.001)
    yield _publish("mnist", "figure-4", "papers/000 Figure 4", adal, 8.0, 3000)
    for state in _STATES:
        yield from _vary_adadp(state)
        printed = _adadp(state, "η = 0.002", 0.002)
        yield _publish("mnist", "table-1", "papers/000 Table I", printed, 3.0, 3000, delta=1e-4)
    yield _publish("mnist", "table-1", "papers/000 Table I", _SCHEDULED, 3.0, 26_800, delta=1e-4)


def _vary_adadp(state: str) -> Iterator[Experiment]:
    """Yield AdaDP with one setting changed at a time (papers/000 Figure 5)."""
    place = "papers/000 Figure 5"
    for rate in (0.0008, 0.002, 0.005):
        yield _publish("mnist", "figure-5", place, _adadp(state, f"η = {rate:g}", rate), 8.0, 3000)
    for beta in (0.8, 3.0):
        yield _publish(
            "mnist", "figure-5", place, _adadp(state, f"β = {beta:g}", 0.002, beta=beta), 8.0, 3000
        )
    for noise, steps in STEPS_BY_NOISE.items():
        method = _adadp(state, "ε = 0.5", 0.002)
        yield _publish("mnist", "figure-5-noise", place, method, noise, steps)
    for lot, steps in STEPS_BY_LOT.items():
        method = _adadp(state, f"L = {lot}", 0.002)
        yield _publish("mnist", "figure-5-lot", place, method, 8.0, steps, sample_rate=lot / 60_000)


_RULES: Final = ("pi_adam", "pi_rmsprop", "pi_adagrad")


def _pigdo(rule: str, label: str = "", **changes: object) -> Method:
    """Return a PIGDO method with privatised state and the learning rate tuned on MNIST."""
    settings: dict[str, object] = {"clip_norm": LOT_CLIP, "tuned_as": rule, "label": label}
    return make_method(rule, **settings | changes)  # type: ignore[arg-type]


def _pigdo_as_in_paper(rule: str) -> Method:
    """Return a PIGDO method with raw state and own squares; η = 0.001 is printed for PIAdam."""
    return make_method(
        rule,
        LOT_CLIP,
        f"{rule} raw, own squares",
        state="raw",
        learning_rate=0.001,
        options={"own_squares": True},
    )


def _compare_with_pigdo(task: str, section: str, steps: dict[float, int]) -> Iterator[Experiment]:
    """Yield PIAdam, AdaDP and DP-SGD at each noise multiplier (papers/001)."""
    place = f"papers/001 {section.replace('figure-', 'Figure ')}"
    methods = (
        _pigdo_as_in_paper("pi_adam"),
        _pigdo("pi_adam"),
        _adadp("raw", "", 0.002),
        _adadp("privatised", "", 0.002),
        replace(make_method("dp_sgd", LOT_CLIP), tuned_as="dp_sgd"),
    )
    for noise, count in steps.items():
        for method in methods:
            yield _publish(task, section, place, method, noise, count)


def _make_pigdo_experiments() -> Iterator[Experiment]:
    """Yield the experiments of papers/001."""
    place = "papers/001 §5.1"
    plain = make_method("non_private", LOT_CLIP, learning_rate=0.5)
    for task, epochs in (
        ("mnist-784", 100), ("mnist-train", 100), ("fashion-784", 300), ("fashion-train", 300),
    ):  # fmt: skip
        yield _publish(task, "section-5.1", place, plain, 1.0, epochs * EPOCH)
    slow = replace(plain, learning_rate=0.05)
    yield _publish("cifar10-cnn", "section-5.1", place, slow, 1.0, 500 * 83)
    for task in ("mnist-784", "cifar10-cnn", "fashion-784"):
        for rule in _RULES:
            for method in (_pigdo_as_in_paper(rule), _pigdo(rule)):
                yield _publish(task, "figure-3", "papers/001 Figure 3", method, 4.0, 3000)
    steps = {noise: epochs * EPOCH for noise, epochs in EPOCHS.items()}
    yield from _compare_with_pigdo("mnist-784", "figure-5", steps)
    for noise, count in steps.items():
        column = f"σ = {noise:g}"
        exp = make_method(
            "dp_sgd", LOT_CLIP, "exp", tuned_as="dp_sgd", noise_schedule=f"decay:0.1:{count // 10}"
        )
        adppl = make_method("adppl", LOT_CLIP, tuned_as="dp_sgd", relevance_noise=RELEVANCE_NOISE)
        for task, section, place in (
            ("mnist-784", "figure-5", "papers/001 Figure 5"),
            ("cifar10-cnn", "figure-8", "papers/001 Figure 8"),
        ):
            yield _publish(task, section, place, exp, EXP_NOISES[noise], count, named_column=column)
        place = "papers/001 Figure 5"
        yield _publish(
            "mnist-784", "figure-5", place, adppl, ADPPL_NOISES[noise], count, named_column=column
        )
    yield from _compare_with_pigdo("cifar10-cnn", "figure-8", steps)
    yield from _compare_with_pigdo("fashion-784", "figure-9", dict.fromkeys(EPOCHS, 3000))
    for rule in _RULES:
        yield from _vary_pigdo(rule)


def _vary_pigdo(rule: str) -> Iterator[Experiment]:
    """Yield a PIGDO method with one setting changed at a time (papers/001 Figure 7)."""
    place = "papers/001 Figure 7"
    for hidden in (200, 1600):
        method = _pigdo(rule, f"{rule}, {hidden} units")
        yield _publish("mnist-784", "figure-7", place, method, 4.0, 3000, hidden=hidden)
    for clip_norm in (1.0, 8.0):
        method = _pigdo(rule, f"{rule}, C = {clip_norm:g}", clip_norm=clip_norm)
        yield _publish("mnist-784", "figure-7", place, method, 4.0, 3000)
    if rule == "pi_adam":
        for noise in (2.0, 8.0):
            yield _publish("mnist-784", "figure-7", place, _pigdo(rule), noise, 3000)
    method = _pigdo(rule, f"{rule}, L = 1200")
    yield _publish("mnist-784", "figure-7", place, method, 4.0, 1500, sample_rate=0.02)


def _make_cifar_experiments() -> Iterator[Experiment]:
    """Yield the experiments of papers/000 on CIFAR-10, whose convolutions are trained publicly."""
    methods = (
        make_method("dp_sgd", 3.0, learning_rate=0.052),
        *(replace(_adadp(state, "", 0.001), clip_norm=3.0) for state in _STATES),
        *(replace(_dp_opt(state, 3.0), learning_rate=0.052, schedule=None) for state in _STATES),
    )
    agd = _agd(AGD_BUDGET_CIFAR, 3.0)
    for section, place, noise in (
        ("figure-3", "papers/000 Figure 3", 6.0), ("table-1", "papers/000 Table I", 4.0),
    ):  # fmt: skip
        for method in methods if section == "figure-3" else methods[:3]:
            delta = 1e-4 if section == "table-1" else None
            yield _publish("cifar10", section, place, method, noise, 2500, delta=delta)
    for method in (methods[0], methods[1], methods[3]):
        yield _publish(
            "cifar10", "table-2", "papers/000 Table II", method, 6.0, 1000, sample_rate=32 / 50_000
        )
    for section, place, rate in (
        ("figure-3", "papers/000 Figure 3", 1.0), ("table-2", "papers/000 Table II", 32 / 50_000),
    ):  # fmt: skip
        yield _publish("cifar10", section, place, agd, 6.0, AGD_STEPS, sample_rate=rate)
    for name, rate, state in (
        ("adal", 0.001, "privatised"), ("adan", 0.05, "raw"), ("adan", 0.05, "privatised"),
    ):  # fmt: skip
        label = f"{name} raw" if state == "raw" else name
        chosen = None if name == "adal" else state
        method = make_method(name, 3.0, label, learning_rate=rate, state=chosen)
        yield _publish("cifar10", "figure-4", "papers/000 Figure 4", method, 6.0, 2500)


def _make_objective_experiments() -> Iterator[Experiment]:
    """Yield the experiments of papers/003 on its other data, and those of the final objective."""
    adult = tuple(make_adult_experiments())
    for task in ("bank", "ipums", "adult-objective", "bank-objective", "ipums-objective"):
        figure = 2 if task.endswith("objective") else 1
        paper_result = PaperResult(f"papers/003 Figure {figure}: curves only")
        for each in adult:
            if figure == 1 or each.method.label in ("a_ddp", "non_private"):
                yield replace(each, task=task, paper_result=paper_result)


# clip norm and learning rate by method: papers/004 Table 5
_TABLE_5: Final[dict[str, dict[str, tuple[float, float]]]] = {
    "imdb": {
        "dp_sgd": (0.1, 1.0), "dp_adam": (0.02, 0.1), "dp_rmsprop": (0.05, 0.1),
        "adadps rmsprop": (2.0, 0.5), "adadps adam": (2.0, 1.0),
    },
    "imdb-lstm": {
        "dp_sgd": (0.1, 0.1), "dp_adam": (0.1, 0.001), "dp_rmsprop": (0.1, 0.001),
        "adadps rmsprop": (0.2, 0.1), "adadps adam": (0.2, 0.05),
    },
    "stackoverflow": {
        "dp_sgd": (0.1, 1.0), "dp_adam": (0.1, 0.01), "dp_rmsprop": (0.2, 0.01),
        "adadps rmsprop": (1.0, 0.5), "adadps adam": (1.0, 0.5),
    },
    "autoencoder-full": {
        "dp_sgd": (0.05, 0.5), "dp_adam": (0.01, 0.001), "dp_rmsprop": (0.01, 0.001),
        "adadps rmsprop": (3.0, 0.005), "adadps adam": (3.0, 0.005),
    },
    "mnist-64": {
        "dp_sgd": (0.5, 0.01), "dp_adam": (0.5, 0.001), "dp_rmsprop": (0.5, 0.001),
        "adadps rmsprop": (2.0, 0.005), "adadps adam": (2.0, 0.005),
    },
}  # fmt: skip
_TABLE_5["imdb-tfidf"] = _TABLE_5["imdb"]
# noise multipliers, and the steps of the epochs in the authors' code at batches of 64
_SIDE_INFORMATION_RUNS: Final = {
    "imdb": ((1.0,), 32 * 391),
    "imdb-tfidf": ((1.0,), 32 * 391),
    "imdb-lstm": ((1.0,), 32 * 391),
    "stackoverflow": ((0.95,), 50 * 3846),
    "autoencoder-full": ((1.0, 0.75), 80 * 938),
    "mnist-64": ((1.0,), 10 * 938),
}
_ALIKE: Final = {  # methods that use another's clip norm and learning rate
    "dp_sgd, warm start": "dp_sgd",
    "dp_r_pub": "dp_rmsprop",
    "dp_adam_pub": "dp_adam",
    "pda_dpmd": "dp_sgd",
}
_MIRROR_TASKS: Final = ("imdb", "stackoverflow", "autoencoder-full")  # papers/004 Table 2
_PUBLIC_ROWS: Final = {"imdb": 250, "stackoverflow": 2460}


def _side_information_method(task: str, label: str) -> Method:
    """Return a method of papers/004 with the settings of its Table 5."""
    name, _, rest = label.partition(" ")
    clip_norm, rate = _TABLE_5[task][_ALIKE.get(label, label)]
    options = {"statistic": rest} if name == "adadps" else {}
    name = name.removesuffix(",")
    return make_method(
        name, clip_norm, label, learning_rate=rate, options=options,
        warm_start=label.endswith("warm start"),
    )  # fmt: skip


def _list_side_information_methods(task: str) -> Iterator[Method]:
    """Yield the methods that papers/004 compares on a task."""
    for label in (*_TABLE_5[task], *_ALIKE):
        if label != "pda_dpmd" or task in _MIRROR_TASKS:
            yield _side_information_method(task, label)
    if task not in ("imdb", "imdb-tfidf", "stackoverflow"):
        return
    rmsprop = _side_information_method(task, "adadps rmsprop")
    yield replace(
        rmsprop, label="adadps frequencies", options={}, state="privatised", side_information=True
    )
    yield replace(rmsprop, label="adadps rmsprop, raw public", has_raw_public=True)
    for share, words in ((5, "a fifth"), (25, "a 25th")):
        if task in _PUBLIC_ROWS:
            rows = _PUBLIC_ROWS[task] // share
            yield replace(rmsprop, label=f"adadps rmsprop, {words} public", public_rows=rows)


def _make_side_information_experiments() -> Iterator[Experiment]:
    """Yield the experiments of papers/004 at its own settings."""
    for task, (noises, steps) in _SIDE_INFORMATION_RUNS.items():
        for noise in noises:
            for method in _list_side_information_methods(task):
                yield _publish(task, "main", "papers/004 Table 6", method, noise, steps)
    for task, rate in (
        ("imdb", 1.0), ("imdb-lstm", 1.0), ("stackoverflow", 1.0), ("autoencoder-full", 0.1),
    ):  # fmt: skip
        steps = _SIDE_INFORMATION_RUNS[task][1]
        preconditioned = _TABLE_5[task]["adadps rmsprop"][1]
        for label, own_rate in (
            ("non_private", rate), ("non_private adam", 0.001),
            ("non_private adas", preconditioned), ("non_private rmsprop", 0.001),
        ):  # fmt: skip
            method = make_method("non_private", 1.0, label, learning_rate=own_rate)
            yield _publish(task, "table-9", "papers/004 Table 9", method, 1.0, steps)


PUBLISHED: Final = (
    *_make_adadp_experiments(),
    *_make_pigdo_experiments(),
    *_make_cifar_experiments(),
    *_make_objective_experiments(),
    *_make_side_information_experiments(),
)
ALL_EXPERIMENTS: Final = (*EXPERIMENTS, *PUBLISHED)
