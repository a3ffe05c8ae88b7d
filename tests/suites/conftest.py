"""Makes transformers' tests importable; without them, none of this folder's tests are collected."""

import sys

from tests.suites.fetch import FOLDER

MARKS = ("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "torch_compile_test")

if FOLDER.exists():
    sys.path.insert(0, str(FOLDER))
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: transformers' own")
