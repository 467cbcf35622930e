"""Makes `tiny_models` importable from the sub-folders, and undoes what a test registers."""

import pytest


@pytest.fixture
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without registered attention classes, and forget those that the test registers."""
    from oelm.methods.reading import families

    monkeypatch.setattr(families, "_registered", {})
