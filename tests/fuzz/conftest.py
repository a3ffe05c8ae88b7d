"""A few cases of each test in every run, always the same; `make fuzz` draws thousands of new ones.

A case that hangs ends the run after `LIMIT` seconds: what was drawn and where each thread stands are printed.
"""

import faulthandler
import functools
import os
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("FUZZ_CASES", "0"))
LIMIT = 60

settings.register_profile("few", max_examples=8, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "many", max_examples=max(CASES, 1), deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("many" if CASES else "few")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Puts each case of hypothesis under the limit, whose `deadline` only looks at cases that end."""
    drawn = getattr(getattr(item, "obj", None), "hypothesis", None)
    if drawn is None:
        return (yield)
    test = drawn.inner_test
    with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        stderr = os.fdopen(os.dup(2), "w")  # the real one, which a test that never ends would not give back

    @functools.wraps(test)
    def limited(*args: Any, **kwargs: Any) -> None:
        name = threading.Timer(LIMIT, lambda: print(f"\n{item.nodeid} hangs on {kwargs}", file=stderr, flush=True))
        faulthandler.dump_traceback_later(LIMIT + 1, exit=True, file=stderr)  # works even if a thread keeps the GIL
        name.start()
        try:
            test(*args, **kwargs)
        finally:
            name.cancel()
            faulthandler.cancel_dump_traceback_later()

    drawn.inner_test = limited
    try:
        return (yield)
    finally:
        drawn.inner_test = test
        stderr.close()
