"""The TLS certificate and its key, read once and checked before a port is opened."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Tls:
    """The PEM files and their contents. The certificate's file includes the chain."""

    certificate_file: Path
    key_file: Path
    certificate: bytes
    key: bytes


def tls_from(settings: Settings) -> Tls | None:
    """Load the certificate and key; None if the settings name none. UserError if the files cannot
    be read, are not PEM, or do not match.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        return Tls(certificate, key, certificate.read_bytes(), key.read_bytes())
    except OSError as error:  # ssl.SSLError is one
        message = (
            f"cannot serve TLS with the certificate '{certificate}' and the key '{key}': {error}"
        )
        raise UserError(
            message, "give matching PEM files, and a key without a passphrase"
        ) from error
