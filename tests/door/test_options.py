"""Compile options: whose devices they name, and which of them are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.door.options import devices_of
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.status import Status


def options(**overrides: Any) -> Any:
    made = message("XlaCompileOptionsProto")()
    for name, value in overrides.items():
        field = "bool_field" if isinstance(value, bool) else "string_field"
        setattr(made.compile_options.env_option_overrides[name], field, value)
    return made


def test_the_devices_are_those_of_the_assignment_in_order():
    made = options()
    assignment = made.compile_options.executable_build_options.device_assignment
    for device in (5, 2, 7):
        assignment.computation_devices.add().replica_device_ids.append(device)
    assert devices_of(made.SerializeToString()) == (5, 2, 7)
    assert devices_of(options().SerializeToString()) == (0,)


@pytest.mark.parametrize("value", [True, "true", "False"])
def test_known_options_are_taken(value):
    devices_of(options(xla_embed_ir_in_executable=value).SerializeToString())


@pytest.mark.parametrize(
    ("name", "said"),
    [("no_such_thing", "No such compile option"), ("xla_embed_ir_in_executable", "valid bool")],
)
def test_wrong_options_are_refused_by_name(name, said):
    with pytest.raises(Status, match=said) as refused:
        devices_of(options(**{name: "nonsense"}).SerializeToString())
    assert name in str(refused.value)
