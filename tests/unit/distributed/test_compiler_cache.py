"""Compiled code is read from a folder that no other user can have written."""

import os
import tempfile
from pathlib import Path

import pytest

from hetero.distributed.compiler_cache import use_own_compiler_cache
from hetero.errors import ConfigError


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_default_is_a_folder_that_nobody_else_can_enter(temporary_folder: Path) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):
            environment: dict[str, str] = {}
            use_own_compiler_cache(environment)
            folder = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
            assert folder.parent == temporary_folder
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_folder_that_others_may_write_is_refused_by_name(name: str, temporary_folder: Path) -> None:
    given = temporary_folder / "given"
    environment = {name: str(given)}
    use_own_compiler_cache(environment)
    given.chmod(0o777)
    with pytest.raises(ConfigError, match=f"given: every user may write it .* or set {name} to a folder of your own"):
        use_own_compiler_cache(environment)


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_a_folder_that_is_set_and_not_there_is_made_and_is_accepted_again(
    name: str, umask: int, temporary_folder: Path
) -> None:
    """torch would make it as the umask says: with 002, the default of some systems, the next run would refuse it."""
    given = temporary_folder / "above" / "given"
    before = os.umask(umask)
    try:
        for _ in range(2):
            use_own_compiler_cache({name: str(given)})
            given.mkdir(exist_ok=True)
    finally:
        os.umask(before)
    assert given.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_set_and_cannot_be_made_is_named(temporary_folder: Path) -> None:
    (temporary_folder / "file").touch()
    environment = {"TRITON_CACHE_DIR": str(temporary_folder / "file" / "given")}
    with pytest.raises(ConfigError, match=r"given: the folder cannot be made: .*; set TRITON_CACHE_DIR to a folder of"):
        use_own_compiler_cache(environment)


def test_what_another_user_has_made_first_is_refused(temporary_folder: Path) -> None:
    """Here as a file, and as a link."""
    place = temporary_folder / f"hetero-compiled-{os.geteuid()}"
    place.touch()
    with pytest.raises(ConfigError, match=r"the folder cannot be made: .*TORCHINDUCTOR_CACHE_DIR to a folder of your"):
        use_own_compiler_cache({})
    place.unlink()
    (temporary_folder / "other").mkdir()
    place.symlink_to("other")
    with pytest.raises(ConfigError, match="it is a link, or belongs to another user; set TORCHINDUCTOR_CACHE_DIR"):
        use_own_compiler_cache({})
