"""Makes the tests of others importable; without them, none of this folder's tests are collected."""

import sys

from tests.suites.fetch import STAND_INS, folder_of

MARKS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "torch_compile_test",
    "generate",
)

if all(folder_of(name).exists() for name in STAND_INS):
    sys.path[:0] = [str(folder_of(name)) for name in STAND_INS]
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: transformers' own")
