"""Python's picture of a flight record is the native one."""

import struct

from jaxrdma import _native, trace


def test_stages_are_named_as_in_the_native_module() -> None:
    assert tuple(_native.stage_name(i) for i in range(len(trace.STAGES))) == trace.STAGES


def test_a_record_is_decoded_field_by_field() -> None:
    raw = struct.pack("<qqIHHB7x", 5, 17, 3, 2, 1, 6)
    (record,) = trace.decode(raw)
    assert (record["time_ns"], record["step"], record["partition"]) == (5, 17, 3)
    assert (record["flow"], record["peer"], trace.STAGES[record["stage"]]) == (2, 1, "published")
