"""Format of errors: `error:` what failed, the chain of causes, an empty line, `hint:` what to type.

Everything goes to stderr. The text is the same without colour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvbm.errors import KvbmError, ProfileMistakes

RED, YELLOW, CYAN = "1;31", "1;33", "1;36"


def show_error(message: str, *, cause: BaseException | None = None, hint: str | None = None) -> None:
    lines = [f"{coloured('error:', RED)} {message}"]
    lines += [f"  caused by: {text}" for text in _causes(cause)]
    if hint:
        lines += ["", f"{coloured('hint:', CYAN)} {hint}"]
    print("\n".join(lines), file=sys.stderr)


def show_warning(message: str) -> None:
    print(warning_text(message), file=sys.stderr)


def warning_text(message: str) -> str:
    return f"{coloured('warning:', YELLOW)} {message}"


def show_kvbm_error(error: KvbmError) -> None:
    """Prints an error. Several mistakes of a profile are printed each with its hint, followed by their number."""
    if not isinstance(error, ProfileMistakes):
        show_error(error.message, cause=error.__cause__, hint=error.hint)
        return
    for one in error.mistakes:
        show_error(one.message, cause=one.__cause__, hint=one.hint)
        print(file=sys.stderr)
    print(f"{len(error.mistakes)} mistakes", file=sys.stderr)


def _causes(cause: BaseException | None) -> Iterator[str]:
    while cause is not None:
        yield str(cause) or type(cause).__name__
        cause = cause.__cause__


def coloured(text: str, code: str) -> str:
    """Returns the text in an ANSI colour or style, plain if stderr is no terminal or NO_COLOR is set."""
    return f"\033[{code}m{text}\033[0m" if text and _is_coloured() else text


def _is_coloured() -> bool:
    import os

    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
