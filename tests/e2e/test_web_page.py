"""The web page in headless Chromium, against the real HTTP application over an engine that says what a script tells it.

Needs Debian's chromium and chromium-driver and the selenium package; skips where one of them is missing.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from agens_engine.core import Request
from agens_engine.server.app import make_app
from agens_engine.server.host import ModelHost
from agens_engine.settings import Settings
from tests.e2e.conftest import Server
from tests.fake_engine import FakeEngine, Steps
from tests.serverkit import END, model_text
from tests.textkit import load_kit, mixed_tokens

selenium = pytest.importorskip("selenium", reason="the selenium package is not installed (pip install -e .[dev])")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from tests.e2e.webpage import DEADLINE, Page  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MARKUP = '<img src=x onerror="document.title=1"><b>bold?</b>'
CODE = "for i in range(3):\n    print(i)"
ANSWER = f"I am thinking.<|/think|># Loops\nA **small** `loop`:\n\n```python\n{CODE}\n```\n\n{MARKUP}{END}"
CALL = "<|/think|>I ask.\n<|call|>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n<|/call|>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]
MIB = 1 << 20


def script(request: Request) -> Steps:
    """What is said depends on the last turn of the prompt."""
    tokenizer = load_kit()[0]
    last = tokenizer.decode(list(request.prompt_ids), skip_special=False).rsplit("<|agens_start|>user", 1)[-1]
    if "endless" in last:
        return [mixed_tokens(tokenizer, "<|/think|>"), mixed_tokens(tokenizer, "a")]
    if "sunny" in last:
        text = f"<|/think|>It is sunny.{END}"
    else:
        text = CALL + END if "weather" in last else ANSWER
    ids = mixed_tokens(tokenizer, text)
    return [ids[i : i + 3] for i in range(0, len(ids), 3)]


class PlannedEngine(FakeEngine):
    """Reports a plan and drafts as the real engine does."""

    def stats(self) -> dict[str, Any]:
        def line(place: str, planned: int, peak: int) -> dict[str, Any]:
            return {"place": place, "planned_bytes": planned * MIB, "used_bytes": 0, "peak_bytes": peak * MIB}

        lines = {
            "weights.mlp": line("device", 300, 300),
            "weights.kda": line("device", 200, 100),
            "kv.dense": line("device", 250, 50),
            "host.embedding": line("host_pinned", 80, 80),
        }
        return super().stats() | {
            "generated_tokens": 3 * self.num_steps,
            "drafts": {
                "verify_steps": 100,
                "tokens_per_step": 2.5,
                "sources": {"mtp": {"proposed": 300, "accepted": 150}},
            },
            "memory": {
                "cap_bytes": 1000 * MIB,
                "planned_bytes": 750 * MIB,
                "counted_peak_bytes": 450 * MIB,
                "measured_peak_bytes": None,
                "lines": lines,
            },
        }


@contextmanager
def serving(**options: Any) -> Iterator[tuple[str, PlannedEngine]]:
    """(url, engine): the application on a thread of its own; options are settings."""
    engine = PlannedEngine(script)
    engine.step_seconds = 0.003
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[web.AppRunner, int]:
        host = ModelHost(Settings(**options))
        host.attach(engine, model_text())
        runner = web.AppRunner(make_app(host), handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner, port = asyncio.run_coroutine_threadsafe(begin(), loop).result(DEADLINE)
    try:
        yield f"http://127.0.0.1:{port}/", engine
    finally:
        engine.shutdown(0.0)
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(DEADLINE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE)
        loop.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its driver on this machine (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield chromium
    finally:
        chromium.quit()


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[tuple[str, PlannedEngine]]:
    with serving() as running:
        yield running


@pytest.fixture
def page(browser: Any, server: tuple[str, PlannedEngine]) -> Iterator[Page]:
    """Opened anew on a desktop; fails afterwards on any error or broken policy in the browser's console."""
    opened = Page(browser, server[0])
    opened.resize(1200, 800)
    opened.prefer(prefers_color_scheme="light")
    opened.open()
    yield opened
    assert browser.get_log("browser") == []


def test_an_answer_streams_with_its_thought_folded_and_nothing_becomes_markup(page: Page) -> None:
    page.ask("show me a loop")
    assert not page.one(".thinking").get_attribute("open") and not page.one(".thought").is_displayed()
    assert page.text(".thought") == "I am thinking." and page.text(".thinking summary").startswith("Thought for")
    assert page.text(".content .heading") == "Loops"
    assert page.text(".content strong") == "small" and page.text(".content p code") == "loop"
    assert page.text(".content pre code") == CODE
    assert page.all(".content p")[-1].text == MARKUP
    assert not page.all(".content img, .content b") and page.browser.title == "Agens Engine"
    for figure in ("(3 cached)", "out", "began after 0.50 s", "tokens/s", "tokens per step"):
        assert figure in page.text(".meta")
    page.one(".thinking summary").click()
    assert page.one(".thought").is_displayed()
    assert page.text("#announce") == "The answer is complete"


def test_stop_ends_the_generation_and_the_chat_goes_on(page: Page, server: tuple[str, PlannedEngine]) -> None:
    engine = server[1]
    for stop in (lambda: page.one("#stop").click(), lambda: page.type(Keys.ESCAPE)):
        num_aborted = len(engine.aborted) + 1
        page.one("#prompt").send_keys("endless", Keys.ENTER)
        page.until(lambda: len(page.all(".answer")[-1].text) > 20)  # it streams
        assert not page.one("#send").is_enabled()
        page.one("#prompt").send_keys("meanwhile", Keys.ENTER)  # kept, not sent
        stop()
        page.until_idle()
        while len(engine.aborted) < num_aborted:  # the test's own time limit ends this
            time.sleep(0.01)
        assert page.all(".remark")[-1].text == "Stopped." and page.focused() == "prompt"
        assert page.one("#prompt").get_property("value") == "meanwhile"
        page.one("#prompt").clear()
    page.ask("show me a loop")  # what was said until the stop is part of the history
    assert page.all(".answer")[-1].find_element(By.CSS_SELECTOR, "pre code").text == CODE
    assert len(page.all(".answer")) == 3


def test_messages_and_code_can_be_copied(page: Page) -> None:
    page.ask("show me a loop")
    assert page.copied(".user .copy") == "show me a loop"
    assert page.copied(".code .copy") == CODE
    assert page.copied(".answer > header .copy") == ANSWER.partition("<|/think|>")[2].removesuffix(END)


def test_everything_works_by_keyboard(page: Page) -> None:
    assert page.focused() == "prompt"
    page.type("first line", Keys.SHIFT, Keys.ENTER)
    page.browser.switch_to.active_element.send_keys("second line")
    assert page.one("#prompt").get_property("value") == "first line\nsecond line"
    page.type(Keys.ENTER)
    page.until_idle()
    assert page.text(".user p") == "first line\nsecond line" and page.focused() == "prompt"

    page.browser.execute_script("document.querySelector('.skip').focus()")
    order = []
    for _ in range(5):
        page.type(Keys.TAB)
        order.append(page.focused())
    assert order == ["new-chat", "open-settings", "open-panel", "theme", "log"]
    page.one(".skip").send_keys(Keys.ENTER)
    assert page.focused() == "prompt"
    page.type(Keys.TAB)
    assert page.focused() == "send"
    for name, part in (("open-settings", "settings"), ("open-panel", "panel")):
        shown = page.one(f"#{part}").is_displayed()
        page.one(f"#{name}").send_keys(Keys.ENTER)
        assert page.one(f"#{part}").is_displayed() is not shown
        assert page.one(f"#{name}").get_attribute("aria-expanded") == str(not shown).lower()


def test_a_new_chat_forgets_and_settings_are_remembered(page: Page, server: tuple[str, PlannedEngine]) -> None:
    page.one("#open-settings").click()
    page.one("#system").send_keys("Be brief.")
    page.one("#temperature").send_keys("0.5")
    page.one("#max-tokens").send_keys("7")
    page.one("#effort").find_element(By.CSS_SELECTOR, "[value=none]").click()
    page.browser.get(page.url)  # a later visit
    page.ask("remember me")
    request = server[1].requests[-1]
    prompt = load_kit()[0].decode(list(request.prompt_ids), skip_special=False)
    assert "Be brief." in prompt and request.max_tokens == 7 and request.sampling.temperature == 0.5
    assert page.all(".remark")[-1].text == "Cut off at your limit, 7 tokens."
    page.one("#new-chat").click()
    assert not page.all(".message") and page.one("#empty").is_displayed() and page.focused() == "prompt"
    page.ask("hello")
    prompt = load_kit()[0].decode(list(server[1].requests[-1].prompt_ids), skip_special=False)
    assert "remember me" not in prompt

    page.one("#open-settings").click()
    page.one("#temperature").clear()
    page.one("#temperature").send_keys("9")
    page.ask("too hot")
    assert page.all(".remark.error")[-1].text.startswith("Temperature: ")


def test_a_tool_call_is_a_card_and_takes_its_result(page: Page, server: tuple[str, PlannedEngine]) -> None:
    page.one("#open-settings").click()
    page.one("#tools").send_keys(json.dumps(TOOLS))
    page.one("#open-settings").click()
    page.ask("the weather, please")
    assert page.text(".call strong") == "weather" and json.loads(page.text(".call pre code")) == {"city": "Oslo"}
    page.one(".call textarea").send_keys("sunny")
    page.one(".calls .act").click()
    page.until(lambda: len(page.all(".answer")) == 2)
    page.until_idle()
    assert page.all(".content")[-1].text == "It is sunny."
    prompt = load_kit()[0].decode(list(server[1].requests[-1].prompt_ids), skip_special=False)
    assert "<|result|>" in prompt and "<function=weather>" in prompt


@pytest.mark.slow  # waits longer than the pause between two looks
def test_the_panel_shows_plan_drafts_and_queue_only_while_it_can_be_seen(page: Page) -> None:
    page.until(lambda: page.all("#plan-device li"))
    plan = page.text("#plan-total").replace("\u00a0", " ")
    assert plan == "750 MiB planned, peak 450 MiB, cap 1000 MiB"
    rows = [row.text.replace("\u00a0", " ").split("\n") for row in page.all("#plan-device li, #plan-host li")]
    assert rows == [
        ["Weights", "400 MiB of 500 MiB"],
        ["Keys and values", "50.0 MiB of 250 MiB"],
        ["Host tables", "80.0 MiB of 80.0 MiB"],
    ]
    widths = [piece.size["width"] / page.one("#plan-bar").size["width"] for piece in page.all("#plan-bar span")]
    assert widths == pytest.approx([0.5, 0.25], abs=0.02)  # of the cap; a border takes a pixel
    assert page.text("#per-step").startswith("2.50") and page.text("#running") == page.text("#waiting") == "0"
    assert [row.text for row in page.all("#sources li")] == ["The model itself\n1.00", "mtp\n1.50, 50 % kept"]
    page.ask("show me a loop")
    page.until(lambda: page.text("#rate") not in ("–", "0.0"))

    # the browser says that the tab is hidden, then shown again; requests are counted by the page's own clock
    count = "return performance.getEntriesByType('resource').filter(e => e.name.endsWith('/health')).length"
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    page.browser.execute_script(hide % "true" + tell)
    time.sleep(0.5)  # one that was on its way
    asked = page.browser.execute_script(count)
    time.sleep(2.5)  # longer than the pause between two looks
    assert page.browser.execute_script(count) == asked
    page.browser.execute_script(hide % "false" + tell)
    page.until(lambda: page.browser.execute_script(count) > asked)


def test_images_are_off_with_a_reason(page: Page) -> None:
    page.until(lambda: page.text("#image-help") == "Images are off: this model takes text only.")
    assert not page.one("#image-files").is_enabled()
    assert page.one("#images").get_attribute("aria-disabled") == "true"
    page.browser.execute_script("setModalities(['text', 'image'])")
    assert page.one("#image-files").is_enabled() and "Drop" in page.text("#image-help")


def test_it_fits_a_phone_and_follows_colours_and_motion(page: Page) -> None:
    page.ask("show me a loop")
    for width in (360, 320):
        page.resize(width, 640)
        for shown in (True, False):
            if page.one("#panel").is_displayed() is not shown:
                page.one("#open-panel").click()
            assert page.browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [
                width,
                width,
            ]
            for control in ("#prompt", "#send", "#new-chat", "#theme"):
                box = page.one(control).rect
                assert 0 <= box["x"] and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 640, control
    light = page.style("body", "background-color")
    page.prefer(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    dark = page.style("body", "background-color")
    assert light != dark
    page.one("#theme").click()  # auto, dark, light
    assert page.style("body", "background-color") == dark
    page.one("#theme").click()
    assert page.style("body", "background-color") == light
    page.browser.execute_script("document.querySelector('.answer').classList.add('waiting')")
    moving = "return getComputedStyle(document.querySelector('.content'), '::before').animationName"
    assert page.browser.execute_script(moving) == "none"


def test_the_key_is_asked_for_and_errors_come_in_words(browser: Any) -> None:
    with serving(api_key="sésame") as (url, engine):
        page = Page(browser, url)
        page.resize(1200, 800)
        page.open()
        page.until(lambda: page.one("#key-form").is_displayed())
        page.one("#prompt").send_keys("show me a loop", Keys.ENTER)
        page.until(lambda: page.all(".remark.error"))
        assert "asks for an API key" in page.text(".remark.error")
        page.one("#key").send_keys("wrong", Keys.ENTER)
        page.until(lambda: page.one("#key-form").is_displayed())
        page.one("#key").clear()
        page.one("#key").send_keys("sésame", Keys.ENTER)  # sends what was refused
        page.until(lambda: page.all(".content pre code"))
        page.until_idle()
        assert not page.one("#key-form").is_displayed() and len(page.all(".answer")) == 1

        engine.fail_token = engine.requests[-1].prompt_ids[-1]
        page.ask("this fails")
        assert "device lost" not in page.text("#log") and page.all(".remark.error")[-1].text
        engine.fail_token = None
        page.all(".remark.error .act")[-1].click()
        page.until(lambda: len(page.all(".answer")) == 2)
        page.until_idle()
    page.one("#prompt").send_keys("anyone there?", Keys.ENTER)
    page.until(lambda: "does not answer" in page.all(".remark")[-1].text)
    page.until(lambda: page.text("#state-text") == "The server does not answer")
    browser.get_log("browser")  # the refused requests are there, as they should


@pytest.mark.slow
def test_the_embedded_model_answers_on_the_page(browser: Any, nano_server: Server) -> None:
    page = Page(browser, nano_server.url + "/")
    page.resize(1200, 800)
    page.open("nano")
    page.one("#open-settings").click()
    page.one("#max-tokens").send_keys("24")
    page.ask("Hello!")
    assert page.text(".answer .thought") + page.text(".answer .content")
    assert "tokens/s" in page.text(".meta")
    page.until(lambda: page.all("#plan-device li") and page.all("#sources li"))
    assert not page.all(".remark.error") and browser.get_log("browser") == []
