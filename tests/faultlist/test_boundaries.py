"""What cannot be steered is refused at boot by name, and nothing of vLLM is changed for others."""

from __future__ import annotations

import ast
import errno
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.catalog.architectures import ARCHITECTURES
from app.steering.spec import Site
from tests.completions.models import a_validator, problem_of
from tests.faultlist.asking import EVERY_ROW, WIDTH, prompt_of, request
from tests.rules.source_tree import ROOT, sources
from worker.engine import environment
from worker.engine.environment import (
    UnsupportedEngineError,
    check_device,
    check_signature,
    vllm_version,
)
from worker.engine.settings import EngineSettings
from worker.outcomes import Errored

VLLM_ENTRY_POINTS = "vllm.general_plugins"
STEERABLE: dict[str, Any] = {
    "speculative_config": None,
    "parallel_config": {
        "use_sequence_parallel_moe": False,
        "enable_hc_sp": False,
        "enable_dbo": False,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_size": 1,
        "nnodes": 1,
    },
    "cache_config": {"kv_sharing_fast_prefill": False},
    "use_v2_model_runner": False,
}


def settings(**changes: Any) -> Any:
    """The part of vLLM's configuration that is looked at, every refusable thing turned off."""

    def space(values: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(
            **{key: space(v) if isinstance(v, dict) else v for key, v in values.items()}
        )

    merged = {
        key: {**value, **changes.pop(key, {})} if isinstance(value, dict) else value
        for key, value in STEERABLE.items()
    }
    return space({**merged, **changes})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"use_v2_model_runner": True}, "V2 model runner"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config": {"enable_dbo": True}}, "micro-batching"),
        ({"parallel_config": {"use_sequence_parallel_moe": True}}, "sequence parallelism"),
        ({"parallel_config": {"enable_hc_sp": True}}, "sequence parallelism"),
        ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill context parallelism"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode context parallelism"),
        ({"parallel_config": {"data_parallel_size": 2}}, "data parallelism"),
        ({"parallel_config": {"nnodes": 2}}, "several machines"),
        ({"cache_config": {"kv_sharing_fast_prefill": True}}, "fast prefill"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_setting_that_moves_rows_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    from worker.engine.runner import refuse_unserved

    refuse_unserved(settings())
    with pytest.raises(UnsupportedEngineError, match=name):
        refuse_unserved(settings(**changes))


def test_a_pipeline_on_gpus_is_refused_until_it_has_been_seen_there() -> None:
    from worker.engine.runner import refuse_unseen_on_gpus

    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(UnsupportedEngineError, match="pipeline parallelism on a GPU"):
        refuse_unseen_on_gpus(config)


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0.0"])
def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    assert vllm_version().startswith("0.32.")
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda _name: version)
    with pytest.raises(UnsupportedEngineError, match=version):
        vllm_version()


def test_a_machine_where_vllm_finds_no_device_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    check_device()
    monkeypatch.setattr(platforms, "_current_platform", UnspecifiedPlatform())
    with pytest.raises(UnsupportedEngineError, match="no NVIDIA GPU is visible"):
        check_device()


def test_no_sampler_is_chosen_on_cuda_that_a_compiler_must_make_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment.prepare_environment()
    from vllm.platforms.interface import UnspecifiedPlatform
    from vllm.v1.sample.ops import topk_topp_sampler

    class Cuda(UnspecifiedPlatform):
        def is_cuda(self) -> bool:
            return True

    monkeypatch.setattr(topk_topp_sampler, "current_platform", Cuda())
    assert not topk_topp_sampler.flashinfer_sampler_supported()


def test_a_method_with_other_parameters_is_refused() -> None:
    def moved(num_scheduled_tokens: Any, scheduler_output: Any) -> None: ...

    with pytest.raises(UnsupportedEngineError, match="moved"):
        check_signature(moved, ("scheduler_output", "num_scheduled_tokens"))


def test_a_model_that_is_not_in_the_table_offers_no_site(tmp_path: Path) -> None:
    assert "DeepseekV4ForCausalLM" not in ARCHITECTURES
    validator = a_validator(tmp_path, architecture="DeepseekV4ForCausalLM", sites=())
    _, message = problem_of(validator, captures=[{"name": "x", "layers": [0]}])
    assert "resid_post" in message


@pytest.mark.parametrize(
    ("name", "runs_as"),
    [("DeepseekV4ForCausalLM", "DeepseekV4ForCausalLM"), ("LlamaForCausalLM", "Llama4Text")],
    ids=["architecture", "implementation"],
)
def test_an_architecture_or_implementation_that_is_not_known_is_refused_by_name(
    name: str, runs_as: str
) -> None:
    from worker.engine.architectures import refuse_other_implementation

    loaded = type(runs_as, (torch.nn.Module,), {})()
    config: Any = SimpleNamespace(hf_config=SimpleNamespace(architectures=[name]))
    with pytest.raises(UnsupportedEngineError, match=runs_as):
        refuse_other_implementation(loaded, config)


def test_z_is_not_served_where_heads_are_spread_over_ranks() -> None:
    from worker.engine.architectures import site_widths

    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        hf_text_config=SimpleNamespace(to_dict=dict),
        get_hidden_size=lambda: 64,
        get_head_size=lambda: 32,
        model_arch_config=SimpleNamespace(total_num_attention_heads=4),
    )

    def served(ranks: int) -> dict[Site, int]:
        parallel = SimpleNamespace(tensor_parallel_size=ranks)
        config: Any = SimpleNamespace(model_config=model, parallel_config=parallel)
        return site_widths(config)

    assert served(1) == {**dict.fromkeys(Site, 64), Site.z: 128}
    assert served(2) == {site: 64 for site in Site if site is not Site.z}


def test_a_full_disk_fails_a_request_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space is reserved at once: a write of a row can neither fail nor wait for a reader."""
    from worker.engine.captured import make_regions

    spec = request(prompt_of(3), captures=tuple(replace(EVERY_ROW[0], name=n) for n in "ab"))
    regions = make_regions(spec, tmp_path / "whole", {Site.resid_post: WIDTH}, "float32")
    for _, region in regions:
        assert region.path.stat().st_blocks * 512 >= region.shape.size
        region.path.unlink()
    reserve, calls = os.posix_fallocate, []

    def full(descriptor: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        make_regions(spec, tmp_path / "short", {Site.resid_post: WIDTH}, "float32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_never_given_out(
    tmp_path: Path, dtype: str, number: float
) -> None:
    from worker.engine.captured import make_regions, read_regions

    spec = request(prompt_of(3))
    ((capture, region),) = make_regions(spec, tmp_path / "rows", {Site.resid_post: WIDTH}, dtype)
    region.data[:], region.written[:] = 0, 1
    assert not isinstance(read_regions([(capture, region)], 5, dtype), Errored)
    bits = torch.tensor([number], dtype=getattr(torch, dtype))
    stored = bits.view(torch.uint16).numpy() if dtype != "float32" else bits.numpy()
    region.data[2, 4, 9] = stored[0]
    outcome = read_regions([(capture, region)], 5, dtype)
    assert getattr(outcome, "code", None) == "non_finite_activations"


def test_compiled_code_is_kept_apart_by_what_changes_it() -> None:
    eager = EngineSettings(scratch="a", parent_pid=1, in_process=False, mode="eager")
    compiled = replace(eager, mode="compiled")
    assert eager.compute_hash() != compiled.compute_hash()
    assert eager.compute_hash() == replace(eager, scratch="b", parent_pid=2).compute_hash()


def test_no_plugin_of_ours_is_loaded_into_other_peoples_engines() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert VLLM_ENTRY_POINTS not in project.get("entry-points", {})


def test_no_request_costs_a_call_into_the_engine_process() -> None:
    """Vectors are files, rows are mapped files, flags are a mapped board: nothing is sent."""
    for source in sources("worker"):
        names = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
        assert "collective_rpc" not in names, source.name


def test_no_class_of_vllm_is_assigned_to() -> None:
    for source in sources("worker"):
        foreign = {
            alias.asname or alias.name
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
            for alias in node.names
        }
        for node in ast.walk(source.tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                owner = target.value if isinstance(target, ast.Attribute) else None
                assert not (isinstance(owner, ast.Name) and owner.id in foreign), source.name


def test_nothing_in_the_layer_reads_a_tensor_back_or_loops_over_requests() -> None:
    """A pass waits for nobody: `.item()` and `.tolist()` would stop a GPU at each layer."""
    (source,) = [item for item in sources("worker") if item.module == "worker.steering.layer"]
    names = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    assert not names & {"item", "tolist", "cpu", "numpy", "nonzero"}
