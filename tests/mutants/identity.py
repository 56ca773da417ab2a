"""Bugs around the identity of a model: what counts, what is remembered, and what is in doubt."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="identity-remembers-by-size-and-mtime",
        bug="a digest is taken from the cache although ctime shows that the file was written since",
        file="kvbm/identity/digest_cache.py",
        old="if entry is None or entry[0] != signature:",
        new="if entry is None or entry[0][:4] != signature[:4]:",
        fails="tests/identity/test_fingerprint.py -k read_again_with_size",
    ),
    Mutant(
        name="identity-remembers-recent-files",
        bug="the digest of a file is kept although the file may change again within one tick of the clock",
        file="kvbm/identity/digest_cache.py",
        old="> RACY_NS:",
        new="> -(10**19):",
        fails="tests/identity/test_fingerprint.py -k recent",
    ),
    Mutant(
        name="identity-trusts-a-file-of-others",
        bug="digests are read from a file that other users can write",
        file="kvbm/identity/digest_cache.py",
        old=" or facts.st_mode & 0o022",
        new="",
        fails="tests/identity/test_fingerprint.py -k others_can_write",
    ),
    Mutant(
        name="identity-samples-the-first-block-of-a-tensor",
        bug="of a large tensor only the beginning counts",
        file="kvbm/identity/content.py",
        old="yield start + index * (length - BLOCK_BYTES) // (blocks - 1), BLOCK_BYTES",
        new="yield start, BLOCK_BYTES",
        fails="tests/identity/test_fingerprint.py -k all_of_a_tensor",
    ),
    Mutant(
        name="identity-samples-small-kinds",
        bug="a large configuration, tokenizer or adapter is sampled like weights",
        file="kvbm/identity/fingerprint.py",
        old="is_sampled=not _is_whole(name)",
        new="is_sampled=True",
        fails="tests/identity/test_fingerprint.py -k small_files_count",
    ),
    Mutant(
        name="identity-leaves-out-subdirectories",
        bug="shards in a subdirectory are not identified",
        file="kvbm/identity/fingerprint.py",
        old="            yield from _walk(root, inner, places, seen)\n",
        new="            pass\n",
        fails="tests/identity/test_fingerprint.py -k subdirectories",
    ),
    Mutant(
        name="identity-overlooks-a-retargeted-link",
        bug="a link on the way to the model that was retargeted since the start does not show",
        file="kvbm/identity/fingerprint.py",
        old="    places = _links_to(str(directory))\n",
        new="    places: dict[str, Signature] = {}\n",
        fails="tests/identity/test_fingerprint.py -k point_in_time",
    ),
    Mutant(
        name="identity-of-the-files-after-loading",
        bug="the embedded engine does not compare the files before and after loading",
        file="kvbm/embedded/engine/model.py",
        old="    if before != after:\n",
        new="    if before is after:\n",
        fails="tests/engines/test_exchanged_weights.py -k while_an_engine_loads",
    ),
    Mutant(
        name="engine-serves-from-the-file",
        bug="the weights of the embedded engine stay mapped from their file",
        file="kvbm/embedded/engine/model.py",
        old="        _detach(network)\n",
        new="        pass\n",
        fails="tests/engines/test_exchanged_weights.py -k overwritten_after_loading",
    ),
    Mutant(
        name="identity-persists-in-doubt",
        bug="blocks are kept for the next start although the identity is in doubt",
        file="kvbm/leader/settings.py",
        old="persist=section.persist and not doubt,",
        new="persist=section.persist,",
        fails="tests/engines/test_exchanged_weights.py -k cannot_be_identified",
    ),
    Mutant(
        name="identity-of-vllm-ignores-late-changes",
        bug="files that were exchanged while vLLM loaded are taken for the loaded ones",
        file="kvbm/vllm_integration/identity.py",
        old="if (changed := found.changed_since(process_start_ns())) is not None:",
        new="if (changed := found.changed_since(process_start_ns())) == 0:",
        fails="tests/identity/test_identity_of_vllm.py -k after_the_process_started",
    ),
    Mutant(
        name="adapter-in-place-is-cached",
        bug="an adapter whose files vLLM reads with every request is cached",
        file="kvbm/vllm_integration/adapters.py",
        old="return adapter.lora_name not in self._doubtful and not _is_in_place(adapter)",
        new="return adapter.lora_name not in self._doubtful",
        fails="tests/identity/test_adapters.py -k in_place",
    ),
)
