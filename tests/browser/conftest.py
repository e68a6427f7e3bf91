"""A real browser: Debian's chromium by its driver, through selenium. Tests skip, and say why, where one is missing."""

import shutil
from collections.abc import Callable, Iterator

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
Browse = Callable[..., webdriver.Chrome]


@pytest.fixture
def browse() -> Iterator[Browse]:
    """`browse(url)`: a browser at that address."""
    chromium, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no browser is installed: apt-get install chromium chromium-driver")
    opened: list[webdriver.Chrome] = []

    def open_at(url: str) -> webdriver.Chrome:
        options = webdriver.ChromeOptions()
        for flag in FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.binary_location = chromium
        try:
            browser = webdriver.Chrome(options=options, service=Service(driver))
        except WebDriverException as error:
            pytest.skip(f"the browser does not start here: {error.msg}")
        opened.append(browser)
        browser.set_script_timeout(60)
        browser.get(url)
        return browser

    yield open_at
    for each in opened:
        each.quit()
