"""Authentication: both ends must hold the same key; no message can be reflected."""

from __future__ import annotations

import pytest

from pathways_lab.transport import auth
from pathways_lab.transport.auth import AuthenticationError, Initiator, Responder

KEY = bytes(range(32))


def test_the_same_key_is_accepted_with_fixed_lengths() -> None:
    one, two = Initiator(KEY), Responder(KEY)
    greeting = one.greeting()
    reply = two.reply(greeting)
    answer = one.answer(reply)
    two.check(answer)
    assert (len(greeting), len(reply), len(answer)) == (
        auth.GREETING_BYTES,
        auth.REPLY_BYTES,
        auth.ANSWER_BYTES,
    )


def test_a_wrong_key_is_refused_by_both_ends() -> None:
    one, two = Initiator(bytes(32)), Responder(KEY)
    reply = two.reply(one.greeting())
    with pytest.raises(AuthenticationError, match="key"):
        one.answer(reply)
    with pytest.raises(AuthenticationError, match="key"):
        two.check(bytes(auth.ANSWER_BYTES))


def test_a_proof_cannot_be_reflected() -> None:
    """An attacker who has an end prove itself cannot use that proof as its own."""
    one, two = Initiator(KEY), Responder(KEY)
    reply = two.reply(one.greeting())
    with pytest.raises(AuthenticationError):
        two.check(reply[-32:])


def test_foreign_protocols_and_versions_are_named() -> None:
    with pytest.raises(AuthenticationError, match="does not speak"):
        Responder(KEY).reply(b"GET / HTTP/1.1\r\n".ljust(auth.GREETING_BYTES, b"x"))
    with pytest.raises(AuthenticationError, match="does not speak"):
        Initiator(KEY).answer(b"HTTP/1.1 400\r\n".ljust(auth.REPLY_BYTES, b"x"))


def test_both_ends_of_different_versions_say_so() -> None:
    one, two = Initiator(KEY), Responder(KEY)
    other = bytearray(one.greeting())
    other[7] = 99
    reply = bytearray(two.reply(bytes(other)))
    with pytest.raises(AuthenticationError, match="version 99"):
        two.check(bytes(auth.ANSWER_BYTES))
    reply[7] = 98
    with pytest.raises(AuthenticationError, match="version 98"):
        one.answer(bytes(reply))


def test_short_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        Initiator(b"secret")


def test_holders_prove_their_own_number_and_no_other() -> None:
    def meets(key: bytes, holder: int) -> int:
        one, two = Initiator(key, holder), Responder(KEY)
        two.check(one.answer(two.reply(one.greeting())))
        return two.holder

    seven = auth.key_of(KEY, 7)
    assert (meets(KEY, 0), meets(seven, 7)) == (0, 7)
    for key, holder in ((seven, 8), (seven, 0), (KEY, 7), (auth.key_of(seven, 8), 8)):
        with pytest.raises(AuthenticationError):
            meets(key, holder)
