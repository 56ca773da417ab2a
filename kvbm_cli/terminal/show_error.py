"""Format of errors: `error:` what failed, the chain of causes, an empty line, `hint:` what to type.

Everything goes to stderr. The text is the same without colour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from kvbm.errors import EnvironmentProblems, KvbmError, ProfileMistakes, reason_of
from kvbm.text.outside import fit_for_message
from kvbm_cli.terminal.printable import printable

MOST_SHOWN = 50
RED, YELLOW, CYAN = "1;31", "1;33", "1;36"


def show_error(message: str, *, cause: BaseException | None = None, hint: str | None = None) -> None:
    lines = [f"{coloured('error:', RED)} {_fit(message)}"]
    lines += [f"  caused by: {_fit(text)}" for text in _causes(cause, message)]
    if hint:
        lines += ["", f"{coloured('hint:', CYAN)} {_fit(hint)}"]
    print("\n".join(lines), file=sys.stderr)


def show_warning(message: str) -> None:
    print(warning_text(message), file=sys.stderr)


def warning_text(message: str) -> str:
    return f"{coloured('warning:', YELLOW)} {_fit(message)}"


def _fit(text: str) -> str:
    return printable(fit_for_message(text))


def show_kvbm_error(error: KvbmError) -> None:
    """Print an error. Several mistakes or problems are printed each with its hint, followed by their number."""
    if isinstance(error, ProfileMistakes):
        _show_several(error.mistakes, "mistakes")
    elif isinstance(error, EnvironmentProblems):
        _show_several(error.problems, "problems")
    else:
        show_error(error.message, cause=error.__cause__, hint=error.hint)


def _show_several(errors: Sequence[KvbmError], noun: str) -> None:
    for one in errors[:MOST_SHOWN]:
        show_error(one.message, cause=one.__cause__, hint=one.hint)
        print(file=sys.stderr)
    more = len(errors) - MOST_SHOWN
    rest = f"; {more} more are not shown: `kvbm profile check PROFILE --json` lists all" if more > 0 else ""
    print(f"{len(errors)} {noun}{rest}", file=sys.stderr)


def _causes(cause: BaseException | None, message: str) -> Iterator[str]:
    """Yield the texts of the chain of causes, but for errors of the operating system whose reason `message` gives."""
    while cause is not None:
        if not isinstance(cause, OSError) or reason_of(cause) not in message.lower():
            yield str(cause) or type(cause).__name__
        cause = cause.__cause__


def coloured(text: str, code: str) -> str:
    """Return the text in an ANSI colour or style, plain if stderr is not a terminal or NO_COLOR is set."""
    return f"\033[{code}m{text}\033[0m" if text and _is_coloured() else text


def _is_coloured() -> bool:
    import os

    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
