"""GET /: the page is whole, closed to the outside by its policy, cached by version, and open without a key."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from agens_engine.server.host import ModelHost
from agens_engine.server.web import WEB_FOLDER, build_page
from agens_engine.settings import Settings
from tests.serverkit import END, in_loop, running, says

INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def policy() -> dict[str, list[str]]:
    parts = [part.split() for part in build_page().policy.split("; ")]
    return {name: values for name, *values in parts}


def test_the_page_is_served_with_a_strict_policy() -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _), client.get("/") as response:
            body = await response.read()
            assert response.status == 200 and body == build_page().body
            assert response.headers["Content-Type"] == "text/html; charset=utf-8"
            assert response.headers["Content-Security-Policy"] == build_page().policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Cache-Control"] == "no-cache"

    in_loop(go)


def test_a_browser_that_has_this_version_gets_no_body() -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _):
            async with client.get("/") as response:
                tag = response.headers["ETag"]
            for known, expected in [(tag, 304), (f'"other", W/{tag}', 304), ('"other"', 200)]:
                async with client.get("/", headers={"If-None-Match": known}) as response:
                    assert response.status == expected, known
                    assert response.headers["ETag"] == tag and "Content-Security-Policy" in response.headers
                    assert bool(await response.read()) is (expected == 200)

    in_loop(go)


def test_the_page_needs_no_key_and_no_model_but_the_api_does() -> None:
    async def go() -> None:
        settings = Settings(api_key="secret")
        for host in (None, ModelHost(settings)):  # ready, loading
            async with running(says(END), api_key="secret", host=host) as (client, _):
                async with client.get("/") as response:
                    assert response.status == 200
                async with client.post("/") as response:
                    assert response.status == 405
                for path in ("/v1/models", "/index.html", "/chat.js"):
                    async with client.get(path) as response:
                        assert response.status == 401, path

    in_loop(go)


def test_the_policy_allows_the_inline_code_and_nothing_else() -> None:
    found: dict[str, list[str]] = {"script": [], "style": []}
    for tag, text in INLINE.findall(build_page().body.decode()):
        found[tag].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    rules = policy()
    assert len(found["script"]) == len(list(WEB_FOLDER.glob("*.js")))
    assert rules["script-src"] == found["script"] and rules["style-src"] == found["style"]
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == ["'none'"]
    assert rules["connect-src"] == ["'self'"] and rules["img-src"] == ["data:"]
    assert rules["require-trusted-types-for"] == ["'script'"]


def test_every_file_is_in_the_page_and_nothing_is_fetched() -> None:
    html = build_page().body.decode()
    markup = INLINE.sub("", html)
    assert not re.search(r"<(link(?! rel=\"icon\")|script|iframe|img|object|embed|base)\b", markup)
    assert not re.search(r"\son[a-z]+=|\sstyle=", markup)  # the policy would block them
    names = set(re.findall(r"xmlns='([^']*)'", html))
    urls = {url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w[^\s'\"]*", html)}
    assert urls == {name for name in names if name.startswith("http")} == {"http://www.w3.org/2000/svg"}
    assert "@import" not in html and "url(" not in html


@pytest.mark.parametrize("file", sorted(WEB_FOLDER.glob("*.js")), ids=lambda file: file.name)
def test_scripts_make_no_markup_and_no_code_from_strings(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text)
    assert "</script" not in text and "<!--" not in text  # either would end the inline script early
    assert text.startswith('"use strict";\n')


def test_every_control_has_a_label_and_every_script_finds_its_elements() -> None:
    html = (WEB_FOLDER / "index.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', html))
    for tag, attributes in re.findall(r"<(input|select|textarea)\b([^>]*)>", html):
        found = re.search(r'id="([^"]+)"', attributes)
        assert found is not None, tag
        assert found[1] in labelled or "aria-label=" in attributes, found[1]
    for attribute in ("aria-controls", "aria-describedby", "for"):
        assert set(re.findall(rf'\b{attribute}="([^"]+)"', html)) <= set(ids)
    for file in WEB_FOLDER.glob("*.js"):
        asked = set(re.findall(r'byId\("([^"]+)"\)', file.read_text(encoding="utf-8")))
        assert asked <= set(ids), file.name
