"""Python's picture of a flight record is the native one."""

import re
import struct
from pathlib import Path

from jaxrdma import _native, trace
from jaxrdma.dump import Dump


def test_stages_are_named_as_in_the_native_module() -> None:
    assert tuple(_native.stage_name(i) for i in range(len(trace.STAGES))) == trace.STAGES


def test_a_record_is_decoded_field_by_field() -> None:
    raw = struct.pack("<qqIHHB7x", 5, 17, 3, 2, 1, 6)
    (record,) = trace.decode(raw)
    assert (record["time_ns"], record["step"], record["partition"]) == (5, 17, 3)
    assert (record["flow"], record["peer"], trace.STAGES[record["stage"]]) == (2, 1, "published")


def test_the_format_is_described_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()
    files = page[page.index("## Files") :]
    assert re.findall(r"^\| (\d) \| (\w+):", files, re.MULTILINE) == [
        (str(number), name) for number, name in enumerate(trace.STAGES)
    ]
    keys = [line.split("|")[1] for line in files.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(keys)) == list(Dump.__struct_fields__)
