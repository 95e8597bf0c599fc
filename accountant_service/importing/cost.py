"""The certified cost of an imported mechanism, and which claims about it hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.accounting import calculator, solver
from accountant_service.accounting.guarantee import (
    Assumption,
    Guarantee,
    Interval,
    NeighbouringRelation,
    Status,
)
from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.accounting.noise_tails import NoiseTail, find_noise_tails
from accountant_service.errors import AccountingError, BoundsContradictError
from accountant_service.importing.document import DocumentError
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Imported, Node
from accountant_service.mechanisms import DpSgd, Mechanism, MechanismError
from accountant_service.numerics.floats import rounding
from accountant_service.writing import number_format
from accountant_service.writing.number_format import round_nearest as shown

_LOOSE: Final = 1.05  # a claim above this multiple of the proved ε is worth a note


class Verdict(StrEnum):
    """A verdict on a claimed ε, from the best to the worst.

    `holds_but_loose`: it is more than 5 % above what is proved. `too_small`: it is below a proved
    lower bound. `not_proven`: neither is proved.
    """

    NOTHING_CLAIMED = "nothing_claimed"
    HOLDS = "holds"
    LOOSE = "holds_but_loose"
    NOT_PROVEN = "not_proven"
    TOO_SMALL = "too_small"


@dataclass(frozen=True, slots=True)
class CheckedClaim:
    """An (ε, δ) claim of a document, with what is proved about it.

    Attributes:
        pointer: where it is claimed.
        epsilon: the claimed ε.
        delta: the claimed δ.
        status: proven, refuted, or an estimate if neither is proved.
        true_epsilon: proved bounds of ε at the claimed δ, if there are any; None of an estimate.
        true_delta: proved bounds of δ at the claimed ε, if there are any.
    """

    pointer: str
    epsilon: float
    delta: float
    status: Status
    true_epsilon: Interval | None
    true_delta: Interval | None

    @property
    def verdict(self) -> Verdict:
        """The verdict on the claimed ε."""
        if self.status is Status.REFUTED:
            return Verdict.TOO_SMALL
        if self.status is not Status.PROVEN or self.true_epsilon is None:
            return Verdict.NOT_PROVEN
        is_loose = self.epsilon > _LOOSE * self.true_epsilon.upper
        return Verdict.LOOSE if is_loose else Verdict.HOLDS

    def describe(self, who: str) -> str:
        """Return the verdict as a sentence; `who` names the claimed ε."""
        text, bounds = (
            f"{who} = {shown(self.epsilon)} at δ = {shown(self.delta)}",
            self.true_epsilon,
        )
        match self.verdict, bounds:
            case Verdict.HOLDS, _:
                return f"{text} holds."
            case Verdict.LOOSE, Interval(_, upper):
                most = number_format.round_up(upper, 4)
                return f"{text} holds but is loose: the true ε is at most {most}."
            case Verdict.TOO_SMALL, Interval(lower, _):
                least = number_format.round_down(lower, 4)
                return f"{text} is too small: the true ε is at least {least}."
            case Verdict.TOO_SMALL, _:
                return f"{text} is too small."
            case _, Interval(_, upper):
                most = number_format.round_up(upper, 4)
                return f"{text} is not proved: ε ≤ {most} is."
            case _:
                return f"{text} is not proved."


@dataclass(frozen=True, slots=True)
class Answer:
    """The cost of an imported document, its claims, and the findings.

    Attributes:
        found: what the document says; its noise is solved for if the document does not say it.
        mechanism: the mechanism's JSON; None if there is no guarantee at all.
        guarantee: ε at δ; None if there is none.
        reason: why there is none.
        claims: each with its status.
        reported: the ε of the tool's own accountant as a claim, if its method is known and the
            document claims none.
        findings: all, errors first.
    """

    found: Imported
    mechanism: dict[str, Any] | None
    guarantee: Guarantee | None
    reason: str | None
    claims: tuple[CheckedClaim, ...]
    findings: tuple[Finding, ...]
    reported: CheckedClaim | None = None
    noise_tails: tuple[NoiseTail, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the claims; without one, that of the tool's own accountant."""
        if (worst := self._find_worst()) is not None:
            return worst.verdict
        return Verdict.NOT_PROVEN if self.found.claims else Verdict.NOTHING_CLAIMED

    @property
    def summary(self) -> str:
        """The verdict as one sentence."""
        if (worst := self._find_worst()) is not None:
            said = worst.describe("The claimed ε" if self.claims else "The tool's ε")
        elif self.guarantee is None:
            said = f"No ε is proved: {self.reason}."
        else:
            bound = number_format.round_up(self.guarantee.epsilon, 4)
            is_proven = self.guarantee.status is Status.PROVEN
            kind = f"ε ≤ {bound} is proved" if is_proven else f"ε = {bound} is an estimate"
            said = f"Nothing is claimed: {kind} at δ = {shown(self.guarantee.delta)}."
        premises = " and that ".join(self.found.premises)
        return f"{said} The document does not establish that {premises}." if premises else said

    def _find_worst(self) -> CheckedClaim | None:
        """Return the claim with the worst verdict, or what the tool's accountant reports."""
        every = self.claims or ((self.reported,) if self.reported else ())
        return max(every, key=lambda claim: list(Verdict).index(claim.verdict), default=None)


def account_for(found: Imported) -> Answer:
    """Return the certified cost of an imported document, and the lint's findings.

    Args:
        found: as checked by `require_valid`, with δ.
    """
    if found.mechanism is None or found.delta is None:
        nothing = "no mechanism with a guarantee is described"
        return Answer(found, None, None, nothing, _refuted_claims(found), _sorted(found.findings))
    found = _solve_for_noise(found, found.delta)
    mechanism, delta = found.mechanism, found.delta
    assert mechanism is not None
    assert delta is not None
    guarantee, reason = _guarantee(mechanism, found.relation, delta, found.premises)
    claims = tuple(_check(claim, found) for claim in found.claims)
    reported = _check_accountant(found, delta)
    findings = [*found.findings, *(each for claim in claims for each in _claim_findings(claim))]
    if reported is not None:
        findings += _accountant_findings(reported, found)
    described = mechanism.to_json()
    tails = find_noise_tails(_read(_with_fewest_epochs(mechanism, found)), found.libraries)
    return Answer(found, described, guarantee, reason, claims, _sorted(findings), reported, tails)


def _with_fewest_epochs(node: Node, found: Imported) -> Node:
    """Return a shuffled run with its sizes, if its rate counts the most epochs that it can have."""
    is_run = node.kind == "dp_sgd" and node.fields.get("sampling") == "shuffled"
    if not is_run or found.epoch_batches is None or found.epochs is not None:
        return node
    sizes = {"dataset_size": found.dataset_size, "batch_size": found.batch_size}
    return node.but(sample_rate=None, **sizes)


def _refuted_claims(found: Imported) -> tuple[CheckedClaim, ...]:
    """Return the claims that are refuted although no mechanism can be accounted for."""
    return tuple(
        CheckedClaim(claim.pointer, claim.epsilon, claim.delta, Status.REFUTED, None, None)
        for claim in found.claims
        if claim.is_refuted and claim.delta is not None
    )


def require_valid(found: Imported) -> None:
    """Raise DocumentError unless the imported mechanisms are valid in this service.

    Raises:
        DocumentError: they are not; the error points into the document.
    """
    placeholder = {} if found.target is None else {"noise_multiplier": 1.0}
    claimed = [claim.mechanism for claim in found.claims]
    for node in (found.mechanism, found.accounted, *claimed):
        if node is not None:
            _read(node.but(**placeholder))


def _sorted(findings: Any) -> tuple[Finding, ...]:
    """Return findings sorted by severity, errors first."""
    order = ["error", "warning", "note"]
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def _read(node: Node) -> Mechanism:
    """Convert an imported node to a mechanism.

    Raises:
        DocumentError: it is not valid here; the error points into the document.
    """
    try:
        return mechanisms.from_json(node.to_json())
    except MechanismError as error:
        faults = [
            (node.source_of(pointer), f"as {node.kind}{pointer}: {message}")
            for pointer, message in error.faults
        ]
        raise DocumentError(*faults) from None


def _solve_for_noise(found: Imported, delta: float) -> Imported:
    """Find the least noise that reaches the document's target ε, if it states no noise.

    It is the noise for which the tool's own method finds the target, for what the tool accounts.
    """
    if found.target is None or found.mechanism is None:
        return found
    accounted = found.accounted or found.mechanism
    run = _read(accounted.but(noise_multiplier=1.0))
    assert isinstance(run, DpSgd)
    target = solver.Target(
        ACCOUNTANTS[found.method or "pld"], _accounted_relation(found), found.target, delta
    )
    noise = solver.noise_multiplier(run, target).value
    finding = Finding(
        "noise-chosen",
        accounted.pointer,
        f"the tool chooses the noise for ε = {shown(found.target)} at δ = {shown(delta)}",
        f"the least noise multiplier by {target.accountant.name} is {shown(noise)}",
    )
    return replace(
        found,
        mechanism=found.mechanism.but(noise_multiplier=noise),
        accounted=found.accounted and found.accounted.but(noise_multiplier=noise),
        findings=(*found.findings, finding),
    )


def _accounted_relation(found: Imported) -> NeighbouringRelation:
    """Return the neighbouring relation that the other tool's accountant assumes.

    The tools whose own method is known, Opacus and jax_privacy's Keras, account for an added or
    removed record, whatever relation is stated with the import.
    """
    is_fixed = found.accounted is not None or found.method is not None
    return NeighbouringRelation.ADD_OR_REMOVE_ONE if is_fixed else found.relation


def _guarantee(
    node: Node, relation: NeighbouringRelation, delta: float, premises: tuple[str, ...]
) -> tuple[Guarantee | None, str | None]:
    """Return a mechanism's guarantee at δ and None; or None and the reason.

    With premises that are not checked it is an estimate, whatever is proved of the mechanism.
    """
    mechanism = _read(node)
    try:
        found = calculator.epsilon(mechanism, delta, relation=relation)
    except BoundsContradictError:
        raise
    except AccountingError as error:
        try:
            found = calculator.prove_epsilon(mechanism, relation, delta)
        except AccountingError:
            return None, error.detail
    if not premises:
        return found, None
    unmet = tuple(Assumption(premise, False, "the document") for premise in premises)
    return (
        replace(
            found,
            status=Status.ESTIMATE,
            certified=None,
            certified_reason=f"it is not established that {premises[0]}",
            assumptions=(*found.assumptions, *unmet),
        ),
        None,
    )


def _check(claim: Claim, found: Imported) -> CheckedClaim:
    """Compare a claimed (ε, δ) with what is proved; return the claim with its status.

    A guarantee at the mechanism's own δ, by however little that is above the claimed δ, proves
    nothing of the claim. The claim is then false if its ε has more than its δ.
    """
    node = claim.mechanism or found.mechanism
    delta = found.delta if claim.delta is None else claim.delta
    assert node is not None
    assert delta is not None
    relation = claim.relation or found.relation
    proved, _ = _guarantee(node, relation, delta, found.premises)
    if proved is not None and rounding.as_written(proved.delta) > rounding.as_written(delta):
        proved = None
    epsilon = proved.certified if proved else None
    upper = proved.epsilon if proved and proved.status is Status.PROVEN else None
    status = Status.ESTIMATE
    if upper is not None and upper <= claim.epsilon:
        status = Status.PROVEN
    elif epsilon is not None and claim.epsilon < epsilon.lower:
        status = Status.REFUTED
    interval = epsilon or (Interval(0.0, upper) if upper is not None else None)
    is_asked = status is Status.REFUTED or (proved is None and not found.premises)
    true_delta = _delta_at(node, relation, claim.epsilon) if is_asked else None
    if true_delta and rounding.as_written(true_delta.lower) > rounding.as_written(delta):
        status = Status.REFUTED
    return CheckedClaim(claim.pointer, claim.epsilon, delta, status, interval, true_delta)


def _delta_at(node: Node, relation: NeighbouringRelation, epsilon: float) -> Interval | None:
    """Return a proved interval around δ at ε, or None if there is none."""
    try:
        return calculator.delta(_read(node), epsilon, relation=relation).certified
    except BoundsContradictError:
        raise
    except AccountingError:
        return None


def _claim_findings(claim: CheckedClaim) -> list[Finding]:
    """Return a finding if a claimed ε is refuted, not proven, or far above the proved ε."""
    bounds, text = claim.true_epsilon, f"ε = {shown(claim.epsilon)} at δ = {shown(claim.delta)}"
    if claim.status is Status.REFUTED:
        right = [] if bounds is None else [f"{_between('ε', bounds)} at δ = {shown(claim.delta)}"]
        if claim.true_delta is not None:
            right.append(f"{_between('δ', claim.true_delta)} at ε = {shown(claim.epsilon)}")
        instead = "; ".join(right)
        return [Finding("claim-refuted", claim.pointer, f"{text} is claimed", instead)]
    if bounds is None:
        return [Finding("claim-not-proven", claim.pointer, f"{text} is claimed", "nothing proved")]
    if claim.status is Status.ESTIMATE:
        instead = f"proved: ε ≤ {number_format.round_up(bounds.upper)} at δ = {shown(claim.delta)}"
        return [Finding("claim-not-proven", claim.pointer, f"{text} is claimed", instead)]
    if claim.verdict is Verdict.LOOSE:
        instead = f"ε ≤ {number_format.round_up(bounds.upper)} is proved"
        return [Finding("claim-loose", claim.pointer, f"{text} is claimed", instead)]
    return []


def _between(symbol: str, bounds: Interval) -> str:
    """Say in words that a value is between two bounds, rounded outward."""
    low, high = number_format.round_down(bounds.lower, 4), number_format.round_up(bounds.upper, 4)
    return f"{symbol} is between {low} and {high}"


def _check_accountant(found: Imported, delta: float) -> CheckedClaim | None:
    """Compare the ε that the tool's own accountant reports with what is proved of the run.

    Both are under the relation that the tool accounts for. None if its method is not known.
    """
    accounted = found.accounted or found.mechanism
    if found.method is None or accounted is None:
        return None
    relation = _accounted_relation(found)
    try:
        reported = calculator.epsilon(_read(accounted), delta, found.method, relation)
    except BoundsContradictError:
        raise
    except AccountingError:
        return None
    return _check(Claim(reported.epsilon, delta, accounted.pointer, relation=relation), found)


def _accountant_findings(reported: CheckedClaim, found: Imported) -> list[Finding]:
    """Return a finding if the ε of the tool's own accountant is too small or far too large.

    It is too small if it is below the ε of what is run, under the relation that the tool accounts
    for. It is called too large only if the tool accounts for what is run and for the neighbours of
    the claims: else the difference is that of two questions.
    """
    relation, bounds = _accounted_relation(found), reported.true_epsilon
    where = "" if relation is found.relation else f" under {relation}"
    text = f"{found.method} reports ε = {reported.epsilon:.5g}{where}"
    if reported.verdict is Verdict.TOO_SMALL and bounds is not None:
        instead = f"{_between('ε', bounds)} at δ = {shown(reported.delta)}{where}"
        return [Finding("accountant-refuted", reported.pointer, text, instead)]
    is_same = found.accounted is None and not where and not found.claims
    if is_same and reported.verdict is Verdict.LOOSE and bounds is not None:
        instead = f"ε ≤ {number_format.round_up(bounds.upper)} is proved"
        return [Finding("claim-loose", reported.pointer, text, instead)]
    return []
