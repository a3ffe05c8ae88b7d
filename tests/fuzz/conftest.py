"""A few cases of each test in every run, always the same; `make fuzz` draws thousands of new ones."""

import os

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("FUZZ_CASES", "0"))

settings.register_profile("few", max_examples=8, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "many", max_examples=max(CASES, 1), deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("many" if CASES else "few")
