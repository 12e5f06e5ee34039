"""``hetero profile`` measures devices and this host, and reads published measurements into profiles and links."""

import argparse
from pathlib import Path
from typing import Any

from hetero.commands.child import run_in_child
from hetero.data.sailor import PROVENANCE, read_links, read_profiles
from hetero.extras import require
from hetero.output_files import make_folder
from hetero.profiling.options import add_options, check_options, words_of
from hetero.profiling.profiled_plan import check_cuts
from hetero.profiling.run_options import add_run_options, check_run_options, words_of_run
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec
from hetero.standard_output import answer

LINKS = "links.json"


def add_profile(commands: Any) -> None:
    """Add the parser of ``hetero profile``."""
    parser = commands.add_parser("profile", help="profiles: measure devices and this host, import published ones")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    run = actions.add_parser(
        "run",
        help="measure the layers of a model on this device, or on each kind of device: torchrun, srun",
        description=(
            "Measure the layers of a model as a training would have them, on this device, and write profiles that "
            "hetero plan --profile takes. What was measured before stays, and the same command goes on. As ranks of a "
            "launch (srun hetero profile run ..., torchrun ... -m hetero profile run ...) one rank of each kind of "
            "device measures, and then all measure their links."
        ),
    )
    add_run_options(run)
    run.set_defaults(run=_run)
    imported = actions.add_parser(
        "import", help="read the tables that the authors of Sailor published (CSV) into profiles and links"
    )
    imported.add_argument("folder", type=Path, help="holds layer_profiles.csv, layer_memory.csv, collectives.csv, ...")
    imported.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="write profiles/*.json and links here"
    )
    imported.set_defaults(run=_import)
    host = actions.add_parser(
        "host",
        help="measure this host: memory, rate of updates, copies",
        description=(
            "Measure the host that this runs on: memory, AdamW's rate by number of threads, copies in memory and to "
            "and from a GPU, GPUs per PCIe switch, NUMA nodes. The host should have nothing else to do."
        ),
    )
    add_options(host)
    host.set_defaults(run=_host)


def _run(args: argparse.Namespace) -> int:
    check_run_options(args)
    if args.cluster is not None:
        load(ClusterSpec, args.cluster)
    check_cuts(args.model, args.tp or ())
    require("train", asked_by="hetero profile run")
    return run_in_child("hetero.profiling.run", words_of_run(args), args, python_flags=("-W", "ignore"))


def _host(args: argparse.Namespace) -> int:
    check_options(args)
    require("train", asked_by="hetero profile host")
    return run_in_child("hetero.profiling", words_of(args), args)


def _import(args: argparse.Namespace) -> int:
    profiles, links = read_profiles(args.folder), read_links(args.folder)
    folder = args.out / "profiles"
    make_folder(folder, asked_by="--out")
    written: list[str] = []
    for profile in profiles:
        path = folder / f"{profile.model}.{profile.device}.json".lower()
        save(profile, path)
        print(f"{path}: {len(profile.times)} times, {profile.arithmetic}")
        written.append(str(path))
    save(links, args.out / LINKS)
    print(f"{args.out / LINKS}: {len(links.nodes)} node types, {len(links.pairs)} pairs of them")
    for note in links.provenance.notes[len(PROVENANCE.notes) :]:
        print(f"  {note}")
    answer(args, lambda: {"profiles": written, "links": str(args.out / LINKS)})
    return 0
