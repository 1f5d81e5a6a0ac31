"""``cluster certs``: the certificates of a group's cluster, and the settings that name them.

Problem: without certificates a lab beyond one machine is refused, and making an authority by
hand takes a page of commands.

How: one folder has everything: the authority (``ca.pem``, and its key, which signs and is
needed nowhere else), a certificate for each role, and ``dask.yaml``, which names them by their
full paths.  ``DASK_CONFIG`` set to the folder makes Dask processes use them.  A folder that
lies elsewhere now is asked for again, which names its files anew.

Rule for maintainers: keys are readable by their owner only, also while they are written;
nothing that is there is written over unless it is asked for.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

ROLES = ("scheduler", "worker", "client")
AUTHORITY_DAYS = 3650
DAYS = 1825
"""For so long a certificate is good: longer than a lab lives."""
_EARLY = datetime.timedelta(hours=1)
"""Clocks of machines differ."""


def make(folder: Path, add: str = "", renew: bool = False) -> list[str]:
    """Certificates in *folder*, as far as they are not there; what was done, in words.

    add: the name of somebody who gets a folder of his own in it, with a client's certificate.
    renew: new certificates of the same authority for the roles.
    Raises ValueError for a name that is no name of a folder.
    """
    if add and (add != Path(add).name or add.startswith(".")):
        raise ValueError(f"--add {add!r}: give a name, without slashes; it names a folder")
    folder = folder.absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    said: list[str] = []
    authority = folder / "ca.pem"
    if authority.exists() and not (folder / "ca-key.pem").exists():
        _settings(folder)
        return [f"{folder}: no authority's key is here to sign with; dask.yaml names its files"]
    if not authority.exists():
        _sign(folder, "ca", "Pathways Lab authority", AUTHORITY_DAYS)
        said.append(f"{authority}: a new authority; keep ca-key.pem, which signs, to yourself")
    for role in ROLES:
        if renew or not (folder / f"{role}.pem").exists():
            _sign(folder, role, role, DAYS)
            said.append(f"{folder / role}.pem: good for {DAYS // 365} years")
    _settings(folder)
    if add:
        own = folder / add
        own.mkdir(mode=0o700, exist_ok=True)
        _sign(folder, f"{add}/client", add, DAYS)
        (own / "ca.pem").write_bytes(authority.read_bytes())
        _settings(own)
        said.append(f"{own}: give it to {add}, who says `cluster certs` of it where it lies then")
    return said or [f"{folder}: everything is there; --renew makes new certificates"]


def _sign(folder: Path, name: str, subject: str, days: int) -> None:
    """A key and a certificate of the authority for it; of *name* ``"ca"``, by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    key, itself = ec.generate_private_key(ec.SECP256R1()), name == "ca"
    issuer, signer = (named(subject), key) if itself else _authority(folder)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=itself, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
        )
        .sign(signer, hashes.SHA256())
    )
    _write(folder, name, key, certificate)


def _authority(folder: Path) -> tuple[x509.Name, ec.EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    key: Any = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    return certificate.subject, key


def _write(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    from cryptography.hazmat.primitives import serialization

    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = folder / f"{name}-key.pem"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _settings(folder: Path) -> None:
    """Dask's configuration for the certificates that are there: JSON is YAML."""

    def at(name: str) -> str:
        return str(folder / f"{name}.pem")

    roles = [role for role in ROLES if (folder / f"{role}.pem").exists()]
    tls = {"ca-file": at("ca"), **{r: {"cert": at(r), "key": at(f"{r}-key")} for r in roles}}
    comm = {"require-encryption": True, "default-scheme": "tls", "tls": tls}
    settings = {"distributed": {"comm": comm}}
    (folder / "dask.yaml").write_text(json.dumps(settings, indent=2) + "\n")
