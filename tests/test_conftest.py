"""The guards of the test run are themselves tested."""

from __future__ import annotations

import socket

import pytest


def test_a_connection_to_another_machine_fails_at_the_attempt():
    """192.0.2.1 is reserved for documentation: nothing can answer, and nothing is asked."""
    with socket.socket() as sock, pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        sock.connect(("192.0.2.1", 80))


def test_loopback_is_allowed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
