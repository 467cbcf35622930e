"""Fixtures of the tests of report and board."""

from __future__ import annotations

import chromium
import pytest


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all tests of a process; the tests are skipped where there is none."""
    executable = chromium.find()
    if not executable:
        pytest.skip("no Chromium here (Debian: apt-get install chromium; CI=true installs it)")
    with chromium.Browser(executable, tmp_path_factory.mktemp("profile")) as opened:
        yield opened
