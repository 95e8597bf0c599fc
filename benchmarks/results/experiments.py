"""The experiments as data: what is trained, how, and what the paper prints for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from training_client.optimizers import OPTIMIZERS

GRID: Final = (0.1, 0.3, 1.0, 3.0, 10.0)  # times a method's own rate
FINE_GRID: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
TUNING_SEED: Final = 0  # in no result
FIRST_SEED: Final = 1
PASSES: Final = 10  # over the data, of those that take every record in its turn


@dataclass(frozen=True)
class Printed:
    """What a paper prints.

    Attributes:
        source: paper, and table or figure.
        value: the number; None if there is only a curve, or nothing.
        remark: what differs from our run.
    """

    source: str
    value: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class LinearDecay:
    """A learning rate that falls linearly, then stays constant.

    Attributes:
        share: the final learning rate divided by the first.
        steps: how many steps it takes to get there.
    """

    share: float
    steps: int

    def factor(self, done: int) -> float:
        """Return what multiplies the first learning rate after `done` steps."""
        return 1 - (1 - self.share) * min(1.0, done / self.steps)


@dataclass(frozen=True)
class Method:
    """An optimizer as it is run.

    Attributes:
        label: its name in tables and plots.
        optimizer: of the registry, or `non_private`.
        learning_rate: the middle of its grid.
        clip_norm: C.
        state: where its state comes from; the registry's default if None.
        options: of the optimizer.
        warm_start: first train without noise on the public examples.
        in_passes: take every record in its turn, rather than sample.
        side_information: divide gradients by how frequent each input is.
        apart: each of the task's users takes part for themselves, rather than all as one.
        schedule: of the learning rate; constant if None.
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
    apart: bool = False
    schedule: LinearDecay | None = None

    def __post_init__(self) -> None:
        """Refuse a schedule that no run would follow."""
        if self.schedule is not None and (self.apart or self.optimizer == "non_private"):
            raise ValueError(f"{self.label}: only one private optimizer follows a schedule")

    @property
    def proven(self) -> bool:
        """Whether a guarantee covers the run."""
        return self.state != "raw" and self.optimizer != "non_private"


@dataclass(frozen=True)
class Experiment:
    """One method on one task with one noise multiplier, for some steps.

    Attributes:
        task: of `tasks.TASKS`.
        method: what is run.
        noise_multiplier: σ.
        steps: how many.
        printed: the paper's figure.
        part: which part of the report it belongs to, if not to the task's first.
        named_column: what it stands under there; the noise by default.
        delta: δ of what is certified; the task's by default.
    """

    task: str
    method: Method
    noise_multiplier: float
    steps: int
    printed: Printed
    part: str = "main"
    named_column: str = ""
    delta: float | None = None

    @property
    def column(self) -> str:
        """What it stands under in the report."""
        return self.named_column or f"σ = {self.noise_multiplier:g}"

    @property
    def name(self) -> str:
        """Tells experiments apart in the results file."""
        return f"{self.task}/{self.part}/{self.method.label}/{self.noise_multiplier:g}"


def _own(name: str, clip_norm: float, label: str = "", **changes: Any) -> Method:
    """A method, at the registry's learning rate if none is given."""
    if "learning_rate" not in changes:
        changes["learning_rate"] = OPTIMIZERS[name].learning_rate
    return Method(label or name, name, clip_norm=clip_norm, **changes)


LOT_CLIP: Final = 4.0  # papers/000 §IV-C and papers/001 §5.1
_LOCAL: Final = {"beta": 1.2}  # papers/000 §IV-C
IMAGE_METHODS: Final = (
    _own("dp_sgd", LOT_CLIP),
    _own("dp_adam", LOT_CLIP),
    _own("adadp", LOT_CLIP, options=_LOCAL),
    _own("adadp", LOT_CLIP, "adadp public", state="public", options=_LOCAL),
    _own("adadp", LOT_CLIP, "adadp raw", state="raw", options=_LOCAL),
    _own("adal", LOT_CLIP),
    _own("adan", LOT_CLIP, learning_rate=0.3, options=_LOCAL),
    *(
        _own(
            name, LOT_CLIP, learning_rate=OPTIMIZERS[name].learning_rate / LOT_CLIP
        )  # is for C = 1
        for name in ("pi_adam", "pi_rmsprop", "pi_adagrad")
    ),
)
_BESIDE: Final = (  # state of raw gradients, and Table 1 of papers/001 to the letter
    _own("dp_sgd", LOT_CLIP, "dp_sgd, warm start", warm_start=True),
    _own("adan", LOT_CLIP, "adan raw", state="raw", learning_rate=0.3, options=_LOCAL),
    _own("pi_adam", LOT_CLIP, "pi_adam raw", state="raw", learning_rate=3.0 / LOT_CLIP),
    *(
        _own(
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
# papers/001 §5.2: σ, epochs and the ε that it reads for them off its Figure 4
CLAIMED: Final = ((2.0, 260, 5.47), (4.0, 100, 3.39), (8.0, 30, 1.86))

_FIGURE_5: Final = "papers/001 Figure 5"
_EPOCHS: Final = {noise: epochs for noise, epochs, _ in CLAIMED}  # of PIAdam
_MNIST_PRINTED: Final = {
    ("dp_sgd", 2.0): 0.9681,
    ("dp_sgd", 4.0): 0.94,
    ("dp_sgd", 8.0): 0.8891,
    ("adadp", 4.0): 0.9543,
    ("adadp", 8.0): 0.9125,
    ("pi_adam", 2.0): 0.9821,
    ("pi_adam", 4.0): 0.9593,
    ("pi_adam", 8.0): 0.9202,
}
_FIGURE_3: Final = {  # its noise is not printed
    ("mnist", "pi_rmsprop"): 0.944,
    ("mnist", "pi_adagrad"): 0.9347,
    ("fashion-mnist", "pi_adam"): 0.83,
    ("fashion-mnist", "pi_rmsprop"): 0.8199,
    ("fashion-mnist", "pi_adagrad"): 0.7999,
}


def _image_printed(task: str, method: Method, noise: float) -> Printed:
    """What papers/000 and papers/001 print of an image task."""
    key = method.optimizer
    if method.warm_start:
        return Printed("none")
    if noise not in NOISES:
        return Printed("papers/000 Table I")
    if task == "mnist" and (key, noise) in _MNIST_PRINTED:
        remark = f"after {_EPOCHS[noise]} epochs" if key == "pi_adam" else "epochs not printed"
        return Printed(_FIGURE_5, _MNIST_PRINTED[key, noise], remark)
    if (task, key) in _FIGURE_3 and noise == 4.0:
        return Printed("papers/001 Figure 3", _FIGURE_3[task, key], "noise and epochs not printed")
    if task == "mnist" and key in ("adadp", "adal", "adan"):
        return Printed("papers/000 Figures 2 and 4(a): curves only")
    if key in ("dp_sgd", "adadp", "pi_adam"):
        return Printed("papers/001 Figure 9: curves only")
    return Printed("none")


def mnist() -> Iterator[Experiment]:
    """Every method at every noise."""
    for noise in NOISES:
        for method in (*IMAGE_METHODS, *_BESIDE):
            printed = _image_printed("mnist", method, noise)
            yield Experiment("mnist", method, noise, MNIST_STEPS, printed)


def fashion_mnist() -> Iterator[Experiment]:
    """The same, but for what is as printed."""
    for noise in NOISES:
        for method in IMAGE_METHODS:
            printed = _image_printed("fashion-mnist", method, noise)
            yield Experiment("fashion-mnist", method, noise, FASHION_STEPS, printed)


def longer() -> Iterator[Experiment]:
    """30 epochs: as papers/001 trained PIAdam at its largest noise, and for papers/000 Table I."""
    parts = (
        (8.0, "long", None, ("dp_sgd", "adadp raw", "pi_adam")),
        (3.0, "table-1", 1e-4, ("dp_sgd", "adadp raw")),
    )
    for noise, part, delta, labels in parts:
        for method in IMAGE_METHODS:
            if method.label in labels:
                printed = _image_printed("mnist", method, noise)
                yield Experiment("mnist", method, noise, LONG_STEPS, printed, part, delta=delta)


PAPER_SCHEDULE: Final = LinearDecay(0.52, 1000)  # papers/000 §IV-C: 0.1 to 0.052 in 10 epochs
_CHOSEN_AT_8: Final = (  # papers/000 §IV-C has 0.1 for DP-SGD and 0.002 for AdaDP
    _own("dp_sgd", LOT_CLIP, learning_rate=0.1),
    _own("adadp", LOT_CLIP, learning_rate=0.004, options=_LOCAL),
    _own("adadp", LOT_CLIP, "adadp raw", state="raw", learning_rate=0.004, options=_LOCAL),
    _own("adadp", LOT_CLIP, "adadp public", state="public", learning_rate=0.004, options=_LOCAL),
    _own("dp_adam", LOT_CLIP, learning_rate=0.004),
    _own("dp_sgd", LOT_CLIP, "dp_sgd, warm start", learning_rate=0.05, warm_start=True),
)


def equal_care() -> Iterator[Experiment]:
    """MNIST at σ = 8, learning rates chosen for it, constant and with the schedule."""
    for method in _CHOSEN_AT_8:
        scheduled = replace(method, label=f"{method.label}, schedule", schedule=PAPER_SCHEDULE)
        for each in (method, scheduled):
            printed = _image_printed("mnist", each, 8.0)
            yield Experiment("mnist-8", each, 8.0, MNIST_STEPS, printed)


def shapes() -> Iterator[Experiment]:
    """AdaDP's ellipsoid and its box, on a model small enough for the box."""
    for state in ("privatised", "raw"):
        for shape in ("ellipsoid", "box"):
            options = _LOCAL | {"box": shape == "box"}
            method = _own("adadp", LOT_CLIP, f"{shape}, {state}", state=state, options=options)
            for noise in NOISES:
                yield Experiment(
                    "box", method, noise, 600, Printed("papers/000 Algorithm 1 prints the box")
                )


ADULT_CLIP: Final = 3.0  # papers/003, Experiment
_ADULT_METHODS: Final = {
    "non_private": _own("non_private", ADULT_CLIP, learning_rate=1.0),
    "sgd_maj": _own("dp_sgd", ADULT_CLIP, "sgd_maj", learning_rate=0.1),
    "sgd_adv": _own("dp_sgd", ADULT_CLIP, "sgd_adv", learning_rate=0.1),
    "sgd_pass": _own("dp_sgd", ADULT_CLIP, "sgd_pass", learning_rate=0.03, in_passes=True),
    "a_ddp": _own("dp_sgd", ADULT_CLIP, "a_ddp", learning_rate=0.01),
    "a_ddp pld": _own("dp_sgd", ADULT_CLIP, "a_ddp pld", learning_rate=0.03),
}
# σ and rounds by ε at δ = 1e-8, as the service solves for them; a test asks it again
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


def adult() -> Iterator[Experiment]:
    """A-DDP and its baselines, each with the noise and the rounds that its theorem gives it."""
    printed = Printed("papers/003 Figure 1: curves only")
    for target, plans in ADULT_PLANS.items():
        for label, (noise, rounds) in ({"non_private": (1.0, 2000)} | plans).items():
            yield Experiment(
                "adult",
                _ADULT_METHODS[label],
                noise,
                rounds,
                printed,
                named_column=f"ε = {target:g}",
            )


def participants() -> Iterator[Experiment]:
    """One of these with every user apart, as the algorithm is printed."""
    method = replace(_ADULT_METHODS["a_ddp pld"], apart=True)
    printed = Printed("papers/003 Figure 1: curves only")
    for target, plans in ADULT_PLANS.items():
        noise, rounds = plans[method.label]
        yield Experiment("adult", method, noise, rounds, printed, "participants", f"ε = {target:g}")


def _side(clips: Mapping[str, float], rates: Mapping[str, float]) -> Iterator[Method]:
    """The methods of papers/004, with its Table 5's C and, in the grid's middle, η."""

    def own(name: str, label: str = "", of: str = "", **changes: Any) -> Method:
        key = of or name
        return _own(name, clips[key], label, learning_rate=rates[key], **changes)

    yield own("dp_sgd")
    yield own("dp_sgd", "dp_sgd, warm start", warm_start=True)
    yield own("dp_adam")
    yield own("dp_rmsprop")
    yield own("dp_r_pub", of="dp_rmsprop")
    yield own("dp_adam_pub", of="dp_adam")
    yield own("adadps", "adadps rmsprop", options={"statistic": "rmsprop"})
    yield own("adadps", "adadps adam", options={"statistic": "adam"})


_TEXT_CLIPS: Final = {"dp_sgd": 0.1, "dp_adam": 0.1, "dp_rmsprop": 0.2, "adadps": 1.0}
_TEXT_RATES: Final = {"dp_sgd": 1.0, "dp_adam": 0.01, "dp_rmsprop": 0.01, "adadps": 0.5}
_CODE_CLIPS: Final = {"dp_sgd": 0.05, "dp_adam": 0.01, "dp_rmsprop": 0.01, "adadps": 3.0}
_CODE_RATES: Final = {"dp_sgd": 0.5, "dp_adam": 0.001, "dp_rmsprop": 0.001, "adadps": 0.005}
_FREQUENT: Final = _own(
    "adadps",
    1.0,
    "adadps frequencies",
    learning_rate=0.5,
    state="privatised",
    side_information=True,
)
_TEXT_PRINTED: Final = {  # of StackOverflow: the same model, other data
    "dp_sgd": (0.28, 6),
    "dp_sgd, warm start": (0.33, 7),
    "dp_adam": (0.30, 6),
    "dp_rmsprop": (0.31, 6),
    "dp_adam_pub": (0.31, 8),
    "adadps rmsprop": (0.40, 6),
    "adadps adam": (0.40, 6),
    "adadps frequencies": (0.41, 2),
}
_CODE_PRINTED: Final = {
    "dp_sgd": (5.013, 6),
    "dp_sgd, warm start": (4.9, 7),
    "dp_adam": (3.697, 6),
    "dp_rmsprop": (3.636, 6),
    "dp_adam_pub": (6.4, 8),
    "adadps rmsprop": (3.566, 6),
    "adadps adam": (3.443, 6),
}


def _in_tables(figures: Mapping[str, tuple[float, int]], method: Method, remark: str) -> Printed:
    if method.label not in figures:
        return Printed("papers/004 Figure 4: curves only")
    value, number = figures[method.label]
    return Printed(f"papers/004 Table {number}", value, remark)


def newsgroups() -> Iterator[Experiment]:
    """Where papers/004 has StackOverflow and IMDB."""
    for method in (*_side(_TEXT_CLIPS, _TEXT_RATES), _FREQUENT):
        printed = _in_tables(_TEXT_PRINTED, method, "on StackOverflow")
        yield Experiment("newsgroups", method, 1.0, 1060, printed)


def autoencoders() -> Iterator[Experiment]:
    """The same methods on images."""
    for method in _side(_CODE_CLIPS, _CODE_RATES):
        printed = _in_tables(_CODE_PRINTED, method, "steps not printed")
        yield Experiment("autoencoder", method, 1.0, 300, printed)


EXPERIMENTS: Final = (
    *mnist(),
    *newsgroups(),
    *adult(),
    *fashion_mnist(),
    *autoencoders(),
    *longer(),
    *equal_care(),
    *shapes(),
    *participants(),
)


def quick(experiment: Experiment) -> Experiment:
    """The same for a moment only, to see that it runs."""
    return replace(experiment, steps=min(experiment.steps, 20))
