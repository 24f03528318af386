"""The browser that the tests of this folder share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.chromium import launched, why_not
from tests.browser.served import Scene, served

# A condition that comes true ends the wait; only a failing test takes so long.
EXPECT_MILLISECONDS = 30_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test of a file time for the service, which starts within it."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(900))


# Of the package and not of the session: Playwright's loop holds this thread while the browser
# lives, and asynchronous tests of other folders may run in the same process afterwards.
@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Give the browser; without one the tests are skipped, except where one is demanded."""
    reason = why_not()
    if reason is not None:
        if os.environ.get("CI") or os.environ.get("TILLER_NEEDS_CHROMIUM"):
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=EXPECT_MILLISECONDS)
    with launched() as browser:
        yield browser


@pytest.fixture(scope="package")
def scene(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Give the service with its Jobs; one for all tests of the folder that look at it."""
    with served(tmp_path_factory.mktemp("browser") / "data") as scene:
        yield scene
