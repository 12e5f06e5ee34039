"""The data that ships: who measured it, what is in it, and that it can be priced and simulated as it is."""

import pytest

from hetero.data import PublishedLinks, shipped_links, shipped_profiles
from hetero.errors import ConfigError
from hetero.serialization import from_json, to_json
from hetero.spec.profile import Profile

STORE = shipped_profiles()


def test_three_models_on_seven_devices() -> None:
    assert {(profile.model, profile.device) for profile in STORE} == {
        ("GPT-Neo-2.7B", "A100-40"),
        ("GPT-Neo-2.7B", "A100-80"),
        ("GPT-Neo-2.7B", "GH200"),
        ("GPT-Neo-2.7B", "V100-16"),
        ("OPT-30B", "A100-40"),
        ("OPT-30B", "V100-16"),
        ("OPT-350M", "A100-40"),
        ("OPT-350M", "A100-80"),
        ("OPT-350M", "GH200"),
        ("OPT-350M", "RTX-2080Ti"),
        ("OPT-350M", "RTX-3090"),
        ("OPT-350M", "Titan-RTX"),
        ("OPT-350M", "V100-16"),
    }


@pytest.mark.parametrize("profile", list(STORE), ids=lambda p: f"{p.model} {p.device}")
def test_every_profile_says_whose_it_is(profile: Profile) -> None:
    assert "MIT" in profile.provenance.licence
    assert "ETH Zurich" in profile.provenance.licence
    assert "Sailor" in profile.provenance.measured_by
    assert profile.provenance.source.startswith("https://github.com/eth-easl/sailor")
    assert from_json(Profile, to_json(profile), source="test") == profile


def test_gpt_neo_was_measured_without_its_projection_and_opt_30b_on_a100_without_tf32() -> None:
    assert {p.model for p in STORE if not p.head_has_projection} == {"GPT-Neo-2.7B"}
    arithmetics = {(p.model, p.device): p.arithmetic for p in STORE}
    assert arithmetics["OPT-30B", "A100-40"] == "fp32"
    assert arithmetics["OPT-350M", "A100-40"] == "tf32"
    assert arithmetics["OPT-350M", "V100-16"] == "fp32", "it has no TF32"


def test_an_update_costs_the_same_per_parameter_in_every_model_of_a_device() -> None:
    """This is how the published column was understood; see hetero.data.sailor."""
    rates: dict[str, list[float]] = {}
    for profile in STORE:
        for update in profile.updates:
            memory = profile.memory_of(update.kind, tp=update.tp)
            if update.kind == "block" and memory is not None and memory.parameters > 10**7:
                rates.setdefault(profile.device, []).append(update.update_s / memory.parameters)
    for found in rates.values():
        assert max(found) < 1.15 * min(found)


def test_links_of_all_devices_but_one() -> None:
    links = shipped_links()
    assert {node.device for node in links.nodes} == {
        "A100-40",
        "GH200",
        "RTX-2080Ti",
        "RTX-3090",
        "Titan-RTX",
        "V100-16",
    }
    assert "MIT" in links.provenance.licence
    assert from_json(PublishedLinks, to_json(links), source="test") == links


def test_nodes_can_be_built_from_them() -> None:
    node_type = shipped_links().node_type("GH200", gpus_per_node=4, count=2)
    assert (node_type.nics_per_node, node_type.num_devices) == (4, 8)
    assert shipped_links().node_type("GH200", gpus_per_node=2).nics_per_node == 2
    assert [group.size for group in node_type.all_reduce_inside_node] == [2, 4]


def test_the_slow_lines_are_slow() -> None:
    """One Gbit/s Ethernet at the RTX 3090, and the line between two regions."""
    links = shipped_links()
    ethernet = links.of("RTX-3090").between_nodes
    assert ethernet is not None
    assert ethernet.bytes_per_s(10**8) == pytest.approx(0.115e9, rel=0.1)
    (zone,) = links.zones
    assert zone.link.bytes_per_s(10**8) < 0.5e9


def test_a_device_that_nobody_published() -> None:
    with pytest.raises(ConfigError, match=r"no published links of nodes with 'L40S' \(known: A100-40, "):
        shipped_links().of("L40S")


def test_no_shipped_pair_has_another_pairs_link() -> None:
    """Titan RTX with RTX 2080 Ti has what either has with its own kind, and the file says what stood there before."""
    links = shipped_links()
    (pair,) = (each for each in links.pairs if set(each.node_types) == {"RTX-2080Ti", "Titan-RTX"})
    own = [links.of(device).between_nodes for device in pair.node_types]
    slower = min(each.bytes_per_s(10**8) for each in own if each is not None)
    assert pair.link.bytes_per_s(10**8) == pytest.approx(slower, rel=0.05)
    assert [note for note in links.provenance.notes if "replaced by the pair's own for 2 GPUs" in note]
