"""What a person can do with the web page, as one class over a Selenium browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

DEADLINE = 60.0  # far more than needed: a busy machine must not fail a test


class Page:
    """What a person can do with the page, and what they see."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self, model: str = "fake") -> None:
        """A fresh visit: nothing remembered, no wrong word in the console from before."""
        self.browser.get(self.url)
        self.browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        self.browser.get(self.url)
        self.browser.get_log("browser")
        self.until(lambda: self.text("#state-text") == model)

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        """As it is in the document, shown or folded."""
        return str(self.one(selector).get_property("textContent"))

    def until(self, true: Callable[[], Any]) -> None:
        end = time.monotonic() + DEADLINE
        while not true():
            assert time.monotonic() < end, self.browser.get_log("browser")
            time.sleep(0.02)

    def type(self, *keys: str) -> None:
        """Into whatever has the focus."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        return str(self.browser.switch_to.active_element.get_attribute("id"))

    def ask(self, text: str) -> None:
        """Send a message and wait until its answer ended."""
        self.one("#prompt").send_keys(text, Keys.ENTER)
        self.until_idle()

    def until_idle(self) -> None:
        self.until(lambda: self.one("#send").is_enabled() and not self.one("#stop").is_displayed())

    def copied(self, selector: str) -> str:
        """Press a copy button, then paste into the message box."""
        self.one(selector).click()
        self.until(lambda: self.one(selector).text == "Copied")
        self.one("#prompt").send_keys(Keys.CONTROL, "v")
        pasted = self.one("#prompt").get_property("value")
        self.one("#prompt").clear()
        return str(pasted)

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, **features: str) -> None:
        """Media features by name, with _ for -."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": listed})

    def style(self, selector: str, name: str) -> str:
        return str(self.one(selector).value_of_css_property(name))
