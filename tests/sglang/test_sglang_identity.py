"""Identity of SGLang's pages: what counts, what does not, what is in doubt, and changes of the weights in memory.

Modules of SGLang are stand-ins with the names and signatures of 0.5.23.
"""

import importlib
import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
from host_pools import storage_config

from kvbm.engines.engine_code import ORIGINAL
from kvbm.engines.sglang import loads, weight_updates
from kvbm.engines.sglang.identity import identity
from kvbm.identity import code, content
from kvbm.identity.description import describe

SECTIONS = {
    **dict.fromkeys(("model_path", "revision", "load_format", "kv_cache_dtype", "context_length"), "model"),
    **dict.fromkeys(("custom_weight_loader", "weight_cache_mode", "trust_remote_code"), "model"),
    "attention_backend": "exec.kernel",
    "tp_size": "parallel",
    "nccl_port": "parallel",
    "random_seed": "device",
    "page_size": "schedule",
    "max_total_tokens": "schedule",
    "port": "serving",
    "hicache_ratio": "memory",
    "enable_lora": "lora",
    "disaggregation_mode": "disagg",
    "enable_multimodal": "mm",
    "log_level": "observability",
    "hicache_storage_backend_extra_config": "memory",
    "a_new_option": "model",
}
POOL = {"pool": "P", "layout": "page_first"}


class Arguments(SimpleNamespace):
    def __getattr__(self, name):
        return None


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model whose files are old, on a file system that shows changes: the clock of this process runs ahead."""
    known = content.LIVE_FILE_SYSTEMS | {content.file_system_type(tmp_path)}
    monkeypatch.setattr(content, "LIVE_FILE_SYSTEMS", known)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 100 * 10**9)
    directory = tmp_path / "models" / "m"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def sglang(monkeypatch, model):
    """SGLang's modules, and the options in effect."""
    arguments = Arguments(model_path=str(model), load_format="auto", page_size=64, kv_cache_dtype="auto")
    arguments.weight_cache_mode, arguments.custom_weight_loader = "off", []  # as without the option
    arguments.hicache_storage_backend_extra_config = '{"module_path": "kvbm.sglang_integration.storage"}'

    class WeightUpdater:
        pass

    class WeightChecker:
        pass

    class UnifiedRadixCache:
        """`taken`: what a prefetch has brought, and the tree has taken. `released`: what it has not."""

        def __init__(self, *, is_buffer_only=False):
            self.taken, self.released = [], []
            hold = SimpleNamespace(release_staged_hold=self.released.append)
            self.buffer_pipeline = hold if is_buffer_only else None

        def check_prefetch_progress(self, request):
            return True

        def _handle_prefetch_result(self, operation):
            self.taken.append(operation.handle)

        def release_aborted_request(self, request):
            self.released.append(request)

    manager = ModuleType(weight_updates.MANAGER)
    owners = {weight_updates.UPDATER: WeightUpdater, weight_updates.CHECKER: WeightChecker}
    owners[weight_updates.MANAGER, ""] = manager
    for place, names in weight_updates.CHANGES.items():
        for name in names:
            setattr(owners[place], name, lambda *arguments, _name=name: (_name, arguments[-1]))

    class Scheduler:
        def __init__(self, server_args, on_load=lambda: None):
            on_load()

    modules = {
        "runtime_context": {"get_server_args": lambda: arguments},
        "arg_groups.overrides": {"resolution_result": lambda args, name, default=None: getattr(args, name)},
        "arg_groups.arg_utils": {"namespace_of": lambda kind: SECTIONS},
        "configs.model_config": {"is_multimodal_model": lambda names: "LlavaForCausalLM" in names},
        weight_updates.UPDATER[0].removeprefix("sglang.srt."): {"WeightUpdater": WeightUpdater},
        weight_updates.CHECKER[0].removeprefix("sglang.srt."): {"WeightChecker": WeightChecker},
        weight_updates.TREE[0].removeprefix("sglang.srt."): {"UnifiedRadixCache": UnifiedRadixCache},
        weight_updates.MANAGER.removeprefix("sglang.srt."): {},
        "managers.scheduler": {"Scheduler": Scheduler},
    }
    packages = {"sglang", "sglang.srt"}
    for name in modules:
        parts = name.split(".")
        packages |= {".".join(["sglang", "srt", *parts[:end]]) for end in range(1, len(parts))}
    for name in sorted(packages):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    for name, values in modules.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    monkeypatch.setitem(sys.modules, weight_updates.MANAGER, manager)
    monkeypatch.setattr(weight_updates, "_WATCH", weight_updates._Watch())
    for name in ("_BEGUN", "_LOADED"):
        monkeypatch.setattr(loads, name, {})
    return SimpleNamespace(arguments=arguments, scheduler=Scheduler, owners=owners, tree=UnifiedRadixCache)


def started(sglang, on_load=lambda: None):
    loads.register()
    importlib.import_module("sglang.srt.managers.scheduler").Scheduler(sglang.arguments, on_load)


def described(**changes):
    facts, doubt = identity(storage_config({}, **changes), POOL)
    return describe(facts, doubt).result(timeout=30)


def test_the_same_engine_has_the_same_identity_and_no_doubt(sglang):
    started(sglang)
    first, doubt = described()
    assert doubt == ""
    assert described() == (first, "")
    assert str(sglang.arguments.model_path) not in json.dumps({k: v for k, v in first.items() if k != "model"})


HARMLESS = ("port", "nccl_port", "random_seed", "hicache_ratio", "max_total_tokens", "log_level")
OTHERS = ("kv_cache_dtype", "attention_backend", "page_size", "tp_size", "a_new_option")


@pytest.mark.parametrize("name", [*HARMLESS, *OTHERS])
def test_options_count_also_unknown_ones_except_those_that_cannot_change_kv(name, sglang):
    started(sglang)
    before = described()
    setattr(sglang.arguments, name, 4711)
    assert (described() == before) == (name in HARMLESS)


def test_variables_count_except_those_of_one_start(sglang, monkeypatch):
    started(sglang)
    before = described()
    monkeypatch.setenv("SGLANG_RUN_ID", "1795784")
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    monkeypatch.setenv("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0")
    assert described() == before
    monkeypatch.setenv("SGLANG_FP8_KERNEL", "x")
    assert described()[0] != before[0]


@pytest.mark.parametrize("changes", [{"tp_size": 2}, {"tp_rank": 1, "tp_size": 2}, {"pp_size": 2}, {"attn_cp_size": 2}])
def test_ranks_count(changes, sglang):
    started(sglang)
    assert described(**changes)[0] != described()[0]


def test_ranks_with_equal_pages_have_one_identity(sglang):
    started(sglang)
    ranks = [described(is_mla_model=True, tp_size=2, tp_rank=rank)[0] for rank in range(2)]
    assert ranks[0] == ranks[1]


def test_content_of_the_weights_counts(sglang, model):
    started(sglang)
    before, _ = described()
    (model / "model.safetensors").write_bytes(b"other")
    loads._LOADED.clear()
    started(sglang)
    assert described()[0] != before


@pytest.mark.parametrize(("trust_remote_code", "counts"), [(True, True), (False, False)])
def test_every_file_counts_if_the_code_of_the_model_runs(sglang, model, trust_remote_code, counts):
    sglang.arguments.trust_remote_code = trust_remote_code
    found = []
    for content_of_file in (b"1", b"2"):
        (model / "scales.dat").write_bytes(content_of_file)
        loads._LOADED.clear()
        started(sglang)
        found.append(described())
    assert [doubt for _, doubt in found] == ["", ""]
    assert (found[0] != found[1]) == counts


def with_variable(sglang, monkeypatch, directory):
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "own_code.models")


def with_plugin(sglang, monkeypatch, directory):
    (directory / "own-1.dist-info").mkdir()
    (directory / "own-1.dist-info" / "METADATA").write_text("Name: own\nVersion: 1\n")
    (directory / "own-1.dist-info" / "entry_points.txt").write_text("[sglang.srt.plugins]\none = own_code:register\n")


def with_class(sglang, monkeypatch, directory):
    own = importlib.import_module("own_code").Own
    monkeypatch.setitem(sys.modules, "sglang.srt.models.registry", SimpleNamespace(ModelRegistry=Models({"Own": own})))


class Models(SimpleNamespace):
    def __init__(self, models):
        self.models = models


def with_backend(sglang, monkeypatch, directory):
    backends = {"own": importlib.import_module("own_code").backend}
    name = "sglang.srt.layers.attention.attention_registry"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(ATTENTION_BACKENDS=backends))


@pytest.mark.parametrize("prepare", [with_variable, with_plugin, with_class, with_backend])
def test_code_from_outside_sglang_counts_by_content(sglang, monkeypatch, tmp_path, prepare):
    started(sglang)
    plain = described()
    assert "code" not in plain[0]
    monkeypatch.setattr(code, "process_start_ns", lambda pid=None: time.time_ns() + 100 * 10**9)
    path = tmp_path / "own_code.py"
    path.write_text("class Own: ...\ndef backend(runner): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_code", None)
    prepare(sglang, monkeypatch, tmp_path)
    first = described()
    path.write_text(path.read_text() + "# edited\n")
    assert first[1] == described()[1] == ""
    assert plain[0].get("code") != first[0]["code"] != described()[0]["code"]
    monkeypatch.setattr(code, "process_start_ns", lambda pid=None: 0)
    assert "code of `own_code`" in described()[1]


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("enable_lora", True, "adapter"),
        ("disaggregation_mode", "decode", "another engine"),
        ("custom_weight_loader", ["a.b"], "`custom_weight_loader`"),
        ("weight_cache_mode", "client", "`weight_cache_mode`"),
        ("load_format", "dummy", "load format `dummy`"),
        ("model_path", "no/such", "no local files"),
    ],
)
def test_doubts(option, value, reason, sglang):
    started(sglang)
    setattr(sglang.arguments, option, value)
    assert reason in described()[1]


def test_a_model_with_images_is_in_doubt(sglang, model):
    (model / "config.json").write_text(json.dumps({"architectures": ["LlavaForCausalLM"]}))
    started(sglang)
    assert "images" in described()[1]
    sglang.arguments.enable_multimodal = False
    assert described()[1] == ""


def test_an_sglang_without_known_options_is_in_doubt(sglang, monkeypatch):
    started(sglang)
    monkeypatch.delattr(sys.modules["sglang.srt.runtime_context"], "get_server_args")
    assert "unknown" in described()[1]


def test_files_that_change_while_sglang_loads_them_are_in_doubt(sglang, model):
    started(sglang, on_load=lambda: (model / "model.safetensors").write_bytes(b"changed"))
    assert "changed while" in described()[1]


class Heard:
    def __init__(self):
        self.causes = []

    def weights_may_change(self, cause):
        self.causes.append(cause)


CHANGES = [(place, name, cause) for place, names in weight_updates.CHANGES.items() for name, cause in names.items()]


@pytest.mark.parametrize("is_late", [False, True], ids=["before the load", "when the storage is attached"])
@pytest.mark.parametrize(("place", "name", "cause"), CHANGES, ids=[name for _, name, _ in CHANGES])
def test_every_way_to_change_the_weights_is_noticed_before_it_happens(place, name, cause, is_late, sglang):
    if not is_late:
        started(sglang)
    heard = Heard()
    doubt = weight_updates.watch(heard, is_attached=False)
    assert bool(doubt) == is_late
    owner = sglang.owners[place]
    answer = getattr(owner() if isinstance(owner, type) else owner, name)("request")
    assert len(heard.causes) == 1
    assert f"`{cause}`" in heard.causes[0]
    assert answer == (name, "request")
    later = Heard()
    assert f"`{cause}`" in weight_updates.watch(later, is_attached=True)
    assert later.causes == heard.causes, "a storage that is attached later stores nothing either"


def test_a_storage_that_is_attached_to_a_server_without_one_notices_changes(sglang):
    sglang.arguments.hicache_storage_backend_extra_config = None
    sglang.arguments.enable_hierarchical_cache = True
    started(sglang)
    heard = Heard()
    assert weight_updates.watch(heard, is_attached=True) == ""
    assert heard.causes == []
    sglang.owners[weight_updates.UPDATER]().update_weights_from_disk("request")
    assert len(heard.causes) == 1


@pytest.mark.parametrize("is_attached", [False, True])
def test_without_the_entry_point_the_weights_are_in_doubt(is_attached, sglang):
    """What SGLang computed before a storage was attached may have been stored as that of other weights."""
    heard = Heard()
    assert "SGLANG_PLUGINS" in weight_updates.watch(heard, is_attached=is_attached)
    assert len(heard.causes) == is_attached


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_version_without_these_methods_stores_nothing(is_attached, sglang):
    delattr(sglang.owners[weight_updates.UPDATER], "update_weights_from_ipc")
    started(sglang)
    heard = Heard()
    assert weight_updates.watch(heard, is_attached=is_attached)
    assert len(heard.causes) == 1


@pytest.mark.parametrize("is_buffer_only", [False, True])
def test_what_a_prefetch_brought_before_the_weights_changed_is_not_used_afterwards(is_buffer_only, sglang):
    started(sglang)
    heard = Heard()
    weight_updates.watch(heard, is_attached=False)
    tree = sglang.tree(is_buffer_only=is_buffer_only)
    tree._handle_prefetch_result(SimpleNamespace(handle="before"))
    assert (tree.taken, tree.released) == (["before"], [])
    sglang.owners[weight_updates.UPDATER]().update_weights_from_disk("request")
    tree._handle_prefetch_result(SimpleNamespace(handle="under way"))
    assert tree.check_prefetch_progress("held")
    assert tree.taken == ["before"]
    assert tree.released == (["under way", "held"] if is_buffer_only else ["under way"])


def test_prefetches_of_another_storage_are_left_alone(sglang):
    sglang.arguments.hicache_storage_backend_extra_config = None
    sglang.arguments.enable_hierarchical_cache = True
    started(sglang)
    tree = sglang.tree()
    sglang.owners[weight_updates.UPDATER]().update_weights_from_disk("request")
    tree._handle_prefetch_result(SimpleNamespace(handle="theirs"))
    assert tree.taken == ["theirs"]


def test_an_engine_without_kvbm_pays_nothing(sglang):
    sglang.arguments.hicache_storage_backend_extra_config = None
    started(sglang)
    assert not loads._BEGUN
    watched = (sglang.tree, *sglang.owners.values())
    assert not any(hasattr(method, ORIGINAL) for owner in watched for method in vars(owner).values())
