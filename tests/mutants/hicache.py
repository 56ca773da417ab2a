"""Bugs in the storage of SGLang: what is lent, who copies, what names a page, and what can change the weights."""

from __future__ import annotations

from mutant import Mutant

STORAGE = "tests/sglang/test_sglang_storage.py"
IDENTITY = "tests/sglang/test_sglang_identity.py"

MUTANTS = (
    Mutant(
        name="sglang-bad-page-is-lent",
        bug="After a read of which one page was damaged, all its pages are lent.",
        file="kvbm/leader/storage_leader.py",
        old="good = self.host.store.match([hashes[index] for index in positions])",
        new="good = len(positions)",
        fails=f"{STORAGE} -k flipped",
    ),
    Mutant(
        name="sglang-late-page-counts",
        bug="Pages of a question that was given up are reported as there.",
        file="kvbm/engines/sglang/storage.py",
        old="are_there = [False] * len(hashes)\n",
        new="are_there = [True] * len(hashes)\n",
        fails=f"{STORAGE} -k 'stopped or missing'",
    ),
    Mutant(
        name="sglang-pools-share-hashes",
        bug="A page of one host pool is found as a page of another.",
        file="kvbm/engines/sglang/storage.py",
        old="    if pool == KV_POOL:\n        return hashes",
        new="    if pool:\n        return hashes",
        fails="tests/sglang/test_sglang_pools.py -k one_pool",
    ),
    Mutant(
        name="sglang-window-is-one-page",
        bug="A prefix is restorable although only the last of the pages that a pool requires is there.",
        file="kvbm/engines/sglang/storage.py",
        old="max(1, len(transfer.keys or ()))",
        new="1",
        fails="tests/sglang/test_sglang_pools.py -k last_pages",
    ),
    Mutant(
        name="sglang-slot-is-lent-before-it-is-copied",
        bug="Pages are registered before SGLang's thread has copied them in.",
        file="kvbm/leader/storage_leader.py",
        old="            while not loan.is_over:\n                yield\n        except",
        new="            yield\n        except",
        fails=f"{STORAGE} -k all_of_it",
    ),
    Mutant(
        name="sglang-layout-is-not-in-the-name",
        bug="Engines whose pages have equal sizes in another order of bytes find each other's pages.",
        file="kvbm/engines/sglang/host_pool.py",
        old='"layout": pool.layout,',
        new='"layout": "",',
        fails=f"{STORAGE} -k differ",
    ),
    Mutant(
        name="sglang-rank-is-not-in-the-name",
        bug="All tensor-parallel ranks keep their parts of a page under one name.",
        file="kvbm/engines/sglang/identity.py",
        old="[storage.tp_rank, storage.tp_size] if is_split else [0, 1]",
        new="[0, 1]",
        fails=f"{STORAGE} -k differ",
    ),
    Mutant(
        name="sglang-page-outside-the-pool-is-read",
        bug="A page that is not in the memory of the host pool is read anyway.",
        file="kvbm/engines/sglang/host_pool.py",
        old="if not any(begin <= address and address + length <= end for begin, end in self._ranges):",
        new="if not self._ranges:",
        fails=f"{STORAGE} -k outside",
    ),
    Mutant(
        name="sglang-writes-after-a-change-of-the-weights",
        bug="Pages that other weights computed are stored.",
        file="kvbm/engines/sglang/storage.py",
        old="if self._thread is None or self.boundary.is_off or self._cause:",
        new="if self._thread is None or self.boundary.is_off:",
        fails=f"{STORAGE} -k change_of_the_weights",
    ),
    Mutant(
        name="sglang-updates-are-noticed-too-late",
        bug="A change of the weights is noticed after it has happened, and one that fails never.",
        file="kvbm/engines/sglang/weight_updates.py",
        old='    _WATCH.note(f"`{cause}` can have changed the weights")\n',
        new="    pass\n",
        fails=f"{IDENTITY} -k noticed",
    ),
    Mutant(
        name="sglang-takes-a-prefetch-of-former-weights",
        bug="Pages that a prefetch has read before a change of the weights are used after it.",
        file="kvbm/engines/sglang/weight_updates.py",
        old="            return self.release_aborted_request(operation.handle)\n",
        new="            pass\n",
        fails=f"{IDENTITY} -k brought_before",
    ),
    Mutant(
        name="sglang-attached-storage-takes-pages-of-former-weights",
        bug="A storage that is attached after a change of the weights stores pages of the former ones.",
        file="kvbm/engines/sglang/weight_updates.py",
        old="        listener.weights_may_change(_WATCH.cause)\n",
        new="        pass\n",
        fails=f"{IDENTITY} -k noticed",
    ),
    Mutant(
        name="sglang-unknown-options-do-not-count",
        bug="Options that kvbm does not know are left out of the identity.",
        file="kvbm/engines/sglang/identity.py",
        old="if name not in _NOT_KV\n",
        new='if name in ("kv_cache_dtype", "attention_backend", "page_size", "tp_size")\n',
        fails=f"{IDENTITY} -k unknown_ones",
    ),
)
