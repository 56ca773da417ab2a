"""Bugs in profiles and in the commands."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="guard-removes-nothing",
        bug="The scratch directory of a killed doctor is not removed.",
        file="kvbm_cli/system/leftovers.py",
        old="""\
        shutil.rmtree(self.directory, ignore_errors=True)
        while (is_there := os.path.lexists(self.directory)) and time.monotonic() < deadline:
            time.sleep(REMOVAL_INTERVAL_S)
            shutil.rmtree(self.directory, ignore_errors=True)
""",
        new="""\
        while (is_there := os.path.lexists(self.directory)) and time.monotonic() < deadline:
            time.sleep(REMOVAL_INTERVAL_S)
""",
        fails="tests/cli/test_doctor_program.py -x -k SIGKILL",
    ),
    Mutant(
        name="doctor-passes-with-failures",
        bug="A failed check does not show in the exit code.",
        file="kvbm_cli/doctor/command.py",
        old="exit_code = int(any(check.state is CheckState.FAILURE for check in checks))",
        new="exit_code = int(all(check.state is CheckState.FAILURE for check in checks))",
        fails="tests/cli/test_doctor.py -k report",
    ),
    Mutant(
        name="profile-null-tier-stays",
        bug="A tier that is null stays as the parent has it.",
        file="kvbm/config/layers.py",
        old="if entry.value is None and here in _SECTIONS and not (here in TIERS and entry.source.written.strip()):",
        new="if entry.value is None and here in _SECTIONS and here:",
        fails="tests/config/test_load.py",
    ),
    Mutant(
        name="profile-overrides-lose-to-variables",
        bug="A variable wins over what the command line says.",
        file="kvbm/config/layers.py",
        old="for layer in layers:",
        new="for layer in (*layers[1:], layers[0]):",
        fails="tests/config/test_load.py",
    ),
    Mutant(
        name="profile-tells-one-mistake",
        bug="Only the first mistake of a profile is told.",
        file="kvbm/config/load.py",
        old="mistakes = findings.in_order()",
        new="mistakes = findings.in_order()[:1]",
        fails="tests/config/test_all_mistakes.py",
    ),
    Mutant(
        name="profile-value-takes-a-section-away",
        bug="A value where a section belongs takes away what lies below it, and is covered by the next layer.",
        file="kvbm/config/layers.py",
        old="""\
    remove_mistaken(document, findings.add(not_sections(document, _SECTIONS)))
""",
        new="",
        fails="tests/config/test_all_mistakes.py",
    ),
    Mutant(
        name="profile-variable-that-is-not-set-is-empty",
        bug="A variable of the environment that is not set becomes nothing, without a word.",
        file="kvbm/config/interpolation.py",
        old="if value is None:",
        new="if value is None and not name:",
        fails="tests/config/test_interpolation.py",
    ),
    Mutant(
        name="serve-counts-on-the-room-of-others",
        bug="A disk that cannot fit is thought to fit in the place of a cache that an engine uses.",
        file="kvbm_cli/profile/machine_problems.py",
        old="has_room = missing_bytes <= sum(cache.arena_bytes for cache in caches if not cache.is_locked)",
        new="has_room = missing_bytes <= sum(cache.arena_bytes for cache in caches)",
        fails="tests/cli/test_check.py",
    ),
    Mutant(
        name="engine-imports-from-the-working-directory",
        bug="An engine executes a random.py in the working directory.",
        file="kvbm_cli/engine/process.py",
        old='"PYTHONUNBUFFERED": "1", **SAFE_PATH, ',
        new='"PYTHONUNBUFFERED": "1", ',
        fails="tests/cli/test_planted_modules.py -k proxy",
    ),
    Mutant(
        name="engine-executes-orders-without-end",
        bug="callers who repeat an order hold up the requests of the embedded engine",
        file="kvbm/embedded/engine/engine.py",
        old="for _ in range(queued):",
        new="while True:",
        fails="tests/engines/test_engine_thread.py -k without_a_pause",
    ),
    Mutant(
        name="engine-resets-without-a-pause",
        bug="callers who repeat resets of a slow disk take most of the engine's time",
        file="kvbm/embedded/engine/engine.py",
        old="RESET_PAUSE * (ended_s - began_s)",
        new="0",
        fails="tests/engines/test_engine_thread.py -k leave_the_engine",
    ),
    Mutant(
        name="disk-process-reports-a-clear-late",
        bug="the end of a clear is noticed only by the next poll, so that each reset takes 0.1 s",
        file="kvbm/disk/index_thread.py",
        old="            clear.on_durable()\n",
        new="",
        fails="tests/disk/test_storage.py",
    ),
    Mutant(
        name="reset-of-the-cache-without-a-token",
        bug="Every program on the machine can empty the cache of the embedded engine.",
        file="kvbm/embedded/http/admin.py",
        old="not _is_token(request.headers.get(ADMIN_HEADER), token)",
        new="False",
        fails="tests/engines/test_server_admin.py",
    ),
    Mutant(
        name="prompt-counts-once-per-answer",
        bug="With `n` above 1, the usage counts the tokens of a prompt several times.",
        file="kvbm/embedded/http/choices.py",
        old="usages[:: self._per_prompt]",
        new="usages",
        fails="tests/engines/test_server_answers.py -k n_choices",
    ),
    Mutant(
        name="all-answers-of-a-prompt-share-a-seed",
        bug="With a seed, all `n` answers of a prompt are equal.",
        file="kvbm/embedded/http/prompt.py",
        old="seed=params.seed + index",
        new="seed=params.seed",
        fails="tests/engines/test_server_answers.py -k n_choices",
    ),
    Mutant(
        name="role-and-text-in-one-chunk",
        bug="A chat stream has no opening chunk, so a client that expects vLLM's chunks finds no role.",
        file="kvbm/embedded/http/response_writer.py",
        old="if is_first else None",
        new="if False else None",
        fails="tests/engines/test_client_requests.py",
    ),
    Mutant(
        name="proxy-passes-every-transfer-parameter",
        bug="A client names the host from which a decode engine reads blocks.",
        file="kvbm_cli/disaggregated/proxy.py",
        old="{name: given[name] for name in CLIENT_PARAMS if name in given}",
        new="dict(given)",
        fails="tests/cli/test_pd_proxy.py -k cannot_name",
    ),
    Mutant(
        name="http-time-limit-per-wait",
        bug="A server that sends a byte now and then holds `kvbm status`.",
        file="kvbm_cli/system/http_client.py",
        old="self._deadline - time.monotonic()",
        new="1.0",
        fails="tests/cli/test_http_client.py -k now_and_then --timeout 20",
    ),
    Mutant(
        name="file-names-command-the-terminal",
        bug="An error message with a file name moves the cursor.",
        file="kvbm_cli/terminal/show_error.py",
        old="{coloured('error:', RED)} {printable(message)}",
        new="{coloured('error:', RED)} {message}",
        fails="tests/cli/test_printable.py -k profile_with_commands",
    ),
    Mutant(
        name="log-open-to-all",
        bug="Every user of the machine can read the engine's log.",
        file="kvbm_cli/engine/process.py",
        old='return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))',
        new='return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o666))',
        fails="tests/cli/test_modes.py -k run_is_private",
    ),
    Mutant(
        name="purge-deletes-what-is-not-ours",
        bug="Every object in the place of a namespace counts as a run.",
        file="kvbm/shared/keys.py",
        old="return name if name and self.key(name) == key else None",
        new="return name or None",
        fails="tests/cli/test_shared_store.py -k of_others",
    ),
    Mutant(
        name="purge-forgets-the-age",
        bug="The newest objects are selected instead of the oldest.",
        file="kvbm_cli/store/selection.py",
        old="run.written_s < before_s",
        new="run.written_s >= before_s",
        fails="tests/cli/test_shared_store.py -k selection",
    ),
    Mutant(
        name="verify-believes-the-header",
        bug="Only the header of an object is verified.",
        file="kvbm/shared/inspection.py",
        old="    _verify_blocks(memoryview(payload), form, hashes, head.checksums)\n",
        new="",
        fails="tests/cli/test_shared_store.py -k changed_object",
    ),
    Mutant(
        name="credentials-stay-behind",
        bug="The engine does not get the credentials of its store.",
        file="kvbm_cli/engine/process.py",
        old="if not name.startswith(PREFIX) or name in STORE_VARIABLES",
        new="if not name.startswith(PREFIX)",
        fails="tests/cli/test_process.py -k credentials",
    ),
    Mutant(
        name="switch-leaves-the-shared-tier",
        bug="DYN_KVBM_OBJECT_ENABLED=0 removes no tier.",
        file="kvbm/config/variables.py",
        old="    if switch is None or switch.value:\n",
        new="    if switch is None or not switch.value:\n",
        fails="tests/config/test_variables.py -k switched_off",
    ),
)
