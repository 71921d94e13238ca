"""The example of a page that records, served as if from the server's own address."""

import re
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.conftest import Server
from tests.page.browsing import LIMIT_MS, NEEDS_CHROMIUM, OpenPage

pytestmark = NEEDS_CHROMIUM

PAGE = Path(__file__).parents[2] / "examples/browser_recorder.html"
DIGITS = re.compile("(two|seven|one)( (two|seven|one)){2}")


def test_the_browser_recorder(open_page: OpenPage, server: Server) -> None:
    def serve(page: Page) -> None:
        html = PAGE.read_text()
        page.route(re.compile("/recorder"), lambda route: route.fulfill(body=html, content_type="text/html"))

    page = open_page(f"/recorder?server={server.url}", mock=serve, permissions=["microphone"])
    page.get_by_role("button", name="Record").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.wait_for_timeout(6000)  # the digits once, wherever it began
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_contain_text(DIGITS, timeout=LIMIT_MS)
