import pytest

from stts_hf.shares import percent


@pytest.mark.parametrize(("share", "written"), [(0.5, "50%"), (0.004, "0.4%"), (0.07, "7%"), (0.0, "0%"), (1, "100%")])
def test_a_share_is_written_as_it_was_given(share, written):
    assert percent(share) == written
