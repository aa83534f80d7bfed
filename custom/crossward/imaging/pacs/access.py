"""How to prove to an archive who is asking; secrets come from files or the environment, never from arguments."""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crossward.federation.errors import BadInput

LOGIN_VARIABLE = "CROSSWARD_PACS_LOGIN"
TOKEN_VARIABLE = "CROSSWARD_PACS_TOKEN"


@dataclass(frozen=True)
class Access:
    """What goes with every request.

    Attributes:
        authorization: the header's value; None where the archive asks for none.
        tls: for https; None leaves it to the system's authorities.
    """

    authorization: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None


def read_access(
    *,
    login_file: Path | None = None,
    token_file: Path | None = None,
    ca_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Access:
    """Gathers login and certificates.

    Args:
        login_file: one line, ``user:password``; else the environment's CROSSWARD_PACS_LOGIN.
        token_file: one line, a bearer token; else the environment's CROSSWARD_PACS_TOKEN.
        ca_file: authorities (PEM) that vouch for the archive, in place of the system's.
        certificate: this client's own (PEM).
        key: of the certificate, where it is not in the same file.
        environment: where the variables are looked up.

    Raises:
        BadInput: names the file or variable, never what is in it.
    """
    login = _secret(login_file, LOGIN_VARIABLE, environment)
    token = _secret(token_file, TOKEN_VARIABLE, environment)
    if login and token:
        raise BadInput("both a login and a token are given; keep one of the two")
    if login and ":" not in login:
        raise BadInput(f"the login is not of the form user:password; correct {login_file or LOGIN_VARIABLE}")
    basic = f"Basic {base64.b64encode(login.encode()).decode()}" if login else None
    return Access(
        authorization=f"Bearer {token}" if token else basic,
        tls=_tls(ca_file, certificate, key),
    )


def _secret(path: Path | None, variable: str, environment: Mapping[str, str]) -> str:
    source = str(path or variable)
    try:
        text = path.read_text(encoding="utf-8").strip() if path else environment.get(variable, "").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{source}: cannot be read ({type(error).__name__}); check the file") from None
    if (path and not text) or not text.isprintable():
        raise BadInput(f"{source}: is not one line of text; write the secret into it, and nothing else")
    return text


def _tls(ca_file: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    if key and not certificate:
        raise BadInput("a key without its certificate is of no use; give --certificate too")
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError):
        raise BadInput(f"{ca_file}: is not a file of certificates; give the authority's certificate as PEM") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate:
        try:
            # Without a password here, an encrypted key would make OpenSSL ask on the terminal.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ssl.SSLError):
            raise BadInput(
                f"{certificate}: cannot be used with its key; give both as PEM, the key without a password"
            ) from None
    return context
