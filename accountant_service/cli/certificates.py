"""The command `accountant verify`: check a certificate offline."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from accountant_service.accounting.guarantee import Guarantee
from accountant_service.cli import model_files
from accountant_service.cli.printing import AsJson
from accountant_service.cli.problems import run_or_exit
from accountant_service.writing import number_format
from accountant_service.writing.number_format import round_nearest as shown

if TYPE_CHECKING:
    from accountant_service.ledger import certificate

verify_app = typer.Typer(add_completion=False)
COMMANDS: Final = {"verify": verify_app}
_NO_CERTIFICATE: Final = 2  # the exit code if the file is no certificate at all


@verify_app.command()
def verify_certificate(
    file: Annotated[typer.FileText, typer.Argument(help="The certificate, as JSON.")],
    public_key: Annotated[
        str | None,
        typer.Option(
            help="The issuer's public key, in hexadecimal, as the issuer told you. Without it, "
            "nothing says whose key signed."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A model's file: verify that the certificate is about this model."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a certificate offline: check its signature and recompute its guarantee.

    A run with scheduled noise has a file with several certificates, one for each noise multiplier.
    Exit code 1 if one is not valid, 2 if the file is no certificate.
    """
    from accountant_service.ledger import certificate

    model_sha256 = _hash_if_given(model, as_json)
    is_certificate = False
    try:
        document = certificate.read(file.read())
        is_certificate = bool(document.keys() & {"format", "certificates"})
        checks = [_check(each, public_key, model_sha256) for each in certificate.split(document)]
    except (ValueError, RecursionError) as error:
        checks = [_Check({}, [f"it is not a certificate: {error}"], None)]
    if as_json:
        print(json.dumps(_describe_checks(checks)))
    else:
        for each in checks:
            _print_check(each, public_key, model_sha256)
        if len(checks) > 1:
            print(f"{len(checks)} certificates, of which each covers its own steps alone")
        valid = "valid" if public_key else "valid, if that key is the issuer's"
        print("not valid" if any(each.faults for each in checks) else valid)
    if not is_certificate:
        raise typer.Exit(_NO_CERTIFICATE)
    if any(each.faults for each in checks):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Check:
    """The result of a certificate's verification.

    Attributes:
        document: the certificate.
        faults: the reasons why it is not valid.
        found: its guarantee, computed anew; None if that is not possible.
    """

    document: certificate.Document
    faults: list[str]
    found: Guarantee | None


def _check(
    document: certificate.Document, public_key: str | None, model_sha256: str | None
) -> _Check:
    """Verify one certificate, and that it names the model if a hash is given."""
    from accountant_service.ledger import certificate

    faults, found = certificate.check(document, public_key)
    if model_sha256 is not None and not (faults and found is None):
        faults = [*faults, *certificate.find_model_faults(document, model_sha256)]
    return _Check(document, faults, found)


def _print_check(check: _Check, public_key: str | None, model_sha256: str | None) -> None:
    """Print the result of a certificate's verification; its faults go to stderr."""
    for fault in check.faults:
        print(fault, file=sys.stderr)
    if check.found is None:
        return
    _print_certificate_check(_describe_check(check), check.found)
    print(f"signed with {check.document.get('public_key')}")
    if public_key is None:
        print(
            "this file does not prove whose key that is, and anybody can sign with another: pass "
            "--public-key with the key that the issuer told you"
        )
    if model_sha256 is not None and not check.faults:
        print(f"it is about this model: SHA-256 {model_sha256}")


def _describe_checks(checks: list[_Check]) -> dict[str, Any]:
    """Return the verification of a file as JSON: of its certificate, or of each of several."""
    if len(checks) == 1:
        return _describe_check(checks[0])
    faults = [
        f"certificate {number}: {fault}"
        for number, each in enumerate(checks, 1)
        for fault in each.faults
    ]
    return {"faults": faults, "certificates": [_describe_check(each) for each in checks]}


def _hash_if_given(model: Path | None, as_json: bool) -> str | None:
    """Return the SHA-256 of a model's file, if given; exit with code 2 if it is unreadable."""
    if model is None:
        return None
    options = {model_files.POINTER: "--model"}
    return run_or_exit(lambda: model_files.hash_model(model), options, as_json=as_json)


def _describe_check(check: _Check) -> dict[str, Any]:
    """Return the result of a certificate's verification as JSON."""
    from accountant_service.ledger import certificate

    document, faults, found = check.document, check.faults, check.found
    dates = document.get("dates")
    return {
        "faults": faults,
        "epsilon": None if found is None else found.epsilon,
        "steps_reserved": document.get("steps_reserved"),
        "steps_granted": document.get("steps"),
        "dataset_closed": dates.get("dataset_closed") if isinstance(dates, dict) else None,
        "model_sha256": certificate.get_model_sha256(document),
        "public_key": document.get("public_key"),
        "assumptions": [] if found is None else [each.statement for each in found.assumptions],
        "not_covered": certificate.list_gaps(document),
    }


def _print_certificate_check(result: dict[str, Any], recomputed: Guarantee) -> None:
    """Print a certificate's recomputed guarantee, and what it covers, assumes and leaves out."""
    epsilon = number_format.round_up(recomputed.epsilon)
    print(f"computed anew: ε = {epsilon} at δ = {shown(recomputed.delta)}")
    reserved, granted = result["steps_reserved"], result["steps_granted"]
    if reserved is not None:
        print(f"it covers all {reserved} steps reserved; {granted} of them were granted")
    if result["dataset_closed"] is not None:
        print(f"the dataset was closed at {result['dataset_closed']}: no later run was reserved")
    for statement in result["assumptions"]:
        print(f"it assumes: {statement}")
    for gap in result["not_covered"]:
        print(f"it does not cover {gap}")
