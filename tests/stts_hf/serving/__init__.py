"""Tests of the plugin for vLLM, whose settings come before anything imports it, or PyTorch."""

import os
from importlib.util import find_spec

if find_spec("vllm"):  # else the tests here are skipped, and others' settings left alone
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM's sampler alone takes a minute to compile
