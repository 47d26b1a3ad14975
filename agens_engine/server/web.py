"""GET /: the web page, one HTML document with its style and scripts inside, made once from assets/web.

The page comes without an API key, as it holds nothing but itself; it asks for the key and sends it with each call.
Its policy (CSP) lets the browser run only the scripts of these files, by their hash, and talk only to this server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import ETag, web

WEB_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "web"

_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z]+\.js)"></script>')


@dataclass(frozen=True)
class Page:
    """The document as it goes out, the policy that fits it, and a name for this version of both."""

    body: bytes
    policy: str
    etag: str


async def page(request: web.Request) -> web.Response:
    """The page; 304 when the browser has this very version."""
    built = build_page()
    headers = {
        "Content-Security-Policy": built.policy,
        # kept by the browser, but asked about each time: an upgraded engine shows its own page at once
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    tag = ETag(built.etag)
    known = request.if_none_match or ()
    if any(given.value in (tag.value, "*") for given in known):
        response = web.Response(status=304, headers=headers)
    else:
        response = web.Response(body=built.body, content_type="text/html", charset="utf-8", headers=headers)
    response.etag = tag
    return response


@cache
def build_page() -> Page:
    """Put the files that index.html names into it, and allow exactly those."""
    scripts: list[str] = []
    styles: list[str] = []

    def inline(tag: str, hashes: list[str], found: re.Match[str]) -> str:
        text = (WEB_FOLDER / found[1]).read_text(encoding="utf-8")
        digest = hashlib.sha256(text.encode()).digest()
        hashes.append(f"'sha256-{base64.b64encode(digest).decode()}'")
        return f"<{tag}>{text}</{tag}>"

    html = (WEB_FOLDER / "index.html").read_text(encoding="utf-8")
    html = _STYLE.sub(lambda found: inline("style", styles, found), html)
    html = _SCRIPT.sub(lambda found: inline("script", scripts, found), html)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(scripts)}",
            f"style-src {' '.join(styles)}",
            "connect-src 'self'",
            "img-src data:",  # the icon, and pictures before they are sent
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # no string becomes markup or code anywhere on the page, whatever the model writes
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    body = html.encode()
    return Page(body, policy, hashlib.sha256(body + policy.encode()).hexdigest()[:32])
