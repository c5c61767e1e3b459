"""Fitted projections in use: the folder, the models that they are refused for, and what the pruned model does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

import stageprune as sp
from helpers import CACHE, InFloat64, close, generate, left_padded, surface, tokens
from reference.kv_fit import rows_of
from reference.prefill_oracle import gated_logits
from stageprune.evaluate.calibration import Reading, count_held_out, solve
from stageprune.families.decoder import find_decoder
from stageprune.files import OutputFileError
from stageprune.prefill.projections import RECORD, TENSORS, Correction, KVProjections, identity
from stageprune.records import write_record
from zoo import ARCHITECTURES, BY_NAME, Architecture

LENGTH = 17
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (24, 31, 40, 25)]
by_name = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)


def calibrated(
    model: Any, folder: Path, layers: tuple[int, ...] = (4, 5), ridge: float = 0.01, rank: int | None = None
) -> sp.PrefillOnlyPruning:
    """Fit, write, and read as a setting."""
    reading = Reading(model, layers)
    reading.read(PROMPTS)
    corrections = {layer.layer: layer.correction for layer in solve(reading, ridge, rank)}
    record = {"model": identity(find_decoder(model), reading.own), "settings": {}, "measured": []}
    KVProjections(corrections, record).save(folder)
    return sp.load(folder)


def zeroed(folder: Path) -> None:
    """Make the corrections nothing."""
    projections = KVProjections.load(folder)
    corrections = {
        index: Correction(tuple(torch.zeros_like(part) for part in one.matrix), torch.zeros_like(one.bias))
        for index, one in projections.corrections.items()
    }
    record = {name: projections.record[name] for name in ("model", "settings", "measured")}
    KVProjections(corrections, record).save(folder)


@torch.no_grad()
def last_logits(model: Any, method: sp.PrefillOnlyPruning, cache: Any = None) -> torch.Tensor:
    ids, mask = left_padded([LENGTH, LENGTH - 6])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with sp.prune(model, method) as handle, handle.stage(prefill=LENGTH - 1):
        return model(**inputs, logits_to_keep=1, **{CACHE: DynamicCache() if cache is None else cache}).logits


@by_name
def test_what_the_pruned_model_caches(architecture: Architecture, tmp_path: Path) -> None:
    """Values, which nothing rotates: the corrected linear layers of what arrives, also behind an earlier run."""
    model, layers = architecture.build(), (1, 2, 4)
    ids = tokens(1, LENGTH)
    with InFloat64():
        method = calibrated(model, tmp_path / "fit", layers)
        assert method == sp.PrefillOnlyPruning(layers=layers, projections=str(tmp_path / "fit"))
        cache = DynamicCache()
        with torch.no_grad(), sp.prune(model, method) as handle, handle.stage(prefill=LENGTH - 1):
            model(ids, logits_to_keep=1, **{CACHE: cache})
        rows = rows_of(model, layers, [ids[:, :-1]])
    projections = KVProjections.load(tmp_path / "fit")
    for index in layers:
        inputs, answers, _ = rows[index]
        correction = projections.corrections[index]
        features = answers + inputs @ correction.whole.T + correction.bias
        cached = cache.layers[index].values[0, :, : LENGTH - 1]
        expected = features[:, -cached.shape[0] * cached.shape[2] :].view(LENGTH - 1, *cached[:, 0].shape)
        assert close(cached, expected.transpose(0, 1)) < 1e-10, index
        if index != 1:
            assert close(answers, features) > 1e-3, "the correction does something"


@by_name
def test_no_correction_changes_nothing(architecture: Architecture, tmp_path: Path) -> None:
    model = architecture.build()
    with InFloat64():
        method = calibrated(model, tmp_path / "fit")
        fitted = last_logits(model, method)
        zeroed(tmp_path / "fit")
        same = last_logits(model, method)
        unfitted = last_logits(model, sp.PrefillOnlyPruning())
    assert close(same, unfitted) < 1e-12
    assert close(fitted, unfitted) > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_name
def test_low_precision(architecture: Architecture, dtype: torch.dtype, tmp_path: Path) -> None:
    """A fit in the type of the weights serves, and no correction is the layers' own weights, bit for bit."""
    model = architecture.build(dtype)
    method = calibrated(model, tmp_path / "fit")
    cache = DynamicCache()
    assert last_logits(model, method, cache).isfinite().all()
    assert cache.layers[4].values.dtype == dtype
    zeroed(tmp_path / "fit")
    allowed = 1e-5 if dtype == torch.float32 else 0.05
    assert close(last_logits(model, method), last_logits(model, sp.PrefillOnlyPruning())) < allowed


class Zero(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(inputs)


def test_exact_recovery(tmp_path: Path) -> None:
    """When the full model's input of a skipped layer is linear in what arrives, its prompt is the full model's."""
    model = BY_NAME["olmo2"].build()  # nothing in front of its linear layers
    middle = model.model.layers[4]
    middle.post_attention_layernorm = Zero()
    middle.mlp = nn.Linear(32, 32).double()
    middle.post_feedforward_layernorm = nn.Identity()
    ids = tokens(2, LENGTH)
    with InFloat64(), torch.no_grad():
        method = calibrated(model, tmp_path / "fit", ridge=1e-12)
        dense = model(ids).logits[:, -1]
        pruned = gated_logits(model, (4, 5), LENGTH - 1, input_ids=ids)[:, -1]
        with sp.prune(model, method) as handle, handle.stage(prefill=LENGTH - 1):
            fitted = model(ids, logits_to_keep=1, **{CACHE: DynamicCache()}).logits[:, -1]
    assert close(pruned, dense) > 1e-2
    assert close(fitted, dense) < 1e-5, "the folder holds float32"


@pytest.mark.parametrize("rank", [None, 3])
def test_a_folder_comes_back_as_it_was(tmp_path: Path, rank: int | None) -> None:
    model = BY_NAME["qwen2"].build()
    reading = Reading(model, (2, 4, 5))
    reading.read(PROMPTS)
    corrections = {layer.layer: layer.correction for layer in solve(reading, 0.01, rank)}
    record = {"model": identity(find_decoder(model), reading.own), "settings": {"a": [1, None]}, "measured": []}
    ours = KVProjections(corrections, record)
    for _ in range(2):  # also in the place of an earlier one
        ours.save(tmp_path / "fit")
        theirs = KVProjections.load(tmp_path / "fit")
        assert [path.name for path in tmp_path.iterdir()] == ["fit"]
        assert sorted(path.name for path in (tmp_path / "fit").iterdir()) == [TENSORS, RECORD]
        assert theirs.layers == ours.layers == (2, 4, 5)
        assert {name: theirs.record[name] for name in record} == record
        for index, one in corrections.items():
            assert len(theirs.corrections[index].matrix) == (1 if rank is None else 2)
            for mine, other in zip(
                (*one.matrix, one.bias),
                (*theirs.corrections[index].matrix, theirs.corrections[index].bias),
                strict=True,
            ):
                assert torch.equal(mine, other)


@pytest.fixture(scope="module")
def fitted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted") / "fit"
    calibrated(BY_NAME["llama"].build(torch.float32), folder)
    return folder


@pytest.fixture
def folder(fitted_once: Path, tmp_path: Path) -> Path:
    """Fitted for layers 4 and 5 of the llama model in float32."""
    return shutil.copytree(fitted_once, tmp_path / "fit")


def resealed(folder: Path, version: int = 1, kind: str = "stageprune-kv-projections", **changes: Any) -> None:
    record = json.loads((folder / RECORD).read_text())
    content = {name: value for name, value in record.items() if name not in ("kind", "version", "checksum")}
    write_record(folder / RECORD, kind, version, content | changes)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def one_tensor_less(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    del tensors["layers.5.bias"]
    save_file(tensors, folder / TENSORS)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors truncated": (lambda folder: cut(folder / TENSORS), "is damaged"),
    "tensors altered": (lambda folder: flip(folder / TENSORS), "is damaged"),
    "tensors empty": (lambda folder: (folder / TENSORS).write_bytes(b""), "is damaged"),
    "tensors missing": (lambda folder: (folder / TENSORS).unlink(), "No such file"),
    "a tensor missing": (one_tensor_less, "is damaged"),
    "record truncated": (lambda folder: cut(folder / RECORD), "is damaged or no JSON"),
    "record altered": (
        lambda folder: (folder / RECORD).write_text(
            (folder / RECORD).read_text().replace('"layers": [\n    4', '"layers": [\n    3')
        ),
        "is damaged: its content does not have the checksum",
    ),
    "record empty": (lambda folder: (folder / RECORD).write_text(""), "is damaged or no JSON"),
    "record missing": (lambda folder: (folder / RECORD).unlink(), "No such file"),
    "another version": (lambda folder: resealed(folder, version=2), "of version 2; this stageprune reads version 1"),
    "another kind": (lambda folder: resealed(folder, kind="stageprune-importance"), "no stageprune-kv-projections"),
    "layers without tensors": (lambda folder: resealed(folder, layers=[3, 4]), "no complete folder"),
    "layers of a wrong type": (lambda folder: resealed(folder, layers=7), "no complete folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_error_and_the_model_stays(folder: Path, damage: str) -> None:
    model = BY_NAME["llama"].build(torch.float32)
    before = replaced(model)
    setting = sp.load(folder)
    spoil, message = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(sp.ResultFileError, match=message) as caught:
        sp.prune(model, setting)
    assert str(folder) in str(caught.value)
    assert replaced(model) == before


def test_sp_load(folder: Path, tmp_path: Path) -> None:
    setting = sp.load(str(folder))
    assert setting == sp.PrefillOnlyPruning(layers=(4, 5), projections=str(folder))
    assert sp.PrefillOnlyPruning.from_json(setting.to_json()) == setting
    assert sp.PrefillOnlyPruning(layers=(4, 5), projections=folder) == setting
    with pytest.raises(sp.SettingError, match="dtype is about a model"):
        sp.load(folder, dtype="float32")
    cut(folder / TENSORS)
    with pytest.raises(sp.ResultFileError, match="damaged"):
        sp.load(folder)
    (folder / RECORD).unlink()
    with pytest.raises(sp.ModelLoadError, match="--projections"):
        sp.load(folder)


@pytest.mark.parametrize("value", [3, "", b"folder", ["folder"], True])
def test_wrong_settings(value: Any) -> None:
    with pytest.raises(sp.SettingError, match="projections must name a folder"):
        sp.PrefillOnlyPruning(projections=value)


def test_projections_without_projection() -> None:
    with pytest.raises(sp.SettingError, match="kv_projection=False"):
        sp.PrefillOnlyPruning(projections="folder", kv_projection=False)


def llama(**changes: Any) -> Any:
    return Architecture("llama", "LlamaForCausalLM", "LlamaConfig", changes).build(torch.float32)


def with_one_weight_changed() -> Any:
    model = llama()
    with torch.no_grad():
        model.model.layers[5].self_attn.v_proj.weight[3, 7] *= 1.5
    return model


def replaced(model: Any) -> dict[str, Any]:
    """The methods that pruning replaces, where they are; `surface` without its garbage collection, which takes long."""
    return {name: (vars(part).get("forward"), vars(part).get("generate")) for name, part in model.named_modules()}


OTHERS = {
    "another seed": (lambda: BY_NAME["llama"].build(torch.float32, seed=1), "the K/V weights of the skipped layers"),
    "one weight of a skipped layer": (with_one_weight_changed, "the K/V weights of the skipped layers"),
    "another size": (lambda: llama(num_key_value_heads=4), "its configuration differs"),
    "another rotary base": (
        lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "configuration",
    ),
    "more layers": (lambda: llama(num_hidden_layers=8), "its number of layers is 6, not 8"),
    "another architecture": (
        lambda: BY_NAME["qwen2"].build(torch.float32),
        "its architecture is LlamaForCausalLM, not",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused_and_stays(folder: Path, other: str) -> None:
    build, message = OTHERS[other]
    model = build()
    before = replaced(model)
    with pytest.raises(sp.UnsupportedModelError, match=f"fitted for another model: .*{message}"):
        sp.prune(model, sp.load(folder))
    assert replaced(model) == before
    with sp.prune(model, sp.PrefillOnlyPruning()):
        generate(model, tokens(1, 9), 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_same_model_in_another_type_is_the_same(folder: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    model = BY_NAME["llama"].build(torch.float32).to(dtype)
    with sp.prune(model, sp.load(folder)):
        generate(model, tokens(1, 9), 2)
    model = BY_NAME["llama"].build(torch.float32)
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    with sp.prune(again, sp.load(folder)):
        generate(again, tokens(1, 9), 2)


@pytest.mark.parametrize("layers", ["last", "first", (5,), (3, 4, 5), ()])
def test_other_layers_are_refused(folder: Path, layers: Any) -> None:
    model = BY_NAME["llama"].build(torch.float32)
    method = sp.PrefillOnlyPruning(ratio=0.5, layers=layers, projections=str(folder))
    before = replaced(model)
    with pytest.raises(sp.SettingError, match=r"are for layers \[4, 5\], but the setting skips"):
        sp.prune(model, method)
    assert replaced(model) == before
    rule = sp.PrefillOnlyPruning(ratio=1 / 3, projections=str(folder))
    with sp.prune(model, rule) as handle:
        assert handle.report().skipped_layers == (4, 5)


@torch.no_grad()
def test_detached_the_model_is_the_original_bit_for_bit(folder: Path) -> None:
    model = BY_NAME["llama"].build(torch.float32)
    before, state = surface(model), {name: value.clone() for name, value in model.state_dict().items()}
    ids = tokens(2, LENGTH)
    dense = generate(model, ids, 3)
    with sp.prune(model, sp.load(folder)):
        pruned = generate(model, ids, 3)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert surface(model) == before
    assert torch.equal(generate(model, ids, 3)[1], dense[1])
    assert not torch.equal(pruned[1], dense[1])


def test_extra_memory_is_reported(folder: Path) -> None:
    model = BY_NAME["llama"].build(torch.float32)
    features = 2 * 2 * 8  # keys and values of two heads
    with sp.prune(model, sp.PrefillOnlyPruning()) as handle:
        plain = handle.report()
    with sp.prune(model, sp.load(folder)) as handle:
        report = handle.report()
    assert plain.extra_weight_bytes == 0
    assert report.extra_weight_bytes == 2 * features * (32 + 1) * 4
    assert f"extra weight memory: {report.extra_weight_bytes:,} bytes" in str(report)
    assert report.pruned_flops == plain.pruned_flops


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt-neox", "falcon-7b", "gemma3"])
def test_weights_offloaded_by_accelerate(name: str, tmp_path: Path) -> None:
    """Leaf modules whose weights live elsewhere until they are called."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, ids = BY_NAME[name].build(torch.float32), tokens(1, 12)
    plain = Reading(model, (4, 5))
    plain.read(PROMPTS)
    method = calibrated(model, tmp_path / "fit")
    with sp.prune(model, method):
        expected = generate(model, ids, 4)[1]
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    assert all(parameter.device.type == "meta" for parameter in offloaded.parameters())
    reading = Reading(offloaded, (4, 5))
    reading.read(PROMPTS)
    for key, tensor in plain.tensors().items():
        assert torch.equal(reading.tensors()[key], tensor), key
    with sp.prune(offloaded, method):
        assert torch.equal(generate(offloaded, ids, 4)[1], expected)


def test_layers_dispatched_by_a_device_map(tmp_path: Path) -> None:
    """accelerate's hooks on whole layers, of which some are offloaded."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, ids = BY_NAME["llama"].build(torch.float32), tokens(1, 12)
    method = calibrated(model, tmp_path / "fit")
    with sp.prune(model, method):
        expected = generate(model, ids, 4)[1]
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    places = dict.fromkeys(parts, "cpu") | {f"model.layers.{index}": "cpu" for index in range(5)}
    places["model.layers.5"] = "disk"
    model.tie_weights()
    dispatched = accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=str(tmp_path / "offload"), force_hooks=True
    )
    assert dispatched.model.layers[5].self_attn.k_proj.weight.device.type == "meta"
    with sp.prune(dispatched, method):
        assert torch.equal(generate(dispatched, ids, 4)[1], expected)
    other = calibrated(dispatched, tmp_path / "other")
    assert (tmp_path / "other" / TENSORS).read_bytes() == (tmp_path / "fit" / TENSORS).read_bytes()
    assert other.layers == method.layers


@pytest.mark.parametrize("taken", ["file", "folder", "missing/fit", ".", ".."])
def test_names_that_cannot_be_written(folder: Path, tmp_path: Path, taken: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("")
    with pytest.raises(OutputFileError, match="cannot write"):
        KVProjections.load(folder).save(Path(taken))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "fit", "folder"]


def test_only_a_folder_of_projections_alone_is_replaced(folder: Path, tmp_path: Path) -> None:
    """`stageprune plan` writes a `stageprune.json`, too, which can lie beside a checkpoint."""
    projections = KVProjections.load(folder)
    (tmp_path / "model").mkdir()
    sp.save_settings(tmp_path / "model" / RECORD, sp.PrefillOnlyPruning())
    (folder / "notes.txt").write_text("mine")
    for target in (tmp_path / "model", folder):
        before = {path.name: path.read_bytes() for path in target.iterdir()}
        with pytest.raises(OutputFileError, match="something else has that name"):
            projections.save(target)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit", "model"]


def test_a_link_to_a_folder_stays_a_link(folder: Path, tmp_path: Path) -> None:
    projections = KVProjections.load(folder)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):
        projections.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fit", "link", "real"]


def test_a_write_that_fails_leaves_the_earlier_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stageprune.prefill import projections

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    loaded = KVProjections.load(folder)
    replace = projections.os.replace

    def fail(source: Any, target: Any) -> None:
        if Path(target) == folder:
            monkeypatch.undo()
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(projections.os, "replace", fail)
    with pytest.raises(OutputFileError, match="No space left"):
        loaded.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["fit"]


def test_the_run_measures_what_it_says() -> None:
    """The shares of variance, over rows; the prompts that are held out do not touch the fit."""
    model = BY_NAME["llama-bias"].build()
    with InFloat64():
        reading = Reading(model, (4, 5), attention=False)
        seen: list[int] = []
        reading.read(PROMPTS, seen.append)
        layer = list(solve(reading, 0.01, 2))[1]
        rows = {
            text: rows_of(model, (4, 5), [torch.tensor([prompt]) for prompt in prompts])[5]
            for text, prompts in (("held_out", PROMPTS[:1]), ("fit", PROMPTS[1:]))
        }
    assert seen == [1, 2, 3, 4]
    assert reading.fit[5].weight == sum(map(len, PROMPTS[1:]))
    full = Correction.of(*reading.fit[5].solve(0.01))
    for text, (inputs, answers, targets) in rows.items():
        for part, features in (("keys", slice(16)), ("values", slice(16, None))):
            share, errors = layer.share(part, text), targets - answers
            variance = (targets - targets.mean(0))[:, features].square().sum()
            for correction, value in ((None, share.own), (full, share.full_rank), (layer.correction, share.fitted)):
                left = errors if correction is None else errors - inputs @ correction.whole.T - correction.bias
                assert value == pytest.approx(float(left[:, features].square().sum() / variance), rel=1e-6)
            if text == "fit":
                assert share.full_rank < share.fitted < share.own


def test_wrong_runs() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    with pytest.raises(sp.SettingError, match="no layer is skipped"):
        Reading(model, ())
    with pytest.raises(sp.SettingError, match="at least 2 samples"):
        Reading(model, (5,)).read(PROMPTS[:1])
    assert [count_held_out(count) for count in (2, 9, 14, 15, 200)] == [1, 1, 1, 2, 20]
    reading = Reading(model, (5,))
    reading.read(PROMPTS)
    with pytest.raises(sp.SettingError, match="rank must be less than 32"):
        list(solve(reading, 0.1, 32))
    with torch.no_grad():
        model.model.embed_tokens.weight[max(PROMPTS[0])] = torch.inf  # beyond the tokens that layers are probed with
    with pytest.raises(sp.NumericsError, match="sample 0 are not finite"):
        Reading(model, (4, 5)).read(PROMPTS)
