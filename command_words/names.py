"""Names that people use for a field, a method or an option, and the name that is meant here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Final

FIELDS: Final[Mapping[str, str]] = {
    "s": "noise_multiplier",
    "sigma": "noise_multiplier",
    "noise": "noise_multiplier",
    "noise_scale": "noise_multiplier",
    "std": "noise_multiplier",
    "noise_std": "noise_multiplier",
    "q": "sample_rate",
    "rate": "sample_rate",
    "sampling_rate": "sample_rate",
    "sampling_probability": "sample_rate",
    "n": "dataset_size",
    "records": "dataset_size",
    "size": "dataset_size",
    "sample_size": "dataset_size",
    "num_examples": "dataset_size",
    "b": "batch_size",
    "batch": "batch_size",
    "lot_size": "batch_size",
    "expected_batch_size": "batch_size",
    "t": "steps",
    "iterations": "steps",
    "rounds": "steps",
    "num_steps": "steps",
    "max_steps": "steps",
    "e": "epochs",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "eps": "epsilon",
    "target_epsilon": "epsilon",
    "budget": "epsilon",
    "d": "delta",
    "target_delta": "delta",
    "privacy_unit": "unit",
    "accountant": "method",
    "relation": "neighbouring_relation",
    "neighboring_relation": "neighbouring_relation",
    "adjacency": "neighbouring_relation",
    "sampler": "sampling",
    "lr": "learning_rate",
    "clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "l2_norm_clip": "clip_norm",
}
_SECOND_MEANINGS: Final = {"e": "epsilon"}  # where there are no epochs
VALUES: Final[Mapping[str, str]] = {
    "rdp": "subsampled_rdp",
    "prv": "pld",
    "plv": "pld",
    "fft": "pld",
    "gdp": "gdp_clt",
    "clt": "gdp_clt",
    "ma": "moments_accountant",
    "moments": "moments_accountant",
    "cdp": "zcdp",
    "basic": "basic_composition",
    "advanced": "advanced_composition",
    "random": "poisson",
    "shuffle": "shuffled",
    "shuffling": "shuffled",
    "uniform": "fixed_size",
    "without_replacement": "fixed_size",
    "wor": "fixed_size",
    "full": "none",
    "full_batch": "none",
    "bins": "balls_in_bins",
    "bnb": "balls_in_bins",
    "add_remove": "add_or_remove_one",
    "add_remove_one": "add_or_remove_one",
    "add_or_remove": "add_or_remove_one",
    "unbounded": "add_or_remove_one",
    "bounded": "replace_one",
    "replace": "replace_one",
    "substitute": "replace_one",
    "substitution": "replace_one",
    "swap": "replace_one",
    "zero_out": "zero_out_one",
    "zeroed": "zero_out_one",
    "train": "run",
    "training": "run",
    "sgd": "dp_sgd",
    "adam": "dp_adam",
    "adamw": "dp_adamw",
    "rmsprop": "dp_rmsprop",
    "adagrad": "dp_adagrad",
    "audit": "auditor",
    "root": "admin",
}
OTHERWISE: Final[Mapping[tuple[str, str], str]] = {  # by program and field, which it lacks
    ("accountant", "learning_rate"): "no learning rate affects ε; accountant-train has it",
    ("accountant", "clip_norm"): "no clip norm affects ε, as noise is relative to it",
    ("accountant-train", "sample_rate"): "it is --batch-size over the number of records",
    ("accountant-train", "epochs"): "give --steps: epochs times records over --batch-size",
    ("accountant-train", "method"): "guarantees are the service's, by pld",
}
_NEVER_CHANGES: Final = "A budget never changes. For new records create a new dataset"
COMMANDS: Final[Mapping[str, str]] = {  # what to do instead, by a command that does not exist
    "eps": "Did you mean 'epsilon'?",
    "noise": "Did you mean 'noise-multiplier'?",
    "sigma": "Did you mean 'noise-multiplier'?",
    "train": "Training has a program of its own: accountant-train run",
    "start": "Did you mean 'serve'?",
    "server": "Did you mean 'serve'?",
    "up": "Did you mean 'serve'?",
    "init": "`accountant dataset create` or `accountant serve` makes the ledger",
    "login": "Set ACCOUNTANT_SERVICE to the service's address, and ACCOUNTANT_API_KEY to your key",
    "trade-off": "The page `/` of the service draws it, and POST /v1/trade-off answers with it",
    "completion": "`accountant --install-completion` installs it for this shell",
    "dataset edit": _NEVER_CHANGES,
    "dataset increase": _NEVER_CHANGES,
    "dataset reset": _NEVER_CHANGES,
    "dataset update": _NEVER_CHANGES,
    "run start": "Did you mean 'reserve'? accountant-train run trains",
    "run stop": "Did you mean 'commit', or 'release' for a run that is given up?",
}


def find_field(name: str, known: Collection[str]) -> str | None:
    """Return the known field or option that a name probably means; None if there is none.

    Known names may begin with dashes and be joined by them, as options are.
    """
    return _find(name, known, FIELDS) or _find(name, known, _SECOND_MEANINGS)


def is_named(name: str, field: str) -> bool:
    """Return whether an option or a field is a name of the field `field`, such as -s of σ's."""
    if name == "-E":
        return field == "epsilon"
    plain = name.lstrip("-").replace("-", "_").lower()
    return FIELDS.get(plain, plain) == field


def find_otherwise(program: str, name: str) -> str | None:
    """Return what stands in place of an option that a program lacks; None if that is unknown."""
    plain = name.lstrip("-").replace("-", "_").lower()
    return OTHERWISE.get((program, FIELDS.get(plain, plain)))


def describe_unknown(kind: str, name: str, known: Collection[str]) -> str:
    """Return that a name is unknown, what was probably meant, and all known names."""
    meant = find_value(name, known)
    start = f"did you mean {meant}? There are" if meant else "there are"
    return f"Unknown {kind} {name!r}: {start} {', '.join(known)}"


def find_value(text: str, known: Collection[str]) -> str | None:
    """Return the known value of a choice that a text probably means; None if there is none."""
    return _find(text, known, VALUES)


def _find(text: str, known: Collection[str], names: Mapping[str, str]) -> str | None:
    """Return the known name that a text stands for in a table, or is similar to."""
    plain = {each.lstrip("-").replace("-", "_").lower(): each for each in known}
    given = text.lstrip("-").replace("-", "_").lower()
    if names.get(given) in plain:
        return plain[names[given]]
    similar = difflib.get_close_matches(given, plain, 1)
    return plain[similar[0]] if similar else None
