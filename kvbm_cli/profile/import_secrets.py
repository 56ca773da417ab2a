"""Recognises the secrets in a file that `kvbm profile import` reads. A secret is never copied, only named.

Its name says that it is one, or its text: a known form of token, or a text in which a name stands in front of it. A
variable with such a name is not inserted anywhere. A secret without any of these signs is text like any other.
"""

from __future__ import annotations

import re

from kvbm.text.outside import HIDDEN, is_secret_name, without_secrets, without_url_secrets

NO_SECRETS = "a secret is not copied; set it in the environment of `kvbm serve`"
_MORE_NAMES = re.compile(  # than in messages: what is not copied is listed
    r"(?:HF|API|ACCESS|AUTH)_?TOKENS|PASSPHRASE|COOKIE|WEBHOOK|CONNECTION_?STRING|(?<!ALLOWED[_-])HEADERS"
    r"|(?:^|[_.-])(?:KEYS?|PASS|PWD|AUTH|BEARER|JWT|PAT|DSN|SAS)$",
    re.IGNORECASE,
)
_TEXT = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|AKIA|ASIA|AIza|nvapi-)[A-Za-z0-9_-]{12,}"
    r"|(?<![\w-])(?>[\w-]*?\beyJ)[\w-]{8,}+\.[\w.-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY|\b[Bb]earer\s+[\w.+/=-]+"
    r"|\bhooks\.slack\.com/services/\S+"
)
_NAME_IN_TEXT = re.compile(  # a word is searched once, from its beginning
    r"(?<![\w-])(?:([\w-]++)[\"']?\s*+[:=]\s*+[\"']?[^\s\"',}]|(?=\w*-)([\w-]++)\s++[^\s-])"
)


def names_secret(name: str) -> bool:
    return is_secret_name(name) or _MORE_NAMES.search(name) is not None


def has_secret(name: str, value: object) -> bool:
    """Whether the name or the text says that this is a secret, also inside of a value."""
    if names_secret(name):
        return True
    if isinstance(value, dict):
        return any(has_secret(str(key), one) for key, one in value.items())
    if isinstance(value, list):
        return any(has_secret("", one) for one in value)
    text = str(value)
    names = (one for found in _NAME_IN_TEXT.finditer(text) for one in found.groups() if one)
    return _TEXT.search(text) is not None or any(map(names_secret, names)) or without_secrets(text) != text


def hidden_in(written: str) -> str:
    """Return a flag or a variable as it is written, with `***` in place of a value that has a secret."""
    if not has_secret("", written):
        return written
    name, _, value = written.partition(" ")
    return f"{name} {HIDDEN}" if value and not has_secret("", name) else HIDDEN


def tokens_hidden(message: str) -> str:
    """Return a message about a value with `***` in place of tokens of known forms and of credentials in URLs."""
    return _TEXT.sub(HIDDEN, without_url_secrets(message))
