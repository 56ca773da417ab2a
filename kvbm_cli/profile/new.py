"""`kvbm profile new`: writes a commented profile from options, or from questions on a terminal.

The text is read back and compared with the wanted profile before it is written, completely or not at all, so the file
is always valid. An existing file is overwritten only with --force.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm.config.document import Document, Mistake, parse_document, plain_values, together
from kvbm.config.engine import DEFAULT_KIND, ENGINE_KINDS
from kvbm.config.files import real_path
from kvbm.config.findings import Findings
from kvbm.config.layers import files_with_parents, find, shipped_name
from kvbm.config.load import Examined, written_by
from kvbm.config.variables import other_variables
from kvbm.engines.table import examine_written
from kvbm.errors import EnvironmentProblem, InvariantError, ProfileError, UsageError, reason_of
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.check import workload_mistakes
from kvbm_cli.profile.machine_check import warn_of
from kvbm_cli.profile.machine_problems import problems_here
from kvbm_cli.profile.preflight import all_mistakes, examine_here
from kvbm_cli.profile.text import short_text, whole_text
from kvbm_cli.system.filesystem import write_atomically, write_new
from kvbm_cli.terminal.console import print_data, print_note, print_question
from kvbm_cli.terminal.show_error import show_kvbm_error

KEYS = {
    "--engine": "engine.kind",
    "--model": "engine.model",
    "--host": "tiers.host.capacity",
    "--disk": "tiers.disk.capacity",
    "--dir": "tiers.disk.directory",
    "--port": "server.port",
}


@dataclass(frozen=True, slots=True)
class Question:
    """Question for an option that was not given. An empty answer means `default`, or no value if that is None."""

    option: str
    text: str
    default: str | None = None


TIERS = (
    Question("--host", "Host memory for blocks, such as 64GiB (empty: none)"),
    Question("--disk", "Disk space for blocks, such as 1TB (empty: none)"),
)
QUESTIONS = (
    Question("--engine", f"Engine: {', '.join(f'`{kind}`' for kind in ENGINE_KINDS)}", DEFAULT_KIND),
    Question("--model", "Model: a local Hugging Face directory, a name on the hub, or `synthetic:...`"),
    *TIERS,
    Question("--dir", "Directory of the disk tier", "~/.cache/kvbm"),
    Question("--port", "Port of the engine's server", "8000"),
)


def new_profile(
    file: Path, answers: Mapping[str, str], overrides: Sequence[str], *, extends: Sequence[str], is_forced: bool
) -> None:
    """Write `file`. KvbmError for a mistake; then nothing is written."""
    _require_place(file, is_forced=is_forced)
    parents = [find(reference, directories=[profiles_directory()]) for reference in extends]
    missing = [] if parents else _missing(answers, overrides)
    if missing and sys.stdin.isatty() and sys.stderr.isatty():
        answers = _with_questions(answers)
    elif missing:
        hint = "add the options, or extend a profile with `--extends demo`; on a terminal, the command asks for them"
        raise UsageError(f"missing: {', and '.join(missing)}", hint=hint)
    written, expected = _examined(file, answers, overrides, parents)
    _require_no_cycle(file, parents)
    references = [_reference(parent, file) for parent in parents]
    text = _text(written, expected, references)
    _require_equal(file, text, expected, parents)
    _write(file, text, is_forced=is_forced)
    print_data(str(file))
    print_note(f"`kvbm serve --profile {shlex.quote(str(file))}` starts the engine")


def _require_place(file: Path, *, is_forced: bool) -> None:
    if file.suffix not in (".yaml", ".yml"):
        name = f"{file}.yaml" if file.name not in (".yaml", ".yml") else file.with_name("mine.yaml")
        raise UsageError(
            f"`{file}` must be a name that ends in `.yaml`", hint=f"run `kvbm profile new {shlex.quote(str(name))}`"
        )
    if os.path.isdir(file):
        raise UsageError(f"`{file}` is a directory")
    if os.path.lexists(file) and not is_forced:
        raise UsageError(f"`{file}` exists", hint="choose another name, or overwrite it with `--force`")


def _missing(answers: Mapping[str, str], overrides: Sequence[str]) -> list[str]:
    """Options that a profile without a parent requires and that were not given."""
    keys = [*(KEYS[option] for option in answers), *(text.partition("=")[0].strip() for text in overrides)]
    options = [f"`{option}`" for option in ("--engine", "--model") if KEYS[option] not in keys]
    missing = [" and ".join(options)] if options else []
    has_tier = any(key.startswith(("tiers.host.", "tiers.disk.")) for key in keys)
    return missing if has_tier else [*missing, "one of `--host` and `--disk`"]


def _with_questions(given: Mapping[str, str]) -> dict[str, str]:
    """Asks for the missing options, again after an invalid answer. Returns all answers."""
    answers = dict(given)
    waiting = deque(QUESTIONS)
    while waiting:
        question = waiting.popleft()
        if question.option in answers or (question.option == "--dir" and "--disk" not in answers):
            continue
        answer = _ask(question)
        if answer and _is_valid(question, answer, answers):
            answers[question.option] = answer
        elif answer or question not in TIERS:
            waiting.appendleft(question)
        elif question is TIERS[-1] and not {tier.option for tier in TIERS} & set(answers):
            print_note("host memory or disk space is required")
            waiting.extendleft(reversed(TIERS))
    return answers


def _ask(question: Question) -> str:
    default = f" [{question.default}]" if question.default is not None else ""
    print_question(f"{question.text}{default}: ")
    line = sys.stdin.readline()
    if not line:
        print_note("")
        raise KeyboardInterrupt
    return line.strip() or question.default or ""


def _is_valid(question: Question, answer: str, earlier: Mapping[str, str]) -> bool:
    """Whether the answer is valid, also on this machine. Prints its mistakes if not."""
    answers = {**earlier, question.option: answer}
    if not {"--host", "--disk"} & set(answers):
        answers["--host"] = "1GiB"  # a profile requires one of them
    examined = _examine(Path("answers.yaml"), answers, ())[1]
    here = examine_here(examined.resolved)[1] if examined.resolved is not None else []
    found = [*examined.mistakes, *here]
    wrong = [one for one in found if isinstance(one, Mistake) and one.key == KEYS[question.option]]
    for mistake in wrong:
        show_kvbm_error(ProfileError(mistake.text, hint=mistake.hint))
    return not wrong


def _examine(
    file: Path, answers: Mapping[str, str], overrides: Sequence[str], parents: Sequence[Path] = ()
) -> tuple[Document, Examined]:
    options = {KEYS[option]: (option, text) for option, text in answers.items()}
    written, mistakes = written_by(overrides, options)
    if mistakes:
        raise together(mistakes)
    places = [profiles_directory()]
    return written, examine_written(file, written, directories=places, parents=parents, variables=os.environ)


def _examined(
    file: Path, answers: Mapping[str, str], overrides: Sequence[str], parents: Sequence[Path]
) -> tuple[Document, Examined]:
    """Return the document to write and its profile. ProfileError for anything `kvbm profile check` refuses."""
    written, examined = _examine(file, answers, overrides, parents)
    sizing, mistakes = all_mistakes(examined)
    mistakes += [] if examined.resolved is None else workload_mistakes(examined.resolved)
    if mistakes:
        raise together(mistakes)
    assert examined.resolved is not None, "no mistakes means a profile"
    assert sizing is not None, "no mistakes means sizes, or a reason why not"
    warn_of(examined.resolved, problems_here(examined.resolved, sizing))
    return written, examined


def _require_no_cycle(file: Path, parents: Sequence[Path]) -> None:
    findings = Findings()
    files_with_parents(parents, [profiles_directory()], findings)
    if real_path(file) in [real_path(Path(label)) for label in findings.labels]:
        raise UsageError(f"`{file}` would extend itself", hint="choose another name for the new profile")


def _reference(parent: Path, file: Path) -> str:
    """Return the value of `extends`: a path is relative to the new file."""
    if (name := shipped_name(parent, [profiles_directory()])) is not None:
        return name
    if parent.is_absolute():
        return str(parent)
    place = real_path(file.parent)
    relative = os.path.relpath(real_path(parent.parent) / parent.name, place)
    if real_path(place / relative) != real_path(parent):
        raise InvariantError(f"`{relative}` in `{place}` is not `{parent}`")
    return relative if relative.startswith("../") else f"./{relative}"


def _text(written: Document, expected: Examined, references: Sequence[str]) -> str:
    values = plain_values(written)
    if references:
        return short_text(values, extends=references)
    assert expected.resolved is not None
    return whole_text(values, engine=expected.resolved.profile.engine.kind)


def _write(file: Path, text: str, *, is_forced: bool) -> None:
    if not is_forced:
        write_new(file, text)
        return
    try:
        write_atomically(file, text)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{file}`: {reason_of(error)}") from None


def _require_equal(file: Path, text: str, expected: Examined, parents: Sequence[Path]) -> None:
    document, mistakes = parse_document(text, label=str(file))
    document.pop("extends", None)
    read = examine_written(
        file, document, directories=[profiles_directory()], parents=parents, variables=other_variables(os.environ)
    )
    if found := [*mistakes, *read.mistakes]:
        raise InvariantError(f"the text of the profile is not valid: {together(found).message}")
    assert read.resolved is not None, "no mistakes means a profile"
    assert expected.resolved is not None, "its mistakes were reported"
    if read.resolved.profile != expected.resolved.profile:
        raise InvariantError("the text of the profile differs from the requested one")
