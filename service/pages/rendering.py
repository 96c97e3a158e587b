"""Templates to answers: the frame of every page, its content security policy, and error pages.

Names of models, nodes, files and jobs are untrusted. Jinja2 escapes all of them, and the policy
lets a browser run only scripts of service/pages/static.
"""

from __future__ import annotations

import datetime as dt
from functools import cache
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import (
    ChoiceLoader,
    Environment,
    PackageLoader,
    PrefixLoader,
    StrictUndefined,
)

from pipeline import distribution
from pipeline.formatting import bytes_text, date, interval, time_text
from pipeline.host.labels import labels_text
from service.auth import Caller
from service.errors import Answer
from service.http.routers.dependencies import caller_of
from service.pages.access import csrf_token
from service.pages.static_files import url_of

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "style-src-attr 'unsafe-inline'",  # widths of bars in tables
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SIGN_IN = "/ui/sign-in"
SENTENCES = {
    403: "Not allowed",
    404: "Not found",
    413: "Too large",
    429: "Too many requests",
    503: "Not possible now",
    507: "The disk is full",
}


@cache
def environment() -> Environment:
    reports = PrefixLoader({"report": PackageLoader("pipeline.report")})
    loader = ChoiceLoader([PackageLoader("service.pages"), reports])
    made = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "date": date,
        "bytes": bytes_text,
        "time": time_text,
        "interval": interval,
        "ago": ago,
        "labels_text": labels_text,
    }
    made.globals |= {
        "static": url_of,
        "version": distribution.version(),
        "navigation": navigation,
    }
    return made


def navigation(caller: Caller) -> list[tuple[str, str]]:
    """Return the paths and titles of the pages that a caller may use."""
    pages = [("/", "Jobs")]
    if caller.may("compile"):
        pages.append(("/ui/new", "New compile"))
    pages += [("/ui/models", "Models"), ("/ui/compare", "Compare"), ("/ui/limits", "Limits")]
    return [*pages, ("/ui/admin", "Administration")] if caller.may("admin") else pages


def fragment(template: str, **values: Any) -> str:
    """Render a part of a page."""
    return environment().get_template(template).render(**values)


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a page in its frame, for the caller of this request."""
    caller = caller_of(request)
    frame = {
        "caller": caller,
        "signed_in": bool(caller.key),
        "csrf": csrf_token(request),
        "path": request.url.path,
        "status": status,
    }
    return HTMLResponse(fragment(template, **frame, **values), status, HEADERS)


RETRY_MS = 5000  # until a page asks again for a stream that was refused


def error_page(request: Request, refusal: Answer) -> Response:
    """Show a refusal as a page; one without a session leads to the page of signing in."""
    is_fragment = "hx-request" in request.headers
    if request.url.path.endswith("/live") and refusal.status in (429, 503):
        # the page keeps what it shows, and the browser connects again
        return Response(f"retry: {RETRY_MS}\n\n", 200, HEADERS, "text/event-stream")
    if refusal.status == 401:
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        back = here if request.method == "GET" and not is_fragment else "/"
        target = f"{SIGN_IN}?next={quote(back, safe='/')}"
        if is_fragment:
            return Response(status_code=401, headers={"HX-Redirect": target})
        return RedirectResponse(target, 303)
    title = SENTENCES.get(refusal.status, "This did not work")
    values = {"title": title, "refusal": refusal.body}
    if is_fragment:
        return HTMLResponse(fragment("refusal.html", **values), refusal.status, HEADERS)
    answer = page(request, "error.html", refusal.status, **values)
    answer.headers.update(refusal.headers)
    return answer


def ago(when: str | None, now: dt.datetime | None = None) -> str:
    """Say how long ago a moment was: `3 minutes ago`."""
    if when is None:
        return "-"
    passed = (now or dt.datetime.now(dt.UTC)) - dt.datetime.fromisoformat(when)
    seconds = max(0, int(passed.total_seconds()))
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if count := seconds // size:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
