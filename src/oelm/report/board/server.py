"""The web server of the board: it answers only GET requests to this machine that contain the secret token.

Every address starts with the token and the language: /<token>/en/study?name=paper. Names of studies and runs
in a request are only looked up among the runs that were found, so a request cannot read other files.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oelm.report.board import pages
from oelm.report.board.curves import arm_curves, run_curves
from oelm.report.board.metrics import MEASUREMENTS
from oelm.report.board.snapshot import Board
from oelm.report.formats.html import template_environment
from oelm.report.translate import LANGUAGES, Translator

HOSTS = ("127.0.0.1", "localhost")  # accepted with any port, because `ssh -L` may use a different one
_HERE = Path(__file__).parent
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Guard:
    """Refuses requests with a wrong method, host name or token, and adds security headers to all responses.

    The host name is checked, because a malicious website can make its own host name point to 127.0.0.1 (DNS
    rebinding).
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET requests are allowed", 405, {"Allow": "GET, HEAD"})
        host = Headers(scope=scope).get("host", "").rsplit(":", 1)[0]
        if host not in HOSTS:
            return PlainTextResponse("the host name must be 127.0.0.1 or localhost", 400)
        given = scope["path"].split("/")[1].encode()
        if not secrets.compare_digest(given, self.token):
            return PlainTextResponse(
                "the token is missing or wrong: open the address that `oelm board` printed", 403
            )
        return None


class Site:
    """The pages of one board."""

    def __init__(self, board: Board, lang: str) -> None:
        self.board, self.lang = board, lang
        self.translators = {lang: Translator(lang) for lang in LANGUAGES}
        self.templates = template_environment(_HERE / "templates")

    def app(self, token: str) -> Starlette:
        """Return the web application."""
        routes = [
            Route("/{token}/", self.home),
            Mount("/{token}/static", StaticFiles(directory=_HERE / "static")),
            *(Route(f"/{{token}}/{{lang}}/{name}", page) for name, page in self._pages().items()),
        ]
        return Starlette(
            routes=routes, middleware=[Middleware(Guard, token=token), Middleware(GZipMiddleware)]
        )

    def _pages(self) -> dict[str, Callable[[Request], Response]]:
        return {
            "": self.overview,
            "study": self.study,
            "question": self.question,
            "run": self.run,
            "compare": self.compare,
            "curves": self.curves,
        }

    def home(self, request: Request) -> Response:
        return RedirectResponse(f"{self.lang}/")

    def overview(self, request: Request) -> Response:
        return self._page(request, "overview.html", lambda _: pages.overview(self.board, _))

    def study(self, request: Request) -> Response:
        name, group = _get(request, "name"), _get(request, "group")
        return self._page(request, "study.html", lambda _: pages.study(self.board, name, group, _))

    def question(self, request: Request) -> Response:
        study, wanted = _get(request, "study"), _question(request)
        return self._page(request, "question.html", lambda _: pages.question(self.board, study, wanted, _))

    def run(self, request: Request) -> Response:
        return self._page(request, "run.html", lambda _: pages.run(self.board, _get(request, "run"), _))

    def compare(self, request: Request) -> Response:
        a, b = _get(request, "a"), _get(request, "b")
        return self._page(request, "compare.html", lambda _: pages.compare(self.board, a, b, _))

    def curves(self, request: Request) -> Response:
        """Return one chart as JSON. The URL parameters name its runs, a question, or a group of arms."""
        self.board.refresh()
        _, measurement = self._translator(request), _get(request, "measurement")
        runs, study = self.board.runs, _get(request, "study")
        chosen = {key: runs[key] for key in request.query_params.getlist("run") if key in runs}
        if measurement not in MEASUREMENTS:
            return PlainTextResponse("unknown measurement", 404)
        if chosen:
            found = run_curves(self.board, chosen, measurement, _)
        elif _get(request, "kind"):
            question = pages.find_question(self.board, study, _question(request))
            arms = pages.question_arms(self.board, question) if question else []
            found = arm_curves(self.board, arms, measurement, _)
        else:
            arms = pages.arm_groups(self.board, study).get(_get(request, "group"), [])
            found = arm_curves(self.board, arms, measurement, _)
        return _answer(request, json.dumps(found, allow_nan=False), "application/json")

    def _translator(self, request: Request) -> Translator:
        return self.translators.get(request.path_params["lang"], self.translators[self.lang])

    def _page(
        self, request: Request, template: str, content: Callable[[Translator], dict[str, Any] | None]
    ) -> Response:
        self.board.refresh()
        _ = self._translator(request)
        page, status = content(_), 200
        if page is None:
            template, page, status = "missing.html", {}, 404
        query = f"?{request.url.query}" if request.url.query else ""
        here = request.url.path.rpartition("/")[2]
        languages = [
            (lang, name, f"../{lang}/{here}{query}") for lang, name in (("en", "English"), ("zh", "中文"))
        ]
        text = self.templates.get_template(template).render(
            _=_, lang=_.lang, languages=languages, board=self.board, query=request.url.query, **page
        )
        return _answer(request, text, "text/html", status)


def _get(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _question(request: Request) -> dict[str, str]:
    return {name: _get(request, name) for name in ("kind", "scale", "arm", "reference", "margins")}


def _answer(request: Request, text: str, kind: str, status: int = 200) -> Response:
    """Return a response with the text, or an empty response 304 if the browser already has the same text."""
    content = text.encode("utf-8", "replace")
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(None, 304, {"ETag": tag})
    return Response(content, status, {"ETag": tag}, f"{kind}; charset=utf-8")
