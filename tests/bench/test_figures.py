"""How measured speeds and samples become figures."""

import pytest

from bench.engine import figures_of, over_modes, turns_of
from bench.growth import SWEEPS, points, spread_layers
from bench.growth import turns_of as growth_turns
from bench.service_parts import Sample, slope
from bench.workload import N_LAYERS, Load


def speeds_of(**named):
    return {name: list(map(float, runs)) for name, runs in named.items()}


def test_ratios_are_of_medians_against_plain_and_against_the_lens():
    speeds = speeds_of(
        plain=[100, 90, 500], one_layer_both=[95, 1, 99], lens_one_layer_both=[50, 50, 50]
    )
    speeds |= {"1_spec": [80.0], "64_specs": [60.0]}
    figures = figures_of("eager", speeds)
    assert figures["eager.one_layer_both_vs_plain"] == 0.95
    assert figures["eager.one_layer_both_vs_vllm_lens"] == 1.9
    assert figures["eager.64_specs_vs_1_spec"] == 0.75


def test_a_figure_without_a_mode_is_the_worst_of_the_modes():
    figures = {"eager.64_specs_vs_1_spec": 0.97, "compiled.64_specs_vs_1_spec": 0.91}
    assert over_modes(figures) == {"64_specs_vs_1_spec": 0.91}


def test_a_capture_runs_before_what_is_held_against_it():
    for lens in (False, True):
        seen = set()
        for kind, turn in turns_of(lens=lens):
            if turn.steered and turn.captured:
                assert (kind, turn.captured) in seen, turn.name
            elif turn.captured:
                seen.add((kind, turn.captured))


@pytest.mark.parametrize("count", [0, 1, 2, 4, 8, 15, 30])
def test_layers_are_spread_over_the_whole_model(count):
    layers = spread_layers(count)
    assert len(set(layers)) == count
    assert list(layers) == sorted(layers)
    assert all(0 <= layer < N_LAYERS for layer in layers)
    assert not count or layers[-1] == N_LAYERS - 1


def test_a_sweep_leaves_out_what_a_smaller_load_cannot_hold():
    names = [turn.name for _, turn in growth_turns(list(SWEEPS), Load(16, 8, 8, 16))]
    assert "distinct.16" in names
    assert "distinct.64" not in names
    assert "positions.63" not in names


def test_points_of_a_sweep_are_shares_of_plain():
    speeds = {"plain": [200.0], "positions.4": [100.0], "distinct.4": [50.0]}
    assert points("positions", speeds) == {4: 0.5}


def test_the_slope_of_memory_looks_past_the_start():
    start = [Sample(second, 100 * second, 0) for second in range(30)]
    late = [Sample(second, 3000 + 2 * second, 0) for second in range(30, 121)]
    assert slope(start + late, skip=0.25) == pytest.approx(120)
