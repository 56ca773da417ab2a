"""Bugs in the worker, and in the driver of the embedded engine."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="worker-proves-offloads-in-polls-only",
        bug="an engine that runs no more steps holds the blocks of its last offloads for ever",
        file="kvbm/device/worker.py",
        old="self._segment.write_slots(slots, order.generation, SlotState.READY)",
        new="pass",
        fails="tests/leader/test_leader.py",
    ),
    Mutant(
        name="worker-proves-an-onboard-at-its-first-part",
        bug="an onboard is reported while another thread still copies a part of it",
        file="kvbm/device/worker.py",
        old="return self._count == 0",
        new="return True",
        fails="tests/leader/test_faults.py",
    ),
    Mutant(
        name="worker-proves-an-onboard-twice",
        bug="a poll writes the word of an onboard that its thread has written, over the word of the next onboard",
        file="kvbm/device/worker.py",
        old="if running.error is None and self._threads_prove_onboards:",
        new="if False:",
        fails="tests/leader/test_faults.py",
    ),
    Mutant(
        name="driver-loads-into-the-first-blocks",
        bug="a load goes to the first blocks of the request, not to those behind its local hit",
        file="kvbm/engines/embedded/driver.py",
        old="self._cache.onboard(request.request_id, request.block_hashes, start, block_ids[start:end])",
        new="self._cache.onboard(request.request_id, request.block_hashes, start, block_ids[: end - start])",
        fails="tests/embedded/test_kvbm_in_engine.py",
    ),
    Mutant(
        name="driver-offloads-before-the-forward-pass",
        bug="offloads begin before the blocks are computed",
        file="kvbm/engines/embedded/driver.py",
        old="""\
            self._worker.start(meta)
""",
        new="""\
            self._worker.start(meta)
            self._worker.finish(meta)
""",
        fails="tests/embedded/test_kvbm_in_engine.py",
    ),
    Mutant(
        name="worker-checks-only-before",
        bug="an onboard does not check its slots again after the copy",
        file="kvbm/device/worker.py",
        old="""\
        self.copier.onboard(slots, np.array(order.block_ids[part]), fence)
        self._require_source(order, slots, generations)
""",
        new="""\
        self.copier.onboard(slots, np.array(order.block_ids[part]), fence)
""",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-denies-in-silence",
        bug="a worker that denies a lost copy does not say that there is a new word",
        file="kvbm/device/worker.py",
        old="        return has_written\n",
        new="        return bool(onboards or offloads)\n",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-does-not-answer-overdue",
        bug="an overdue offload that is not running gets no answer",
        file="kvbm/device/worker.py",
        old="self._deny_offload(offload)",
        new="pass",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-failed-copy-is-ready",
        bug="a copy that raised is reported as good",
        file="kvbm/device/worker.py",
        old="return SlotState.FAILED",
        new="return SlotState.READY",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-forgets-a-failed-part",
        bug="only the last part of a load decides whether it is good",
        file="kvbm/device/worker.py",
        old="self.error = self.error or error",
        new="self.error = error",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-part-that-never-ran-is-good",
        bug="a part of a load that was withdrawn or lost does not count as failed",
        file="kvbm/device/worker.py",
        old='running.end(ticket, TransferError(f"a part of transfer {generation} never ran"))',
        new="running.end(ticket, None)",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-reads-without-checking",
        bug="an onboard does not check which block its slots hold",
        file="kvbm/device/worker.py",
        old="if not self._segment.slots_carry(slots, generations):",
        new="if False and not self._segment.slots_carry(slots, generations):",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-ready-at-submission",
        bug="words are written when a copy is submitted",
        file="kvbm/device/worker.py",
        old="""\
            for order in plan.offloads:
""",
        new="""\
            for order in plan.offloads:
                self._segment.write_slots(order.slots, order.generation, SlotState.READY)
""",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-reports-its-first-part",
        bug="a load is reported when the first of its parts has ended",
        file="kvbm/device/worker.py",
        old="return not self.tickets",
        new="return True",
        fails="tests/leader",
    ),
    Mutant(
        name="worker-fails-a-transfer-whose-first-part-runs",
        bug="an order whose second part could not be submitted is reported as failed while its first part is copied",
        file="kvbm/device/worker.py",
        old="return None if running.tickets else running",
        new="return None if running.tickets and running.error is None else running",
        fails="tests/leader/test_faults.py -k submitted",
    ),
    Mutant(
        name="worker-copies-without-a-fence",
        bug="after a failed fence, the copy starts nevertheless",
        file="kvbm/device/worker.py",
        old="        if error is None:\n            _, running.error",
        new="        if True:\n            _, running.error",
        fails="tests/embedded/test_boundary.py -k fence",
    ),
    Mutant(
        name="child-waits-for-its-log",
        bug="a worker or disk process blocks when its stderr is a full pipe",
        file="kvbm/child/child.py",
        old="    use_queued_stderr()\n",
        new="",
        fails="tests/embedded/test_full_log.py -m 'not servers'",
    ),
    Mutant(
        name="log-queue-reports-no-drops",
        bug="nothing in the log says that entries were dropped",
        file="kvbm/host/log_queue.py",
        old="                self._write(self._note(dropped))\n",
        new="",
        fails="tests/host/test_log_queue.py",
    ),
)
