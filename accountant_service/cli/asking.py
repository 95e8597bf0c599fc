"""Ask an endpoint of the API without HTTP, for commands with a fixed set of options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accountant_service.cli.problems import run_or_exit, validate

Json = dict[str, Any]


def answer_or_exit(
    path: str,
    options: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    as_json: bool,
    time_limit: float | None = None,
) -> Json:
    """Compute an endpoint's answer without HTTP; on an error, print it and exit with code 2.

    Args:
        path: the path of the endpoint.
        options: the fields of the request; None counts as missing.
        names: the name of a field on the command line, where it is not its own with dashes.
        as_json: whether to print the problem document as JSON.
        time_limit: most CPU seconds of the computation; None for any.
    """
    from accountant_service.api.questions import ENDPOINTS

    endpoint = ENDPOINTS[path]
    given = {name: value for name, value in options.items() if value is not None}
    shown = {f"/{name}": "--" + name.replace("_", "-") for name in options} | dict(names)

    def answer() -> Json:
        """Validate the request, and compute its answer, as JSON."""
        return endpoint.answer(validate(endpoint.request, given)).model_dump(mode="json")

    shown["/time_limit"] = "--time-limit"
    return run_or_exit(answer, shown, as_json=as_json, time_limit=time_limit)
