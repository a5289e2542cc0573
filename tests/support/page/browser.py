"""Debian's chromium, driven by selenium, and what it tells of a page."""

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from cluster.records import frozen
from tests.support.choices import absent

DEADLINE_S = 120
_PROGRAMS = ("chromium", "chromedriver")
AXE = Path(__file__).parent / "axe.js.gz"
# Without those that forbid it, chromium asks its maker's servers at every start.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-lcd-text",
)
_NOTE_VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => {
  violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""


def programs() -> tuple[str, str]:
    """Return the browser and its driver; skips the test without them, and fails it in CI."""
    found = [shutil.which(name, path=f"{os.environ['PATH']}:/usr/bin") for name in _PROGRAMS]
    if None in found:
        absent(f"{' and '.join(_PROGRAMS)} are not both installed")
    return str(found[0]), str(found[1])


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    program, driver_program = programs()
    with tempfile.TemporaryDirectory() as profile:
        options = Options()
        options.binary_location = program
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # Named, for selenium would else look for a driver on the network.
        driver = webdriver.Chrome(options=options, service=Service(driver_program))
        try:
            arguments = {"source": _NOTE_VIOLATIONS}
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", arguments)
            # The browser's own first page asks for much, of itself.
            driver.get("about:blank")
            driver.get_log("performance")
            yield driver
        finally:
            driver.quit()


@frozen
class Page:
    """The page in a browser."""

    driver: webdriver.Chrome
    url: str

    def open(self, path: str = "/") -> None:
        """Load it afresh, and wait until all of it is there."""
        self.driver.get(self.url + path)
        self.wait(lambda: self.count("#who .swatch") and self.count(".recording svg"))

    def wait(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, DEADLINE_S, 0.05).until(lambda _: condition())

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        return str(self.run(f"return document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        # Where it is: what lies in view below a fold is not clickable for the driver.
        self.run("arguments[0].scrollIntoView({block: 'center'})", self.find(selector))
        self.find(selector).click()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def see(self, width: int, scheme: str, *, motion: str = "no-preference") -> None:
        """Be so wide, and wish for light or dark, and for motion."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open_file(self, path: Path) -> None:
        self.find("#file").send_keys(str(path))

    def requests(self) -> list[tuple[str, str]]:
        """Return the method and URL of every request since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [
            (event["params"]["request"]["method"], event["params"]["request"]["url"])
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def errors(self) -> list[str]:
        """Return what the console says of errors, and what the policy has refused."""
        said = [entry["message"] for entry in self._log("browser") if entry["level"] == "SEVERE"]
        return said + self.run("return window.violations")

    def axe(self) -> list[str]:
        """Return what axe finds wrong."""
        source = gzip.decompress(AXE.read_bytes()).decode()
        self.run(source + "\nwindow.axe = axe;")
        found = self.driver.execute_async_script(
            "axe.run(document).then((result) => arguments[0](result.violations))"
        )
        return [
            f"{each['id']}: {node['target']} {node['failureSummary']}"
            for each in found
            for node in each["nodes"]
        ]

    def _log(self, name: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(name))
