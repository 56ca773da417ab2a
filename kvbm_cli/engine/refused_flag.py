"""Finds the flag or the setting that an engine refuses in its log. Each library writes it in its own form.

api_server.py: error: argument --dtype: invalid choice: 'fp9' (choose from ...)      argparse, after its usage
Error: No such option: --max_seqlen (Possible options: --max_seq_len)               click, TensorRT-LLM
1 validation error for SchedulerConfig                                               pydantic
max_num_seqs
  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=-1, input_type=int]
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from kvbm.text.outside import shortened

MOST_SHOWN = 3
LAST_LINES = 30  # a refused flag ends the engine, so the message is at the end
_END_OF_USAGE = re.compile(r"^\S+: error: ")
_USAGE_OF_CLICK = re.compile(r"^Usage: |^Try '.*--help.* for help")
_FLAG = re.compile(r"--[a-z][a-z0-9_-]+")
_ARGPARSE = re.compile(r"^\S+: error: (?:argument (?P<flag>[^:]+): )?(?P<text>.+)")
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<flags>.+)|No such option:? '?(?P<flag>--?[\w-]+)")
_CLICK = re.compile(r"^Error: (?P<text>(?:No such option|Invalid value|Missing|Option|Got unexpected).*)")
_VALIDATION = re.compile(r"validation errors? for (?P<model>\w+)$")
_FIELD = re.compile(r"[A-Za-z_]\w*(?:\.[\w()]+)*$")
_DETAIL = re.compile(r" \[type=.*?(?:input_value=(?P<value>.*), input_type=.*)?\]$")


def without_usage(lines: Sequence[str]) -> list[str]:
    """Return the lines without the usage that a parser of command lines prints in front of its error."""
    kept: list[str] = []
    for line in lines:
        if _END_OF_USAGE.match(line):
            while kept and (kept[-1][:1].isspace() or kept[-1].startswith("usage: ")):
                kept.pop()
        if not _USAGE_OF_CLICK.match(line):
            kept.append(line)
    return kept


def refusal(lines: Sequence[str]) -> tuple[str, str] | None:
    """Return what the engine refuses and a hint, None if its last lines do not say so."""
    for index in range(len(lines) - 1, max(-1, len(lines) - 1 - LAST_LINES), -1):
        if _VALIDATION.search(lines[index]):
            return _invalid(lines[index], lines[index + 1 :])
        if (found := _ARGPARSE.match(lines[index]) or _CLICK.match(lines[index])) is not None:
            return _refused(found, lines)
    return None


def _refused(found: re.Match[str], lines: Sequence[str]) -> tuple[str, str]:
    unknown = _UNKNOWN.search(found["text"])
    if unknown is not None:
        written = unknown["flags"] or unknown["flag"]
        return f"unknown arguments: {shortened(written)}", _nearest(written, lines)
    flag = found.groupdict().get("flag") or next(iter(_FLAG.findall(found["text"])), None)
    prefix = f"{found['flag']}: " if found.groupdict().get("flag") else ""
    return shortened(f"{prefix}{found['text']}"), _hint(flag)


def _invalid(header: str, below: Sequence[str]) -> tuple[str, str]:
    """Return the first fields with their messages."""
    field, texts = None, []
    for line in below:
        if not line[:1].isspace() and not _FIELD.match(line):
            break
        if not line[:1].isspace():
            field = line.strip()
        elif not line.strip().startswith("For further information"):
            texts.append((field, line.strip()))
    flag = found["flag"] if (found := _ARGPARSE.match(header)) is not None else None
    if not texts:
        return shortened(header.strip()), _hint(flag)
    subject = f"{flag}: " if flag is not None else ""
    shown = "; ".join(_said(name, text) for name, text in texts[:MOST_SHOWN])
    return f"{subject}{shown}", _hint(flag or texts[0][0])


def _said(name: str | None, text: str) -> str:
    detail = _DETAIL.search(text)
    value = f", not `{detail['value']}`" if detail is not None and detail["value"] and name else ""
    said = _DETAIL.sub("", text).removeprefix("Value error, ")
    return shortened(f"`{name}`: {said}{value}" if name else said)


def _nearest(written: str, lines: Sequence[str]) -> str:
    """Return a hint with the flag of the usage that is most similar."""
    offered = [line for line in lines if line[:1].isspace() or "Possible options" in line or "Did you mean" in line]
    known = {name for line in offered for name in _FLAG.findall(line)} - {written}
    wrong = (_FLAG.findall(written) or [written])[0]
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.8)
    key = f"engine.arguments.{_key(wrong)}"
    return (
        f"change `{key}`: did you mean `{_key(near[0])}`?" if near else f"remove `{key}`: the engine has no such flag"
    )


def _hint(flag: str | None) -> str:
    if flag is None:
        return "check `engine.arguments`: its keys are flags of the engine"
    return f"check `engine.arguments.{_key(flag)}`"


def _key(flag: str) -> str:
    return flag.partition("/")[0].strip().lstrip("-").replace("-", "_")
