"""Bugs around the sizes of blocks: wrong numbers of a configuration, and comparisons that never differ."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="sizing-ignores-amx",
        bug="every CPU gets the reference backend of latent attention, whose blocks have 16 tokens",
        file="kvbm/engines/vllm/cpu.py",
        old="if has_amx_attention(cpu) and not is_reference:",
        new="if False:",
        fails="tests/sizing/test_sizing_on_cpu.py -k decide_the_block",
    ),
    Mutant(
        name="sizing-ignores-the-named-backend",
        bug="a CPU with AMX never uses the reference backend, also if the profile names it",
        file="kvbm/engines/vllm/cpu.py",
        old="if has_amx_attention(cpu) and not is_reference:",
        new="if has_amx_attention(cpu):",
        fails="tests/sizing/test_sizing_on_cpu.py -k choose_the_backend",
    ),
    Mutant(
        name="sizing-keeps-states-narrow-on-every-cpu",
        bug="states on a CPU with avx512_bf16 count half of what they have",
        file="kvbm/engines/vllm/cpu.py",
        old="else _BF16) in cpu.flags",
        new="else _BF16) in ()",
        fails="tests/sizing/test_sizing_on_cpu.py -k width_of_states",
    ),
    Mutant(
        name="sizing-takes-null-for-the-default",
        bug="`num_key_value_heads: null` counts as missing, and has the default of the family",
        file="kvbm/sizing/families/facts.py",
        old="{**(defaults or {}), **given}",
        new="{**(defaults or {}), **{name: value for name, value in given.items() if value is not None}}",
        fails="tests/sizing/test_sizing_vllm.py -k left_out",
    ),
    Mutant(
        name="sizing-trusts-any-model-type",
        bug="a configuration of another family is read with the reader of its architecture",
        file="kvbm/sizing/families/table.py",
        old="    if facts.model_type not in model_types:\n",
        new="    if False:\n",
        fails="tests/sizing/test_sizing_vllm.py -k family",
    ),
    Mutant(
        name="sizing-ignores-compressed-tensors",
        bug="a checkpoint of compressed-tensors with an 8-bit cache has a size of 16 bits",
        file="kvbm/sizing/checkpoint.py",
        old='    return "fp8"\n',
        new="    return None\n",
        fails="tests/sizing/test_sizing_vllm.py -k bits",
    ),
    Mutant(
        name="sizing-adds-facts-beside-the-text-model",
        bug="facts of the outer configuration replace those of the language model",
        file="kvbm/sizing/families/facts.py",
        old="        given = text_facts(model_config)\n",
        new="        given = {**text_facts(model_config), **model_config}\n",
        fails="tests/sizing/test_sizing_vllm.py -k beside",
    ),
    Mutant(
        name="sizing-strict-only-warns",
        bug="`serve --strict` starts an engine whose host tier is smaller than G1",
        file="kvbm_cli/profile/machine_check.py",
        old="    if not is_strict:\n",
        new="    if True:\n",
        fails="tests/cli/test_transcripts.py -k 'size and small and not program'",
    ),
    Mutant(
        name="sizing-compares-nothing",
        bug="sizes that the engine reports are compared with themselves",
        file="kvbm_cli/serve/reported_sizes.py",
        old='("bytes in a block", self.block_bytes, sizing.block_bytes)',
        new='("bytes in a block", self.block_bytes, self.block_bytes)',
        fails="tests/cli/test_size_command.py -k one_line",
    ),
    Mutant(
        name="sizing-forgets-the-activations",
        bug="the estimate of G1 leaves no memory for activations",
        file="kvbm/sizing/gpu.py",
        old=" - self.weight_bytes // ranks - ACTIVATION_BYTES",
        new=" - self.weight_bytes // ranks",
        fails="tests/cli/test_transcripts.py -k 'size and estimate and not program'",
    ),
    Mutant(
        name="sizing-stores-a-running-state",
        bug="a sequence in host memory counts with two snapshots, as in G1",
        file="kvbm/engines/vllm/sizing_groups.py",
        old="return 1 if self.kind is LayerKind.STATE else self.blocks(tokens, in_flight=0)",
        new="return self.blocks(tokens, in_flight=0)",
        fails="tests/cli/test_transcripts.py -k 'size and snapshot and not program'",
    ),
    Mutant(
        name="sizing-takes-any-interval",
        bug="an interval of snapshots between two boundaries is accepted, and vLLM does not start",
        file="kvbm/engines/vllm/state_settings.py",
        old="elif self.block_tokens is not None and interval % self.block_tokens:",
        new="elif False:",
        fails="tests/sizing/test_state_settings.py -k between",
    ),
)
