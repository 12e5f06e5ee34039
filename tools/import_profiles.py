"""Writes the shipped profiles and links from the tables that the authors of Sailor published.

python tools/import_profiles.py FOLDER_OF_CSV [--out hetero/data]
"""

import argparse
from pathlib import Path

from hetero.data.sailor import read_links, read_profiles
from hetero.serialization import save

PACKAGE_DATA = Path(__file__).parents[1] / "hetero" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds layer_profiles.csv, layer_memory.csv, collectives.csv, ...")
    parser.add_argument("--out", type=Path, default=PACKAGE_DATA)
    args = parser.parse_args()
    profiles = read_profiles(args.folder)
    (args.out / "profiles").mkdir(parents=True, exist_ok=True)
    for profile in profiles:
        name = f"{profile.model}.{profile.device}.json".lower()
        save(profile, args.out / "profiles" / name)
        print(f"{name}: {len(profile.times)} times, {profile.arithmetic}")
    save(read_links(args.folder), args.out / "links.json")


if __name__ == "__main__":
    main()
