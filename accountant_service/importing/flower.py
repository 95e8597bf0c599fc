"""Flower: `LocalDpMod`, and the strategies that clip and add noise on the server.

Flower at commit fdef7afb: `clientapp/mod/localdp_mod.py`, `serverapp/strategy/dp_*_clipping.py`,
`common/differential_privacy.py`. The server adds noise of standard deviation σC/n to the average,
n the planned number of clients. FedAvg draws a fixed number of clients without replacement and
weights their updates by the number of examples.
"""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import CLASS_NAME, Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.importing.keys import (
    CLAIM,
    CLASS,
    POST_PROCESSING,
    SAMPLING,
    SEED,
    Fields,
    Role,
    acts,
    checked,
    harmless,
    join,
)
from accountant_service.importing.runs import (
    DELTA_MAX,
    DELTA_MIN,
    EPSILON_MAX,
    read_claims,
    read_delta,
    read_noise,
    read_size,
    require_agreement,
)
from accountant_service.mechanisms.kinds import COUNT_MAX, NOISE_MAX, NOISE_MIN
from accountant_service.writing.number_format import round_nearest as shown

_ADAPTIVE: Final = (
    "strategy", "noise_multiplier", "num_sampled_clients", "initial_clipping_norm",
    "target_clipped_quantile", "clip_norm_lr", "clipped_count_stddev",
)  # fmt: skip
_FIXED: Final = ("strategy", "noise_multiplier", "clipping_norm", "num_sampled_clients")
CONSTRUCTORS: Final = {
    "LocalDpMod": ("clipping_norm", "sensitivity", "epsilon", "delta"),
    **{
        f"DifferentialPrivacy{side}Side{clipping}Clipping": arguments
        for side in ("Server", "Client")
        for clipping, arguments in (("Fixed", _FIXED), ("Adaptive", _ADAPTIVE))
    },
}
PREFIXES: Final = ("dp_", "local_dp_")
KEYS: Final = join(
    acts("sensitivity", "of `LocalDpMod`: the noise is this times √(2·log(1.25/δ))/ε; at least 2C"),
    acts("clipping_norm", "C of `LocalDpMod`; of a strategy the noise is relative to it"),
    acts("noise_multiplier", "of a strategy: standard deviation of the noise over C"),
    acts("num_sampled_clients", "clients that the noise of a strategy's average is planned for"),
    acts("num_rounds num_server_rounds", "rounds, in each of which a client sends one update"),
    acts("num_clients num_supernodes num_available_clients", "clients that are drawn from"),
    acts("fraction_fit fraction_train", "of the clients that a round draws"),
    acts("min_fit_clients min_train_nodes", "fewest clients that a round draws"),
    acts("clipped_count_stddev", "of adaptive clipping: deviation of the noisy count"),
    acts("strategy", "the class of the strategy, or the strategy that it wraps", is_whole=True),
    *CLAIM,
    *SAMPLING,
    acts("dataset_size", "number of clients"),
    acts("batch_size", "clients in a round"),
    *CLASS,
    acts("initial_clipping_norm", "of adaptive clipping, which releases a noisy count"),
    acts("target_clipped_quantile clip_norm_lr", "as `initial_clipping_norm`"),
    harmless(
        "fraction_evaluate min_evaluate_clients min_evaluate_nodes min_available_clients "
        "min_available_nodes",
        "evaluation, and how many clients the server waits for",
    ),
    harmless(
        "num_shares reconstruction_threshold publisher serverapp clientapp",
        "secure aggregation, and the parts of the app",
    ),
    SEED,
    *POST_PROCESSING,
)
LOCAL: Final = tuple(
    each
    for each in KEYS
    if each.names[0] in CONSTRUCTORS["LocalDpMod"] or each.role is Role.HARMLESS
)
_OF_ADAPTIVE: Final = (
    "initial_clipping_norm", "target_clipped_quantile", "clipped_count_stddev",
)  # fmt: skip
_DRAWN: Final = ("fraction_fit", "min_fit_clients")
_AVERAGING: Final = ("FedAvg", "FedAvgM", "FedProx", "FedOpt", "FedAdam", "FedAdagrad", "FedYogi")
WRAPPED: Final = join(
    *(each for each in KEYS if each.names[0] in _DRAWN),
    acts(CLASS_NAME, f"the strategy that averages: {', '.join(_AVERAGING)}"),
    checked("weighted_by_key", "the weights of the average are a finding of every strategy"),
    *(each for each in KEYS if each.role is Role.HARMLESS),
    harmless(
        "proximal_mu eta eta_l beta_1 beta_2 tau server_learning_rate server_momentum",
        "clients' training, and post-processing of the noisy average",
    ),
    harmless(
        "accept_failures inplace initial_parameters evaluate_fn on_fit_config_fn "
        "on_evaluate_config_fn fit_metrics_aggregation_fn evaluate_metrics_aggregation_fn "
        "train_metrics_aggr_fn evaluate_metrics_aggr_fn arrayrecord_key configrecord_key",
        "callbacks of the server, and names in messages",
    ),
)
_NUMBER_MAX: Final = 1e9
_EPSILON_AT_NOISE_MIN: Final = 19_000  # under replace-one, at δ = 0.5; a test computes it


def select_app_config(document: Part) -> Part:
    """Return the configuration of a Flower app in a `pyproject.toml`; else the document itself.

    All other tables of such a file are about packages and tools.
    """
    tool = document.value.get("tool") if isinstance(document.value, dict) else None
    if not isinstance(tool, dict) or "flwr" not in tool:
        return document
    for name in ("tool", "flwr", "app", "config"):
        document = document.field(name)
    if not isinstance(document.value, dict):
        raise document.fault("must be an object")
    return document


def detect(fields: Fields) -> bool:
    """Return whether a document is one of Flower's configurations."""
    is_local = fields.has("clipping_norm", "sensitivity", "epsilon", "delta")
    return is_local or fields.has("num_sampled_clients") or _strategy(fields) in CONSTRUCTORS


def read(fields: Fields, facts: Facts) -> Imported:
    """Import a Flower client mod, a server strategy, or an app's configuration."""
    if not fields.has("sensitivity"):
        return _read_server(fields, facts)
    return read_local(fields, read_size(fields.find("num_rounds")))


def _positive(part: Part) -> float:
    """Return a value as a positive number; raise DocumentError for any other."""
    return part.number(0.0, _NUMBER_MAX, above=True)


def read_local(fields: Fields, rounds: int | None) -> Imported:
    """Import a `LocalDpMod`, which adds noise to each client's clipped update in each round.

    The standard deviation of the noise is sensitivity·√(2·log(1.25/δ))/ε. The server sees each
    update, so that any two clipped updates are neighbours: replace-one.
    """
    clip, sensitivity = (fields.field(name) for name in ("clipping_norm", "sensitivity"))
    epsilon, pointer = fields.field("epsilon"), fields.root.pointer
    claimed = epsilon.number(0.0, EPSILON_MAX, above=True)
    delta = fields.field("delta").number(DELTA_MIN, DELTA_MAX)
    norm, width = _positive(clip), _positive(sensitivity)
    findings = (
        *_check_sensitivity(sensitivity, width, norm),
        *_check_classical(epsilon, claimed),
        *_check_rounds(pointer, rounds, claimed),
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
    update = Node("gaussian", pointer, {"noise_multiplier": min(noise, NOISE_MAX)})
    return Imported(
        "a Flower LocalDpMod",
        Node("repeated", pointer, {"count": rounds or 1, "mechanism": update}),
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


def _check_rounds(pointer: str, rounds: int | None, epsilon: float) -> tuple[Finding, ...]:
    """Return a finding if there are several rounds: the configured ε is that of one round."""
    if rounds is None:
        message = f"ε = {shown(epsilon)} is that of one message"
        instead = "state num_rounds in the document, to compute the cost of all rounds"
    elif rounds > 1:
        message = f"ε = {shown(epsilon)} is that of one message; a client sends up to {rounds}"
        instead = "all rounds together cost more than one message"
    else:
        return ()
    return (Finding("per-round-budget", pointer, message, instead),)


def _read_server(fields: Fields, facts: Facts) -> Imported:
    """Import a server strategy that adds noise to the average of clipped updates.

    Clients are drawn in a fixed number, so that another client takes the place of one that leaves.
    """
    pointer, strategy = fields.root.pointer, fields.find("strategy")
    given = fields.field("noise_multiplier")
    noise, planned = read_noise(given), fields.field("num_sampled_clients")
    sampled = planned.whole(1, COUNT_MAX)
    stated = read_size(fields.find("dataset_size"), facts.dataset_size)
    clients = read_size(fields.find("num_clients"), stated)
    places = [fields] if strategy is None else [fields, *_read_wrapped(fields, strategy)]
    fraction, least = (_find_in(places, name) for name in _DRAWN)
    fields.find("clipping_norm")
    findings = [_WEIGHTED]
    averaged = sampled
    if fraction is not None and clients is not None:
        averaged = max(int(fraction.number(0.0, 1.0) * clients), read_size(least) or 1)
        averaged = min(averaged, clients)
        if averaged != sampled:
            findings.append(_count_mismatch(planned, sampled, averaged))
            noise = read_noise(Part(noise * averaged / sampled, given.pointer))
    premises: tuple[str, ...] = ()
    if clients is None and (fraction or least):
        premises = (f"a round averages the {sampled} clients that its noise is planned for",)
    require_agreement(planned, averaged, read_size(fields.find("batch_size"), facts.batch_size))
    relation = facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    is_replaced = relation is NeighbouringRelation.REPLACE_ONE or (
        clients is not None and facts.sampling != "none" and added
    )
    if _is_adaptive(fields):
        with_count = _noise_with_count(fields, noise, sampled)
        noise = noise if is_replaced else with_count
    step = Node("gaussian", given.pointer, {"noise_multiplier": noise})
    if clients is None:
        findings.append(
            Finding(
                "sampling-not-stated",
                pointer,
                "the number of clients is not stated, so the computed cost is that of a client in "
                "every round, without amplification by sampling",
                "state num_clients in the document",
            )
        )
    elif averaged > clients:
        raise planned.fault(f"must be at most the {clients} clients")
    else:
        sample = {"dataset_size": clients, "batch_size": averaged, "mechanism": step}
        step = Node("fixed_size_sampled", planned.pointer, sample)
    rounds = fields.field("num_rounds").whole(1, COUNT_MAX)
    run = Node("repeated", pointer, {"count": rounds, "mechanism": step})
    delta = read_delta(fields.find("delta"))
    return Imported(
        "a Flower strategy with noise on the server",
        run,
        relation,
        delta,
        claims=read_claims(fields, delta),
        findings=tuple(findings),
        dataset_size=clients,
        batch_size=averaged,
        sampling_pointer=pointer,
        is_sampling_stated=True,
        premises=premises,
    )


def _read_wrapped(fields: Fields, strategy: Part) -> list[Fields]:
    """Return the keys of the strategy that a strategy with noise wraps; none of a name alone."""
    if isinstance(strategy.value, str):
        strategy.choice((*CONSTRUCTORS, *_AVERAGING))
        return []
    inner = fields.inside(strategy, WRAPPED)
    inner.find("weighted_by_key")
    if strategy.class_name in _AVERAGING:
        inner.find(CLASS_NAME)
    return [inner]


def _find_in(places: list[Fields], name: str) -> Part | None:
    """Return a key of the document, or of the strategy that it wraps."""
    found = [each.find(name) for each in places]
    return next((each for each in found if each is not None), None)


def _is_adaptive(fields: Fields) -> bool:
    """Return whether the strategy adapts the clipping norm, for which it releases a count."""
    if (name := _strategy(fields)) in CONSTRUCTORS and "Adaptive" not in name:
        return False
    for each in _OF_ADAPTIVE:
        fields.find(each)
    if name in CONSTRUCTORS:
        return True
    return any(fields.has(each) for each in _OF_ADAPTIVE)


_WEIGHTED: Final = Finding(
    "weighted-average",
    "",
    "FedAvg weights updates by their clients' numbers of examples, and the noise is that of equal "
    "weights: a client with the share w of the examples of a round changes the average by up to "
    "w·C, not by C/n",
    "the computed cost holds if all clients have the same number of examples or the same weight",
)


def _strategy(fields: Fields) -> str:
    """Return the name of the server strategy's class, or an empty string."""
    named = fields.find("strategy")
    by_name = named.value if named is not None and isinstance(named.value, str) else ""
    return str(by_name if fields.class_name is None else fields.class_name)


def _noise_with_count(fields: Fields, noise: float, sampled: int) -> float:
    """Return the noise multiplier that covers adaptive clipping's noisy sum and noisy count.

    Flower gives the sum (z⁻² − (2s)⁻²)^(−1/2), s the standard deviation of the count, as in Andrew
    et al., arXiv 1905.03871v5, Theorem 1. That theorem counts ±½, Flower 0 and 1: a client that
    takes another's place changes the sum by 2C and the count by 1, so z holds; one that comes or
    goes, or whose update is replaced by zero, changes them by C and 1, which costs z⁻² + ¾·s⁻².
    """
    part = fields.find("clipped_count_stddev")
    deviation = _positive(part) if part else sampled / 20
    if noise >= 2 * deviation:
        raise fields.field("noise_multiplier").fault(
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
