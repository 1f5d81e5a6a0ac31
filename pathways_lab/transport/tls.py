"""TLS contexts from PEM texts, as they travel over lifelines.

Problem: between machines nothing may be sent in the clear, and our processes
use the credentials of the Dask cluster; OpenSSL wants its certificates and
keys as files, and files of others must never hold them.

Rule for maintainers: both ends show a certificate of the cluster's own
authority, except for clients who were invited: they have none, or they could
pass for the cluster's own processes; their door asks for the lab's key only.
Host names are not compared, as in Dask, because clusters live on addresses.
Key files exist for a moment, in a private folder.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from pathways_lab.transport.addresses import private_folder, remove_folder


def _context(pems: Mapping[str, str], purpose: ssl.Purpose) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose, cadata=pems["ca"])
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # Home-made authorities often lack the extensions that the strict check wants.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if "cert" not in pems:
        return context
    folder = private_folder()
    try:
        (folder / "cert").write_text(pems["cert"])
        (folder / "key").write_text(pems["key"])
        context.load_cert_chain(folder / "cert", folder / "key")
    finally:
        remove_folder(folder)
    return context


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
