"""The certificate and its key, read once and tried before a port is opened."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files and what is in them. The certificate's file holds the chain, too."""

    certificate_file: Path
    key_file: Path
    certificate: bytes
    key: bytes


def tls_from(settings: Settings) -> Tls | None:
    """None where the settings name no certificate. UserError if the files cannot be read, are no
    PEM, or do not belong together.
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
            message, "give PEM files that belong together; the key without a passphrase"
        ) from error
