"""Old copies and overwritten files are found in folders that look like environments; nothing of them is imported."""

import base64
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hetero.data.tried_versions import shipped_versions
from hetero.doctor.installation import check_installation, old_copies_note
from hetero.doctor.installed_files import OLD_FILES, changed_files, old_copies
from hetero.errors import ConfigError

ROOT = Path(__file__).parents[3]
OLD = {f"megatron/training/{name}": "" for name in ("__init__.py", *OLD_FILES)}
CORE = {"megatron/core/__init__.py": "core", "megatron/training/__init__.py": "theirs"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with nothing in it, the only one that this process looks at."""
    shipped_versions()  # reading them imports
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def install(site: Path, name: str, version: str, files: Mapping[str, str]) -> None:
    """Do what pip does with a wheel that has these files."""
    write(site, files)
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}\n")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    write(info, {"METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n", "RECORD": "".join(lines)})


def test_an_environment_without_faults(site: Path) -> None:
    install(site, "megatron-core", "0.19.2", CORE)
    install(
        site, "megatron-hetero", "0.3.0", {"megatron/pretrain/planning.py": "", "megatron/pretrain/emulation.py": ""}
    )
    assert old_copies({}) == ()
    assert changed_files() == ()
    assert old_copies_note({}) == ""


def test_an_installed_old_copy_is_named_with_the_commands(site: Path) -> None:
    install(site, "megatron-core", "0.19.2", CORE)
    install(site, "megatron-hetero", "0.2.0.dev0", OLD)
    (copy,) = old_copies({})
    assert copy.where == str(site / "megatron/training")
    assert copy.fix == (
        "run: pip uninstall -y megatron-hetero && pip install --force-reinstall --no-deps megatron-core==0.19.2 && "
        f"pip install -e '{ROOT}[train]'"
    )
    assert changed_files() == ("megatron/training/__init__.py",)
    assert old_copies_note({}) == (
        f"{site}/megatron/training is of an earlier megatron-hetero, whose harness was megatron/training; {copy.fix}"
    )


def test_an_old_copy_after_a_new_one_is_removed_by_its_files(
    site: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Such as one of the user's own site: pip would uninstall the first one that it finds, the new one."""
    other = tmp_path_factory.mktemp("other")
    sys.path.append(str(other))
    install(site, "megatron-core", "0.19.2", CORE)
    install(site, "megatron-hetero", "0.3.0", {"megatron/pretrain/planning.py": ""})
    install(other, "megatron-hetero", "0.2.0.dev0", {**OLD, "hetero/__init__.py": "", "../../bin/hetero": ""})
    (copy,) = old_copies({})
    assert copy.where == str(other / "megatron/training")
    assert copy.fix == f"run: rm -r {other}/megatron/training {other}/hetero"


def test_where_megatron_core_has_no_such_folder_it_stays_as_it_is(site: Path) -> None:
    install(site, "megatron-core", "0.16.1", {"megatron/core/__init__.py": "core"})
    install(site, "megatron-hetero", "0.2.0.dev0", OLD)
    (copy,) = old_copies({})
    assert "megatron-core" not in copy.fix


def test_files_that_no_package_owns_are_removed(site: Path) -> None:
    install(site, "megatron-core", "0.19.2", CORE)
    write(site, OLD)
    (copy,) = old_copies({})
    folder = site / "megatron/training"
    assert copy.fix == f"run: rm -r {folder} && pip install --force-reinstall --no-deps megatron-core==0.19.2"


def test_a_checkout_on_pythonpath_is_left_out_of_it(site: Path) -> None:
    write(site, OLD)
    (copy,) = old_copies({"PYTHONPATH": f"/nowhere:{site}"})
    assert copy.fix == f"leave {site} out of PYTHONPATH"


@pytest.mark.parametrize(("packages", "is_old"), [(("training",), True), (("pretrain",), False)])
def test_an_editable_installation_from_before_the_move(site: Path, packages: tuple[str, ...], is_old: bool) -> None:
    finder = "__editable___megatron_hetero_finder.py"
    mapping = {f"megatron.{name}": f"/src/megatron/{name}" for name in packages}
    install(site, "megatron-hetero", "0.2.0.dev0", {finder: f"MAPPING = {mapping}\n"})
    write(site / "megatron_hetero-0.2.0.dev0.dist-info", {"direct_url.json": '{"url": "file:///src", "dir_info": {}}'})
    assert [(copy.where, copy.fix) for copy in old_copies({})] == (
        [(str(site / finder), "run: pip install --no-deps -e /src")] if is_old else []
    )


def test_a_folder_that_may_not_be_looked_into_is_passed_over(site: Path) -> None:
    write(site, OLD)
    site.chmod(0)
    # Root may look into it, so this is asked as somebody else.
    code = """
import os, sys
from hetero.doctor.installed_files import old_copies
sys.path.insert(0, sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
print(old_copies({}))
"""
    command = [sys.executable, "-c", code, str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    site.chmod(0o700)
    assert (done.stdout, done.stderr) == ("()\n", "")


def test_packages_whose_metadata_was_lost_are_named(site: Path) -> None:
    """This project needs none: a checkout runs as it is."""
    install(site, "megatron-core", "0.16.1", CORE)
    install(site, "torch", "2.15.0", {})
    check_installation()
    (site / "torch-2.15.0.dist-info/METADATA").unlink()
    shutil.rmtree(site / "megatron_core-0.16.1.dist-info")
    with pytest.raises(
        ConfigError, match=r"^torch, megatron-core: can be imported, but .* run: pip install -e '/.*\[train\]'$"
    ):
        check_installation()


def test_megatron_cores_own_training_is_no_old_copy(site: Path) -> None:
    install(site, "megatron-core", "0.19.2", {**CORE, "megatron/training/training.py": "theirs"})
    assert old_copies({}) == ()


def test_files_that_are_missing_or_changed_are_named(site: Path) -> None:
    files = {**CORE, "megatron/training/training.py": "theirs", "megatron/core/data.txt": "read at run time"}
    install(site, "megatron-core", "0.19.2", files)
    (site / "megatron/training/training.py").unlink()
    (site / "megatron/core/__init__.py").write_text("changed")
    (site / "megatron/core/data.txt").unlink()
    assert changed_files() == ("megatron/core/__init__.py", "megatron/training/training.py")


def test_without_the_packages_there_is_nothing_to_find(site: Path) -> None:
    assert (old_copies({}), changed_files()) == ((), ())
