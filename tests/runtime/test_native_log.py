"""The client's warnings do not reach the user, and all else that is written does."""

from __future__ import annotations

import os

from pathways_lab.runtime.processes import native_log

INSECURE = (
    b"W1127 12:02:00.171309   18597 grpc_credentials_possibly_insecure_wrapper.cc:63] IFRT proxy"
    b" using insecure client credentials because of environment variable.\n"
)
LEFT = (
    b"W1127 12:02:01.522026   19672 grpc_client.cc:91] IFRT proxy server disconnected:"
    b" UNAVAILABLE: Socket closed; Stack trace: *** Begin stack trace ***\n\t\n\tPy_RunMain\n"
    b"*** End stack trace ***\n\n"
)
LEFT_SINCE_0_11 = LEFT.replace(
    b"; Stack trace: ",
    b"\n=== Source Location Trace: === \nexternal/xla+/xla/pjrt/distributed/util.h:28\n"
    b"; Stack trace: ",
)
OTHERS = b"Traceback (most recent call last):\n\tof a user's\n"


def test_lines_of_the_client_are_taken_out_and_no_others():
    for left in (LEFT, LEFT_SINCE_0_11):
        assert native_log.cleaned(INSECURE + OTHERS + left + b"end") == OTHERS + b"end"
    assert native_log.cleaned(b"W1127 12:02:00.1 1 user.cc:1] mine\n") != b""


def test_other_words_are_passed_on_when_the_block_is_over(capfd):
    with native_log.clean(b"End stack trace ***"):
        os.write(2, INSECURE + OTHERS)
        os.write(2, LEFT)
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err.encode() == OTHERS
