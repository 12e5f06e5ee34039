"""``hetero profile import`` reads published measurements into profiles and links."""

import argparse
from pathlib import Path
from typing import Any

from hetero.data.sailor import PROVENANCE, read_links, read_profiles
from hetero.errors import ConfigError
from hetero.serialization import save

LINKS = "links.json"


def add_profile(commands: Any) -> None:
    """Add the parser of ``hetero profile``."""
    parser = commands.add_parser("profile", help="profiles of devices: import published ones")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    imported = actions.add_parser(
        "import", help="read the tables that the authors of Sailor published (CSV) into profiles and links"
    )
    imported.add_argument("folder", type=Path, help="holds layer_profiles.csv, layer_memory.csv, collectives.csv, ...")
    imported.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="write profiles/*.json and links here"
    )
    imported.set_defaults(run=_import)


def _import(args: argparse.Namespace) -> int:
    profiles, links = read_profiles(args.folder), read_links(args.folder)
    folder = args.out / "profiles"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from None
    for profile in profiles:
        path = folder / f"{profile.model}.{profile.device}.json".lower()
        save(profile, path)
        print(f"{path}: {len(profile.times)} times, {profile.arithmetic}")
    save(links, args.out / LINKS)
    print(f"{args.out / LINKS}: {len(links.nodes)} node types, {len(links.pairs)} pairs of them")
    for note in links.provenance.notes[len(PROVENANCE.notes) :]:
        print(f"  {note}")
    return 0
