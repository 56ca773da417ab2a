"""Bugs in the core: the block store, its index, eviction, groups of layers, and the hashes of blocks."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="store-samples-overlook-slot-0",
        bug="A sampled block in slot 0 counts as missing, so that the blocks around it are copied again.",
        file="kvbm/core/store.py",
        old="if samples.count(None) == len(samples):",
        new="if not any(samples):",
        fails="tests/core/test_store.py",
    ),
    Mutant(
        name="pinned-block-stays-in-eviction-order",
        bug="Pinning leaves the blocks in the eviction order, so that they are evicted while they are held.",
        file="kvbm/core/store.py",
        old="""\
        self._lists.remove(activated)
        self._inactive_count -= len(activated)
""",
        new="""\
        self._inactive_count -= 0
""",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="chain-ages-head-first",
        bug="A released chain is appended head first, so that its head is evicted before its tail.",
        file="kvbm/core/store.py",
        old="self._order.add(unheld)",
        new="self._order.add(unheld[::-1])",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="new-blocks-displace-incumbents",
        bug="With the table of incumbents, blocks that were never used before take the place of blocks that came back.",
        file="kvbm/core/policies/ranking.py",
        old="if self.table.admits_new:",
        new="if room >= 0:",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="spare-blocks-keep-their-age",
        bug="With adaptive eviction, blocks that are in G1 again are not evicted before those of other classes.",
        file="kvbm/core/policies/ranking.py",
        old="used_s[slot] = self.used_s(slot) - SPARE_S",
        new="used_s[slot] = self.used_s(slot)",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="unknown-blocks-outlive-their-prefix",
        bug="Blocks after a hit rank higher than the hit, so that a chain loses its middle first.",
        file="kvbm/core/policies/chain_use.py",
        old="(self.hit, RESIDENT + self.resident_pause | REUSED),",
        new="(self.hit, NEW | REUSED),",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="prefix-waits-as-long-as-the-end",
        bug="A prefix that another chain has used since gets the longer pause of this chain's end.",
        file="kvbm/core/policies/chain_use.py",
        old="(self.hit, RESIDENT + self.resident_pause | REUSED),",
        new="(self.hit, RESIDENT + self.pause | REUSED),",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="end-of-a-session-reorders-its-chain",
        bug="Blocks of an ended session count as used after the block before them, which leaves first.",
        file="kvbm/core/policies/ranking.py",
        old="        self.lists.remove(listed)\n",
        new="        listed = [slot for slot in listed if slot in changed]\n        self.lists.remove(listed)\n",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="chooser-believes-every-gain",
        bug="A table is used although its shadow cache has no more hits than that of LRU.",
        file="kvbm/core/policies/adaptive.py",
        old="best = max(self._shadows, key=score)",
        new="best = max(self._shadows[1:], key=score)",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="hint-of-nobody-ends-a-retention",
        bug="A request without a hint takes the class of a retained beginning, but not of what follows it.",
        file="kvbm/core/policies/ranking.py",
        old="if old_class > its_class and self._is_in_grace(slot, old_class):",
        new="if False:",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="hints-that-are-not-followed-keep-their-classes",
        bug="Blocks that wrong hints retained keep their class after the hints are given up.",
        file="kvbm/core/policies/ranking.py",
        old="self._merged(slots, marks) if self.follows_hints else marks",
        new="self._merged(slots, marks) if self.has_hints else marks",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="grace-outlives-hints-that-were-given-up",
        bug="A retention counts again when hints are followed again, but not for a beginning that was used meanwhile.",
        file="kvbm/core/policies/ranking.py",
        old="if grace_s and used_s[slot] > since_s:",
        new="if grace_s:",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="every-session-owns-a-block",
        bug="A session that ends demotes blocks that others have used.",
        file="kvbm/core/policies/ranking.py",
        old="new & old & OWNED)",
        new="old & OWNED)",
        fails="tests/core/test_adaptive_eviction.py",
    ),
    Mutant(
        name="hints-are-always-followed",
        bug="Wrong hints cost hits for ever.",
        file="kvbm/core/policies/adaptive.py",
        old="return hinted.gain >= -tolerated",
        new="return True",
        fails="tests/leader/test_hints.py -k 'cost'",
    ),
    Mutant(
        name="duplicate-keeps-second-slot",
        bug="The second slot of a hash that is registered already is never given back.",
        file="kvbm/core/store.py",
        old="""\
        self._free([slot for slot, new in zip(slots, is_new, strict=True) if not new])
""",
        new="",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="first-release-unpins-for-all",
        bug="The first of two handles that is released makes a shared block evictable.",
        file="kvbm/core/store.py",
        old="unheld = self._drop_extra_pins(slots) if self._extra_pins else slots[::-1]",
        new="unheld = [slot for slot in dict.fromkeys(slots) if self._states[slot] in (PINNED, ORPHANED)]",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="old-world-registers-after-reset",
        bug="Blocks that were being written when a reset came become findable afterwards.",
        file="kvbm/core/store.py",
        old="""\
        if epoch != self._epoch:
            self._set_states(slots, ORPHANED)
            return slots
""",
        new="",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="allocation-evicts-before-it-knows",
        bug="An allocation that cannot be served evicts what it finds and then returns nothing.",
        file="kvbm/core/store.py",
        old="""\
        if count > self._free_count + self._inactive_count:
""",
        new="""\
        if count > self._free_count + self._inactive_count:
            self._free(self._evict(self._inactive_count))
""",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="prefix-trusts-stale-bytes",
        bug="A prefix is matched by the bytes in the slots, without asking whether those are still registered.",
        file="kvbm/core/index.py",
        old="return length - len(self._states[slot : slot + length].lstrip(self._registered_states))",
        new="return length",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="hash-forgets-its-parent",
        bug="A block's hash covers its own tokens only, so that another prefix brings wrong KV.",
        file="kvbm/hashing.py",
        old="parent = blake2b(parent + payload[start : start + block_bytes], digest_size=HASH_BYTES).digest()",
        new="parent = blake2b(payload[start : start + block_bytes], digest_size=HASH_BYTES).digest()",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="empty-salt-is-no-salt",
        bug="A tenant with an empty salt shares blocks with those who have none.",
        file="kvbm/hashing.py",
        old="if salt is None:",
        new="if not salt:",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="extending-starts-again-at-the-root",
        bug="Hashes that are computed in steps differ from those computed at once.",
        file="kvbm/hashing.py",
        old="parent = hashes[-1] if hashes else root",
        new="parent = root",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="forgotten-pinned-block-comes-back",
        bug="A block that was forgotten while pinned becomes evictable, not free, at its release.",
        file="kvbm/core/store.py",
        old="""\
        self._set_states([slot for slot in slots if self._states[slot] == PINNED], ORPHANED)
""",
        new="",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="duplicates-are-announced-twice",
        bug="The event of a registration names hashes that were registered before.",
        file="kvbm/core/store.py",
        old="self._announce_stored(tuple(h for h, new in zip(hashes, is_new, strict=True) if new))",
        new="self._announce_stored(hashes)",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="handle-can-be-released-twice",
        bug="Releasing does not end a handle, so that a second release frees a slot that has another owner.",
        file="kvbm/core/store.py",
        old="""\
        store = self._holder()
        self._store = None
        return store
""",
        new="""\
        return self._holder()
""",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="touch-counts-pinned-blocks",
        bug="Touching moves pinned blocks into the eviction order.",
        file="kvbm/core/store.py",
        old="inactive = [slot for slot in dict.fromkeys(slots) if states[slot] == INACTIVE]",
        new="inactive = list(dict.fromkeys(slots))",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="core-imports-a-clock",
        bug="The eviction order reads a clock, which the layers forbid.",
        file="kvbm/core/slot_lists.py",
        old="""\
from array import array
""",
        new="""\
import time
from array import array
""",
        fails="tests/test_imports.py",
    ),
    Mutant(
        name="prefix-goes-one-block-too-far",
        bug="Where the bytes of consecutive slots differ, the differing block counts as present.",
        file="kvbm/core/index.py",
        old="length += (8 * len(wanted) - difference.bit_length()) // (8 * size)",
        new="length += (8 * len(wanted) - difference.bit_length()) // (8 * size) + 1",
        fails="tests/core -m 'not slow'",
    ),
    Mutant(
        name="admission-never-decays",
        bug="a count is kept for ever",
        file="kvbm/core/admission.py",
        old="self._step += 1",
        new="self._step += 0",
        fails="tests/core",
    ),
    Mutant(
        name="groups-agree-too-early",
        bug="a hit that one group shortened is not shown to the groups before it again",
        file="kvbm/core/groups.py",
        old="""\
            if shorter == reach:
                agreed += 1
""",
        new="""\
            agreed += 1
""",
        fails="tests/core",
    ),
    Mutant(
        name="groups-hit-without-the-window",
        bug="a hit counts although blocks of a windowed group are missing",
        file="kvbm/core/groups.py",
        old="if not is_present(chain[block]):",
        new="if group.looks_back_over_all and not is_present(chain[block]):",
        fails="tests/core",
    ),
    Mutant(
        name="groups-window-one-token-short",
        bug="the last token that a window still sees is thought to be outside",
        file="kvbm/core/groups.py",
        old="first_token = max(0, end - self.window_tokens + 1)",
        new="first_token = max(0, end - self.window_tokens + 2)",
        fails="tests/core",
    ),
)
