"""The experiments as data: task, method, noise, steps, and the paper's result to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from training_client.lab.schedules import parse_schedule
from training_client.optimizers import OPTIMIZERS
from training_client.plan import Schedule

GRID: Final = (0.1, 0.3, 1.0, 3.0, 10.0)  # factors of a method's own learning rate
FINE_GRID: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
TUNING_SEED: Final = 0  # not used for results
FIRST_SEED: Final = 1
PASSES: Final = 10  # over the data, by methods that cycle through the records


@dataclass(frozen=True)
class PaperResult:
    """A result that a paper reports, with its source.

    Attributes:
        source: the paper and its table or figure.
        value: the number; None if the paper has only a curve, or nothing.
        remark: the differences from the run here.
    """

    source: str
    value: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class LinearDecay:
    """A learning rate that decays linearly to a constant.

    Attributes:
        share: the final learning rate divided by the first.
        steps: number of steps until then.
    """

    share: float
    steps: int

    def factor(self, done: int) -> float:
        """Return the learning rate after `done` steps, relative to the first."""
        return 1 - (1 - self.share) * min(1.0, done / self.steps)


@dataclass(frozen=True)
class Method:
    """A training method to compare: an optimizer and its settings.

    Attributes:
        label: name in tables and plots.
        optimizer: name in the registry, or `non_private`.
        learning_rate: the middle of its grid.
        clip_norm: C.
        state: source of the optimizer state; the registry's default if None.
        options: further options of the optimizer.
        warm_start: train without noise on the public examples first.
        in_passes: cycle through the records instead of sampling them.
        side_information: divide gradients by the frequency of each input.
        separate_users: simulate each of the task's users, instead of all as one.
        schedule: schedule of the learning rate; constant if None.
        tuned_as: label of the method whose tuned learning rate is used; its own if empty.
        public_rows: number of public examples; the task's if None.
        has_raw_public: the private examples stand in for public ones, as an upper bound.
        noise_schedule: schedule of the noise, as text of `lab.schedules`; constant if empty.
        relevance_noise: σ of the release of the inputs' relevances (ADPPL); 0 for none.
        rho: what AGD may spend, in zero-concentrated differential privacy; 0 for other methods.
    """

    label: str
    optimizer: str
    learning_rate: float
    clip_norm: float
    state: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    warm_start: bool = False
    in_passes: bool = False
    side_information: bool = False
    separate_users: bool = False
    schedule: LinearDecay | None = None
    tuned_as: str = ""
    public_rows: int | None = None
    has_raw_public: bool = False
    noise_schedule: str = ""
    relevance_noise: float = 0.0
    rho: float = 0.0

    def __post_init__(self) -> None:
        """Reject a schedule that the run would ignore."""
        if self.schedule is not None and (self.separate_users or self.optimizer == "non_private"):
            raise ValueError(f"{self.label}: a schedule needs a single private optimizer")

    @property
    def has_guarantee(self) -> bool:
        """Return whether a privacy guarantee covers the run."""
        return not (self.state == "raw" or self.has_raw_public or self.optimizer == "non_private")


@dataclass(frozen=True)
class Experiment:
    """An experiment: one method on one task with one noise multiplier, for some steps.

    Attributes:
        task: name in `tasks.TASKS`.
        method: the optimizer and its settings.
        noise_multiplier: σ.
        steps: number of steps.
        paper_result: the paper's result.
        section: section of the task's results in the report.
        named_column: heading in that section; the noise multiplier by default.
        delta: δ of the certified ε; the task's by default.
        learning_rate: η if the paper prints it; else it is tuned.
        sample_rate: q; the task's by default.
        hidden: units of the first hidden layer; the task's by default.
        watched: steps after which AdaDP's estimate E′[g²] and its noise are described.
    """

    task: str
    method: Method
    noise_multiplier: float
    steps: int
    paper_result: PaperResult
    section: str = "main"
    named_column: str = ""
    delta: float | None = None
    learning_rate: float | None = None
    sample_rate: float | None = None
    hidden: int | None = None
    watched: tuple[int, ...] = ()

    @property
    def column(self) -> str:
        """The experiment's heading in its section of the report."""
        return self.named_column or f"σ = {self.noise_multiplier:g}"

    @property
    def name(self) -> str:
        """The experiment's identifier in the results file."""
        return f"{self.task}/{self.section}/{self.method.label}/{self.noise_multiplier:g}"

    @property
    def noise_schedule(self) -> Schedule | None:
        """The schedule of the noise; None if it is constant."""
        text = self.method.noise_schedule
        return parse_schedule("noise_schedule", text, self.steps) if text else None

    def noise_pieces(self, steps: int) -> Iterator[tuple[int, float]]:
        """Yield pairs (number of steps, factor of σ) that make up the first steps."""
        schedule = self.noise_schedule
        for count, factor in ((steps, 1.0),) if schedule is None else schedule.pieces:
            if steps > 0:
                yield min(count, steps), factor
            steps -= count


def make_method(name: str, clip_norm: float, label: str = "", **changes: Any) -> Method:
    """Return a training method, with the registry's learning rate by default."""
    changes.setdefault("learning_rate", OPTIMIZERS[name].learning_rate if name in OPTIMIZERS else 1)
    return Method(label or name, name, clip_norm=clip_norm, **changes)


LOT_CLIP: Final = 4.0  # papers/000 §IV-C and papers/001 §5.1
BETA_OPTIONS: Final = {"beta": 1.2}  # papers/000 §IV-C
IMAGE_METHODS: Final = (
    make_method("dp_sgd", LOT_CLIP),
    make_method("dp_adam", LOT_CLIP),
    make_method("adadp", LOT_CLIP, options=BETA_OPTIONS),
    make_method("adadp", LOT_CLIP, "adadp public", state="public", options=BETA_OPTIONS),
    make_method("adadp", LOT_CLIP, "adadp raw", state="raw", options=BETA_OPTIONS),
    make_method("adal", LOT_CLIP),
    make_method("adan", LOT_CLIP, learning_rate=0.3, options=BETA_OPTIONS),
    *(
        make_method(
            name, LOT_CLIP, learning_rate=OPTIMIZERS[name].learning_rate / LOT_CLIP
        )  # the registry's rate is for C = 1
        for name in ("pi_adam", "pi_rmsprop", "pi_adagrad")
    ),
)
_VARIANTS: Final = (  # raw state, and Table 1 as in papers/001
    make_method("dp_sgd", LOT_CLIP, "dp_sgd, warm start", warm_start=True),
    make_method(
        "adan", LOT_CLIP, "adan raw", state="raw", learning_rate=0.3, options=BETA_OPTIONS
    ),
    make_method("pi_adam", LOT_CLIP, "pi_adam raw", state="raw", learning_rate=3.0 / LOT_CLIP),
    *(
        make_method(
            name, LOT_CLIP, f"{name} {state}, own squares", state=state, learning_rate=rate,
            options={"own_squares": True},
        )
        for name, state, rate in (
            ("pi_adam", "public", 0.075), ("pi_adam", "raw", 0.075),
            ("pi_rmsprop", "raw", 0.225), ("pi_adagrad", "raw", 0.225),
        )
    ),
)  # fmt: skip
NOISES: Final = (2.0, 4.0, 8.0)
MNIST_STEPS: Final = 1000  # 10 epochs at q = 0.01
FASHION_STEPS: Final = 300
LONG_STEPS: Final = 3000
TABLE_1: Final = {0.92: (1.10, 0.75), 0.94: (1.61, 0.78), 0.95: (1.96, 0.80), 0.96: (5.48, 1.40)}
# σ, epochs and ε in papers/001 §5.2, which reads the ε from its Figure 4
PAPER_CLAIMS: Final = ((2.0, 260, 5.47), (4.0, 100, 3.39), (8.0, 30, 1.86))

_FIGURE_5: Final = "papers/001 Figure 5"
_EPOCHS: Final = {noise: epochs for noise, epochs, _ in PAPER_CLAIMS}  # for PIAdam
_MNIST_RESULTS: Final = {
    ("dp_sgd", 2.0): 0.9681,
    ("dp_sgd", 4.0): 0.94,
    ("dp_sgd", 8.0): 0.8891,
    ("adadp", 4.0): 0.9543,
    ("adadp", 8.0): 0.9125,
    ("pi_adam", 2.0): 0.9821,
    ("pi_adam", 4.0): 0.9593,
    ("pi_adam", 8.0): 0.9202,
}
_FIGURE_3: Final = {  # the paper does not state its noise
    ("mnist", "pi_rmsprop"): 0.944,
    ("mnist", "pi_adagrad"): 0.9347,
    ("fashion-mnist", "pi_adam"): 0.83,
    ("fashion-mnist", "pi_rmsprop"): 0.8199,
    ("fashion-mnist", "pi_adagrad"): 0.7999,
}


def _find_image_result(task: str, method: Method, noise: float) -> PaperResult:
    """Return what papers/000 or papers/001 reports for a method on an image task."""
    key = method.optimizer
    if method.warm_start:
        return PaperResult("none")
    if noise not in NOISES:
        return PaperResult("papers/000 Table I")
    if task == "mnist" and (key, noise) in _MNIST_RESULTS:
        remark = f"after {_EPOCHS[noise]} epochs" if key == "pi_adam" else "epochs not printed"
        return PaperResult(_FIGURE_5, _MNIST_RESULTS[key, noise], remark)
    if (task, key) in _FIGURE_3 and noise == 4.0:
        return PaperResult(
            "papers/001 Figure 3", _FIGURE_3[task, key], "noise and epochs not printed"
        )
    if task == "mnist" and key in ("adadp", "adal", "adan"):
        return PaperResult("papers/000 Figures 2 and 4(a): curves only")
    if key in ("dp_sgd", "adadp", "pi_adam"):
        return PaperResult("papers/001 Figure 9: curves only")
    return PaperResult("none")


def make_mnist_experiments() -> Iterator[Experiment]:
    """Yield every image method at every noise multiplier on MNIST."""
    for noise in NOISES:
        for method in (*IMAGE_METHODS, *_VARIANTS):
            paper_result = _find_image_result("mnist", method, noise)
            yield Experiment("mnist", method, noise, MNIST_STEPS, paper_result)


def make_fashion_mnist_experiments() -> Iterator[Experiment]:
    """Yield every image method but the variants on Fashion-MNIST."""
    for noise in NOISES:
        for method in IMAGE_METHODS:
            paper_result = _find_image_result("fashion-mnist", method, noise)
            yield Experiment("fashion-mnist", method, noise, FASHION_STEPS, paper_result)


def make_long_experiments() -> Iterator[Experiment]:
    """Yield runs of 30 epochs: papers/001 at its largest noise and papers/000 Table I."""
    sections = (
        (8.0, "long", None, ("dp_sgd", "adadp raw", "pi_adam")),
        (3.0, "table-1", 1e-4, ("dp_sgd", "adadp raw")),
    )
    for noise, section, delta, labels in sections:
        for method in IMAGE_METHODS:
            if method.label in labels:
                paper_result = _find_image_result("mnist", method, noise)
                yield Experiment(
                    "mnist", method, noise, LONG_STEPS, paper_result, section, delta=delta
                )


PAPER_SCHEDULE: Final = LinearDecay(0.52, 1000)  # papers/000 §IV-C: 0.1 to 0.052 in 10 epochs
_METHODS_TUNED_AT_8: Final = (  # papers/000 §IV-C has 0.1 for DP-SGD and 0.002 for AdaDP
    make_method("dp_sgd", LOT_CLIP, learning_rate=0.1),
    make_method("adadp", LOT_CLIP, learning_rate=0.004, options=BETA_OPTIONS),
    make_method(
        "adadp", LOT_CLIP, "adadp raw", state="raw", learning_rate=0.004, options=BETA_OPTIONS
    ),
    make_method(
        "adadp",
        LOT_CLIP,
        "adadp public",
        state="public",
        learning_rate=0.004,
        options=BETA_OPTIONS,
    ),
    make_method("dp_adam", LOT_CLIP, learning_rate=0.004),
    make_method("dp_sgd", LOT_CLIP, "dp_sgd, warm start", learning_rate=0.05, warm_start=True),
)


def make_tuned_experiments() -> Iterator[Experiment]:
    """Yield MNIST experiments with learning rates tuned at σ = 8, constant and decaying."""
    for method in _METHODS_TUNED_AT_8:
        scheduled = replace(method, label=f"{method.label}, schedule", schedule=PAPER_SCHEDULE)
        for each in (method, scheduled):
            paper_result = _find_image_result("mnist", each, 8.0)
            yield Experiment("mnist-8", each, 8.0, MNIST_STEPS, paper_result)


def make_noise_shape_experiments() -> Iterator[Experiment]:
    """Yield AdaDP experiments with noise in an ellipsoid and in a box, on a small model."""
    for state in ("privatised", "raw"):
        for shape in ("ellipsoid", "box"):
            options = BETA_OPTIONS | {"box": shape == "box"}
            method = make_method(
                "adadp", LOT_CLIP, f"{shape}, {state}", state=state, options=options
            )
            for noise in NOISES:
                yield Experiment(
                    "box", method, noise, 600, PaperResult("papers/000 Algorithm 1 prints the box")
                )


ADULT_CLIP: Final = 3.0  # papers/003, Experiment
_ADULT_METHODS: Final = {
    "non_private": make_method("non_private", ADULT_CLIP, learning_rate=1.0),
    "sgd_maj": make_method("dp_sgd", ADULT_CLIP, "sgd_maj", learning_rate=0.1),
    "sgd_adv": make_method("dp_sgd", ADULT_CLIP, "sgd_adv", learning_rate=0.1),
    "sgd_pass": make_method("dp_sgd", ADULT_CLIP, "sgd_pass", learning_rate=0.03, in_passes=True),
    "a_ddp": make_method("dp_sgd", ADULT_CLIP, "a_ddp", learning_rate=0.01),
    "a_ddp pld": make_method("dp_sgd", ADULT_CLIP, "a_ddp pld", learning_rate=0.03),
}
# σ and rounds for each ε at δ = 1e-8, solved by the service; a test checks them
ADULT_PLANS: Final = {
    0.5: {
        "sgd_maj": (97.8189, 10),
        "sgd_adv": (3.82047, 10),
        "sgd_pass": (193.46, 1000),
        "a_ddp": (193.46, 37_902),
        "a_ddp pld": (3.82047, 1400),
    },
    2.0: {
        "sgd_maj": (25.7636, 10),
        "sgd_adv": (2.08876, 10),
        "sgd_pass": (52.7965, 1000),
        "a_ddp": (52.7965, 38_948),
        "a_ddp pld": (2.08876, 5323),
    },
}


def make_adult_experiments() -> Iterator[Experiment]:
    """Yield A-DDP and its baselines on Adult, with the noise and rounds of its theorem."""
    paper_result = PaperResult("papers/003 Figure 1: curves only")
    for target, plans in ADULT_PLANS.items():
        for label, (noise, rounds) in ({"non_private": (1.0, 2000)} | plans).items():
            yield Experiment(
                "adult",
                _ADULT_METHODS[label],
                noise,
                rounds,
                paper_result,
                named_column=f"ε = {target:g}",
            )


def make_participant_experiments() -> Iterator[Experiment]:
    """Yield one Adult method with every user simulated separately, as in the paper."""
    method = replace(_ADULT_METHODS["a_ddp pld"], separate_users=True)
    paper_result = PaperResult("papers/003 Figure 1: curves only")
    for target, plans in ADULT_PLANS.items():
        noise, rounds = plans[method.label]
        yield Experiment(
            "adult", method, noise, rounds, paper_result, "participants", f"ε = {target:g}"
        )


def _make_side_information_methods(
    clips: Mapping[str, float], rates: Mapping[str, float]
) -> Iterator[Method]:
    """Yield the methods of papers/004, with clip norms and rates from its Table 5."""

    def method(name: str, label: str = "", of: str = "", **changes: Any) -> Method:
        """Return a method with the paper's clip norm and learning rate."""
        key = of or name
        return make_method(name, clips[key], label, learning_rate=rates[key], **changes)

    yield method("dp_sgd")
    yield method("dp_sgd", "dp_sgd, warm start", warm_start=True)
    yield method("dp_adam")
    yield method("dp_rmsprop")
    yield method("dp_r_pub", of="dp_rmsprop")
    yield method("dp_adam_pub", of="dp_adam")
    yield method("adadps", "adadps rmsprop", options={"statistic": "rmsprop"})
    yield method("adadps", "adadps adam", options={"statistic": "adam"})


_TEXT_CLIPS: Final = {"dp_sgd": 0.1, "dp_adam": 0.1, "dp_rmsprop": 0.2, "adadps": 1.0}
_TEXT_RATES: Final = {"dp_sgd": 1.0, "dp_adam": 0.01, "dp_rmsprop": 0.01, "adadps": 0.5}
_AUTOENCODER_CLIPS: Final = {"dp_sgd": 0.05, "dp_adam": 0.01, "dp_rmsprop": 0.01, "adadps": 3.0}
_AUTOENCODER_RATES: Final = {"dp_sgd": 0.5, "dp_adam": 0.001, "dp_rmsprop": 0.001, "adadps": 0.005}
_FREQUENCY_METHOD: Final = make_method(
    "adadps",
    1.0,
    "adadps frequencies",
    learning_rate=0.5,
    state="privatised",
    side_information=True,
)
_TEXT_RESULTS: Final = {  # on StackOverflow: the same model, other data
    "dp_sgd": (0.28, 6),
    "dp_sgd, warm start": (0.33, 7),
    "dp_adam": (0.30, 6),
    "dp_rmsprop": (0.31, 6),
    "dp_adam_pub": (0.31, 8),
    "adadps rmsprop": (0.40, 6),
    "adadps adam": (0.40, 6),
    "adadps frequencies": (0.41, 2),
}
_AUTOENCODER_RESULTS: Final = {
    "dp_sgd": (5.013, 6),
    "dp_sgd, warm start": (4.9, 7),
    "dp_adam": (3.697, 6),
    "dp_rmsprop": (3.636, 6),
    "dp_adam_pub": (6.4, 8),
    "adadps rmsprop": (3.566, 6),
    "adadps adam": (3.443, 6),
}


def _find_table_result(
    figures: Mapping[str, tuple[float, int]], method: Method, remark: str
) -> PaperResult:
    """Return the result in a table of papers/004 for a method, else a reference to its curves."""
    if method.label not in figures:
        return PaperResult("papers/004 Figure 4: curves only")
    value, number = figures[method.label]
    return PaperResult(f"papers/004 Table {number}", value, remark)


def make_newsgroups_experiments() -> Iterator[Experiment]:
    """Yield the methods of papers/004 on newsgroups, in place of the paper's text data."""
    for method in (*_make_side_information_methods(_TEXT_CLIPS, _TEXT_RATES), _FREQUENCY_METHOD):
        paper_result = _find_table_result(_TEXT_RESULTS, method, "on StackOverflow")
        yield Experiment("newsgroups", method, 1.0, 1060, paper_result)


def make_autoencoder_experiments() -> Iterator[Experiment]:
    """Yield the methods of papers/004 on the autoencoder of images."""
    for method in _make_side_information_methods(_AUTOENCODER_CLIPS, _AUTOENCODER_RATES):
        paper_result = _find_table_result(_AUTOENCODER_RESULTS, method, "steps not printed")
        yield Experiment("autoencoder", method, 1.0, 300, paper_result)


EXPERIMENTS: Final = (
    *make_mnist_experiments(),
    *make_newsgroups_experiments(),
    *make_adult_experiments(),
    *make_fashion_mnist_experiments(),
    *make_autoencoder_experiments(),
    *make_long_experiments(),
    *make_tuned_experiments(),
    *make_noise_shape_experiments(),
    *make_participant_experiments(),
)
