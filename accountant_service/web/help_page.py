"""The help page: terms, verdicts, budgets, and every kind of mechanism with an example."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from accountant_service.api.routes import StrictRoute
from accountant_service.web import kind_form, run_form
from accountant_service.web.rendering import respond_with_static_page

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/help")
async def show_help(request: Request) -> Response:
    """Explain what the pages show."""
    return await respond_with_static_page(
        request,
        "help.html",
        lambda: {"kinds": [(each, run_form.format_example(each)) for each in kind_form.EXAMPLES]},
    )
