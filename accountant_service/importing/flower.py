"""Flower: `LocalDpMod`, and the strategies that clip and add noise on the server.

Flower at commit fdef7afb: `clientapp/mod/localdp_mod.py`, `serverapp/strategy/dp_*_clipping.py`,
`common/differential_privacy.py`. The server adds noise of standard deviation σC/n to the average,
n the planned number of clients. FedAvg draws a fixed number of clients without replacement and
weights their updates by the number of examples.
"""

from __future__ import annotations

import math
from typing import Final

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.importing.document import CLASS_NAME, Json, Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.importing.runs import (
    DELTA_MAX,
    DELTA_MIN,
    EPSILON_MAX,
    read_delta,
    read_epsilon,
    read_noise,
    read_size,
    require_agreement,
)
from accountant_service.mechanisms.codec import COUNT_MAX, NOISE_MAX, NOISE_MIN
from accountant_service.number_format import round_nearest as shown

_LOCAL: Final = ("clipping_norm", "sensitivity", "epsilon", "delta")
_STRATEGIES: Final = {
    f"DifferentialPrivacy{side}Side{clipping}Clipping": clipping
    for side in ("Server", "Client")
    for clipping in ("Fixed", "Adaptive")
}
_FIXED: Final = ("strategy", "noise_multiplier", "clipping_norm", "num_sampled_clients")
_ADAPTIVE: Final = (
    "strategy", "noise_multiplier", "num_sampled_clients", "initial_clipping_norm",
    "target_clipped_quantile", "clip_norm_lr", "clipped_count_stddev",
)  # fmt: skip
_PREFIXES: Final = ("dp_", "local_dp_", "")
_ROUNDS: Final = ("num_rounds", "num_server_rounds")
_NUMBER_MAX: Final = 1e9
_EPSILON_AT_NOISE_MIN: Final = 19_000  # under replace-one, at δ = 0.5; a test computes it


def detect(document: Json) -> bool:
    """Return whether a document is one of Flower's configurations."""
    if not isinstance(document, dict):
        return False
    if str(document.get(CLASS_NAME)) in ("LocalDpMod", *_STRATEGIES) or "flwr" in _tool(document):
        return True
    names = _normalized(document)
    return (
        "num_sampled_clients" in names
        or str(document.get("strategy")) in _STRATEGIES
        or any({prefix + name for name in _LOCAL} <= names.keys() for prefix in _PREFIXES)
    )


def read(document: Part, facts: Facts) -> Imported:
    """Import a Flower client mod, a server strategy, or an app's configuration."""
    config = _app_config(document)
    names = _STRATEGIES.get(config.class_name or "")
    if config.class_name == "LocalDpMod":
        config = config.named_arguments(_LOCAL)
    elif names:
        config = config.named_arguments(_ADAPTIVE if names == "Adaptive" else _FIXED)
    if config.find(*(prefix + "sensitivity" for prefix in _PREFIXES)):
        return _read_local(config)
    return _read_server(config, facts)


def _tool(document: Json) -> dict[str, Json]:
    """Return the `tool` table of a `pyproject.toml`; empty if there is none."""
    tool = document.get("tool") if isinstance(document, dict) else None
    return tool if isinstance(tool, dict) else {}


def _normalized(document: dict[str, Json]) -> dict[str, Json]:
    """Return an object whose field names have underscores instead of hyphens."""
    return {name.replace("-", "_"): value for name, value in document.items()}


def _app_config(document: Part) -> Part:
    """Return an app's configuration: a table of `pyproject.toml`, or the document itself."""
    if "flwr" in _tool(document.value):
        for name in ("tool", "flwr", "app", "config"):
            document = document.field(name)
    if not isinstance(document.value, dict):
        raise document.fault("must be an object")
    return Part(_normalized(document.value), document.pointer)


def _find(config: Part, *names: str) -> Part | None:
    """Return the first of these fields, with or without a prefix such as `dp_`; else None."""
    return config.find(*(prefix + name for name in names for prefix in _PREFIXES))


def _field(config: Part, *names: str) -> Part:
    """Return the first of these fields, as `_find` does; raise DocumentError if there is none."""
    return _find(config, *names) or config.field(*names)


def _positive(part: Part) -> float:
    """Return a value as a positive number; raise DocumentError for any other."""
    return part.number(0.0, _NUMBER_MAX, above=True)


def _read_local(config: Part) -> Imported:
    """Import a `LocalDpMod`, which adds noise to each client's clipped update.

    The standard deviation of the noise is sensitivity·√(2·log(1.25/δ))/ε. The server sees each
    update, so that any two clipped updates are neighbours: replace-one.
    """
    clip, sensitivity = (_field(config, name) for name in ("clipping_norm", "sensitivity"))
    epsilon = _field(config, "epsilon")
    claimed = epsilon.number(0.0, EPSILON_MAX, above=True)
    delta = _field(config, "delta").number(DELTA_MIN, DELTA_MAX)
    norm, width = _positive(clip), _positive(sensitivity)
    rounds = read_size(_find(config, *_ROUNDS))
    findings = (
        *_check_sensitivity(sensitivity, width, norm),
        *_check_classical(epsilon, claimed),
        *_check_rounds(config, rounds, claimed),
    )
    noise = width * math.sqrt(2 * math.log(1.25 / delta)) / claimed / norm
    if noise < NOISE_MIN:
        return Imported(
            "a Flower LocalDpMod",
            None,
            delta=delta,
            claims=(Claim(claimed, delta, epsilon.pointer, is_refuted=True),),
            findings=(_refute_without_noise(epsilon, claimed, delta, noise), *findings),
        )
    update = Node("gaussian", config.pointer, {"noise_multiplier": min(noise, NOISE_MAX)})
    return Imported(
        "a Flower LocalDpMod",
        Node("repeated", config.pointer, {"count": rounds or 1, "mechanism": update}),
        NeighbouringRelation.REPLACE_ONE,
        delta,
        claims=(Claim(claimed, delta, epsilon.pointer, update),),
        findings=findings,
    )


def _refute_without_noise(part: Part, epsilon: float, delta: float, noise: float) -> Finding:
    """Return the finding that there is almost no noise, which refutes a claimed ε."""
    return Finding(
        "claim-refuted",
        part.pointer,
        f"ε = {shown(epsilon)} at δ = {shown(delta)} is claimed; the noise is {noise:.3g} of "
        f"the norm",
        f"noise of {shown(NOISE_MIN)} of the norm, which is more, has ε > "
        f"{shown(_EPSILON_AT_NOISE_MIN)} at "
        "every δ ≤ 0.5",
    )


def _check_sensitivity(part: Part, sensitivity: float, norm: float) -> tuple[Finding, ...]:
    """Return a finding unless the stated sensitivity is 2C, for updates clipped to norm C."""
    if sensitivity < norm:
        message = (
            f"the sensitivity is {shown(sensitivity)}, but updates are clipped to norm "
            f"{shown(norm)}: the "
            f"noise is {norm / sensitivity:.4g} times smaller than the formula wants"
        )
        instead = (
            f"two clipped updates are up to {shown(2 * norm)} apart: "
            f"sensitivity = {shown(2 * norm)}"
        )
        return (Finding("sensitivity-below-clip", part.pointer, message, instead),)
    if sensitivity < 2 * norm:
        message = (
            f"the sensitivity is {shown(sensitivity)}; the server sees each update, and any two "
            f"updates "
            f"of norm {shown(norm)} are up to {shown(2 * norm)} apart"
        )
        instead = f"sensitivity = {shown(2 * norm)} protects an update among all others"
        return (Finding("local-sensitivity", part.pointer, message, instead),)
    if sensitivity > 2 * norm:
        message = (
            f"the sensitivity is {shown(sensitivity)}, above twice the clipping norm {shown(norm)}"
        )
        instead = f"sensitivity = {shown(2 * norm)} is enough"
        return (Finding("sensitivity-above-clip", part.pointer, message, instead),)
    return ()


def _check_classical(part: Part, epsilon: float) -> tuple[Finding, ...]:
    """Return a finding if ε ≥ 1, where the classical Gaussian formula is not proved."""
    if epsilon < 1:
        return ()
    message = (
        "the noise is computed by √(2·log(1.25/δ))/ε, "
        f"which is proved for ε < 1; ε is {shown(epsilon)}"
    )
    instead = "use the analytic Gaussian mechanism: `accountant noise-multiplier --sampling none`"
    return (Finding("classical-gaussian", part.pointer, message, instead),)


def _check_rounds(config: Part, rounds: int | None, epsilon: float) -> tuple[Finding, ...]:
    """Return a finding if there are several rounds: the configured ε is that of one round."""
    if rounds is None:
        message = f"ε = {shown(epsilon)} is that of one message"
        instead = "state num_rounds in the document, to compute the cost of all rounds"
    elif rounds > 1:
        message = f"ε = {shown(epsilon)} is that of one message; a client sends up to {rounds}"
        instead = "all rounds together cost more than one message"
    else:
        return ()
    return (Finding("per-round-budget", config.pointer, message, instead),)


def _read_server(config: Part, facts: Facts) -> Imported:
    """Import a server strategy that adds noise to the average of clipped updates.

    Clients are drawn in a fixed number, so that another client takes the place of one that leaves.
    """
    given = _field(config, "noise_multiplier")
    noise, planned = read_noise(given), _field(config, "num_sampled_clients")
    sampled = planned.whole(1, COUNT_MAX)
    clients = read_size(_find(config, "num_clients", "num_supernodes"), facts.dataset_size)
    fraction = _find(config, "fraction_fit", "fraction_train")
    findings = [_WEIGHTED]
    averaged = sampled
    if fraction is not None and clients is not None:
        least = _find(config, "min_fit_clients", "min_train_nodes")
        averaged = max(int(fraction.number(0.0, 1.0) * clients), read_size(least) or 1)
        averaged = min(averaged, clients)
        if averaged != sampled:
            findings.append(_count_mismatch(planned, sampled, averaged))
            noise = read_noise(Part(noise * averaged / sampled, given.pointer))
    require_agreement(planned, averaged, facts.batch_size)
    relation = facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    is_replaced = relation is NeighbouringRelation.REPLACE_ONE or (
        clients is not None and facts.sampling != "none" and added
    )
    if "Adaptive" in _STRATEGIES.get(_strategy(config), "") and not is_replaced:
        noise = _noise_with_count(config, noise, sampled)
    step = Node("gaussian", given.pointer, {"noise_multiplier": noise})
    if clients is None:
        findings.append(
            Finding(
                "sampling-not-stated",
                config.pointer,
                "the number of clients is not stated, so the computed cost is that of a client in "
                "every round, without amplification by sampling",
                "state num_clients in the document",
            )
        )
    elif averaged > clients:
        raise planned.fault(f"must be at most the {clients} clients")
    else:
        fields = {"dataset_size": clients, "batch_size": averaged, "mechanism": step}
        step = Node("fixed_size_sampled", planned.pointer, fields)
    rounds = _field(config, *_ROUNDS)
    run = Node(
        "repeated",
        config.pointer,
        {"count": rounds.whole(1, COUNT_MAX), "mechanism": step},
    )
    epsilon, delta = _find(config, "epsilon"), read_delta(_find(config, "delta", "target_delta"))
    claimed = read_epsilon(epsilon)
    return Imported(
        "a Flower strategy with noise on the server",
        run,
        relation,
        delta,
        claims=(Claim(claimed, delta, epsilon.pointer),) if epsilon and claimed else (),
        findings=tuple(findings),
        dataset_size=clients,
        batch_size=averaged,
        sampling_pointer=config.pointer,
    )


_WEIGHTED: Final = Finding(
    "weighted-average",
    "",
    "FedAvg weights updates by their clients' numbers of examples, and the noise is that of equal "
    "weights: a client with the share w of the examples of a round changes the average by up to "
    "w·C, not by C/n",
    "the computed cost holds if all clients have the same number of examples or the same weight",
)


def _strategy(config: Part) -> str:
    """Return the name of the server strategy's class, or an empty string."""
    named = config.value.get("strategy")
    return config.class_name or (named if isinstance(named, str) else "")


def _noise_with_count(config: Part, noise: float, sampled: int) -> float:
    """Return the noise multiplier that covers adaptive clipping's noisy sum and noisy count.

    Flower gives the sum (z⁻² − (2s)⁻²)^(−1/2), s the standard deviation of the count, as in Andrew
    et al., arXiv 1905.03871v5, Theorem 1. That theorem counts ±½, Flower 0 and 1: a client that
    takes another's place changes the sum by 2C and the count by 1, so z holds; one that comes or
    goes, or whose update is replaced by zero, changes them by C and 1, which costs z⁻² + ¾·s⁻².
    """
    part = _find(config, "clipped_count_stddev")
    deviation = _positive(part) if part else sampled / 20
    if noise >= 2 * deviation:
        raise _field(config, "noise_multiplier").fault(
            f"must be below {shown(2 * deviation)}, twice the deviation of the clipped count"
        )
    return float((noise**-2 + 0.75 * deviation**-2) ** -0.5)


def _count_mismatch(planned: Part, sampled: int, averaged: int) -> Finding:
    """Return the finding that the noise is planned for more or fewer clients than are averaged."""
    message = (
        f"the noise of the average is planned for {sampled} clients, and {averaged} are averaged: "
        f"their noise multiplier is {averaged / sampled:.4g} times the one given"
    )
    return Finding(
        "client-count-mismatch", planned.pointer, message, f"num_sampled_clients = {averaged}"
    )
