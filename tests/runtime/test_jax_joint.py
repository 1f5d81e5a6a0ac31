"""The private JAX doors for runtimes of several processes still open.

A failure here means that JAX moved something: the message says what, and
``runtime/jax_private.py`` and ``runtime/islands/jax_coordination.py`` are the only
files to change.
"""

from __future__ import annotations

import sys

import pytest

from pathways_lab.runtime import jax_private
from tests.runtime.test_jax_private import in_new_process

FORM = """
    import os, tempfile
    os.environ["XLA_FLAGS"] = "--xla_cpu_collective_timeout_seconds=20"
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from pathways_lab.runtime import jax_private
    from pathways_lab.runtime.islands import jax_coordination
    folder = tempfile.mkdtemp(dir="/tmp")
    address = f"unix:{folder}/c"
    service = jax_coordination.coordination_service(address, 1)
    agent = jax_private.coordination_agent(address, 0)
    agent.connect()
"""


def test_the_coordination_module_loads_jaxlib_only() -> None:
    out = in_new_process("""
        import sys
        import pathways_lab.runtime.islands.coordination_service
        from pathways_lab.runtime.islands import jax_coordination
        print("jax" in sys.modules, "jaxlib" in sys.modules)
    """)
    assert out == "False True", out


def test_service_agent_and_joint_client() -> None:
    """A client of one process that could have had more: serves, connects, meets, computes."""
    out = in_new_process(
        FORM
        + """
    agent.key_value_set("a", "b")
    print(agent.blocking_key_value_get("a", 1000))
    agent.wait_at_barrier("here", 1000)
    collectives = jax_private.cpu_collectives(agent, "127.0.0.1")
    client = jax_private.make_joint_cpu_client(agent, collectives, 0, 1, 3)
    mesh = Mesh(np.array(client.devices()), ("d",))
    x = jax.device_put(np.arange(3.0), NamedSharding(mesh, P("d")))
    total = jax.jit(lambda v: v.sum(), out_shardings=NamedSharding(mesh, P()))(x)
    print([(d.id, d.process_index) for d in client.devices()], float(total))
    print(jax_private.backends_initialised())
    agent.shutdown()
    service.shutdown()
    """
    )
    assert out.splitlines() == ["b", "[(0, 0), (1, 0), (2, 0)] 3.0", "False"], (
        "the coordination service, its agent or the CPU client of several processes moved: "
        f"see jaxlib._jax; got {out!r}"
    )


def test_shutting_the_agent_down_cancels_what_waits_in_it() -> None:
    """:meth:`Joint.end` depends on it."""
    out = in_new_process(
        FORM
        + """
    import threading, time
    threading.Timer(0.3, agent.shutdown).start()
    started = time.monotonic()
    try:
        agent.blocking_key_value_get("never", 20000)
    except Exception as error:
        print(type(error).__name__, time.monotonic() - started < 5)
    """
    )
    assert out == "JaxRuntimeError True", out


def test_a_platform_can_be_joined_once_and_before_its_use() -> None:
    out = in_new_process(
        FORM
        + """
    jax_private.join_platform(agent, 0, 1)
    print(jax.process_index(), jax.process_count())
    try:
        jax_private.join_platform(agent, 0, 1)
    except RuntimeError as error:
        print(error)
    agent.shutdown()
    """
    )
    assert out == "0 1\nthis process has JAX devices already, it cannot join others now", out


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="says why not elsewhere")
def test_this_jaxlib_has_collectives_between_processes() -> None:
    assert jax_private.missing_cpu_collectives() == ""
    assert "win32" in jax_private.missing_cpu_collectives("win32")
