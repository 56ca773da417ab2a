"""Host pools of SGLang that hold bytes, in every layout: the part of the contract that a storage backend uses.

Shapes, order of dimensions and `get_page_buffer_meta` are those of SGLang 0.5.23. `content` returns a page in an order
of its own, the same for all layouts, so that layouts can be compared.
"""

from types import SimpleNamespace

import torch

from kvbm.engines.sglang import storage
from kvbm.engines.sglang.identity import part_of

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LAYERS, HEADS, DIM = 3, 2, 8
# Dimensions after K/V, and how to read one page of [page, layer, head, dim] out of them.
_ORDERS = {
    "layer_first": ("layer", "size", "head", "dim"),
    "page_first": ("size", "layer", "head", "dim"),
    "page_first_direct": ("pages", "layer", "page", "head", "dim"),
    "page_head": ("pages", "head", "page", "layer", "dim"),
}


class SGLangHostPool:
    """`is_mla`: one entry per token instead of K and V, as with multi-head latent attention."""

    def __init__(self, layout, *, is_mla=False, pages=40, page_size=4, dtype=torch.float16):
        self.layout, self.is_mla, self.page_size, self.dtype = layout, is_mla, page_size, dtype
        self.layer_num, self.head_num, self.head_dim = LAYERS, 1 if is_mla else HEADS, DIM
        self.start_layer, self.end_layer, self.storage_format_tag = 0, LAYERS, None
        self.page_num, self.size = pages, pages * page_size
        sizes = {"layer": LAYERS, "size": self.size, "head": self.head_num, "dim": DIM, "pages": pages}
        shape = [sizes.get(name, page_size) for name in _ORDERS[layout]]
        self.kv_buffer = torch.zeros(shape if is_mla else [2, *shape], dtype=dtype)

    def indices(self, *pages):
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def content(self, page):
        """A copy of a page as [K/V, token, layer, head, dim]."""
        order, found = _ORDERS[self.layout], []
        for part in [self.kv_buffer] if self.is_mla else self.kv_buffer:
            if "pages" in order:
                found.append(part[page].permute(*_places(order[1:])))
            else:
                tokens = slice(page * self.page_size, (page + 1) * self.page_size)
                rows = part[:, tokens] if order[0] == "layer" else part[tokens]
                found.append(rows.permute(*_places([name.replace("size", "page") for name in order])))
        return torch.stack(found).clone()

    def fill(self, page, seed):
        """Write a pattern into a page, through the same views that `content` reads."""
        values = torch.randint(0, 255, self.content(page).shape, generator=torch.Generator().manual_seed(seed))
        order = _ORDERS[self.layout]
        for part, rows in zip([self.kv_buffer] if self.is_mla else self.kv_buffer, values.to(self.dtype), strict=True):
            if "pages" in order:
                part[page].permute(*_places(order[1:])).copy_(rows)
            else:
                tokens = slice(page * self.page_size, (page + 1) * self.page_size)
                view = part[:, tokens] if order[0] == "layer" else part[tokens]
                view.permute(*_places([name.replace("size", "page") for name in order])).copy_(rows)

    def get_page_buffer_meta(self, indices):
        assert len(indices) % self.page_size == 0
        item, addresses = self.dtype.itemsize, []
        token_bytes = self.head_num * self.head_dim * item
        halves = [self.kv_buffer] if self.is_mla else list(self.kv_buffer)
        by_layer = self.layout == "layer_first"
        for first in indices.tolist()[:: self.page_size]:
            if by_layer:
                for layer in range(self.layer_num):
                    offset = (layer * self.size + first) * token_bytes
                    addresses += [half.data_ptr() + offset for half in halves]
            else:
                addresses += [half.data_ptr() + first * self.layer_num * token_bytes for half in halves]
        length = token_bytes * self.page_size * (1 if by_layer else self.layer_num)
        return addresses, [length] * len(addresses)


def _places(names):
    return [list(names).index(name) for name in ("page", "layer", "head", "dim")]


def storage_config(config, **changes):
    """SGLang's HiCacheStorageConfig, with a resolved configuration of kvbm."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "dp_rank": 0}
    kind = {"is_mla_model": False, "should_split_heads": False, "dcp_size": 1, "model_name": "m"}
    values = {**ranks, **kind, **changes}
    extra = {"backend_name": "kvbm", "module_path": "kvbm.sglang_integration.storage"}
    extra |= {"class_name": "KvbmHiCacheStorage", "interface_v1": 1, "kvbm": config}
    is_writer = not values["is_mla_model"] or values["tp_rank"] == 0
    return SimpleNamespace(**values, extra_config=extra, is_storage_writer=is_writer)


def pretend_identity(patch):
    """Let storages describe an engine without files of a model. Return its facts, which a test may change."""
    facts = {"engine": "sglang", "weights": "a"}

    def identity(config, pool):
        return {**facts, "pool": pool, "part": part_of(config)}, ""

    patch.setattr(storage, "identity", identity)
    patch.setattr(storage.weight_updates, "watch", lambda listener, **_: "")
    return facts


class SGLangStatePool:
    """States, as SGLang's host pool of Mamba has them: one position per state, which consists of two tensors."""

    def __init__(self, *, states=40):
        self.layout, self.page_size, self.layer_num = "page_first", 1, LAYERS
        self.temporal_buffer = torch.zeros([states, LAYERS, 1, 24], dtype=torch.float32)
        self.conv_buffer = [torch.zeros([states, LAYERS, 1, 10], dtype=torch.float16)]

    def indices(self, *states):
        return torch.tensor(states, dtype=torch.int64)

    def content(self, state):
        return torch.cat([self.temporal_buffer[state].flatten(), self.conv_buffer[0][state].flatten().float()]).clone()

    def fill(self, state, seed):
        for buffer in (self.temporal_buffer, *self.conv_buffer):
            values = torch.randint(1, 200, buffer[state].shape, generator=torch.Generator().manual_seed(seed))
            buffer[state] = values.to(buffer.dtype)

    def get_hybrid_pool_buffer(self):
        return [self.temporal_buffer, *self.conv_buffer]

    def get_page_buffer_meta(self, indices):
        addresses, lengths = [], []
        for index in indices.tolist():
            for buffer in self.get_hybrid_pool_buffer():
                length = buffer[0].nbytes
                addresses.append(buffer.data_ptr() + index * length)
                lengths.append(length)
        return addresses, lengths
