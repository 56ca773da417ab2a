"""Bugs in the names of blocks of requests with images, audio and video."""

from __future__ import annotations

from mutant import Mutant

MEDIA = "kvbm/engines/vllm/media.py"
CONTENT = "kvbm/engines/vllm/media_content.py"
DIGESTS = "kvbm/engines/vllm/media_content.py"
TESTS = "tests/identity/test_media_of_vllm.py"

MUTANTS = (
    Mutant(
        name="media-are-named-by-vllm",
        bug="two images with one name share blocks",
        file=MEDIA,
        old="        return _digest(self._prefix(count), block_hash, size=self._hash_bytes)\n",
        new="        return block_hash\n",
        fails=f"{TESTS} -k whatever_it_is_called",
    ),
    Mutant(
        name="media-names-cover-the-first-medium-only",
        bug="two requests with other second images share blocks",
        file=MEDIA,
        old="        count = bisect_left(self._offsets, end)\n",
        new="        count = min(1, bisect_left(self._offsets, end))\n",
        fails=f"{TESTS} -k every_one_before",
    ),
    Mutant(
        name="media-names-ignore-the-place",
        bug="the same image at another place in equal tokens gives the same blocks",
        file=MEDIA,
        old="_digest(self._prefixes[-1], one.place, one.content.digest)",
        new="_digest(self._prefixes[-1], one.content.digest)",
        fails=f"{TESTS} -k every_one_before",
    ),
    Mutant(
        name="media-trust-a-name-with-two-contents",
        bug="KV that vLLM has computed from one image is kept under the content of another one",
        file=MEDIA,
        old="            elif content.digest is None or self.digest not in (None, content.digest):\n",
        new="            elif content.digest is None:\n",
        fails=f"{TESTS} -k two_contents",
    ),
    Mutant(
        name="media-trust-a-name-whose-content-is-unknown",
        bug="KV of an unknown image is kept under the content of another one",
        file=MEDIA,
        old="            elif content.digest is None or self.digest not in (None, content.digest):\n",
        new="            elif content.digest is not None and self.digest not in (None, content.digest):\n",
        fails=f"{TESTS} -k 'unknown or without_its_content'",
    ),
    Mutant(
        name="media-do-not-wait-for-other-requests",
        bug="blocks are kept while another request with the same name has an unknown content",
        file=MEDIA,
        old="        return not (self.waiting or self.is_doubtful)\n",
        new="        return not self.is_doubtful and self.digest is not None\n",
        fails=f"{TESTS} -k digest_is_missing",
    ),
    Mutant(
        name="media-lose-a-digest",
        bug="a digest that becomes known while it is asked for is never compared",
        file=MEDIA,
        old="                self.waiting.append(content)\n",
        new="                self.waiting += [] if content.is_known else [content]\n",
        fails=f"{TESTS} -k not_lost",
    ),
    Mutant(
        name="media-forget-names-that-left",
        bug="a name that was forgotten is trusted with its next content",
        file=MEDIA,
        old="            self._let_go(oldest)\n",
        new="",
        fails=f"{TESTS} -k has_left_the_table",
    ),
    Mutant(
        name="media-overlook-sessions",
        bug="an image that a session gets later is not compared",
        file=MEDIA,
        old="            for feature in request.mm_features[count:]:\n",
        new="            for feature in request.mm_features[count:0]:\n",
        fails=f"{TESTS} -k session",
    ),
    Mutant(
        name="media-of-other-engines-are-kept",
        bug="KV that another engine has computed under the same name is kept under the content of the request",
        file=MEDIA,
        old='bool(params.get("do_remote_prefill"))',
        new="False",
        fails=f"{TESTS} -k encodes_or_computes",
    ),
    Mutant(
        name="media-ignore-the-encoder",
        bug="KV of an image that was encoded without an adapter is kept as that of the adapter",
        file=MEDIA,
        old="        if self.encoder not in (None, encoder):\n",
        new="        if self.encoder is None is encoder:\n",
        fails=f"{TESTS} -k two_encoders",
    ),
    Mutant(
        name="media-content-without-shape",
        bug="two images of equal bytes and other shapes share blocks",
        file=CONTENT,
        old='f"{tensor.dtype} {tuple(tensor.shape)}".encode()',
        new='f"{tensor.dtype}".encode()',
        fails=f"{TESTS} -k differ_anywhere",
    ),
    Mutant(
        name="media-content-of-the-first-tensor",
        bug="media that differ only in a later tensor share blocks",
        file=CONTENT,
        old="            has_content |= _add_value(found, one, depth + 1)\n",
        new="            has_content = has_content or _add_value(found, one, depth + 1)\n",
        fails=f"{TESTS} -k differ_anywhere",
    ),
    Mutant(
        name="media-content-is-an-address",
        bug="the address of an image in shared memory is taken for the image",
        file=CONTENT,
        old="    if data is None or (isinstance(data, Mapping) and _ADDRESS in data):\n",
        new="    if data is None:\n",
        fails=f"{TESTS} -k has_no_digest",
    ),
    Mutant(
        name="media-digests-overlook-changes",
        bug="an image that was changed in place keeps its digest",
        file=DIGESTS,
        old="and stamp is not None and known[1] == stamp:",
        new="and stamp is not None:",
        fails=f"{TESTS} -k changed_ones",
    ),
)
