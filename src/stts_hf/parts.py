"""The former name of `stts_hf.model_parts`, until every import has the new one."""

from stts_hf.model_parts import *  # noqa: F403
