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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if NOT_RUN in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.section("two guests: NOT RUN", yellow=True)
        terminalreporter.write_line(
            f"{len(skipped)} tests of tests/guest were {NOT_RUN}; see python -m tests.guest check"
        )
