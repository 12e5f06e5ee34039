#!/usr/bin/env bash
# Since torch 2.15 a group that only its members create makes the next group of all ranks wait until it times out.
#
# Expected: new_group(..., use_local_synchronization=True) is called by its members alone, as its documentation says, and
#     groups of all ranks can be made before and after it.
# Happens:  2.15 counts such a group where it is made, and that count is the name of the next group of the world: ranks
#     outside of the first group use another name, and each side waits for the other until the group's limit. Shown here
#     are the counts alone. new_group with the same option on all ranks, each for a group of its own, keeps them equal.
# Version:  torch 2.13.0 and 2.15.0, gloo, two processes (Python 3.12, named by PYTHON312). Source: _hash_ranks_to_str
#     and _process_group_name in torch/distributed/distributed_c10d.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'END'
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    counts = [None, None]
    dist.all_gather_object(counts, dist.distributed_c10d._world.group_count)
    if rank == 0:
        print(torch.__version__.partition("+")[0], "counts on both ranks:", *counts)
    dist.destroy_process_group()


if __name__ == "__main__":
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(rank_main, (server.port,), 2)
END
for version in 2.13.0 2.15.0; do
    "${PYTHON312:-python3.12}" -m venv "$folder/venv"
    "$folder/venv/bin/pip" install -q "torch==$version" numpy==2.4.6
    "$folder/venv/bin/python" -W ignore "$folder/try.py" 2> /dev/null
    rm -rf "$folder/venv"
done | tee "$folder/seen"
# Seen:
diff "$folder/seen" - <<'END'
2.13.0 counts on both ranks: 1 1
2.15.0 counts on both ranks: 2 1
END
