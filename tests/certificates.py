"""TLS of a server in a test, with a certificate authority of its own."""

import ssl
from pathlib import Path

import trustme


def server_tls(directory: Path) -> tuple[ssl.SSLContext, Path]:
    """Return the TLS of a server at 127.0.0.1, and the PEM file of its authority."""
    authority, context, ca_file = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), directory / "ca.pem"
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(ca_file)
    return context, ca_file
