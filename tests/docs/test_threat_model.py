"""Each claim of the threat model names tests, and there are such tests."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "threat-model.md").read_text()


def claims() -> list[str]:
    """What stands under the headline of what protects, by paragraphs that begin with a promise."""
    _, _, rest = TEXT.partition("## What does that")
    return re.split(
        r"^(?=\*\*)", rest.partition("## What is not protected")[0], flags=re.MULTILINE
    )[1:]


def test_every_claim_names_tests_that_there_are() -> None:
    assert len(claims()) >= 8
    for claim in claims():
        named = re.findall(r"^- `(tests/[^`]+)`", claim, re.MULTILINE)
        assert named, claim
        for name in named:
            file, _, test = name.partition("::" if "::" in name else ": ")
            source = (ROOT / file).read_text()
            if not test:
                continue
            found = f"def {test}(" if file.endswith(".py") else f'TEST_CASE("{test}'
            # The formatter may have put the title of a native test on a line of its own.
            assert found in re.sub(r"\(\n\s+", "(", source), name


def test_every_fuzz_target_is_named_and_has_inputs() -> None:
    folder = ROOT / "tests" / "fuzz"
    targets = sorted(path.stem for path in folder.glob("fuzz_*.cc"))
    assert len(targets) >= 5
    for target in targets:
        assert f"{target}.cc`" in TEXT
        kept = list((folder / "corpus" / target.removeprefix("fuzz_")).iterdir())
        assert 0 < len(kept) <= 100
