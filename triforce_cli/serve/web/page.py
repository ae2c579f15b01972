"""The page at `/`: files of the package. They may not load anything from elsewhere, or run scripts in the text."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

_SCRIPTS = ("page.js", "answer.js", "elements.js", "kept.js", "markdown.js", "parts.js", "plot.js", "server.js")

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS},
}
"""The name and the type of each file, by its path."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_response(path: str) -> Response:
    """The response with the file at a path of `PAGE`."""
    name, kind = PAGE[path]
    content = (Path(__file__).parent / "static" / name).read_bytes()
    return Response(content, headers={**_HEADERS, "Content-Type": kind})
