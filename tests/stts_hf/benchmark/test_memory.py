"""How much memory a control group leaves, from files as the kernel writes them."""

import pytest

from stts_hf.benchmark import memory

UNLIMITED = 9223372036854771712


def write(folder, **files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def write_v2(folder, limit, usage, cached=0) -> None:
    write(folder, memory__max=limit, memory__current=usage, memory__stat=f"anon 5\ninactive_file {cached}")


def write_v1(folder, limit, usage, cached=0) -> None:
    files = {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": usage}
    write(folder, **files, memory__stat=f"inactive_file 1\ntotal_inactive_file {cached}")


@pytest.fixture
def free(tmp_path):
    """What is free to a process of the given groups, by the files under the mount point."""

    def free(*lines: str) -> int | None:
        (tmp_path / "cgroup").write_text("\n".join(lines) + "\n")
        return memory.free_in_control_groups(str(tmp_path / "cgroup"), str(tmp_path / "mounted"))

    return free


def test_version_2_is_limit_less_usage_but_for_cached_files(free, tmp_path):
    write_v2(tmp_path / "mounted" / "pod" / "box", 1000, 700, 100)
    assert free("0::/pod/box") == 400


def test_version_1_is_limit_less_usage_but_for_cached_files(free, tmp_path):
    write_v1(tmp_path / "mounted" / "memory" / "job", 1000, 700, 50)
    assert free("12:cpu,cpuacct:/job", "4:hugetlb,memory:/job", "0::/") == 350


def test_the_tightest_group_counts(free, tmp_path):
    write_v2(tmp_path / "mounted" / "job" / "step", 1000, 100)
    write_v2(tmp_path / "mounted" / "job", 500, 300)
    write_v2(tmp_path / "mounted", "max", 0)
    assert free("0::/job/step") == 200


def test_a_container_sees_its_group_as_the_root(free, tmp_path):
    write_v1(tmp_path / "mounted" / "memory", 1000, 700)
    assert free("4:memory:/docker/0123") == 300


def test_no_limit_is_none(free, tmp_path):
    write_v2(tmp_path / "mounted" / "box", "max", 700)
    assert free("0::/box") is None
    assert free("7:blkio:/box") is None


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert memory.free_in_control_groups(str(tmp_path / "none"), str(tmp_path)) is None


def test_more_use_than_allowed_leaves_nothing(free, tmp_path):
    write_v2(tmp_path / "mounted" / "box", 500, 700)
    assert free("0::/box") == 0


@pytest.mark.parametrize(("group", "expected"), [(10, 10), (UNLIMITED, None), (None, None)])
def test_the_lower_of_machine_and_group_is_free(monkeypatch, group, expected):
    monkeypatch.setattr(memory, "_kilobytes", lambda path, field: 2**30)
    monkeypatch.setattr(memory, "free_in_control_groups", lambda: group)
    assert memory.free_memory() == (2**30 if expected is None else expected)
