"""What CONTRIBUTING.md says of the tests: where the scenarios of a fault are, and that it is all of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = re.search(
    r"^\| what goes wrong \|.*?\n\n",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def test_the_table_of_faults_names_every_test_of_a_job_and_none_that_is_not() -> None:
    assert TABLE is not None
    there = {path.name for path in (ROOT / "tests" / "cluster").glob("test_*.py")}
    named: set[str] = set()
    for cell in (row.rpartition(" | ")[2] for row in TABLE[0].splitlines()[2:]):
        folder = "tests/cluster/"
        for name in re.findall(r"`([^`]+)`", cell):
            if name.endswith("/"):
                folder = name
                assert (ROOT / folder).is_dir(), folder
                continue
            path = ROOT / (name if "/" in name else folder + name)
            assert path.exists(), path
            if path.parent.name == "cluster":
                named.add(path.name)
    assert there == named
