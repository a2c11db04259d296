"""Tests in this folder start guests themselves; where that cannot be, they say why."""

from pathlib import Path

import pytest

from tests.guest.guest import missing

HERE = Path(__file__).parent
NOT_RUN = "not run: this machine cannot start a guest"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = missing()
    if not reasons:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"{NOT_RUN}: {'; '.join(reasons)}"))
