"""The help page: terms, verdicts, budgets, and every kind of mechanism with an example."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from accountant_service.api.routes import StrictRoute
from accountant_service.web import kind_form, run_form
from accountant_service.web.rendering import render_page
from accountant_service.web.session_checks import optional_session

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/help")
def show_help(request: Request) -> Response:
    """Explain what the pages show."""
    optional_session(request)
    kinds = [(kind, run_form.format_example(kind)) for kind in kind_form.EXAMPLES]
    return render_page(request, "help.html", kinds=kinds)
