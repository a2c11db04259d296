"""Certificates for tests, made when they are wanted: an authority, and what it issues."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from jaxrdma.cluster import TlsFiles


class Authority:
    """A CA of the name `name`, and in the folder `folder` what it issues."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._ca = trustme.CA(organization_name=name)
        self.file = self._folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(
        self,
        *hosts: str,
        name: str = "",
        begins: float = -1,
        ends: float = 365,
        servers: bool = True,
        key: Any = None,
    ) -> TlsFiles:
        """A certificate for `hosts`, valid from `begins` to `ends`, in days from now.

        **Arguments:**

        - `name`: of its files, beside the hosts.
        - `servers`: clients may use it anyway; servers too?
        - `key`: of `cryptography`, if another kind than usual.
        """
        now = datetime.now(UTC)
        made = self._ca.issue_cert(
            *hosts,
            not_before=now + timedelta(days=begins),
            not_after=now + timedelta(days=ends),
        )
        stem = f"{name or hosts[0]} {begins:g} {ends:g}"
        cert, path = self._folder / f"{stem}.pem", self._folder / f"{stem}.key"
        leaf = made.cert_chain_pems[0].bytes()
        cert.write_bytes(leaf if servers and key is None else self._changed(leaf, servers, key))
        path.write_bytes(made.private_key_pem.bytes() if key is None else _pem(key))
        return TlsFiles(str(cert), str(path), str(self.file))

    def _changed(self, pem: bytes, servers: bool, key: Any) -> bytes:
        """The same certificate, but for its purpose and its key."""
        leaf = x509.load_pem_x509_certificate(pem)
        builder = x509.CertificateBuilder(
            leaf.issuer,
            leaf.subject,
            leaf.public_key() if key is None else key.public_key(),
            leaf.serial_number,
            leaf.not_valid_before_utc,
            leaf.not_valid_after_utc,
        )
        for extension in leaf.extensions:
            value = extension.value
            if isinstance(value, x509.ExtendedKeyUsage) and not servers:
                value = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CLIENT_AUTH])
            builder = builder.add_extension(value, extension.critical)
        signer: Any = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _pem(key: Any) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def encrypted(files: TlsFiles) -> TlsFiles:
    """The same, with a password on the key."""
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    path = Path(files.key).with_suffix(".encrypted")
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    return replace(files, key=str(path))


def settings(files: TlsFiles) -> dict[str, str]:
    """As fields of a `ClusterSpec`."""
    return {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}


def variables(files: TlsFiles) -> dict[str, str]:
    """As a process finds them in its environment."""
    return {f"JAXRDMA_{name.upper()}": path for name, path in settings(files).items()}
