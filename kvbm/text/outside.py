"""Text from outside (requests, files, other processes, headers, URLs) in messages and log lines.

    shown(value)            any value as one short line; reads only its beginning
    shown_json(value)       the same, as JSON
    shortened(text)         text of which only the beginning matters
    one_line(text)          escapes what ends a line, and what a terminal obeys
    without_secrets(text)   hides credentials of URLs and values of variables that hold a secret
    fit_for_message(text)   what every KvbmError does with its message

A message that quotes a foreign value uses `shown`. KvbmError and LogLimit do it again for all messages, so that a place
that does not is harmless too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice

MAX_SHOWN = 200
MAX_LINE = 1000  # of a message: kvbm's own words are shorter
MAX_LINES = 500
MAX_DIGITS = 60
BITS_PER_DIGIT = 3.3219
SHOWN_ITEMS = 10
SHOWN_DEPTH = 3

# Each of these takes linear time: a search that begins anew at every character of a word would not.
# C0, DEL, C1, marks and overrides of text direction, further ends of a line, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BEFORE_AT = re.compile(r"(?<![^\s@])[^\s@]*+@")
_USERINFO = re.compile(r"(?<=://)(?:[^/:@]*:(?!\d+/).*|[^/@]+)@", re.DOTALL)  # of a match of _BEFORE_AT
_QUERY_SECRET = re.compile(
    r"(?i)(?<=[?&])([\w.-]*(?:sig|signature|token|secret|passw(?:or)?d|credential|key|keyid))=[^&\s#`'\"]+"
)
_SECRET = (
    r"TOKEN(?!S|IZ|[_-](?:ID|THRESHOLD|BUDGET|COUNT|LIMIT|PATH|FILE))|SECRET|PASSW|CREDENTIAL|AUTHORIZATION"
    r"|(?:API|ACCESS|PRIVATE|ACCOUNT)[_-]?KEY"
)
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
_VARIABLE = re.compile(rf"\b((?>[A-Z0-9_]*(?:{_SECRET})[A-Z0-9_]*)[\"']?)(\s*[:=]\s*[\"']?)(?![\"'\s*])[^\s\"',}}]+")
_FLAG = re.compile(rf"(?i)(?<![^\s'\"])(--(?>[\w-]*?(?:{_SECRET}))[\w-]*+(?:=|\s+)['\"]?)(?![-'\"\s*])[^\s'\"`]+")
_KEY = re.compile(rf'(?i)("(?>[\w.-]*?(?:{_SECRET}))[\w.-]*+"\s*:\s*")[^"]+')  # of JSON
_QUOTED = re.compile(r"`([^`\n]*)(`|$)")
HIDDEN = "***"


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """Return a value as one line of at most `limit` characters, text without quotes. Time and memory depend on
    `limit`, not on the value."""
    text = value[: limit + 1] if isinstance(value, str) else _beginning(value, limit, SHOWN_DEPTH)
    return shortened(one_line(text), limit)


def shown_json(value: object, limit: int = MAX_SHOWN) -> str:
    """Like `shown`, with quotes around text."""
    return shortened(one_line(_beginning(value, limit, SHOWN_DEPTH)), limit)


def shortened(text: str, limit: int = MAX_SHOWN) -> str:
    """Return the text, or the beginning of a long one with `...`, in at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def json_text(value: object, *, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Return the value as JSON, with null for a number that JSON does not have."""
    try:
        return json.dumps(value, indent=indent, separators=separators, allow_nan=False)
    except ValueError:
        value = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return json.dumps(value, indent=indent, separators=separators)


def one_line(text: str) -> str:
    """Return the text with escapes such as `\\x1b` for characters that end a line or that a terminal obeys."""
    return _UNSAFE.sub(escaped, text)


def without_secrets(text: str) -> str:
    """Return the text with `***` for credentials and signatures in URLs, and for values of secret variables and
    flags."""
    text = _FLAG.sub(rf"\1{HIDDEN}", text) if "--" in text else text
    text = _KEY.sub(rf"\1{HIDDEN}", text) if '":' in text or '" :' in text else text
    return _VARIABLE.sub(rf"\1\2{HIDDEN}", without_url_secrets(text))


def without_url_secrets(text: str) -> str:
    if "://" not in text:
        return text
    without = _BEFORE_AT.sub(lambda found: _USERINFO.sub(f"{HIDDEN}@", found[0]), text)
    return _QUERY_SECRET.sub(rf"\1={HIDDEN}", without)


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable, a flag or a key of this name is probably a secret."""
    return _SECRET_NAME.search(name) is not None


def without_secret_values(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: str(without_secret_value(name, value)) for name, value in variables.items()}


def without_secret_value(name: str, value: object) -> object:
    """Return the value of a variable, or of a key that ends with its name, for display."""
    if isinstance(value, Mapping):
        return {one: without_secret_value(str(one), inside) for one, inside in value.items()}
    if isinstance(value, list | tuple):
        return [without_secret_value(name, one) for one in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret_name(name) else without_secrets(value)


def fit_for_message(text: str) -> str:
    """Return a message with every value in backticks shortened, and with no endless line. Its secrets are hidden."""
    lines = text[: MAX_LINE * MAX_LINES].split("\n", MAX_LINES)[:MAX_LINES]
    short = [shortened(_QUOTED.sub(_shortened_value, line), MAX_LINE) for line in lines]
    return without_secrets("\n".join(short))


def _shortened_value(found: re.Match[str]) -> str:
    return f"`{shortened(found[1])}`" if len(found[1]) > MAX_SHOWN else found[0]


def _beginning(value: object, limit: int, depth: int) -> str:
    """Return at least the first `limit` characters of a value as JSON, and not much more."""
    if isinstance(value, str):
        return json.dumps(value[: limit + 1])
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > MAX_DIGITS * BITS_PER_DIGIT:
        return f"a number of about {int(value.bit_length() / BITS_PER_DIGIT)} digits"
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value[: limit + 1]).decode(errors="backslashreplace")
    if isinstance(value, dict | list | tuple | set | frozenset) and depth == 0:
        return "..."
    if isinstance(value, dict):
        pairs = ((_beginning(key, limit, 0), _beginning(one, limit, depth - 1)) for key, one in value.items())
        return f"{{{_joined((': '.join(pair) for pair in pairs), len(value))}}}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{_joined((_beginning(one, limit, depth - 1) for one in value), len(value))}]"
    return str(value)


def _joined(items: Iterable[str], count: int) -> str:
    return ", ".join([*islice(items, SHOWN_ITEMS), *(["..."] if count > SHOWN_ITEMS else [])])


def escaped(found: re.Match[str]) -> str:
    """Return an escape such as `\\x1b` for the character that was found."""
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
