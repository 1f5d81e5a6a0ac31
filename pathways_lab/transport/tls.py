"""TLS contexts from PEM texts, as they travel over lifelines.

Problem: between machines nothing may be sent in the clear, and our processes
use the credentials of the Dask cluster; OpenSSL wants its certificates and
keys as files, and a file with a key must never stay, also of a process that is killed.

Rule for maintainers: both ends show a certificate of the cluster's own
authority, except for clients who were invited: they have none, or they could
pass for the cluster's own processes; their door asks for the lab's key only.
Host names are not compared, as in Dask, because clusters live on addresses.
Files with keys exist for a moment, and have no name.
"""

from __future__ import annotations

import contextlib
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO


def _context(pems: Mapping[str, str], purpose: ssl.Purpose) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose, cadata=pems["ca"])
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # Home-made authorities often lack the extensions that the strict check wants.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if "cert" not in pems:
        return context
    with _nameless(pems["cert"]) as cert, _nameless(pems["key"]) as key:
        context.load_cert_chain(f"/dev/fd/{cert.fileno()}", f"/dev/fd/{key.fileno()}")
    return context


@contextlib.contextmanager
def _nameless(text: str) -> Iterator[IO[str]]:
    """A file without a name, to be read from its begin."""
    with tempfile.TemporaryFile("w") as file:
        file.write(text)
        file.flush()
        file.seek(0)
        yield file


def server_context(
    pems: Mapping[str, str] | None, *, invited: bool = False
) -> ssl.SSLContext | None:
    """For listeners.  pems: PEM texts ``ca``, ``cert``, ``key``; None gives None.

    invited: also for those who have no certificate, and prove a key afterwards.
    """
    if pems is None:
        return None
    context = _context(pems, ssl.Purpose.CLIENT_AUTH)
    if invited:
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(pems: Mapping[str, str] | None) -> ssl.SSLContext | None:
    """For connections.  pems: PEM texts ``ca``, ``cert``, ``key``; None gives None.

    An invited client has ``ca`` only, and the other end must show a certificate of that.
    """
    return None if pems is None else _context(pems, ssl.Purpose.SERVER_AUTH)
