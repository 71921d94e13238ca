"""`make site` writes every page of the documentation; mkdocs refuses a broken link."""

import re
import subprocess

import pytest

from tests.toolchain.packaging.package_index import ROOT

FETCHED = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')


@pytest.mark.trial
def test_the_site_has_every_page_and_fetches_nothing_from_elsewhere() -> None:
    subprocess.run(["make", "site"], cwd=ROOT, check=True, timeout=600)
    site = ROOT / "dist" / "site"
    start = (site / "index.html").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / "docs" / page.with_suffix(".html").name).is_file()
        assert f'href="docs/{page.stem}.html"' in start
    assert not [page for page in site.rglob("*.html") if FETCHED.search(page.read_text("utf-8"))]
