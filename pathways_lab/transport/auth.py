"""Both ends of a connection prove that they know the lab's key: pure, no sockets.

Problem: every account of a machine can connect to a loopback port.  Before the
other end has proved that it holds the key, nothing of it may be parsed beyond
a few bytes of fixed length, and nothing is told to it.

    initiator -> responder   magic, holder, nonce a              (48 bytes)
    responder -> initiator   magic, nonce b, HMAC(key, R a b)    (72 bytes)
    initiator -> responder   HMAC(key, I a b)                    (32 bytes)

The letters R and I keep either proof from being played back as the other.

Some doors are used by many clients that must not pass for each other.  There the *holder*
is a number, and its key is made of the door's own by :func:`key_of`: a process that has
the door's key knows all keys without a list, and no holder knows another's.
Holder 0 has the door's key itself.  All hosts are one holder of the control plane's door, so
that the first bytes of a connection tell hosts from clients.  A *ticket*, made of the door's key
as well, allows a holder one thing more.

Rule for maintainers: constant-time comparison, fresh nonces from the operating
system, fixed lengths only; the magic carries the version of the wire format.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from pathways_lab.transport.framing import VERSION

_HOLDER = 8
_MAGIC = b"PWLAB\r\n" + bytes([VERSION])
_NONCE = 32
_PROOF = 32
KEY_BYTES = 32
HOSTS = 2**64 - 1
"""The holder that all hosts are at the control plane's door."""
GREETING_BYTES = len(_MAGIC) + _HOLDER + _NONCE
REPLY_BYTES = len(_MAGIC) + _NONCE + _PROOF
ANSWER_BYTES = _PROOF


class AuthenticationError(Exception):
    """The other end does not hold the key, or does not speak this protocol."""


def new_key() -> bytes:
    """A fresh random key of KEY_BYTES bytes."""
    return secrets.token_bytes(KEY_BYTES)


def key_of(key: bytes, holder: int) -> bytes:
    """The key with which *holder* (from 0, below 2**64) comes to the door of *key*."""
    if holder == 0:
        return key
    return hmac.new(key, b"H" + holder.to_bytes(_HOLDER, "big"), hashlib.sha256).digest()


def ticket_of(key: bytes, buffer: int, holder: int) -> bytes:
    """The ticket that lets *holder* read a *buffer* of another's at the doors of *key*."""
    text = b"T" + buffer.to_bytes(_HOLDER, "big") + holder.to_bytes(_HOLDER, "big")
    return hmac.new(key, text, hashlib.sha256).digest()


def _proof(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(key, role + first + second, hashlib.sha256).digest()


def _checked_key(key: bytes) -> bytes:
    if len(key) < 16:
        raise ValueError(f"a key of {len(key)} bytes is too short: 16 at least, see new_key()")
    return key


def _version(data: bytes) -> int:
    if not data.startswith(_MAGIC[:-1]):
        raise AuthenticationError("the other end does not speak the protocol of Pathways Lab")
    return data[len(_MAGIC) - 1]


def _check_version(theirs: int) -> None:
    if theirs != VERSION:
        raise AuthenticationError(
            f"the other end speaks version {theirs} of the protocol, this one "
            f"{VERSION}: install the same pathways_lab on both"
        )


class Initiator:
    """The connecting end.  key: the one of this *holder*."""

    def __init__(self, key: bytes, holder: int = 0) -> None:
        self._key = _checked_key(key)
        self._holder = holder.to_bytes(_HOLDER, "big")
        self._nonce = os.urandom(_NONCE)

    def greeting(self) -> bytes:
        """GREETING_BYTES to send first."""
        return _MAGIC + self._holder + self._nonce

    def answer(self, reply: bytes) -> bytes:
        """ANSWER_BYTES to send after *reply* (REPLY_BYTES); raises AuthenticationError."""
        _check_version(_version(reply))
        theirs = reply[len(_MAGIC) : len(_MAGIC) + _NONCE]
        expected = _proof(self._key, b"R", self._nonce, theirs)
        if not hmac.compare_digest(expected, reply[-_PROOF:]):
            raise AuthenticationError("the other end does not hold the key of this lab")
        return _proof(self._key, b"I", self._nonce, theirs)


class Responder:
    """The accepting end.  key: the door's.  holder: who the other end says it is."""

    def __init__(self, key: bytes) -> None:
        self._key = _checked_key(key)
        self._nonce = os.urandom(_NONCE)
        self._theirs = b""
        self._version = 0
        self.holder = 0

    def reply(self, greeting: bytes) -> bytes:
        """REPLY_BYTES for a *greeting* of GREETING_BYTES; raises AuthenticationError.

        Also for one of another version: so the other end can say what is wrong.
        """
        self._version = _version(greeting)
        self.holder = int.from_bytes(greeting[len(_MAGIC) : -_NONCE], "big")
        self._key = key_of(self._key, self.holder)
        self._theirs = greeting[-_NONCE:]
        return _MAGIC + self._nonce + _proof(self._key, b"R", self._theirs, self._nonce)

    def check(self, answer: bytes) -> None:
        """Raises AuthenticationError unless *answer* (ANSWER_BYTES) proves the key."""
        _check_version(self._version)
        expected = _proof(self._key, b"I", self._theirs, self._nonce)
        if not hmac.compare_digest(expected, answer):
            raise AuthenticationError("the other end does not hold the key of this lab")
